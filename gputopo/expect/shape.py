"""The shape of a machine: what stays when buses are renumbered and devices renamed.

A shape is a flat table from a subject and a field to a value in words, so that two shapes are
compared line by line. GPUs are matched by index, HCAs by their order; PCI addresses, serials and
host names are no part of it. What is unknown is ``unknown``, and differs from a value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from gputopo.hardware.pcie import describe
from gputopo.topology.graph import Topology
from gputopo.topology.model import Gpu, Hca, HostBridge, Nic, Nvme, NvSwitch, PciBridge, Pcie

UNKNOWN = "unknown"

Shape = dict[tuple[str, str], str]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One line in which two machines differ."""

    subject: str
    field: str
    a: str
    b: str


def shape(topology: Topology) -> Shape:
    """The shape of a machine."""
    return {(subject, field): value for subject, field, value in _lines(topology)}


def differences(a: Shape, b: Shape) -> list[Difference]:
    """What differs between two shapes, in the order of the first; ``absent`` for what one lacks."""
    keys = [*a, *(key for key in b if key not in a)]
    return [
        Difference(subject=key[0], field=key[1], a=a.get(key, "absent"), b=b.get(key, "absent"))
        for key in keys
        if a.get(key) != b.get(key)
    ]


def link(pcie: Pcie | None, *, most: bool = False) -> str:
    """``Gen5 x16`` of a PCIe link as it is trained, or of what both ends can do."""
    if pcie is None:
        return UNKNOWN
    speed = pcie.max_speed_gts if most else pcie.speed_gts
    width = pcie.max_width if most else pcie.width
    return describe(speed, width) if speed is not None and width is not None else UNKNOWN


def _lines(topology: Topology) -> Iterator[tuple[str, str, str]]:
    host = topology.host
    for field in ("product", "cpu_model", "packages", "cores", "pus", "driver", "kernel"):
        yield "machine", field.replace("_", " "), _word(getattr(host, field))
    yield "machine", "NUMA nodes", str(len(topology.numa_nodes))
    for node in topology.numa_nodes:
        if node.role == "empty":
            continue
        yield f"numa{node.index}", "CPUs", node.cpus if node.cpus is not None else UNKNOWN
        memory = node.memory_bytes
        # The kernel's own needs make the last gigabyte differ from boot to boot.
        yield f"numa{node.index}", "memory", f"{round(memory / 2**30)} GiB" if memory else UNKNOWN
    for kind, name in (
        (Gpu, "GPUs"),
        (NvSwitch, "NVSwitches"),
        (Nvme, "NVMe drives"),
        (Nic, "NICs"),
    ):
        nodes = list(topology.of(kind))
        # Of switches that only the GPUs' links show, the number cannot be told.
        hidden = any(isinstance(node, NvSwitch) and node.pci is None for node in nodes)
        yield "machine", name, UNKNOWN if hidden else str(len(nodes))
    yield "machine", "HCAs", str(len(topology.physical_hcas))
    for tree, count in sorted(Counter(_trees(topology)).items()):
        yield f"PCI tree {tree}", "count", str(count)
    for gpu in topology.gpus:
        yield from _gpu(topology, gpu)
    for number, hca in enumerate(topology.physical_hcas):
        yield from _hca(f"hca{number}", hca)
    matrix = topology.matrix
    hcas = iter(range(len(matrix.ids)))
    names = [i if isinstance(topology.nodes[i], Gpu) else f"hca{next(hcas)}" for i in matrix.ids]
    for i, a in enumerate(names):
        for j, b in enumerate(names[:i]):
            yield f"{b} to {a}", "path", matrix.classes[j][i]


def _gpu(topology: Topology, gpu: Gpu) -> Iterator[tuple[str, str, str]]:
    yield gpu.id, "model", _word(gpu.name)
    yield gpu.id, "NUMA node", _word(gpu.numa)
    yield gpu.id, "PCIe at most", link(gpu.pcie, most=True)
    yield gpu.id, "PCIe width", f"x{gpu.pcie.width}" if gpu.pcie and gpu.pcie.width else UNKNOWN
    yield gpu.id, "NVLinks", _word(gpu.nvlink.count if gpu.nvlink else None)
    yield gpu.id, "active NVLinks", _word(gpu.nvlink.active if gpu.nvlink else None)
    yield gpu.id, "MIG", _word(gpu.mig_mode)
    yield gpu.id, "nearest HCA", _word(gpu.nearest_hca_class)


def _hca(name: str, hca: Hca) -> Iterator[tuple[str, str, str]]:
    yield name, "model", _word(hca.model)
    yield name, "board", _word(hca.board_id)
    yield name, "firmware", _word(hca.firmware)
    yield name, "NUMA node", _word(hca.numa)
    yield name, "PCIe", link(hca.pcie)
    for port in hca.ports:
        rate = f"{port.rate_gbps:g} Gb/s" if port.rate_gbps is not None else UNKNOWN
        yield f"{name} port {port.port}", "state", _word(port.state)
        yield f"{name} port {port.port}", "rate", f"{rate} {_word(port.link_layer)}"


def _trees(topology: Topology) -> list[str]:
    """Each root complex with devices of interest in a bracket notation: ``numa0(sw(gpu hca))``."""

    def inside(node_id: str) -> str:
        node = topology.nodes[node_id]
        below = sorted(filter(None, map(inside, topology.children.get(node_id, []))))
        if isinstance(node, PciBridge):
            listed = " ".join(below)
            return f"sw({listed})" if below and node.role == "upstream-port" else listed
        kinds = {Gpu: "gpu", Hca: "hca", NvSwitch: "nvswitch"}
        return kinds.get(type(node), "")

    found: list[str] = []
    for bridge in topology.of(HostBridge):
        below = sorted(filter(None, map(inside, topology.children.get(bridge.id, []))))
        if below:
            found.append(f"numa{'?' if bridge.numa is None else bridge.numa}({' '.join(below)})")
    return found


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return UNKNOWN if value is None else str(value)
