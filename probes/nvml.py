"""NVML: what the driver says of its GPUs, their links, their affinity and their peers.

Calls go by NVML index; NVML orders GPUs by PCI address. Every value may be missing with NVML's
own error name as the detail. Source of the calls and their traps: NVIDIA's NVML API reference.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gputopo.facts import ABSENT, Fact, Missing, Problem
from gputopo.host.base import Host
from gputopo.pciaddr import normalise

FIELD_NVLINK_SPEED_COMMON = 90
FIELD_NVLINK_COUNT = 91
FIELD_NVLINK_SPEED = 164
FIELD_C2C_COUNT = 170
FIELD_C2C_STATUS = 171
FIELD_C2C_MAX_BANDWIDTH = 172
FIELD_RECOVERY_ACTION = 230
GPU_FIELDS = [
    [FIELD_NVLINK_SPEED_COMMON, 0],
    [FIELD_NVLINK_COUNT, 0],
    [FIELD_C2C_COUNT, 0],
    [FIELD_C2C_STATUS, 0],
    [FIELD_C2C_MAX_BANDWIDTH, 0],
    [FIELD_RECOVERY_ACTION, 0],
]
"""The fields asked for in one call a GPU: [NVML_FI_DEV_* id, scope]."""

MAX_LINKS = 36
"""NVML_NVLINK_MAX_LINKS: a bound for the index, not a count (B200 answers for 36 and has 18)."""

MAX_GPUS = 256
"""More than any machine has: a bound for a count that is garbage."""

CLOCK_SM = 1
"""nvmlClockType_t: the clock of the streaming multiprocessors."""

P2P_CAPABILITIES = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3, "prop": 4}
"""nvmlGpuP2PCapsIndex_t. The binding's READ constant is a tuple by mistake; numbers are used."""

P2P_STATUS = {
    0: "OK",
    1: "CNS",
    2: "GNS",
    3: "TNS",
    4: "DR",
    5: "NS",
    6: "U",
}
"""nvmlGpuP2PStatus_t in the letters of ``nvidia-smi topo -p2p``: chipset, GPU, topology not
supported, disabled by regkey, not supported, unknown."""

COMMON_ANCESTOR = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t in the words of ``nvidia-smi topo -m``."""

ARCHITECTURES = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada",
    9: "Hopper",
    10: "Blackwell",
    13: "Rubin",
}
"""nvmlDeviceArchitecture_t."""

FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
"""nvmlGpuFabricState_t."""

REMOTE_TYPES = {0: "gpu", 1: "ibmnpu", 2: "switch", 255: "unknown"}
"""nvmlIntNvLinkDeviceType_t."""

RECOVERY_ACTIONS = {
    0: "none",
    1: "gpu reset",
    2: "node reboot",
    3: "drain p2p",
    4: "drain and reset",
    5: "recover imex domain",
    6: "bus reset",
    7: "system reboot",
}
"""nvmlDeviceGpuRecoveryAction_t."""


class NvLink(msgspec.Struct, frozen=True, kw_only=True):
    """One NVLink port of a GPU. ``version`` is NVML's number; ``mbytes_per_s`` is one direction."""

    index: int
    active: Fact[bool]
    version: Fact[int]
    remote: Fact[str]
    remote_type: Fact[str]
    mbytes_per_s: Fact[int]


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's registration with its NVLink fabric (fabric manager)."""

    state: str
    status: int
    cluster: str
    clique: int
    health_mask: int | None = None
    health_summary: int | None = None


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    uuid: str
    name: str
    gpu_instance: int
    compute_instance: int
    memory_bytes: int


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process on a GPU; ``pid`` counts in the host's PID namespace, whatever the container."""

    pid: int
    kind: str
    memory_bytes: int | None


class NvmlGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as NVML sees it. Sizes in bytes; PCIe speeds in Mb/s a lane; CPU and node lists are
    cut by the driver to what the caller may use."""

    index: int
    pci: Fact[str]
    name: Fact[str]
    uuid: Fact[str]
    serial: Fact[str]
    minor: Fact[int]
    module_id: Fact[int]
    architecture: Fact[str]
    compute_capability: Fact[str]
    part_number: Fact[str]
    vbios: Fact[str]
    pci_device_id: Fact[int]
    pci_subsystem_id: Fact[int]
    memory_bytes: Fact[int]
    bar1_bytes: Fact[int]
    mig_mode: Fact[int]
    mig: list[MigInstance]
    pcie_generation: Fact[int]
    pcie_max_generation: Fact[int]
    pcie_gpu_max_generation: Fact[int]
    pcie_width: Fact[int]
    pcie_max_width: Fact[int]
    pcie_replays: Fact[int]
    numa_id: Fact[int]
    cpus: Fact[list[int]]
    memory_nodes: Fact[list[int]]
    addressing_mode: Fact[int]
    c2c_enabled: Fact[int]
    c2c_links: Fact[int]
    c2c_status: Fact[int]
    c2c_mbytes_per_s: Fact[int]
    persistence: Fact[bool]
    performance_state: Fact[int]
    clock_reasons: Fact[int]
    ecc: Fact[list[int]]
    remapped_rows: Fact[list[int]]
    """Correctable, uncorrectable, whether one is pending, whether one failed."""
    retired_pages_pending: Fact[int] = ABSENT
    power_limit_mw: Fact[int] = ABSENT
    """What the board may draw now, all limits together; milliwatts."""
    power_default_mw: Fact[int] = ABSENT
    clock_mhz: Fact[int] = ABSENT
    """The SM clock that applications run at where power and heat allow."""
    clock_default_mhz: Fact[int] = ABSENT
    recovery_action: Fact[str]
    nvlink_count: Fact[int]
    nvlink_mbytes_per_s: Fact[int]
    nvlinks: list[NvLink]
    fabric: Fact[Fabric]
    platform: Fact[dict[str, Any]]
    processes: Fact[list[Process]]


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two GPUs: their common PCIe ancestor, and what ``a`` may do in ``b`` (P2P status letters)."""

    a: int
    b: int
    ancestor: Fact[str]
    p2p: dict[str, Fact[str]]


class NvmlFacts(msgspec.Struct, frozen=True, kw_only=True):
    driver: Fact[str]
    nvml: Fact[str]
    cuda: Fact[str]
    count: Fact[int]
    gpus: list[NvmlGpu]
    lost: dict[int, Missing]
    """GPUs that NVML says are out of use (lost, needs reset) or that hang it, by index."""
    pairs: list[Pair]
    problems: list[Problem]


