"""The machine as NCCL's topology XML has it: CPU nodes, PCI devices below, GPUs and NICs in those.

Element and attribute meanings are those of NCCL 2.28.9 (src/graph/xml.cc, src/graph/topo.cc). A
file may be partial: NCCL fills what is not there from the live machine, :func:`complete` from what
the caller knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import msgspec

NVSWITCH_CLASS = "0x068000"
HIDDEN_PEER = "ffffffff:ff:ff.0"
"""An NVLink peer that is no PCI function of this machine; NCCL takes it for a switch."""

MAX_FUSED = 4
"""Devices of one fused NIC (NCCL_NET_MAX_DEVS_PER_NIC of NCCL's own network plugin)."""


class NvLink(msgspec.Struct, frozen=True):
    """``count`` NVLinks of a GPU to one peer; ``target_class`` is the PCI class of that peer."""

    target: str
    count: int
    target_class: str = NVSWITCH_CLASS


class C2c(msgspec.Struct, frozen=True):
    """NVLink-C2C to the CPU: ``mbytes_per_s`` is MB/s of one link, one way."""

    mbytes_per_s: int
    count: int


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """``dev`` is NVML's index, ``sm`` is 10 * major + minor of the compute capability.

    NCCL leaves a GPU without ``rank`` out of its graph.
    """

    dev: int
    sm: int
    rank: int | None = None
    gdr: bool = False
    nvlinks: tuple[NvLink, ...] = ()
    c2c: C2c | None = None


class Net(msgspec.Struct, frozen=True, kw_only=True):
    """One network port; ``speed_mbps`` is Mb/s, ``dev`` its number. ``ports`` are the names of
    those that it is made of, where it is several as one."""

    name: str
    dev: int
    speed_mbps: int = 0
    port: int = 0
    guid: str | None = None
    max_connections: int | None = None
    gdr: bool = False
    ports: tuple[str, ...] = ()


class Nic(msgspec.Struct, frozen=True):
    nets: tuple[Net, ...] = ()


class Pci(msgspec.Struct, frozen=True, kw_only=True):
    """One PCI function. Numbers are text as in sysfs; ``link_width`` 0 is unknown."""

    busid: str
    class_code: str = ""
    vendor: str = ""
    device: str = ""
    subsystem_vendor: str = ""
    subsystem_device: str = ""
    link_speed: str = ""
    link_width: int = 0
    children: tuple[Pci, ...] = ()
    gpu: Gpu | None = None
    nic: Nic | None = None
    peers: tuple[str, ...] = ()
    """Broadcom switches that this one has a direct link to (``pcilink``)."""


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node. ``affinity`` is hexadecimal words; ``family`` and ``model`` are CPUID's."""

    numa: int
    affinity: str | None = None
    arch: str = ""
    vendor: str = ""
    family: int | None = None
    model: int | None = None
    host_hash: str | None = None
    children: tuple[Pci, ...] = ()
    nics: tuple[Nic, ...] = ()


class Tree(msgspec.Struct, frozen=True):
    cpus: tuple[Cpu, ...] = ()
    name: str | None = None


def functions(tree: Tree) -> Iterator[Pci]:
    """All PCI functions, each before those below it."""
    waiting = [pci for cpu in reversed(tree.cpus) for pci in reversed(cpu.children)]
    while waiting:
        pci = waiting.pop()
        yield pci
        waiting.extend(reversed(pci.children))


def nets(tree: Tree) -> Iterator[Net]:
    for nic in (pci.nic for pci in functions(tree)):
        yield from nic.nets if nic else ()
    for cpu in tree.cpus:
        for nic in cpu.nics:
            yield from nic.nets


class Fill(msgspec.Struct, frozen=True, kw_only=True):
    """What a partial file leaves to the machine: the kind of its GPUs and NICs, all alike.

    ``nvlinks`` is NVLinks of each GPU to NVSwitches, ``speed_mbps`` Mb/s of each NIC.
    """

    sm: int
    nvlinks: int = 0
    speed_mbps: int = 0
    gdr: bool = True


def complete(tree: Tree, fill: Fill) -> Tree:
    """``tree`` with a GPU in each function of class 0x03, and a NIC in each of class 0x02.

    What the file has is kept; numbers are given in the order of the file.
    """
    gpu_numbers = count(sum(pci.gpu is not None for pci in functions(tree)))
    net_numbers = count(sum(1 for _ in nets(tree)))
    links = (NvLink(HIDDEN_PEER, fill.nvlinks),) if fill.nvlinks else ()

    def filled(pci: Pci) -> Pci:
        if pci.gpu is None and pci.class_code.startswith("0x03"):
            dev = next(gpu_numbers)
            gpu = Gpu(dev=dev, sm=fill.sm, rank=dev, gdr=fill.gdr, nvlinks=links)
            return msgspec.structs.replace(pci, gpu=gpu)
        if pci.nic is None and pci.class_code.startswith("0x02"):
            dev = next(net_numbers)
            net = Net(name=f"net{dev}", dev=dev, speed_mbps=fill.speed_mbps, gdr=fill.gdr)
            return msgspec.structs.replace(pci, nic=Nic((net,)))
        return pci

    return mapped(tree, on_pci=filled)


def fuse(tree: Tree) -> Tree:
    """``tree`` with the ports of each NIC as one (NCCL_NET_MERGE_LEVEL=PORT, since 2.24).

    Ports of unequal speed are left alone. A fused port is called by all names (``a+b``), is as fast
    as all of them, and takes a number above those of the devices.
    """
    numbers = count(max((net.dev for net in nets(tree)), default=-1) + 1)

    def fused(nic: Nic) -> Nic:
        by_speed: dict[int, list[Net]] = {}
        for net in nic.nets:
            by_speed.setdefault(net.speed_mbps, []).append(net)
        return Nic(
            tuple(
                _as_one(group[start : start + MAX_FUSED], numbers)
                for group in by_speed.values()
                for start in range(0, len(group), MAX_FUSED)
            )
        )

    return mapped(tree, on_nic=fused)


def _as_one(group: list[Net], numbers: Iterator[int]) -> Net:
    if len(group) == 1:
        return group[0]
    return msgspec.structs.replace(
        group[0],
        name="+".join(net.name for net in group),
        dev=next(numbers),
        speed_mbps=sum(net.speed_mbps for net in group),
        gdr=all(net.gdr for net in group),
        ports=tuple(net.name for net in group),
    )


def mapped(
    tree: Tree,
    on_pci: Callable[[Pci], Pci] = lambda pci: pci,
    on_nic: Callable[[Nic], Nic] = lambda nic: nic,
) -> Tree:
    """``tree`` with each PCI function and each NIC replaced, in the order of the file."""

    def below(pci: Pci) -> Pci:
        new = on_pci(pci)
        nic = on_nic(new.nic) if new.nic else None
        children = tuple(below(child) for child in new.children)
        return msgspec.structs.replace(new, nic=nic, children=children)

    return Tree(
        tuple(
            msgspec.structs.replace(
                cpu,
                children=tuple(below(pci) for pci in cpu.children),
                nics=tuple(on_nic(nic) for nic in cpu.nics),
            )
            for cpu in tree.cpus
        ),
        tree.name,
    )
