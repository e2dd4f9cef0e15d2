"""Path classes from the PCI tree against what ``nvidia-smi topo -m`` prints for the machine."""

from __future__ import annotations

import json

import pytest

from gputopo import scan
from gputopo.facts import Missing, known
from gputopo.host.source import list_fixtures
from gputopo.topology.graph import Topology
from tests.corpus import CORPUS, needs_corpus

FIXTURES = [fixture.name for fixture in list_fixtures()]
COMPOSED = [fixture.name for fixture in list_fixtures() if fixture.origin == "composed"]

SHAPES = {
    "dgx-a100": "a01_dgx_a100_12mlx5_old.txt",
    "dgx-1-v100": "a02_dgx1_v100_4mlx5_2018.txt",
    "dgx-2": "r02_dgx2_16gpu_10mlx5_truncated.txt",
    "gh200": "a27_gh200_4nic.txt",
}
"""Composed machines whose real sibling's matrix is in the corpus."""


def classes(topology: Topology) -> dict[tuple[str, str], str]:
    matrix = topology.matrix
    return {
        (a, b): matrix.classes[i][j]
        for i, a in enumerate(matrix.labels)
        for j, b in enumerate(matrix.labels)
    }


@pytest.mark.parametrize("name", COMPOSED)
def test_equals_the_recorded_topo_m(name: str) -> None:
    topology = scan(f"fixture:{name}")
    smi = topology.facts.nvidia_smi
    if not topology.gpus:
        pytest.skip(f"{name} has no GPU, hence no nvidia-smi")
    assert not isinstance(smi, Missing), smi
    printed = {
        (row, column): cell for row, cells in smi.rows.items() for column, cell in cells.items()
    }
    assert classes(topology) == printed
    assert topology.disagreements == []


@needs_corpus
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_real_machine_of_that_shape(name: str) -> None:
    expected = json.loads((CORPUS / "topo" / "expected.json").read_text())[SHAPES[name]]
    topology = scan(f"fixture:{name}")
    ours = classes(topology)
    assert len(topology.gpus) == expected["gpus"]
    for pair, cell in expected["gpu_links"].items():
        a, b = pair.split("-")
        assert (pair, ours[f"GPU{a}", f"GPU{b}"]) == (pair, cell)
    names = expected["nic_names"]
    for gpu, cells in enumerate(expected["gpu_nic"]):
        for nic, cell in cells.items():
            name_ = names.get(nic.removeprefix("NIC"), nic) if nic.startswith("NIC") else nic
            assert (gpu, nic, ours[f"GPU{gpu}", name_]) == (gpu, nic, cell)
    for gpu, cpus in enumerate(expected["cpu_affinity"]):
        assert topology.gpus[gpu].cpus == cpus
    for gpu, numa in enumerate(expected["numa"]):
        assert str(topology.gpus[gpu].numa) == numa


@pytest.mark.parametrize("name", FIXTURES)
def test_matrix_is_symmetric_and_total(name: str) -> None:
    topology = scan(f"fixture:{name}")
    ours = classes(topology)
    assert all(ours[a, b] == ours[b, a] for a, b in ours)
    assert all((cell == "X") == (a == b) for (a, b), cell in ours.items())


@pytest.mark.parametrize("name", FIXTURES)
def test_a_path_says_what_it_crosses(name: str) -> None:
    topology = scan(f"fixture:{name}")
    for a in topology.gpus:
        for b in topology.physical_hcas:
            path = topology.path(a.id, b.id)
            assert all(node in topology.nodes for node in path.via)
            if path.path_class == "PIX" and path.narrowest:
                link = topology.pcie(path.narrowest)
                assert link is not None and path.gbytes_per_s is not None
    assert known(topology.facts.pci) is not None
