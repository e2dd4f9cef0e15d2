"""NVL rules: each fires on a broken twin, names it, and stays silent on what is so by design."""

from __future__ import annotations

from typing import Any

import pytest

from gputopo.host.recording import nvml_error
from gputopo.host.tree import Directory
from gputopo.topology.graph import Topology
from tests.rules.composed import FIXTURES, all_gpus, composed, findings, only, skipped
from tests.rules.twin import report, twin

READ, WRITE, NVLINK = 0, 1, 2
CNS, GNS, TNS, DR, NS = 1, 2, 3, 4, 5


@pytest.mark.parametrize("fixture", FIXTURES)
def test_healthy_machines_are_silent(fixture: str) -> None:
    found = report(twin(fixture), "NVL")
    loud = [f.summary for f in found.findings if f.severity != "note"]
    assert loud == []
    assert not [skip.reason for skip in found.skipped if skip.broken]


def renamed(fixture: str, name: str, gpus: int, **nvml: Any) -> Topology:
    """A machine whose GPUs are another part."""
    answers = {("nvmlDeviceGetName", gpu): name for gpu in range(gpus)}
    return twin(fixture, nvml={**answers, **nvml.get("nvml", {})})


def links(gpu: int, states: dict[int, int]) -> dict[tuple[Any, ...], Any]:
    return {("nvmlDeviceGetNvLinkState", gpu, link): state for link, state in states.items()}


# NVL401


def test_links_down_on_one_gpu() -> None:
    found = only(composed("hgx-h100", gpu2={"links_down": [0, 5]}), "NVL401")
    assert (found.severity, found.subjects) == ("error", ["gpu2"])
    assert "16 of 18" in found.summary
    assert found.cost is not None
    assert found.cost.gbytes_per_s == 50.0


def test_all_links_of_all_modules_down() -> None:
    dark = composed("hgx-h100", **all_gpus(8, links_down=list(range(18))))
    found = only(dark, "NVL401")
    assert (found.severity, len(found.subjects)) == ("error", 8)
    # A provider may switch them off for guests.
    guest = composed("azure-ndv5-vm", **all_gpus(8, links_down=list(range(18))))
    assert only(guest, "NVL401").severity == "note"


def test_twelve_of_eighteen_on_every_card_are_by_design() -> None:
    """H100 PCIe with three bridges, and NC-v5: no sibling has more."""
    down = {key: 0 for gpu in range(8) for key in links(gpu, dict.fromkeys(range(12, 18), 0))}
    topology = renamed("hgx-h100", "NVIDIA H100 PCIe", 8, nvml=down)
    assert not findings(topology, "NVL401")


def test_cards_without_any_bridge_are_fine() -> None:
    down = {key: 0 for gpu in range(4) for key in links(gpu, dict.fromkeys(range(12), 0))}
    topology = renamed("a100-nps4", "NVIDIA A100-PCIE-40GB", 4, nvml=down)
    assert not report(topology, "NVL").findings


def test_an_unbridged_card_is_a_note() -> None:
    down = {
        **links(3, dict.fromkeys(range(12), 0)),
        **{key: 0 for gpu in range(3) for key in links(gpu, dict.fromkeys(range(8, 12), 0))},
    }
    topology = renamed("a100-nps4", "NVIDIA A100-PCIE-40GB", 4, nvml=down)
    found = only(topology, "NVL401")
    assert (found.severity, found.subjects) == ("note", ["gpu3"])


def test_eight_links_are_all_that_an_export_part_has() -> None:
    fewer = {key: 0 for gpu in range(8) for key in links(gpu, dict.fromkeys(range(8, 12), 0))}
    topology = renamed("dgx-a100", "NVIDIA A800-SXM4-80GB", 8, nvml=fewer)
    assert not findings(topology, "NVL401")


def test_mig_hides_links() -> None:
    mig = composed("hgx-h100", gpu2={"links_down": list(range(18)), "mig": True})
    assert not report(mig, "NVL").findings


# NVL402


def test_a_pair_with_fewer_links_than_the_others() -> None:
    topology = composed("a100-nps4", gpu3={"links_down": [2]}, gpu0={"links_down": [9]})
    found = only(topology, "NVL402")
    assert (found.severity, found.subjects) == ("warning", ["gpu0", "gpu3"])


