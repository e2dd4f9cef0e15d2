"""Which NUMA node a PCI device is attached to, by a chain of sources with the winner kept.

sysfs ``numa_node`` first, then NVML's memory affinity, ``local_cpulist``, and the bridges above.
-1 means that the firmware did not say: it is unknown, not node 0. Nodes without CPUs (the memory of
Grace and POWER9 GPUs) are never where a device is attached.
"""

from __future__ import annotations

import msgspec

from gputopo.cpulist import parse
from gputopo.facts import Fact, Missing
from gputopo.probes.pci import DEVICES, PciFunction


class Place(msgspec.Struct, frozen=True):
    """The NUMA node of a device and where that was read, or why it is unknown."""

    numa: int | None
    source: str
    missing: Missing | None = None
    others: tuple[tuple[int, str], ...] = ()
    """What further sources say where they differ: (node, source)."""


class Locality:
    """Places devices among the nodes that have CPUs."""

    def __init__(
        self,
        cpu_nodes: dict[int, str],
        functions: dict[str, PciFunction],
        unknown: frozenset[int] | None = frozenset(),
    ) -> None:
        """``unknown`` are nodes whose CPUs are not known; None where no node is known at all."""
        self._nodes = {index: parse(cpus) for index, cpus in cpu_nodes.items()}
        self._unknown = unknown
        self._functions = functions
        self._all = frozenset().union(*self._nodes.values()) if self._nodes else frozenset()

    def place(self, function: PciFunction, nvml_nodes: Fact[list[int]], nvml: str) -> Place:
        """The node of one function; ``nvml_nodes`` is NVML's memory affinity for a GPU."""
        said: list[tuple[int, str]] = []
        sysfs = function.numa_node
        if isinstance(sysfs, int) and self._may_be(sysfs):
            said.append((sysfs, f"{DEVICES}/{function.address}/numa_node"))
        if isinstance(nvml_nodes, list):
            with_cpus = [node for node in nvml_nodes if node in self._nodes]
            if len(with_cpus) == 1 and len(self._nodes) > 1:
                said.append((with_cpus[0], nvml))
        local = self._of_cpus(function.local_cpus)
        if local is not None:
            said.append((local, f"{DEVICES}/{function.address}/local_cpulist"))
        if not said:
            above = self._of_bridges(function)
            if above is not None:
                said.append(above)
        if not said:
            return Place(None, f"{DEVICES}/{function.address}/numa_node", self._why(sysfs))
        winner = said[0]
        return Place(winner[0], winner[1], None, tuple(s for s in said[1:] if s[0] != winner[0]))

    def _may_be(self, index: int) -> bool:
        """Whether a device may be attached to a node: it has CPUs, or nobody says it has none."""
        if index in self._nodes:
            return True
        return index >= 0 if self._unknown is None else index in self._unknown

    def _of_cpus(self, cpus: Fact[str]) -> int | None:
        """The one node that holds all these CPUs; None if they span nodes or there is but one."""
        if isinstance(cpus, Missing) or not cpus or len(self._nodes) < 2:
            return None
        try:
            wanted = parse(cpus)
        except ValueError:
            return None
        if not wanted or wanted >= self._all:
            return None
        holders = [index for index, have in self._nodes.items() if wanted <= have]
        return holders[0] if len(holders) == 1 else None

    def _of_bridges(self, function: PciFunction) -> tuple[int, str] | None:
        for address in reversed(function.parents):
            bridge = self._functions.get(address)
            if bridge is None:
                continue
            if isinstance(bridge.numa_node, int) and self._may_be(bridge.numa_node):
                return bridge.numa_node, f"{DEVICES}/{address}/numa_node"
            local = self._of_cpus(bridge.local_cpus)
            if local is not None:
                return local, f"{DEVICES}/{address}/local_cpulist"
        return None

    def _why(self, sysfs: Fact[int]) -> Missing:
        if isinstance(sysfs, Missing):
            return sysfs
        if sysfs < 0:
            return Missing("unsupported", "the firmware names no node (numa_node is -1)")
        if not self._nodes:
            return Missing("absent", "no NUMA node with CPUs is known")
        return Missing("unparsed", f"numa_node is {sysfs}, which has no CPUs or is not there")
