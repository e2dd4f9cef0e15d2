"""What must and must not be said of a machine, and what was said: misses and false alarms."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from gputopo.host.base import Host
from gputopo.rules import check
from gputopo.rules.finding import Finding
from gputopo.scanning import scan_host
from gputopo.topology.graph import Topology

ROOT = Path(__file__).resolve().parents[2]


class Must(msgspec.Struct, frozen=True, kw_only=True):
    """A code that must be found, and the nodes that it must name: all of them, and no other of
    their kind but those ``concerned``. Without ``subjects`` it may name any. ``loud``: a note is
    not enough. ``PCI101|PCI103`` is met by either."""

    code: str
    subjects: list[str] = []
    concerned: list[str] = []
    loud: bool = False


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A machine and what is true of it.

    At error or warning nothing may be found but what must, or ``may``, be. ``must_not`` are codes
    that may not be found at all, nor as a note.
    """

    name: str
    source: str
    must: list[Must] = []
    may: list[str] = []
    must_not: list[str] = []


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a case: how much of what must be found was, and what was said wrongly."""

    case: Case
    hits: list[str]
    """Codes that had to be found and were."""
    misses: list[str]
    false_alarms: list[str]
    broken: list[str]
    """Rules that raised."""

    @property
    def faults(self) -> list[str]:
        """All that is wrong, a line each: empty for a case that is judged rightly."""
        return [
            *(f"missed: {line}" for line in self.misses),
            *(f"false alarm: {line}" for line in self.false_alarms),
            *(f"broke: {line}" for line in self.broken),
        ]


def judge_host(case: Case, host: Host) -> Result:
    """Scans a machine and judges what the rules say of it."""
    return judge(case, scan_host(host))


def judge(case: Case, topology: Topology) -> Result:
    report = check(topology)
    hits: list[str] = []
    misses: list[str] = []
    false_alarms: list[str] = []
    for must in case.must:
        codes = must.code.split("|")
        found = [finding for finding in report.findings if finding.code in codes]
        loud = [finding for finding in found if finding.severity != "note"]
        judged = loud if must.loud and loud else found
        named = {subject for finding in judged for subject in finding.subjects}
        lacking = [subject for subject in must.subjects if subject not in named]
        others = _others(must.subjects, named - {*must.concerned}, topology)
        if not found:
            why = next((s.reason for s in report.skipped if s.code in codes), "")
            misses.append(f"{must.code} is not found" + (f" (skipped: {why})" if why else ""))
        elif lacking:
            misses.append(f"{must.code} names {_list(named)}, not {_list(lacking)}")
        elif must.loud and not loud:
            misses.append(f"{must.code} is a note only: {found[0].summary}")
        else:
            hits.append(must.code)
        if others and not lacking:
            false_alarms.append(f"{must.code} names {_list(others)} beside {_list(must.subjects)}")
    allowed = {*case.may, *(code for must in case.must for code in must.code.split("|"))}
    for finding in report.findings:
        unexpected = finding.severity != "note" and finding.code not in allowed
        if finding.code in case.must_not or unexpected:
            false_alarms.append(_said(finding))
    broken = [f"{s.code}: {s.reason}" for s in report.skipped if "the rule broke" in s.reason]
    return Result(case=case, hits=hits, misses=misses, false_alarms=false_alarms, broken=broken)


def _others(wanted: list[str], named: Iterable[str], topology: Topology) -> list[str]:
    """What is named beside what must be, of the same kinds of node."""
    kinds = {type(topology.nodes[node]) for node in wanted if node in topology.nodes}
    return sorted(
        node
        for node in named
        if node not in wanted and node in topology.nodes and type(topology.nodes[node]) in kinds
    )


def _said(finding: Finding) -> str:
    return f"{finding.code} {finding.severity} on {_list(finding.subjects)}: {finding.summary}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
