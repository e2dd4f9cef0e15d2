"""NCCL's graph: GPUs, PCI switches, NVSwitch, CPUs, NICs and networks, and the links between them.

Bandwidths are GB/s one way as NCCL 2.28.9 counts them (src/graph/topo.h, topo.cc): below what
hardware can do, and the same for each machine of a kind. AMD's figure between NUMA nodes rises to
24 (Zen 3 and 4) and 32 (Zen 5) after 2.30.
"""

from __future__ import annotations

from enum import IntEnum

from gputopo.nccl.tree import Cpu, Gpu, Net, Nic, Pci, Tree, functions


class PathType(IntEnum):
    """How far apart two nodes are, near to far (order since NCCL 2.28.3; src/graph/topo.cc).

    Links have the same types: a PCI link is PIX, one between CPUs is SYS.
    """

    LOC = 0
    NVL = 1
    NVB = 2
    C2C = 3
    PIX = 4
    PXB = 5
    P2C = 6
    PXN = 7
    PHB = 8
    SYS = 9
    NET = 10
    DIS = 11


MEANINGS = {
    PathType.LOC: "the device itself",
    PathType.NVL: "NVLink, direct or through NVSwitch",
    PathType.NVB: "NVLink through another GPU",
    PathType.C2C: "NVLink-C2C between CPU and GPU",
    PathType.PIX: "one PCIe switch",
    PathType.PXB: "several PCIe switches, no CPU",
    PathType.P2C: "C2C to the CPU, then PCIe",
    PathType.PXN: "NVLink to another GPU, then its PCIe path to the NIC",
    PathType.PHB: "the CPU's host bridge",
    PathType.SYS: "the link between NUMA nodes",
    PathType.NET: "the network",
    PathType.DIS: "no path",
}

LOCAL = 5000.0
"""GB/s of a device to itself, and of what NCCL holds to cost nothing."""

UNITS_PER_LANE = {
    "2.5 GT/s": 15,
    "5 GT/s": 30,
    "8 GT/s": 60,
    "16 GT/s": 120,
    "32 GT/s": 240,
    "5.0 GT/s PCIe": 30,
    "8.0 GT/s PCIe": 60,
    "16.0 GT/s PCIe": 120,
    "32.0 GT/s PCIe": 240,
    "64.0 GT/s PCIe": 480,
}
"""100 Mb/s of a lane by the kernel's text, which is matched by its beginning."""

UNKNOWN_UNITS = 60
"""What any other text counts as: 8 GT/s."""

NVLINK = ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (70, 20.0), (60, 18.0), (0, 20.0))
"""GB/s of one NVLink by the least compute capability that it holds for."""

INTEL_MODELS = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0), (0, 6.0))
"""GB/s between NUMA nodes by the least CPUID model of family 6 (Emerald Rapids, Sapphire Rapids,
Skylake, older)."""

CLASSES = (
    ("0x060400", "PCI"),
    ("0x080100", "PCI"),
    ("0x068000", "NVS"),
    ("0x068001", "CPU"),
    ("0x03", "GPU"),
    ("0x02", "NIC"),
)
"""Kind of node by the beginning of the PCI class; any other is a switch."""


class Link:
    """A link out of a node. Links come in pairs, one each way."""

    __slots__ = ("gbytes_per_s", "kind", "to")

    def __init__(self, kind: PathType, to: Node, gbytes_per_s: float) -> None:
        self.kind = kind
        self.to = to
        self.gbytes_per_s = gbytes_per_s


class Node:
    """A node of the graph, compared by identity. ``kind`` is GPU, PCI, NVS, CPU, NIC or NET."""

    __slots__ = ("cpu", "gpu", "id", "ids", "kind", "links", "net")

    def __init__(
        self,
        kind: str,
        node_id: str,
        *,
        gpu: Gpu | None = None,
        net: Net | None = None,
        cpu: Cpu | None = None,
        ids: tuple[str, ...] = (),
    ) -> None:
        self.kind = kind
        self.id = node_id
        self.gpu = gpu
        self.net = net
        self.cpu = cpu
        self.ids = ids
        """Vendor, device, and those of the subsystem, of a PCI switch."""
        self.links: list[Link] = []

    def __repr__(self) -> str:
        return f"{self.kind}/{self.id}"

    def connect(self, other: Node, kind: PathType, gbytes_per_s: float) -> None:
        """Adds a link, or bandwidth to one that is there; the fastest link stays in front."""
        link = next((k for k in self.links if k.to is other and k.kind == kind), None)
        if link is None:
            link = Link(kind, other, 0.0)
            self.links.append(link)
        link.gbytes_per_s = round(link.gbytes_per_s + gbytes_per_s, 6)
        place = self.links.index(link)
        while place and self.links[place - 1].gbytes_per_s < link.gbytes_per_s:
            place -= 1
        self.links.remove(link)
        self.links.insert(place, link)


