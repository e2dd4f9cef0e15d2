"""Path classes and bandwidths between devices, computed from the PCI tree and the NVLink graph.

Classes are those that ``nvidia-smi topo -m`` prints (its legend is in :data:`LEGEND`). One bridge
in its sense is a whole PCIe switch: the upstream port and the downstream ports that lead to two
devices are one hop, PIX; a second switch in series makes PXB; the root complex in between, PHB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gputopo.hardware.pcie import gbytes_per_s
from gputopo.topology.model import Device, Gpu, Hca, HostBridge, NvSwitch, PciBridge, Pcie

if TYPE_CHECKING:
    from gputopo.topology.graph import Topology

UNKNOWN = "?"

ORDER = ("X", "NV", "C2C", "PIX", "PXB", "PHB", "NODE", "SYS", UNKNOWN)
"""Classes from near to far; an unknown path is never taken for a near one."""

LEGEND = {
    "X": "the device itself",
    "NV#": "# NVLinks, direct or through NVSwitch",
    "PIX": "at most one PCIe switch",
    "PXB": "several PCIe switches, no host bridge",
    "PHB": "a PCIe host bridge (the CPU)",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "the interconnect between NUMA nodes",
    UNKNOWN: "cannot be told: the PCI tree or the NUMA node is not visible",
}


CUT = "its cell in the matrix of nvidia-smi was cut off"


def rank(path_class: str) -> int:
    """Place of a class in :data:`ORDER` (``NV18`` ranks as ``NV``)."""
    return ORDER.index("NV" if path_class.startswith("NV") else path_class)


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """A path between two devices. ``via`` lists the ids in between, from ``a`` to ``b``.

    ``gbytes_per_s`` is the theoretical figure of its narrowest link, ``narrowest`` the lower end of
    that link; None where a link on the way has no known figure (between sockets and host bridges).
    """

    a: str
    b: str
    path_class: str
    via: tuple[str, ...] = ()
    gbytes_per_s: float | None = None
    narrowest: str | None = None
    reason: str = ""


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """``classes[i][j]`` is the path class from ``labels[i]`` to ``labels[j]``."""

    labels: list[str]
    ids: list[str]
    classes: list[list[str]]


class Printed(msgspec.Struct):
    """What is known from the matrix of nvidia-smi alone: of devices without a place in a PCI tree.

    ``classes`` are the path classes between node ids, both ways, ``?`` for a pair whose cell is
    lost. ``nvlinks`` are the GPUs whose NVLinks the matrix shows.
    """

    classes: dict[tuple[str, str], str] = {}
    nvlinks: set[str] = set()


def label(node: Gpu | Hca) -> str:
    """``GPU0``, ``mlx5_0``: what the column of a device is called."""
    if isinstance(node, Gpu):
        return f"GPU{node.index}" if node.index is not None else f"GPU@{node.pci}"
    return node.name or node.id


def link_gbytes_per_s(pcie: Pcie | None) -> float | None:
    """What a PCIe link carries as it is trained; on an idle GPU that is less than under load."""
    if pcie is None or pcie.speed_gts is None or pcie.width is None:
        return None
    return gbytes_per_s(pcie.speed_gts, pcie.width)


class Paths:
    """Answers path questions for one topology."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._chains: dict[str, tuple[str, ...]] = {}
        self._nvlinks = self._nvlink_counts()
        self._switches = {node.id for node in topology.of(NvSwitch)}

    def matrix(self) -> Matrix:
        devices: list[Gpu | Hca] = [*self.topology.gpus, *self.topology.physical_hcas]
        classes = [["X"] * len(devices) for _ in devices]
        for i, first in enumerate(devices):
            for j in range(i):
                cell = self.path_class(first.id, devices[j].id)[0]
                classes[i][j] = classes[j][i] = cell
        return Matrix(
            labels=[label(node) for node in devices],
            ids=[node.id for node in devices],
            classes=classes,
        )

    def between(self, a: str, b: str) -> Path:
        """The best path; NVLink where there is one, else PCIe."""
        path_class, reason = self.path_class(a, b)
        if path_class == "X":
            return Path(a=a, b=b, path_class="X")
        if path_class.startswith("NV"):
            return self._nvlink_path(a, b, path_class)
        return self._pcie_path(a, b, path_class, reason)

    def path_class(self, a: str, b: str) -> tuple[str, str]:
        """The class of the best path, and for an unknown one the reason."""
        if a == b:
            return "X", ""
        printed = self.topology.printed.classes.get((a, b))
        if printed is not None:
            return printed, CUT if printed == UNKNOWN else ""
        links = self._nvlink_count(a, b)
        if links:
            return f"NV{links}", ""
        return self.pcie_class(a, b)

    def _nvlink_counts(self) -> dict[tuple[str, str], int]:
        counts: dict[tuple[str, str], int] = {}
        for link in self.topology.links:
            if link.kind == "nvlink" and link.count:
                for pair in ((link.a, link.b), (link.b, link.a)):
                    counts[pair] = counts.get(pair, 0) + link.count
        return counts

    def _nvlink_count(self, a: str, b: str) -> int:
        """NVLinks between two GPUs: direct ones, and through switches the fewer of both sides.

        All NVSwitches of a machine are one fabric, as for NCCL: those of a DGX-2's two boards are
        joined by trunks that no GPU and no driver call shows.
        """
        return self._nvlinks.get((a, b), 0) + min(self._to_switches(a), self._to_switches(b))

    def _to_switches(self, gpu: str) -> int:
        return sum(self._nvlinks.get((gpu, switch), 0) for switch in self._switches)

    def _nvlink_path(self, a: str, b: str, path_class: str) -> Path:
        first, second = self.topology.nodes[a], self.topology.nodes[b]
        figures = [
            node.nvlink.gbytes_per_s
            for node in (first, second)
            if isinstance(node, Gpu) and node.nvlink is not None and node.nvlink.gbytes_per_s
        ]
        switches = sorted(s for s in self._switches if (a, s) in self._nvlinks)
        return Path(
            a=a,
            b=b,
            path_class=path_class,
            via=() if (a, b) in self._nvlinks else tuple(switches),
            gbytes_per_s=round(min(figures) * int(path_class[2:]), 1) if figures else None,
        )

    def _chain(self, device: str) -> tuple[str, ...]:
        """Ids above a device up to its host bridge, nearest first."""
        if device not in self._chains:
            chain: list[str] = []
            for above in self.topology.ancestors(device):
                node = self.topology.nodes[above]
                if isinstance(node, (PciBridge, HostBridge)):
                    chain.append(above)
            self._chains[device] = tuple(chain)
        return self._chains[device]

    def pcie_class(self, a: str, b: str) -> tuple[str, str]:
        """The class through PCIe, and for an unknown one the reason."""
        printed = self.topology.printed.classes.get((a, b))
        if printed is not None:
            if printed.startswith("NV"):
                return (
                    UNKNOWN,
                    "nvidia-smi topo -m shows the NVLinks of this pair, not its PCIe path",
                )
            return printed, CUT if printed == UNKNOWN else ""
        nodes = self.topology.nodes
        first, second = nodes[a], nodes[b]
        assert isinstance(first, Device) and isinstance(second, Device)
        up, down = self._chain(a), self._chain(b)
        common = next((bridge for bridge in up if bridge in down), None)
        if common is None:
            return self._across(first, second)
        if isinstance(nodes[common], HostBridge):
            return "PHB", ""
        between = [*up[: up.index(common)], common, *down[: down.index(common)]]
        switches = sum(
            isinstance(node, PciBridge) and node.role in ("upstream-port", "pcie-to-pci-bridge")
            for node in (nodes[bridge] for bridge in between)
        )
        return ("PIX" if switches <= 1 else "PXB"), ""

    def _across(self, first: Device, second: Device) -> tuple[str, str]:
        """Devices under different root complexes, or one without a place in the tree."""
        for node in (first, second):
            chain = self._chain(node.id)
            if not chain or not isinstance(self.topology.nodes[chain[-1]], HostBridge):
                return UNKNOWN, f"{node.id} has no place in the PCI tree"
        if len(self.topology.cpu_nodes) == 1:
            return "NODE", ""
        for node in (first, second):
            if node.numa is None:
                return UNKNOWN, f"the NUMA node of {node.id} is unknown"
        return ("NODE" if first.numa == second.numa else "SYS"), ""

    def _pcie_path(self, a: str, b: str, path_class: str, reason: str) -> Path:
        up, down = self._chain(a), self._chain(b)
        common = next((bridge for bridge in up if bridge in down), None)
        if common is None:
            legs = [a, *up[:-1]], [b, *down[:-1]]
            via = (*up, *reversed(down))
        else:
            legs = [a, *up[: up.index(common)]], [b, *down[: down.index(common)]]
            via = (*up[: up.index(common)], common, *reversed(down[: down.index(common)]))
        narrowest: tuple[float, str] | None = None
        unknown = common is None
        for below in (*legs[0], *legs[1]):
            if not self._has_link(below):
                continue
            figure = link_gbytes_per_s(self.topology.pcie(below))
            if figure is None:
                unknown = True
            elif narrowest is None or figure < narrowest[0]:
                narrowest = (figure, below)
        return Path(
            a=a,
            b=b,
            path_class=path_class,
            via=via,
            gbytes_per_s=None if unknown or narrowest is None else narrowest[0],
            narrowest=narrowest[1] if narrowest else None,
            reason=reason,
        )

    def _has_link(self, node_id: str) -> bool:
        """Whether the link of a node is above it: that of a root or downstream port is below it."""
        node = self.topology.nodes[node_id]
        return not (isinstance(node, PciBridge) and node.role in ("root-port", "downstream-port"))
