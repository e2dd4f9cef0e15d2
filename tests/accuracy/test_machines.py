"""The bundled machines: silent where they are healthy, each fault found and named on its twins."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from composer.faults import FAULTS, Fault
from composer.harmless import HARMLESS, Harmless

from gputopo import scan
from gputopo.rules import check
from gputopo.rules.finding import Report
from gputopo.rules.registry import rules
from tests.accuracy.judge import ROOT
from tests.accuracy.machines import (
    COMPOSED,
    FIXTURES,
    harmless_pairs,
    judge_fault,
    judge_harmless,
    judge_healthy,
    pairs,
)

PAIRS = list(pairs())
"""Every fault on every machine that can have it: some 500, judged in half a minute."""

HARMLESS_PAIRS = list(harmless_pairs())

TWO_SAMPLES = "two samples"
"""In the reason of a rule that one scan cannot ask, since it judges growth or what lasts."""


@pytest.mark.parametrize("name", FIXTURES)
def test_a_bundled_machine_is_judged_rightly(name: str) -> None:
    assert judge_healthy(name).faults == []


@pytest.mark.parametrize(
    ("name", "fault"), PAIRS, ids=[f"{name}-{fault.name}" for name, fault in PAIRS]
)
def test_a_fault_is_found_and_named(name: str, fault: Fault) -> None:
    assert judge_fault(name, fault).faults == []


@pytest.mark.parametrize(
    ("name", "change"),
    HARMLESS_PAIRS,
    ids=[f"{name}-{change.name}" for name, change in HARMLESS_PAIRS],
)
def test_a_harmless_change_alarms_nobody(name: str, change: Harmless) -> None:
    assert judge_harmless(name, change).faults == []


@cache
def reports() -> list[Report]:
    """What all rules say of each bundled machine."""
    return [check(scan(f"fixture:{name}")) for name in FIXTURES]


@pytest.mark.parametrize("code", rules())
def test_every_rule_has_a_fault_and_a_machine_where_it_is_silent(code: str) -> None:
    skipped = [{entry.code: entry.reason for entry in report.skipped} for report in reports()]
    if any(TWO_SAMPLES in reasons.get(code, "") for reasons in skipped):
        pytest.skip("needs two samples")
    assert any(fault.code == code for _, fault in PAIRS), f"no fault for {code} that applies"
    silent = [
        name
        for name, report, reasons in zip(FIXTURES, reports(), skipped)
        if code not in reasons and code not in {finding.code for finding in report.findings}
    ]
    assert silent, f"{code} speaks, or is not asked, on every bundled machine"


def test_every_fault_names_a_rule_and_applies_somewhere() -> None:
    applied = {fault.name for _, fault in PAIRS}
    assert [fault.name for fault in FAULTS.values() if fault.name not in applied] == []
    assert {fault.code for fault in FAULTS.values()} <= set(rules())
    for fault in FAULTS.values():
        assert fault.text.endswith("."), fault.name
        assert set(fault.also) <= set(rules()), fault.name


def test_every_harmless_change_tempts_a_rule_and_applies_somewhere() -> None:
    assert {change.name for _, change in HARMLESS_PAIRS} == set(HARMLESS)
    assert {change.code for change in HARMLESS.values()} <= set(rules())
    assert all(change.text.endswith(".") for change in HARMLESS.values())


def inject(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/inject", *arguments], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_inject_writes_a_recording_that_scans(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"twin.{suffix}"
    done = inject("hgx-h100", "gpu-lost", "-o", str(file))
    assert (done.returncode, done.stderr) == (0, "GPU304 must name gpu7\n")
    found = [f for f in check(scan(str(file))).findings if f.code == "GPU304"]
    assert [f.subjects for f in found] == [["gpu7"]]


def test_inject_writes_a_harmless_change() -> None:
    done = inject("rtx4090-workstation", "no-numa-node-where-there-is-one")
    assert done.stderr == "NUM201 must not be raised above a note, nor anything else\n"
    assert done.stdout.startswith('{"gputopo-recording"')


def test_inject_lists_changes() -> None:
    every, some = inject("--list"), inject("--list", "t4-vm")
    assert len(every.stdout.splitlines()) == len(FAULTS) + len(HARMLESS)
    assert 0 < len(some.stdout.splitlines()) < len(FAULTS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such", "gpu-lost"], "no fixture 'no-such'"),
        (["t4-vm", "no-such"], "no change 'no-such'"),
        (["t4-vm", "one-nvlink-down"], "does not apply"),
        (["t4-vm"], "a fixture and a change are needed"),
    ],
)
def test_inject_says_what_it_cannot_do(arguments: list[str], said: str) -> None:
    done = inject(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_all_machines_take_part() -> None:
    faults, changes = len(PAIRS), len(HARMLESS_PAIRS)
    print(
        f"{len(FIXTURES)} machines, {faults} twins with a fault, {changes} with a harmless change"
    )
    assert len(COMPOSED) >= 13
    assert faults > 500
    assert changes > 200
