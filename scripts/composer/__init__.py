"""Puts whole machines together from short descriptions, as recordings that gputopo can read.

``compose`` turns a description (the content of a ``fixtures/NAME.toml``) into the answers of a
recording: /sys, /proc and /dev, NVML's answers and command outputs, all of one machine. The fault
injector edits a description and composes the broken twin.
"""

from __future__ import annotations

from typing import Any

from composer import driver, matrix, pci, processors, system
from composer.description import DescriptionError, Machine, read
from composer.files import Files
from composer.layout import Layout, place
from gputopo.facts import Fact, Missing
from gputopo.host.base import Output
from gputopo.host.recording import Answers, Header
from gputopo.probes import kernel_log
from gputopo.probes.numa import NUMACTL
from gputopo.probes.nvidia_smi import COMMAND
from gputopo.probes.system import SYSTEMCTL

__all__ = ["DescriptionError", "Layout", "Machine", "compose"]

LOST = (
    "Unable to determine the device handle for GPU{}: GPU is lost.  Reboot the system to recover "
    "this GPU"
)
"""All that nvidia-smi says when one GPU fell off the bus; it exits with NVML's code, 15."""


def compose(description: dict[str, Any]) -> Answers:
    """The recording of a described machine. Raises DescriptionError where it cannot be built."""
    machine = read(description)
    layout = place(machine)
    near = [gpu.node for gpu in layout.gpus if gpu.settings.memory_node is not None]
    cpus = processors.Processors(machine, near)
    files = Files()
    processors.write(files, cpus)
    pci.write(files, layout, cpus)
    system.write(files, layout, cpus)
    commands: dict[tuple[str, ...], Fact[Output]] = {
        tuple(NUMACTL): Output(0, matrix.numactl(cpus), ""),
        tuple(SYSTEMCTL): system.services(machine),
        tuple(COMMAND): Missing("absent", "not installed"),
    }
    if machine.driver:
        refused = Output(1, "", "dmesg: read kernel buffer failed: Operation not permitted\n")
        commands[tuple(kernel_log.COMMAND)] = Output(0, "", "") if machine.root else refused
    lost = next((gpu for gpu in layout.gpus if gpu.settings.error == "GPU_IS_LOST"), None)
    if lost is not None:
        commands[tuple(COMMAND)] = Output(15, f"{LOST.format(lost.address)}\n", "")
    elif machine.driver:
        commands[tuple(COMMAND)] = Output(0, matrix.topology(layout, cpus), "")
    header = Header(
        format=1,
        tool="composer",
        captured_at=machine.captured_at,
        kernel=machine.kernel,
        note="put together from a description, not recorded on a machine",
    )
    return Answers(header, files.finish(), commands, driver.answers(layout, cpus))
