from __future__ import annotations

from typing import Any

import pytest

from gputopo import scan
from gputopo.host.tree import Entry, Link
from gputopo.rules import check
from gputopo.topology.graph import Topology
from gputopo.topology.model import PciBridge
from tests.corpus import CORPUS, needs_corpus
from tests.rules.machines import (
    FIXTURES,
    config_with_acs,
    file,
    found,
    groups,
    guest,
    only,
    skipped,
)
from tests.rules.twin import codes, recorded, twin

Files = dict[str, Entry | None]

GPU = "0000:db:00.0"
GPU_PORT = "0000:d9:01.0"
SWITCH = "0000:d8:00.0"
HCA_PORT = "0000:d9:02.0"
"""On hgx-h100: gpu7, the port above it, the upstream port of its switch, the port of mlx5_11."""

SLOW: Files = {file(GPU, "current_link_speed"): "8.0 GT/s PCIe\n"}

COMPUTES = [{"pid": 4711, "usedGpuMemory": 1 << 30}]


def gpu_files(fixture: str, name: str, text: str) -> Files:
    """One file of every GPU of a machine."""
    return {file(gpu.pci, name): text for gpu in scan(f"fixture:{fixture}").gpus}


def busy(index: int, state: int = 0, reasons: int = 0) -> dict[tuple[Any, ...], Any]:
    """What NVML says of a GPU that computes."""
    return {
        ("nvmlDeviceGetPerformanceState", index): state,
        ("nvmlDeviceGetCurrentClocksEventReasons", index): reasons,
        ("nvmlDeviceGetComputeRunningProcesses", index): COMPUTES,
    }


@pytest.mark.parametrize("fixture", FIXTURES)
def test_healthy_machines_have_no_pci_finding_above_a_note(fixture: str) -> None:
    report = check(scan(f"fixture:{fixture}"), only=["PCI"])
    assert [f.summary for f in report.findings if f.severity != "note"] == []
    assert len({f.code for f in report.findings}) == len(report.findings), "a note for each rule"


