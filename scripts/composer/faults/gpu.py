"""GPU: driver and device state."""

from __future__ import annotations

from composer.driver import gpu_part
from composer.faults.registry import Subjects, fault
from composer.twin import Twin
from gputopo.host.base import Output
from gputopo.host.recording import Answers, nvml_error, nvml_key
from gputopo.probes import kernel_log, nvidia_smi


@fault("GPU301")
def persistence_off(twin: Twin) -> Subjects | None:
    """The driver lets go of a GPU whenever nobody uses it."""
    gpu = twin.last_gpu()
    if gpu is None or not gpu_part(gpu).ecc:
        return None
    return twin.changed(gpu, persistence=False)


@fault("GPU302", also=("NVL401", "NVL402", "NVL404"))
def gpu_missing_from_nvml(twin: Twin) -> Subjects | None:
    """The driver is bound to a GPU and does not list it: it failed to come up."""
    gpu = twin.last_gpu()
    if gpu is None:
        return None
    without = Twin(twin.description)
    without.change(gpu.address, driver="")

    def put(answers: Answers) -> None:
        other = without.answers()
        answers.nvml, answers.commands = other.nvml, other.commands
        if len(twin.gpus) == 1:
            none = Output(6, "No devices were found\n", "")  # NVML_ERROR_NOT_FOUND
            answers.commands[tuple(nvidia_smi.COMMAND)] = none

    twin.edit(put)
    return [f"gpu@{gpu.address}"]


@fault("GPU302", also=("NVL401", "NVL402", "NVL404", "PCI103", "NIC506"))
def gpu_not_on_the_bus(twin: Twin) -> Subjects | None:
    """One module of a baseboard of eight did not come up on PCIe."""
    gpu = twin.last_gpu()
    if gpu is None or not twin.bare_metal or len(twin.gpus) < 8 or not gpu_part(gpu).nvlink_links:
        return None
    twin.change(gpu.address, absent=True)
    return ["machine"]


@fault("GPU303")
def library_newer_than_the_module(twin: Twin) -> Subjects | None:
    """The driver was updated on disk; the old kernel module still runs."""
    if not twin.gpus:
        return None

    def put(answers: Answers) -> None:
        answers.nvml = {nvml_key("nvmlInit", ()): nvml_error("LIB_RM_VERSION_MISMATCH")}

    twin.edit(put)
    said = "Failed to initialize NVML: Driver/library version mismatch\n"
    twin.command(nvidia_smi.COMMAND, Output(18, said, ""))
    return ["machine"]


@fault("GPU310")
def driver_does_not_start(twin: Twin) -> Subjects | None:
    """The kernel has bound its driver to the GPUs, and the library says that none is loaded."""
    if not twin.gpus:
        return None

    def put(answers: Answers) -> None:
        answers.nvml = {nvml_key("nvmlInit", ()): nvml_error("DRIVER_NOT_LOADED")}

    twin.edit(put)
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    twin.command(nvidia_smi.COMMAND, Output(9, said, ""))
    return [f"gpu{index}" for index, _ in enumerate(twin.gpus)]


@fault("GPU306", also=("PCI102",))
def gpu_too_hot(twin: Twin) -> Subjects | None:
    """A GPU that works lowers its clocks, for its hardware says that it is too hot."""
    gpu = twin.last_gpu()
    if gpu is None:
        return None
    return twin.changed(
        gpu,
        clock_reasons=0x48,
        performance_state=0,
        processes=[{"pid": 4242, "memory": 1024}],
    )


@fault("GPU304")
def gpu_lost(twin: Twin) -> Subjects | None:
    """A GPU fell off the bus: every call on it answers so."""
    gpu = twin.last_gpu()
    return None if gpu is None else twin.changed(gpu, error="GPU_IS_LOST")


@fault("GPU304")
def gpu_needs_reset(twin: Twin) -> Subjects | None:
    """A GPU answers nothing until it is reset."""
    gpu = twin.last_gpu()
    return None if gpu is None else twin.changed(gpu, error="RESET_REQUIRED")


@fault("GPU304")
def gpu_asks_for_a_reset(twin: Twin) -> Subjects | None:
    """A GPU works, and its driver asks to reset it."""
    gpu = twin.last_gpu()
    if gpu is None or twin.driver_branch < 570:
        return None
    return twin.changed(gpu, recovery_action=1)


@fault("GPU305")
def xid_79_in_the_kernel_log(twin: Twin) -> Subjects | None:
    """The kernel log has that a GPU fell off the bus."""
    gpu = twin.last_gpu()
    if gpu is None:
        return None
    _log(twin, f"NVRM: Xid (PCI:{gpu.address[:-2]}): 79, GPU has fallen off the bus.")
    return [twin.node_id(gpu)]


