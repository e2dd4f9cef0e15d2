"""What NCCL will do on this machine, in words: NIC, GPUDirect RDMA and P2P of each GPU, and why.

As NCCL 2.28.9 plans by default, with no NCCL_* variable set and all GPUs in one job of several
machines. Bandwidths are NCCL's own figures, GB/s one way.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec

from gputopo.facts import Missing, known
from gputopo.hardware.pcie import describe, gbytes_per_s
from gputopo.nccl.build import WITHOUT_GDR, Machine, machine_of, usable_gpus, usable_port
from gputopo.nccl.model import MEANINGS, Node, PathType, system_of
from gputopo.nccl.plan import GDR_LEVEL, Plan
from gputopo.nccl.tree import fuse
from gputopo.topology.graph import Topology
from gputopo.topology.model import Gpu, PciBridge
from gputopo.topology.paths import UNKNOWN, rank

VERSION = "2.28.9"

Means = Literal["P2P", "SHM", "NET"]

P2P_STATUS = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "DR": "switched off in the driver's registry",
    "NS": "not supported",
    "U": "status unknown",
}
"""What the letters of ``nvidia-smi topo -p2p`` mean."""


class Peers(msgspec.Struct, frozen=True, kw_only=True):
    """How one GPU reaches some others. ``by``: P2P; SHM, through host memory; NET, through NICs."""

    gpus: list[str]
    by: Means
    path: str
    gbytes_per_s: float
    reason: str


class Remark(msgspec.Struct, frozen=True, kw_only=True):
    """Something about the plan that is worth knowing. ``kind`` is a stable word for scripts."""

    kind: str
    subjects: list[str]
    text: str


class NcclChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What NCCL does for one GPU.

    ``nics`` are node ids in the order of its channels, ``nic_names`` what NCCL calls them (ports of
    one card are fused: ``mlx5_0+mlx5_1``). ``path`` and ``gbytes_per_s`` are those to the first.
    ``relay`` is the GPU that sends in its place (PXN). ``gdr`` is GPUDirect RDMA when receiving,
    ``gdr_send`` when sending; None where it cannot be told. ``numa`` is the node whose CPUs NCCL's
    threads may use, -1 where the firmware names none.
    """

    gpu: str
    numa: int | None
    nics: list[str]
    nic_names: list[str]
    path: str | None
    gbytes_per_s: float | None
    relay: str | None
    gdr: bool | None
    gdr_send: bool | None
    gdr_reason: str
    p2p: list[Peers]
    remarks: list[Remark]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """``network`` is the transport between machines: IB (RoCE too), EFA, Socket or none."""

    network: str
    choices: list[NcclChoice]
    remarks: list[Remark]


def predict(topology: Topology) -> list[NcclChoice]:
    """What NCCL does for each GPU that the driver has, in NVML's order."""
    return prediction(topology).choices


@lru_cache(maxsize=2)
def prediction(topology: Topology) -> Prediction:
    """As :func:`predict`, with what holds for the machine as a whole."""
    machine = machine_of(topology)
    teller = _Teller(topology, machine)
    choices = [teller.choice(gpu) for gpu in usable_gpus(topology) if gpu.pci in teller.gpus]
    return Prediction(
        network=machine.network,
        choices=choices,
        remarks=_of_machine(topology, teller, choices),
    )