class _Watched:
    """The host's NVML, and the calls that broke (hung, crashed, garbled) before it answered."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.broken: list[Problem] = []

    def nvml(self, call: str, *args: Any) -> Fact[Any]:
        answer = self.host.nvml(call, *args)
        if (
            isinstance(answer, Missing)
            and answer.reason in ("timeout", "failed", "unparsed")
            and not answer.detail.startswith(("NVML ", "not asked"))
        ):
            numbers = ", ".join(str(arg) for arg in args if isinstance(arg, int))
            self.broken.append(Problem(f"{call}({numbers})", answer))
        return answer


class _Asker:
    """Asks NVML about one GPU and checks the type of each answer."""

    def __init__(self, host: _Watched, index: int) -> None:
        self.host = host
        self.index = index

    def raw(self, call: str, *args: Any) -> Fact[Any]:
        return self.host.nvml(f"nvmlDeviceGet{call}", self.index, *args)

    def number(self, call: str, *args: Any) -> Fact[int]:
        return _typed(self.raw(call, *args), int)

    def text(self, call: str) -> Fact[str]:
        return _typed(self.raw(call), str)

    def numbers(self, call: str, *args: Any) -> Fact[list[int]]:
        answer = _typed(self.raw(call, *args), list)
        if isinstance(answer, list) and not all(type(item) is int for item in answer):
            return Missing("unparsed", f"a list of numbers was expected: {str(answer)[:60]}")
        return answer

    def field(self, call: str, key: str) -> Fact[int]:
        """One number of a structure."""
        answer = _typed(self.raw(call), dict)
        return answer if isinstance(answer, Missing) else _typed(answer.get(key), int)


def _typed(answer: Fact[Any], kind: type) -> Fact[Any]:
    if isinstance(answer, Missing):
        return answer
    if isinstance(answer, kind) and not (kind is int and isinstance(answer, bool)):
        return answer
    return Missing("unparsed", f"{kind.__name__} expected, got {str(answer)[:60]!r}")


def probe(host: Host) -> Fact[NvmlFacts]:
    """Everything that NVML has on this machine; Missing when NVML itself does not start."""
    watched = _Watched(host)
    started = watched.nvml("nvmlInit")
    if isinstance(started, Missing):
        return started
    # The versions come first: they touch no GPU that could hang.
    driver = _typed(watched.nvml("nvmlSystemGetDriverVersion"), str)
    nvml = _typed(watched.nvml("nvmlSystemGetNVMLVersion"), str)
    cuda = _cuda(_typed(watched.nvml("nvmlSystemGetCudaDriverVersion_v2"), int))
    count = _typed(watched.nvml("nvmlDeviceGetCount"), int)
    gpus: list[NvmlGpu] = []
    lost: dict[int, Missing] = {}
    problems: list[Problem] = []
    if isinstance(count, Missing):
        problems.append(Problem("nvmlDeviceGetCount", count))
    elif count > MAX_GPUS:
        problems.append(
            Problem("nvmlDeviceGetCount", Missing("unparsed", f"{count}: {MAX_GPUS} are asked"))
        )
    for index in range(min(count, MAX_GPUS) if isinstance(count, int) else 0):
        handle = watched.nvml("nvmlDeviceGetHandleByIndex", index)
        if isinstance(handle, Missing):
            if _is_gone(handle):
                lost[index] = handle
            problems.append(Problem(f"nvmlDeviceGetHandleByIndex({index})", handle))
            continue
        gpu = _gpu(_Asker(watched, index))
        gpus.append(gpu)
        if isinstance(gpu.pci, Missing):
            problems.append(Problem(f"nvmlDeviceGetPciInfo({index})", gpu.pci))
        trouble = _trouble(gpu)
        if trouble is not None:
            lost[index] = trouble
            problems.append(Problem(f"GPU {index}", trouble))
    whole = [gpu.index for gpu in gpus if gpu.index not in lost]
    pairs = [_pair(watched, a, b) for a in whole for b in whole if a != b]
    told = {problem.missing for problem in problems}
    problems += [problem for problem in watched.broken if problem.missing not in told]
    return NvmlFacts(
        driver=driver,
        nvml=nvml,
        cuda=cuda,
        count=count,
        gpus=gpus,
        lost=lost,
        pairs=pairs,
        problems=problems,
    )


def _is_gone(missing: Missing) -> bool:
    """Whether NVML itself says that a GPU is out of use, or hangs at it. A call that is refused,
    unsupported or not recorded tells nothing of the GPU."""
    said = missing.reason == "failed" and missing.detail.startswith("NVML ")
    return said or missing.reason == "timeout"


def _trouble(gpu: NvmlGpu) -> Missing | None:
    """The error that says that this GPU is gone or hung, if one of its answers does."""
    for fact in (gpu.name, gpu.uuid, gpu.pci, gpu.memory_bytes):
        if isinstance(fact, Missing) and (
            fact.detail in ("NVML GPU_IS_LOST", "NVML RESET_REQUIRED") or fact.reason == "timeout"
        ):
            return fact
    return None


def _cuda(version: Fact[int]) -> Fact[str]:
    if isinstance(version, Missing):
        return version
    return f"{version // 1000}.{version % 1000 // 10}"


def _gpu(ask: _Asker) -> NvmlGpu:
    pci = _typed(ask.raw("PciInfo"), dict)
    fields = _fields(ask.raw("FieldValues", GPU_FIELDS))
    bus: Fact[str] = pci if isinstance(pci, Missing) else _address(pci.get("busId"))
    recovery = fields(FIELD_RECOVERY_ACTION)
    architecture = ask.number("Architecture")
    persistence = ask.number("PersistenceMode")
    links = fields(FIELD_NVLINK_COUNT)
    mig = ask.numbers("MigMode")
    return NvmlGpu(
        index=ask.index,
        pci=bus,
        name=ask.text("Name"),
        uuid=ask.text("UUID"),
        serial=ask.text("Serial"),
        minor=ask.number("MinorNumber"),
        module_id=ask.number("ModuleId"),
        architecture=_word(architecture, ARCHITECTURES),
        compute_capability=_capability(ask.numbers("CudaComputeCapability")),
        part_number=ask.text("BoardPartNumber"),
        vbios=ask.text("VbiosVersion"),
        pci_device_id=pci if isinstance(pci, Missing) else _typed(pci.get("pciDeviceId"), int),
        pci_subsystem_id=(
            pci if isinstance(pci, Missing) else _typed(pci.get("pciSubSystemId"), int)
        ),
        memory_bytes=ask.field("MemoryInfo", "total"),
        bar1_bytes=ask.field("BAR1MemoryInfo", "bar1Total"),
        mig_mode=mig if isinstance(mig, Missing) else _first(mig),
        mig=_mig(ask) if isinstance(mig, list) and mig and mig[0] == 1 else [],
        pcie_generation=ask.number("CurrPcieLinkGeneration"),
        pcie_max_generation=ask.number("MaxPcieLinkGeneration"),
        pcie_gpu_max_generation=ask.number("GpuMaxPcieLinkGeneration"),
        pcie_width=ask.number("CurrPcieLinkWidth"),
        pcie_max_width=ask.number("MaxPcieLinkWidth"),
        pcie_replays=ask.number("PcieReplayCounter"),
        numa_id=ask.number("NumaNodeId"),
        cpus=ask.numbers("CpuAffinity"),
        memory_nodes=ask.numbers("MemoryAffinity", 0),
        addressing_mode=ask.number("AddressingMode"),
        c2c_enabled=ask.number("C2cModeInfoV"),
        c2c_links=fields(FIELD_C2C_COUNT),
        c2c_status=fields(FIELD_C2C_STATUS),
        c2c_mbytes_per_s=fields(FIELD_C2C_MAX_BANDWIDTH),
        persistence=persistence if isinstance(persistence, Missing) else persistence == 1,
        performance_state=ask.number("PerformanceState"),
        clock_reasons=ask.number("CurrentClocksEventReasons"),
        ecc=ask.numbers("EccMode"),
        remapped_rows=ask.numbers("RemappedRows"),
        retired_pages_pending=ask.number("RetiredPagesPendingStatus"),
        power_limit_mw=ask.number("EnforcedPowerLimit"),
        power_default_mw=ask.number("PowerManagementDefaultLimit"),
        clock_mhz=ask.number("ApplicationsClock", CLOCK_SM),
        clock_default_mhz=ask.number("DefaultApplicationsClock", CLOCK_SM),
        recovery_action=_word(recovery, RECOVERY_ACTIONS),
        nvlink_count=links,
        nvlink_mbytes_per_s=fields(FIELD_NVLINK_SPEED_COMMON),
        nvlinks=_links(ask, links),
        fabric=_fabric(_typed(ask.raw("GpuFabricInfoV"), dict)),
        platform=_typed(ask.raw("PlatformInfo"), dict),
        processes=_processes(ask),
    )


def _address(bus_id: Any) -> Fact[str]:
    address = normalise(bus_id) if isinstance(bus_id, str) else None
    return address or Missing("unparsed", f"no PCI address: {str(bus_id)[:40]!r}")


def _word(number: Fact[int], words: dict[int, str]) -> Fact[str]:
    """NVML's enumeration in words; a number that is newer than this tool keeps its number."""
    return number if isinstance(number, Missing) else words.get(number, f"unknown ({number})")


