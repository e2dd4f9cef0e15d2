from __future__ import annotations

import pytest

from gputopo import scan
from gputopo.cpulist import parse
from gputopo.facts import Missing
from gputopo.host.base import Output
from gputopo.host.tree import Entry
from gputopo.probes.nvidia_smi import COMMAND
from gputopo.rules import check
from gputopo.topology.graph import Topology
from tests.corpus import CORPUS, needs_corpus
from tests.rules.machines import FIXTURES, file, found, guest, only, read, skipped
from tests.rules.twin import codes, recorded, twin

Files = dict[str, Entry | None]

GPU = "0000:db:00.0"
"""gpu7 of hgx-h100, on node 1."""

NODES = "/sys/devices/system/node"
JOB = "0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n"


@pytest.mark.parametrize("fixture", FIXTURES)
def test_healthy_machines_have_no_numa_finding_above_a_note(fixture: str) -> None:
    report = check(scan(f"fixture:{fixture}"), only=["NUM"])
    assert [f.summary for f in report.findings if f.severity != "note"] == []
    assert {f.code for f in report.findings} <= {"NUM207"}


class TestUnknownNode:
    def test_another_source_knows(self) -> None:
        finding = only(twin("hgx-h100", files={file(GPU, "numa_node"): "-1\n"}), "NUM201")
        assert (finding.severity, finding.subjects) == ("note", ["gpu7"])
        assert "other sources say 1" in finding.summary
        assert finding.evidence[0].seen.startswith("-1; node 1 by ")

    def silent(self, fixture: str) -> Files:
        """No word of a node for any device of a machine."""
        files: Files = {}
        names = recorded(fixture).list_dir("/sys/bus/pci/devices")
        assert isinstance(names, list)
        cpus = read(fixture, "/sys/devices/system/cpu/online")
        for name in names:
            files[file(name, "numa_node")] = "-1\n"
            files[file(name, "local_cpulist")] = f"{cpus}\n"
        return files

    def test_no_source_knows(self) -> None:
        topology = twin(
            "hgx-h100",
            files=self.silent("hgx-h100"),
            nvml={("nvmlDeviceGetMemoryAffinity", n, 0): [0, 1] for n in range(8)},
        )
        finding = only(topology, "NUM201")
        assert finding.severity == "warning"
        assert len(finding.subjects) == 8 + 12
        assert "no source places gpu0-7" in finding.summary

    def test_a_single_node_is_right_to_say_nothing(self) -> None:
        topology = twin("rtx4090-workstation", files=self.silent("rtx4090-workstation"))
        assert found(topology, "NUM201") == []

    def test_virtual_machines_say_nothing(self) -> None:
        files = self.silent("hgx-h100") | guest("hgx-h100")
        assert found(twin("hgx-h100", files=files), "NUM201") == []
        assert found(scan("fixture:t4-vm"), "NUM201") == []

    def test_a_node_that_cannot_be_read(self) -> None:
        names = ("numa_node", "local_cpulist", "local_cpus")
        files: Files = {file(GPU, name): Missing("denied", "") for name in names}
        for bridge in scan("fixture:hgx-h100").bridges_above("gpu7"):
            files |= {file(bridge.pci, name): None for name in names}
        topology = twin(
            "hgx-h100",
            files=files,
            nvml={("nvmlDeviceGetMemoryAffinity", 7, 0): [0, 1]},
        )
        assert found(topology, "NUM201") == []
        assert skipped(topology, "NUM201").startswith("gpu7: its NUMA node cannot be read")


