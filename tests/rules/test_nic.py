"""NIC rules and what they rest on: the roles of HCAs, and how each GPU reaches the fabric."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gputopo.facts import known
from gputopo.host.base import Output
from gputopo.host.source import open_source
from gputopo.host.tree import Link
from gputopo.probes import nvidia_smi
from gputopo.scanning import scan_host
from gputopo.topology.build import build
from gputopo.topology.graph import Topology
from gputopo.topology.reach import fabric_reach, tier
from tests.corpus import CORPUS, needs_corpus
from tests.rules.composed import FIXTURES, composed, findings, only, skipped
from tests.rules.twin import report, twin

PORT = "/sys/class/infiniband/{}/ports/1/{}"
SOFT = Link("../../devices/virtual/infiniband/rxe0")


@pytest.mark.parametrize("fixture", FIXTURES)
def test_healthy_machines_are_silent(fixture: str) -> None:
    found = report(twin(fixture), "NIC")
    assert [f.summary for f in found.findings if f.severity != "note"] == []
    assert not [skip.reason for skip in found.skipped if skip.broken]


def down(name: str, physical: str = "3: Disabled") -> dict[str, Any]:
    """The files of a port without link."""
    return {PORT.format(name, "state"): "1: DOWN", PORT.format(name, "phys_state"): physical}


# Roles


@pytest.mark.parametrize(
    ("fixture", "others"),
    [
        ("dgx-a100", ["mlx5_4", "mlx5_5", "mlx5_10", "mlx5_11"]),  # Ethernet beside InfiniBand
        ("hgx-b200", ["mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"]),  # same rate, beside no GPU
        ("hgx-h100", ["mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"]),  # slower, below the same switches
        ("gb200-tray", ["mlx5_2", "mlx5_3"]),  # a BlueField
        ("gh200", ["mlx5_0", "mlx5_1"]),  # the default route
        ("azure-ndv5-vm", ["mlx5_an0"]),
        ("dgx-1-v100", []),
        ("l40s-8-pcie", []),
    ],
)
def test_storage_and_management_are_told_from_the_fabric(fixture: str, others: list[str]) -> None:
    roles = twin(fixture).nic_roles
    assert [role.hca for role in roles.values() if role.role != "compute"] == others
    assert all(role.reasons for role in roles.values())


def test_a_port_that_is_down_keeps_its_role() -> None:
    role = twin("hgx-h100", files=down("mlx5_3")).nic_roles["mlx5_3"]
    assert (role.role, role.usable, role.gpus) == ("compute", False, ["gpu1"])


def test_the_only_hca_of_a_gpu_is_never_taken_away() -> None:
    """That it carries the default route and is slow does not make it useless."""
    topology = composed("l40s-8-pcie", machine={"gateway": "enp69s0np0"}, mlx5_1={"rate": 100})
    role = topology.nic_roles["mlx5_1"]
    assert role.role == "compute"
    assert any("default route" in reason for reason in role.reasons)


def test_virtual_functions_and_soft_devices_have_no_part() -> None:
    files: dict[str, Any] = {"/sys/class/infiniband/rxe0": SOFT}
    roles = {role.hca: role.role for role in twin("no-gpu", files=files).nic_roles.values()}
    assert roles["rxe0"] == "software"
    assert set(roles.values()) == {"software", "other"}  # without a GPU nothing is for GPUs
    facts = twin("hgx-h100").facts
    rdma, pci = known(facts.rdma), known(facts.pci)
    assert rdma is not None and pci is not None
    parent = next(f for f in pci.functions if f.address == "0000:3c:00.0")
    virtual = replace(parent, address="0000:3c:00.2", physical_function="0000:3c:00.0")
    device = next(d for d in rdma.devices if d.name == "mlx5_3")
    twice = [*rdma.devices, replace(device, name="mlx5_90", pci="0000:3c:00.2")]
    topology = build(
        replace(
            facts,
            pci=replace(pci, functions=[*pci.functions, virtual]),
            rdma=replace(rdma, devices=twice),
        )
    )
    role = topology.nic_roles["mlx5_90"]
    assert (role.role, role.reasons) == ("virtual-function", ["of 0000:3c:00.0"])


def test_classes_fall_into_tiers() -> None:
    assert [tier(c) for c in ("PIX", "PXB", "PHB", "NODE", "SYS", "?")] == [
        "switch",
        "switch",
        "cpu",
        "cpu",
        "sockets",
        "unknown",
    ]


# NIC501


@pytest.mark.parametrize("physical", ["2: Polling", "3: Disabled"])
def test_a_fabric_port_is_down(physical: str) -> None:
    found = only(twin("hgx-h100", files=down("mlx5_3", physical)), "NIC501")
    assert (found.severity, found.subjects) == ("error", ["mlx5_3"])
    assert "gpu1" in found.summary
    assert found.remedy.commands


def test_a_subnet_manager_is_missing() -> None:
    files = {
        PORT.format("mlx5_3", "state"): "2: INIT",
        PORT.format("mlx5_3", "phys_state"): "5: LinkUp",
    }
    found = only(twin("dgx-a100", files=files), "NIC501")
    assert found.severity == "error"
    assert "subnet manager" in found.remedy.text


def test_the_second_port_of_a_card_may_be_empty() -> None:
    both = composed("gh200", mlx5_1={"state": "DOWN"}, mlx5_3={"state": "DOWN"})
    assert not findings(both, "NIC501")
    one = only(composed("gh200", mlx5_3={"state": "DOWN"}), "NIC501")
    assert one.severity == "note"


def test_management_ports_are_no_faults() -> None:
    assert not findings(composed("dgx-2", mlx5_5={"state": "DOWN"}), "NIC501")
    storage = only(composed("hgx-h100", mlx5_7={"state": "DOWN"}), "NIC501")
    assert storage.severity == "note"  # the same port of its sibling card is up


def test_no_port_of_the_machine_has_a_link() -> None:
    """Perhaps nobody ever cabled them: no error, and one finding."""
    dark = {f"mlx5_{number}": {"state": "DOWN"} for number in range(4)}
    found = only(composed("l40s-8-pcie", **dark), "NIC501")
    assert (found.severity, len(found.subjects)) == ("warning", 4)
    lone = only(composed("no-gpu", mlx5_2={"state": "DOWN"}), "NIC501")
    assert (lone.severity, lone.subjects) == ("note", ["mlx5_2"])


def test_an_unreadable_state_is_not_down() -> None:
    gone = {PORT.format("mlx5_3", "state"): None}
    assert not findings(twin("hgx-h100", files=gone), "NIC501")


# NIC502


def test_a_port_at_half_rate() -> None:
    rate = {PORT.format("mlx5_3", "rate"): "200 Gb/sec (4X HDR)"}
    found = only(twin("hgx-h100", files=rate), "NIC502")
    assert (found.severity, found.subjects) == ("error", ["mlx5_3"])
    assert found.cost is not None
    assert found.cost.gbytes_per_s == 25.0


def test_of_two_ports_nobody_knows_which_is_right() -> None:
    topology = composed("gh200", mlx5_3={"rate": 100})
    assert only(topology, "NIC502").severity == "warning"


def test_a_down_port_has_no_rate_to_compare() -> None:
    files = {**down("mlx5_3"), PORT.format("mlx5_3", "rate"): "10 Gb/sec (4X SDR)"}
    assert not findings(twin("hgx-h100", files=files), "NIC502")


# NIC503


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speed": 16.0}, "Gen4 x16 carries 252 Gb/s"),
        ({"width": 8}, "Gen5 x8 carries 252 Gb/s"),
    ],
)
def test_a_link_slower_than_its_port(change: dict[str, Any], words: str) -> None:
    found = only(composed("hgx-h100", mlx5_3=change), "NIC503")
    assert (found.severity, found.subjects) == ("warning", ["mlx5_3"])
    assert words in found.summary


def test_hdr_in_a_gen3_slot() -> None:
    found = only(composed("a100-nps4", mlx5_1={"speed": 8.0}), "NIC503")
    assert "Gen3 x16 carries 126 Gb/s, the port 200" in found.summary


def test_two_ports_on_one_link_are_one_note() -> None:
    found = only(twin("hgx-b200"), "NIC503")
    assert (found.severity, len(found.subjects)) == ("note", 4)


def test_links_in_guests_are_not_judged() -> None:
    assert "virtual machine" in skipped(twin("azure-ndv5-vm"), "NIC503")


# NIC504


def test_counters_need_two_samples() -> None:
    assert "two samples" in skipped(twin("hgx-h100"), "NIC504")


# NIC505


def test_the_nearer_hca_is_down() -> None:
    found = only(twin("a100-nps4", files=down("mlx5_2")), "NIC505")
    assert (found.severity, found.confidence) == ("warning", "reported")
    assert found.subjects == ["gpu2", "mlx5_2"]
    assert "across NUMA nodes" in found.summary
    assert found.cost is not None
    assert "PXN" in found.cost.text  # gpu2 has NVLink to GPUs that are near
    near = only(twin("hgx-h100", files=down("mlx5_3")), "NIC505")
    assert near.severity == "note"  # the others of its socket are left


MOVED = ("    02.0 hca cx7 mlx5_3 eth\n", "")


@pytest.mark.parametrize(
    "tree",
    [
        (MOVED, ("host 0000:a7 sapphire-rapids node=1\n",
                 "host 0000:a7 sapphire-rapids node=1\n  01.0 hca cx7 mlx5_3 eth\n")),
        (MOVED, ("host 0000:26 sapphire-rapids node=0\n",
                 "host 0000:26 sapphire-rapids node=0\n  01.0 hca cx7 mlx5_3 eth\n")),
        (MOVED, ("    02.0 hca cx7 mlx5_9 eth\n",
                 "    02.0 hca cx7 mlx5_9 eth\n    03.0 hca cx7 mlx5_3 eth\n")),
    ],
    ids=["other socket", "same socket", "beside another GPU"],
)  # fmt: skip
def test_an_hca_in_the_wrong_slot(tree: tuple[tuple[str, str], ...]) -> None:
    found = only(composed("hgx-h100", tree=tree), "NIC505")
    assert found.severity == "warning"
    assert found.subjects[:2] == ["gpu1", "mlx5_3"]
    assert "0000:38:00.0" in found.remedy.text  # the switch of gpu1


def test_no_hca_on_that_side_is_a_purchase() -> None:
    tree = (("    04.0 hca cx6 mlx5_2\n", ""),)
    found = only(composed("a100-nps4", tree=tree), "NIC505")
    assert (found.severity, found.subjects) == ("note", ["gpu2"])
    far = tuple((f"    08.0 hca cx7 mlx5_{i} eth rate=200\n", "") for i in (2, 3))
    one_note = only(composed("l40s-8-pcie", tree=far), "NIC505")
    assert one_note.subjects == ["gpu4", "gpu5", "gpu6", "gpu7"]


def test_the_nearer_hca_is_of_the_wrong_kind() -> None:
    tree = (
        ("hca cx6 mlx5_0\n", "hca cx6 mlx5_0 eth\n"),
        ("hca cx6 mlx5_1\n", "hca cx6 mlx5_1 eth\n"),
    )
    found = only(composed("dgx-a100", tree=tree), "NIC505")
    assert found.subjects == ["gpu0", "gpu1", "mlx5_0", "mlx5_1"]
    assert "Ethernet" in found.summary
    assert found.remedy.commands == ["mlxconfig -d 0000:0c:00.0 set LINK_TYPE_P1=1"]
    assert found.remedy.undo.endswith("LINK_TYPE_P1=2")


@pytest.mark.parametrize("fixture", ["gb200-tray", "gh200", "a100-nps4", "dgx-a100"])
def test_machines_that_only_look_far(fixture: str) -> None:
    """Grace has a host bridge between all; GPU order 3, 1, 7, 5 by NUMA node is healthy."""
    assert not findings(twin(fixture), "NIC505")


def test_a_guest_without_switches_is_unknown() -> None:
    reason = skipped(twin("azure-ndv5-vm"), "NIC505")
    assert "hides" in reason
    assert "NCCL_TOPO_FILE" in reason


def test_every_gpu_reaches_the_fabric() -> None:
    reaches = fabric_reach(twin("dgx-a100"))
    assert [(reach.best, reach.reason) for reach in reaches] == [("PXB", "near")] * 8
    assert reaches[0].nics == ["mlx5_0", "mlx5_1"]


# NIC506


def test_a_rail_that_two_gpus_share_while_another_idles() -> None:
    """mlx5_1 a switch further away than mlx5_0: nearest to none, though both GPUs reach it."""
    before = """\
    00.0 switch pex880xx bus=05
      00.0 gpu a100-sxm4-40gb
    04.0 switch pex880xx bus=0a
      00.0 hca cx6 mlx5_0
    08.0 switch pex880xx bus=0d
      00.0 gpu a100-sxm4-40gb