class System:
    """All nodes by kind, in NCCL's order, which decides between equals."""

    def __init__(self) -> None:
        self.gpus: list[Node] = []
        self.switches: list[Node] = []
        self.nvswitches: list[Node] = []
        self.cpus: list[Node] = []
        self.nics: list[Node] = []
        self.nets: list[Node] = []


def system_of(tree: Tree) -> System:
    """The graph that NCCL builds from its XML."""
    system = System()
    for cpu in tree.cpus:
        _add_cpu(system, cpu)
    gpus = {gpu.id: gpu for gpu in reversed(system.gpus)}
    for gpu in system.gpus:
        _add_nvlinks(system, gpu, gpus)
        _add_c2c(gpu)
    switches = {switch.id: switch for switch in reversed(system.switches)}
    for pci in functions(tree):
        for peer in pci.peers:
            if pci.busid in switches and peer in switches:
                switches[pci.busid].connect(switches[peer], PathType.LOC, LOCAL)
    _flatten(system)
    for first in system.cpus:
        for second in system.cpus:
            if first is not second and _host(first) == _host(second):
                first.connect(second, PathType.SYS, between_cpus(first.cpu))
    for node in system.cpus:
        _uplinks_last(node)
    return system


def kind_of(class_code: str) -> str:
    """Kind of node that a PCI class makes."""
    return next((kind for prefix, kind in CLASSES if class_code.startswith(prefix)), "PCI")


def pci_gbytes_per_s(speed: str, width: int) -> float:
    """GB/s that NCCL gives a PCIe link; width 0 (unknown) counts as 16 lanes."""
    units = next((u for text, u in UNITS_PER_LANE.items() if speed.startswith(text)), UNKNOWN_UNITS)
    return (width or 16) * units / 80


def nvlink_gbytes_per_s(sm: int) -> float:
    """GB/s of one NVLink of a GPU of this compute capability."""
    return next((speed for least, speed in NVLINK if sm >= least), 20.0)


def net_gbytes_per_s(speed_mbps: int) -> float:
    """GB/s of a port; one without a speed counts as 10 Gb/s."""
    return (speed_mbps if speed_mbps > 0 else 10_000) / 8000


def between_cpus(cpu: Cpu | None) -> float:
    """GB/s between the NUMA nodes of such a machine, sockets or not."""
    if cpu is None:
        return LOCAL
    if cpu.arch == "ppc64":
        return 32.0
    if cpu.arch == "arm64":
        return 6.0
    if cpu.arch != "x86_64":
        return LOCAL
    model = (cpu.model or 0) if cpu.family == 6 else 0
    if cpu.vendor == "GenuineIntel":
        return next(speed for least, speed in INTEL_MODELS if model >= least)
    if cpu.vendor == "AuthenticAMD":
        return 16.0
    if cpu.vendor in ("CentaurHauls", "  Shanghai  "):
        return 9.0 if (cpu.family, cpu.model) == (7, 0x5B) else 6.0
    return LOCAL


def _host(node: Node) -> str | None:
    return node.cpu.host_hash if node.cpu else None


def _add_cpu(system: System, cpu: Cpu) -> None:
    node = Node("CPU", str(cpu.numa), cpu=cpu)
    system.cpus.append(node)
    for pci in cpu.children:
        _add_pci(system, pci, node)
    for nic in cpu.nics:
        # All NICs without PCI of one CPU are one node (src/graph/topo.cc, ncclTopoAddCpu).
        there, new = _nic_at(system, f"cpu{cpu.numa}")
        if new:
            _join(node, there, PathType.PIX, LOCAL)
        _add_nets(system, nic, there)


def _add_pci(system: System, pci: Pci, parent: Node) -> None:
    node: Node | None = None
    if pci.gpu is not None:
        if pci.gpu.rank is None:
            return
        node = Node("GPU", pci.busid, gpu=pci.gpu)
        system.gpus.append(node)
    elif pci.nic is not None:
        there, new = _nic_at(system, pci.busid)
        node = there if new else None
        _add_nets(system, pci.nic, there)
    elif kind_of(pci.class_code) == "PCI":
        ids = (pci.vendor, pci.device, pci.subsystem_vendor, pci.subsystem_device)
        node = Node("PCI", pci.busid, ids=ids)
        system.switches.append(node)
        for child in pci.children:
            _add_pci(system, child, node)
    if node is not None:
        _join(node, parent, PathType.PIX, pci_gbytes_per_s(pci.link_speed, pci.link_width))