class _Teller:
    """Puts one plan into words."""

    def __init__(self, topology: Topology, machine: Machine) -> None:
        self.topology = topology
        self.machine = machine
        self.refused = _refused(topology)
        self.plan = Plan(system_of(fuse(machine.tree)), self._works)
        self.gpus = {node.id: node for node in self.plan.system.gpus}
        self.hcas = [hca for hca in topology.physical_hcas if hca.pci is not None]

    def _works(self, first: Node, second: Node) -> bool:
        return (self.id(first), self.id(second)) not in self.refused

    def id(self, node: Node) -> str:
        return self.machine.gpus[node.id]

    def choice(self, gpu: Gpu) -> NcclChoice:
        node = self.gpus[gpu.pci or ""]
        nets = self.plan.nets(node)
        path = self.plan.path(node, nets[0]) if nets else None
        relay = self.plan.relay(node, nets[0]) if nets else None
        nics = [nic for net in nets for nic in self.nics(net)]
        gdr, gdr_send, reason = self._gdr(gpu, node, nets)
        cpu = self.plan.paths.cpu(node)
        return NcclChoice(
            gpu=gpu.id,
            numa=int(cpu.id) if cpu else None,
            nics=nics,
            nic_names=[net.id for net in nets],
            path=path.kind.name if path else None,
            gbytes_per_s=round(path.gbytes_per_s, 2) if path else None,
            relay=self.id(relay) if relay else None,
            gdr=gdr,
            gdr_send=gdr_send,
            gdr_reason=reason,
            p2p=self._peers(node),
            remarks=self._remarks(gpu, node, nets, nics),
        )

    def nics(self, net: Node) -> list[str]:
        """The node ids of a port, or of those that are fused in it."""
        assert net.net is not None
        return [self.machine.ports[name] for name in net.net.ports or (net.net.name,)]

    # GPUDirect RDMA

    def _gdr(self, gpu: Gpu, node: Node, nets: list[Node]) -> tuple[bool | None, bool | None, str]:
        """Receiving, sending, and the reason."""
        if not nets:
            return False, False, "no NIC"
        if self.machine.network == "Socket":
            return False, False, "sockets have none"
        if WITHOUT_GDR.search(gpu.name or ""):
            return False, False, f"{gpu.name} does not support it"
        support = self.machine.gdr
        if support.works is False:
            return False, False, support.reason
        receive = self.plan.gdr(node, nets[0], send=False)
        send = self.plan.gdr(node, nets[0], send=True)
        kind = self.plan.path(self.plan.relay(node, nets[0]) or node, nets[0]).kind
        if not receive:
            return False, False, f"{kind.name} is farther than PXB, the default limit"
        reason = f"{support.reason}; {kind.name} is near enough"
        if kind == GDR_LEVEL:
            reason += " (since NCCL 2.29; NCCL_NET_GDR_C2C=1 before)"
        if not send:
            reason += "; not for sending before Ampere without NVLink"
        unknown = support.works is None
        return (None if unknown else receive), (None if unknown else send), reason

    # Between GPUs

    def _peers(self, node: Node) -> list[Peers]:
        """The other GPUs, grouped by how they are reached."""
        groups: dict[tuple[Means, str, float, str], list[str]] = {}
        for peer in self.plan.system.gpus:
            if peer is not node:
                groups.setdefault(self._how(node, peer), []).append(self.id(peer))
        return [
            Peers(gpus=gpus, by=by, path=path, gbytes_per_s=speed, reason=reason)
            for (by, path, speed, reason), gpus in groups.items()
        ]

    def _how(self, node: Node, peer: Node) -> tuple[Means, str, float, str]:
        path = self.plan.path(node, peer)
        name, speed = path.kind.name, round(path.gbytes_per_s, 2)
        if self.plan.over_net(node, peer):
            net = round(min(self.plan.net_speeds[node], self.plan.net_speeds[peer]), 2)
            return "NET", "NET", net, f"NICs are faster than {name} with its {speed:g} GB/s"
        if self.plan.p2p(node, peer):
            return "P2P", name, speed, MEANINGS[path.kind]
        refusal = self.refusal(node, peer)
        if refusal is not None:
            return "SHM", name, speed, f"the driver refuses P2P: {refusal}"
        level = self.plan.p2p_level.name
        return "SHM", name, speed, f"{name} is farther than {level}, the limit of P2P"

    def refusal(self, node: Node, peer: Node) -> str | None:
        """The driver's words where it allows no P2P on the way between two GPUs."""
        hops = [(self.id(a), self.id(b)) for a, b in self.plan.hops(node, peer)]
        return next((self.refused[hop] for hop in hops if hop in self.refused), None)

    # Remarks

    def _remarks(self, gpu: Gpu, node: Node, nets: list[Node], nics: list[str]) -> list[Remark]:
        return [
            *self._degraded(gpu, nics),
            *self._passed_over(gpu, node, nets, nics),
            *self._down(gpu),
        ]

    def _degraded(self, gpu: Gpu, nics: list[str]) -> list[Remark]:
        """Links to the chosen NICs that run below what NCCL plans with."""
        found: dict[str, Remark] = {}
        for nic in nics:
            if nic not in self.topology.nodes:
                continue
            via = self.topology.path(gpu.id, nic).via
            for place in (gpu.id, *via, nic):
                remark = self._degraded_link(place)
                if remark is not None:
                    found[place] = remark
        return list(found.values())

    def _degraded_link(self, place: str) -> Remark | None:
        node, pcie = self.topology.nodes[place], self.topology.pcie(place)
        if pcie is None or not (pcie.speed_gts and pcie.width):
            return None
        if not (pcie.max_speed_gts and pcie.max_width):
            return None
        if not (pcie.port_max_speed_gts and pcie.port_max_width):
            return None  # in a virtual machine: what the link could do is not known
        if isinstance(node, PciBridge) and node.role in ("root-port", "downstream-port"):
            return None  # its link is that of the device below
        # A GPU lowers its speed when idle; its lanes it keeps.
        idle = isinstance(node, Gpu)
        speed = pcie.max_speed_gts if idle else pcie.speed_gts
        if speed >= pcie.max_speed_gts and pcie.width >= pcie.max_width:
            return None
        now = gbytes_per_s(speed, pcie.width)
        most = gbytes_per_s(pcie.max_speed_gts, pcie.max_width)
        return Remark(
            kind="degraded-link-unseen",
            subjects=[place],
            text=f"the link above {place} runs at {describe(speed, pcie.width)} ({now:g} GB/s) and "
            f"NCCL plans with {describe(pcie.max_speed_gts, pcie.max_width)} ({most:g} GB/s): it "
            "reads maximum speeds, so it does not avoid it",
        )

    def _passed_over(self, gpu: Gpu, node: Node, nets: list[Node], nics: list[str]) -> list[Remark]:
        """NICs that are nearer than the chosen ones, and slower."""
        if not nets:
            return []
        chosen = self.plan.path(node, nets[0])
        nearer = [
            net
            for net in self.plan.system.nets
            if self.plan.path(node, net).kind < min(chosen.kind, PathType.PXN)
        ]
        if not nearer:
            return []
        names = ", ".join(net.id for net in nearer)
        best = self.plan.path(node, nearer[0])
        return [
            Remark(
                kind="nearer-nic-passed-over",
                subjects=[gpu.id, *nics],
                text=f"{gpu.id} takes {nets[0].id} ({chosen.kind.name}, "
                f"{chosen.gbytes_per_s:g} GB/s) and not the nearer {names} ({best.kind.name}, "
                f"{best.gbytes_per_s:g} GB/s): bandwidth counts first, then the path",
            )
        ]

    def _down(self, gpu: Gpu) -> list[Remark]:
        """The HCAs next to a GPU that NCCL cannot see."""
        if rank(gpu.nearest_hca_class or UNKNOWN) > rank("PHB"):
            return []
        down = [hca.id for hca in self.hcas if hca.id in gpu.nearest_hcas and not usable_port(hca)]
        return [
            Remark(
                kind="nic-not-seen",
                subjects=[gpu.id, hca],
                text=f"{hca}, next to {gpu.id}, has no active port: NCCL does not see it",
            )
            for hca in down
        ]


