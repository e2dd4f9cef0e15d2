"""The machine as a tree: NUMA node, host bridge, switch, device; one line for each.

What leads to nothing that a GPU server is judged by (chipset functions, empty ports, management
controllers) is folded away, and so are the virtual functions of a device and empty NUMA nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gputopo.cpulist import render
from gputopo.pciaddr import sort_key
from gputopo.report.devices import (
    UNKNOWN,
    about_gpu,
    about_hca,
    about_nic,
    count,
    cpu_list,
    folded,
    model_of,
    name_of,
    pcie_link,
    size,
)
from gputopo.report.layout import Page, Span, cell_len, cut, pad
from gputopo.topology.graph import Topology
from gputopo.topology.model import (
    Device,
    Gpu,
    Hca,
    HostBridge,
    Nic,
    Numa,
    NvSwitch,
    Package,
    PciBridge,
    PciDevice,
)

PORTS = ("root-port", "downstream-port")
"""Bridges that are one end of a link and nothing more; what is below them stands for them."""

PLACES = ("cpu", "unknown")
"""Roles of NUMA nodes that devices may be on."""

LABEL_CELLS = 24
"""Columns of a device's name in the tree (an interface's has 15 characters at most)."""

SHORT_BELOW = 100
"""Page width below which link layers are written in short."""


class Branch(NamedTuple):
    """A line of the tree and what is below it. Without an address and a link the words follow the
    label at once."""

    label: Span
    about: list[Span]
    address: str = ""
    link: Span = Span("")
    below: Sequence[Branch] = ()


class _Tree:
    def __init__(self, topology: Topology, verbose: int, short: bool) -> None:
        self.topology = topology
        self.verbose = verbose
        self.short = short
        self.alone = len(topology.cpu_nodes) == 1
        self.folded = folded(topology)
        self.virtual = Counter(self.folded.values())

    def roots(self) -> Iterator[Branch]:
        """NUMA nodes with CPUs and what hangs on them, then what has no known node, then memory."""
        placed: dict[int, list[Branch]] = {}
        unplaced: dict[str, list[Branch]] = {}
        for top in self._tops():
            numa = self.topology.cpu_nodes[0].index if self.alone else top.numa
            below, hidden = self._below(top, numa)
            below += self._hidden(hidden)
            if below and numa is not None and f"numa{numa}" in self.topology.nodes:
                placed.setdefault(numa, []).extend(below)
            elif below:
                missing = top.missing.get("numa")
                why = (missing.detail or missing.reason) if missing else "no reason is known"
                unplaced.setdefault(why, []).extend(below)
        for node in self.topology.numa_nodes:
            if node.role not in PLACES:
                continue
            label = Span(f"NUMA {node.index}", "bold")
            yield Branch(label, self._about_numa(node), below=placed.get(node.index, []))
        for why, below in unplaced.items():
            label = Span("NUMA node unknown", "warning")
            yield Branch(label, [Span(f"({cut(why, 80)})")], below=below)
        software = [Span(cut(hca.id, LABEL_CELLS)) for hca in self.topology.hcas if hca.software]
        if software:
            yield Branch(Span("software RDMA", "bold"), software)
        yield from self._memory_nodes()

    def _tops(self) -> list[Device]:
        """Host bridges and devices without one, in bus order."""
        nodes = self.topology.nodes
        found = [
            node
            for node in self.topology.of(Device)
            if isinstance(node, HostBridge)
            or (
                not isinstance(nodes.get(node.parent or ""), Device)
                and not (isinstance(node, Hca) and node.software)
                and (node.pci is not None or not isinstance(node, NvSwitch))
            )
        ]
        # A host bridge is called after its first bus: pci0000:15.
        return sorted(found, key=lambda top: (sort_key(top.pci or f"{top.id[3:]}:00.0"), top.id))

    def _about_numa(self, node: Numa) -> list[Span]:
        found = []
        package = self.topology.nodes.get(node.parent or "")
        if isinstance(package, Package) and (self.topology.host.packages or 0) > 1:
            found.append(Span(f"package {UNKNOWN if package.index is None else package.index}"))
        found += [Span(f"CPUs {cpu_list(node.cpus)}"), Span(size(node.memory_bytes))]
        if self.verbose:
            distances = " ".join(str(value) for value in node.distances.values())
            found += [Span(f"distances {distances}")] if distances else []
            found += [Span(f"{n} huge pages of {kind}") for kind, n in node.hugepages.items()]
        return found

    def _memory_nodes(self) -> Iterator[Branch]:
        """Nodes without CPUs; those of which the same can be said share a line."""
        alike: dict[tuple[Span, ...], list[int]] = {}
        for node in self.topology.numa_nodes:
            if node.role not in PLACES:
                alike.setdefault(self._about_memory(node), []).append(node.index)
        for about, indices in sorted(alike.items(), key=lambda item: len(item[0]), reverse=True):
            each = [Span("each")] if len(indices) > 1 and len(about) > 1 else []
            yield Branch(Span(f"NUMA {render(indices)}", "bold"), [*about, *each])

    def _about_memory(self, node: Numa) -> tuple[Span, ...]:
        owner = self.topology.nodes.get(node.gpu or "")
        if node.role == "empty":
            grace = any(other.role == "gpu-memory" for other in self.topology.numa_nodes)
            return (Span("empty" + " (kept for MIG instances)" * grace, "dim"),)
        what = "memory without CPUs (CXL, persistent, of a GPU without driver)"
        if isinstance(owner, Gpu):
            what = f"memory of {name_of(owner)}"
        return Span(what), Span(size(node.memory_bytes))

    def _below(self, node: Device, numa: int | None) -> tuple[list[Branch], int]:
        """The lines for a node and what is below it, and how many functions they leave out."""
        if node.id in self.folded:
            return [], 0
        if isinstance(node, (HostBridge, PciBridge)):
            return self._bridge(node, numa)
        if isinstance(node, PciDevice) and self.verbose < 2:
            return [], 1
        return [self._device(node, numa)], 0

    def _bridge(self, node: HostBridge | PciBridge, numa: int | None) -> tuple[list[Branch], int]:
        below: list[Branch] = []
        hidden = 0
        for child in sorted(
            (self.topology.nodes[child] for child in self.topology.children.get(node.id, ())),
            key=lambda child: (sort_key(getattr(child, "pci", None) or ""), child.id),
        ):
            if isinstance(child, Device):
                lines, more = self._below(child, numa)
                below += lines
                hidden += more
        if isinstance(node, HostBridge):
            below += self._hidden(hidden)
            return ([self._host_bridge(node, below)] if below else []), 0
        if not below and self.verbose < 2:
            return [], hidden + 1
        if node.role != "upstream-port" and self.verbose < (1 if node.role == "root-port" else 2):
            return below, hidden
        what = "switch" if node.role == "upstream-port" else node.role.replace("-", " ")
        return [
            Branch(
                Span(what),
                [*self._elsewhere(node, numa), Span(model_of(node))],
                node.pci or "",
                # A root or downstream port's link is the one below it, and stands there.
                Span("") if node.role in PORTS else pcie_link(node),
                below,
            )
        ], hidden

    def _host_bridge(self, node: HostBridge, below: list[Branch]) -> Branch:
        """A host bridge; with a switch alone below it the two share a line."""
        if len(below) == 1 and below[0].label.text == "switch":
            switch = below[0]
            about = [Span(f"switch {switch.about[-1].text}"), *switch.about[:-1]]
            return switch._replace(label=Span(node.id), about=about)
        return Branch(Span(node.id), [], below=below)

    def _hidden(self, number: int) -> list[Branch]:
        if not number or not self.verbose:
            return []
        return [Branch(Span(f"+ {count(number, 'other function')}", "dim"), [])]

    def _elsewhere(self, node: Device, numa: int | None) -> list[Span]:
        """The node of a device that is not where its line stands."""
        if node.numa is None or node.numa == numa:
            return []
        return [Span(f"NUMA {node.numa}", "warning")]

    def _device(self, node: Device, numa: int | None) -> Branch:
        if isinstance(node, Gpu):
            about = about_gpu(node)
        elif isinstance(node, Hca):
            about = about_hca(node, short=self.short)
        elif isinstance(node, Nic):
            about = about_nic(node)
        elif isinstance(node, NvSwitch):
            about = [Span("NVSwitch")]
        elif isinstance(node, PciDevice):
            numbers = f"{node.vendor or 0:04x}:{node.device or 0:04x}"
            about = [Span(f"class {node.class_code:06x} {numbers}", "dim")]
        else:
            about = [Span(model_of(node))]
        virtual = max(self.virtual[node.id], getattr(node, "virtual_functions", 0))
        if virtual:
            about.append(Span(f"+{count(virtual, 'VF')}", "dim"))
        style = "bold" if isinstance(node, Gpu) else ""
        name = "function" if isinstance(node, PciDevice) else cut(name_of(node), LABEL_CELLS)
        return Branch(
            Span(name, style),
            [*self._elsewhere(node, numa), *about],
            node.pci or UNKNOWN,
            pcie_link(node),
        )


class _Row(NamedTuple):
    before: str
    """Lines of the tree in front of the label, and in front of what is continued below it."""
    after: str
    branch: Branch


def _rows(branches: Iterable[Branch], before: str = "", root: bool = True) -> Iterator[_Row]:
    branches = list(branches)
    for number, branch in enumerate(branches, 1):
        last = number == len(branches)
        mark, rest = ("", "") if root else ("└ ", "  ") if last else ("├ ", "│ ")
        inner = before + rest
        yield _Row(before + mark, inner + ("│ " if branch.below else "  "), branch)
        yield from _rows(branch.below, inner, root=False)


def write_tree(page: Page, topology: Topology, verbose: int) -> None:
    """The section with the tree; addresses, links and descriptions each in a column."""
    short = page.width < SHORT_BELOW
    rows = list(_rows(_Tree(topology, verbose, short).roots()))
    if not rows:
        return
    page.heading("Tree", "PCIe links as trained now")
    listed = [row for row in rows if row.branch.address]
    label_cells = max((cell_len(r.before + r.branch.label.text) for r in listed), default=0)
    address_cells = max((len(row.branch.address) for row in listed), default=0)
    usual = [cell_len(r.branch.link.text) for r in listed if not r.branch.link.style]
    link_cells = max(usual, default=0)
    for before, after, branch in rows:
        lead = [Span(before, "dim"), branch.label]
        if not branch.address:
            page.fields(
                [*lead, Span("  ")] if branch.about else lead,
                branch.about,
                hang=[Span(after, "dim")],
            )
            continue
        lead[1] = pad(branch.label, label_cells - cell_len(before))
        # A link that is not what it could be stands out over its column.
        lead += [
            Span(f"  {branch.address.ljust(address_cells)}  ", "dim"),
            pad(branch.link, link_cells),
            Span("  "),
        ]
        indent = sum(cell_len(span.text) for span in lead)
        indent = min(indent, label_cells + address_cells + link_cells + 6)
        if page.width - indent < page.width // 4:
            indent = cell_len(after) + 4
        page.fields(lead, branch.about, hang=[pad(Span(after, "dim"), indent)])
