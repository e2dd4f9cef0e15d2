"""What NCCL does with its graph: who talks P2P, who GPUDirect RDMA, which NIC each GPU takes.

Defaults of NCCL 2.28.9 with no NCCL_* variable set (src/graph/paths.cc, topo.cc); later versions
are named where they differ. Bandwidths are GB/s one way.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from gputopo.nccl.model import Node, PathType, System
from gputopo.nccl.paths import Path, Paths

P2P_LEVEL = PathType.PXB
"""The farthest P2P (since 2.23); any distance on AMD with two GPUs or fewer."""

GDR_LEVEL = PathType.P2C
"""The farthest GPUDirect RDMA. P2C exists with C2C only, and is the default there since 2.29
(NCCL_NET_GDR_C2C=1 before); elsewhere this is PXB."""

PXN_LEVEL = PathType.P2C
"""The farthest that a GPU may be from the NIC that it relays to (NCCL_PXN_C2C=1)."""

Works = Callable[[Node, Node], bool]


def _always(first: Node, second: Node) -> bool:
    return True


class Plan:
    """The paths of a graph after NCCL's detours, and the choices that follow.

    ``p2p_works`` tells of two GPUs whether the driver allows P2P reads and writes between them.
    """

    def __init__(self, system: System, p2p_works: Works = _always) -> None:
        self.system = system
        self.paths = Paths(system)
        pairs = [(first, second) for first in system.gpus for second in system.gpus]
        self.direct = {pair: self.paths.get(*pair) for pair in pairs}
        """The path between two GPUs before any detour."""
        self._p2p = {
            pair: self.direct[pair].kind <= self.p2p_level
            and all(p2p_works(*hop) for hop in self.hops(*pair))
            for pair in pairs
        }
        self._detour_without_p2p()
        self.net_speeds = {gpu: self._net_speed(gpu) for gpu in system.gpus}
        """GB/s between a GPU and its best network without a CPU in between, GPUDirect or not."""
        self._shorten_through_c2c()
        self._route_to_nets()

    def path(self, start: Node, end: Node) -> Path:
        return self.paths.get(start, end)

    # Between GPUs

    @property
    def p2p_level(self) -> PathType:
        cpu = self.system.cpus[0].cpu if self.system.cpus else None
        amd = cpu is not None and (cpu.arch, cpu.vendor) == ("x86_64", "AuthenticAMD")
        return PathType.SYS if amd and len(self.system.gpus) <= 2 else P2P_LEVEL

    def p2p(self, first: Node, second: Node) -> bool:
        """Whether NCCL uses P2P between two GPUs."""
        return self._p2p[first, second]

    def hops(self, first: Node, second: Node) -> list[tuple[Node, Node]]:
        """The pairs of GPUs on the way between two: one, or two where a GPU is in between (NVB)."""
        via = (node for node in self.direct[first, second].via if node.kind == "GPU")
        chain = [first, *via]
        return list(pairwise(chain))

    def over_net(self, first: Node, second: Node) -> bool:
        """Whether two GPUs of the machine talk through NICs, since that is faster for both
        (NCCL_NET_DISABLE_INTRA=0)."""
        between = self.path(first, second).gbytes_per_s
        return min(self.net_speeds[first], self.net_speeds[second]) > between

    def _net_speed(self, gpu: Node) -> float:
        paths = [self.path(gpu, net) for net in self.system.nets]
        return max((p.gbytes_per_s for p in paths if p.kind <= PathType.PXB), default=0.0)

    def _detour_without_p2p(self) -> None:
        for end in self.system.gpus:
            cpu = self.paths.cpu(end)
            for start in self.system.gpus:
                if cpu is not None and not self._p2p[start, end]:
                    self.paths.divert(start, cpu, end)

    # To networks

    def nets(self, gpu: Node) -> list[Node]:
        """The networks that a GPU takes, in the order of its channels: of those that are nearest,
        bandwidth first.

        GPUs with the same local networks share them out by their NVML index, whose bits are
        reversed if the number of networks is a power of two.
        """
        local = self.paths.nearest_nets(gpu)
        if not local or gpu.gpu is None:
            return []
        sharers = self.paths.nearest_gpus(local[0])
        share = -(-len(local) // max(len(sharers), 1))
        start = _start(gpu.gpu.dev, len(local))
        return [local[(start + channel) % len(local)] for channel in range(share)]

    def gdr(self, gpu: Node, net: Node, *, send: bool) -> bool:
        """Whether GPUDirect RDMA is used from a NIC to a GPU, or the other way (``send``)."""
        if gpu.gpu is None or net.net is None or not (gpu.gpu.gdr and net.net.gdr):
            return False
        if send and gpu.gpu.sm < 80 and not self._spares_pcie(gpu):
            return False
        relay = self.relay(gpu, net)
        return self.path(relay or gpu, net).kind <= GDR_LEVEL

    def relay(self, gpu: Node, net: Node) -> Node | None:
        """The GPU that sends to a network in place of this one (PXN); None where there is none."""
        path = self.path(gpu, net)
        if path.kind != PathType.PXN:
            return None
        return next((node for node in path.via if node.kind == "GPU"), None)

    def _spares_pcie(self, gpu: Node) -> bool:
        """Whether a GPU older than Ampere has no other traffic on PCIe than that of its NIC."""
        peers = [peer for peer in self.system.gpus if peer is not gpu]
        return not peers or any(self.path(gpu, peer).kind == PathType.NVL for peer in peers)

    def _shorten_through_c2c(self) -> None:
        """A NIC nearest to a GPU, and below a CPU with C2C to that GPU, is P2C and not PHB."""
        for gpu in self.system.gpus:
            cpu = self.paths.cpu(gpu)
            if cpu is None or self.path(gpu, cpu).kind != PathType.C2C:
                continue
            for net in self.paths.nearest_nets(gpu):
                if self.path(net, cpu).kind == PathType.PHB:
                    for pair in ((gpu, net), (net, gpu)):
                        path = self.path(*pair)
                        self.paths.put(*pair, path._replace(kind=min(PathType.P2C, path.kind)))

    def _route_to_nets(self) -> None:
        for net in self.system.nets:
            owner, known = None, -1
            for gpu in self.system.gpus:
                if known != self.paths.changes:  # each detour may give a network another owner
                    owner, known = self._owner(net), self.paths.changes
                self._route_to_net(gpu, net, owner)

    def _route_to_net(self, gpu: Node, net: Node, peer: Node | None) -> None:
        """Takes the way through another GPU (PXN) or, without GPUDirect RDMA, through the CPU."""
        if peer is not None and peer is not gpu and self._may_relay(peer, gpu, net):
            self.paths.divert(gpu, peer, net)
        cpu = self.paths.cpu(gpu)
        near = self.path(gpu, net).kind < PathType.PHB
        if cpu is not None and near and not self.gdr(gpu, net, send=False):
            self.paths.divert(net, cpu, gpu)
            self.paths.divert(gpu, cpu, net)

    def _owner(self, net: Node) -> Node | None:
        """The GPU that takes this network for its own."""
        near = [(gpu, self.nets(gpu)) for gpu in self.paths.nearest_gpus(net)]
        channels = max((len(nets) for _, nets in near), default=0)
        for channel in range(channels):
            for gpu, nets in near:
                if nets and nets[channel % len(nets)] is net:
                    return gpu
        return None

    def _may_relay(self, peer: Node, gpu: Node, net: Node) -> bool:
        own, its = self.path(gpu, net), self.path(peer, net)
        return (
            its.kind <= PXN_LEVEL
            and self.gdr(peer, net, send=True)
            and self.path(peer, gpu).kind <= PathType.NVL
            and (its.gbytes_per_s > own.gbytes_per_s or own.kind > PathType.PXN)
        )


def _start(number: int, choices: int) -> int:
    """Where GPU ``number`` starts among its networks."""
    if choices & (choices - 1):
        return number
    width = choices.bit_length() - 1
    return sum(1 << (width - 1 - bit) for bit in range(width) if number >> bit & 1)
