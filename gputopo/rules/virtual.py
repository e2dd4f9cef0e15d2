"""VIR: virtual machines and containers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gputopo.facts import Missing, known
from gputopo.probes.system import DMI, SHM_COMMAND
from gputopo.rules.common import is_isolated, is_virtual, listed, plural
from gputopo.rules.finding import Cost, Evidence, Remedy, Skip, Verdict
from gputopo.rules.registry import rule
from gputopo.topology.graph import Topology
from gputopo.topology.model import Gpu, HostBridge, PciBridge

ENOUGH = 1 << 30
"""Bytes of locked memory and of /dev/shm below which a container is told: NCCL's user guide asks
for 1 GiB of shared memory and unlimited locked memory."""

_VGPU = re.compile(r"-\d{1,3}(?:-\d{1,3})?[ABCQ](?:ME|VME)?$")
"""The end of a vGPU type's name: ``NVIDIA A40-48Q``, ``GRID V100D-8C``, ``NVIDIA A100-4-20C``."""


@rule(
    code="VIR901",
    name="virtual-machine",
    severity="note",
    needs=("cpu",),
    rationale="""
        In a virtual machine the PCIe tree, the NUMA nodes and the width of ports are what the
        hypervisor made up: switches are flattened, nodes may be missing, and devices that share a
        switch look far apart. Rules about ports, ACS and the IOMMU are not asked there. Tools
        inside, NCCL first, need to be told what the hardware is. A root partition of Hyper-V or Xen
        counts as virtual too: its CPU flag says so.
    """,
    verify="grep -m1 -o hypervisor /proc/cpuinfo; cat /sys/class/dmi/id/{sys_vendor,product_name}",
    mend="""
        Pass NUMA nodes and pinned CPUs to the guest, use the provider's NCCL topology file
        (NCCL_TOPO_FILE), and measure instead of trusting the tree.
    """,
    sources=(
        "NVIDIA/nccl issues 1464 and 1674: virtual machines much slower than bare metal",
        "NVIDIA NCCL user guide: NCCL_TOPO_FILE",
        "Linux: the hypervisor flag in /proc/cpuinfo (CPUID leaf 1, ECX bit 31)",
    ),
)
def virtual_machine(topology: Topology) -> Iterator[Verdict]:
    if topology.host.virtualization is None and topology.host.architecture in (None, "unknown"):
        raise Skip("what the CPU is cannot be told, nor whether a hypervisor is under it")
    if not is_virtual(topology):
        return
    devices = [*topology.gpus, *topology.physical_hcas]
    hidden: list[str] = []
    if devices and not any(True for _ in topology.of(PciBridge)):
        bridges = sum(1 for _ in topology.of(HostBridge))
        hidden.append(f"no PCIe switch among {bridges} host bridges")
    lost = [node.id for node in devices if node.numa is None]
    if lost:
        hidden.append(f"no NUMA node for {listed(lost)}")
    tail = f" ({'; '.join(hidden)})" if hidden else ""
    yield Verdict(
        subjects=["machine"],
        summary=(
            f"this is a virtual machine ({topology.host.virtualization}): what it shows of PCIe "
            f"and NUMA is the hypervisor's choice{tail}"
        ),
        evidence=_of_hypervisor(topology),
        confidence="reported",
        remedy=Remedy(
            text=(
                "Give NCCL the provider's topology file for this kind of machine, and pass NUMA "
                "nodes to the guest."
                if len(topology.gpus) > 1
                else "None needed for a single GPU."
                if topology.gpus
                else "None needed."
            ),
            commands=["export NCCL_TOPO_FILE=/path/to/the/provider's/file.xml"]
            if len(topology.gpus) > 1
            else [],
        ),
    )


def _of_hypervisor(topology: Topology) -> list[Evidence]:
    cpu, system = known(topology.facts.cpu), known(topology.facts.system)
    model = known(cpu.model) if cpu is not None else None
    shown: list[Evidence] = []
    if model is not None and model.hypervisor:
        shown.append(
            Evidence(source="/proc/cpuinfo, flags", seen="hypervisor", expected="no such flag")
        )
    vendor = known(system.vendor) if system is not None else None
    product = known(system.product) if system is not None else None
    if vendor or product:
        shown.append(
            Evidence(
                source=f"{DMI}/{{sys_vendor,product_name}}",
                seen=", ".join(word for word in (vendor, product) if word),
                expected="the maker of a server",
            )
        )
    return shown


@rule(
    code="VIR902",
    name="container-limits",
    severity="warning",
    needs=("system",),
    rationale="""
        RDMA locks the memory that it registers, and NCCL shares memory between processes through
        /dev/shm. A container, or a shell with the usual limits, allows a few MiB of the one and 64
        MiB of the other: registration and start-up fail, or a slower way is taken. A process with
        CAP_IPC_LOCK may lock what it wants. The limit is the one of the process that scans, which
        the jobs that it starts inherit; shared memory is looked at in containers only.
    """,
    verify="ulimit -l; df -h /dev/shm",
    mend="""
        docker run --ulimit memlock=-1 --shm-size=1g (or --ipc=host); in Kubernetes an emptyDir of
        medium Memory at /dev/shm and the capability IPC_LOCK; on hosts LimitMEMLOCK=infinity for
        the daemon that starts the jobs.
    """,
    sources=(
        "NVIDIA NCCL user guide, troubleshooting: shared memory and memlock in containers",
        "Linux: getrlimit(2), RLIMIT_MEMLOCK; capabilities(7), CAP_IPC_LOCK",
    ),
)
def container_limits(topology: Topology) -> Iterator[Verdict]:
    system = known(topology.facts.system)
    assert system is not None
    if not topology.gpus:
        return
    unknown: list[str] = []
    if topology.physical_hcas and known(system.may_lock) is not True:
        limit = system.memlock_bytes
        if isinstance(limit, Missing):
            unknown.append(f"the limit of locked memory: {limit}")
        elif 0 <= limit < ENOUGH:
            yield _memlock(topology, limit)
    shm = system.shm_bytes
    if isinstance(shm, Missing):
        if shm.reason != "unsupported" and is_isolated(topology):
            unknown.append(f"the size of /dev/shm: {shm}")
    elif shm < ENOUGH:
        yield _shm(shm)
    if unknown:
        raise Skip("; ".join(unknown))


