"""Where two sources tell one fact differently: both are kept, and the difference is a finding."""

from __future__ import annotations

from gputopo.facts import Missing, known
from gputopo.probes.numa import NODES
from gputopo.topology.graph import Topology
from gputopo.topology.model import Disagreement, Gpu, Hca
from gputopo.topology.paths import label


def compare_numactl(topology: Topology) -> list[Disagreement]:
    """Nodes whose CPUs ``numactl --hardware`` sees otherwise than sysfs."""
    numa = known(topology.facts.numa)
    found: list[Disagreement] = []
    if numa is None or isinstance(numa.numactl, Missing):
        return found
    for node in numa.nodes:
        other = numa.numactl.get(node.index)
        theirs = other.cpus if other is not None else None
        if isinstance(theirs, str) and isinstance(node.cpus, str) and theirs != node.cpus:
            found.append(
                Disagreement(
                    subjects=[f"numa{node.index}"],
                    fact="cpus",
                    kept=node.cpus,
                    kept_source=f"{NODES}/node{node.index}/cpulist",
                    other=theirs,
                    other_source="numactl --hardware",
                )
            )
    return found


def compare_ancestors(topology: Topology) -> list[Disagreement]:
    """Pairs of GPUs whose common PCIe ancestor NVML sees otherwise than the PCI tree here."""
    nvml = known(topology.facts.nvml)
    found: list[Disagreement] = []
    alone = len(topology.cpu_nodes) <= 1
    for pair in nvml.pairs if nvml else []:
        a, b = f"gpu{pair.a}", f"gpu{pair.b}"
        if pair.a > pair.b or a not in topology.nodes or b not in topology.nodes:
            continue
        ours = topology.pcie_class(a, b)
        other = known(pair.ancestor)
        if other is None or ours == other or (alone and {ours, other} == {"NODE", "SYS"}):
            continue
        found.append(
            Disagreement(
                subjects=[a, b],
                fact="PCIe common ancestor",
                kept=ours,
                kept_source="the PCI tree",
                other=other,
                other_source=f"nvmlDeviceGetTopologyCommonAncestor({pair.a}, {pair.b})",
            )
        )
    return found


def compare_matrix(topology: Topology) -> list[Disagreement]:
    """Cells of ``nvidia-smi topo -m`` that differ from the classes computed here."""
    smi = known(topology.facts.nvidia_smi)
    if smi is None:
        return []
    found: list[Disagreement] = []
    listed: list[Gpu | Hca] = [*topology.gpus, *topology.physical_hcas]
    devices = {label(node): node for node in listed}
    alone = len(topology.cpu_nodes) <= 1
    for row, cells in smi.rows.items():
        for column, cell in cells.items():
            a, b = devices.get(row), devices.get(column)
            if a is None or b is None or a.id >= b.id:
                continue
            ours = topology.path_class(a.id, b.id)
            # The driver says SYS for different host bridges of a machine with one NUMA node.
            if topology.nvlink_unknown and cell.startswith("NV"):
                continue  # nothing here says otherwise
            if ours == cell or (alone and {ours, cell} == {"NODE", "SYS"}):
                continue
            found.append(
                Disagreement(
                    subjects=[a.id, b.id],
                    fact="path class",
                    kept=ours,
                    kept_source="the PCI tree and NVLink",
                    other=cell,
                    other_source="nvidia-smi topo -m",
                )
            )
    return found