class TestWidth:
    def test_a_gpu_with_half_of_its_lanes(self) -> None:
        finding = only(twin("hgx-h100", files={file(GPU, "current_link_width"): "8\n"}), "PCI101")
        assert (finding.severity, finding.confidence) == ("error", "reported")
        assert finding.subjects == ["gpu7"]
        assert [(e.source, e.seen, e.expected) for e in finding.evidence[:3]] == [
            (file(GPU, "current_link_width"), "8", "16"),
            (file(GPU, "max_link_width"), "16", "16 or more"),
            (file(GPU_PORT, "max_link_width"), "16", "16 or more"),
        ]
        assert "gpu0-6" in finding.evidence[3].source
        assert finding.cost is not None
        assert finding.cost.gbytes_per_s == 31.51
        assert GPU in finding.remedy.text
        assert GPU in finding.remedy.commands[0]

    def test_all_functions_of_a_card_are_one_finding(self) -> None:
        hca = scan("fixture:gh200").nodes["mlx5_0"]
        files = {file(f"{hca.pci[:-1]}{n}", "current_link_width"): "8\n" for n in (0, 1)}  # type: ignore[union-attr]
        assert only(twin("gh200", files=files), "PCI101").subjects == ["mlx5_0", "mlx5_1"]

    def test_the_uplink_of_a_switch_counts_for_all_below(self) -> None:
        topology = twin("hgx-h100", files={file(SWITCH, "current_link_width"): "4\n"})
        finding = only(topology, "PCI101")
        assert finding.subjects == [SWITCH, "gpu7", "mlx5_11"]
        assert f"switch {SWITCH} (above gpu7, mlx5_11) runs at x4" in finding.summary

    def test_a_port_with_a_drive_below_is_nobodys_business(self) -> None:
        topology = scan("fixture:hgx-h100")
        nvme = next(n for n in topology.nodes.values() if n.id.startswith("nvme"))
        files: Files = {file(nvme.parent, "current_link_width"): "2\n"}
        assert found(twin("hgx-h100", files=files), "PCI101") == []

    def test_a_slot_of_eight_lanes_is_no_fault_of_the_link(self) -> None:
        files: Files = {
            file(GPU, "current_link_width"): "8\n",
            file(GPU_PORT, "max_link_width"): "8\n",
            file(GPU_PORT, "current_link_width"): "8\n",
        }
        topology = twin("hgx-h100", files=files)
        assert codes(topology, at_least="warning") == {"PCI103"}

    @pytest.mark.parametrize("text", ["0\n", "255\n", "\n", "Unknown\n"])
    def test_a_width_that_cannot_be_read_is_not_told(self, text: str) -> None:
        topology = twin("hgx-h100", files={file(GPU, "current_link_width"): text})
        # NVML fills in where sysfs has nothing.
        assert found(topology, "PCI101") == []
        bare = twin(
            "hgx-h100",
            files={file(GPU, "current_link_width"): text},
            nvml={("nvmlDeviceGetCurrPcieLinkWidth", 7): 0},
        )
        assert found(bare, "PCI101") == []
        assert skipped(bare, "PCI101") == "gpu7: the width of its link cannot be read"

    def test_findings_stand_where_other_devices_cannot_be_told(self) -> None:
        topology = twin(
            "hgx-h100",
            files={
                file(GPU, "current_link_width"): "8\n",
                file("0000:dc:00.0", "current_link_width"): None,
            },
        )
        assert only(topology, "PCI101").subjects == ["gpu7"]
        assert "mlx5_11" in skipped(topology, "PCI101")

    def test_one_link_is_one_finding_whatever_else_is_slow(self) -> None:
        files: Files = {
            file(GPU, "current_link_width"): "8\n",
            file(GPU, "current_link_speed"): "8.0 GT/s PCIe\n",
            file(GPU_PORT, "max_link_speed"): "16.0 GT/s PCIe\n",
        }
        topology = twin("hgx-h100", files=files, nvml=busy(7))
        assert codes(topology) & {"PCI101", "PCI102", "PCI103"} == {"PCI101"}

    def test_a_virtual_port_proves_nothing(self) -> None:
        """A T4 with 8 of 16 lanes in a cloud instance: the provider's slot has eight."""
        topology = scan("fixture:t4-vm")
        assert found(topology, "PCI101") == []
        assert "gpu0: x8 of x16" in skipped(topology, "PCI101")
        files = guest("hgx-h100") | gpu_files("hgx-h100", "current_link_width", "8\n")
        same = twin("hgx-h100", files=files)
        assert found(same, "PCI101") == []
        assert skipped(same, "PCI101").startswith("gpu0-7: x8 of x16")

    def test_a_virtual_machine_with_one_narrow_gpu(self) -> None:
        files = guest("hgx-h100") | {file(GPU, "current_link_width"): "8\n"}
        finding = only(twin("hgx-h100", files=files), "PCI101")
        assert finding.subjects == ["gpu7"]
        assert "7 others of its kind run at x16" in finding.summary
        assert finding.remedy.needs == "the host of this virtual machine"

    @pytest.mark.parametrize("virtual", [True, False])
    def test_a_port_that_can_less_than_its_link_does_is_made_up(self, virtual: bool) -> None:
        files: Files = {
            file(GPU_PORT, "max_link_width"): "1\n",
            file(GPU_PORT, "max_link_speed"): "2.5 GT/s PCIe\n",
        }
        topology = twin("hgx-h100", files=files | (guest("hgx-h100") if virtual else {}))
        assert codes(topology, at_least="warning") & {"PCI101", "PCI102", "PCI103"} == set()

    def test_a_laptop_is_wired_so(self) -> None:
        name = "NVIDIA GeForce RTX 4090 Laptop GPU"
        topology = twin(
            "rtx4090-workstation",
            files=gpu_files("rtx4090-workstation", "current_link_width", "8\n"),
            nvml={("nvmlDeviceGetName", 0): name, ("nvmlDeviceGetName", 1): name},
        )
        assert {f.severity for f in found(topology, "PCI101")} == {"note"}

    @needs_corpus
    def test_the_recorded_virtual_machine(self) -> None:
        topology = scan(str(CORPUS / "recorded" / "vm-2package-4numa-8gpu-4hca.tar.xz"))
        assert only(topology, "PCI101").subjects == ["gpu4"]
        families = ["PCI", "NUM", "VIR", "PRB"]
        report = check(topology, only=families)
        assert {f.code for f in report.findings if f.severity != "note"} == {"PCI101"}


