"""GPU: driver and device state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from gputopo.cpulist import render
from gputopo.facts import ABSENT, Missing, known
from gputopo.hardware import xid
from gputopo.hardware.gpu_parts import form_of, line_of
from gputopo.pciaddr import is_address, sort_key
from gputopo.probes import kernel_log
from gputopo.probes.kernel_log import LogEvent
from gputopo.probes.nvml import NvmlGpu
from gputopo.probes.pci import DEVICES, PciFacts, PciFunction
from gputopo.rules.common import (
    count,
    driver_facts,
    is_isolated,
    is_virtual,
    listed,
    nvml_of,
    plural,
    same_part,
    service_state,
)
from gputopo.rules.finding import Cost, Evidence, Remedy, Severity, Skip, Verdict
from gputopo.rules.pci_links import Untold
from gputopo.rules.registry import rule
from gputopo.topology.graph import Topology
from gputopo.topology.model import Gpu, NvSwitch

CAP_TOLERANCE = 0.05
"""Share below the default that counts as capped: half a percent of power or one step of the clock
is rounding; site policies that save energy begin at about 10 %."""

BOARD_OF_SWITCHES = {4: 8, 6: 8, 12: 16}
"""GPUs on a baseboard by its NVSwitches that are PCI functions: HGX H100/H200 has 4 for 8 GPUs, HGX
A100 and one board of a DGX-2 have 6 for 8, a whole DGX-2 has 12 for 16."""

SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Clock event reasons that are trouble (nvmlClocksEventReasons); others are policy or idleness."""

WORKING_STATE = 2
"""Highest performance state (P0 is fastest) in which a GPU counts as working."""

CONTROLLER_3D = 0x0302
"""PCI class of a GPU that has no display: nobody leaves it to nouveau, or idle, on purpose."""

FOR_GUESTS = ("vfio-pci", "nvgrace_gpu_vfio_pci", "nvgrace-gpu-vfio-pci", "pci-stub", "pciback",
              "xen-pciback")  # fmt: skip
"""Kernel drivers that hold a device so that a virtual machine can have it."""

POWER_FAILS = {
    "GPU_IS_LOST": "it fell off the bus: PCIe brings no answer",
    "RESET_REQUIRED": "it needs a reset before it can be used",
    "INSUFFICIENT_POWER": "its power cables bring too little",
    "IRQ_ISSUE": "the kernel cannot deliver its interrupts",
}
"""What NVML's refusals of a GPU mean (nvmlReturn_t)."""

RECOVERY = {
    "gpu reset": "it must be reset",
    "node reboot": "the machine must be rebooted",
    "drain p2p": "peer-to-peer jobs must end and the GPU be reset",
    "drain and reset": "its jobs must end and the GPU be reset",
    "recover imex domain": "the IMEX domain must be recovered",
    "bus reset": "its PCIe bus must be reset",
    "system reboot": "the machine must be rebooted",
}
"""What the driver asks for, in words (nvmlDeviceGpuRecoveryAction_t)."""


def calls(call: str, gpus: Iterable[NvmlGpu]) -> str:
    """An NVML call on several GPUs as one source: ``nvmlDeviceGetName(0-7)``."""
    return f"nvmlDeviceGet{call}({render(gpu.index for gpu in gpus)})"


@rule(
    code="GPU301",
    name="persistence-off",
    severity="warning",
    needs=("nvml",),
    rationale="""
        Without persistence mode the driver shuts a GPU down when its last user leaves and brings it
        up again for the next one. That costs seconds for every job and every nvidia-smi, loses
        settings such as clocks and power limits, and makes monitoring disturb what it watches. On a
        desktop the display holds the GPU open anyway. Just after boot the daemon may not have come
        up yet.
    """,
    verify="nvidia-smi --query-gpu=index,persistence_mode --format=csv",
    mend="""
        Enable the nvidia-persistenced service, which does it at every boot; `nvidia-smi -pm 1` does
        it until the next one.
    """,
    sources=(
        "NVIDIA driver persistence (docs.nvidia.com/deploy/driver-persistence)",
        "DCGM: DCGM_FR_PERSISTENCE_MODE",
        "leptonai/gpud issue 431: off right after boot is no fault",
    ),
)
def persistence_off(topology: Topology) -> Iterator[Verdict]:
    facts = driver_facts(topology)
    gpus = [gpu for gpu in topology.gpus if gpu.id in facts]
    if gpus and all(gpu.persistence is None for gpu in gpus):
        raise Skip(f"persistence mode is unknown: {facts[gpus[0].id].persistence}")
    off = [
        gpu
        for gpu in gpus
        if gpu.persistence is False
        and (line_of(gpu.name) != "geforce" or known(facts[gpu.id].processes) is not None)
    ]
    if not off or any(_shows_display(fact) for fact in facts.values()):
        return
    service = service_state(topology, "nvidia-persistenced.service")
    if service == "activating":
        raise Skip("nvidia-persistenced is starting")
    servers = [gpu for gpu in off if line_of(gpu.name) in ("data-center", "professional")]
    indices = render(facts[gpu.id].index for gpu in off)
    daemon = service in ("inactive", "failed")
    yield Verdict(
        severity="warning" if servers else "note",
        subjects=[gpu.id for gpu in off],
        summary=(
            f"persistence mode is off on {listed(gpu.id for gpu in off)}: "
            "the driver brings each up anew for every job that comes first"
        ),
        evidence=[
            Evidence(
                source=calls("PersistenceMode", (facts[gpu.id] for gpu in off)),
                seen="disabled",
                expected="enabled",
            ),
            *(
                [
                    Evidence(
                        source="systemctl", seen=f"nvidia-persistenced {service}", expected="active"
                    )
                ]
                if service and service != "active"
                else []
            ),
        ],
        confidence="reported",
        cost=Cost(
            text="seconds for each job that starts on an idle GPU, and for each nvidia-smi",
            derivation="reports of 5 s a GPU, and of 32 s for one NVML start on four V100",
        ),
        remedy=Remedy(
            text="Let the daemon keep the driver loaded"
            + (", on the host of this container." if is_isolated(topology) else "."),
            commands=[
                "systemctl enable --now nvidia-persistenced"
                if daemon
                else f"nvidia-smi -i {indices} -pm 1"
            ],
            needs="root",
            undo="systemctl disable --now nvidia-persistenced"
            if daemon
            else f"nvidia-smi -i {indices} -pm 0",
        ),
    )