def _memlock(topology: Topology, limit: int) -> Verdict:
    inside = is_isolated(topology)
    return Verdict(
        subjects=["machine"],
        summary=(
            f"processes {'in this container' if inside else 'started from here'} may lock "
            f"{_size(limit)} of memory: RDMA cannot register more"
        ),
        evidence=[
            Evidence(
                source="/proc/self/limits, Max locked memory",
                seen=_size(limit),
                expected="unlimited, or at least 1 GiB",
            )
        ],
        confidence="reported",
        cost=Cost(text="RDMA fails or is not used", derivation="it locks what it registers"),
        remedy=Remedy(
            text="Start the container with unlimited locked memory."
            if inside
            else "Raise the limit for whoever starts jobs; log in anew.",
            commands=["docker run --ulimit memlock=-1 ..."]
            if inside
            else ["echo '* - memlock unlimited' > /etc/security/limits.d/90-rdma.conf"],
            needs="a restart of the container" if inside else "root",
            undo="" if inside else "rm /etc/security/limits.d/90-rdma.conf",
        ),
    )


def _shm(size: int) -> Verdict:
    return Verdict(
        subjects=["machine"],
        summary=f"the shared memory of this container is {_size(size)}: little for several GPUs",
        evidence=[
            Evidence(source=" ".join(SHM_COMMAND), seen=_size(size), expected="1 GiB or more")
        ],
        confidence="reported",
        cost=Cost(
            text="NCCL fails to start or workers of data loaders die",
            derivation="both keep their buffers there",
        ),
        remedy=Remedy(
            text="Start the container with more shared memory, or with the host's.",
            commands=["docker run --shm-size=1g ...", "docker run --ipc=host ..."],
            needs="a restart of the container",
        ),
    )


def _size(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} bytes"


@rule(
    code="VIR903",
    name="mig-or-vgpu",
    severity="note",
    needs=("nvml",),
    rationale="""
        A GPU that is divided into instances (MIG) has no peer-to-peer access, neither over NVLink
        nor over PCIe, and a program uses one instance at most. A vGPU is a share that the
        hypervisor hands out. Missing NVLinks and refused peers follow from that and are no faults.
    """,
    verify="nvidia-smi --query-gpu=index,name,mig.mode.current --format=csv; nvidia-smi -L",
    mend="nvidia-smi -i INDEX -mig 0 gives a whole GPU back, once no job runs on it.",
    sources=(
        "NVIDIA Multi-Instance GPU user guide: no GPU-to-GPU peer access",
        "NVIDIA/nccl issue 1716, NVIDIA/k8s-device-plugin issue 296",
        "NVIDIA virtual GPU software user guide: names of vGPU types",
    ),
)
def mig_or_vgpu(topology: Topology) -> Iterator[Verdict]:
    mig = [gpu for gpu in topology.gpus if gpu.mig_mode]
    if mig:
        yield _mig(mig)
    shares = [gpu for gpu in topology.gpus if _VGPU.search(gpu.name or "")]
    if shares:
        ids = [gpu.id for gpu in shares]
        yield Verdict(
            subjects=ids,
            summary=(
                f"{listed(ids)} {plural(ids, 'is a vGPU', 'are vGPUs')}: shares of GPUs that the "
                "hypervisor hands out"
            ),
            evidence=[
                Evidence(
                    source=f"nvmlDeviceGetName({gpu.index})",
                    seen=gpu.name or "",
                    expected="the name of a whole GPU",
                )
                for gpu in shares
            ],
            confidence="inferred",
            remedy=Remedy(text="None needed."),
        )


def _mig(gpus: list[Gpu]) -> Verdict:
    ids = [gpu.id for gpu in gpus]
    instances = sum(len(gpu.mig) for gpu in gpus)
    return Verdict(
        subjects=ids,
        summary=(
            f"{listed(ids)} {plural(ids, 'is', 'are')} in MIG mode with {instances} "
            f"instance{'' if instances == 1 else 's'}: no peer-to-peer access between GPUs"
        ),
        evidence=[
            Evidence(
                source=f"nvmlDeviceGetMigMode({gpu.index})", seen="enabled", expected="disabled"
            )
            for gpu in gpus
        ],
        confidence="reported",
        remedy=Remedy(
            text="None, if it is meant; else give the whole GPUs back.",
            commands=[f"nvidia-smi -i {gpu.pci or gpu.index} -mig 0" for gpu in gpus],
            needs="root; no job on the GPU, and perhaps a reset of it",
            undo="; ".join(f"nvidia-smi -i {gpu.pci or gpu.index} -mig 1" for gpu in gpus),
        ),
    )
