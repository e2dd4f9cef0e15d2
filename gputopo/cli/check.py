"""``gputopo check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gputopo.cli.options import output_option, source_option, timeout_option, write
from gputopo.errors import GputopoError

if TYPE_CHECKING:
    from gputopo.expect.promise import Kept

LIMIT = 1 << 20


@click.command("check")
@source_option
@click.option("--expect", metavar="FILE", help="The promise: a TOML file, or profile:NAME.")
@click.option("--learn", is_flag=True, help="Write the promise that this machine keeps, as TOML.")
@click.option("--list-profiles", is_flag=True, help="List the built-in promises and exit.")
@click.option("--format", "style", type=click.Choice(["text", "json"]), default="text")
@output_option
@timeout_option
def command(
    source: str | None,
    expect: str | None,
    learn: bool,
    list_profiles: bool,
    style: str,
    output: str | None,
    timeout: float,
) -> int:
    """Hold a machine to a promise: so many GPUs, NV18 between all, links that can do Gen5 x16 ...

    Exits with 0 if all is kept, with 1 if something is broken, with 3 if nothing is broken but
    something could not be told.
    """
    from gputopo.expect import promise as promises

    if list_profiles:
        for name, title in profiles().items():
            click.echo(f"profile:{name:<20} {title}")
        return 0
    if learn == (expect is not None):
        raise click.UsageError("one of --expect and --learn is needed")
    wanted = promises.load(read_promise(expect), expect) if expect is not None else None

    from gputopo import scan

    topology = scan(source, timeout=timeout)
    if wanted is None:
        write(promises.render(promises.learn(topology)).encode(), output)
        return 0
    lines = promises.check(wanted, topology)
    if style == "json":
        from gputopo.expect.document import check_document
        from gputopo.report.json import encode

        write(encode(check_document(topology, wanted, lines)), output)
    else:
        write(_text(lines).encode(), output)
    if any(line.kept is False for line in lines):
        return 1
    return 3 if any(line.kept is None for line in lines) else 0


def _text(lines: list[Kept]) -> str:
    from gputopo.text import clean

    found: list[str] = []
    kept = 0
    for line in lines:
        if line.kept:
            kept += 1
            continue
        word = "unknown" if line.kept is None else "BROKEN "
        found.append(
            f"{word} {line.promise} of {clean(line.subject)}: "
            f"expected {clean(line.expected)}, seen {clean(line.seen)}"
        )
    return "\n".join([*found, f"{kept} of {len(lines)} promises kept"]) + "\n"


def profiles() -> dict[str, str]:
    """The built-in promises by name, with their titles."""
    from importlib.resources import files

    from gputopo.expect.promise import load

    folder = files("gputopo") / "expect" / "profiles"
    return {
        entry.name.removesuffix(".toml"): load(entry.read_bytes(), entry.name).title
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }


def read_promise(name: str) -> bytes:
    """The bytes of a promise. Raises GputopoError for a name that leads to none."""
    import os
    import stat
    from importlib.resources import files

    if name.startswith("profile:"):
        wanted = name.removeprefix("profile:")
        entry = files("gputopo") / "expect" / "profiles" / f"{wanted}.toml"
        if "/" in wanted or not entry.is_file():
            raise GputopoError(
                f"no profile is called {wanted!r}; there are: {', '.join(profiles())}"
            )
        return entry.read_bytes()
    try:
        status = os.stat(name)
        if not stat.S_ISREG(status.st_mode):
            raise GputopoError(f"{name}: not a regular file")
        if status.st_size > LIMIT:
            raise GputopoError(f"{name}: too large for a promise ({status.st_size} bytes)")
        with open(name, "rb") as file:
            return file.read(LIMIT)
    except OSError as error:
        raise GputopoError(f"{name}: {error.strerror}") from None