def _shows_display(gpu: NvmlGpu) -> bool:
    processes = known(gpu.processes)
    return processes is not None and any(process.kind == "graphics" for process in processes)


@rule(
    code="GPU302",
    name="gpu-count-mismatch",
    severity="error",
    needs=("pci", "nvml"),
    rationale="""
        A GPU that the PCI bus has and the driver does not offer cannot be used, and jobs then start
        with fewer GPUs than they asked for or not at all. Only what the host can see is compared:
        in a container, or in a job with a device cgroup, the others are hidden on purpose, and a
        GPU that vfio-pci holds belongs to a virtual machine. A baseboard with fewer modules than it
        has places for has lost one before the kernel could find it.
    """,
    verify="lspci -d 10de: | grep -E '3D|VGA'; nvidia-smi -L; ls /proc/driver/nvidia/gpus",
    mend="""
        Read the kernel log for the missing address. Reset or power-cycle the machine; reseat or
        replace the module if it stays away.
    """,
    sources=(
        "DCGM: DCGM_FR_DEVICE_COUNT_MISMATCH",
        "Azure/azhpc-diagnostics issue 50: devices missing from nvidia-smi",
        "NVIDIA HGX A100 and H100 baseboards: 8 GPUs with 6 and 4 NVSwitches",
    ),
)
def gpu_count_mismatch(topology: Topology) -> Iterator[Verdict]:
    pci, nvml = known(topology.facts.pci), nvml_of(topology)
    assert pci is not None and nvml is not None
    here = [f for f in pci.functions if f.is_gpu and f.physical_function is None]
    bound = [function for function in here if known(function.driver) == "nvidia"]
    offered = {gpu.pci for gpu in nvml.gpus if isinstance(gpu.pci, str)}
    number = known(nvml.count)
    absent = [function for function in bound if function.address not in offered]
    if number is not None and number < len(bound) and absent:
        yield _not_offered(topology, bound, absent, number)
    if not is_isolated(topology) and not is_virtual(topology):
        for verdict in _board_incomplete(topology, here):
            blank = _unread_functions(pci)
            if blank:
                raise Skip(f"the GPUs on PCIe cannot be counted: {listed(blank)} cannot be read")
            yield verdict


def _unread_functions(pci: PciFacts) -> list[str]:
    """Addresses of PCI functions that may be GPUs: class or vendor could not be read."""
    broken = [problem.source.rpartition("/")[2] for problem in pci.problems]
    return [
        *(address for address in broken if is_address(address)),
        *(function.address for function in pci.functions if function.vendor is None),
    ]


def _not_offered(
    topology: Topology, bound: list[PciFunction], absent: list[PciFunction], number: int
) -> Verdict:
    nodes = [topology.by_pci[f.address].id for f in absent if f.address in topology.by_pci]
    names = ", ".join(function.address for function in absent)
    evidence = [
        Evidence(source="nvmlDeviceGetCount", seen=str(number), expected=str(len(bound))),
        *(
            Evidence(
                source=f"{DEVICES}/{function.address}/driver",
                seen="nvidia, but NVML does not list it",
                expected="nvidia, and listed",
            )
            for function in absent
        ),
    ]
    if is_isolated(topology):
        return Verdict(
            severity="note",
            subjects=nodes or ["machine"],
            summary=(
                f"{number} of {len(bound)} GPUs are given to this "
                f"{topology.host.container or 'container'}; the others are hidden from it"
            ),
            evidence=evidence,
            confidence="inferred",
            remedy=Remedy(text="None needed; ask the container runtime or the scheduler for more."),
        )
    return Verdict(
        subjects=nodes or ["machine"],
        summary=(
            f"the driver offers {number} of {len(bound)} GPUs; {names} "
            f"{plural(names.split(', '), 'is', 'are')} on the bus and missing"
        ),
        evidence=evidence,
        confidence="reported",
        remedy=Remedy(
            text=f"Read why the driver gave up on {names}; then reset or power-cycle the machine.",
            commands=[
                f"dmesg | grep -iE '{'|'.join(f.address for f in absent)}|NVRM'",
                *(f"nvidia-smi --gpu-reset -i {f.address}" for f in absent),
            ],
            needs="root; no job on the GPU that is reset",
        ),
    )


