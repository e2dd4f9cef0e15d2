"""The composer: fixtures are what their descriptions give, and agree with real machines."""

from __future__ import annotations

import copy
import gzip
import json
import posixpath
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gputopo.facts import Fact, Missing
from gputopo.host.base import Output
from gputopo.host.recording import NOT_RECORDED, RecordedHost, parse, render
from gputopo.host.tree import Directory, Link
from gputopo.probes import cpu, net, numa, nvidia_smi, nvml, pci, rdma, system
from tests.corpus import CORPUS, needs_corpus

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

from composer import DescriptionError, compose  # noqa: E402

FIXTURES = ROOT / "fixtures"
SOURCES = {
    path.stem: msgspec.toml.decode(path.read_bytes()) for path in sorted(FIXTURES.glob("*.toml"))
}
COMPOSED = [name for name, case in SOURCES.items() if case["origin"] == "composed"]
PROBES = (cpu, net, numa, nvidia_smi, nvml, pci, rdma, system)


def changed(name: str, **changes: dict[str, Any]) -> RecordedHost:
    """A bundled machine with other settings of some devices (``gpu3``, ``mlx5_0``)."""
    description = copy.deepcopy(SOURCES[name])
    description["machine"].setdefault("change", {}).update(changes)
    return RecordedHost(name, compose(description))


def committed(name: str) -> bytes:
    return gzip.decompress((FIXTURES / f"{name}.jsonl.gz").read_bytes())


def matrix(host: RecordedHost) -> nvidia_smi.SmiMatrix:
    found = nvidia_smi.probe(host)
    assert not isinstance(found, Missing)
    return found


def gpus(host: RecordedHost) -> list[nvml.NvmlGpu]:
    found = nvml.probe(host)
    assert not isinstance(found, Missing)
    return found.gpus


def functions(host: RecordedHost) -> dict[str, pci.PciFunction]:
    found = pci.probe(host)
    assert not isinstance(found, Missing)
    return {function.address: function for function in found.functions}


def test_every_machine_is_there() -> None:
    assert len(COMPOSED) >= 13
    for name, case in SOURCES.items():
        assert all(case[key] for key in ("title", "sources")), name
        assert (FIXTURES / f"{name}.jsonl.gz").stat().st_size < 150_000, name


@pytest.mark.parametrize("name", COMPOSED)
def test_committed_fixture_is_what_its_description_gives(name: str) -> None:
    first = render(compose(copy.deepcopy(SOURCES[name])))
    assert first == render(compose(SOURCES[name])), "composing is not deterministic"
    assert first == committed(name), "run scripts/compose"


def test_check_finds_nothing_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/compose", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", COMPOSED)
def test_tree_is_closed(name: str) -> None:
    """Every link leads somewhere, and every directory lists exactly what is below it."""
    files = compose(SOURCES[name]).files
    below: dict[str, set[str]] = {}
    for path in files:
        if path != "/":
            parent, _, base = path.rpartition("/")
            below.setdefault(parent or "/", set()).add(base)
    for path, entry in files.items():
        if isinstance(entry, Directory):
            assert set(entry) == below.get(path, set()), path
        if isinstance(entry, Link):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), entry))
            assert target in files, f"{path} -> {entry}"


class Asking(RecordedHost):
    """Notes the questions that the recording has no answer to, not even "no such thing"."""

    unanswered: list[Any]

    def run(self, argv: Sequence[str], timeout: float) -> Fact[Output]:
        return self._note(argv, super().run(argv, timeout))

    def nvml(self, call: str, *args: Any) -> Fact[Any]:
        return self._note((call, *args), super().nvml(call, *args))

    def read_text(self, path: str) -> Fact[str]:
        return self._note(path, super().read_text(path))

    def list_dir(self, path: str) -> Fact[list[str]]:
        return self._note(path, super().list_dir(path))

    def _note(self, question: Any, answer: Fact[Any]) -> Fact[Any]:
        if answer == NOT_RECORDED:
            self.unanswered.append(question)
        return answer


@pytest.mark.parametrize("name", COMPOSED)
def test_every_question_of_the_probes_is_answered(name: str) -> None:
    host = Asking(name, compose(SOURCES[name]))
    host.unanswered = []
    for probe in PROBES:
        probe.probe(host)
    assert [q for q in host.unanswered if not told_absent(host, q)] == []


def told_absent(host: RecordedHost, question: Any) -> bool:
    """Whether the nearest directory that is listed says that the path leads nowhere."""
    path = question if isinstance(question, str) else ""
    while path:
        path, _, base = path.rpartition("/")
        names = RecordedHost.list_dir(host, path or "/")
        if isinstance(names, list):
            return base not in names
    return False


