"""What the matrix of ``nvidia-smi topo`` tells without a PCI tree: all that many pastes have.

GPUs and HCAs become nodes without an address. A path class between them is what was printed, and a
cell that was cut off is an unknown path. Of devices that the PCI facts have nothing is taken but
their NVLinks, where NVML does not tell of any.
"""

from __future__ import annotations

import re

import msgspec

from gputopo.cpulist import parse
from gputopo.facts import Missing, known
from gputopo.probes.nvidia_smi import SmiMatrix
from gputopo.topology import model
from gputopo.topology.draft import Draft
from gputopo.topology.model import Gpu, Hca, Link

NOT_SHOWN = Missing("absent", "not in this source")

HIDDEN = Missing("unsupported", "nvidia-smi topo -mp does not show NVLink")
UNSURE = Missing("absent", "the matrix may be of topo -mp, without NVLink")

MOST_NVLINKS = 18
"""NVLinks of a GPU: V100 has 6, A100 12, H100 and B200 18. A GPU whose row adds up to more shares
its links among its peers, through NVSwitches."""

UNKNOWN = "?"

LOCAL = ("PIX", "PXB", "PHB", "NODE")
"""Classes of paths that stay within one NUMA node, by their definition."""


def add_matrix(draft: Draft) -> None:
    """Adds what only the matrix has. Devices from other sources are there already."""
    smi = known(draft.facts.nvidia_smi)
    if smi is None or not smi.rows:
        return
    _Matrix(draft, smi).add()


