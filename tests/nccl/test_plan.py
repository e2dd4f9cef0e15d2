"""NCCL's rules one by one, on small machines."""

from __future__ import annotations

import pytest

from gputopo.nccl import tree
from gputopo.nccl.model import (
    Node,
    PathType,
    between_cpus,
    kind_of,
    net_gbytes_per_s,
    nvlink_gbytes_per_s,
    pci_gbytes_per_s,
    system_of,
)
from gputopo.nccl.paths import merged
from gputopo.nccl.plan import Plan
from gputopo.nccl.tree import C2c, Cpu, Gpu, Net, Nic, NvLink, Pci, Tree, fuse, nets

GEN5 = "32.0 GT/s PCIe"
GEN4 = "16.0 GT/s PCIe"


def gpu(
    number: int,
    *,
    sm: int = 90,
    gdr: bool = True,
    nvlinks: tuple[NvLink, ...] = (),
    c2c: C2c | None = None,
    speed: str = GEN5,
) -> Pci:
    return Pci(
        busid=f"0000:{number + 1:02x}:00.0",
        class_code="0x030200",
        link_speed=speed,
        link_width=16,
        gpu=Gpu(dev=number, sm=sm, rank=number, gdr=gdr, nvlinks=nvlinks, c2c=c2c),
    )


def nic(number: int, *, mbps: int = 400_000, gdr: bool = True, ports: int = 1) -> Pci:
    found = tuple(
        Net(name=f"mlx5_{number + i}", dev=number + i, speed_mbps=mbps, port=i + 1, gdr=gdr)
        for i in range(ports)
    )
    return Pci(
        busid=f"0000:{number + 0x81:02x}:00.0",
        class_code="0x020700",
        link_speed=GEN5,
        link_width=16,
        nic=Nic(found),
    )


def switch(number: int, *children: Pci, ids: tuple[str, str, str, str] | None = None) -> Pci:
    vendor, device, subsystem_vendor, subsystem = ids or ("0x11f8", "0x4128", "0x11f8", "0x4128")
    return Pci(
        busid=f"0000:{number + 0xC1:02x}:00.0",
        class_code="0x060400",
        vendor=vendor,
        device=device,
        subsystem_vendor=subsystem_vendor,
        subsystem_device=subsystem,
        link_speed=GEN5,
        link_width=16,
        children=children,
    )


def cpu(numa: int, *children: Pci, vendor: str = "GenuineIntel", model: int = 143) -> Cpu:
    family = 6 if vendor == "GenuineIntel" else 143
    return Cpu(
        numa=numa, arch="x86_64", vendor=vendor, family=family, model=model, children=children
    )


def plan(*cpus: Cpu) -> Plan:
    return Plan(system_of(Tree(cpus)))


def names(nodes: list[Node]) -> list[str]:
    return [node.id for node in nodes]


TO_SWITCH = (NvLink(tree.HIDDEN_PEER, 18),)


@pytest.mark.parametrize(
    ("speed", "width", "gbytes_per_s"),
    [
        ("2.5 GT/s PCIe", 16, 3.0),
        ("2.5 GT/s", 16, 3.0),
        ("5 GT/s", 16, 6.0),
        ("8.0 GT/s PCIe", 8, 6.0),
        (GEN4, 16, 24.0),
        (GEN5, 4, 12.0),
        ("64.0 GT/s PCIe", 16, 96.0),
        (GEN5, 0, 48.0),
        ("", 0, 12.0),
        ("Unknown", 16, 12.0),
        ("16.0 GT/s", 16, 12.0),
    ],
)
def test_pcie_figures(speed: str, width: int, gbytes_per_s: float) -> None:
    assert pci_gbytes_per_s(speed, width) == gbytes_per_s


@pytest.mark.parametrize(
    ("sm", "gbytes_per_s"),
    [
        (0, 20.0),
        (60, 18.0),
        (70, 20.0),
        (80, 20.0),
        (86, 12.0),
        (89, 20.0),
        (90, 20.6),
        (120, 40.1),
    ],
)
def test_nvlink_figures(sm: int, gbytes_per_s: float) -> None:
    assert nvlink_gbytes_per_s(sm) == gbytes_per_s


@pytest.mark.parametrize(
    ("node", "gbytes_per_s"),
    [
        (cpu(0, model=0x4F), 6.0),
        (cpu(0, model=0x55), 10.0),
        (cpu(0, model=0x8F), 22.0),
        (cpu(0, model=0xCF), 40.0),
        (cpu(0, vendor="AuthenticAMD"), 16.0),
        (cpu(0, vendor="HygonGenuine"), 5000.0),
        (Cpu(numa=0, arch="arm64"), 6.0),
        (Cpu(numa=0, arch="ppc64"), 32.0),
    ],
)
def test_figures_between_numa_nodes(node: Cpu, gbytes_per_s: float) -> None:
    assert between_cpus(node) == gbytes_per_s


