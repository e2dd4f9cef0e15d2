"""Options and exits that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import click

from gputopo.errors import GputopoError
from gputopo.rules.finding import SEVERITIES, Report

source_option = click.option(
    "--from",
    "source",
    metavar="SOURCE",
    help="A recording, root directory, hwloc archive, fixture:NAME, or - (default: this machine).",
)


def _seconds(ctx: click.Context, parameter: click.Parameter, value: float) -> float:
    """Refuses NaN, which is in click's range since it is less than nothing."""
    if value != value:
        raise click.BadParameter("not a number", ctx, parameter)
    return value


timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=1, max=3600),
    callback=_seconds,
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


PROBE_BROKE = ("PRB001", "PRB002")
"""Findings that something is unknown, which is less than to know that it is wrong."""


def exit_code(report: Report, fail_on: str) -> int:
    """0, 1 or 3 as the findings and the broken probes say."""
    if fail_on == "never":
        return 0
    counted = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    found = {finding.code for finding in report.findings if finding.severity in counted}
    if found.difference(PROBE_BROKE):
        return 1
    broken = any(skip.broken and skip.severity in counted for skip in report.skipped)
    return 3 if found or broken else 0


PLAIN = str.maketrans({"│": "|", "├": "+", "└": "+", "…": "~", "\ufffd": "?"})
"""What stands for the few characters beyond ASCII that gputopo itself prints."""


def encode_text(text: str, encoding: str) -> bytes:
    """A report for a terminal of any encoding: what it does not have becomes plain."""
    try:
        return text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.translate(PLAIN).encode("ascii", "replace")


def write(data: bytes, output: str | None) -> None:
    """Writes to standard output (``-`` or None), or to a file: whole, or not at all.

    A file gets its name when it is complete. What is there and no plain file (a device, a pipe) is
    written to as it is.
    """
    if output in (None, "-"):
        sys.stdout.flush()
        _write_all(sys.stdout.buffer, data)
        return
    assert output is not None
    target = os.path.realpath(output)
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            # A pipe that nobody reads is an error at once, not a wait.
            handle = os.open(target, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(handle, True)
            with os.fdopen(handle, "wb") as file:
                _write_all(file, data)
            return
        temporary = f"{target}.{os.getpid()}.tmp"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                _write_all(file, data)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise GputopoError(f"cannot write {output}: {error.strerror}") from None


def _write_all(file: BinaryIO, data: bytes) -> None:
    """Writes all of it: with PYTHONUNBUFFERED set a file takes what a pipe has room for."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    file.flush()


def prefixes(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> Any:
    """Codes given as ``PCI101,NIC``, checked for their form."""
    import re

    codes = [code.strip().upper() for item in value for code in item.split(",") if code.strip()]
    if not codes:
        return codes
    from gputopo.rules.registry import rules

    # A code that no rule has would switch the check off (--only) without a word.
    names = {rule.name.upper(): rule.code for rule in rules().values()}
    codes = [names.get(code, code) for code in codes]
    for code in codes:
        known = any(rule.startswith(code) for rule in rules())
        if not re.fullmatch(r"[A-Z]{3}\d{0,3}", code) or not known:
            raise click.BadParameter(f"{code!r} is no rule code", ctx, parameter)
    return codes


def code_option(name: str, text: str) -> Callable[[Any], Any]:
    """``--only``/``--ignore``: codes or families, comma-separated or repeated."""
    return click.option(name, multiple=True, callback=prefixes, metavar="CODES", help=text)
