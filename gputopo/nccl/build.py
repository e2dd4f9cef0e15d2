"""From the topology to NCCL's XML: what NCCL itself would read of this machine.

It reads sysfs its own way (NCCL 2.28.9, src/graph/xml.cc): two levels of the PCI path at a time,
the *maximum* speed and width of both ends of a link, ``numa_node`` as it stands (-1 is a node of
its own), all ports of one bus as one NIC (src/transport/net_ib). Its faults are kept: they decide.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from gputopo.cpulist import parse
from gputopo.facts import Missing, known
from gputopo.nccl import tree
from gputopo.nccl.tree import C2c, Cpu, Net, Nic, NvLink, Pci, Tree
from gputopo.pciaddr import sort_key
from gputopo.probes.cpu import CpuModel
from gputopo.probes.nvml import NvLink as DriverLink
from gputopo.probes.nvml import NvmlGpu
from gputopo.probes.pci import PciFunction
from gputopo.probes.rdma import RdmaDevice
from gputopo.topology.graph import Topology
from gputopo.topology.model import Gpu, Hca

NVLINKS = ((90, 18), (80, 12), (70, 6), (60, 4), (0, 0))
"""How many NVLinks NCCL asks for, by the least compute capability."""

ASSUMED_SM = 80
"""Where the driver does not tell the compute capability."""

DMABUF_KERNEL = (5, 12)
"""The first Linux with DMA-BUF for RDMA."""

LINK_LAYERS = ("InfiniBand", "Ethernet")

AMAZON = 0x1D0F

MAX_PARENTS = 64
"""Bridges above a function: more than any machine has, for recordings that make no sense."""

WITHOUT_GDR = re.compile(r"GeForce|TITAN|GB10\b")
"""Names of GPUs without GPUDirect RDMA (NVIDIA: data center and professional GPUs have it)."""


class Support(NamedTuple):
    """Whether something works, and why or why not in a few words. None: cannot be told."""

    works: bool | None
    reason: str


class Machine(NamedTuple):
    """NCCL's view of a machine. ``network`` is IB, EFA, Socket or none; ``gpus`` and ``ports`` are
    node ids by what NCCL calls a GPU (its address) or a port."""

    tree: Tree
    network: str
    gpus: dict[str, str]
    ports: dict[str, str]
    gdr: Support


def machine_of(topology: Topology) -> Machine:
    """What NCCL would make of this machine, of GPUs that the driver has and ports that are up."""
    builder = _Builder(topology)
    gpus: dict[str, str] = {}
    names: dict[str, str] = {}
    gdr = gdr_support(topology)
    for gpu in usable_gpus(topology):
        assert gpu.pci is not None
        builder.add_gpu(gpu, gdr=gdr.works is not False and not WITHOUT_GDR.search(gpu.name or ""))
        gpus[gpu.pci] = gpu.id
    ports = [port for hca in _hcas_in_order(topology) for port in _ports(hca)]
    network = "none"
    if ports:
        network = "EFA" if any(hca.vendor == AMAZON for hca, _, _ in ports) else "IB"
        for hca, name, (number, speed_mbps) in ports:
            builder.add_port(hca, name, number, speed_mbps, gdr=gdr.works is not False)
            names[name] = hca.id
    else:
        for name, pci, speed_mbps in _interfaces(topology):
            network = "Socket"
            builder.add_interface(name, pci, speed_mbps)
            names[name] = topology.by_pci[pci].id if pci in topology.by_pci else name
    return Machine(builder.tree(), network, gpus, names, gdr)


def usable_gpus(topology: Topology) -> list[Gpu]:
    """The GPUs that a CUDA program would find, in NVML's order."""
    found = [gpu for gpu in topology.gpus if gpu.index is not None and not gpu.lost and gpu.pci]
    return sorted(found, key=lambda gpu: gpu.index or 0)


