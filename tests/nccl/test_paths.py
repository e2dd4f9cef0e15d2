"""The plan against what NCCL 2.28.9's own code computes for real topology files."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gputopo.nccl import tree, xml
from gputopo.nccl.model import Node, system_of
from gputopo.nccl.paths import Path
from gputopo.nccl.plan import Plan
from gputopo.nccl.tree import Fill, Tree, complete
from tests.corpus import CORPUS, needs_corpus

pytestmark = needs_corpus

CASES: dict[str, tuple[str, Fill | None]] = {
    "NONVLINK-azhpc-ndv4": ("azhpc-ndv4-topo", Fill(sm=80, speed_mbps=200_000)),
    "NONVLINK-oci-H100-topology": ("oci-H100-topology", None),
    "aws-p4d": ("aws-p4d-24xl-topo", Fill(sm=80, nvlinks=12, speed_mbps=100_000)),
    "azhpc-ncv4-topo": ("azhpc-ncv4-topo", None),
    "azhpc-ndv4": ("azhpc-ndv4-topo", Fill(sm=80, nvlinks=12, speed_mbps=200_000)),
    "azhpc-ndv5": ("azhpc-ndv5-topo", Fill(sm=90, nvlinks=18, speed_mbps=400_000)),
    "oci-H100-topology": ("oci-H100-topology", None),
    "panlichen-topo": ("panlichen-topo", None),
    "yccl-topo_l20": ("yccl-topo_l20", None),
}
"""The file of each case, and what the machine adds to a partial one."""


def without_nvlinks(machine: Tree) -> Tree:
    def strip(pci: tree.Pci) -> tree.Pci:
        gpu = msgspec.structs.replace(pci.gpu, nvlinks=()) if pci.gpu else None
        return msgspec.structs.replace(pci, gpu=gpu)

    return tree.mapped(machine, on_pci=strip)


def load(case: str) -> tuple[Plan, dict[str, Any]]:
    file, fill = CASES[case]
    machine = xml.read((CORPUS / "nccl-xml" / f"{file}.xml").read_bytes())
    if fill is not None:
        machine = complete(machine, fill)
    if case.startswith("NONVLINK"):
        machine = without_nvlinks(machine)
    expected = json.loads((CORPUS / "nccl-paths" / f"{case}.json").read_text())
    return Plan(system_of(machine)), expected


def shown(path: Path) -> list[Any]:
    return [path.kind.name, pytest.approx(path.gbytes_per_s, abs=0.01), path.hops]


@pytest.mark.parametrize("case", CASES)
def test_graph_is_that_of_nccl(case: str) -> None:
    plan, expected = load(case)
    system = plan.system
    assert [
        {"busid": node.id, "dev": node.gpu.dev, "rank": node.gpu.rank}
        for node in system.gpus
        if node.gpu
    ] == expected["gpus"]
    assert [int(node.id) for node in system.cpus] == expected["cpus"]
    assert [
        {"dev": node.net.dev, "bw": node.net.speed_mbps / 8000} for node in system.nets if node.net
    ] == expected["nets"]
    assert len(system.switches) == expected["pci_nodes_after_flatten"]
    assert len(system.nvswitches) == expected["nvs"]


@pytest.mark.parametrize("case", CASES)
def test_paths_and_choices_are_those_of_nccl(case: str) -> None:
    plan, expected = load(case)
    system = plan.system

    def choices(gpu: Node) -> dict[str, Any]:
        cpu = plan.paths.cpu(gpu)
        assert cpu is not None
        return {
            "gpu": [shown(plan.path(gpu, node)) for node in system.gpus],
            "cpu": [shown(plan.path(gpu, node)) for node in system.cpus],
            "net": [shown(plan.path(gpu, node)) for node in system.nets],
            "local_cpu": system.cpus.index(cpu),
            "local_nets_by_channel": [net.net.dev for net in plan.nets(gpu) if net.net],
            "gdr": [
                [int(plan.gdr(gpu, net, send=False)), int(plan.gdr(gpu, net, send=True))]
                for net in system.nets
            ],
        }

    assert [choices(gpu) for gpu in system.gpus] == expected["paths"]


def test_corpus_is_whole() -> None:
    assert sorted(CASES) == sorted(path.stem for path in (CORPUS / "nccl-paths").glob("*.json"))


@pytest.mark.parametrize("file", sorted((CORPUS / "nccl-xml").glob("*.xml")), ids=lambda p: p.stem)
def test_files_come_back_equal(file: Any) -> None:
    machine = xml.read(file.read_bytes())
    assert xml.read(xml.write(machine)) == machine
