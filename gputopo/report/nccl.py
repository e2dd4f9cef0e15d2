"""``scan --nccl``: which NIC, GPUDirect RDMA and P2P each GPU gets from NCCL, and why."""

from __future__ import annotations

from collections.abc import Iterable

from gputopo.nccl.predict import VERSION, NcclChoice, Peers, Prediction, prediction
from gputopo.report.devices import NAME_CELLS, UNKNOWN, name_of, ranges
from gputopo.report.layout import Page, Span, cell_len, cut, pad, page_width, wants_colour
from gputopo.topology.graph import Topology
from gputopo.topology.model import Gpu

ASSUMED = f"as NCCL {VERSION} plans by default, in a job of several machines"

BLIND = (
    "NCCL reads maximum link speeds and ports that are up: it does not see a degraded link or a "
    "port that is down. It keeps within the launcher's CPU mask, right or wrong"
)

GDR_WORDS = {
    True: Span("GPUDirect RDMA", "good"),
    False: Span("no GPUDirect", "warning"),
    None: Span("GPUDirect ?", "warning"),
}

MEANS_STYLES = {"P2P": "good", "SHM": "warning", "NET": "warning"}


def render_nccl(topology: Topology, *, tty: bool = False, width: int | None = None) -> str:
    """The section alone, with its final newline."""
    page = Page(page_width(tty) if width is None else width, wants_colour(tty))
    write_nccl(page, topology)
    return page.text()


def write_nccl(page: Page, topology: Topology) -> None:
    """The section: a line for each GPU, how they reach each other, and what else is to be known."""
    found = prediction(topology)
    page.heading("NCCL", ASSUMED)
    if not found.choices:
        there = bool(topology.gpus)
        page.line("cannot be told: GPUs without PCI address" if there else "no GPU")
        return
    _write_nics(page, topology, found.choices)
    _write_reasons(page, topology, found.choices)
    _write_between(page, topology, found.choices)
    for text in (*_remarks(found), BLIND):
        page.prose([Span("- ", "dim")], text)


def _write_nics(page: Page, topology: Topology, choices: list[NcclChoice]) -> None:
    rows = [
        [
            Span(_label(topology, choice.gpu)),
            Span(_numa(choice.numa)),
            Span(cut(",".join(choice.nic_names) or "no NIC", NAME_CELLS)),
            Span(choice.path or "", "good" if choice.gdr else "warning"),
            Span("" if choice.gbytes_per_s is None else f"{choice.gbytes_per_s:g} GB/s"),
            GDR_WORDS[choice.gdr] if choice.nics else Span(""),
            Span(f"sends through {_label(topology, choice.relay)}" if choice.relay else ""),
        ]
        for choice in choices
    ]
    widths = [max(cell_len(row[i].text) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        spans = [pad(span, width + 2) for span, width in zip(row, widths, strict=True) if width]
        page.line(*spans)


def _write_reasons(page: Page, topology: Topology, choices: list[NcclChoice]) -> None:
    """Why GPUDirect RDMA is used or not, once for all GPUs of which the same is to be said."""
    groups: dict[str, list[str]] = {}
    for choice in choices:
        groups.setdefault(choice.gdr_reason, []).append(choice.gpu)
    for reason, gpus in groups.items():
        whom = "" if len(groups) == 1 else f" {_numbers(topology, gpus)}"
        page.prose([Span(f"GPUDirect RDMA{whom}: ", "dim")], reason)


def _write_between(page: Page, topology: Topology, choices: list[NcclChoice]) -> None:
    """How GPUs reach each other: one line if all do alike, else one for each and the reasons."""
    groups = [peers for choice in choices for peers in choice.p2p]
    if not groups:
        return
    kinds = {(peers.by, peers.path, peers.gbytes_per_s, peers.reason) for peers in groups}
    lead = Span("between GPUs: ", "dim")
    if len(kinds) == 1:
        page.flow([lead], [_means(groups[0]), Span(groups[0].reason)], separator="  ")
        return
    page.line(lead)
    for choice in choices:
        items = [
            Span(f"{_means(peers).text} {_numbers(topology, peers.gpus)}", _means(peers).style)
            for peers in choice.p2p
        ]
        page.flow([Span(f"  {_label(topology, choice.gpu)}  ")], items, separator=", ")
    for by, path, reason in sorted({(peers.by, peers.path, peers.reason) for peers in groups}):
        page.prose([Span("  ")], f"{by if by == path else f'{by} {path}'}: {reason}", "dim")


def _means(peers: Peers) -> Span:
    kind = peers.by if peers.path == peers.by else f"{peers.by} {peers.path}"
    text = f"{kind} {peers.gbytes_per_s:g} GB/s"
    return Span(text, MEANS_STYLES[peers.by])


def _remarks(found: Prediction) -> Iterable[str]:
    """All remarks in order, each text once."""
    of_gpus = (remark.text for choice in found.choices for remark in choice.remarks)
    return dict.fromkeys([*of_gpus, *(remark.text for remark in found.remarks)])


def _label(topology: Topology, gpu: str) -> str:
    node = topology.nodes[gpu]
    return name_of(node) if isinstance(node, Gpu) else gpu


def _numbers(topology: Topology, gpus: list[str]) -> str:
    indices = [node.index for node in topology.gpus if node.id in gpus and node.index is not None]
    return ranges("GPU", indices)


def _numa(numa: int | None) -> str:
    return f"NUMA {UNKNOWN if numa is None or numa < 0 else numa}"