def gdr_support(topology: Topology) -> Support:
    """Whether the kernel side of GPUDirect RDMA is there: a peer memory module or DMA-BUF."""
    system = known(topology.facts.system)
    if system is None:
        return Support(None, "kernel modules are unknown")
    for module in ("nvidia_peermem", "nv_peer_mem"):
        if module in system.modules:
            return Support(True, f"{module} is loaded")
    if system.memory_peers:
        return Support(True, f"{system.memory_peers[0]} is registered as memory peer")
    kernel = known(system.kernel)
    version = re.match(r"(\d{1,4})\.(\d{1,4})", kernel or "")
    if system.open_modules is None or version is None:
        return Support(None, "no peer memory module; DMA-BUF unknown without driver and kernel")
    if not system.open_modules:
        return Support(False, "nvidia_peermem is not loaded; DMA-BUF needs NVIDIA's open modules")
    text = version[0]
    if (int(version[1]), int(version[2])) < DMABUF_KERNEL:
        return Support(False, f"nvidia_peermem is not loaded; DMA-BUF needs Linux 5.12, not {text}")
    return Support(True, f"DMA-BUF: open kernel modules and Linux {text}")


def usable_port(hca: Hca) -> bool:
    """Whether NCCL would find a port of this HCA: a down one is not there for it."""
    return bool(_ports(hca))


def _hcas_in_order(topology: Topology) -> list[Hca]:
    """NCCL numbers devices by PCI address. Virtual functions beside their physical one are left
    out: they are for others, and share its path."""
    found = [hca for hca in topology.physical_hcas if hca.pci is not None]
    return sorted(found, key=lambda hca: sort_key(hca.pci or ""))


def _ports(hca: Hca) -> list[tuple[Hca, str, tuple[int, int]]]:
    """The active ports: device, name, (port number, Mb/s)."""
    found: list[tuple[Hca, str, tuple[int, int]]] = []
    for port in hca.ports:
        usable = port.link_layer in LINK_LAYERS or hca.vendor == AMAZON
        if port.state == "ACTIVE" and usable:
            name = hca.name or hca.id
            speed_mbps = round((port.rate_gbps or 0) * 1000)
            found.append((hca, f"{name}:{port.port}" if found else name, (port.port, speed_mbps)))
    return found


def _interfaces(topology: Topology) -> list[tuple[str, str | None, int]]:
    """Interfaces for sockets: name, PCI address, Mb/s. Which have an IP address is not known; those
    that are up and InfiniBand's win, as NCCL prefers names that begin with ib."""
    net = known(topology.facts.net)
    found: dict[str, tuple[str, str | None, int]] = {}
    for interface in net.interfaces if net else []:
        if known(interface.state) != "up":
            continue
        speed_mbps = known(interface.speed_mbps) or 0
        if interface.bond is None:
            found[interface.name] = (interface.name, interface.pci, speed_mbps)
        else:
            before = found.get(interface.bond, ("", None, 0))[2]
            found[interface.bond] = (interface.bond, None, before + speed_mbps)
    infiniband = [entry for name, entry in found.items() if name.startswith("ib")]
    return infiniband or list(found.values())


class _Draft:
    """A PCI function while the tree grows."""

    def __init__(self) -> None:
        self.below: dict[str, None] = {}
        self.gpu: tree.Gpu | None = None
        self.nets: list[Net] = []