def _of_machine(topology: Topology, teller: _Teller, choices: list[NcclChoice]) -> list[Remark]:
    """What is to be said once."""
    if not choices:
        return []
    return [
        *_without_driver(topology),
        *_missing_gpus(topology),
        *_network(topology, teller.machine),
        *_hidden_tree(topology),
        *_without_numa(choices),
        *_nvlink_refused(teller),
        *_fused_ports(teller, choices),
        *_unused_nics(teller, choices),
        *_relays(teller),
    ]


def _without_driver(topology: Topology) -> list[Remark]:
    if not isinstance(topology.facts.nvml, Missing):
        return []
    text = "NVML does not answer: NVLinks and P2P are unknown, and NCCL is told as without NVLink"
    return [Remark(kind="driver-unknown", subjects=[], text=text)]


def _missing_gpus(topology: Topology) -> list[Remark]:
    here = {gpu.id for gpu in usable_gpus(topology)}
    gone = [gpu.id for gpu in topology.gpus if gpu.id not in here]
    if not gone:
        return []
    text = f"{', '.join(gone)}: not there for NCCL, since the driver does not have it"
    return [Remark(kind="gpu-not-seen", subjects=gone, text=text)]


def _network(topology: Topology, machine: Machine) -> list[Remark]:
    if machine.network == "EFA":
        text = (
            "Amazon EFA works with the plugin aws-ofi-nccl only, which has its own view; without "
            "it NCCL uses sockets"
        )
        return [Remark(kind="plugin-needed", subjects=[], text=text)]
    if machine.network == "IB":
        return []
    hcas = [hca.id for hca in topology.physical_hcas]
    why = f"no port of {', '.join(hcas)} is active" if hcas else "there is no RDMA device"
    what = "sockets" if machine.network == "Socket" else "nothing: no interface is up either"
    text = f"Between machines NCCL uses {what}, since {why}"
    if machine.network == "Socket":
        text += "; which interface depends on addresses (NCCL_SOCKET_IFNAME)"
    return [Remark(kind="no-rdma", subjects=hcas, text=text)]