class _Matrix:
    def __init__(self, draft: Draft, smi: SmiMatrix) -> None:
        self.draft = draft
        self.smi = smi
        self.gpus = {
            label: int(label[3:]) for label in smi.devices if re.fullmatch(r"GPU\d{1,3}", label)
        }
        self.ids: dict[str, str] = {}
        """Node id by the label of a row."""
        pci = known(draft.facts.pci)
        self.may_add_gpus = pci is None or not pci.whole
        self.may_add_hcas = isinstance(draft.facts.rdma, Missing)

    def add(self) -> None:
        placed = {
            node.id
            for node in self.draft.nodes.values()
            if isinstance(node, (Gpu, Hca)) and node.pci in self.draft.functions
        }
        for label in self.smi.devices:
            if label in self.gpus:
                self._gpu(label, placed)
            else:
                self._hca(label, placed)
        loose = {node_id for node_id in self.ids.values() if node_id not in placed}
        for a, first in self.ids.items():
            for b, second in self.ids.items():
                if first != second and (first in loose or second in loose):
                    cell = self.smi.cell(a, b) or UNKNOWN
                    self.draft.printed.classes[first, second] = cell
        for node_id in loose:
            self._place_hca(node_id)
        self._nvlinks()

    # Nodes

    def _gpu(self, label: str, placed: set[str]) -> None:
        index = self.gpus[label]
        nodes = [node for node in self.draft.nodes.values() if isinstance(node, Gpu)]
        node = next((node for node in nodes if node.index == index), None)
        if node is None and not self.may_add_gpus:
            return
        if node is None:
            node = Gpu(
                id=self.draft.unique(f"gpu{index}"),
                parent="machine",
                index=index,
                sources={"index": self.smi.command},
                missing={
                    "pci": NOT_SHOWN,
                    "numa": NOT_SHOWN,
                    "nvml": self._why_no_nvml(),
                },
            )
        self.ids[label] = node.id
        if node.id not in placed:
            node = self._located(node, label)
        if node.nvlink is None and self.smi.nvlink is not True:
            why = HIDDEN if self.smi.nvlink is False else UNSURE
            node = msgspec.structs.replace(node, missing={**node.missing, "nvlink": why})
        self.draft.add(node)

    def _why_no_nvml(self) -> Missing:
        nvml = self.draft.facts.nvml
        return nvml if isinstance(nvml, Missing) else NOT_SHOWN

    def _hca(self, label: str, placed: set[str]) -> None:
        nodes = [node for node in self.draft.nodes.values() if isinstance(node, Hca)]
        node = next((node for node in nodes if label in (node.name, node.id)), None)
        if node is None and not self.may_add_hcas:
            return
        if node is None:
            node = Hca(
                id=self.draft.unique(label),
                name=label,
                parent="machine",
                ports=[],
                netdevs=[],
                missing={"pci": NOT_SHOWN, "numa": NOT_SHOWN, "ports": NOT_SHOWN},
            )
            self.draft.add(node)
        self.ids[label] = node.id

    # Places

    def _located(self, node: Gpu, label: str) -> Gpu:
        """With what the affinity columns say, where nothing else told it."""
        changes: dict[str, object] = {}
        sources, missing = dict(node.sources), dict(node.missing)
        cpus = self.smi.cpu_affinity.get(label)
        if node.cpus is None and cpus:
            if _is_set(cpus):
                changes["cpus"] = cpus
                sources["cpus"] = f"{self.smi.command}, CPU Affinity"
        elif cpus == "":
            # Seen in containers: none of the CPUs that the process may use is near the GPU.
            missing["cpus"] = Missing("absent", "CPU Affinity is empty: no allowed CPU is near")
        if node.numa is None:
            numa, source, why = self._numa(label, cpus or "")
            if numa is not None:
                changes["numa"] = numa
                sources["numa"] = source
                missing.pop("numa", None)
                changes["parent"] = self._parent(numa)
            else:
                missing["numa"] = why
        memory = self.smi.gpu_numa_id.get(label, "")
        if node.memory_numa is None and memory.isdigit():
            if int(memory) not in self.draft.cpu_nodes:
                changes["memory_numa"] = int(memory)
                sources["memory_numa"] = f"{self.smi.command}, GPU NUMA ID"
                missing.pop("memory_numa", None)
        return msgspec.structs.replace(node, **changes, sources=sources, missing=missing)

    def _numa(self, label: str, cpus: str) -> tuple[int | None, str, Missing]:
        """The node of a GPU by its column, else by its CPUs; and why it is unknown."""
        text = self.smi.numa_affinity.get(label)
        if text is not None and _is_set(text):
            # Drivers count the memory nodes of Grace's GPUs too: 0,2-17.
            named = parse(text)
            with_cpus = named & self.draft.cpu_nodes.keys() if self.draft.cpu_nodes else named
            if len(with_cpus) == 1:
                return min(with_cpus), f"{self.smi.command}, NUMA Affinity", NOT_SHOWN
            return None, "", Missing("unsupported", f"nvidia-smi names several nodes: {text[:40]}")
        near = parse(cpus) if _is_set(cpus) else frozenset()
        holders = [
            index
            for index, listed in self.draft.cpu_nodes.items()
            if near and near <= parse(listed)
        ]
        if len(holders) == 1:
            return holders[0], f"{self.smi.command}, CPU Affinity", NOT_SHOWN
        if text:
            return None, "", Missing("unsupported", f"nvidia-smi says {text[:40]}")
        return None, "", NOT_SHOWN

    def _parent(self, numa: int) -> str:
        return f"numa{numa}" if f"numa{numa}" in self.draft.nodes else "machine"

    def _place_hca(self, node_id: str) -> None:
        """Places an HCA on the node of GPUs that it reaches within their node."""
        node = self.draft.nodes[node_id]
        if not isinstance(node, Hca) or node.numa is not None:
            return
        label = next(label for label, own in self.ids.items() if own == node_id)
        near: dict[int, str] = {}
        for gpu_label in self.gpus:
            gpu = self.draft.nodes.get(self.ids.get(gpu_label, ""))
            if self.smi.cell(gpu_label, label) in LOCAL and isinstance(gpu, Gpu):
                if gpu.numa is not None:
                    near.setdefault(gpu.numa, f"{self.smi.cell(gpu_label, label)} to {gpu.id}")
        if len(near) != 1:
            return
        (numa, why), missing = next(iter(near.items())), dict(node.missing)
        missing.pop("numa", None)
        self.draft.add(
            msgspec.structs.replace(
                node,
                numa=numa,
                cpus=self.draft.cpu_nodes.get(numa),
                parent=self._parent(numa),
                sources={**node.sources, "numa": f"{self.smi.command}: {why}"},
                missing=missing,
            )
        )

    # NVLink

    def _nvlinks(self) -> None:
        """Links of GPUs of which NVML tells none, as the cells count them."""
        if self.smi.nvlink is not True:
            return
        linked = {
            end for link in self.draft.links if link.kind == "nvlink" for end in (link.a, link.b)
        }
        mine = {
            label: self.ids[label]
            for label in self.gpus
            if self._lacks(self.ids.get(label, "")) and self.ids[label] not in linked
        }
        self.draft.printed.nvlinks.update(mine.values())
        counts: dict[tuple[str, str], int] = {}
        for a in mine:
            for b in mine:
                cell = self.smi.cell(a, b) or ""
                if a != b and cell.startswith("NV"):
                    counts[a, b] = int(cell[2:])
        if _are_switched(counts):
            self._through_switch(counts)
            return
        for (a, b), count in counts.items():
            if self.gpus[a] < self.gpus[b]:
                self._link(self.ids[a], self.ids[b], count)

    def _lacks(self, node_id: str) -> bool:
        """Whether the other ends of a GPU's NVLinks are not known, nor that it has none."""
        node = self.draft.nodes.get(node_id)
        return isinstance(node, Gpu) and (node.nvlink is None or bool(node.nvlink.active))

    def _through_switch(self, counts: dict[tuple[str, str], int]) -> None:
        """Each GPU with all its links to a switch, which no cell shows but their sum tells."""
        switch = "nvswitch"
        if switch not in self.draft.nodes:
            why = Missing("absent", "known from the GPUs' NVLinks only")
            self.draft.add(model.NvSwitch(id=switch, parent="machine", missing={"pci": why}))
        for label in dict.fromkeys(a for a, _ in counts):
            most = max(count for (a, _), count in counts.items() if a == label)
            self._link(self.ids[label], switch, most)

    def _link(self, a: str, b: str, count: int) -> None:
        self.draft.links.append(Link(a=a, b=b, kind="nvlink", count=count, state="up"))


def _is_set(text: str) -> bool:
    if not re.fullmatch(r"[\d,-]{1,4096}", text):
        return False
    try:
        return bool(parse(text))
    except ValueError:
        return False


def _are_switched(counts: dict[tuple[str, str], int]) -> bool:
    """Whether GPUs share their links among their peers, and every cell is what a switch gives."""
    sums: dict[str, int] = {}
    most: dict[str, int] = {}
    for (a, _), count in counts.items():
        sums[a] = sums.get(a, 0) + count
        most[a] = max(most.get(a, 0), count)
    if not any(total > MOST_NVLINKS for total in sums.values()):
        return False
    return all(count == min(most[a], most[b]) for (a, b), count in counts.items())
