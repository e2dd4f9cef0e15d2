"""The matrix of path classes, as ``nvidia-smi topo -m`` prints it, on a page of any width."""

from __future__ import annotations

from typing import NamedTuple

from gputopo.report.devices import UNKNOWN, cpu_list, folded
from gputopo.report.layout import Page, Span, cell_len, cut, pad
from gputopo.topology.graph import Topology
from gputopo.topology.model import AnyNode, Gpu
from gputopo.topology.paths import LEGEND

LABEL_CELLS = 16
"""Columns of a label: an RDMA device's name can be as long as its owner likes. A GPU that NVML does
not list is called ``GPU@0000:3b:00.0``."""

STYLES = {"X": "dim", "SYS": "dim", UNKNOWN: "warning", "PIX": "good", "PXB": "good", "C2C": "good"}


class _Column(NamedTuple):
    title: str
    cells: list[Span]
    gap: int

    @property
    def width(self) -> int:
        return self.gap + max(
            cell_len(text) for text in (self.title, *(c.text for c in self.cells))
        )


def write_matrix(page: Page, topology: Topology) -> None:
    """The section: whole where it fits, else with short labels, else in blocks of columns."""
    matrix = topology.matrix
    hidden = folded(topology)
    shown = [number for number, node in enumerate(matrix.ids) if node not in hidden]
    if not shown:
        return
    classes = [[matrix.classes[i][j] for j in shown] for i in shown]
    nodes = [topology.nodes[matrix.ids[number]] for number in shown]
    names = [cut(matrix.labels[number], LABEL_CELLS) for number in shown]
    gpus = sum(isinstance(node, Gpu) for node in nodes)
    short = [
        f"N{number - gpus}" if number >= gpus else name.replace("GPU", "G", 1)
        for number, name in enumerate(names)
    ]
    forms = [(names, _columns(names, classes, 2)), (short, _columns(short, classes, 1))]
    affinity = _affinity(topology, nodes)
    labels, blocks = _layout(forms, gpus, affinity, page.width)
    taken = (
        "taken from its output"
        if topology.printed.classes
        else "computed from the PCI tree and NVLink"
    )
    page.heading("Matrix", f"as nvidia-smi topo -m; {taken}")
    if topology.nvlink_unknown:
        why = cut(topology.nvlink_unknown, 60)
        page.flow(
            [Span("  ")],
            [
                Span(
                    f"NVLink is unknown ({why}): between GPUs these are PCIe classes alone",
                    "warning",
                )
            ],
            separator=" ",
        )
    for rows, block in blocks:
        _write_block(page, labels, rows, block)
        page.line()
    _write_legend(page, {cell for row in classes for cell in row})
    if labels is short:
        pairs = zip(short[gpus:], names[gpus:], strict=True)
        told = [Span(f"{label} {name}") for label, name in pairs]
        page.flow([Span("  ")], [Span("G# GPU#"), *told], separator="  ")


_Form = tuple[list[str], list[_Column]]
"""Labels and the columns under them."""

_Block = tuple[range, list[_Column]]
"""Rows and columns that are printed together."""


def _layout(
    forms: list[_Form], gpus: int, affinity: list[_Column], width: int
) -> tuple[list[str], list[_Block]]:
    """The first form that fits as a whole, else that fits in two blocks, else the last form."""
    for labels, columns in forms:
        if max(map(cell_len, labels)) + sum(c.width for c in columns + affinity) <= width:
            return labels, [(range(len(labels)), columns + affinity)]
    for labels, columns in forms[:-1]:
        blocks = _blocks(labels, gpus, columns, affinity, width)
        if len(blocks) <= 2:
            return labels, blocks
    labels, columns = forms[-1]
    return labels, _blocks(labels, gpus, columns, affinity, width)


def _write_legend(page: Page, classes: set[str]) -> None:
    """What the classes that occur mean."""
    nvlink = any(cell.startswith("NV") for cell in classes)
    for name, text in LEGEND.items():
        if name in classes or (name == "NV#" and nvlink):
            page.line("  ", Span(name.ljust(6), _style(name)), text)


def _style(cell: str) -> str:
    return "good" if cell.startswith("NV") else STYLES.get(cell, "")


def _columns(labels: list[str], classes: list[list[str]], gap: int) -> list[_Column]:
    return [
        _Column(label, [Span(row[j], _style(row[j])) for row in classes], gap)
        for j, label in enumerate(labels)
    ]


def _affinity(topology: Topology, nodes: list[AnyNode]) -> list[_Column]:
    """The columns that say where a GPU belongs; HCAs have none, as with nvidia-smi."""
    gpus = [node if isinstance(node, Gpu) else None for node in nodes]
    if not any(gpus):
        return []
    alone = len(topology.cpu_nodes) == 1

    def cell(gpu: Gpu | None, value: str | None, absent: str) -> Span:
        if gpu is None:
            return Span("")
        return Span(cut(value, 40)) if value is not None else Span(absent, STYLES.get(absent, ""))

    # One node only: a device without a node is where everything is.
    unknown = "N/A" if alone else UNKNOWN
    every = topology.cpu_nodes[0].cpus if alone else None
    columns = [
        ("CPU Affinity", [cell(g, cpu_list(g.cpus or every) if g else "", unknown) for g in gpus]),
        ("NUMA Affinity", [cell(g, _text(g.numa if g else None), unknown) for g in gpus]),
    ]
    if any(gpu is not None and gpu.memory_numa is not None for gpu in gpus):
        memory = [cell(g, _text(g.memory_numa if g else None), "N/A") for g in gpus]
        columns.append(("GPU NUMA ID", memory))
    return [_Column(title, cells, 2) for title, cells in columns]


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


def _blocks(
    labels: list[str], gpus: int, columns: list[_Column], affinity: list[_Column], width: int
) -> list[_Block]:
    """Rows and columns of each block, where the whole does not fit.

    Columns of GPUs come first, for the rows of GPUs alone: the matrix is symmetric, so that the
    columns of HCAs, which have all rows, tell the rest.
    """
    room = width - max(map(cell_len, labels))
    blocks = [(range(gpus), part) for part in _parts(columns[:gpus], affinity, room)]
    return blocks + [(range(len(labels)), part) for part in _parts(columns[gpus:], [], room)]


def _parts(columns: list[_Column], last: list[_Column], room: int) -> list[list[_Column]]:
    """``columns`` in as few and as equal parts as fit, ``last`` at the end of the last one."""
    wide = max((column.width for column in columns), default=1)
    number = -(-len(columns) // max(1, room // wide))
    size = -(-len(columns) // max(1, number))
    parts = [columns[i : i + size] for i in range(0, len(columns), max(1, size))]
    if parts and last and sum(column.width for column in (*parts[-1], *last)) <= room:
        return [*parts[:-1], [*parts[-1], *last]]
    return [*parts, last] if last else parts


def _write_block(page: Page, labels: list[str], rows: range, columns: list[_Column]) -> None:
    first = max(map(cell_len, labels))
    page.line(
        " " * first,
        *(pad(Span(" " * c.gap + c.title, "bold"), c.width) for c in columns),
    )
    for row in rows:
        cells = (
            pad(
                Span(" " * column.gap + column.cells[row].text, column.cells[row].style),
                column.width,
            )
            for column in columns
        )
        page.line(pad(Span(labels[row], "bold"), first), *cells)
