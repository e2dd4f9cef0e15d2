"""What the driver's and numactl's tables say, told from the description alone.

The classes are NVIDIA's (``nvidia-smi topo -h``), worked out here from the switches that the
description nests, not from the sysfs tree that was made of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from composer.layout import Function, Layout
from composer.processors import Processors, free_mib
from gputopo.cpulist import render

_WORDS = {
    "X": "Self",
    "SYS": "Connection traversing PCIe as well as the SMP interconnect between NUMA nodes "
    "(e.g., QPI/UPI)",
    "NODE": "Connection traversing PCIe as well as the interconnect between PCIe Host Bridges "
    "within a NUMA node",
    "PHB": "Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)",
    "PXB": "Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)",
    "PIX": "Connection traversing at most a single PCIe bridge",
    "NV#": "Connection traversing a bonded set of # NVLinks",
}


def path_class(layout: Layout, processors: Processors, a: Function, b: Function) -> str:
    """The PCIe path between two functions: who must carry a packet from one to the other.

    A switch is an upstream port in the way up; below one root port, one switch is PIX and more are
    PXB. Other root ports of the same host bridge are PHB, other host bridges NODE or SYS.
    """
    if a.host != b.host:
        nodes = {processors.effective(a.node), processors.effective(b.node)}
        return "NODE" if len(nodes) == 1 and None not in nodes else "SYS"
    if a.address[:-2] == b.address[:-2]:
        return "PIX"
    if not a.above or not b.above or a.above[0] != b.above[0]:
        return "PHB"
    crossed = set(_switches(layout, a)) ^ set(_switches(layout, b))
    return "PXB" if crossed else "PIX"


def memory_nodes(layout: Layout, processors: Processors, gpu: Function) -> list[int]:
    """NUMA nodes near a GPU as the driver tells them; empty where it does not know.

    Drivers of GB200's time (570 on) count the GPU memory nodes of the same package too.
    """
    node = processors.effective(gpu.node)
    if node is None:
        return []
    branch = int(layout.machine.driver.split(".")[0])
    package = processors.nodes[node].package
    ours = [n.index for n in processors.nodes if n.gpu is not None and n.package == package]
    return [node, *(ours if branch >= 570 else [])]


def _switches(layout: Layout, function: Function) -> list[str]:
    return [up for up in function.above if layout.functions[up].kind == "switch"]


@dataclass(frozen=True)
class NvLinkEnd:
    """One NVLink port of a GPU. ``remote`` is None for a switch that is no PCI function here."""

    switch: bool
    remote: Function | None
    active: bool


def links(layout: Layout, gpu: Function) -> list[NvLinkEnd]:
    """The NVLink ports of a GPU in order; a link to a peer that is gone is inactive."""
    nvlink = layout.machine.nvlink
    ends: list[tuple[bool, Function | None, bool]] = []
    switches = layout.of_kind("nvswitch")
    for group in nvlink.switched:
        if gpu.index not in group.gpus:
            continue
        for place, count in enumerate(group.links):
            known = place < len(group.switches) and group.switches[place] < len(switches)
            ends += [(True, switches[group.switches[place]] if known else None, True)] * count
    present = {peer.index: peer for peer in layout.gpus}
    for pair, count in sorted(nvlink.pairs.items()):
        indices = [int(number) for number in pair.split("-")]
        if gpu.index in indices:
            other = indices[1 - indices.index(gpu.index)]
            ends += [(False, present.get(other), other in present)] * count
    down = gpu.settings.links_down
    return [
        NvLinkEnd(switch, remote, there and number not in down)
        for number, (switch, remote, there) in enumerate(ends)
    ]


def nvlinks(layout: Layout, a: Function, b: Function) -> int:
    """Active NVLinks between two GPUs: direct ones, or the fewer of what both have to switches."""
    ours, theirs = links(layout, a), links(layout, b)
    direct = min(
        sum(end.active and end.remote is b for end in ours),
        sum(end.active and end.remote is a for end in theirs),
    )
    switched = min(sum(end.active and end.switch for end in ends) for ends in (ours, theirs))
    return direct or switched


def topology(layout: Layout, processors: Processors) -> str:
    """``nvidia-smi topo -m`` in the form of the machine's driver.

    Before 440 there is no NUMA column, before 510 NICs are columns by device name and there is no
    GPU NUMA ID, since then they are NIC0, NIC1 ... with a legend.
    """
    machine = layout.machine
    branch = int(machine.driver.split(".")[0])
    modern, affinity = branch >= 510, branch >= 440
    gpus = layout.gpus
    order = machine.nic_order or [f.rdma for f in layout.hcas()]
    by_name = {f.rdma: f for f in layout.hcas()}
    nics = [by_name[name] for name in order if name in by_name]
    columns = [f"GPU{index}" for index in range(len(gpus))]
    columns += [f"NIC{i}" if modern else f.rdma for i, f in enumerate(nics)]
    tail = ["CPU Affinity", *(["NUMA Affinity"] if affinity else [])]
    rows = ["\t".join(["", *columns, *tail, *(["GPU NUMA ID"] if modern else [])])]
    for row, function in enumerate([*gpus, *nics]):
        cells = [columns[row]]
        for column, other in enumerate([*gpus, *nics]):
            if row == column:
                cells.append(" X ")
                continue
            both = function.kind == other.kind == "gpu"
            count = nvlinks(layout, function, other) if both else 0
            cells.append(f"NV{count}" if count else path_class(layout, processors, function, other))
        if function.kind == "gpu":
            cells.append(render(processors.local(function.node)))
            if affinity:
                cells.append(render(memory_nodes(layout, processors, function)) or "N/A")
            if modern:
                memory = function.settings.memory_node
                cells += ["", "N/A" if memory is None else str(memory)]
        elif modern:
            cells += [""] * 4
        elif not affinity:
            cells.append("")
        rows.append("\t".join(cells))
    rows += ["", "Legend:", ""]
    rows += [f"  {name:<4} = {words}" for name, words in _WORDS.items()]
    if modern and nics:
        rows += ["", "NIC Legend:", ""]
        rows += [f"  NIC{index}: {function.rdma}" for index, function in enumerate(nics)]
    return "\n".join([*rows, "", ""])


def numactl(processors: Processors) -> str:
    """``numactl --hardware``."""
    nodes = processors.nodes
    indices = render(node.index for node in nodes)
    rows = [f"available: {len(nodes)} nodes ({indices})"]
    for node in nodes:
        rows.append(" ".join([f"node {node.index} cpus:", *map(str, node.cpus)]))
        rows.append(f"node {node.index} size: {node.mib} MB")
        rows.append(f"node {node.index} free: {free_mib(node)} MB")
    rows.append("node distances:")
    rows.append("node " + "".join(f"{node.index:>3} " for node in nodes))
    for node in nodes:
        cells = "".join(f"{processors.distance(node, other):>3} " for other in nodes)
        rows.append(f"{node.index:>3}: {cells}")
    return "\n".join([*rows, ""])
