"""The bundled machines as cases: healthy, with each fault, and with each harmless change."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from composer import compose
from composer.faults import FAULTS, Fault, Injured
from composer.harmless import HARMLESS, Harmless

from gputopo.host.base import Host
from gputopo.host.recording import Answers, RecordedHost
from gputopo.host.source import list_fixtures, open_source
from tests.accuracy.judge import ROOT, Case, Must, Result, judge_host

FIXTURES: dict[str, dict[str, Any]] = {
    info.name: msgspec.toml.decode((ROOT / "fixtures" / f"{info.name}.toml").read_bytes())
    for info in list_fixtures()
}
COMPOSED = [name for name, case in FIXTURES.items() if case["origin"] == "composed"]


AT_IDLE = {"rtx4090-workstation": ["PCI102"]}
"""Codes that a fixture rules out as faults and that are rightly told as a note there: of a link
that idles at 2.5 GT/s nobody can tell what it does under load."""


def healthy_case(name: str) -> Case:
    """What the fixture's own description says of it."""
    told = FIXTURES[name]
    ruled_out = [code for code in told["must_not_find"] if code not in AT_IDLE.get(name, [])]
    return Case(
        name=name,
        source="fixtures",
        must=[Must(code=code) for code in told["must_find"]],
        must_not=ruled_out,
    )


def judge_healthy(name: str) -> Result:
    return judge_host(healthy_case(name), _opened(name))


def _opened(name: str) -> Host:
    return open_source(f"fixture:{name}")


@cache
def composed(name: str) -> Answers:
    """The healthy machine's answers, for faults that change no more than some of them."""
    return compose(FIXTURES[name])


def pairs() -> Iterator[tuple[str, Fault]]:
    """Every fault on every machine that it applies to, machine by machine."""
    for name in COMPOSED:
        for fault in FAULTS.values():
            if fault.inject(FIXTURES[name]) is not None:
                yield name, fault


def judge_fault(name: str, fault: Fault) -> Result:
    """What is said of the broken twin. What the healthy machine has may be found there too."""
    injured = fault.inject(FIXTURES[name])
    assert injured is not None, f"{fault.name} does not apply to {name}"
    return judge_host(fault_case(name, fault, injured), broken_twin(name, injured))


def fault_case(name: str, fault: Fault, injured: Injured) -> Case:
    return Case(
        name=f"{name}+{fault.name}",
        source="faults",
        must=[
            Must(
                code=fault.code,
                subjects=injured.subjects,
                concerned=injured.twin.concerned,
                loud=not fault.quiet,
            )
        ],
        may=[*fault.also, *FIXTURES[name]["must_find"]],
    )


def broken_twin(name: str, injured: Injured) -> RecordedHost:
    return RecordedHost(name, injured.twin.answers(composed(name)))


def harmless_pairs() -> Iterator[tuple[str, Harmless]]:
    """Every harmless change on every machine that it applies to, machine by machine."""
    for name in COMPOSED:
        for change in HARMLESS.values():
            if change.inject(FIXTURES[name]) is not None:
                yield name, change


def judge_harmless(name: str, change: Harmless) -> Result:
    """Nothing above a note may be said of the twin, but what holds of the healthy machine."""
    twin = change.inject(FIXTURES[name])
    assert twin is not None, f"{change.name} does not apply to {name}"
    told = FIXTURES[name]["must_find"]
    case = Case(name=f"{name}+{change.name}", source="harmless", may=told)
    return judge_host(case, RecordedHost(name, twin.answers(composed(name))))