class TestSpeed:
    def test_a_working_gpu(self) -> None:
        finding = only(twin("hgx-h100", files=SLOW, nvml=busy(7)), "PCI102")
        assert (finding.severity, finding.confidence) == ("warning", "inferred")
        assert finding.subjects == ["gpu7"]
        assert finding.evidence[0].expected == "32 GT/s"
        assert any(e.seen == "P0" for e in finding.evidence)
        assert finding.cost is not None
        assert finding.cost.gbytes_per_s == 47.27

    def test_geforce_computes_in_p2(self) -> None:
        topology = twin("rtx4090-workstation", nvml=busy(1, state=2))
        assert only(topology, "PCI102").severity == "warning"

    @pytest.mark.parametrize(("state", "reasons"), [(8, 0), (0, 1), (5, 0)])
    def test_no_proof_of_work(self, state: int, reasons: int) -> None:
        topology = twin("rtx4090-workstation", nvml=busy(1, state, reasons))
        finding = only(topology, "PCI102")
        assert (finding.severity, finding.subjects) == ("note", ["gpu1"])
        assert "cannot tell" in finding.summary

    def test_siblings_in_p0_are_proof(self) -> None:
        finding = only(twin("hgx-h100", files=SLOW), "PCI102")
        assert finding.severity == "warning"
        assert any("gpu0-6" in evidence.source for evidence in finding.evidence)

    def test_all_idle_gpus_are_one_note(self) -> None:
        files = gpu_files("l40s-8-pcie", "current_link_speed", "2.5 GT/s PCIe\n")
        finding = only(twin("l40s-8-pcie", files=files), "PCI102")
        assert finding.severity == "note"
        assert finding.subjects == [f"gpu{n}" for n in range(8)]

    def test_an_hca_slower_than_its_siblings(self) -> None:
        files: Files = {file("0000:dc:00.0", "current_link_speed"): "16.0 GT/s PCIe\n"}
        finding = only(twin("hgx-h100", files=files), "PCI102")
        assert (finding.severity, finding.subjects) == ("warning", ["mlx5_11"])

    def test_hcas_that_are_all_slow_may_save_power(self) -> None:
        topology = scan("fixture:hgx-b200")
        files: Files = {
            file(hca.pci, "current_link_speed"): "16.0 GT/s PCIe\n" for hca in topology.hcas
        }
        finding = only(twin("hgx-b200", files=files), "PCI102")
        assert finding.severity == "note"
        assert len(finding.subjects) == len(topology.hcas)

    def test_unknown_dialects_are_no_speed(self) -> None:
        topology = twin(
            "hgx-h100",
            files={file(GPU, "current_link_speed"): "Unknown\n"},
            nvml={("nvmlDeviceGetCurrPcieLinkGeneration", 7): 0},
        )
        assert found(topology, "PCI102") == []
        assert "gpu7: the speed of its link" in skipped(topology, "PCI102")

    def test_a_virtual_machine_with_slow_slots(self) -> None:
        files = gpu_files("hgx-h100", "current_link_speed", "16.0 GT/s PCIe\n")
        topology = twin("hgx-h100", files=files | guest("hgx-h100"))
        assert found(topology, "PCI102") == []
        assert "gpu0-7: 16 GT/s of 32 GT/s" in skipped(topology, "PCI102")