CORPUS_SHAPES = {
    "a01_dgx_a100_12mlx5_old.txt": "dgx-a100",
    "a02_dgx1_v100_4mlx5_2018.txt": "dgx-1-v100",
    "r02_dgx2_16gpu_10mlx5_truncated.txt": "dgx-2",
    "a20_hgx_h100_12nic_truncated.txt": "hgx-b200",
    "a27_gh200_4nic.txt": "gh200",
}
"""Real ``nvidia-smi topo -m`` outputs and the machine that has that shape."""


@needs_corpus
@pytest.mark.parametrize("file", CORPUS_SHAPES)
def test_topology_text_agrees_with_the_real_machine(file: str) -> None:
    real = json.loads((CORPUS / "topo" / "expected.json").read_text())[file]
    ours = matrix(parse(committed(CORPUS_SHAPES[file]), file))
    rows = [ours.rows[f"GPU{index}"] for index in range(real["rows_present"])]
    for pair, word in real["gpu_links"].items():
        a, b = pair.split("-")
        assert rows[int(a)][f"GPU{b}"] == word, pair
    nics = [device for device in ours.devices if not device.startswith("GPU")]
    assert len(nics) == real["nics"]
    for index, row in enumerate(real["gpu_nic"]):
        for name, word in row.items():
            nic = name if name in nics else nics[int(name.removeprefix("NIC"))]
            assert rows[index][nic] == word, (index, name)
    for index in range(real["rows_present"]):
        label = f"GPU{index}"
        assert ours.cpu_affinity[label] == real["cpu_affinity"][index]
        if real["numa"]:
            assert ours.numa_affinity[label] == real["numa"][index]
        if real["gpu_numa_id"]:
            assert ours.gpu_numa_id[label] == real["gpu_numa_id"][index]


@needs_corpus
def test_pcie_classes_agree_with_the_real_nps4_node() -> None:
    """a15 is ``topo -mp``: PCIe classes only, so GPU pairs are compared with NVML's ancestor."""
    text = (CORPUS / "topo" / "a15_booster_mp_hash_mixed_tabs.txt").read_text()
    host = parse(committed("a100-nps4"), "a100-nps4")
    ours = matrix(host)
    answers = nvml.probe(host)
    assert not isinstance(answers, Missing)
    ancestor = {(pair.a, pair.b): pair.ancestor for pair in answers.pairs}
    seen = 0
    for line in text.splitlines():
        label, *cells = line.lstrip("# ").split() or [""]
        if label.startswith(("GPU", "mlx5_")) and "X" in cells:
            seen += 1
            for column, word in enumerate(cells[:8]):
                name = f"GPU{column}" if column < 4 else f"mlx5_{column - 4}"
                if label.startswith("GPU") and column < 4 and word != "X":
                    assert ancestor[int(label[3:]), column] == word
                else:
                    assert ours.rows[label][name] == word, (label, name)
            if label.startswith("GPU"):
                assert [ours.cpu_affinity[label], ours.numa_affinity[label]] == cells[8:10]
    assert seen == 8


@needs_corpus
@pytest.mark.parametrize(
    ("file", "name"),
    [("b05_gh200_9_nodes_wrapped.txt", "gh200"), ("b07_gb200_34_nodes_elided.txt", "gb200-tray")],
)
def test_numactl_agrees_with_the_real_machine(file: str, name: str) -> None:
    """Every node size and distance row that the real output has; the rest of it is elided."""
    output = parse(committed(name), name).run(["numactl", "--hardware"], 1.0)
    assert isinstance(output, Output)
    ours = {" ".join(line.split()) for line in output.stdout.splitlines()}
    for line in (CORPUS / "topo" / file).read_text().splitlines():
        if line.startswith("available") or " size: " in line or line[:4].strip().endswith(":"):
            assert " ".join(line.split()) in ours


