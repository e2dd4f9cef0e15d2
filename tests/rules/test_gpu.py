"""GPU rules: each fires on a broken twin, names it, and stays silent on what only looks broken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gputopo.facts import ABSENT, Missing, known
from gputopo.hardware.gpu_parts import form_of, line_of
from gputopo.host.base import Output
from gputopo.host.recording import nvml_error
from gputopo.probes import kernel_log
from gputopo.rules.common import listed
from gputopo.topology.build import build
from tests.rules.composed import (
    FIXTURES,
    UNEVENTFUL,
    all_gpus,
    composed,
    findings,
    only,
    skipped,
)
from tests.rules.twin import codes, report, twin

DMESG = tuple(kernel_log.COMMAND)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_healthy_machines_are_silent(fixture: str) -> None:
    found = report(twin(fixture), "GPU")
    assert [f.summary for f in found.findings] == []
    assert not [skip.reason for skip in found.skipped if skip.broken]


@pytest.mark.parametrize("fixture", FIXTURES)
def test_no_wall_of_notes(fixture: str) -> None:
    """Of the families GPU, NVL and NIC a healthy machine has one note at most."""
    topology = twin(fixture)
    ours = {code for code in codes(topology) if code[:3] in ("GPU", "NVL", "NIC")}
    assert ours == UNEVENTFUL.get(fixture, set())


# GPU301


def test_persistence_off() -> None:
    found = only(twin("hgx-h100", nvml={("nvmlDeviceGetPersistenceMode", 3): 0}), "GPU301")
    assert (found.severity, found.subjects) == ("warning", ["gpu3"])
    assert found.evidence[0].source == "nvmlDeviceGetPersistenceMode(3)"
    assert found.remedy.undo


def test_persistence_off_everywhere_is_one_finding() -> None:
    found = only(composed("hgx-h100", **all_gpus(8, persistence=False)), "GPU301")
    assert found.subjects == [f"gpu{i}" for i in range(8)]
    assert "gpu0-7" in found.summary


def test_persistence_on_desktops_and_where_it_is_unknown() -> None:
    assert not findings(twin("rtx4090-workstation"), "GPU301")
    headless = composed("rtx4090-workstation", gpu0={"persistence": False, "graphics": []})
    assert only(headless, "GPU301").severity == "note"
    hidden = {
        (f"nvmlDeviceGet{kind}RunningProcesses", gpu): nvml_error("NOT_SUPPORTED")
        for kind in ("Compute", "Graphics")
        for gpu in (0, 1)
    }
    assert not findings(twin("rtx4090-workstation", nvml=hidden), "GPU301")
    unknown = {
        ("nvmlDeviceGetPersistenceMode", gpu): nvml_error("NOT_SUPPORTED") for gpu in range(8)
    }
    assert "unknown" in skipped(twin("hgx-h100", nvml=unknown), "GPU301")


def test_persistence_daemon_that_is_just_starting() -> None:
    machine = {"services": {"nvidia-persistenced.service": "activating"}}
    starting = composed("hgx-h100", machine=machine, **all_gpus(8, persistence=False))
    assert "starting" in skipped(starting, "GPU301")


# GPU302


def test_a_gpu_that_the_driver_does_not_offer() -> None:
    found = only(twin("hgx-h100", nvml=seven_of_eight()), "GPU302")
    assert (found.severity, found.subjects) == ("error", ["gpu@0000:db:00.0"])
    assert "7 of 8" in found.summary


def seven_of_eight() -> dict[tuple[Any, ...], Any]:
    """NVML without the last GPU."""
    return {("nvmlDeviceGetCount",): 7}


@pytest.mark.parametrize("cgroup", ["0::/", "0::/kubepods/pod1/c1", "0::/docker/abc"])
def test_gpus_hidden_from_a_container_are_not_lost(cgroup: str) -> None:
    topology = twin("hgx-h100", nvml=seven_of_eight(), files={"/proc/self/cgroup": cgroup})
    found = only(topology, "GPU302")
    assert found.severity == "note"
    assert "hidden" in found.summary


def test_gpus_of_virtual_machines_are_not_lost() -> None:
    topology = composed("hgx-h100", gpu7={"driver": "vfio-pci"})
    nvml = seven_of_eight()
    assert not findings(topology, "GPU302")
    assert only(topology, "GPU309").severity == "note"
    assert findings(twin("hgx-h100", nvml=nvml), "GPU302")


@pytest.mark.parametrize(
    ("fixture", "expected"), [("hgx-h100", "4 NVSwitches carries 8"), ("hgx-b200", "4 or 8")]
)
def test_a_module_that_did_not_come_up(fixture: str, expected: str) -> None:
    found = only(composed(fixture, gpu3={"absent": True}), "GPU302")
    assert (found.severity, found.confidence) == ("error", "inferred")
    assert expected in found.summary
    # Its place on the baseboard is told by the module numbers of the others.
    assert "module" in found.summary


def test_a_board_is_whole_in_a_guest_and_in_a_container() -> None:
    seven = composed("azure-ndv5-vm", gpu3={"absent": True})
    assert not findings(seven, "GPU302")


# GPU303


def test_library_and_module_of_two_versions() -> None:
    mismatch = {("nvmlInit",): nvml_error("LIB_RM_VERSION_MISMATCH")}
    found = only(twin("hgx-h100", nvml=mismatch), "GPU303")
    assert found.subjects == ["machine"]
    assert "570.124.06" in found.summary
    assert not findings(twin("hgx-h100"), "GPU303")


def test_no_library_is_no_mismatch() -> None:
    assert not findings(twin("no-gpu"), "GPU303")
    missing = {("nvmlInit",): nvml_error("LIBRARY_NOT_FOUND")}
    assert "LIBRARY_NOT_FOUND" in skipped(twin("hgx-h100", nvml=missing), "GPU303")


# GPU304


@pytest.mark.parametrize(
    ("error", "words"), [("GPU_IS_LOST", "fell off"), ("RESET_REQUIRED", "needs a reset")]
)
def test_a_gpu_that_the_driver_gave_up(error: str, words: str) -> None:
    found = only(composed("hgx-h100", gpu4={"error": error}), "GPU304")
    assert found.subjects == ["gpu4"]
    assert words in found.summary
    assert "0000:9b:00.0" in f"{found.summary} {found.remedy.commands}"


def test_a_gpu_without_handle_is_told_by_its_place() -> None:
    lost = {("nvmlDeviceGetHandleByIndex", 2): nvml_error("GPU_IS_LOST")}
    assert only(twin("hgx-h100", nvml=lost), "GPU304").subjects == ["gpu@0000:4c:00.0"]


@pytest.mark.parametrize(
    ("action", "command"), [(1, "--gpu-reset"), (2, "reboot"), (5, "nvidia-imex"), (4, "reset")]
)
def test_the_driver_asks_for_recovery(action: int, command: str) -> None:
    found = only(composed("hgx-b200", gpu6={"recovery_action": action}), "GPU304")
    assert found.subjects == ["gpu6"]
    assert any(command in line for line in found.remedy.commands)


def test_what_hangs_is_the_probes_finding() -> None:
    hung = {("nvmlDeviceGetName", 2): Missing("timeout", "no answer within 10 s")}
    assert not findings(twin("hgx-h100", nvml=hung), "GPU304")


# GPU305

XID = "[ 4032.113027] NVRM: Xid (PCI:0000:{}:00): {}, pid='<unknown>', name=<unknown>, {}\n"


def logged(text: str, fixture: str = "hgx-h100", **nvml: Any) -> Any:
    return twin(fixture, commands={DMESG: Output(0, text, "")}, **nvml)


def test_a_gpu_fell_off_the_bus() -> None:
    text = XID.format("19", 79, "GPU has fallen off the bus.")
    text += "[ 4032.113040] NVRM: GPU 0000:19:00.0: GPU has fallen off the bus.\n"
    gone = {("nvmlDeviceGetName", 0): nvml_error("GPU_IS_LOST")}
    found = only(logged(text, nvml=gone), "GPU305")
    assert (found.severity, found.subjects) == ("error", ["gpu0"])
    assert found.summary.startswith("Xid 79 on gpu0")
    # Without its process id and name, which are nobody's business.
    assert found.evidence[0].seen.endswith("GPU has fallen off the bus.")


def test_a_fault_that_was_got_over_is_a_warning() -> None:
    text = XID.format("19", 48, "DBE (double bit error) detected")
    assert only(logged(text), "GPU305").severity == "warning"
    older = XID.format("07", 48, "DBE (double bit error) detected")
    unknown = only(logged(older, "dgx-a100"), "GPU305")  # 470 tells of no recovery action
    assert unknown.severity == "error"


def test_faults_of_programs_are_one_note() -> None:
    text = "".join(
        XID.format(bus, code, "Graphics SM Warp Exception")
        for bus in ("19", "3b", "3b")
        for code in (13, 31, 43, 45)
    )
    found = only(logged(text), "GPU305")
    assert (found.severity, found.subjects) == ("note", ["gpu0", "gpu1"])
    assert "Xid 13 (3 times)" in found.summary


def test_switches_and_pcie_errors() -> None:
    text = (
        "[1.0] nvidia-nvswitch0: SXid (PCI:0000:85:00.0): 20034, Fatal, Link 30 LTSSM Fault Up\n"
        "[1.0] nvidia-nvswitch0: SXid (PCI:0000:85:00.0): 20034, Severity 1 Engine instance 30\n"
        "[2.0] nvidia 0000:19:00.0: AER: PCIe Bus Error: severity=Uncorrected (Fatal), type=...\n"
        "[2.0] nvidia 0000:19:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer\n"
        "[2.0] nvme 0000:18:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=...\n"
    )
    found = findings(logged(text), "GPU305")
    assert [(f.severity, f.subjects) for f in found] == [
        ("error", ["nvswitch2"]),
        ("warning", ["gpu0"]),  # it answers, and asks for no recovery
    ]


def test_xid_154_alone_is_no_finding() -> None:
    text = XID.format("19", 154, "GPU recovery action changed from 0x0 (None) to 0x1 (Reset)")
    assert not findings(logged(text), "GPU305")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (Output(1, "", "dmesg: read kernel buffer failed: Operation not permitted"), "denied"),
        (Output(1, "", "dmesg: unrecognized option '--kernel'\nUsage: dmesg"), "unsupported"),
    ],
)
def test_a_log_that_cannot_be_read(output: Output, reason: str) -> None:
    topology = twin("hgx-h100", commands={DMESG: output})
    assert reason in skipped(topology, "GPU305")
    assert not report(topology, "GPU305").skipped[0].broken


def test_start_up_lines_that_belong_together() -> None:
    found = kernel_log.parse(
        "[5.0] NVRM: The NVIDIA GPU 0000:af:00.0\n"
        "[5.0] NVRM: (PCI ID: 10de:20b2) installed in this system has\n"
        "[5.0] NVRM: fallen off the bus and is not responding to commands.\n"
    )
    assert [(event.kind, event.device) for event in found.events] == [("fell-off", "0000:af:00.0")]


def test_an_old_driver_names_no_bus() -> None:
    found = kernel_log.parse("NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120\n")
    assert [(event.code, event.device, event.first) for event in found.events] == [
        (31, "0000:01:00.0", None)
    ]


@given(st.text(alphabet=st.sampled_from("NVRM: Xid(PCI0,79)SFatl-nvswitch\n[]. ")))
def test_any_text_is_read(text: str) -> None:
    kernel_log.parse(text)
    kernel_log.parse(f"NVRM: Xid (PCI:{text}): 79, {text}\n")


# GPU306 to GPU309


def test_throttling_needs_load() -> None:
    hot = {"clock_reasons": 0x48, "performance_state": 0}
    assert not findings(composed("hgx-h100", gpu4=hot), "GPU306")
    busy = {**hot, "processes": [{"pid": 4242, "memory": 1024}]}
    found = only(composed("hgx-h100", gpu4=busy), "GPU306")
    assert (found.severity, found.subjects) == ("warning", ["gpu4"])
    assert "hardware thermal slowdown" in found.summary


def test_a_driver_that_does_not_start_is_a_finding() -> None:
    refused = {("nvmlInit",): nvml_error("DRIVER_NOT_LOADED")}
    found = only(twin("hgx-h100", nvml=refused), "GPU310")
    assert (found.severity, len(found.subjects)) == ("error", 8)
    unasked = {("nvmlInit",): Missing("absent", "not in the recording")}
    assert not findings(twin("hgx-h100", nvml=unasked), "GPU310")


def test_a_cap_on_one_gpu_and_on_all() -> None:
    limits = {("nvmlDeviceGetPowerManagementDefaultLimit", gpu): 700_000 for gpu in range(8)}
    all_alike = {("nvmlDeviceGetEnforcedPowerLimit", gpu): 500_000 for gpu in range(8)}
    one = {
        ("nvmlDeviceGetEnforcedPowerLimit", gpu): 500_000 if gpu == 3 else 700_000
        for gpu in range(8)
    }
    found = only(twin("hgx-h100", nvml=limits | one), "GPU307")
    assert (found.severity, found.subjects) == ("warning", ["gpu3"])
    assert found.remedy.commands == ["nvidia-smi -i 3 -pl 700"]
    assert found.remedy.undo == "nvidia-smi -i 3 -pl 500"
    policy = only(twin("hgx-h100", nvml=limits | all_alike), "GPU307")
    assert (policy.severity, len(policy.subjects)) == ("note", 8)


def test_a_clock_below_its_default() -> None:
    clocks = {
        ("nvmlDeviceGetApplicationsClock", 2, 1): 1200,
        ("nvmlDeviceGetDefaultApplicationsClock", 2, 1): 1980,
    }
    found = only(twin("hgx-h100", nvml=clocks), "GPU307")
    assert "1200 MHz" in found.summary
    near = {**clocks, ("nvmlDeviceGetApplicationsClock", 2, 1): 1950}
    assert not findings(twin("hgx-h100", nvml=near), "GPU307")


def test_memory_repairs() -> None:
    topology = composed(
        "hgx-h100", gpu1={"remapped_rows": [0, 1, 1, 0]}, gpu2={"remapped_rows": [0, 9, 0, 1]}
    )
    assert [(f.severity, f.subjects) for f in findings(topology, "GPU308")] == [
        ("error", ["gpu2"]),
        ("warning", ["gpu1"]),
    ]
    done = composed("hgx-h100", gpu1={"remapped_rows": [3, 1, 0, 0]})
    assert not findings(done, "GPU308")


def test_page_retirement_before_ampere() -> None:
    pending = {("nvmlDeviceGetRetiredPagesPendingStatus", 5): 1}
    found = only(twin("dgx-1-v100", nvml=pending), "GPU308")
    assert (found.severity, found.subjects) == ("warning", ["gpu5"])


def test_ecc_off_matters_where_there_is_ecc() -> None:
    found = only(composed("hgx-h100", gpu6={"ecc": False}), "GPU308")
    assert (found.severity, found.subjects) == ("warning", ["gpu6"])
    off = {("nvmlDeviceGetEccMode", 0): [0, 0]}
    assert not findings(twin("rtx4090-workstation", nvml=off), "GPU308")


def test_nouveau_and_no_driver() -> None:
    nouveau = only(composed("hgx-h100", gpu1={"driver": "nouveau"}), "GPU309")
    assert (nouveau.severity, nouveau.subjects) == ("error", ["gpu@0000:3b:00.0"])
    unbound = only(composed("hgx-h100", gpu1={"driver": ""}), "GPU309")
    assert (unbound.severity, unbound.subjects) == ("error", ["gpu@0000:3b:00.0"])


def test_a_source_without_driver_links_tells_nothing() -> None:
    facts = twin("hgx-h100").facts
    pci = known(facts.pci)
    assert pci is not None
    bare = [replace(function, driver=ABSENT) for function in pci.functions]
    topology = build(replace(facts, pci=replace(pci, functions=bare)))
    assert "names its driver" in skipped(topology, "GPU309")


# What they share


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (["gpu0"], "gpu0"),
        (["gpu0", "gpu1"], "gpu0, gpu1"),
        (["gpu0", "gpu1", "gpu2", "gpu5", "mlx5_0"], "gpu0-2, gpu5, mlx5_0"),
        (["0000:17:00.0", "machine"], "0000:17:00.0, machine"),
        (["gpu@0000:19:00.0"], "gpu@0000:19:00.0"),
        ([], ""),
    ],
)
def test_ids_in_a_line(ids: list[str], text: str) -> None:
    assert listed(ids) == text


@pytest.mark.parametrize(
    ("name", "line", "form"),
    [
        ("NVIDIA H100 80GB HBM3", "data-center", "module"),
        ("NVIDIA H100 PCIe", "data-center", "card"),
        ("NVIDIA H200 NVL", "data-center", "card"),
        ("NVIDIA A100-SXM4-40GB", "data-center", "module"),
        ("NVIDIA A100-PCIE-40GB", "data-center", "card"),
        ("NVIDIA GB200", "data-center", "superchip"),
        ("NVIDIA GH200 480GB", "data-center", "superchip"),
        ("NVIDIA GB10", None, "card"),
        ("Tesla V100-SXM2-32GB", "data-center", "module"),
        ("NVIDIA L40S", "data-center", "card"),
        ("NVIDIA GeForce RTX 4090", "geforce", "card"),
        ("NVIDIA RTX A6000", "professional", "card"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "data-center", "card"),
        (None, None, None),
    ],
)
def test_what_a_name_tells(name: str | None, line: str | None, form: str | None) -> None:
    assert (line_of(name), form_of(name)) == (line, form)


def test_a_display_card_that_the_driver_is_too_new_for() -> None:
    facts = twin("hgx-h100").facts
    pci = known(facts.pci)
    assert pci is not None
    first = next(function for function in pci.functions if function.is_gpu)
    card = replace(first, address="0000:16:1e.0", class_code=0x030000, driver=ABSENT)
    functions = [*pci.functions, card]
    topology = build(replace(facts, pci=replace(pci, functions=functions)))
    assert only(topology, "GPU309").severity == "warning"