class TestSlots:
    def test_one_slot_worse_than_its_siblings(self) -> None:
        files: Files = {
            file(GPU_PORT, "max_link_speed"): "16.0 GT/s PCIe\n",
            file(GPU, "current_link_speed"): "16.0 GT/s PCIe\n",
        }
        finding = only(twin("hgx-h100", files=files), "PCI103")
        assert (finding.severity, finding.subjects) == ("warning", ["gpu7"])
        assert "Gen5 x16" in finding.summary
        assert "Gen4 x16" in finding.summary
        assert finding.cost is not None
        assert finding.cost.gbytes_per_s == 31.51
        assert GPU_PORT in finding.evidence[0].source

    def test_a_server_of_the_generation_before_is_one_note(self) -> None:
        files: Files = {}
        for gpu in scan("fixture:l40s-8-pcie").gpus:
            files[file(gpu.parent, "max_link_speed")] = "8.0 GT/s PCIe\n"
            files[file(gpu.pci, "current_link_speed")] = "8.0 GT/s PCIe\n"
        finding = only(twin("l40s-8-pcie", files=files), "PCI103")
        assert finding.severity == "note"
        assert finding.subjects == [f"gpu{n}" for n in range(8)]

    def test_a_slow_switch_above(self) -> None:
        files: Files = {
            file(SWITCH, "max_link_speed"): "16.0 GT/s PCIe\n",
            file(SWITCH, "current_link_speed"): "16.0 GT/s PCIe\n",
        }
        caps = found(twin("hgx-h100", files=files), "PCI103")
        assert ("warning", ["gpu7"]) in [(f.severity, f.subjects) for f in caps]
        assert all(SWITCH in f.summary for f in caps)

    def test_a_single_gpu_with_too_few_lanes(self) -> None:
        gpu = scan("fixture:gh200").nodes["gpu0"]
        narrow: Files = {
            file(gpu.parent, "max_link_width"): "8\n",
            file(gpu.pci, "current_link_width"): "8\n",  # type: ignore[union-attr]
        }
        grace = only(twin("gh200", files=narrow), "PCI103")
        assert grace.severity == "note", "its memory is reached over C2C"

    def test_what_a_fast_port_needs(self) -> None:
        files: Files = {
            file(HCA_PORT, "max_link_speed"): "16.0 GT/s PCIe\n",
            file("0000:dc:00.0", "current_link_speed"): "16.0 GT/s PCIe\n",
        }
        finding = only(twin("hgx-h100", files=files), "PCI103")
        assert (finding.severity, finding.subjects) == ("warning", ["mlx5_11"])
        assert "400 Gb/s and need more" in finding.summary

    def test_a_slower_slot_that_costs_an_hca_nothing(self) -> None:
        hca = scan("fixture:l40s-8-pcie").nodes["mlx5_0"]
        files: Files = {
            file(hca.parent, "max_link_speed"): "16.0 GT/s PCIe\n",
            file(hca.pci, "current_link_speed"): "16.0 GT/s PCIe\n",  # type: ignore[union-attr]
        }
        assert found(twin("l40s-8-pcie", files=files), "PCI103") == []

    def test_what_blackwell_wishes_is_not_held_against_a_slot(self) -> None:
        gpus = scan("fixture:gb200-tray").gpus
        assert gpus[0].pcie is not None
        assert gpus[0].pcie.device_max_speed_gts == 64.0
        assert found(scan("fixture:gb200-tray"), "PCI103") == []

    @pytest.mark.parametrize("code", ["PCI103", "PCI104", "PCI105", "PCI108"])
    def test_what_is_above_a_device_is_not_judged_in_a_virtual_machine(self, code: str) -> None:
        files = guest("dgx-a100") | groups("dgx-a100", "DMA")
        topology = twin("dgx-a100", files=files)
        assert found(topology, code) == []
        assert "hypervisor" in skipped(topology, code)