def _board_incomplete(topology: Topology, here: list[PciFunction]) -> Iterator[Verdict]:
    """Fewer modules than the baseboard has places: one did not even come up on PCIe."""
    modules = [gpu for gpu in topology.gpus if form_of(gpu.name) == "module"]
    switches = [switch for switch in topology.of(NvSwitch) if switch.pci is not None]
    expected = BOARD_OF_SWITCHES.get(len(switches))
    why = f"a baseboard with {len(switches)} NVSwitches carries {expected}"
    if expected is None:
        if not 4 < len(modules) < 8 or not any(_sold_as_boards(gpu) for gpu in modules):
            return
        expected, why = 8, "baseboards carry 4 or 8 modules"
    if not modules or len(here) >= expected:
        return
    facts = driver_facts(topology)
    places = {known(facts[gpu.id].module_id) for gpu in modules if gpu.id in facts}
    empty = sorted(set(range(1, expected + 1)) - places) if None not in places else []
    gone = expected - len(here)
    which = f" (module {listed(map(str, empty))})" if len(empty) == gone else ""
    yield Verdict(
        subjects=["machine"],
        summary=(
            f"{len(here)} GPUs are on PCIe where {why}: {count(gone, 'GPU')}{which} did not come up"
        ),
        evidence=[
            Evidence(
                source=f"{DEVICES} (class 0x0302, vendor 0x10de)",
                seen=str(len(here)),
                expected=str(expected),
            ),
            *(
                [
                    Evidence(
                        source=calls("ModuleId", facts.values()),
                        seen=", ".join(str(place) for place in sorted(p for p in places if p)),
                        expected=f"1-{expected}",
                    )
                ]
                if which
                else []
            ),
        ],
        confidence="inferred",
        remedy=Remedy(
            text="Power the machine off and on; if the GPU stays away, have its module reseated.",
            commands=["ipmitool sel list", "dmesg | grep -iE 'pcieport|nvrm'"],
            needs="root; a power cycle",
        ),
    )


def _sold_as_boards(gpu: Gpu) -> bool:
    """From A100 on SXM modules come as whole boards; before, single sockets could stay empty, so
    that only a neighbour's dead NVLinks tell that somebody was there."""
    return gpu.architecture not in (None, "Pascal", "Volta") or bool(
        gpu.nvlink is not None and gpu.nvlink.inactive
    )


@rule(
    code="GPU303",
    name="driver-library-mismatch",
    severity="error",
    needs=(),
    rationale="""
        The user-space library must be of the very version of the kernel module. After an unattended
        upgrade the new library meets the old module, which stays loaded until the next boot, and
        nothing on the machine can use a GPU, although all hardware is fine.
    """,
    verify="cat /proc/driver/nvidia/version; nvidia-smi",
    mend="""
        Reboot, or end all that uses the GPUs and load the new module. In a container mount the
        host's libraries instead of the image's own. Hold the packages so that it does not come
        back.
    """,
    sources=(
        "NVML API reference: NVML_ERROR_LIB_RM_VERSION_MISMATCH",
        "anderskm/gputil issue 55: the mismatch taken for a machine without GPU",
    ),
)
def driver_library_mismatch(topology: Topology) -> Iterator[Verdict]:
    nvml, system = topology.facts.nvml, known(topology.facts.system)
    if isinstance(nvml, Missing) and nvml.detail != "NVML LIB_RM_VERSION_MISMATCH":
        if not topology.gpus:
            return
        raise Skip(f"nvml: {nvml}")
    module = known(system.nvidia_driver) if system is not None else None
    if isinstance(nvml, Missing):
        seen = "NVML_ERROR_LIB_RM_VERSION_MISMATCH"
        loaded = f"the loaded kernel module {module or ''}".strip()
        summary = f"the NVIDIA library does not fit {loaded}: no program can use a GPU"
    else:
        told = known(nvml.driver)
        if module is None or told is None or module == told:
            return
        seen = told
        summary = f"the library reports driver {told}, but the kernel module is {module}"
    yield Verdict(
        subjects=["machine"],
        summary=summary,
        evidence=[
            Evidence(
                source="nvmlInit" if isinstance(nvml, Missing) else "nvmlSystemGetDriverVersion",
                seen=seen,
                expected=module or "the version of the kernel module",
            ),
            Evidence(
                source="/proc/driver/nvidia/version",
                seen=module or "unknown",
                expected="the version of libnvidia-ml.so.1",
            ),
        ],
        confidence="reported",
        remedy=Remedy(
            text=(
                "Mount the host's driver libraries into the container."
                if is_isolated(topology)
                else "Reboot, or unload and load the module once nothing uses the GPUs."
            ),
            commands=[]
            if is_isolated(topology)
            else [
                "systemctl stop nvidia-persistenced nvidia-fabricmanager",
                "modprobe -r nvidia_uvm nvidia_drm nvidia_modeset nvidia_peermem nvidia",
                "modprobe nvidia && systemctl start nvidia-persistenced nvidia-fabricmanager",
            ],
            needs="root; no process on any GPU",
        ),
    )


