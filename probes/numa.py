"""NUMA nodes: CPUs, memory, distances and huge pages, from sysfs; numactl as a second opinion."""

from __future__ import annotations

import re

import msgspec

from gputopo.cpulist import render
from gputopo.facts import ABSENT, Fact, Missing, Problem
from gputopo.host.base import Host
from gputopo.probes import lscpu
from gputopo.probes.numactl import CUT, NumactlNode, parse
from gputopo.probes.read import cpus, integer

NODES = "/sys/devices/system/node"
NUMACTL = ["numactl", "--hardware"]
NUMACTL_TIMEOUT = 5.0


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node. ``cpus`` is empty where it is memory alone: a GPU's, CXL, Optane."""

    index: int
    cpus: Fact[str]
    memory_bytes: Fact[int]
    distances: Fact[dict[int, int]]
    hugepages: dict[str, int]
    """Pages reserved, by page size as the kernel names it (``2048kB``); only sizes in use."""


class NumaFacts(msgspec.Struct, frozen=True, kw_only=True):
    nodes: list[NumaNode]
    numactl: Fact[dict[int, NumactlNode]]
    problems: list[Problem]


def probe(host: Host) -> Fact[NumaFacts]:
    """The nodes in index order; Missing on a kernel without NUMA."""
    names = host.list_dir(NODES)
    if isinstance(names, Missing):
        return names
    indices = sorted(int(n[4:]) for n in names if n.startswith("node") and n[4:].isdigit())
    nodes = [_node(host, index, indices) for index in indices]
    problems = [
        Problem(f"{NODES}/node{node.index}/{name}", fact)
        for node in nodes
        for name, fact in (("cpulist", node.cpus), ("meminfo", node.memory_bytes))
        if isinstance(fact, Missing)
    ]
    return NumaFacts(nodes=nodes, numactl=_numactl(host), problems=problems)


def _node(host: Host, index: int, indices: list[int]) -> NumaNode:
    place = f"{NODES}/node{index}"
    return NumaNode(
        index=index,
        cpus=cpus(host, f"{place}/cpulist", f"{place}/cpumap"),
        memory_bytes=_memory(host.read_text(f"{place}/meminfo")),
        distances=_distances(host.read_text(f"{place}/distance"), indices),
        hugepages=_hugepages(host, place),
    )


def _memory(text: Fact[str]) -> Fact[int]:
    """MemTotal in bytes; the kernel counts in KiB."""
    if isinstance(text, Missing):
        return text
    match = re.search(r"MemTotal:\s*(\d{1,16}) kB", text)
    return int(match[1]) * 1024 if match else Missing("unparsed", "no MemTotal line")


def _distances(text: Fact[str], indices: list[int]) -> Fact[dict[int, int]]:
    """The row of ACPI SLIT distances; its columns are the online nodes in index order."""
    if isinstance(text, Missing):
        return text
    values = text.split()
    if len(values) != len(indices) or not all(v.isdigit() and len(v) < 6 for v in values):
        return Missing("unparsed", f"{len(values)} distances for {len(indices)} nodes")
    return dict(zip(indices, map(int, values)))


def _hugepages(host: Host, place: str) -> dict[str, int]:
    sizes = host.list_dir(f"{place}/hugepages")
    found: dict[str, int] = {}
    for name in sizes if isinstance(sizes, list) else []:
        count = integer(host.read_text(f"{place}/hugepages/{name}/nr_hugepages"))
        if isinstance(count, int) and count:
            found[name.removeprefix("hugepages-")] = count
    return found


def _numactl(host: Host) -> Fact[dict[int, NumactlNode]]:
    """What ``numactl --hardware`` says, to be compared; it reads the same kernel by another way."""
    output = host.run(NUMACTL, NUMACTL_TIMEOUT)
    if isinstance(output, Missing):
        return output
    if output.exit != 0:
        said = (output.stdout + output.stderr).strip().splitlines()
        return Missing("failed", f"exit code {output.exit}: {said[0][:120] if said else ''}")
    return parse(output.stdout)


def printed(host: Host) -> Fact[NumaFacts]:
    """The nodes as ``numactl --hardware`` or else ``lscpu`` has them, where there is no sysfs."""
    told = _numactl(host)
    if isinstance(told, Missing):
        return _lscpu(host) or told
    nodes = [
        NumaNode(
            index=index,
            cpus=node.cpus,
            memory_bytes=(
                node.memory_mib if isinstance(node.memory_mib, Missing) else node.memory_mib << 20
            ),
            distances=node.distances,
            hugepages={},
        )
        for index, node in told.items()
    ]
    problems: list[Problem] = []
    cut = [node.index for node in nodes if CUT in (node.cpus, node.memory_bytes)]
    if cut:
        what = f"node{'s' * (len(cut) > 1)} {render(cut)}: cut off or left out"
        problems.append(Problem(" ".join(NUMACTL), Missing("unparsed", what)))
    return NumaFacts(nodes=nodes, numactl=ABSENT, problems=problems)


def _lscpu(host: Host) -> NumaFacts | None:
    output = host.run(lscpu.COMMAND, lscpu.TIMEOUT)
    told = {} if isinstance(output, Missing) else lscpu.nodes(output.stdout)
    if not told:
        return None
    nodes = [
        NumaNode(
            index=index,
            cpus=cpus,
            memory_bytes=lscpu.NOT_SHOWN,
            distances=lscpu.NOT_SHOWN,
            hugepages={},
        )
        for index, cpus in sorted(told.items())
    ]
    return NumaFacts(nodes=nodes, numactl=ABSENT, problems=[])