def _hidden_tree(topology: Topology) -> list[Remark]:
    if topology.host.virtualization in (None, "none"):
        return []
    text = (
        "A virtual machine may hide its PCIe switches, and NCCL plans with what it sees, unless "
        "NCCL_TOPO_FILE or /var/run/nvidia-topologyd/virtualTopology.xml tells it more; neither is "
        "looked at here"
    )
    return [Remark(kind="virtual-machine", subjects=["machine"], text=text)]


def _without_numa(choices: list[NcclChoice]) -> list[Remark]:
    gpus = [choice.gpu for choice in choices if choice.numa == -1]
    if not gpus:
        return []
    text = (
        f"{', '.join(gpus)}: numa_node is -1, which NCCL takes for a node of its own: paths to "
        "devices of other nodes become SYS, and threads are not bound"
    )
    return [Remark(kind="numa-unknown", subjects=gpus, text=text)]


def _nvlink_refused(teller: _Teller) -> list[Remark]:
    refusals = {
        pair: refusal
        for pair, path in teller.plan.direct.items()
        if path.kind <= PathType.NVB and (refusal := teller.refusal(*pair)) is not None
    }
    if not refusals:
        return []
    (first, second), refusal = next(iter(refusals.items()))
    text = (
        f"NCCL stops with an error where NVLink connects two GPUs and the driver refuses P2P: "
        f"{teller.id(first)} to {teller.id(second)}, {refusal}; {len(refusals)} such paths. "
        "NCCL_IGNORE_DISABLED_P2P=1 makes it go on through the CPU"
    )
    subjects = sorted({teller.id(gpu) for pair in refusals for gpu in pair})
    return [Remark(kind="nvlink-p2p-refused", subjects=subjects, text=text)]


def _fused_ports(teller: _Teller, choices: list[NcclChoice]) -> list[Remark]:
    taken = {name for choice in choices for name in choice.nic_names}
    all_nets = teller.plan.system.nets
    nets = [net for net in all_nets if net.net and net.net.ports and net.id in taken]
    if not nets:
        return []
    text = (
        f"Ports of one card are one NIC for NCCL since 2.24: {', '.join(net.id for net in nets)} "
        "(NCCL_NET_MERGE_LEVEL=LOC keeps them apart)"
    )
    subjects = [nic for net in nets for nic in teller.nics(net)]
    return [Remark(kind="ports-fused", subjects=subjects, text=text)]


def _unused_nics(teller: _Teller, choices: list[NcclChoice]) -> list[Remark]:
    used = {nic for choice in choices for nic in choice.nics}
    there = dict.fromkeys(nic for net in teller.plan.system.nets for nic in teller.nics(net))
    idle = [nic for nic in there if nic not in used]
    if not idle or teller.machine.network == "Socket":
        return []
    text = f"No GPU takes {', '.join(idle)} first: others have more bandwidth or are nearer"
    return [Remark(kind="nics-not-taken", subjects=idle, text=text)]


def _relays(teller: _Teller) -> list[Remark]:
    system = teller.plan.system
    if not any(teller.plan.relay(gpu, net) for gpu in system.gpus for net in system.nets):
        return []
    text = "To the NIC of another GPU a GPU sends over NVLink and through that GPU (PXN)"
    return [Remark(kind="pxn", subjects=[], text=text)]


def _refused(topology: Topology) -> dict[tuple[str, str], str]:
    """Pairs of GPUs between which the driver allows no P2P read or write, with its words."""
    nvml = known(topology.facts.nvml)
    found: dict[tuple[str, str], str] = {}
    for pair in nvml.pairs if nvml else []:
        for use in ("read", "write"):
            status = pair.p2p.get(use)
            if isinstance(status, Missing) or status in (None, "OK"):
                continue
            words = f"{use} {status}"
            if status in P2P_STATUS:
                words += f" ({P2P_STATUS[status]})"
            found.setdefault((f"gpu{pair.a}", f"gpu{pair.b}"), words)
    return found
