"""What a rule says: a finding with its evidence, cost and remedy, or that it could not be asked."""

from __future__ import annotations

import datetime
from typing import Literal

import msgspec

Severity = Literal["error", "warning", "note"]
Confidence = Literal["measured", "reported", "inferred"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""From worst to mildest."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One observation: the file, call or command, the value seen there, and the value expected."""

    source: str
    seen: str
    expected: str


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """What mends it: commands to paste (may be none), what they need, and how to undo them."""

    text: str
    commands: list[str] = []
    needs: str = ""
    undo: str = ""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What it costs in words, and how that was derived. ``gbytes_per_s`` is the loss, one way."""

    text: str
    derivation: str
    gbytes_per_s: float | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule yields for one fault. ``severity`` None means the rule's own."""

    subjects: list[str]
    summary: str
    evidence: list[Evidence]
    confidence: Confidence
    remedy: Remedy
    cost: Cost | None = None
    severity: Severity | None = None


class Skip(Exception):
    """Raised by a rule that cannot tell; its text is the reason."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict with the name of its rule."""

    code: str
    name: str
    severity: Severity
    confidence: Confidence
    subjects: list[str]
    summary: str
    evidence: list[Evidence]
    cost: Cost | None
    remedy: Remedy


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that could not be asked. ``broken``: because a probe timed out or failed."""

    code: str
    name: str
    severity: Severity
    reason: str
    broken: bool


class Waiver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finding that a site has decided to live with, on these subjects, until a day."""

    code: str
    subject: str = "*"
    """Node id; ``*`` and ``?`` stand for any characters."""
    reason: str
    expires: datetime.date | None = None
    """The last day on which it holds."""


class Waived(msgspec.Struct, frozen=True, kw_only=True):
    """A finding that is waived, and the waiver that does it."""

    finding: Finding
    waiver: Waiver


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that the rules said, worst first."""

    findings: list[Finding]
    skipped: list[Skipped]
    asked: int
    """Rules that gave an answer, findings or none."""
    waived: list[Waived] = []
    expired: list[Waiver] = []
    """Waivers whose day is past: what they waived is among the findings again."""
