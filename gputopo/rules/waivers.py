"""Waivers: what a site has decided to live with, each with a reason and a last day, in TOML::

[[waiver]]
code = "NIC505"
subject = "gpu*"
reason = "one HCA by purchase"
expires = 2027-03-31
"""

from __future__ import annotations

import datetime
import fnmatch
import os
import stat

import msgspec

from gputopo import toml
from gputopo.errors import GputopoError
from gputopo.rules.finding import Report, Waived, Waiver
from gputopo.text import clean

LIMIT = 1 << 20
"""Bytes of a waiver file."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    waiver: list[Waiver] = []


def load(path: str) -> list[Waiver]:
    """Reads a waiver file. Raises GputopoError with one line for what is wrong."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LIMIT:
            raise GputopoError(f"{path}: not a regular file of at most {LIMIT >> 20} MiB")
        with open(path, "rb") as file:
            data = file.read(LIMIT)
    except OSError as error:
        raise GputopoError(f"{path}: {error.strerror}") from None
    waivers = toml.decode(data, _File, path).waiver
    for waiver in waivers:
        if not waiver.reason.strip():
            raise GputopoError(f"{path}: the waiver of {clean(waiver.code)} gives no reason")
    return waivers


def apply(report: Report, waivers: list[Waiver], today: datetime.date | None = None) -> Report:
    """The report with waived findings set aside; a waiver past its day waives nothing.

    A finding is waived only if every one of its subjects is: the rest of a folded finding would
    be lost otherwise.
    """
    day = today or datetime.date.today()
    valid = [waiver for waiver in waivers if waiver.expires is None or day <= waiver.expires]
    waived = [
        Waived(finding=finding, waiver=waiver)
        for finding in report.findings
        for waiver in _waivers_of(finding.code, finding.subjects, valid)
    ]
    gone = {id(entry.finding) for entry in waived}
    return msgspec.structs.replace(
        report,
        findings=[finding for finding in report.findings if id(finding) not in gone],
        waived=waived,
        expired=[waiver for waiver in waivers if waiver not in valid],
    )


def _waivers_of(code: str, subjects: list[str], waivers: list[Waiver]) -> list[Waiver]:
    """One waiver that covers all subjects, or those that do so together (the first is kept)."""
    fitting = [waiver for waiver in waivers if waiver.code.upper() == code]
    covering = [
        next((w for w in fitting if fnmatch.fnmatchcase(subject, w.subject)), None)
        for subject in subjects
    ]
    return [covering[0]] if covering and covering[0] and None not in covering else []