def test_a_port_without_speed_counts_as_10_gbits() -> None:
    assert net_gbytes_per_s(-1) == net_gbytes_per_s(0) == 1.25
    assert net_gbytes_per_s(400_000) == 50.0


def test_classes_go_by_their_beginning() -> None:
    assert [kind_of(text) for text in ("0x060400", "0x030200", "0x020000", "0x068000")] == [
        "PCI",
        "GPU",
        "NIC",
        "NVS",
    ]
    assert kind_of("0x060000") == kind_of("") == "PCI"


def test_types_along_the_tree() -> None:
    found = plan(
        cpu(0, switch(0, gpu(0), gpu(1)), switch(1, switch(2, gpu(2)), gpu(3)), gpu(4)),
        cpu(1, gpu(5)),
    )
    gpus = found.system.gpus
    kinds = {
        (a.gpu.dev, b.gpu.dev): found.path(a, b).kind.name
        for a in gpus
        for b in gpus
        if a.gpu and b.gpu
    }
    assert kinds[0, 0] == "LOC"
    assert kinds[0, 1] == "PIX"
    assert kinds[2, 3] == "PXB"
    assert kinds[0, 4] == kinds[0, 2] == "PHB"
    assert kinds[0, 5] == kinds[5, 4] == "SYS"


def test_broadcom_levels_are_one_switch() -> None:
    """Gen4 by its subsystem 0xa0xx; Gen5 from 0x0xxx to 0x1xxx; others stay as they are."""

    def kind(upper: str, lower: str, device: str) -> str:
        ids = [("0x1000", device, "0x1000", level) for level in (upper, lower)]
        inner = [switch(n, gpu(n), ids=ids[1]) for n in (1, 2)]
        found = plan(cpu(0, switch(0, *inner, ids=ids[0])))
        return found.path(*found.system.gpus).kind.name

    assert kind("0xa064", "0xa064", "0xc010") == "PIX"
    assert kind("0x0072", "0x1003", "0xc030") == "PIX"
    assert kind("0x100b", "0x100b", "0xc030") == "PXB"
    assert kind("0x0072", "0x1003", "0xc012") == "PXB"


def test_bandwidth_counts_before_type() -> None:
    """A fast NIC behind the CPU is taken before a slow one on the GPU's own switch."""
    found = plan(cpu(0, switch(0, gpu(0), nic(0, mbps=100_000)), switch(1, nic(1))))
    (only,) = found.system.gpus
    assert names(found.nets(only)) == ["mlx5_1"]
    assert found.path(only, found.system.nets[1]).kind is PathType.PHB
    assert not found.gdr(only, found.system.nets[1], send=False)


def test_equal_nics_are_shared_out_by_number() -> None:
    """Numbers of a power of two are mirrored: GPUs 0 to 3 take NICs 0, 2, 1, 3."""
    found = plan(cpu(0, switch(0, *map(gpu, range(4)), *map(nic, range(4)))))
    assert [names(found.nets(node)) for node in found.system.gpus] == [
        ["mlx5_0"],
        ["mlx5_2"],
        ["mlx5_1"],
        ["mlx5_3"],
    ]
    three = plan(cpu(0, switch(0, gpu(0), gpu(1), *map(nic, range(3)))))
    assert [names(three.nets(node)) for node in three.system.gpus] == [
        ["mlx5_0", "mlx5_1"],
        ["mlx5_1", "mlx5_2"],
    ]


def test_without_network_there_is_nothing_to_choose() -> None:
    found = plan(cpu(0, gpu(0)))
    assert found.nets(found.system.gpus[0]) == []


def test_pxn_sends_through_the_gpu_at_the_nic() -> None:
    found = plan(
        cpu(0, switch(0, gpu(0, nvlinks=TO_SWITCH), nic(0))),
        cpu(1, switch(1, gpu(1, nvlinks=TO_SWITCH), nic(1))),
    )
    first, second = found.system.gpus
    far = found.system.nets[1]
    assert found.path(first, far).kind is PathType.PXN
    assert found.relay(first, far) is second
    assert found.relay(second, far) is None
    assert found.gdr(first, far, send=True)
    assert found.path(far, first).kind is PathType.SYS, "receiving keeps its own path"


def test_without_gdr_all_goes_through_the_cpu() -> None:
    found = plan(cpu(0, switch(0, gpu(0, gdr=False), nic(0))))
    (only,), (net,) = found.system.gpus, found.system.nets
    assert found.path(only, net).kind is found.path(net, only).kind is PathType.PHB
    assert not found.gdr(only, net, send=True)