def test_a_bridge_that_came_up_in_part() -> None:
    """Three of the four links of a bridge: both ends agree, and neither has more to compare."""
    pair = composed("a100-nps4", gpu2={"absent": True}, gpu3={"absent": True})
    assert not findings(pair, "NVL402")
    down = {**links(0, {0: 0}), **links(1, {0: 0})}
    nvml = {("nvmlDeviceGetName", gpu): "NVIDIA RTX A6000" for gpu in range(4)}
    found = findings(twin("a100-nps4", nvml={**nvml, **down}), "NVL402")
    assert [f.subjects for f in found] == [["gpu0", "gpu1"]]
    assert "3 NVLinks" in found[0].summary
    assert not findings(twin("a100-nps4", nvml={**nvml, **down}), "NVL401")


@pytest.mark.parametrize("fixture", ["dgx-1-v100", "dgx-2", "hgx-h100"])
def test_meshes_and_switches_are_unequal_by_design(fixture: str) -> None:
    assert not findings(twin(fixture), "NVL402")


# NVL403


def refused(status: int, *pairs: tuple[int, int]) -> dict[tuple[Any, ...], Any]:
    return {
        ("nvmlDeviceGetP2PStatus", *ends, capability): status
        for a, b in pairs
        for ends in ((a, b), (b, a))
        for capability in (READ, WRITE, NVLINK)
    }


def test_p2p_refused_over_nvlink() -> None:
    found = only(twin("hgx-h100", nvml=refused(NS, (2, 5))), "NVL403")
    assert (found.severity, found.subjects) == ("error", ["gpu2", "gpu5"])
    assert "NS" in found.summary


def test_geforce_has_no_p2p_by_policy() -> None:
    found = only(twin("rtx4090-workstation"), "NVL403")
    assert found.severity == "note"
    assert "GeForce" in found.summary


def test_chipset_below_one_switch_and_between_sockets() -> None:
    near = only(twin("l40s-8-pcie", nvml=refused(CNS, (0, 1))), "NVL403")
    assert (near.severity, near.subjects) == ("warning", ["gpu0", "gpu1"])
    assert not findings(twin("l40s-8-pcie", nvml=refused(CNS, (0, 7))), "NVL403")
    assert not findings(twin("l40s-8-pcie", nvml=refused(TNS, (0, 7))), "NVL403")


def test_switched_off_by_registry_is_a_note() -> None:
    found = only(twin("l40s-8-pcie", nvml=refused(DR, (0, 7))), "NVL403")
    assert found.severity == "note"
    assert "registry" in found.summary


def test_unknown_p2p_is_skipped() -> None:
    hidden = {key: nvml_error("NOT_SUPPORTED") for key in every_pair(8)}
    assert "unknown" in skipped(twin("hgx-h100", nvml=hidden), "NVL403")


def every_pair(number: int) -> list[tuple[Any, ...]]:
    return [
        ("nvmlDeviceGetP2PStatus", a, b, capability)
        for a in range(number)
        for b in range(number)
        for capability in range(5)
        if a != b
    ]


def test_p2p_in_mig_mode_is_not_judged() -> None:
    mig = {("nvmlDeviceGetMigMode", gpu): [1, 1] for gpu in range(8)}
    assert not findings(twin("hgx-h100", nvml=refused(NS, (2, 5)) | mig), "NVL403")


# NVL404


def test_one_gpu_off_the_fabric() -> None:
    found = only(composed("hgx-h100", gpu2={"links_down": list(range(18))}), "NVL404")
    assert (found.severity, found.subjects) == ("error", ["gpu2"])
    assert "NODE, SYS" in found.summary


def test_bridges_join_some_cards_only() -> None:
    nvml = {("nvmlDeviceGetName", gpu): "NVIDIA RTX A6000" for gpu in range(4)}
    # Of the links 0-3, 4-7 and 8-11 of each GPU those between 0-1 and 2-3 stay.
    down = {
        key: 0
        for gpu, kept in ((0, 0), (1, 0), (2, 8), (3, 8))
        for key in links(gpu, {i: 0 for i in range(12) if not kept <= i < kept + 4})
    }
    found = only(twin("a100-nps4", nvml={**nvml, **down}), "NVL404")
    assert found.severity == "note"
    assert "gpu0 with gpu1, gpu2 with gpu3" in found.summary


def test_pairs_of_a_mesh_without_a_link_are_by_design() -> None:
    assert not findings(twin("dgx-1-v100"), "NVL404")