@rule(
    code="GPU304",
    name="gpu-lost-or-needs-reset",
    severity="error",
    needs=("nvml",),
    rationale="""
        The driver itself says that a GPU is gone or must be recovered before it is used again.
        Newer drivers name the action that helps. Health checks that only count GPUs or read
        temperatures have called such machines healthy.
    """,
    verify="nvidia-smi -q | grep -iA1 'recovery action'; nvidia-smi",
    mend="""
        Drain the node and do what the driver asks for: reset the GPU, or reboot. A GPU that falls
        off the bus again has a fault of its own, its power or its slot.
    """,
    sources=(
        "NVML API reference: NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED",
        "NVML API reference: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
        "NVIDIA/DCGM issue 263: health said Healthy of a GPU that needed a reset",
    ),
)
def gpu_lost_or_needs_reset(topology: Topology) -> Iterator[Verdict]:
    nvml = nvml_of(topology)
    assert nvml is not None
    for index, missing in sorted(nvml.lost.items()):
        if missing.reason in ("timeout", "denied"):
            continue  # a hang is the probes' own finding; what is denied belongs to somebody else
        gpu = _by_index(topology, index)
        error = missing.detail.removeprefix("NVML ")
        what = POWER_FAILS.get(error, f"the driver refuses it ({missing.detail or missing.reason})")
        where = f" at {gpu.pci}" if gpu is not None and gpu.pci else ""
        yield Verdict(
            subjects=[gpu.id if gpu is not None else "machine"],
            summary=f"GPU {index}{where} is out of use: {what}",
            evidence=[
                Evidence(
                    source=f"NVML, GPU {index}",
                    seen=missing.detail or str(missing),
                    expected="an answer",
                )
            ],
            confidence="reported",
            remedy=_recovery(gpu, "gpu reset" if error == "RESET_REQUIRED" else "node reboot"),
        )
    for node, fact in driver_facts(topology).items():
        action = known(fact.recovery_action)
        if action is None or action == "none":
            continue
        gpu = _by_index(topology, fact.index)
        wish = RECOVERY.get(action, action)
        yield Verdict(
            subjects=[node],
            summary=f"{node} at {known(fact.pci)} asks for recovery: {wish}",
            evidence=[
                Evidence(
                    source=f"nvmlDeviceGetFieldValues({fact.index}), GET_GPU_RECOVERY_ACTION",
                    seen=action,
                    expected="none",
                )
            ],
            confidence="reported",
            remedy=_recovery(gpu, action),
        )


def _by_index(topology: Topology, index: int) -> Gpu | None:
    """The GPU with an NVML index; one without an answer is told by its place in PCI order."""
    named = topology.nodes.get(f"gpu{index}")
    if isinstance(named, Gpu):
        return named
    nvml = nvml_of(topology)
    on_bus = [gpu for gpu in topology.gpus if gpu.driver == "nvidia" and gpu.pci is not None]
    if nvml is None or known(nvml.count) != len(on_bus):
        return None
    ordered = sorted(on_bus, key=lambda gpu: sort_key(gpu.pci or ""))
    return ordered[index] if index < len(ordered) else None


def _recovery(gpu: Gpu | None, action: str) -> Remedy:
    if gpu is None or gpu.pci is None:
        # Which one it is, NVML does not say: a reset of the wrong one ends somebody's job.
        return Remedy(
            text="Find out which GPU it is by the kernel log, drain the node, and reboot.",
            commands=["dmesg | grep -iE 'xid|nvrm'", "nvidia-smi -L"],
            needs="root; a reboot",
        )
    where = gpu.pci
    if action in ("node reboot", "system reboot", "bus reset"):
        return Remedy(
            text=f"Drain the node, look at the kernel log for {where}, and reboot.",
            commands=[f"dmesg | grep -iE 'xid|{where}'", "systemctl reboot"],
            needs="root; a reboot",
        )
    if action == "recover imex domain":
        return Remedy(
            text="Restart IMEX on all nodes of the domain once no job uses it.",
            commands=["systemctl restart nvidia-imex", "nvidia-imex-ctl -N"],
            needs="root",
        )
    return Remedy(
        text=(
            f"End what runs on {where} and reset it; behind NVSwitches of Ampere and older all "
            "GPUs of the board are reset together."
        ),
        commands=[f"nvidia-smi --gpu-reset -i {where}"],
        needs="root; no process on the GPU",
    )


@rule(
    code="GPU305",
    name="kernel-log-fault",
    severity="error",
    needs=("kernel_log",),
    rationale="""
        The driver logs each fault as a numbered Xid, an NVSwitch as SXid, the kernel fatal errors
        on PCIe. Many are a program's own mistakes and harmless to the machine; some mean that a GPU
        must be reset or replaced, and may be the only trace of it. An event is only as bad as what
        is left of it: of a GPU that answers and asks for no recovery, a fault earlier in this boot
        is a warning.
    """,
    verify="dmesg --level=emerg,alert,crit,err,warn | grep -E 'Xid|fallen off|PCIe Bus Error'",
    mend="""
        As the code says: look at the program, reset the GPU, service it. NVIDIA's Xid catalogue
        lists all codes with the action that each asks for.
    """,
    sources=(
        "NVIDIA Xid errors (docs.nvidia.com/deploy/xid-errors)",
        "NVIDIA fabric manager user guide, SXid errors",
        "NVIDIA/NVSentinel issue 155: GPUs fall off the bus without an Xid",
    ),
)
def kernel_log_fault(topology: Topology) -> Iterator[Verdict]:
    log = known(topology.facts.kernel_log)
    assert log is not None
    events = [event for event in log.events if not _repeats(event, log.events)]
    programs: list[LogEvent] = []
    groups: dict[tuple[str, int, bool], list[LogEvent]] = {}
    for event in events:
        if event.kind == "xid" and event.code == xid.RECOVERY_CHANGED:
            continue  # it says what another Xid led to; the driver's present wish is GPU304's
        if event.kind == "xid" and xid.meaning(event.code).concern == "application":
            programs.append(event)
        elif event.kind != "pcie" or _is_ours(topology, event.device):
            groups.setdefault((event.kind, event.code, event.fatal), []).append(event)
    for (kind, code, fatal), found in groups.items():
        yield _logged(topology, kind, code, fatal, found)
    if programs:
        yield _programs(topology, programs)