class TestAcs:
    def port(self, bits: int, address: str = GPU_PORT) -> Files:
        return {file(address, "config"): config_with_acs("hgx-h100", address, bits)}

    def test_a_port_between_a_gpu_and_its_hca(self) -> None:
        finding = only(twin("hgx-h100", files=self.port(0x1D)), "PCI104")
        assert (finding.severity, finding.confidence) == ("warning", "reported")
        assert finding.subjects == [GPU_PORT, "gpu7", "mlx5_11"]
        assert finding.evidence[0].seen == "SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+"
        assert finding.remedy.commands == [f"setpci -s {GPU_PORT} ECAP_ACS+6.w=0000:001c"]
        assert finding.remedy.undo == f"setpci -s {GPU_PORT} ECAP_ACS+6.w=001c:001c"

    @pytest.mark.parametrize("bits", [0x01, 0x41, 0x5D])
    def test_what_redirects_nothing(self, bits: int) -> None:
        """Source validation alone, and direct translated traffic, which address services need."""
        topology = twin("hgx-h100", files=self.port(bits))
        assert found(topology, "PCI104") == []
        assert skipped(topology, "PCI104") == ""

    def test_ports_beside_the_way(self) -> None:
        """Those to the NVSwitches, the root port above the switch, and a drive's."""
        healthy = scan("fixture:hgx-h100")
        redirecting = [b.id for b in healthy.of(PciBridge) if b.acs and "ReqRedir" in b.acs]
        assert len(redirecting) == 4
        assert found(healthy, "PCI104") == []
        nvme = healthy.nodes["nvme0"].parent
        assert nvme is not None
        files = self.port(0x1D, "0000:d7:01.0") | self.port(0x1D, nvme)
        assert found(twin("hgx-h100", files=files), "PCI104") == []

    def test_gpus_joined_by_nvlink_need_no_port(self) -> None:
        """On DGX A100 pairs of GPUs share a switch, and talk over NVLink; their HCAs do not."""
        finding_subjects = only(
            twin(
                "dgx-a100",
                files={
                    file(gpu.parent, "config"): config_with_acs("dgx-a100", gpu.parent, 0x1D)
                    for gpu in scan("fixture:dgx-a100").gpus[:1]
                },
            ),
            "PCI104",
        ).subjects
        assert "gpu1" not in finding_subjects
        assert {"gpu0", "mlx5_0", "mlx5_1"} <= set(finding_subjects)

    def test_config_space_needs_root(self) -> None:
        data = recorded("hgx-h100").read_bytes(file(GPU_PORT, "config"))
        assert isinstance(data, bytes)
        topology = twin("hgx-h100", files={file(GPU_PORT, "config"): data[:64]})
        assert found(topology, "PCI104") == []
        assert "1 port cannot be read: denied" in skipped(topology, "PCI104")
        assert "needs root" in skipped(topology, "PCI104")
        both = self.port(0x1D, HCA_PORT) | {file(GPU_PORT, "config"): data[:64]}
        assert only(twin("hgx-h100", files=both), "PCI104").subjects[0] == HCA_PORT
        assert skipped(twin("hgx-h100", files=both), "PCI104") != ""

    def test_a_host_of_virtual_machines_wants_isolation(self) -> None:
        files = self.port(0x1D) | {
            file("0000:1a:00.0", "driver"): Link("../../../bus/pci/drivers/vfio-pci")
        }
        topology = twin("hgx-h100", files=files)
        assert found(topology, "PCI104") == []
        assert "held for virtual machines" in skipped(topology, "PCI104")

    def test_gpus_that_may_not_talk(self) -> None:
        """Two GeForce below one root complex, whose driver refuses peers: no port matters."""
        assert found(scan("fixture:rtx4090-workstation"), "PCI104") == []


