"""The topology: one machine's graph, and the questions that rules, reports and tools ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from gputopo.facts import ProbeStatus
from gputopo.topology.model import (
    AnyNode,
    Device,
    Disagreement,
    Gpu,
    Hca,
    HostInfo,
    Link,
    Numa,
    PciBridge,
    Pcie,
)
from gputopo.topology.paths import Matrix, Path, Paths, Printed

if TYPE_CHECKING:
    from gputopo.topology.build import Facts
    from gputopo.topology.fabric_nics import NicRole

N = TypeVar("N")


class Topology:
    """Nodes by id, links, and where they came from. Immutable once built.

    ``facts`` are the raw facts that it was built from, for rules that judge what is no node (driver
    state, limits). ``disagreements`` are facts on which two sources differ. ``printed`` is what is
    known from the matrix of nvidia-smi alone.
    """

    def __init__(
        self,
        *,
        source_kind: str,
        source_name: str,
        captured_at: str | None,
        host: HostInfo,
        probes: list[ProbeStatus],
        nodes: Iterable[AnyNode],
        links: Iterable[Link],
        disagreements: list[Disagreement],
        facts: Facts,
        printed: Printed | None = None,
    ) -> None:
        self.source_kind = source_kind
        self.source_name = source_name
        self.captured_at = captured_at
        self.host = host
        self.probes = probes
        self.nodes: dict[str, AnyNode] = {node.id: node for node in nodes}
        self.links = list(links)
        self.disagreements = disagreements
        self.facts = facts
        self.printed = printed or Printed()

    def of(self, kind: type[N]) -> Iterator[N]:
        """All nodes of a kind (a class of :mod:`gputopo.topology.model`), in tree order."""
        return (node for node in self.nodes.values() if isinstance(node, kind))

    @cached_property
    def gpus(self) -> list[Gpu]:
        return list(self.of(Gpu))

    @cached_property
    def hcas(self) -> list[Hca]:
        return list(self.of(Hca))

    @cached_property
    def physical_hcas(self) -> list[Hca]:
        """HCAs that paths are told of: no software devices, and no virtual functions.

        Those of this host have the paths of their physical function, and there may be thousands. A
        virtual machine sees the one that it was given as a function like any other.
        """
        return [hca for hca in self.hcas if not hca.software and hca.physical_function is None]

    @cached_property
    def nic_roles(self) -> dict[str, NicRole]:
        """What each RDMA device is there for, by its id, and the signals that say so."""
        from gputopo.topology.fabric_nics import classify

        return classify(self)

    @cached_property
    def numa_nodes(self) -> list[Numa]:
        return list(self.of(Numa))

    @cached_property
    def cpu_nodes(self) -> list[Numa]:
        """NUMA nodes that have CPUs: the only ones that a process can be bound to."""
        return [node for node in self.numa_nodes if node.role == "cpu"]

    @cached_property
    def by_pci(self) -> dict[str, AnyNode]:
        """Nodes by PCI address; of several on one function, the first (HCA before interface)."""
        found: dict[str, AnyNode] = {}
        for node in self.nodes.values():
            address = getattr(node, "pci", None)
            if address is not None:
                found.setdefault(address, node)
        return found

    def ancestors(self, node_id: str) -> list[str]:
        """The ids above a node, nearest first, up to the machine."""
        found: list[str] = []
        node = self.nodes.get(node_id)
        while node is not None and node.parent is not None and node.parent not in found:
            found.append(node.parent)
            node = self.nodes.get(node.parent)
        return found

    def bridges_above(self, node_id: str) -> list[PciBridge]:
        """The PCI bridges above a device, nearest first."""
        above = (self.nodes[i] for i in self.ancestors(node_id) if i in self.nodes)
        return [node for node in above if isinstance(node, PciBridge)]

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """Ids below each id, in tree order."""
        found: dict[str, list[str]] = {}
        for node in self.nodes.values():
            if node.parent is not None:
                found.setdefault(node.parent, []).append(node.id)
        return found

    @cached_property
    def _paths(self) -> Paths:
        return Paths(self)

    def path(self, a: str, b: str) -> Path:
        """The best path between two devices: its class, its narrowest link, and what it crosses."""
        return self._paths.between(a, b)

    def path_class(self, a: str, b: str) -> str:
        """The class of :meth:`path` alone: ``NV18``, ``PIX`` ... ``SYS``, or ``?``."""
        return self._paths.path_class(a, b)[0]

    @cached_property
    def nvlink_unknown(self) -> str | None:
        """Why it cannot be told whether GPUs have NVLinks between them; None where it can.

        Path classes between GPUs are then those of PCIe alone, and may be better in truth.
        """
        if len(self.gpus) < 2:
            return None
        for gpu in self.gpus:
            if gpu.nvlink is None and gpu.id not in self.printed.nvlinks:
                missing = gpu.missing.get("nvlink") or gpu.missing.get("nvml")
                return str(missing or gpu.missing.get("index") or "the driver does not tell")
        return None

    def pcie_class(self, a: str, b: str) -> str:
        """The path class through PCIe alone, as if there were no NVLink."""
        return self._paths.pcie_class(a, b)[0]

    @cached_property
    def matrix(self) -> Matrix:
        """Path classes between all GPUs and HCAs, in the order of ``nvidia-smi topo -m``."""
        return self._paths.matrix()

    def pcie(self, node_id: str) -> Pcie | None:
        """The PCIe link above a device, None where it has none."""
        return getattr(self.nodes.get(node_id), "pcie", None)

    def devices(self) -> Iterator[Device]:
        """All nodes with a place on the PCI bus."""
        return (node for node in self.nodes.values() if isinstance(node, Device))