class TestSources:
    def test_the_driver_says_otherwise(self) -> None:
        topology = twin("hgx-h100", nvml={("nvmlDeviceGetMemoryAffinity", 7, 0): [0]})
        finding = only(topology, "NUM202")
        assert (finding.severity, finding.subjects) == ("warning", ["gpu7"])
        assert finding.evidence[0].seen == "node 0"
        assert "PRB003" not in codes(topology), "one finding for one conflict"

    def test_many_devices_are_one_finding(self) -> None:
        nvml = {("nvmlDeviceGetMemoryAffinity", n, 0): [0 if n > 3 else 1] for n in range(8)}
        finding = only(twin("hgx-h100", nvml=nvml), "NUM202")
        assert finding.subjects == [f"gpu{n}" for n in range(8)]
        assert "(and 7 more)" not in finding.summary or len(finding.evidence) == 8

    def test_sysfs_says_otherwise_than_itself(self) -> None:
        files: Files = {file(GPU, "local_cpulist"): "0-55,112-167\n"}
        assert only(twin("hgx-h100", files=files), "NUM202").subjects == ["gpu7"]

    def smi(self, cell: str) -> Topology:
        """``topo -m`` of hgx-h100 with another NUMA Affinity in the row of GPU7."""
        output = recorded("hgx-h100").run(COMMAND, 1.0)
        assert isinstance(output, Output)
        lines = output.stdout.split("\n")
        row = next(i for i, line in enumerate(lines) if line.startswith("GPU7"))
        cells = lines[row].split("\t")
        place = next(i for i, c in enumerate(cells) if c.strip() == "56-111,168-223") + 1
        cells[place] = cell
        lines[row] = "\t".join(cells)
        changed = Output(0, "\n".join(lines), "")
        return twin("hgx-h100", commands={tuple(COMMAND): changed})

    def test_nvidia_smi_says_otherwise(self) -> None:
        finding = only(self.smi("0"), "NUM202")
        assert finding.subjects == ["gpu7"]
        assert "NUMA Affinity" in finding.evidence[0].source

    @pytest.mark.parametrize("cell", ["N/A", "0-1", "1", "", "0,1-17", "x"])
    def test_what_nvidia_smi_may_say(self, cell: str) -> None:
        assert found(self.smi(cell), "NUM202") == []

    def test_masks_cut_to_a_cpuset_are_no_conflict(self) -> None:
        nvml = {("nvmlDeviceGetMemoryAffinity", n, 0): [] for n in range(8)}
        assert found(twin("hgx-h100", nvml=nvml), "NUM202") == []


class TestAllowedCpus:
    def allow(
        self, fixture: str, cpus: str, nodes: str = "", cgroup: str | None = JOB, **more: Entry
    ) -> Topology:
        status = read(fixture, "/proc/self/status")
        kept = [line for line in status.splitlines() if not line.startswith("Cpus_allowed_list")]
        if nodes:
            kept = [line for line in kept if not line.startswith("Mems_allowed_list")]
            kept.append(f"Mems_allowed_list:\t{nodes}")
        text = "\n".join([*kept, f"Cpus_allowed_list:\t{cpus}", ""])
        files: Files = {"/proc/self/status": text, **more}
        if cgroup is not None:
            files["/proc/self/cgroup"] = cgroup
        return twin(fixture, files=files)

    def test_a_job_on_the_other_socket(self) -> None:
        topology = self.allow("hgx-h100", "0-55")
        finding = only(topology, "NUM203")
        assert (finding.severity, finding.subjects) == ("error", ["gpu4", "gpu5", "gpu6", "gpu7"])
        assert "56-111,168-223" in finding.summary

    def test_a_shell_may_be_bound(self) -> None:
        assert only(self.allow("hgx-h100", "0-55", cgroup=None), "NUM203").severity == "note"

    def test_a_container_counts_as_a_job(self) -> None:
        topology = self.allow("hgx-h100", "0-55", cgroup="0::/\n")
        assert only(topology, "NUM203").severity == "error"

    def test_another_node_of_the_same_socket(self) -> None:
        """gpu0 and gpu1 of DGX A100 are on node 3; allowed is node 0, of the same package."""
        verdicts = found(self.allow("dgx-a100", "0-15"), "NUM203")
        assert {(f.severity, tuple(f.subjects)) for f in verdicts} == {
            ("warning", ("gpu0", "gpu1", "gpu2", "gpu3")),
            ("error", ("gpu4", "gpu5", "gpu6", "gpu7")),
        }

    @pytest.mark.parametrize("cpus", ["0-223", "0,56", "55-56"])
    def test_a_few_cpus_beside_each_are_enough(self, cpus: str) -> None:
        assert found(self.allow("hgx-h100", cpus), "NUM203") == []

    def test_memory_of_the_node(self) -> None:
        finding = only(self.allow("hgx-h100", "0-223", nodes="0"), "NUM203")
        assert (finding.severity, finding.subjects) == ("warning", ["gpu4", "gpu5", "gpu6", "gpu7"])
        assert "Mems_allowed_list" in finding.evidence[0].source

    def test_without_nvml_nobody_knows_which_gpus_are_given(self) -> None:
        status = read("hgx-h100", "/proc/self/status").replace("0-223", "0-55")
        topology = twin(
            "hgx-h100",
            files={"/proc/self/status": status, "/proc/self/cgroup": JOB},
            nvml={("nvmlInit",): Missing("absent", "NVML LIBRARY_NOT_FOUND")},
        )
        assert found(topology, "NUM203") == []
        assert "which GPUs this process may use" in skipped(topology, "NUM203")

    def test_no_list_no_verdict(self) -> None:
        topology = twin("hgx-h100", files={"/proc/self/status": None})
        assert "may use: absent" in skipped(topology, "NUM203")


