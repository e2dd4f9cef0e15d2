"""Paths of NCCL's graph: the fewest hops, then the highest bandwidth, then the first found.

The search is that of NCCL 2.28.9 (src/graph/paths.cc). A path's type is the worst of its hops, its
bandwidth the least. Bandwidths are GB/s one way.
"""

from __future__ import annotations

from typing import NamedTuple

from gputopo.nccl.model import LOCAL, Link, Node, PathType, System


class Path(NamedTuple):
    """A path to a node. ``via`` are the nodes after the start; the last is the one it leads to."""

    kind: PathType
    gbytes_per_s: float
    via: tuple[Node, ...]

    @property
    def hops(self) -> int:
        return len(self.via)


class Paths:
    """The paths from each node to each CPU, GPU and network of a graph, as the links give them."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._to = {base: _search(base) for base in (*system.cpus, *system.gpus, *system.nets)}
        self._nearest: dict[tuple[Node, str], list[Node]] = {}
        self.changes = 0
        """How many paths were changed since."""

    def get(self, start: Node, end: Node) -> Path:
        """The path from ``start`` to ``end``, of type DIS and no bandwidth where there is none."""
        return self._to[end].get(start, DISCONNECTED)

    def put(self, start: Node, end: Node, path: Path) -> None:
        self._to[end][start] = path
        self.changes += 1
        self._nearest.pop((start, end.kind), None)

    def divert(self, start: Node, through: Node, end: Node) -> None:
        """Makes the path from ``start`` to ``end`` go through a CPU, or through a GPU (PXN)."""
        first, second = self.get(start, through), self.get(through, end)
        kind = PathType.PXN if through.kind == "GPU" else merged(first.kind, second.kind)
        narrowest = min(first.gbytes_per_s, second.gbytes_per_s)
        self.put(start, end, Path(kind, narrowest, first.via + second.via))

    def nearest_gpus(self, start: Node) -> list[Node]:
        """The GPUs to which bandwidth is highest, and of those the ones of the best type."""
        return self._best(start, "GPU", self.system.gpus)

    def nearest_nets(self, start: Node) -> list[Node]:
        """The networks to which bandwidth is highest, and of those the ones of the best type."""
        return self._best(start, "NET", self.system.nets)

    def _best(self, start: Node, kind: str, ends: list[Node]) -> list[Node]:
        if (start, kind) not in self._nearest:
            found = [(self.get(start, end), end) for end in ends]
            ranked = [(path.gbytes_per_s, -path.kind, end) for path, end in found if path.via]
            best = max((rank[:2] for rank in ranked), default=None)
            self._nearest[start, kind] = [rank[2] for rank in ranked if rank[:2] == best]
        return self._nearest[start, kind]

    def cpu(self, gpu: Node) -> Node | None:
        """The CPU with the fewest hops to a GPU, the first of several."""
        reached = [cpu for cpu in self.system.cpus if self.get(gpu, cpu).hops]
        return min(reached, key=lambda cpu: self.get(gpu, cpu).hops, default=None)


DISCONNECTED = Path(PathType.DIS, 0.0, ())


def merged(first: PathType, second: PathType) -> PathType:
    """The type of two paths in a row: the worse, but P2C where C2C leads to a CPU with PCIe."""
    if {first, second} == {PathType.C2C, PathType.PHB}:
        return PathType.P2C
    return max(first, second)


def _search(base: Node) -> dict[Node, Path]:
    """The paths from each node to ``base``, breadth first."""
    found = {base: Path(PathType.LOC, LOCAL, ())}
    frontier = [base]
    while frontier:
        reached: dict[Node, None] = {}
        for node in frontier:
            path = found[node]
            for link in node.links:
                old = found.get(link.to, DISCONNECTED)
                gbytes_per_s = min(path.gbytes_per_s, link.gbytes_per_s)
                if old.gbytes_per_s >= gbytes_per_s or 0 < old.hops <= path.hops:
                    continue
                if node is not base and node.kind == "GPU" and not _bridges(link, path):
                    continue
                kind = max(path.kind, _kind(node, link, path))
                found[link.to] = Path(kind, gbytes_per_s, (node, *path.via))
                reached[link.to] = None
        frontier = list(reached)
    return found


def _bridges(link: Link, path: Path) -> bool:
    """Whether a path may go on through a GPU: between GPUs, and once (NCCL_NVB_DISABLE=0)."""
    return link.kind == PathType.NVL and link.to.kind == "GPU" and path.hops <= 1


def _kind(node: Node, link: Link, path: Path) -> PathType:
    """The type that one hop from ``node`` makes; ``path`` is that from ``node`` on."""
    if link.kind == PathType.NET:
        return PathType.LOC
    if node.kind == "PCI" and link.to.kind == "PCI":
        return PathType.PXB
    if link.kind == PathType.PIX and "CPU" in (node.kind, link.to.kind):
        return PathType.PHB
    if node.kind == "GPU" and path.kind == PathType.NVL and link.kind == PathType.NVL:
        return PathType.NVB
    return link.kind