"""
    after = """\
    00.0 switch pex880xx bus=05
      00.0 gpu a100-sxm4-40gb
      04.0 hca cx6 mlx5_0
      08.0 gpu a100-sxm4-40gb
"""
    tree = ((before, after),)
    found = only(composed("dgx-a100", tree=tree), "NIC506")
    assert found.severity == "warning"
    assert found.subjects == ["gpu0", "gpu1", "mlx5_0", "mlx5_1"]


def test_fewer_hcas_than_gpus_spread_evenly_are_fine() -> None:
    for fixture in ("dgx-1-v100", "dgx-2", "l40s-8-pcie"):
        assert not findings(twin(fixture), "NIC506")


def test_sharing_for_a_port_that_is_down_is_a_note() -> None:
    found = only(twin("dgx-a100", files=down("mlx5_0")), "NIC506")
    assert found.severity == "note"
    assert "mlx5_0 is down" in found.summary


# NIC507


def without_peermem(fixture: str, **machine: Any) -> Topology:
    return composed(fixture, machine={"modules": {}, "memory_peers": [], **machine})


@pytest.mark.parametrize("fixture", ["dgx-a100", "l40s-8-pcie", "a100-nps4"])
def test_nothing_pins_gpu_memory(fixture: str) -> None:
    found = only(without_peermem(fixture), "NIC507")
    assert found.severity == "error"
    assert {"gpu0", "mlx5_0"} <= set(found.subjects)
    assert "modprobe nvidia-peermem" in found.remedy.commands
    assert found.remedy.undo


def test_dmabuf_makes_peermem_unnecessary() -> None:
    assert not findings(without_peermem("hgx-h100"), "NIC507")
    old = only(without_peermem("hgx-h100", kernel="5.4.0-144-generic"), "NIC507")
    assert "older than 5.12" in old.summary


def test_who_needs_no_gpudirect() -> None:
    for fixture in ("rtx4090-workstation", "t4-vm", "no-gpu"):
        assert not findings(twin(fixture), "NIC507")
    slow = {f"mlx5_{number}": {"rate": 25} for number in range(4)}
    described = {"modules": {}, "memory_peers": []}
    assert not findings(composed("l40s-8-pcie", machine=described, **slow), "NIC507")


def test_a_module_that_did_not_register() -> None:
    machine = {"modules": {"nvidia_peermem": "550.127.08"}, "memory_peers": []}
    assert only(composed("l40s-8-pcie", machine=machine), "NIC507").severity == "note"


# NIC508


def test_soft_devices_are_worth_a_word_and_more_if_they_break_topo() -> None:
    files: dict[str, Any] = {"/sys/class/infiniband/rxe0": SOFT}
    assert only(twin("hgx-h100", files=files), "NIC508").severity == "note"
    broken = {tuple(nvidia_smi.COMMAND): Output(255, "Failed to get topology\n", "")}
    found = only(twin("hgx-h100", files=files, commands=broken), "NIC508")
    assert (found.severity, found.subjects) == ("warning", ["rxe0"])


# A real kernel's tree


@needs_corpus
def test_a_recorded_guest_with_switches() -> None:
    """A virtual machine that shows its switches is judged: one port is down, one is Ethernet."""
    path = CORPUS / "recorded" / "vm-2package-4numa-8gpu-4hca.tar.xz"
    topology = scan_host(open_source(str(path)))
    port = only(topology, "NIC501")
    assert (port.severity, port.subjects) == ("error", ["mlx5_2"])
    far = {tuple(f.subjects): f.severity for f in findings(topology, "NIC505")}
    assert far == {
        ("gpu4", "gpu5", "mlx5_2"): "warning",
        ("gpu6", "gpu7", "mlx5_3"): "warning",
    }
    assert not findings(topology, "NIC506")
    assert only(topology, "NIC508").severity == "note"


@needs_corpus
def test_recorded_ports_without_a_pci_tree() -> None:
    path = CORPUS / "recorded" / "h100-9hca-infiniband.tar.xz"
    assert not report(scan_host(open_source(str(path))), "NIC").findings