def test_gdr_for_sending_before_ampere_wants_nvlink() -> None:
    alone = plan(cpu(0, switch(0, gpu(0, sm=70), nic(0))))
    pair = plan(cpu(0, switch(0, gpu(0, sm=70), gpu(1, sm=70), nic(0))))
    for found, sends in ((alone, True), (pair, False)):
        first, net = found.system.gpus[0], found.system.nets[0]
        assert found.gdr(first, net, send=False)
        assert found.gdr(first, net, send=True) is sends


def test_c2c_makes_the_cpus_nic_near() -> None:
    near = C2c(mbytes_per_s=44_712, count=10)
    found = plan(cpu(0, gpu(0, c2c=near), nic(0)), cpu(1, gpu(1, c2c=near), nic(1)))
    first, (own, far) = found.system.gpus[0], found.system.nets
    assert found.path(first, found.system.cpus[0]).kind is PathType.C2C
    assert found.path(first, own).kind is PathType.P2C
    assert found.path(first, own).gbytes_per_s == 48.0
    assert found.gdr(first, own, send=True)
    assert found.path(first, far).kind is PathType.SYS
    assert not found.gdr(first, far, send=True)


def test_types_in_a_row() -> None:
    assert merged(PathType.C2C, PathType.PHB) is PathType.P2C
    assert merged(PathType.PIX, PathType.PHB) is PathType.PHB
    assert merged(PathType.SYS, PathType.C2C) is PathType.SYS


def test_p2p_stops_at_the_host_bridge() -> None:
    found = plan(cpu(0, switch(0, gpu(0), gpu(1)), gpu(2)))
    first, second, third = found.system.gpus
    assert found.p2p(first, second)
    assert not found.p2p(first, third)


def test_two_gpus_on_amd_may_be_as_far_as_they_like() -> None:
    found = plan(
        cpu(0, gpu(0), vendor="AuthenticAMD", model=1), cpu(1, gpu(1), vendor="AuthenticAMD")
    )
    assert found.p2p(*found.system.gpus)
    intel = plan(cpu(0, gpu(0)), cpu(1, gpu(1)))
    assert not intel.p2p(*intel.system.gpus)


def test_p2p_that_the_driver_refuses_goes_through_the_cpu() -> None:
    system = system_of(Tree((cpu(0, switch(0, gpu(0), gpu(1))),)))
    found = Plan(system, lambda first, second: False)
    assert not found.p2p(*system.gpus)
    assert found.path(*system.gpus).kind is PathType.PHB
    assert found.p2p(system.gpus[0], system.gpus[0])


def test_through_another_gpu_both_hops_must_work() -> None:
    """GPU 0 and 2 have no NVLink between them, but both have one to GPU 1."""
    ring = {0: (1,), 1: (0, 2), 2: (1,)}
    gpus = [
        gpu(
            number,
            nvlinks=tuple(NvLink(f"0000:{peer + 1:02x}:00.0", 4, "0x030200") for peer in peers),
        )
        for number, peers in ring.items()
    ]
    system = system_of(Tree((cpu(0, *gpus),)))
    first, middle, last = system.gpus
    found = Plan(system)
    assert found.path(first, last).kind is PathType.NVB
    assert found.hops(first, last) == [(first, middle), (middle, last)]
    assert found.p2p(first, last)
    assert not Plan(system, lambda a, b: {a, b} != {middle, last}).p2p(first, last)


def test_nics_that_are_faster_than_the_way_between_gpus() -> None:
    found = plan(cpu(0, switch(0, gpu(0), nic(0))), cpu(1, switch(1, gpu(1), nic(1))))
    assert found.over_net(*found.system.gpus)
    slow = plan(
        cpu(0, switch(0, gpu(0), nic(0, mbps=100_000))),
        cpu(1, switch(1, gpu(1), nic(1, mbps=100_000))),
    )
    assert not slow.over_net(*slow.system.gpus)


def test_ports_of_one_card_are_one_nic() -> None:
    machine = Tree((cpu(0, switch(0, gpu(0), nic(0, mbps=200_000, ports=2))),))
    (one,) = nets(fuse(machine))
    assert (one.name, one.speed_mbps, one.dev) == ("mlx5_0+mlx5_1", 400_000, 2)
    four = Tree((cpu(0, nic(0, mbps=200_000, ports=5)),))
    assert [net.name.count("+") for net in nets(fuse(four))] == [3, 0]


def test_ports_of_unequal_speed_stay_apart() -> None:
    both = Nic((Net(name="a", dev=0, speed_mbps=100_000), Net(name="b", dev=1, speed_mbps=40_000)))
    machine = Tree((Cpu(numa=0, nics=(both,)),))
    assert list(nets(fuse(machine))) == list(nets(machine)) == list(both.nets)


def test_numa_minus_one_is_a_node_of_its_own() -> None:
    found = plan(cpu(-1, gpu(0)), cpu(0, nic(0)))
    (only,), (net,) = found.system.gpus, found.system.nets
    assert found.path(only, net).kind is PathType.SYS
