from __future__ import annotations

import random
from typing import get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gputopo import scan
from gputopo.facts import Missing, Reason
from gputopo.host.base import Output
from gputopo.host.recording import Answers
from gputopo.probes.numa import NUMACTL
from gputopo.probes.nvidia_smi import COMMAND
from gputopo.rules import check
from gputopo.scanning import scan_host
from gputopo.topology.build import build
from gputopo.topology.graph import Topology
from tests.rules.machines import FIXTURES, file, found, only
from tests.rules.twin import recorded, twin

FAMILIES = ["PCI", "NUM", "VIR", "PRB"]

REASONS: tuple[Reason, ...] = get_args(Reason)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_healthy_machines_have_no_probe_finding(fixture: str) -> None:
    assert check(scan(f"fixture:{fixture}"), only=["PRB"]).findings == []


def test_a_probe_that_timed_out() -> None:
    topology = twin("hgx-h100", nvml={("nvmlInit",): Missing("timeout", "no answer within 5 s")})
    finding = only(topology, "PRB001")
    assert (finding.severity, finding.subjects) == ("error", ["machine"])
    assert finding.evidence[0].source == "probe nvml"


class TestUnparsed:
    def test_a_table_that_nobody_can_read(self) -> None:
        garbled = Output(0, "\tGPU0\tGPU1\nGPU0\t??\t!!\n", "")
        topology = twin("hgx-h100", commands={tuple(COMMAND): garbled})
        finding = only(topology, "PRB002")
        assert (finding.severity, finding.subjects) == ("warning", ["machine"])
        assert "probe nvidia_smi" in finding.summary

    def test_values_of_devices(self) -> None:
        hcas = [hca.pci for hca in scan("fixture:hgx-h100").hcas[:5]]
        topology = twin("hgx-h100", files={file(pci, "max_link_speed"): "fast\n" for pci in hcas})
        finding = only(topology, "PRB002")
        assert "mlx5_0, pcie.device_max_speed_gts" in finding.summary
        assert finding.summary.endswith("and 2 more")
        assert len(finding.evidence) >= 5

    def test_what_is_absent_was_not_misread(self) -> None:
        topology = twin(
            "hgx-h100",
            files={"/proc/self/limits": None, file("0000:db:00.0", "max_link_speed"): None},
            commands={tuple(COMMAND): Missing("timeout", "")},
        )
        assert found(topology, "PRB002") == []

    def test_a_node_without_cpus_was_read_well(self) -> None:
        topology = twin("gh200", files={file("0009:01:00.0", "numa_node"): "1\n"})
        assert found(topology, "PRB002") == []


class TestConflicts:
    def test_conflicts_of_one_kind_are_one_finding(self) -> None:
        nvml = {("nvmlDeviceGetTopologyCommonAncestor", a, 7): 10 for a in range(7)}
        finding = only(twin("hgx-h100", nvml=nvml), "PRB003")
        assert finding.severity == "note"
        assert set(finding.subjects) == {f"gpu{n}" for n in range(8)}
        assert "and 6 more like this" in finding.summary
        assert len(finding.evidence) == 7

    def test_different_kinds_stay_apart(self) -> None:
        said = Output(0, "available: 1 nodes (0)\nnode 0 cpus: 0\nnode 1 cpus: 1\n", "")
        topology = twin(
            "hgx-h100",
            nvml={("nvmlDeviceGetTopologyCommonAncestor", 6, 7): 10},
            commands={tuple(NUMACTL): said},
        )
        verdicts = found(topology, "PRB003")
        assert [f.subjects for f in verdicts] == [["gpu6", "gpu7"], ["numa0", "numa1"]]


def whole(topology: Topology) -> None:
    """No rule of these families breaks, each finding has evidence, each skip a reason."""
    report = check(topology, only=FAMILIES)
    assert [s for s in report.skipped if "the rule broke" in s.reason] == []
    assert all(s.reason for s in report.skipped)
    assert all(f.evidence for f in report.findings)
    assert all(set(f.subjects) <= {"machine", *topology.nodes} for f in report.findings)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_without_one_probe_rules_are_skipped_and_none_breaks(fixture: str) -> None:
    healthy = scan(f"fixture:{fixture}")
    before = {f.code for f in check(healthy, only=FAMILIES).findings if f.severity != "note"}
    for turn, probe in enumerate(healthy.facts.__struct_fields__):
        reason = REASONS[turn % len(REASONS)]
        lacking = msgspec.structs.replace(healthy.facts, **{probe: Missing(reason, "taken away")})
        topology = build(lacking)
        whole(topology)
        after = {f.code for f in check(topology, only=FAMILIES).findings if f.severity != "note"}
        # Less is known, so less is said: nothing but that an answer could not be read.
        assert after <= before | {"PRB002"}, probe


@pytest.mark.parametrize("probe", ["pci", "numa", "cpu", "system", "nvml", "nvidia_smi", "rdma"])
@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_for_lacking_a_probe(probe: str, reason: Reason) -> None:
    healthy = scan("fixture:gb200-tray")
    lacking = msgspec.structs.replace(healthy.facts, **{probe: Missing(reason, "taken away")})
    topology = build(lacking)
    whole(topology)
    for skip in check(topology, only=FAMILIES).skipped:
        if skip.reason.startswith(f"{probe}: "):
            assert skip.broken is (reason in ("timeout", "failed", "unparsed"))


GARBAGE = (b"", b"\xff\xfe\x00", "garbage\n", "-1\n", "0\n", "9" * 30, Missing("denied", ""),
           Missing("timeout", ""))  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    fixture=st.sampled_from(FIXTURES),
    seed=st.integers(0, 1 << 30),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5]),
    garbage=st.sampled_from([None, *GARBAGE]),
)
def test_with_answers_taken_away_or_garbled_no_rule_breaks(
    fixture: str, seed: int, share: float, garbage: object
) -> None:
    host = recorded(fixture)
    chance = random.Random(seed)
    _damage(host.answers, chance, share, garbage)
    whole(scan_host(host))


def _damage(answers: Answers, chance: random.Random, share: float, garbage: object) -> None:
    """Takes a share of all answers away (one at least), or puts garbage in their place."""
    for table in (answers.files, answers.nvml, answers.commands):
        keys = sorted(table, key=repr)
        for key in chance.sample(keys, min(len(keys), max(1, int(share * len(keys))))):
            if garbage is None:
                del table[key]  # type: ignore[arg-type]
            elif table is answers.commands:
                text = garbage if isinstance(garbage, str) else "?"
                table[key] = Output(0, text, "")  # type: ignore[index]
            elif table is answers.nvml and isinstance(garbage, bytes):
                table[key] = {"unexpected": [1, None]}  # type: ignore[index]
            else:
                table[key] = garbage  # type: ignore[index]
