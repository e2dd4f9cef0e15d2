"""GPU: the driver as a whole."""

from __future__ import annotations

from collections.abc import Iterator

from gputopo.facts import Missing, known
from gputopo.probes.pci import DEVICES
from gputopo.rules.common import is_isolated, listed
from gputopo.rules.finding import Evidence, Remedy, Severity, Verdict
from gputopo.rules.registry import rule
from gputopo.topology.graph import Topology

MISMATCH = "NVML LIB_RM_VERSION_MISMATCH"
"""GPU303 has this one."""

MEANINGS: dict[str, tuple[str, Severity]] = {
    "NVML DRIVER_NOT_LOADED": ("the driver does not answer: no program can use a GPU", "error"),
    "NVML LIBRARY_NOT_FOUND": ("the driver's library libnvidia-ml.so.1 is not found", "warning"),
    "NVML NO_PERMISSION": ("this user may not ask the driver", "warning"),
}
"""What nvmlInit's refusals mean while the kernel driver has GPUs (nvmlReturn_t), and how bad."""


@rule(
    code="GPU310",
    name="driver-silent",
    severity="error",
    needs=("pci",),
    rationale="""
        GPUs are on the bus and the kernel driver has them, but its library cannot be started. Then
        nothing can be told of NVLinks, memory, errors or clocks, and most programs cannot use the
        GPUs either. That is a finding, not a gap in the report: it must not pass a check.
    """,
    verify="nvidia-smi -L; ls -l /dev/nvidia*; ldconfig -p | grep libnvidia-ml",
    mend="""
        Driver not loaded: look at the kernel log, load the module, reboot. Library not found:
        install the driver's user-space part of the module's version; into a container, mount it
        (NVIDIA container toolkit). No permission: the rights of /dev/nvidia*.
    """,
    sources=("NVML API reference: nvmlInit_v2, nvmlReturn_t",),
)
def driver_silent(topology: Topology) -> Iterator[Verdict]:
    nvml = topology.facts.nvml
    bound = [gpu for gpu in topology.gpus if gpu.driver == "nvidia"]
    # Only what NVML itself said counts: a recording without NVML answers proves nothing.
    if not isinstance(nvml, Missing) or not nvml.detail.startswith("NVML ") or not bound:
        return
    if nvml.detail == MISMATCH:
        return
    said = nvml.detail.removeprefix("NVML ")
    what, severity = MEANINGS.get(nvml.detail, ("the driver's library does not start", "error"))
    nodes = [gpu.id for gpu in bound]
    system = known(topology.facts.system)
    module = known(system.nvidia_driver) if system is not None else None
    yield Verdict(
        severity=severity,
        subjects=nodes,
        summary=f"{listed(nodes)} have the kernel driver, but {what} (NVML {said})",
        evidence=[
            Evidence(source="nvmlInit", seen=f"NVML_ERROR_{said}", expected="success"),
            Evidence(
                source=f"{DEVICES}/{bound[0].pci}/driver",
                seen="nvidia",
                expected="nvidia, and a driver that answers",
            ),
            Evidence(
                source="/proc/driver/nvidia/version",
                seen=module or "unknown",
                expected="the version of libnvidia-ml.so.1",
            ),
        ],
        confidence="reported",
        remedy=_remedy(said, isolated=is_isolated(topology)),
    )


def _remedy(said: str, *, isolated: bool) -> Remedy:
    look = ["nvidia-smi -L", "ls -l /dev/nvidia*", "ldconfig -p | grep libnvidia-ml"]
    if said == "LIBRARY_NOT_FOUND":
        return Remedy(
            text=(
                "Start the container with the NVIDIA container toolkit, which mounts the library."
                if isolated
                else "Install the driver's libraries of the kernel module's version."
            ),
            commands=look,
            needs="root to install",
        )
    if said == "NO_PERMISSION":
        return Remedy(
            text="Ask as a user who may open /dev/nvidiactl, or give this one the right.",
            commands=look,
            needs="whoever owns the device files",
        )
    return Remedy(
        text="Read what the driver logged, then load it anew or reboot.",
        commands=["dmesg | grep -iE 'nvrm|nvidia' | tail -30", *look],
        needs="root to read the log on most systems",
    )