class TestBalancing:
    FILE = "/proc/sys/kernel/numa_balancing"

    @pytest.mark.parametrize(
        ("fixture", "mode", "told"),
        [
            ("hgx-h100", "1", True),
            ("hgx-h100", "2", False),
            ("hgx-h100", "3", True),
            ("hgx-h100", "0", False),
            ("gh200", "1", True),
            ("gh200", "2", False),
            ("gb200-tray", "3", True),
            ("rtx4090-workstation", "1", False),
            ("no-gpu", "1", False),
        ],
    )
    def test_modes(self, fixture: str, mode: str, told: bool) -> None:
        topology = twin(fixture, files={self.FILE: f"{mode}\n"})
        assert bool(found(topology, "NUM204")) is told
        if told:
            finding = only(topology, "NUM204")
            assert (finding.severity, finding.subjects) == ("warning", ["machine"])
            assert f"numa_balancing={mode}" in finding.remedy.undo

    def test_unread_is_not_fine(self) -> None:
        topology = twin("hgx-h100", files={self.FILE: Missing("denied", "")})
        assert "denied" in skipped(topology, "NUM204")
        assert skipped(twin("hgx-h100", files={self.FILE: None}), "NUM204") == ""


class TestFirmware:
    def distances(self, fixture: str, near: int, far: int) -> Files:
        nodes = len(scan(f"fixture:{fixture}").cpu_nodes)
        files: Files = {}
        for a in range(nodes):
            row = [10 if a == b else near if a * 2 // nodes == b * 2 // nodes else far
                   for b in range(nodes)]  # fmt: skip
            files[f"{NODES}/node{a}/distance"] = " ".join(map(str, row)) + "\n"
        return files

    @pytest.mark.parametrize(
        ("fixture", "near", "far", "told"),
        [
            ("hgx-h100", 10, 10, True),
            ("hgx-h100", 20, 20, False),  # two nodes, and firmware without a SLIT
            ("dgx-a100", 10, 10, True),
            ("dgx-a100", 20, 20, True),
            ("dgx-a100", 11, 32, False),
            ("a100-nps4", 12, 12, True),
        ],
    )
    def test_distances(self, fixture: str, near: int, far: int, told: bool) -> None:
        topology = twin(fixture, files=self.distances(fixture, near, far))
        assert bool(found(topology, "NUM205")) is told
        if told:
            finding = only(topology, "NUM205")
            assert (finding.severity, finding.subjects) == ("warning", ["machine"])

    def test_a_node_with_parts_of_two_packages(self) -> None:
        """First threads on one node, second threads on the other: a guest defined by hand."""
        files: Files = {
            f"{NODES}/node0/cpulist": "0-111\n",
            f"{NODES}/node1/cpulist": "112-223\n",
        }
        finding = only(twin("hgx-h100", files=files), "NUM205")
        assert finding.severity == "warning"
        assert finding.subjects == ["machine", "numa0", "numa1"]
        assert "nodes with parts of several packages" in finding.summary
        assert "112 cores with threads on two NUMA nodes" in finding.summary
        inside = only(twin("hgx-h100", files=files | guest("hgx-h100")), "NUM205")
        assert inside.severity == "note"
        assert inside.remedy.needs == "the host's operator"

    def test_nodes_that_share_cpus(self) -> None:
        files: Files = {f"{NODES}/node1/cpulist": "0-55,112-167\n"}
        finding = only(twin("hgx-h100", files=files), "NUM205")
        assert "share CPUs" in finding.summary
        assert finding.subjects[:3] == ["machine", "numa0", "numa1"]

    def test_memory_interleaved_between_the_packages(self) -> None:
        files: Files = {
            f"{NODES}/node1": None,
            f"{NODES}/node0/cpulist": "0-223\n",
            f"{NODES}/node0/distance": "10\n",
        }
        finding = only(twin("hgx-h100", files=files), "NUM205")
        assert "one NUMA node for several packages" in finding.summary
        assert found(twin("hgx-h100", files=files | guest("hgx-h100")), "NUM205") == []

    @pytest.mark.parametrize("fixture", ["dgx-a100", "a100-nps4", "gb200-tray", "gh200"])
    def test_several_nodes_in_a_package_are_fine(self, fixture: str) -> None:
        assert found(scan(f"fixture:{fixture}"), "NUM205") == []