def _nic_at(system: System, place: str) -> tuple[Node, bool]:
    """The NIC at a place, which several entries of a file can share, and whether it is new."""
    found = next((nic for nic in system.nics if nic.id == place), None)
    if found is not None:
        return found, False
    system.nics.append(Node("NIC", place))
    return system.nics[-1], True


def _join(first: Node, second: Node, kind: PathType, gbytes_per_s: float) -> None:
    first.connect(second, kind, gbytes_per_s)
    second.connect(first, kind, gbytes_per_s)


def _add_nets(system: System, nic: Nic, node: Node) -> None:
    for net in nic.nets:
        there = Node("NET", net.name, net=net)
        system.nets.append(there)
        _join(node, there, PathType.NET, net_gbytes_per_s(net.speed_mbps))


def _add_nvlinks(system: System, node: Node, gpus: dict[str, Node]) -> None:
    """GPUs list each other, so a link between two is added from both; all switches are one."""
    assert node.gpu is not None
    for link in node.gpu.nvlinks:
        gbytes_per_s = link.count * nvlink_gbytes_per_s(node.gpu.sm)
        kind = kind_of(link.target_class)
        if kind == "GPU":
            if link.target in gpus:
                node.connect(gpus[link.target], PathType.NVL, gbytes_per_s)
            continue
        remote = _cpu_above(node) if kind == "CPU" else _nvswitch(system)
        if remote is not None:
            _join(node, remote, PathType.NVL, gbytes_per_s)


def _nvswitch(system: System) -> Node:
    if not system.nvswitches:
        system.nvswitches.append(Node("NVS", "0"))
    return system.nvswitches[0]


def _add_c2c(node: Node) -> None:
    cpu = _cpu_above(node)
    if node.gpu is None or node.gpu.c2c is None or cpu is None:
        return
    c2c = node.gpu.c2c
    _join(node, cpu, PathType.C2C, c2c.mbytes_per_s * c2c.count / 1000)


def _cpu_above(node: Node) -> Node | None:
    """The CPU that a device hangs on, up the PCI tree."""
    seen: set[Node] = set()
    while node.kind != "CPU":
        seen.add(node)
        above = (
            link.to
            for link in node.links
            if link.kind == PathType.PIX and link.to.kind in ("PCI", "CPU") and link.to not in seen
        )
        up = next(above, None)
        if up is None:
            return None
        node = up
    return node


def _broadcom_generation(ids: tuple[str, ...], level: int) -> int:
    """4 or 5 for a Broadcom PEX switch that shows two levels where the hardware has one; else 0.

    ``level`` is 0 for the upper and 1 for the lower; Gen5 tells them apart by the subsystem.
    """
    try:
        vendor, device, subsystem_vendor, subsystem = (int(text, 16) for text in ids)
    except ValueError:
        return 0
    upper = subsystem & 0xF000
    if (vendor, device, subsystem_vendor, upper) == (0x1000, 0xC010, 0x1000, 0xA000):
        return 4
    if (vendor, device, subsystem_vendor, upper) == (0x1000, 0xC030, 0x1000, level * 0x1000):
        return 5
    return 0


def _flatten(system: System) -> None:
    """Makes one node of each Broadcom switch and its own lower halves (NCCL 2.9.6, Gen5 2.20.3)."""
    done: set[Node] = set()
    for switch in list(system.switches):
        generation = _broadcom_generation(switch.ids, 0)
        if not generation or switch in done:
            continue
        done.add(switch)
        lower = [
            link.to
            for link in switch.links
            if link.to not in done and _broadcom_generation(link.to.ids, 1) == generation
        ]
        switch.links = [link for link in switch.links if link.to not in lower]
        for sub in lower:
            done.add(sub)
            system.switches.remove(sub)
            for link in sub.links:
                if link.to is not switch:
                    switch.links.append(link)
                    _redirect(link.to, sub, switch)


def _redirect(node: Node, old: Node, new: Node) -> None:
    """Makes the link of a node to ``old`` one to ``new``."""
    link = next((link for link in node.links if link.to is old), None)
    if link is not None:
        link.to = new


def _uplinks_last(root: Node) -> None:
    """Orders the links of each node of a CPU's PCI tree so that the way up comes last."""
    seen = {root}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        for link in node.links:
            if link.kind == PathType.PIX and link.to not in seen:
                seen.add(link.to)
                waiting.append(link.to)
                link.to.links.sort(key=lambda back, above=node: back.to is above)  # type: ignore[misc]