def _repeats(event: LogEvent, events: Sequence[LogEvent]) -> bool:
    """The line that goes with Xid 79."""
    return event.kind == "fell-off" and any(
        other.kind == "xid" and other.code == xid.FELL_OFF and other.device == event.device
        for other in events
    )


def _is_ours(topology: Topology, address: str) -> bool:
    """Whether a PCI function is a GPU, an NVSwitch, or a bridge above one."""
    node = topology.by_pci.get(address)
    if isinstance(node, (Gpu, NvSwitch)):
        return True
    return node is not None and any(node.id in topology.ancestors(gpu.id) for gpu in topology.gpus)


def _logged(
    topology: Topology, kind: str, code: int, fatal: bool, events: list[LogEvent]
) -> Verdict:
    name, meaning = _named(kind, code, fatal)
    nodes = [_node(topology, event.device) for event in events]
    recovered = all(_recovered(topology, node) for node in nodes)
    severity: Severity = "error" if meaning.concern == "device" and not recovered else "warning"
    times = sum(event.count for event in events)
    where = ", ".join(
        node if node != "machine" else event.device for node, event in zip(nodes, events)
    )
    addresses = "|".join(event.device.rpartition(".")[0] for event in events[:8])
    return Verdict(
        severity=severity,
        subjects=list(dict.fromkeys(nodes)),
        summary=(
            f"{name} on {where}: {meaning.what} ({_often(times)} since boot"
            f"{'; it works now' if recovered else ''})"
        ),
        evidence=[_evidence(event, name) for event in events[:8]],
        confidence="reported",
        remedy=Remedy(
            text=f"{meaning.action[:1].upper()}{meaning.action[1:]}.",
            commands=[f"dmesg --time-format iso | grep -E '{addresses}'"],
            needs="root to read the log on most systems, and to reset",
        ),
    )


def _named(kind: str, code: int, fatal: bool) -> tuple[str, xid.Meaning]:
    if kind == "xid":
        return f"Xid {code}", xid.meaning(code)
    if kind == "sxid":
        what = "a fatal NVSwitch error" if fatal else "an NVSwitch error that was survived"
        action = "reset all GPUs and NVSwitches of the board together" if fatal else "watch it"
        return f"SXid {code}", xid.Meaning("device" if fatal else "watch", what, action)
    if kind == "pcie":
        what = f"an uncorrected {'fatal' if fatal else 'non-fatal'} PCIe error"
        action = "check seating, riser and the port above"
        return "AER", xid.Meaning("device" if fatal else "watch", what, action)
    return "The driver", xid.XIDS[xid.FELL_OFF]


def _node(topology: Topology, address: str) -> str:
    """The node at an address; of a function other than 0 that the log cut away, the device's."""
    node = topology.by_pci.get(address)
    return node.id if node is not None else "machine"


def _recovered(topology: Topology, node_id: str) -> bool:
    """Whether a device answers now and nobody asks for its recovery; never so while unknown."""
    node = topology.nodes.get(node_id)
    fact = driver_facts(topology).get(node_id)
    if not isinstance(node, Gpu) or fact is None or node.lost is not None:
        return False
    rows = known(fact.remapped_rows)
    return known(fact.recovery_action) == "none" and not (rows and len(rows) > 3 and rows[3])


def _often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"


def _evidence(event: LogEvent, name: str) -> Evidence:
    when = f", last at {event.last} s after boot" if event.last is not None else ""
    return Evidence(
        source=f"{' '.join(kernel_log.COMMAND[:1])}: {event.device}",
        seen=f"{name}, {_often(event.count)}{when}: {event.text}",
        expected="none",
    )


def _programs(topology: Topology, events: list[LogEvent]) -> Verdict:
    """All events that programs brought on themselves, in one note."""
    by_code: dict[int, list[LogEvent]] = {}
    for event in events:
        by_code.setdefault(event.code, []).append(event)
    words = [
        f"Xid {code} ({_often(sum(e.count for e in found))})"
        for code, found in sorted(by_code.items())
    ]
    nodes = list(dict.fromkeys(_node(topology, event.device) for event in events))
    return Verdict(
        severity="note",
        subjects=nodes,
        summary=f"programs on {listed(nodes)} faulted or were ended since boot: {', '.join(words)}",
        evidence=[
            Evidence(
                source=f"{kernel_log.COMMAND[0]}: {listed(e.device for e in found[:8])}",
                seen=f"Xid {code}: {xid.meaning(code).what}; last: {found[-1].text}",
                expected="none, but the GPU is fine",
            )
            for code, found in sorted(by_code.items())
        ],
        confidence="reported",
        remedy=Remedy(
            text="Nothing for the machine. Look at the program, if it should not have ended.",
            commands=["dmesg | grep Xid", "compute-sanitizer PROGRAM"],
            needs="root to read the log on most systems",
        ),
    )


