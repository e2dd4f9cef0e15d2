"""A topology while it is being put together, and the small helpers that its parts share."""

from __future__ import annotations

from typing import Any

import msgspec

from gputopo.cpulist import parse, render
from gputopo.facts import ABSENT, Fact, Missing, known
from gputopo.probes.facts import Facts
from gputopo.probes.numa import NumaNode
from gputopo.topology.locality import Locality, Place
from gputopo.topology.model import AnyNode, Disagreement, Link
from gputopo.topology.paths import Printed


class Found(dict[str, Missing]):
    """Collects values for a node and keeps the reason of each that is missing."""

    def get_or(self, field: str, fact: Fact[Any]) -> Any:
        """The value, or None with the reason noted under ``field``."""
        if isinstance(fact, Missing):
            self[field] = fact
            return None
        return fact


class Draft:
    """Nodes and links in the order in which they are added. Ids are unique."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.nodes: dict[str, AnyNode] = {}
        self.links: list[Link] = []
        self.disagreements: list[Disagreement] = []
        pci = known(facts.pci)
        self.functions = {f.address: f for f in pci.functions} if pci else {}
        self.numa = online_nodes(facts)
        self.cpu_nodes = {
            node.index: node.cpus for node in self.numa if isinstance(node.cpus, str) and node.cpus
        }
        untold = frozenset(n.index for n in self.numa if isinstance(n.cpus, Missing))
        self.locality = Locality(self.cpu_nodes, self.functions, untold if self.numa else None)
        self.printed = Printed()
        self.ids: dict[str, str] = {}
        """Node id by PCI address."""

    def add(self, node: AnyNode) -> None:
        self.nodes[node.id] = node

    def unique(self, wanted: str) -> str:
        """An id that no other node has: devices can be renamed to anything."""
        candidate, number = wanted, 2
        while candidate in self.nodes:
            candidate, number = f"{wanted}~{number}", number + 1
        return candidate


def online_nodes(facts: Facts) -> list[NumaNode]:
    """The kernel's NUMA nodes with their online CPUs; without NUMA in the kernel, one with all."""
    numa, cpu, system = known(facts.numa), known(facts.cpu), known(facts.system)
    if numa is not None and numa.nodes:
        online = parse(cpu.online) if cpu else None
        # POWER lists the CPUs of a node that are offline (SMT off) as well.
        return [
            msgspec.structs.replace(node, cpus=render(parse(node.cpus) & online))
            if isinstance(node.cpus, str) and online
            else node
            for node in numa.nodes
        ]
    if cpu is None:
        return []
    return [
        NumaNode(
            index=0,
            cpus=cpu.online,
            memory_bytes=system.memory_bytes if system else ABSENT,
            distances={0: 10},
            hugepages={},
        )
    ]


def sources_of(place: Place) -> dict[str, str]:
    """Where a device's NUMA node was read, as a node's ``sources``."""
    return {"numa": place.source} if place.numa is not None else {}


def reasons_of(place: Place) -> dict[str, Missing]:
    """Why a device's NUMA node is unknown, as a node's ``missing``."""
    return {"numa": place.missing} if place.missing is not None else {}
