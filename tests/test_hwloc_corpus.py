"""Recorded machines of hwloc's own test suite: what gputopo says against what lstopo 2.9.0 says.

CPU-less nodes are compared without their CPUs throughout: lstopo gives them their neighbours' CPUs,
gputopo leaves them empty, since no process can be bound there.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gputopo import scan
from gputopo.cpulist import render
from gputopo.facts import known
from gputopo.topology.graph import Topology
from gputopo.topology.model import Package
from tests.corpus import CORPUS, needs_corpus

pytestmark = needs_corpus

NAMES = sorted(path.name.removesuffix(".tar.bz2") for path in (CORPUS / "hwloc").glob("*.tar.bz2"))

KNOWN: dict[str, dict[str, str]] = {
    "2ps3-2t": {
        "memory": "the archive has no meminfo: unknown here, 0 bytes in lstopo",
    },
    "40intel64-2g2n4c+pcilocality": {
        "0000:43:00.0": "numa_node says 2 and local_cpulist says all: lstopo reads the latter only",
    },
    "40intel64-4n10c+pci-conflicts": {
        "packages": "lstopo drops one package over its own PCI group (its stderr says so)",
        "l3": "as packages",
    },
    "8em64t-2s2ca2c-buggynuma": {
        "numa": "the kernel gives all 8 nodes all CPUs: lstopo keeps one, gputopo what was said",
    },
    "8ia64-2n2s2c": {"l3": "shared_cpu_map is all zero: lstopo takes the core, gputopo nothing"},
    "8ia64-2s2c2t": {"l3": "as 8ia64-2n2s2c"},
    "fakeheterocpunuma": {
        "numa": "made-up nodes 3, 4 and 5 overlap: lstopo drops two, gputopo keeps what was said",
    },
}
"""Each known difference by machine and subject, with its reason. A difference that is not here, and
one here that is gone, fail the test."""


def differences(topology: Topology, expected: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs, by subject: (ours, lstopo's)."""
    cpu = known(topology.facts.cpu)
    pci = known(topology.facts.pci)
    assert cpu is not None
    packages = list(topology.of(Package))
    nodes = {node.index: node for node in topology.numa_nodes}
    theirs = {node["os_index"]: node for node in expected["numa"]}
    with_cpus = {i for i, node in nodes.items() if node.role == "cpu"}
    pairs: dict[str, tuple[Any, Any]] = {
        "pus": (topology.host.pus, expected["pus"]),
        "packages": (
            sorted(p.cpus for p in packages),
            sorted(p["cpus"] for p in expected["package_list"]),
        ),
        "cores": (sorted(cpu.cores), sorted(c["cpus"] for c in expected["core_list"])),
        "l3": (
            sorted(group for p in packages for group in p.l3_groups),
            sorted(c["cpus"] for c in expected["llc"] if c["level"] == 3),
        ),
        "numa": (
            {i: node.cpus if i in with_cpus else "" for i, node in nodes.items()},
            {i: node["cpus"] if i in with_cpus else "" for i, node in theirs.items()},
        ),
        "memory": (
            {i: node.memory_bytes for i, node in nodes.items() if i in theirs},
            {i: node["memory_bytes"] for i, node in theirs.items()},
        ),
        "rdma": (
            sorted(hca.id for hca in topology.hcas),
            sorted(o["name"] for o in expected["osdev"] if o["kind"] == "openfabrics"),
        ),
    }
    order = expected["distances_nodes"]
    if expected["distances"]:
        pairs["distances"] = (
            [[nodes[i].distances.get(str(j)) for j in order] for i in order],
            expected["distances"],
        )
    functions = {f.address: f for f in (pci.functions if pci else [])}
    listed = {entry["address"]: entry for entry in expected["pci"]}
    pairs["pci"] = (sorted(functions), sorted(listed))
    for address in functions.keys() & listed.keys():
        function, entry = functions[address], listed[address]
        node = topology.by_pci[address]
        bridges = [b for b in entry["parent_bridge_path"] if not b.startswith("host:")]
        pairs[address] = (
            (
                getattr(node, "numa", None),
                f"0x{function.base_class:04x}",
                f"0x{function.vendor or 0:04x}",
                f"0x{function.device or 0:04x}",
                # Bridges that sysfs names on the path but does not list are in neither tree.
                [bridge for bridge in function.parents if bridge in functions],
            ),
            (entry["numa"], entry["class"], entry["vendor"], entry["device"], bridges),
        )
    return {subject: pair for subject, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_lstopo(name: str) -> None:
    topology = scan(str(CORPUS / "hwloc" / f"{name}.tar.bz2"))
    expected = json.loads((CORPUS / "hwloc-expected" / f"{name}.json").read_text())
    found = differences(topology, expected)
    assert {k: v for k, v in found.items() if k not in KNOWN.get(name, {})} == {}
    assert set(KNOWN.get(name, {})) == set(found), "a known difference is gone: strike it"


def test_corpus_is_whole() -> None:
    assert len(NAMES) == 28


def test_gpu_memory_nodes_have_no_cpus() -> None:
    topology = scan(str(CORPUS / "hwloc" / "nvidiagpunumanodes.tar.bz2"))
    assert [node.index for node in topology.cpu_nodes] == [0, 8]
    for node in topology.numa_nodes:
        if node.index >= 250:
            assert (node.role, node.cpus) == ("memory", "")


def test_offline_cpus_are_not_offered() -> None:
    topology = scan(str(CORPUS / "hwloc" / "16em64t-4s2c2t-offlines.tar.bz2"))
    assert topology.cpu_nodes[0].cpus == render([0, 1, 3, 4, *range(6, 13), 15])