class _Builder:
    def __init__(self, topology: Topology) -> None:
        facts = topology.facts
        pci, nvml, rdma = known(facts.pci), known(facts.nvml), known(facts.rdma)
        self.topology = topology
        self.functions = {f.address: f for f in pci.functions} if pci else {}
        self.nvml = {gpu.index: gpu for gpu in nvml.gpus} if nvml else {}
        self.rdma: dict[str, RdmaDevice] = {d.name: d for d in rdma.devices} if rdma else {}
        self.cpus: dict[int, dict[str, None]] = {}
        """The functions on each CPU node, the nodes in the order in which NCCL meets them."""
        self.drafts: dict[str, _Draft] = {}
        self.without_pci: list[Net] = []
        self.count = 0

    def add_gpu(self, gpu: Gpu, *, gdr: bool) -> None:
        assert gpu.pci is not None and gpu.index is not None
        driver = self.nvml.get(gpu.index)
        sm = _sm(gpu)
        self._place(gpu.pci).gpu = tree.Gpu(
            dev=gpu.index,
            sm=sm,
            rank=gpu.index,
            gdr=gdr,
            nvlinks=self._nvlinks(driver, sm) if driver else (),
            c2c=_c2c(driver) if driver else None,
        )

    def add_port(self, hca: Hca, name: str, number: int, speed_mbps: int, *, gdr: bool) -> None:
        assert hca.pci is not None
        nets = self._nets_of(folded(hca.pci))
        device = self.rdma.get(hca.name or hca.id)
        nets.append(
            Net(
                name=name,
                dev=self._number(),
                speed_mbps=speed_mbps,
                port=number + len(nets),
                guid=_guid(known(device.system_image_guid)) if device else None,
                gdr=gdr,
            )
        )

    def add_interface(self, name: str, pci: str | None, speed_mbps: int) -> None:
        nets = self._nets_of(pci) if pci else self.without_pci
        nets.append(Net(name=name, dev=self._number(), speed_mbps=speed_mbps))

    def tree(self) -> Tree:
        cpus = [self._cpu(numa, roots) for numa, roots in self.cpus.items()]
        if self.without_pci and not cpus:
            cpus = [self._cpu(0, {})]
        if self.without_pci:
            # The first CPU node takes what is no PCI device.
            nics = (Nic(tuple(self.without_pci)),)
            cpus[0] = msgspec.structs.replace(cpus[0], nics=nics)
        return Tree(tuple(cpus))

    def _number(self) -> int:
        self.count += 1
        return self.count - 1

    def _nets_of(self, address: str) -> list[Net]:
        """The ports at an address; those of one where nothing is are not on PCI for NCCL."""
        return self._place(address).nets if address in self.functions else self.without_pci

    def _place(self, address: str) -> _Draft:
        """The function in the tree, added with all that NCCL sees above it."""
        if address in self.drafts:
            return self.drafts[address]
        draft = self.drafts[address] = _Draft()
        function = self.functions.get(address)
        above = self._above(function) if function else None
        if above is not None:
            self._place(above).below[address] = None
        else:
            self.cpus.setdefault(_numa(function), {})[address] = None
        return draft

    def _above(self, function: PciFunction) -> str | None:
        """As :func:`above_in_nccl`, of functions that are there. The way up gets shorter with each
        step, also in a recording that contradicts itself."""
        above = above_in_nccl(function)
        there = self.functions.get(above or "")
        if there is None or not len(there.parents) < len(function.parents) <= MAX_PARENTS:
            return None
        return above

    def _cpu(self, numa: int, roots: dict[str, None]) -> Cpu:
        facts = known(self.topology.facts.cpu)
        model = known(facts.model) if facts else None
        cpu = Cpu(
            numa=numa,
            affinity=self._affinity(numa),
            arch=_arch(model),
            children=tuple(self._pci(address) for address in sorted(roots)),
        )
        if model is None or cpu.arch != "x86_64":
            return cpu
        return msgspec.structs.replace(
            cpu,
            vendor=known(model.vendor) or "",
            family=_family(known(model.family)),
            model=known(model.model),
        )

    def _affinity(self, numa: int) -> str | None:
        """The CPUs of a node as words of the kernel's mask, as wide as all nodes need."""
        cpus = {node.index: parse(node.cpus) for node in self.topology.numa_nodes if node.cpus}
        if numa not in cpus:
            return None
        words = max(max(found) for found in cpus.values()) // 32 + 1
        mask = sum(1 << cpu for cpu in cpus[numa])
        return ",".join(f"{mask >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(range(words)))

    def _pci(self, address: str) -> Pci:
        draft = self.drafts[address]
        function = self.functions.get(address)
        port = self.functions.get(function.parents[-1]) if function and function.parents else None
        return Pci(
            busid=address,
            class_code=f"0x{function.class_code:06x}" if function else "0x03",
            vendor=_id(function.vendor) if function else "",
            device=_id(function.device) if function else "",
            subsystem_vendor=_id(function.subsystem_vendor) if function else "",
            subsystem_device=_id(function.subsystem_device) if function else "",
            link_speed=link_speed(function, port),
            link_width=link_width(function, port),
            children=tuple(self._pci(below) for below in sorted(draft.below)),
            gpu=draft.gpu,
            nic=Nic(tuple(draft.nets)) if draft.nets else None,
        )

    def _nvlinks(self, driver: NvmlGpu, sm: int) -> tuple[NvLink, ...]:
        """Active links by peer; a peer that is no function here is taken for a switch."""
        most = next(count for least, count in NVLINKS if sm >= least)
        counts: dict[str, int] = {}
        for link in driver.nvlinks:
            peer = _peer(link)
            if link.index < most and link.active is True and peer is not None:
                counts[peer] = counts.get(peer, 0) + 1
        return tuple(NvLink(peer, count, self._class(peer)) for peer, count in counts.items())

    def _class(self, peer: str) -> str:
        function = self.functions.get(peer)
        return f"0x{function.class_code:06x}" if function else tree.NVSWITCH_CLASS


def folded(address: str) -> str:
    """Where NCCL puts an RDMA device: function 0 of device 0 of its bus, so that the ports and the
    virtual functions of a card are one NIC (NCCL_IB_MERGE_VFS=1)."""
    return f"{address.rpartition(':')[0]}:00.0"


def above_in_nccl(function: PciFunction) -> str | None:
    """The switch that NCCL sees above a function; None where it sees the CPU.

    It goes up two levels of the path at a time, which makes one of the upstream and downstream port
    of a switch, and drops a root port. Addresses with a longer domain end its walk.
    """
    last_two = function.parents[-2:]
    if len(last_two) < 2 or any(len(address) != len("0000:00:00.0") for address in last_two):
        return None
    return last_two[0]


def link_speed(function: PciFunction | None, port: PciFunction | None) -> str:
    """The slower of the maximum speeds of both ends, as the kernel writes it; empty if unknown."""
    ends = [end.link.max_speed for end in (function, port) if end is not None and end.link]
    speeds = [speed for speed in ends if not isinstance(speed, Missing)]
    return f"{min(speeds):.1f} GT/s PCIe" if speeds else ""


def link_width(function: PciFunction | None, port: PciFunction | None) -> int:
    """The lesser of the maximum widths of both ends; 0, which counts as 16, where one is unknown,
    as that of a root complex always is."""
    if function is None or port is None or function.link is None or port.link is None:
        return 0
    widths = (function.link.max_width, port.link.max_width)
    return min(width if isinstance(width, int) else 0 for width in widths)


def _peer(link: DriverLink) -> str | None:
    """The address at the other end; where the driver names none, that of a hidden switch."""
    if isinstance(link.remote, str):
        return link.remote
    return tree.HIDDEN_PEER if link.remote.reason == "unparsed" else None


def _numa(function: PciFunction | None) -> int:
    """The text of ``numa_node`` as a number: -1 stays, an unreadable one is 0. A function without
    sysfs entry is at -1."""
    if function is None:
        return -1
    return function.numa_node if isinstance(function.numa_node, int) else 0


def _sm(gpu: Gpu) -> int:
    """10 * major + minor: 90 for 9.0, 89 for 8.9, 120 for 12.0."""
    major, _, minor = (gpu.compute_capability or "").partition(".")
    return 10 * int(major) + int(minor) if major.isdigit() and minor.isdigit() else ASSUMED_SM


def _c2c(driver: NvmlGpu) -> C2c | None:
    count, speed = known(driver.c2c_links), known(driver.c2c_mbytes_per_s)
    if not count or not speed or known(driver.c2c_status) == 0:
        return None
    return C2c(speed, count)


def _arch(model: CpuModel | None) -> str:
    """The architecture in NCCL's words, for which it was built."""
    architecture = model.architecture if model else "x86_64"
    return {"aarch64": "arm64"}.get(architecture, architecture)


def _family(family: int | None) -> int | None:
    """NCCL adds the extended family shifted by four bits: AMD's 23 (17h) is 143 (8Fh) for it."""
    return 15 + (family - 15 << 4) if family is not None and family > 15 else family


def _id(number: int | None) -> str:
    return "" if number is None else f"0x{number:04x}"


def _guid(text: str | None) -> str | None:
    """NCCL prints the bytes of the GUID from last to first."""
    digits = (text or "").replace(":", "")
    if not re.fullmatch(r"[0-9a-fA-F]{16}", digits):
        return None
    return f"0x{int.from_bytes(bytes.fromhex(digits), 'little'):x}"