def _first(numbers: list[int]) -> Fact[int]:
    return numbers[0] if numbers else Missing("unparsed", "an empty list")


def _capability(pair: Fact[list[int]]) -> Fact[str]:
    if isinstance(pair, Missing) or len(pair) == 2:
        return pair if isinstance(pair, Missing) else f"{pair[0]}.{pair[1]}"
    return Missing("unparsed", str(pair)[:40])


def _fields(answer: Fact[Any]) -> Any:
    """A look-up of field values by id: each has its own return code."""
    items = answer if isinstance(answer, list) else []

    def value(field: int) -> Fact[int]:
        if isinstance(answer, Missing):
            return answer
        for item in items:
            if isinstance(item, dict) and item.get("field") == field:
                code = item.get("return")
                if not isinstance(code, int):
                    return Missing("unparsed", f"no return code: {str(code)[:40]!r}")
                if code != 0:
                    name = {
                        2: "INVALID_ARGUMENT",
                        3: "NOT_SUPPORTED",
                        15: "GPU_IS_LOST",
                        16: "RESET_REQUIRED",
                    }
                    detail = f"NVML {name.get(code, code)}"
                    return Missing("failed" if code not in (2, 3) else "unsupported", detail)
                return _typed(item.get("value"), int)
        return Missing("unsupported", "not among the answered fields")

    return value


