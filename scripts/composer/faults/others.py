"""VIR and PRB: virtual machines and containers; the probes themselves."""

from __future__ import annotations

import re

from composer.driver import gpu_part
from composer.faults.registry import Subjects, fault
from composer.twin import Twin
from gputopo.facts import Missing
from gputopo.host.base import Output
from gputopo.host.recording import Answers, nvml_key
from gputopo.probes import numa, nvidia_smi
from gputopo.probes.system import SHM_COMMAND

NOT_SUPPORTED = 5
"""nvmlGpuP2PStatus_t."""


@fault("VIR901", quiet=True)
def machine_is_virtual(twin: Twin) -> Subjects | None:
    """The same devices, passed through to a virtual machine."""
    if not twin.bare_metal:
        return None
    twin.machine["hypervisor"] = "kvm"
    twin.machine.setdefault("dmi", {})["sys_vendor"] = "QEMU"
    return ["machine"]


@fault("VIR902")
def memlock_small(twin: Twin) -> Subjects | None:
    """A process may lock 64 KiB of memory, and RDMA locks all that it registers."""
    if not twin.layout.hcas() or not twin.gpus:
        return None
    twin.machine["memlock_kib"] = 64
    return ["machine"]


@fault("VIR902")
def shared_memory_small(twin: Twin) -> Subjects | None:
    """A container has 64 MiB of shared memory, as Docker gives it."""
    if not twin.gpus:
        return None
    twin.machine["cgroup"] = "0::/docker/8f2b4c"
    head = "Filesystem     1024-blocks      Used Available Capacity Mounted on\n"
    row = "shm                  65536         0     65536       0% /dev/shm\n"
    twin.command(SHM_COMMAND, Output(0, head + row, ""))
    return ["machine"]


@fault("VIR903", quiet=True)
def mig_on(twin: Twin) -> Subjects | None:
    """A GPU is partitioned, which takes its peer-to-peer access away."""
    gpu = twin.last_gpu()
    if gpu is None or not gpu_part(gpu).mig:
        return None
    index = twin.gpus.index(gpu)
    for other in range(index):
        twin.refuse_peers(other, index, NOT_SUPPORTED)
    return twin.changed(gpu, mig=True)


@fault("PRB001")
def gpu_hangs_its_caller(twin: Twin) -> Subjects | None:
    """A call on a GPU does not come back; nothing is asked of the driver after that."""
    gpu = twin.last_gpu()
    if gpu is None:
        return None
    index = twin.gpus.index(gpu)
    hung = Missing("timeout", "no answer within 5 s")
    unasked = Missing("timeout", "not asked: the driver hung before")

    def put(answers: Answers) -> None:
        for key in answers.nvml:
            call, *arguments = key
            own = arguments[:1] == [index] and call not in _CACHED
            pair = call in ("nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetP2PStatus")
            if own or pair:
                answers.nvml[key] = unasked
        answers.nvml[nvml_key("nvmlDeviceGetName", (index,))] = hung
        answers.commands[tuple(nvidia_smi.COMMAND)] = unasked

    twin.edit(put)
    return ["machine"]


_CACHED = ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo")
"""What the library answers itself, without asking the driver."""


@fault("PRB002")
def topo_is_garbled(twin: Twin) -> Subjects | None:
    """``nvidia-smi topo -m`` prints a table that nobody can read."""
    if not twin.gpus:
        return None

    def put(answers: Answers) -> None:
        told = answers.commands[tuple(nvidia_smi.COMMAND)]
        assert isinstance(told, Output)
        text = re.sub(r"\t(?:SYS|NODE|PHB|PXB|PIX|NV\d+)\b", "\t??", told.stdout)
        answers.commands[tuple(nvidia_smi.COMMAND)] = Output(0, text.replace(" X ", " ? "), "")

    twin.edit(put)
    return ["machine"]


@fault("PRB002")
def nvml_answer_is_garbled(twin: Twin) -> Subjects | None:
    """The driver answers with bytes that are no PCI address."""
    gpu = twin.last_gpu()
    if gpu is None:
        return None
    garbage = {"busId": "\ufffd\ufffd\x01:??", "pciDeviceId": "0x", "domain": -1}
    twin.nvml("nvmlDeviceGetPciInfo", twin.gpus.index(gpu), answer=garbage)
    return ["machine"]


@fault("PRB003", quiet=True)
def ancestor_told_otherwise(twin: Twin) -> Subjects | None:
    """The driver sees another common ancestor of two GPUs than the PCI tree has."""
    if len(twin.gpus) < 2:
        return None
    a, b = len(twin.gpus) - 2, len(twin.gpus) - 1
    told = 50 if twin.path_class(twin.gpus[a], twin.gpus[b]) in ("PIX", "PXB", "PHB") else 10
    twin.nvml("nvmlDeviceGetTopologyCommonAncestor", a, b, answer=told)
    return [f"gpu{a}", f"gpu{b}"]


@fault("PRB003", quiet=True)
def numactl_told_otherwise(twin: Twin) -> Subjects | None:
    """``numactl`` gives the first node other CPUs than sysfs does."""
    twin.command(numa.NUMACTL, Output(0, "available: 1 nodes (0)\nnode 0 cpus: 0\n", ""))
    return ["numa0"]
