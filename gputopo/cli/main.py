"""The ``gputopo`` command: finds the subcommand; turns refusals into one line and exit code 2."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from typing import Any

import click

from gputopo import __version__
from gputopo.errors import GputopoError

BROKEN = 3
"""What a probe or gputopo itself broke at could not be told."""

INTERRUPTED = 130
BROKEN_PIPE = 141
"""As a shell says of a process that SIGINT or SIGPIPE ended."""

COMMANDS = {
    "scan": "Show this machine, or a recorded one, and what is wrong with it.",
    "record": "Write all that a scan reads into one file.",
    "diff": "Show in what two machines differ.",
    "check": "Hold a machine to a site's own promise.",
    "explain": "Explain a finding: why, how to verify by hand, how to mend.",
    "schema": "Print the JSON Schema of a command's JSON output.",
}
"""Subcommands and their one-line help; the module of each is imported only when it runs."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, so that --help stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        import importlib

        module = importlib.import_module(f"gputopo.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command. A reader of the output that goes away (head, less) ends it quietly."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # click would exit with 1, which says that something is wrong with the machine.
            _leave_output()
            sys.exit(BROKEN_PIPE)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 nothing at --fail-on or above, 1 something, 2 bad input, 3 unknown: "
    "a probe broke.",
)
@click.version_option(__version__, "-V", "--version", message="gputopo %(version)s")
def cli() -> None:
    """What this GPU server is made of, what is wrong with it, and how to mend it."""


def main(arguments: list[str] | None = None) -> Any:
    """Runs the command line and exits."""
    # A scan makes some 50,000 objects, keeps them, and ends: collecting costs a tenth of its time.
    gc.disable()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _ended)
    if sys.stdout is None:
        _say("standard output is closed")
        sys.exit(GputopoError.exit_code)
    try:
        sys.exit(cli.main(args=arguments, prog_name="gputopo", standalone_mode=False) or 0)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        ctx = getattr(error, "ctx", None)
        hint = f" (see {ctx.command_path} --help)" if ctx is not None else ""
        _say(f"{error.format_message()}{hint}")
        sys.exit(error.exit_code)
    except GputopoError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        # Standard output that takes no more: a full disk, a terminal that is gone.
        _leave_output()
        _say(f"cannot go on: {error}")
        sys.exit(GputopoError.exit_code)
    except Exception:
        # A fault of gputopo must look neither like a finding (1) nor like health (0).
        import traceback

        from gputopo.text import clean_block

        click.echo(clean_block(traceback.format_exc()), err=True)
        _say("this is a fault of gputopo itself; a recording of the machine helps to mend it")
        sys.exit(BROKEN)


def _ended(number: int, frame: object) -> None:
    """TERM and HUP end the command as an exception does: what it started is ended first."""
    sys.exit(128 + number)


def _say(text: str) -> None:
    from gputopo.text import clean

    click.echo(f"gputopo: {clean(text, 500)}", err=True)


def _leave_output() -> None:
    """Lets nothing more be written to standard output, at exit neither."""
    import os

    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