def _links(ask: _Asker, count: Fact[int]) -> list[NvLink]:
    """The NVLinks that the GPU has: as many as field 91 says.

    Drivers without that field answer the state call for each link that is there; it stops at the
    first index that is refused.
    """
    links: list[NvLink] = []
    for index in range(min(count, MAX_LINKS) if isinstance(count, int) else MAX_LINKS):
        state = ask.number("NvLinkState", index)
        if isinstance(state, Missing) and isinstance(count, Missing):
            break
        active = state == 1
        remote: Fact[str] = Missing("absent", "the link is not active")
        remote_type: Fact[str] = remote
        if active:
            info = _typed(ask.raw("NvLinkRemotePciInfo", index), dict)
            remote = info if isinstance(info, Missing) else _address(info.get("busId"))
            remote_type = _word(ask.number("NvLinkRemoteDeviceType", index), REMOTE_TYPES)
        speed = _fields(ask.raw("FieldValues", [[FIELD_NVLINK_SPEED, index]]))
        links.append(
            NvLink(
                index=index,
                active=state if isinstance(state, Missing) else active,
                version=ask.number("NvLinkVersion", index),
                remote=remote,
                remote_type=remote_type,
                mbytes_per_s=speed(FIELD_NVLINK_SPEED),
            )
        )
    return links


def _mig(ask: _Asker) -> list[MigInstance]:
    found: list[MigInstance] = []
    most = ask.number("MaxMigDeviceCount")
    for index in range(most if isinstance(most, int) and most <= 64 else 0):
        answer = _typed(ask.raw("MigDeviceHandleByIndex", index), dict)
        if isinstance(answer, dict):
            try:
                found.append(msgspec.convert({**answer, "index": index}, MigInstance))
            except msgspec.ValidationError as error:
                source = f"nvmlDeviceGetMigDeviceHandleByIndex({ask.index}, {index})"
                ask.host.broken.append(Problem(source, Missing("unparsed", str(error))))
    return found


def _fabric(answer: Fact[dict[str, Any]]) -> Fact[Fabric]:
    if isinstance(answer, Missing):
        return answer
    try:
        return Fabric(
            state=FABRIC_STATES.get(int(answer["state"]), f"unknown ({answer['state']})"),
            status=int(answer["status"]),
            cluster=str(answer["clusterUuid"]),
            clique=int(answer["cliqueId"]),
            health_mask=_optional(answer.get("healthMask")),
            health_summary=_optional(answer.get("healthSummary")),
        )
    except (KeyError, TypeError, ValueError) as error:
        return Missing("unparsed", f"fabric information: {error}")


def _optional(value: Any) -> int | None:
    """A number that older drivers lack; TypeError for anything else."""
    if value is None or type(value) is int:
        return value
    raise TypeError(f"a number was expected: {str(value)[:40]!r}")


def _processes(ask: _Asker) -> Fact[list[Process]]:
    found: list[Process] = []
    for kind, call in (
        ("compute", "ComputeRunningProcesses"),
        ("graphics", "GraphicsRunningProcesses"),
        ("mps", "MPSComputeRunningProcesses"),
    ):
        answer = _typed(ask.raw(call), list)
        if isinstance(answer, Missing):
            if kind == "compute":
                return answer
            continue
        for item in answer:
            if isinstance(item, dict) and isinstance(item.get("pid"), int):
                used = item.get("usedGpuMemory")
                found.append(
                    Process(
                        pid=item["pid"],
                        kind=kind,
                        memory_bytes=used if isinstance(used, int) else None,
                    )
                )
    return found


def _pair(host: _Watched, a: int, b: int) -> Pair:
    first, second = min(a, b), max(a, b)
    ancestor = _typed(host.nvml("nvmlDeviceGetTopologyCommonAncestor", first, second), int)
    return Pair(
        a=a,
        b=b,
        ancestor=_word(ancestor, COMMON_ANCESTOR),
        p2p={
            word: _word(_typed(host.nvml("nvmlDeviceGetP2PStatus", a, b, index), int), P2P_STATUS)
            for word, index in P2P_CAPABILITIES.items()
        },
    )