@pytest.mark.skipif(not shutil.which("lstopo-no-graphics"), reason="no hwloc here")
@pytest.mark.parametrize("name", ["hgx-h100", "dgx-a100", "gb200-tray", "no-gpu"])
def test_hwloc_reads_the_tree(name: str, tmp_path: Path) -> None:
    """A second opinion on the tree: hwloc finds the same packages, nodes and RDMA devices."""
    answers = compose(SOURCES[name])
    for path, entry in answers.files.items():
        place = tmp_path / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, Directory):
            place.mkdir(exist_ok=True)
        elif isinstance(entry, Link):
            place.symlink_to(str(entry))
        elif not isinstance(entry, Missing):
            place.write_bytes(entry if isinstance(entry, bytes) else entry.encode())
    done = subprocess.run(
        ["lstopo-no-graphics", "--whole-io", "--of", "xml"],
        env={"HWLOC_FSROOT": str(tmp_path), "HWLOC_COMPONENTS": "linux,stop"},
        capture_output=True,
        check=True,
    )
    # Our own file, read by a program of this machine: nothing hostile in it.
    root = ElementTree.fromstring(done.stdout)
    objects = list(root.iter("object"))
    host = RecordedHost(name, answers)
    machine = SOURCES[name]["machine"]
    assert sum(o.get("type") == "Package" for o in objects) == machine["cpu"]["packages"]
    nodes = numa.probe(host)
    assert not isinstance(nodes, Missing)
    assert sum(o.get("type") == "NUMANode" for o in objects) == len(nodes.nodes)
    above = {child: parent for parent in objects for child in parent.findall("object")}
    devices = rdma.probe(host)
    assert not isinstance(devices, Missing)
    seen = {
        o.get("name"): above[o].get("pci_busid")
        for o in objects
        if o.get("type") == "OSDev" and (o.get("name") or "").startswith("mlx5")
    }
    assert seen == {device.name: device.pci for device in devices.devices}


def test_a_degraded_link_shows_at_both_ends_and_in_nvml() -> None:
    host = changed("hgx-h100", gpu0={"width": 8, "speed": 16.0})
    port, gpu = functions(host)["0000:17:01.0"], functions(host)["0000:19:00.0"]
    for end in (port, gpu):
        assert end.link is not None
        assert (end.link.width, end.link.speed) == (8, 16.0)
        assert (end.link.max_width, end.link.max_speed) == (16, 32.0)
    assert (gpus(host)[0].pcie_width, gpus(host)[0].pcie_generation) == (8, 4)
    assert gpus(host)[1].pcie_width == 16


def test_a_gpu_that_is_gone_leaves_its_port_and_its_peers_links() -> None:
    host = changed("dgx-1-v100", gpu3={"absent": True})
    assert "0000:0b:00.0" not in functions(host)
    assert host.read_text("/sys/bus/pci/devices/0000:09:10.0/current_link_width") == "0"
    seven = gpus(host)[-1]
    assert (len(gpus(host)), seven.pci) == (7, "0000:8a:00.0")
    assert [link.active for link in seven.nvlinks].count(False) == 1
    assert len(matrix(host).rows) == 7 + 4


def test_dead_nvlinks_lower_the_count() -> None:
    host = changed("hgx-h100", gpu2={"links_down": [0, 5]})
    assert matrix(host).rows["GPU2"]["GPU7"] == "NV16"
    assert matrix(host).rows["GPU1"]["GPU7"] == "NV18"
    states = [link.active for link in gpus(host)[2].nvlinks]
    assert [index for index, active in enumerate(states) if not active] == [0, 5]


def test_a_port_that_is_down() -> None:
    host = changed("dgx-a100", mlx5_3={"state": "DOWN"})
    found = rdma.probe(host)
    assert not isinstance(found, Missing)
    device = next(d for d in found.devices if d.name == "mlx5_3")
    port = device.ports[0]
    assert (port.state, port.physical_state, port.rate_gbps) == ("DOWN", "Polling", 10.0)


def test_a_lost_gpu_answers_with_its_error_and_stops_nvidia_smi() -> None:
    host = changed("hgx-h100", gpu4={"error": "GPU_IS_LOST"})
    found = nvml.probe(host)
    assert not isinstance(found, Missing)
    assert list(found.lost) == [4]
    assert isinstance(nvidia_smi.probe(host), Missing)


def test_acs_bits_are_set_where_the_description_says() -> None:
    description = copy.deepcopy(SOURCES["hgx-h100"])
    description["machine"]["change"] = {"0000:17:01.0": {"acs": "1d"}}
    found = functions(RecordedHost("x", compose(description)))
    assert found["0000:17:01.0"].acs_control == 0x1D
    assert found["0000:17:02.0"].acs_control == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu9": {"width": 8}}, "no such device"),
        ({"gpu0": {"colour": "red"}}, "colour"),
    ],
)
def test_a_wrong_description_is_told(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DescriptionError, match=message):
        changed("hgx-h100", **change)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  01.0 gpu h100-sxm5-80gb bus=01", "bus 01 is taken"),
        ("  01.0 gpu gtx-9000", "no part 'gtx-9000'"),
        ("  01.0 hca t4", "t4 is a gpu"),
        ("  1 gpu t4", "no device number"),
    ],
)
def test_a_wrong_tree_is_told(line: str, message: str) -> None:
    description = copy.deepcopy(SOURCES["no-gpu"])
    description["machine"]["gateway"] = ""
    description["machine"]["tree"] = f"host 0000:10 genoa node=0\n{line}\n"
    with pytest.raises(DescriptionError, match=message):
        compose(description)