@fault("GPU305")
def xid_48_in_the_kernel_log(twin: Twin) -> Subjects | None:
    """The kernel log has a double-bit memory error of a GPU."""
    gpu = twin.last_gpu()
    if gpu is None or not gpu_part(gpu).ecc:
        return None
    where = f"PCI:{gpu.address[:-2]}"
    _log(twin, f"NVRM: Xid ({where}): 48, pid=2931, name=python3, DBE (double bit error) detected.")
    return [twin.node_id(gpu)]


@fault("GPU305")
def fatal_pcie_error_in_the_kernel_log(twin: Twin) -> Subjects | None:
    """The kernel log has a fatal error of the port above a GPU."""
    gpu = twin.last_gpu()
    port = twin.port_above(gpu) if gpu is not None else None
    if port is None:
        return None
    error = "PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)"
    _log(twin, f"pcieport {port.address}: AER: {error}")
    return [port.address]


@fault("GPU305")
def fatal_sxid_in_the_kernel_log(twin: Twin) -> Subjects | None:
    """The kernel log has a fatal error of an NVSwitch."""
    switches = twin.layout.of_kind("nvswitch")
    if not switches:
        return None
    where = f"nvidia-nvswitch0: SXid (PCI:{switches[0].address})"
    _log(twin, f"{where}: 20034, Fatal, Link 30 LTSSM Fault Up")
    return ["nvswitch0"]


@fault("GPU307")
def power_limit_halved(twin: Twin) -> Subjects | None:
    """One of several GPUs may draw half of what it is made for."""
    gpu = twin.last_gpu()
    if gpu is None or len(twin.gpus) < 2:
        return None
    halved = 500 * gpu_part(gpu).power_w
    twin.nvml("nvmlDeviceGetEnforcedPowerLimit", twin.gpus.index(gpu), answer=halved)
    return [twin.node_id(gpu)]


@fault("GPU308")
def row_remapping_pending(twin: Twin) -> Subjects | None:
    """A GPU waits for a reset to put a spare in the place of a bad row of memory."""
    return _rows(twin, [0, 1, 1, 0])


@fault("GPU308")
def row_remapping_failed(twin: Twin) -> Subjects | None:
    """A GPU has no spare row left for a bad one."""
    return _rows(twin, [0, 512, 0, 1])


@fault("GPU308")
def page_retirement_pending(twin: Twin) -> Subjects | None:
    """A GPU of the time before row remapping waits for a reset to retire a page."""
    gpu = twin.last_gpu()
    if gpu is None or not gpu_part(gpu).ecc or gpu_part(gpu).row_remapping:
        return None
    twin.nvml("nvmlDeviceGetRetiredPagesPendingStatus", twin.gpus.index(gpu), answer=1)
    return [twin.node_id(gpu)]


@fault("GPU308")
def ecc_off(twin: Twin) -> Subjects | None:
    """A data-centre GPU runs without error correction."""
    gpu = twin.last_gpu()
    return twin.changed(gpu, ecc=False) if gpu is not None and gpu_part(gpu).ecc else None


@fault("GPU309", also=("NVL401", "NVL402", "NVL404"), quiet=True)
def gpu_bound_to_vfio(twin: Twin) -> Subjects | None:
    """One GPU is set aside for a virtual machine; its siblings are not."""
    return _bound(twin, "vfio-pci")


@fault("GPU309", also=("NVL401", "NVL402", "NVL404"))
def gpu_bound_to_nouveau(twin: Twin) -> Subjects | None:
    """The kernel's own driver has taken a GPU."""
    return _bound(twin, "nouveau")


@fault("GPU309", also=("NVL401", "NVL402", "NVL404"))
def gpu_without_a_driver(twin: Twin) -> Subjects | None:
    """No driver is bound to a GPU."""
    return _bound(twin, "")


def _rows(twin: Twin, rows: list[int]) -> Subjects | None:
    gpu = twin.last_gpu()
    if gpu is None or not gpu_part(gpu).row_remapping:
        return None
    return twin.changed(gpu, remapped_rows=rows)


def _bound(twin: Twin, driver: str) -> Subjects | None:
    """One of several GPUs with another driver: a machine whose only GPU has one is meant so."""
    gpu = twin.last_gpu()
    if gpu is None or len(twin.gpus) < 2:
        return None
    twin.change(gpu.address, driver=driver)
    return [f"gpu@{gpu.address}"]


def _log(twin: Twin, *lines: str) -> None:
    """A kernel log that holds these lines."""
    text = "".join(f"[{1200.5 + number:12.6f}] {line}\n" for number, line in enumerate(lines))
    twin.command(kernel_log.COMMAND, Output(0, text, ""))
