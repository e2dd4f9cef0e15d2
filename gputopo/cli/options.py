"""Options and exits that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import click

from gputopo.errors import GputopoError
from gputopo.rules.finding import SEVERITIES, Report

source_option = click.option(
    "--from",
    "source",
    metavar="SOURCE",
    help="A recording, root directory, hwloc archive, fixture:NAME, or - (default: this machine).",
)

timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=1, max=3600),
    default=20.0,
    show_default=True,
    metavar="SECONDS",
    help="Budget of a live scan; what was cut is said in the report.",
)

fail_on_option = click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "note", "never"]),
    default="error",
    show_default=True,
    help="Exit with 1 when a finding is at least this bad.",
)

output_option = click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write there instead of to standard output: whole, or not at all.",
)


def exit_code(report: Report, fail_on: str) -> int:
    """0, 1 or 3 as the findings and the broken probes say."""
    if fail_on == "never":
        return 0
    gate = SEVERITIES.index(fail_on)
    if any(SEVERITIES.index(finding.severity) <= gate for finding in report.findings):
        return 1
    if any(skip.broken and SEVERITIES.index(skip.severity) <= gate for skip in report.skipped):
        return 3
    return 0


def write(data: bytes, output: str | None) -> None:
    """Writes to standard output, or to a file that is complete before it gets its name."""
    if output is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    import tempfile

    directory = os.path.dirname(os.path.abspath(output))
    try:
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=".gputopo-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, output)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise GputopoError(f"cannot write {output}: {error.strerror}") from None


def prefixes(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> Any:
    """Codes given as ``PCI101,NIC``, checked for their form."""
    import re

    codes = [code.strip().upper() for item in value for code in item.split(",") if code.strip()]
    for code in codes:
        if not re.fullmatch(r"[A-Z]{3}\d{0,3}", code):
            raise click.BadParameter(f"{code!r} is no rule code", ctx, parameter)
    return codes


def code_option(name: str, text: str) -> Callable[[Any], Any]:
    """``--only``/``--ignore``: codes or families, comma-separated or repeated."""
    return click.option(name, multiple=True, callback=prefixes, metavar="CODES", help=text)