def test_peers_that_are_hidden_are_no_fallback() -> None:
    """Of a DGX-1 this container has GPUs 0, 1, 2 and 7; the last has all its links up, but none to
    these."""
    up = {("nvmlDeviceGetNvLinkState", gpu, link): 1 for gpu in range(4) for link in range(6)}
    absent = {f"gpu{gpu}": {"absent": True} for gpu in (3, 4, 5, 6)}
    topology = composed("dgx-1-v100", nvml=up, **absent)
    assert topology.path_class("gpu0", "gpu1") == "NV1"
    assert topology.path_class("gpu0", "gpu3") == "SYS"
    assert not report(topology, "NVL").findings


# NVL405


def test_the_registration_is_not_complete() -> None:
    machine = {"services": {"nvidia-fabricmanager.service": "failed"}}
    topology = composed("hgx-h100", machine=machine, **all_gpus(8, fabric_state=2))
    found = only(topology, "NVL405")
    assert (found.severity, len(found.subjects)) == ("error", 8)
    assert "802" in found.summary
    assert [e.seen for e in found.evidence] == ["state in progress, status 0", "failed"]


def test_in_a_guest_the_fabric_manager_is_the_providers() -> None:
    found = only(composed("azure-ndv5-vm", **all_gpus(8, fabric_state=1)), "NVL405")
    assert "provider" in found.remedy.text


@pytest.mark.parametrize(
    ("fixture", "severity"), [("hgx-h100", "warning"), ("dgx-a100", "error"), ("dgx-2", "error")]
)
def test_the_fabric_manager_was_stopped(fixture: str, severity: str) -> None:
    """Until Ampere no CUDA program starts without it; on Hopper the fabric stays as it is."""
    machine = {"services": {"nvidia-fabricmanager.service": "inactive"}}
    found = only(composed(fixture, machine=machine), "NVL405")
    assert (found.severity, found.subjects) == (severity, ["machine"])


def test_no_switches_nothing_to_do() -> None:
    """The service fails where there is no NVSwitch: that is no fault."""
    machine = {"services": {"nvidia-fabricmanager.service": "failed"}}
    for fixture in ("dgx-1-v100", "l40s-8-pcie", "a100-nps4"):
        assert not findings(composed(fixture, machine=machine), "NVL405")


def test_a_fabric_manager_in_a_driver_container() -> None:
    """systemd knows of none, yet the links are up: it runs elsewhere."""
    assert not findings(composed("dgx-a100", machine={"services": {}}), "NVL405")


@pytest.mark.parametrize(
    ("mask", "summary", "severity", "words"),
    [
        (0xA9, 2, "error", "bandwidth is degraded"),
        (0xA6, 0, "warning", "being recovered"),
        (0x5AA, 0, "error", "too few NVLinks"),
        (0xAA, 3, "warning", "limited capacity"),
    ],
)
def test_the_fabrics_own_health(mask: int, summary: int, severity: str, words: str) -> None:
    change = {"fabric_health_mask": mask, "fabric_health_summary": summary}
    found = only(composed("hgx-b200", gpu3=change), "NVL405")
    assert (found.severity, found.subjects) == (severity, ["gpu3"])
    assert words in found.summary


def test_imex() -> None:
    failed = composed("gb200-tray", machine={"services": {"nvidia-imex.service": "failed"}})
    assert only(failed, "NVL405").severity == "warning"
    without = twin("gb200-tray", files={"/dev/nvidia-caps-imex-channels": Directory([])})
    assert only(without, "NVL405").severity == "note"
    # Schedulers start it with the job that needs it.
    on_demand = composed("gb200-tray", machine={"services": {"nvidia-imex.service": "inactive"}})
    assert not findings(on_demand, "NVL405")


# NVL406, NVL407


def test_errors_need_two_samples() -> None:
    assert "two samples" in skipped(twin("hgx-h100"), "NVL406")


def test_c2c_down() -> None:
    found = only(composed("gb200-tray", gpu1={"c2c_down": True}), "NVL407")
    assert (found.severity, found.subjects) == ("error", ["gpu1"])
    assert found.cost is not None
    assert found.cost.gbytes_per_s == 223.6


def test_c2c_is_a_matter_of_grace() -> None:
    assert not findings(twin("hgx-b200"), "NVL407")
