from __future__ import annotations

import pytest

from gputopo import scan
from gputopo.facts import Missing
from gputopo.host.base import Output
from gputopo.host.tree import Entry
from gputopo.probes.system import SHM_COMMAND
from gputopo.rules import check
from gputopo.topology.graph import Topology
from tests.rules.machines import FIXTURES, found, guest, only, read, skipped
from tests.rules.twin import twin

GUESTS = {"azure-ndv5-vm", "t4-vm", "firecracker-vm"}

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max locked memory         {0:<20} {0:<20} bytes
"""


@pytest.mark.parametrize("fixture", FIXTURES)
def test_bundled_machines(fixture: str) -> None:
    report = check(scan(f"fixture:{fixture}"), only=["VIR"])
    codes = {f.code for f in report.findings}
    assert codes == ({"VIR901"} if fixture in GUESTS else set())


class TestVirtualMachine:
    def test_what_is_hidden_is_named(self) -> None:
        finding = only(scan("fixture:azure-ndv5-vm"), "VIR901")
        assert (finding.severity, finding.subjects) == ("note", ["machine"])
        assert "hyper-v" in finding.summary
        assert "no PCIe switch" in finding.summary
        assert finding.evidence[0].seen == "hypervisor"
        assert "NCCL_TOPO_FILE" in finding.remedy.commands[0]
        assert "no NUMA node for gpu0" in only(scan("fixture:t4-vm"), "VIR901").summary

    def test_the_flag_decides_and_not_the_vendor(self) -> None:
        """Clouds sell bare metal under the name of their virtual machines."""
        files: dict[str, Entry | None] = {"/sys/class/dmi/id/sys_vendor": "Amazon EC2\n"}
        assert found(twin("hgx-h100", files=files), "VIR901") == []
        assert only(twin("hgx-h100", files=guest("hgx-h100")), "VIR901").severity == "note"

    def test_a_cpu_that_is_not_known(self) -> None:
        topology = twin("hgx-h100", files={"/proc/cpuinfo": None})
        assert found(topology, "VIR901") == []
        assert skipped(topology, "VIR901") != ""


class TestLimits:
    def limited(
        self, fixture: str, limit: str, capabilities: str = "", container: bool = False
    ) -> Topology:
        status = read(fixture, "/proc/self/status")
        if capabilities:
            status += f"\nCapEff:\t{capabilities}\n"
        files: dict[str, Entry | None] = {
            "/proc/self/limits": LIMITS.format(limit),
            "/proc/self/status": status,
        }
        if container:
            files["/.dockerenv"] = ""
        return twin(fixture, files=files)

    @pytest.mark.parametrize("limit", ["65536", "8388608", str((1 << 30) - 1)])
    def test_too_little_for_rdma(self, limit: str) -> None:
        finding = only(self.limited("hgx-h100", limit), "VIR902")
        assert (finding.severity, finding.subjects) == ("warning", ["machine"])
        assert "started from here" in finding.summary
        assert "limits.d" in finding.remedy.commands[0]
        inside = only(self.limited("hgx-h100", limit, container=True), "VIR902")
        assert "--ulimit memlock=-1" in inside.remedy.commands[0]

    @pytest.mark.parametrize("limit", ["unlimited", str(1 << 30)])
    def test_enough(self, limit: str) -> None:
        assert found(self.limited("hgx-h100", limit), "VIR902") == []

    def test_a_capability_lifts_the_limit(self) -> None:
        root = self.limited("hgx-h100", "65536", "000001ffffffffff")
        assert found(root, "VIR902") == []
        docker = self.limited("hgx-h100", "65536", "00000000a80425fb")
        assert only(docker, "VIR902")

    @pytest.mark.parametrize("fixture", ["rtx4090-workstation", "t4-vm", "no-gpu"])
    def test_without_rdma_or_gpus_nobody_locks(self, fixture: str) -> None:
        assert found(self.limited(fixture, "65536"), "VIR902") == []

    def test_an_unknown_limit_is_not_fine(self) -> None:
        topology = twin("hgx-h100", files={"/proc/self/limits": None})
        assert "locked memory: absent" in skipped(topology, "VIR902")

    def shared(self, kib: str, files: dict[str, Entry | None]) -> Topology:
        table = (
            "Filesystem     1024-blocks  Used Available Capacity Mounted on\n"
            f"shm {kib:>10} 0 {kib} 0% /dev/shm\n"
        )
        return twin("l40s-8-pcie", files=files, commands={tuple(SHM_COMMAND): Output(0, table, "")})

    @pytest.mark.parametrize(
        "files", [{"/.dockerenv": ""}, {"/run/.containerenv": ""}, {"/proc/self/cgroup": "0::/\n"}]
    )
    def test_a_small_dev_shm(self, files: dict[str, Entry | None]) -> None:
        finding = only(self.shared("65536", files), "VIR902")
        assert finding.severity == "warning"
        assert "64 MiB" in finding.summary
        assert "--shm-size" in finding.remedy.commands[0]
        assert found(self.shared("1048576", files), "VIR902") == []

    def test_outside_a_container_it_is_not_asked(self) -> None:
        assert found(self.shared("65536", {}), "VIR902") == []

    @pytest.mark.parametrize(
        "output",
        [Output(1, "", "df: /dev/shm: No such file or directory"), Output(0, "", ""),
         Output(0, "shm x y z 0% /dev/shm\n", ""), Missing("timeout", "2 s")],
    )  # fmt: skip
    def test_a_size_that_is_not_told(self, output: Output | Missing) -> None:
        topology = twin(
            "l40s-8-pcie", files={"/.dockerenv": ""}, commands={tuple(SHM_COMMAND): output}
        )
        assert found(topology, "VIR902") == []
        assert "the size of /dev/shm" in skipped(topology, "VIR902")


class TestShares:
    def test_mig(self) -> None:
        topology = twin("dgx-a100", nvml={("nvmlDeviceGetMigMode", n): [1, 1] for n in (2, 3)})
        finding = only(topology, "VIR903")
        assert (finding.severity, finding.subjects) == ("note", ["gpu2", "gpu3"])
        assert topology.nodes["gpu2"].pci in finding.remedy.commands[0]  # type: ignore[union-attr]
        assert finding.remedy.undo.count("-mig 1") == 2

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("NVIDIA A40-48Q", True),
            ("GRID V100D-8C", True),
            ("GRID T4-16Q", True),
            ("NVIDIA A100-4-20C", True),
            ("NVIDIA H100XM-80C", True),
            ("NVIDIA A100-SXM4-40GB", False),
            ("NVIDIA H100 80GB HBM3", False),
            ("Tesla V100-SXM2-32GB", False),
            ("NVIDIA RTX 6000 Ada Generation", False),
        ],
    )
    def test_vgpus_go_by_their_names(self, name: str, told: bool) -> None:
        topology = twin("t4-vm", nvml={("nvmlDeviceGetName", 0): name})
        assert bool(found(topology, "VIR903")) is told
