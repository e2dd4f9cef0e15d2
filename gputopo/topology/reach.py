"""How each GPU reaches the fabric: its nearest usable HCAs, how far they are, and why no nearer."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

import msgspec

from gputopo.topology.fabric_nics import kinds_of, port_of, usable
from gputopo.topology.model import Gpu, Hca
from gputopo.topology.paths import UNKNOWN, rank

if TYPE_CHECKING:
    from gputopo.topology.graph import Topology

Tier = Literal["switch", "cpu", "sockets", "unknown"]

TIERS: tuple[Tier, ...] = ("switch", "cpu", "sockets", "unknown")
"""From near to far: below PCIe switches alone, which is as far as GPUDirect RDMA goes by default;
through the CPU on one NUMA node; across NUMA nodes."""

Reason = Literal["near", "down", "slot", "kind", "purchase"]


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """How one GPU reaches the fabric: ``nics`` are its nearest usable HCAs, all ``best`` away.

    ``reason`` tells why they are no nearer: nearer ones are ``down``; one of their kind stands in a
    ``slot`` where it serves no GPU, or serves one that has more than others; nearer ones are of
    another ``kind`` (link layer); or there are none, by ``purchase``. ``instead`` are the HCAs that
    this is about.
    """

    gpu: Gpu
    best: str
    nics: list[str]
    reason: Reason = "near"
    instead: list[str] = []

    @property
    def tier(self) -> Tier:
        return tier(self.best)


class Rail(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that have the same HCAs nearest, and these HCAs."""

    gpus: list[str]
    nics: list[str]

    @property
    def share(self) -> float:
        """GPUs an HCA."""
        return len(self.gpus) / len(self.nics)


def tier(path_class: str) -> Tier:
    """The tier of a path class."""
    if path_class == UNKNOWN:
        return "unknown"
    if rank(path_class) <= rank("PXB"):
        return "switch"
    return "cpu" if rank(path_class) <= rank("NODE") else "sockets"


def hca_of(topology: Topology, node_id: str) -> Hca:
    hca = topology.nodes[node_id]
    assert isinstance(hca, Hca)
    return hca


def with_role(topology: Topology, *roles: str) -> list[Hca]:
    """HCAs of some roles, in the order of their names."""
    return [hca_of(topology, r.hca) for r in topology.nic_roles.values() if r.role in roles]


def fabric_reach(topology: Topology) -> list[Reach]:
    """One answer a GPU; none for a GPU of which no way to a usable fabric HCA is known."""
    up = [hca for hca in with_role(topology, "compute") if usable(hca)]
    found: list[Reach] = []
    for gpu in topology.gpus:
        classes = {hca.id: topology.pcie_class(gpu.id, hca.id) for hca in up}
        best = min(classes.values(), key=rank, default=UNKNOWN)
        if best != UNKNOWN:
            nics = [hca for hca, path_class in classes.items() if path_class == best]
            found.append(Reach(gpu=gpu, best=best, nics=nics))
    idle = [hca for hca in with_role(topology, "compute", "spare") if usable(hca)]
    misplaced = _misplaced(topology, idle, found)
    return [
        reach if reach.tier == "switch" else _explain(topology, reach, misplaced) for reach in found
    ]


def rails_of(reaches: list[Reach]) -> list[Rail]:
    """GPUs and their nearest HCAs below one switch, joined where they have an HCA in common."""
    rails: list[Rail] = []
    for reach in reaches:
        if reach.tier != "switch":
            continue
        joined = [rail for rail in rails if set(rail.nics) & set(reach.nics)]
        nics = dict.fromkeys([*(nic for rail in joined for nic in rail.nics), *reach.nics])
        gpus = [*(gpu for rail in joined for gpu in rail.gpus), reach.gpu.id]
        rails = [*(rail for rail in rails if rail not in joined), Rail(gpus=gpus, nics=list(nics))]
    return rails


def usual_share(rails: list[Rail]) -> float:
    """GPUs an HCA on most rails."""
    return Counter(rail.share for rail in rails).most_common(1)[0][0] if rails else 0.0


def _misplaced(topology: Topology, hcas: list[Hca], reaches: list[Reach]) -> list[str]:
    """Fabric HCAs that a GPU without one might have: of a kind that stands below GPUs' switches but
    not there themselves; else those of a rail that has more of them than is usual."""
    rails = rails_of(reaches)
    kinds = kinds_of(topology)
    beside = {kinds[nic] for rail in rails for nic in rail.nics}
    idle = [
        hca.id
        for hca in hcas
        if kinds[hca.id] in beside
        and not any(tier(topology.pcie_class(g.id, hca.id)) == "switch" for g in topology.gpus)
    ]
    usual = usual_share(rails)
    return idle or [nic for rail in rails if rail.share < usual for nic in rail.nics]


def _explain(topology: Topology, reach: Reach, misplaced: list[str]) -> Reach:
    """The same with the reason why nothing is nearer."""
    nearer = [
        hca
        for hca in topology.physical_hcas
        if _is_nearer(topology.pcie_class(reach.gpu.id, hca.id), reach.best)
    ]
    roles = topology.nic_roles
    fabric = port_of(hca_of(topology, reach.nics[0]))
    layer = fabric.link_layer if fabric is not None else None
    reason: Reason = "purchase"
    instead: list[str] = []
    down = [hca.id for hca in nearer if roles[hca.id].role == "compute" and _is_down(hca)]
    other = [hca.id for hca in nearer if roles[hca.id].role == "other" and _layer(hca) != layer]
    if down:
        reason, instead = "down", down
    elif misplaced:
        reason, instead = "slot", misplaced
    elif other:
        reason, instead = "kind", other
    return msgspec.structs.replace(reach, reason=reason, instead=instead)


def _is_nearer(path_class: str, than: str) -> bool:
    return TIERS.index(tier(path_class)) < TIERS.index(tier(than))


def _is_down(hca: Hca) -> bool:
    """Whether no port is up; one whose state is unreadable is not known to be down."""
    return bool(hca.ports) and not usable(hca) and all(p.state is not None for p in hca.ports)


def _layer(hca: Hca) -> str | None:
    port = port_of(hca)
    return port.link_layer if port is not None else None