class TestIommu:
    @pytest.mark.parametrize("kind", ["DMA", "DMA-FQ"])
    def test_a_translating_iommu_is_one_finding(self, kind: str) -> None:
        topology = twin("dgx-a100", files=groups("dgx-a100", kind))
        finding = only(topology, "PCI105")
        assert finding.severity == "warning"
        assert len(finding.subjects) == 8 + 12
        assert finding.evidence[-1].source == "/proc/cmdline"
        assert finding.remedy.undo

    def test_identity_and_off_are_fine(self) -> None:
        assert found(scan("fixture:dgx-a100"), "PCI105") == []
        assert found(scan("fixture:hgx-h100"), "PCI105") == []

    def test_arm_is_another_matter(self) -> None:
        files = groups("gb200-tray", "DMA")
        assert files
        assert found(twin("gb200-tray", files=files), "PCI105") == []

    def test_no_gpu_no_matter(self) -> None:
        assert found(twin("no-gpu", files=groups("no-gpu", "DMA")), "PCI105") == []


@pytest.mark.parametrize("code", ["PCI106", "PCI107"])
def test_counters_need_two_samples(code: str) -> None:
    topology = scan("fixture:hgx-h100")
    assert found(topology, code) == []
    assert skipped(topology, code).startswith("needs two samples")


class TestUplinks:
    def test_gpus_that_share_an_uplink_are_one_note(self) -> None:
        finding = only(scan("fixture:dgx-2"), "PCI108")
        assert finding.severity == "note"
        assert len(finding.subjects) == 16
        assert "3.9 GB/s each" in finding.summary

    @pytest.mark.parametrize("fixture", ["hgx-h100", "hgx-b200", "a100-nps4", "l40s-8-pcie"])
    def test_a_gpu_and_its_hca_are_meant_to_share(self, fixture: str) -> None:
        assert found(scan(f"fixture:{fixture}"), "PCI108") == []

    def test_uplinks_that_are_wide_enough(self) -> None:
        """Two Gen4 GPUs behind a Gen5 uplink; behind a Gen4 one they share."""
        assert found(scan("fixture:l40s-8-pcie"), "PCI108") == []
        switches = [
            bridge.id
            for bridge in scan("fixture:l40s-8-pcie").of(PciBridge)
            if bridge.role == "upstream-port"
        ]
        files: Files = {file(s, "max_link_speed"): "16.0 GT/s PCIe\n" for s in switches}
        finding = only(twin("l40s-8-pcie", files=files), "PCI108")
        assert finding.summary.startswith("gpu0, gpu1; gpu2, gpu3; gpu4, gpu5; gpu6, gpu7 each")


class TestBar1:
    def small(self, fixture: str, *indices: int) -> Topology:
        size = {"bar1Total": 256 << 20, "bar1Used": 1 << 20, "bar1Free": 255 << 20}
        return twin(fixture, nvml={("nvmlDeviceGetBAR1MemoryInfo", i): size for i in indices})

    def test_a_small_window(self) -> None:
        finding = only(self.small("hgx-h100", 2, 3), "PCI109")
        assert (finding.severity, finding.subjects) == ("warning", ["gpu2", "gpu3"])
        assert finding.evidence[0].seen == "256 MiB"

    def test_without_rdma_it_does_not_matter(self) -> None:
        assert found(scan("fixture:t4-vm"), "PCI109") == []

    def test_geforce_and_grace_have_no_use_for_it(self) -> None:
        assert found(self.small("gh200", 0), "PCI109") == []
        assert found(self.small("rtx4090-workstation", 0, 1), "PCI109") == []

    def test_an_unknown_size_is_not_fine(self) -> None:
        topology = twin("hgx-h100", nvml={("nvmlDeviceGetBAR1MemoryInfo", 4): "garbage"})
        assert found(topology, "PCI109") == []
        assert skipped(topology, "PCI109").startswith("gpu4: the size of its BAR1")
