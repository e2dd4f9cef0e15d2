"""What is told of NCCL on whole machines, and what of it changes when something is broken."""

from __future__ import annotations

import pytest

from gputopo import scan
from gputopo.nccl import predict, prediction, xml
from gputopo.nccl.build import folded, gdr_support, machine_of
from gputopo.nccl.model import system_of
from gputopo.nccl.predict import NcclChoice, Prediction
from gputopo.report.nccl import render_nccl
from gputopo.topology.graph import Topology
from tests.rules.twin import twin

DEVICES = "/sys/bus/pci/devices"

FIXTURES = [
    "a100-nps4",
    "azure-ndv5-vm",
    "dgx-1-v100",
    "dgx-2",
    "dgx-a100",
    "gb200-tray",
    "gh200",
    "hgx-b200",
    "hgx-h100",
    "l40s-8-pcie",
    "no-gpu",
    "rtx4090-workstation",
    "t4-vm",
]


def of(fixture: str) -> list[NcclChoice]:
    return predict(scan(f"fixture:{fixture}"))


def kinds(found: Prediction) -> set[str]:
    of_gpus = {remark.kind for choice in found.choices for remark in choice.remarks}
    return of_gpus | {remark.kind for remark in found.remarks}


@pytest.mark.parametrize("name", FIXTURES)
def test_every_machine_can_be_told(name: str) -> None:
    topology = scan(f"fixture:{name}")
    choices = predict(topology)
    assert [choice.gpu for choice in choices] == [gpu.id for gpu in topology.gpus]
    for choice in choices:
        assert set(choice.nics) <= set(topology.nodes)
        assert choice.nics and choice.path and choice.gdr is not None
        others = [gpu for peers in choice.p2p for gpu in peers.gpus]
        assert len(others) == len(topology.gpus) - 1
    assert "degraded-link-unseen" not in kinds(prediction(topology))
    text = render_nccl(topology, width=80)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", FIXTURES)
def test_written_topology_comes_back_equal(name: str) -> None:
    tree = machine_of(scan(f"fixture:{name}")).tree
    assert xml.read(xml.write(tree)) == tree
    system_of(tree)


def test_hgx_h100_has_a_nic_for_each_gpu() -> None:
    choices = of("hgx-h100")
    assert [choice.nics for choice in choices] == [
        [f"mlx5_{number}"] for number in (0, 3, 4, 5, 6, 9, 10, 11)
    ]
    for choice in choices:
        assert (choice.path, choice.gbytes_per_s, choice.gdr, choice.gdr_send) == (
            "PIX",
            48.0,
            True,
            True,
        )
        (peers,) = choice.p2p
        assert (peers.by, peers.path, peers.gbytes_per_s) == ("P2P", "NVL", 370.8)
        assert len(peers.gpus) == 7
    assert [choice.numa for choice in choices] == [0] * 4 + [1] * 4


def test_dgx_a100_leaves_its_storage_nics_alone() -> None:
    found = prediction(scan("fixture:dgx-a100"))
    assert [choice.nics for choice in found.choices] == [
        [f"mlx5_{number}"] for number in (0, 1, 2, 3, 6, 7, 8, 9)
    ]
    assert all(choice.path == "PIX" and choice.gdr for choice in found.choices)
    (idle,) = [remark for remark in found.remarks if remark.kind == "nics-not-taken"]
    assert idle.subjects == ["mlx5_4", "mlx5_5", "mlx5_10", "mlx5_11"]


def test_a_virtual_machine_without_switches_has_no_gpudirect() -> None:
    found = prediction(scan("fixture:azure-ndv5-vm"))
    for choice in found.choices:
        assert (choice.path, choice.gdr) == ("PHB", False)
        assert choice.gdr_reason == "PHB is farther than PXB, the default limit"
        assert [peers.path for peers in choice.p2p] == ["NVL"]
    assert "virtual-machine" in kinds(found)


def test_grace_goes_through_c2c() -> None:
    found = prediction(scan("fixture:gh200"))
    (only,) = found.choices
    assert (only.path, only.gdr) == ("P2C", True)
    assert "2.29" in only.gdr_reason
    assert only.nic_names == ["mlx5_0+mlx5_1", "mlx5_2+mlx5_3"]
    assert "ports-fused" in kinds(found)


def test_cards_without_nvlink_use_the_nics_across_sockets() -> None:
    first = of("l40s-8-pcie")[0]
    assert [(peers.gpus, peers.by, peers.path) for peers in first.p2p] == [
        (["gpu1"], "P2P", "PIX"),
        (["gpu2", "gpu3"], "SHM", "PHB"),
        (["gpu4", "gpu5", "gpu6", "gpu7"], "NET", "NET"),
    ]


def test_geforce_has_neither() -> None:
    found = prediction(scan("fixture:rtx4090-workstation"))
    assert found.network == "Socket"
    for choice in found.choices:
        assert choice.gdr is False
        (peers,) = choice.p2p
        assert peers.by == "SHM"
        assert "the GPU does not support it" in peers.reason
    assert "no-rdma" in kinds(found)