class TestMemory:
    def meminfo(self, fixture: str, node: int, kib: int) -> Files:
        text = f"Node {node} MemTotal:       {kib} kB\nNode {node} MemFree:        0 kB\n"
        return {f"{NODES}/node{node}/meminfo": text}

    def test_a_node_with_less(self) -> None:
        finding = only(twin("hgx-h100", files=self.meminfo("hgx-h100", 1, 512 << 20)), "NUM206")
        assert (finding.severity, finding.subjects) == ("warning", ["numa1"])
        assert "512.0 GiB" in finding.summary
        assert "gpu4-7 beside" in finding.summary

    def test_a_node_with_none(self) -> None:
        finding = only(twin("dgx-a100", files=self.meminfo("dgx-a100", 2, 0)), "NUM206")
        assert finding.subjects == ["numa2"]
        assert "CPUs and no memory" in finding.summary

    def test_what_firmware_keeps_back_is_no_difference(self) -> None:
        files = self.meminfo("hgx-h100", 0, 1000 << 20)
        assert found(twin("hgx-h100", files=files), "NUM206") == []

    @pytest.mark.parametrize("fixture", ["gb200-tray", "gh200"])
    def test_memory_of_gpus_is_no_node_of_cpus(self, fixture: str) -> None:
        assert any(node.role == "gpu-memory" for node in scan(f"fixture:{fixture}").numa_nodes)
        assert found(scan(f"fixture:{fixture}"), "NUM206") == []

    def test_a_virtual_machine_may_be_uneven(self) -> None:
        files = self.meminfo("hgx-h100", 1, 512 << 20) | guest("hgx-h100")
        assert only(twin("hgx-h100", files=files), "NUM206").severity == "note"

    def test_an_unreadable_size_is_not_fine(self) -> None:
        topology = twin("hgx-h100", files={f"{NODES}/node1/meminfo": None})
        assert skipped(topology, "NUM206").startswith("numa1: its memory is unknown")


class TestGovernor:
    def governor(self, name: str, driver: str | None = None) -> Topology:
        files: Files = {}
        for cpu in sorted(parse(read("hgx-h100", "/sys/devices/system/cpu/online"))):
            files[f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"] = f"{name}\n"
        if driver:
            files["/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"] = f"{driver}\n"
        return twin("hgx-h100", files=files)

    def test_a_clock_that_follows_the_load(self) -> None:
        finding = only(self.governor("ondemand", "acpi-cpufreq"), "NUM207")
        assert (finding.severity, finding.subjects) == ("note", ["machine"])
        assert finding.remedy.undo == "cpupower frequency-set -g ondemand"

    @pytest.mark.parametrize("driver", ["intel_pstate", "amd-pstate-epp"])
    def test_powersave_that_is_adaptive(self, driver: str) -> None:
        assert found(self.governor("powersave", driver), "NUM207") == []

    def test_powersave_of_an_unknown_driver(self) -> None:
        assert "unless intel_pstate" in only(self.governor("powersave"), "NUM207").summary

    def test_no_governor_no_verdict(self) -> None:
        assert found(scan("fixture:azure-ndv5-vm"), "NUM207") == []
        assert "does not steer" in skipped(scan("fixture:azure-ndv5-vm"), "NUM207")


@needs_corpus
def test_firmware_that_is_known_to_lie() -> None:
    archive = CORPUS / "hwloc" / "8em64t-2s2ca2c-buggynuma.tar.bz2"
    assert "share CPUs" in only(scan(str(archive)), "NUM205").summary


@needs_corpus
@pytest.mark.parametrize(
    "archive", sorted((CORPUS / "hwloc").glob("*.tar.bz2")), ids=lambda p: p.name
)
def test_hwlocs_machines(archive: object) -> None:
    """No rule breaks, and none speaks of GPUs, which none of them has."""
    report = check(scan(str(archive)), only=["PCI", "NUM", "VIR", "PRB"])
    assert [skip.reason for skip in report.skipped if "broke" in skip.reason] == []
    loud = {f.code for f in report.findings if f.severity != "note"}
    assert loud <= {"NUM205", "NUM206"}
    assert not any(s.startswith("gpu") for f in report.findings for s in f.subjects)