@rule(
    code="GPU306",
    name="clock-throttled",
    severity="warning",
    needs=("nvml",),
    rationale="""
        A GPU that is too hot, or whose board or power supply calls for less, lowers its clocks by
        itself. All that waits for it, the other GPUs of a job included, then runs at its pace. Idle
        clocks, application clocks and the software power cap are no faults, and the reasons count
        only while the GPU works. A scan takes one sample: see whether they stay.
    """,
    verify="nvidia-smi -q -d PERFORMANCE, several times while a job runs",
    mend="""
        Heat: air flow, fans, dust, the cold plate. Power brake: the power supplies and their
        budget. Hardware slowdown on one GPU alone: its power cable or the board.
    """,
    sources=(
        "NVML API reference: nvmlClocksEventReasons (0x8, 0x20, 0x40, 0x80)",
        "NVIDIA/NVSentinel issue 890: idle clocks taken for throttling",
    ),
)
def clock_throttled(topology: Topology) -> Iterator[Verdict]:
    for node_id, gpu in driver_facts(topology).items():
        reasons, state = known(gpu.clock_reasons), known(gpu.performance_state)
        processes = known(gpu.processes)
        if reasons is None or state is None or not processes or state > WORKING_STATE:
            continue
        words = [word for bit, word in SLOWDOWNS.items() if reasons & bit]
        if not words:
            continue
        yield Verdict(
            subjects=[node_id],
            summary=f"{node_id} lowers its clocks while it works: {', '.join(words)}",
            evidence=[
                Evidence(
                    source=calls("CurrentClocksEventReasons", [gpu]),
                    seen=f"{reasons:#x}",
                    expected="none of " + ", ".join(f"{bit:#x}" for bit in SLOWDOWNS),
                ),
                Evidence(
                    source=calls("PerformanceState", [gpu]),
                    seen=f"P{state}, {count(len(processes), 'process')}",
                    expected="the same, at full clocks",
                ),
            ],
            confidence="reported",
            remedy=Remedy(
                text=(
                    "See whether it stays over several samples; then look at air flow, power "
                    "supplies and the GPU's power cable."
                ),
                commands=[f"nvidia-smi -i {gpu.index} -q -d PERFORMANCE,TEMPERATURE,POWER"],
                needs="hands at the machine to mend it",
            ),
        )


@rule(
    code="GPU307",
    name="clock-or-power-capped",
    severity="warning",
    needs=("nvml",),
    rationale="""
        A power limit or an application clock below the default slows the GPU for everybody, and is
        easily forgotten after a test. Where all GPUs of a part are capped alike it is most likely a
        site's policy; one that differs from its siblings slows each job that spans them.
    """,
    verify="nvidia-smi -q -d POWER,CLOCK | grep -E 'GPU 0|Limit|Applications'",
    mend="Set the default again: `nvidia-smi -pl`, `-rac`; mind that a reboot does it too.",
    sources=(
        "DCGM: DCGM_FR_ENFORCED_POWER_LIMIT",
        "NVML API reference: nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetApplicationsClock",
    ),
)
def clock_or_power_capped(topology: Topology) -> Iterator[Verdict]:
    facts = driver_facts(topology)
    known_of = [
        known(value) is not None
        for fact in facts.values()
        for value in (fact.power_limit_mw, fact.clock_mhz)
    ]
    if facts and not any(known_of):
        first = next(iter(facts.values()))
        raise Skip(f"power limits and clocks are unknown: {first.power_limit_mw}")
    for siblings in same_part(topology.gpus).values():
        own = {gpu.id: facts[gpu.id] for gpu in siblings if gpu.id in facts}
        yield from _capped(own, "power limit", "W", _power, "EnforcedPowerLimit")
        yield from _capped(own, "application clock", "MHz", _clock, "ApplicationsClock")


_Pair = tuple[int, int] | None