def test_hybrid_cube_mesh_goes_through_a_third_gpu() -> None:
    first = of("dgx-1-v100")[0]
    through = {gpu for peers in first.p2p if peers.path == "NVB" for gpu in peers.gpus}
    assert through == {"gpu5", "gpu6", "gpu7"}
    assert all(peers.by == "P2P" for peers in first.p2p)


# Broken twins


def without_peer_memory(fixture: str, *, open_modules: bool) -> Topology:
    kind = "Open Kernel Module" if open_modules else "Kernel Module"
    version = f"NVRM version: NVIDIA UNIX {kind}  570.124.06\n"
    return twin(
        fixture,
        files={
            "/sys/module/nvidia_peermem": None,
            "/sys/module/nv_peer_mem": None,
            "/sys/kernel/mm/memory_peers/nv_mem/version": None,
            "/proc/driver/nvidia/version": version.encode(),
        },
    )


def test_dmabuf_makes_the_module_unnecessary() -> None:
    topology = without_peer_memory("hgx-h100", open_modules=True)
    assert gdr_support(topology) == (True, "DMA-BUF: open kernel modules and Linux 5.15")
    assert predict(topology)[0].gdr is True


def test_without_module_and_dmabuf_data_goes_through_the_cpu() -> None:
    first = predict(without_peer_memory("hgx-h100", open_modules=False))[0]
    assert (first.path, first.gdr, first.gdr_send) == ("PHB", False, False)
    assert "nvidia_peermem is not loaded" in first.gdr_reason


def test_a_degraded_link_is_not_seen() -> None:
    topology = twin("hgx-h100", files={f"{DEVICES}/0000:1a:00.0/current_link_width": b"4\n"})
    first = predict(topology)[0]
    assert (first.nics, first.gbytes_per_s) == (["mlx5_0"], 48.0)
    (remark,) = first.remarks
    assert (remark.kind, remark.subjects) == ("degraded-link-unseen", ["mlx5_0"])
    assert "Gen5 x4 (15.75 GB/s)" in remark.text
    assert "Gen5 x16 (63.02 GB/s)" in remark.text


def test_a_port_that_is_down_is_not_there() -> None:
    topology = twin("hgx-h100", files={"/sys/class/infiniband/mlx5_0/ports/1/state": b"1: DOWN\n"})
    first = predict(topology)[0]
    assert "mlx5_0" not in first.nics
    (remark,) = [remark for remark in first.remarks if remark.kind == "nic-not-seen"]
    assert remark.subjects == ["gpu0", "mlx5_0"]


def test_without_active_ports_there_are_sockets() -> None:
    topology = twin(
        "hgx-h100",
        files={
            f"/sys/class/infiniband/mlx5_{number}/ports/1/state": b"1: DOWN\n"
            for number in range(12)
        },
    )
    found = prediction(topology)
    assert found.network in ("Socket", "none")
    (remark,) = [remark for remark in found.remarks if remark.kind == "no-rdma"]
    assert "no port of mlx5_0" in remark.text
    assert not any(choice.gdr for choice in found.choices)


def test_numa_minus_one_is_a_node_of_its_own() -> None:
    found = prediction(twin("hgx-h100", files={f"{DEVICES}/0000:16:00.0/numa_node": b"-1\n"}))
    assert found.choices[0].numa == -1
    assert found.choices[0].nics == ["mlx5_0"]
    (remark,) = [remark for remark in found.remarks if remark.kind == "numa-unknown"]
    assert remark.subjects == ["gpu0"]


def test_refused_p2p_over_nvlink_stops_nccl() -> None:
    broken = {("nvmlDeviceGetP2PStatus", 0, 1, use): 5 for use in (0, 1)}
    found = prediction(twin("hgx-h100", nvml=broken))
    (remark,) = [remark for remark in found.remarks if remark.kind == "nvlink-p2p-refused"]
    assert "gpu0 to gpu1, read NS (not supported)" in remark.text
    by = {gpu: peers.by for peers in found.choices[0].p2p for gpu in peers.gpus}
    assert by["gpu1"] != "P2P"
    assert by["gpu2"] == "P2P"


def test_a_slow_nic_next_door_is_passed_over() -> None:
    rate = "/sys/class/infiniband/mlx5_0/ports/1/rate"
    topology = twin("hgx-h100", files={rate: b"10 Gb/sec (4X SDR)\n"})
    first = predict(topology)[0]
    assert "mlx5_0" not in first.nics
    (remark,) = [r for r in first.remarks if r.kind == "nearer-nic-passed-over"]
    assert "bandwidth counts first" in remark.text


def test_unknown_kernel_modules_leave_gpudirect_open() -> None:
    topology = twin(
        "hgx-h100",
        files={"/sys/module/nvidia_peermem": None, "/proc/driver/nvidia/version": None},
    )
    first = predict(topology)[0]
    assert (first.path, first.gdr, first.gdr_send) == ("PIX", None, None)


def test_ports_and_virtual_functions_of_a_bus_are_one_place() -> None:
    assert folded("0000:1b:00.1") == folded("0000:1b:03.5") == "0000:1b:00.0"
