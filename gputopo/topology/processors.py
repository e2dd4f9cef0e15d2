"""The machine, its CPU packages and its NUMA nodes."""

from __future__ import annotations

from gputopo.cpulist import parse
from gputopo.facts import Missing, known
from gputopo.probes.numa import NumaFacts
from gputopo.topology import model
from gputopo.topology.draft import Draft, Found
from gputopo.topology.model import Link

WITHOUT_NUMA = {
    "cpus": "/sys/devices/system/cpu/online (a kernel without NUMA: all CPUs are one node)",
    "memory_bytes": "/proc/meminfo",
}


def add_machine(draft: Draft) -> None:
    system = known(draft.facts.system)
    found = Found()
    memory = found.get_or("memory_bytes", system.memory_bytes) if system else None
    name = known(system.product) if system else None
    draft.add(model.Machine(id="machine", name=name, memory_bytes=memory, missing=dict(found)))


def add_processors(draft: Draft) -> None:
    _add_packages(draft)
    nvml = known(draft.facts.nvml)
    owners: dict[int, str] = {}
    for gpu in nvml.gpus if nvml else []:
        if isinstance(gpu.numa_id, int) and gpu.numa_id >= 0:
            owners[gpu.numa_id] = f"gpu{gpu.index}"
    smi = known(draft.facts.nvidia_smi)
    for label, text in smi.gpu_numa_id.items() if smi else ():
        if text.isdigit():
            owners.setdefault(int(text), f"gpu{label.removeprefix('GPU')}")
    if not draft.numa:
        _add_named(draft, owners)
    for node in draft.numa:
        found = Found()
        cpus = found.get_or("cpus", node.cpus)
        memory = found.get_or("memory_bytes", node.memory_bytes)
        owner = owners.get(node.index) if not cpus else None
        if cpus:
            role = "cpu"
        elif cpus is None:
            role = "unknown"
        elif owner:
            role = "gpu-memory"
        else:
            role = "memory" if memory else "empty"
        distances = found.get_or("distances", node.distances) or {}
        draft.add(
            model.Numa(
                id=f"numa{node.index}",
                parent=_package_of(draft, cpus),
                index=node.index,
                role=role,
                cpus=cpus,
                memory_bytes=memory,
                distances={str(index): value for index, value in distances.items()},
                hugepages=node.hugepages,
                gpu=owner,
                sources={} if isinstance(draft.facts.numa, NumaFacts) else WITHOUT_NUMA,
                missing=dict(found),
            )
        )


def _add_named(draft: Draft, owners: dict[int, str]) -> None:
    """Nodes of which nothing is known but that devices are on them: a paste often has no more."""
    smi = known(draft.facts.nvidia_smi)
    named = {f.numa_node for f in draft.functions.values() if isinstance(f.numa_node, int)}
    named |= {int(text) for text in smi.numa_affinity.values() if text.isdigit()} if smi else set()
    reason = Missing("absent", "no source tells of the NUMA nodes themselves")
    for index in sorted({*named, *owners}):
        if index >= 0:
            memory = index in owners and index not in named
            draft.add(
                model.Numa(
                    id=f"numa{index}",
                    parent="machine",
                    index=index,
                    role="gpu-memory" if memory else "unknown",
                    cpus="" if memory else None,
                    memory_bytes=None,
                    distances={},
                    gpu=owners.get(index) if memory else None,
                    missing={"memory_bytes": reason} if memory else {"cpus": reason},
                )
            )


def _package_of(draft: Draft, cpus: str | None) -> str:
    """The package that holds all CPUs of a node, else the machine."""
    wanted = parse(cpus) if cpus else frozenset()
    for node in draft.nodes.values():
        if isinstance(node, model.Package) and wanted and wanted <= parse(node.cpus):
            return node.id
    return "machine"


def _add_packages(draft: Draft) -> None:
    cpu = known(draft.facts.cpu)
    added: list[str] = []
    for package in cpu.packages if cpu else []:
        assert cpu is not None
        cpus = parse(package.cpus)
        found = Found()
        index = found.get_or("index", package.index)
        node_id = draft.unique(f"package{'?' if index is None else index}")
        added.append(node_id)
        draft.add(
            model.Package(
                id=node_id,
                parent="machine",
                index=index,
                cpus=package.cpus,
                cores=[core for core in cpu.cores if parse(core) <= cpus],
                l3_groups=[group for group in cpu.l3_groups if parse(group) <= cpus],
                numa=sorted(i for i, c in draft.cpu_nodes.items() if parse(c) <= cpus),
                missing=dict(found),
            )
        )
    for i, first in enumerate(added):
        for second in added[i + 1 :]:
            draft.links.append(Link(a=first, b=second, kind="inter-socket"))