def _power(gpu: NvmlGpu) -> _Pair:
    now, default = known(gpu.power_limit_mw), known(gpu.power_default_mw)
    return (now // 1000, default // 1000) if now and default else None


def _clock(gpu: NvmlGpu) -> _Pair:
    now, default = known(gpu.clock_mhz), known(gpu.clock_default_mhz)
    return (now, default) if now and default else None


def _capped(
    gpus: dict[str, NvmlGpu], what: str, unit: str, read: Callable[[NvmlGpu], _Pair], call: str
) -> Iterator[Verdict]:
    """One verdict for all GPUs of a part that are capped at one value."""
    values = {node: pair for node, gpu in gpus.items() if (pair := read(gpu)) is not None}
    alike = len(set(values.values())) == 1
    by_value: dict[tuple[int, int], list[str]] = {}
    for node, (now, default) in values.items():
        if now < default * (1 - CAP_TOLERANCE):
            by_value.setdefault((now, default), []).append(node)
    for (now, default), nodes in by_value.items():
        indices = render(gpus[node].index for node in nodes)
        share = round(100 * (1 - now / default))
        yield Verdict(
            severity="note" if alike else "warning",
            subjects=nodes,
            summary=(
                f"the {what} of {listed(nodes)} is {now} {unit}, {share} % below the default of "
                f"{default} {unit}{', on all alike' if alike and len(nodes) > 1 else ''}"
            ),
            evidence=[
                Evidence(
                    source=f"nvmlDeviceGet{call}({indices})",
                    seen=f"{now} {unit}",
                    expected=f"{default} {unit} (the default)",
                )
            ],
            confidence="reported",
            cost=Cost(
                text=f"up to {share} % of the {'clock' if unit == 'MHz' else 'power'} under load",
                derivation=f"{now} of {default} {unit}; what a job loses by it depends on the job",
            ),
            remedy=Remedy(
                text="Set the default again, if the cap is not meant.",
                commands=[
                    f"nvidia-smi -i {indices} -pl {default}"
                    if unit == "W"
                    else f"nvidia-smi -i {indices} -rac"
                ],
                needs="root",
                undo=f"nvidia-smi -i {indices} -pl {now}" if unit == "W" else "",
            ),
        )


@rule(
    code="GPU308",
    name="memory-repair-pending",
    severity="warning",
    needs=("nvml",),
    rationale="""
        A GPU takes faulty memory rows (pages, before Ampere) out of use, but only at its next
        reset; until then the fault can strike again. If a repair fails the GPU has no spare row
        left there and must be replaced. Repairs that are done are normal wear. A data-center GPU
        with ECC switched off computes on with flipped bits and tells nobody.
    """,
    verify="nvidia-smi -q -d ROW_REMAPPER,PAGE_RETIREMENT,ECC",
    mend="Reset the GPU when no job runs on it; replace it when a repair failed.",
    sources=(
        "NVIDIA GPU memory error management (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt)",
        "NVIDIA dynamic page retirement (docs.nvidia.com/deploy/dynamic-page-retirement)",
        "DCGM: DCGM_FR_ROW_REMAP_FAILURE, DCGM_FR_PENDING_ROW_REMAP",
    ),
)
def memory_repair_pending(topology: Topology) -> Iterator[Verdict]:
    facts = driver_facts(topology)
    asked = [v for f in facts.values() for v in (f.remapped_rows, f.retired_pages_pending, f.ecc)]
    if asked and all(isinstance(v, Missing) and v.reason != "unsupported" for v in asked):
        raise Skip(f"memory repairs and ECC are unknown: {asked[0]}")
    rows = {node: known(fact.remapped_rows) or [0, 0, 0, 0] for node, fact in facts.items()}
    failed = [node for node, row in rows.items() if len(row) > 3 and row[3]]
    pending = [node for node, row in rows.items() if len(row) > 3 and row[2] and not row[3]]
    pages = [node for node, fact in facts.items() if known(fact.retired_pages_pending)]
    if failed:
        yield Verdict(
            severity="error",
            subjects=failed,
            summary=(
                f"{listed(failed)}: a faulty memory row could not be repaired; no spare row is left"
            ),
            evidence=[_rows(facts[node], rows[node]) for node in failed],
            confidence="reported",
            remedy=Remedy(
                text=f"Take {listed(failed)} out of service and have it replaced.",
                commands=[f"nvidia-smi -i {facts[n].index} -q -d ROW_REMAPPER" for n in failed],
                needs="the vendor",
            ),
        )
    for nodes, evidence, thing in (
        (pending, [_rows(facts[node], rows[node]) for node in pending], "row"),
        (pages, [_pages(facts[node]) for node in pages], "page"),
    ):
        if nodes:
            yield _pending(topology, facts, nodes, evidence, thing)
    yield from _ecc(topology, facts)


def _rows(gpu: NvmlGpu, row: list[int]) -> Evidence:
    return Evidence(
        source=f"nvmlDeviceGetRemappedRows({gpu.index})",
        seen=f"corrected {row[0]}, uncorrected {row[1]}, pending {row[2]}, failed {row[3]}",
        expected="pending 0, failed 0",
    )


def _pages(gpu: NvmlGpu) -> Evidence:
    return Evidence(
        source=f"nvmlDeviceGetRetiredPagesPendingStatus({gpu.index})",
        seen="pending",
        expected="none",
    )


def _pending(
    topology: Topology,
    facts: dict[str, NvmlGpu],
    nodes: list[str],
    evidence: list[Evidence],
    thing: str,
) -> Verdict:
    return Verdict(
        subjects=nodes,
        summary=(f"{listed(nodes)}: a faulty memory {thing} stays in use until the GPU is reset"),
        evidence=evidence,
        confidence="reported",
        remedy=Remedy(
            text="Reset at the next chance, when nothing runs on the GPU."
            if not is_virtual(topology)
            else "Stop and start the virtual machine, which resets the GPU.",
            commands=[f"nvidia-smi --gpu-reset -i {facts[node].index}" for node in nodes],
            needs="root; no process on the GPU",
        ),
    )


def _ecc(topology: Topology, facts: dict[str, NvmlGpu]) -> Iterator[Verdict]:
    """ECC that is off where it belongs on, and a switch that waits for the next reset."""
    modes: dict[str, list[int]] = {}
    for gpu in topology.gpus:
        mode = known(facts[gpu.id].ecc) if gpu.id in facts else None
        if mode is not None and len(mode) == 2 and line_of(gpu.name) == "data-center":
            modes[gpu.id] = mode
    off = [node for node, mode in modes.items() if not mode[0]]
    waiting = [node for node, mode in modes.items() if mode[0] and not mode[1]]
    found: list[tuple[list[str], Severity, str]] = [
        (off, "warning", "ECC is off: memory errors pass unnoticed"),
        (waiting, "note", "ECC will be off after the next reset"),
    ]
    for nodes, severity, summary in found:
        if not nodes:
            continue
        indices = render(facts[node].index for node in nodes)
        yield Verdict(
            severity=severity,
            subjects=nodes,
            summary=f"{listed(nodes)}: {summary}",
            evidence=[
                Evidence(
                    source=calls("EccMode", (facts[node] for node in nodes)),
                    seen=", ".join(
                        sorted({f"now {modes[n][0]}, pending {modes[n][1]}" for n in nodes})
                    ),
                    expected="now 1, pending 1",
                )
            ],
            confidence="reported",
            remedy=Remedy(
                text="Switch ECC on; it takes effect when the GPUs are reset.",
                commands=[f"nvidia-smi -i {indices} -e 1", f"nvidia-smi --gpu-reset -i {indices}"],
                needs="root; no process on the GPUs",
                undo=f"nvidia-smi -i {indices} -e 0",
            ),
        )


@rule(
    code="GPU309",
    name="wrong-driver-bound",
    severity="error",
    needs=("pci",),
    rationale="""
        A GPU works for CUDA only with NVIDIA's kernel driver. Nouveau takes a GPU where it is not
        blacklisted; a GPU that NVIDIA's driver gave up on has no driver at all, while its siblings
        work. A GPU that vfio-pci holds is meant for a virtual machine: no fault, but worth a word.
    """,
    verify="lspci -nnk -d 10de:",
    mend="""
        Blacklist nouveau, make the initial ramdisk anew and reboot. For a GPU without driver read
        the kernel log for its address.
    """,
    sources=("DCGM: DCGM_FR_DENYLISTED_DRIVER", "Linux: Documentation/driver-api/vfio.rst"),
)
def wrong_driver_bound(topology: Topology) -> Iterator[Verdict]:
    pci = known(topology.facts.pci)
    assert pci is not None
    gpus = [f for f in pci.functions if f.is_gpu and f.physical_function is None]
    if not gpus:
        return
    if not any(isinstance(function.driver, str) for function in pci.functions):
        raise Skip("no PCI function names its driver here: this source lacks those links")
    groups: dict[str, list[PciFunction]] = {}
    untold = Untold()
    for function in gpus:
        driver = known(function.driver)
        if driver is not None:
            groups.setdefault(driver, []).append(function)
        elif function.driver == ABSENT:
            groups.setdefault("", []).append(function)
        else:
            untold.add(f"its driver cannot be read ({function.driver})", [_id(topology, function)])
    system = known(topology.facts.system)
    installed = system is not None and (
        "nvidia" in system.modules or isinstance(system.nvidia_driver, str)
    )
    for driver, functions in groups.items():
        if driver in FOR_GUESTS:
            yield _for_guests(topology, driver, functions)
        elif driver == "nouveau":
            yield _nouveau(topology, functions, "nvidia" in groups)
        elif not driver:
            served = any(f.base_class == CONTROLLER_3D for f in groups.get("nvidia", []))
            spare = served and all(f.base_class != CONTROLLER_3D for f in functions)
            yield _no_driver(topology, functions, installed, spare)
    untold.raise_skip()


def _id(topology: Topology, function: PciFunction) -> str:
    node = topology.by_pci.get(function.address)
    return node.id if node is not None else function.address


def _subjects(topology: Topology, functions: list[PciFunction]) -> list[str]:
    found = [topology.by_pci[f.address].id for f in functions if f.address in topology.by_pci]
    return found or ["machine"]


def _bound(functions: list[PciFunction], seen: str) -> list[Evidence]:
    return [
        Evidence(source=f"{DEVICES}/{function.address}/driver", seen=seen, expected="nvidia")
        for function in functions
    ]


def _for_guests(topology: Topology, driver: str, functions: list[PciFunction]) -> Verdict:
    nodes = _subjects(topology, functions)
    held = plural(nodes, "is held", "are held")
    return Verdict(
        severity="note",
        subjects=nodes,
        summary=f"{listed(nodes)} {held} by {driver} for virtual machines",
        evidence=_bound(functions, driver),
        confidence="reported",
        remedy=Remedy(text="None needed, if that is meant."),
    )


def _nouveau(topology: Topology, functions: list[PciFunction], beside_nvidia: bool) -> Verdict:
    nodes = _subjects(topology, functions)
    compute = beside_nvidia or any(f.base_class == CONTROLLER_3D for f in functions)
    return Verdict(
        severity="error" if compute else "note",
        subjects=nodes,
        summary=f"{listed(nodes)} {plural(nodes, 'has', 'have')} the nouveau driver: no CUDA there",
        evidence=_bound(functions, "nouveau"),
        confidence="reported",
        remedy=Remedy(
            text="Keep nouveau out, install NVIDIA's driver, and reboot.",
            commands=[
                "echo blacklist nouveau > /etc/modprobe.d/blacklist-nouveau.conf",
                "echo options nouveau modeset=0 >> /etc/modprobe.d/blacklist-nouveau.conf",
                "update-initramfs -u || dracut --force",
            ],
            needs="root; a reboot",
            undo="rm /etc/modprobe.d/blacklist-nouveau.conf",
        ),
    )


def _no_driver(
    topology: Topology, functions: list[PciFunction], installed: bool, spare: bool
) -> Verdict:
    """``spare``: a card for a display beside GPUs for computing, perhaps too old for the driver."""
    nodes = _subjects(topology, functions)
    addresses = "|".join(function.address for function in functions)
    return Verdict(
        severity="error" if installed and not spare else "warning",
        subjects=nodes,
        summary=(
            f"no driver is bound to {listed(nodes)}"
            + (", although NVIDIA's is loaded: it gave up on it" if installed else "")
        ),
        evidence=_bound(functions, "no such link"),
        confidence="reported",
        remedy=Remedy(
            text="Read in the kernel log why the driver gave up; power-cycle the machine."
            if installed
            else "Install NVIDIA's driver and load it.",
            commands=[f"dmesg | grep -E '{addresses}|NVRM'" if installed else "modprobe nvidia"],
            needs="root",
        ),
    )
