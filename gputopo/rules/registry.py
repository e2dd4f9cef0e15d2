"""The registry: every rule by its code, once, with the text from which its page is made.

A rule is a function from a topology to verdicts, marked with :func:`rule`. It reads nothing but the
topology and prints nothing. Third parties add rules by an entry point of the group
``gputopo.rules`` that names a module which marks its own.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable

import msgspec

from gputopo.facts import Missing
from gputopo.rules.finding import SEVERITIES, Finding, Report, Severity, Skip, Skipped, Verdict
from gputopo.topology.graph import Topology

Check = Callable[[Topology], Iterable[Verdict]]

FAMILIES = {
    "PCI": "links and paths",
    "NUM": "NUMA, memory and CPUs",
    "GPU": "driver and device state",
    "NVL": "NVLink and fabric",
    "NIC": "HCAs and GPUDirect",
    "AFF": "processes",
    "BWT": "measured bandwidth",
    "GEM": "shapes",
    "VIR": "virtual machines and containers",
    "PRB": "the probes themselves",
    "FLT": "fleet",
}

_MODULES = ("pci", "numa", "gpu", "driver", "nvlink", "nic", "virtual", "probes")
"""The rule files of this package, imported on first use."""

ENTRY_POINTS = "gputopo.rules"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule and its page. ``needs`` are probes without which it cannot be asked."""

    code: str
    name: str
    severity: Severity
    needs: tuple[str, ...]
    rationale: str
    verify: str
    mend: str
    sources: tuple[str, ...]
    check: Check


_rules: dict[str, Rule] = {}
_loaded = False


def rule(
    *,
    code: str,
    name: str,
    severity: Severity,
    needs: tuple[str, ...],
    rationale: str,
    verify: str,
    mend: str,
    sources: tuple[str, ...],
) -> Callable[[Check], Check]:
    """Registers the decorated function. Raises ValueError for a code or name taken or wrong."""

    def register(check: Check) -> Check:
        if not re.fullmatch(r"[A-Z]{3}\d{3}", code) or code[:3] not in FAMILIES:
            raise ValueError(f"rule code {code!r}: a family of {', '.join(FAMILIES)} and 3 digits")
        taken = next((r for r in _rules.values() if code == r.code or name == r.name), None)
        if taken is not None:
            raise ValueError(f"rule {code} {name}: taken by {taken.code} {taken.name}")
        _rules[code] = Rule(
            code=code,
            name=name,
            severity=severity,
            needs=needs,
            rationale=" ".join(rationale.split()),
            verify=verify,
            mend=" ".join(mend.split()),
            sources=sources,
            check=check,
        )
        return check

    return register


def rules() -> dict[str, Rule]:
    """All rules by code, in code order."""
    global _loaded
    if not _loaded:
        _loaded = True
        for module in _MODULES:
            importlib.import_module(f"gputopo.rules.{module}")
        if _has_entry_points():
            from importlib.metadata import entry_points

            for entry in entry_points(group=ENTRY_POINTS):
                entry.load()
    return dict(sorted(_rules.items()))


def _has_entry_points() -> bool:
    """Whether any installed distribution names the group.

    importlib.metadata costs 25 ms of import, a seventh of a whole scan's budget; looking for the
    group's name in the few entry_points.txt costs one.
    """
    wanted = f"[{ENTRY_POINTS}]".encode()
    for directory in sys.path:
        try:
            names = os.listdir(directory or ".")
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                try:
                    with open(f"{directory}/{name}/entry_points.txt", "rb") as file:
                        if wanted in file.read():
                            return True
                except OSError:
                    continue
    return False


def check_all(
    topology: Topology, *, only: Collection[str] = (), ignore: Collection[str] = ()
) -> Report:
    """Asks every rule that is wanted."""
    findings: list[Finding] = []
    skipped: list[Skipped] = []
    asked = 0
    for entry in rules().values():
        if only and not entry.code.startswith(tuple(only)):
            continue
        if ignore and entry.code.startswith(tuple(ignore)):
            continue
        if has_no_gpu(topology) and set(entry.needs) & set(GPU_PROBES):
            asked += 1  # and answered: there is nothing that it could judge
            continue
        reason, broken = _lacking(entry, topology)
        if not reason:
            try:
                findings.extend(_finding(entry, verdict) for verdict in entry.check(topology))
                asked += 1
                continue
            except Skip as skip:
                reason = str(skip)
            except Exception as error:  # a rule's fault must not cost the other rules' findings
                reason, broken = f"the rule broke: {type(error).__name__}: {error}"[:200], True
        skipped.append(
            Skipped(
                code=entry.code,
                name=entry.name,
                severity=entry.severity,
                reason=reason,
                broken=broken,
            )
        )
    findings.sort(key=lambda f: (SEVERITIES.index(f.severity), f.code, f.subjects))
    return Report(findings=findings, skipped=skipped, asked=asked)


GPU_PROBES = ("nvml", "nvidia_smi", "kernel_log")
"""Probes that tell of nothing but NVIDIA GPUs."""


def has_no_gpu(topology: Topology) -> bool:
    """Whether the machine is known to have no NVIDIA GPU: the PCI bus was read and holds none."""
    pci = topology.facts.pci
    if topology.gpus or isinstance(pci, Missing):
        return False
    return not any(function.may_be_gpu for function in pci.functions)


def _lacking(entry: Rule, topology: Topology) -> tuple[str, bool]:
    """Why a rule cannot be asked, and whether that is because a probe broke."""
    for need in entry.needs:
        fact = getattr(topology.facts, need)
        if isinstance(fact, Missing):
            return f"{need}: {fact}", fact.reason in ("timeout", "failed", "unparsed")
    return "", False


def _finding(entry: Rule, verdict: Verdict) -> Finding:
    return Finding(
        code=entry.code,
        name=entry.name,
        severity=verdict.severity or entry.severity,
        confidence=verdict.confidence,
        subjects=verdict.subjects,
        summary=verdict.summary,
        evidence=verdict.evidence,
        cost=verdict.cost,
        remedy=verdict.remedy,
    )
