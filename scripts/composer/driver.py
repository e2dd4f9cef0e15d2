"""NVML's answers: every call that gputopo makes, for every GPU and every pair.

Which part and which driver refuse which call: NVML API reference ("Supported Products"), and the
``nvidia-smi -q -x`` outputs named in the fixtures.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from composer import matrix, parts
from composer.description import Machine
from composer.layout import GTS, Function, Layout
from composer.pci import bar1_mib
from composer.processors import Processors
from gputopo.facts import Fact, Missing
from gputopo.host.recording import nvml_error, nvml_key
from gputopo.probes import nvml as asked

MIB = 1 << 20
ANCESTOR = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
"""nvmlGpuTopologyLevel_t."""

HIDDEN_SWITCH = "FFFFFFFF:FF:FF.0"
"""What NVML names a link's remote end that is no PCI function of this machine: NVSwitches of B200
and later, and any in a virtual machine (NCCL's topology dumps have it as ``fffffff:ff:ff.0``)."""

SINCE = {
    "nvmlDeviceGetModuleId": 455,
    "nvmlDeviceGetArchitecture": 450,
    "nvmlDeviceGetRemappedRows": 450,
    "nvmlDeviceGetMemoryAffinity": 450,
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": 510,
    "nvmlDeviceGetNvLinkRemoteDeviceType": 455,
    "nvmlDeviceGetGpuFabricInfoV": 525,
    "nvmlDeviceGetNumaNodeId": 535,
    "nvmlDeviceGetC2cModeInfoV": 535,
    "nvmlDeviceGetPlatformInfo": 570,
    "nvmlDeviceGetAddressingMode": 580,
}
"""First driver branch with a call; older libraries do not export it. Approximate: they are there so
that machines with old drivers refuse what such drivers refuse."""

FIELD_SINCE = {asked.FIELD_NVLINK_SPEED: 455, asked.FIELD_C2C_COUNT: 525,
               asked.FIELD_C2C_STATUS: 525, asked.FIELD_C2C_MAX_BANDWIDTH: 525,
               asked.FIELD_RECOVERY_ACTION: 570}  # fmt: skip
"""First driver branch with a field, likewise approximate."""

CLOCKS_UNTIL = 590
"""Driver branch from which application clocks are deprecated; 580 still has them, 595 has not."""

UNSUPPORTED = nvml_error("NOT_SUPPORTED")


def gpu_part(gpu: Function) -> parts.Gpu:
    return parts.GPUS[gpu.part_name]


def gpu_uuid(gpu: Function) -> str:
    digits = sha256(f"{gpu.part_name} {gpu.address}".encode()).hexdigest()
    groups = (digits[:8], digits[8:12], "4" + digits[12:15], "8" + digits[15:18], digits[18:30])
    return "GPU-" + "-".join(groups)


def answers(layout: Layout, processors: Processors) -> dict[tuple[Any, ...], Fact[Any]]:
    """All NVML answers by question."""
    machine = layout.machine
    if not machine.driver:
        return {nvml_key("nvmlInit", ()): nvml_error("LIBRARY_NOT_FOUND")}
    found: dict[tuple[Any, ...], Fact[Any]] = {}
    gpus = layout.gpus
    major, minor = (int(part) for part in machine.cuda.split("."))
    for call, value in (
        ("nvmlInit", True),
        ("nvmlDeviceGetCount", len(gpus)),
        ("nvmlSystemGetDriverVersion", machine.driver),
        ("nvmlSystemGetNVMLVersion", f"{major}.{machine.driver}"),
        ("nvmlSystemGetCudaDriverVersion_v2", major * 1000 + minor * 10),
    ):
        found[nvml_key(call, ())] = value
    for index, gpu in enumerate(gpus):
        for call, args, answer in _Gpu(layout, processors, gpu, index).answers():
            found[nvml_key(call, (index, *args))] = answer
    for a in range(len(gpus)):
        for b in range(len(gpus)):
            if a != b:
                _pair(found, layout, processors, gpus, a, b)
    return found


class _Gpu:
    """The answers on one GPU."""

    def __init__(
        self,
        layout: Layout,
        processors: Processors,
        gpu: Function,
        index: int,
    ) -> None:
        self.layout = layout
        self.machine: Machine = layout.machine
        self.processors = processors
        self.gpu = gpu
        self.index = index
        self.part = gpu_part(gpu)
        self.own = gpu.settings
        self.branch = int(self.machine.driver.split(".")[0])
        self.links = matrix.links(layout, gpu)

    def answers(self) -> list[tuple[str, tuple[Any, ...], Fact[Any]]]:
        found: list[tuple[str, tuple[Any, ...], Fact[Any]]] = []
        lost = nvml_error(self.own.error) if self.own.error else None
        calls = [*self._device().items(), *self._nvlinks().items()]
        for (name, *args), value in calls:
            call = f"nvmlDeviceGet{name}"
            answer: Fact[Any] = value
            if self.branch < SINCE.get(call, 0):
                answer = nvml_error("FUNCTION_NOT_FOUND")
            elif lost is not None and name not in ("HandleByIndex", "PciInfo"):
                answer = lost
            found.append((call, tuple(args), answer))
        return found

    def _device(self) -> dict[tuple[Any, ...], Fact[Any]]:
        gpu, part, own = self.gpu, self.part, self.own
        assert gpu.link is not None
        grace = own.memory_node is not None
        near = matrix.memory_nodes(self.layout, self.processors, gpu)
        capacity = part.memory_mib * MIB
        reserved = capacity // 128
        window = bar1_mib(gpu) * MIB
        generation = {speed: number for number, speed in GTS.items()}
        slot = self._slot_generation()
        state = part.idle_state if own.performance_state is None else own.performance_state
        return {
            ("HandleByIndex",): True,
            ("PciInfo",): self._pci_info(),
            ("Name",): part.name,
            ("UUID",): gpu_uuid(gpu),
            ("Serial",): _serial(gpu) if part.ecc else UNSUPPORTED,
            ("MinorNumber",): self.index,
            ("ModuleId",): self.index + 1 if own.module is None else own.module,
            ("Architecture",): part.architecture,
            ("CudaComputeCapability",): list(part.capability),
            ("BoardPartNumber",): part.part_number or UNSUPPORTED,
            ("VbiosVersion",): part.vbios,
            ("MemoryInfo",): {"total": capacity, "free": capacity - reserved, "used": reserved},
            ("BAR1MemoryInfo",): {
                "bar1Total": window, "bar1Free": window - 2 * MIB, "bar1Used": 2 * MIB,
            },
            ("MigMode",): [int(own.mig)] * 2 if part.mig else UNSUPPORTED,
            ("MaxMigDeviceCount",): 7 if part.mig else 0,
            ("CurrPcieLinkGeneration",): generation.get(gpu.link.speed, 0),
            ("MaxPcieLinkGeneration",): min(generation[gpu.max_speed], slot),
            ("GpuMaxPcieLinkGeneration",): generation[gpu.max_speed],
            ("CurrPcieLinkWidth",): gpu.link.width,
            ("MaxPcieLinkWidth",): gpu.max_width,
            ("PcieReplayCounter",): own.replays,
            ("NumaNodeId",): own.memory_node if grace else UNSUPPORTED,
            ("CpuAffinity",): list(self.processors.local(gpu.node)),
            ("MemoryAffinity", 0): near or UNSUPPORTED,
            ("AddressingMode",): 2 if grace else 1 if self.machine.open_modules else 0,
            ("C2cModeInfoV",): 1 if part.c2c_links and not own.c2c_down else
                0 if part.platform or part.c2c_links else UNSUPPORTED,
            ("PersistenceMode",): int(own.persistence),
            ("PerformanceState",): state,
            ("CurrentClocksEventReasons",): own.clock_reasons,
            ("EccMode",): [int(own.ecc)] * 2 if part.ecc else UNSUPPORTED,
            ("RemappedRows",): own.remapped_rows if part.row_remapping else UNSUPPORTED,
            # Parts that remap rows have no pages to retire.
            ("RetiredPagesPendingStatus",): 0 if part.ecc and not part.row_remapping
                else UNSUPPORTED,
            ("EnforcedPowerLimit",): 1000 * part.power_w,
            ("PowerManagementDefaultLimit",): 1000 * part.power_w,
            ("ApplicationsClock", asked.CLOCK_SM): self._clock(),
            ("DefaultApplicationsClock", asked.CLOCK_SM): self._clock(),
            ("GpuFabricInfoV",): self._fabric(),
            ("PlatformInfo",): self._platform(),
            nvml_key("FieldValues", (asked.GPU_FIELDS,)): [
                self._field(field, scope) for field, scope in asked.GPU_FIELDS
            ],
            ("ComputeRunningProcesses",): _processes(own.processes),
            ("GraphicsRunningProcesses",): _processes(own.graphics),
            ("MPSComputeRunningProcesses",): [],
        }  # fmt: skip

    def _clock(self) -> Fact[int]:
        """Application clocks: none on GeForce, given up by drivers from 590 on (T4 dump of 595)."""
        if self.branch >= CLOCKS_UNTIL:
            return nvml_error("DEPRECATED")
        return self.part.clock_mhz or UNSUPPORTED

    def _pci_info(self) -> dict[str, Any]:
        gpu, part = self.gpu, self.gpu.part
        domain, bus, rest = gpu.address.upper().split(":")
        vendor, device = part.subsystem or (0, 0)
        return {
            "busIdLegacy": gpu.address.upper(),
            "domain": int(domain, 16),
            "bus": int(bus, 16),
            "device": int(rest[:2], 16),
            "pciDeviceId": part.device << 16 | part.vendor,
            "pciSubSystemId": device << 16 | vendor,
            "busId": f"{int(domain, 16):08X}:{bus}:{rest}",
        }

    def _slot_generation(self) -> int:
        """The generation of the port above; a guest that sees none is told the GPU's own."""
        port = self.layout.functions.get(self.gpu.above[-1]) if self.gpu.above else None
        speed = port.max_speed if port else self.gpu.max_speed
        return next(number for number, rate in GTS.items() if rate == speed)

    def _fabric(self) -> Fact[dict[str, Any]]:
        part, own, nvlink = self.part, self.own, self.machine.nvlink
        if not part.fabric:
            return UNSUPPORTED
        mask, summary = own.fabric_health_mask, own.fabric_health_summary
        fields: dict[str, Any] = {
            "clusterUuid": nvlink.cluster.replace("-", ""),
            "status": own.fabric_status,
            "cliqueId": nvlink.clique,
            "state": own.fabric_state,
        }
        if self.branch >= 550:
            fields["healthMask"] = part.fabric_health_mask if mask is None else mask
        if self.branch >= 575:
            fields["healthSummary"] = part.fabric_health_summary if summary is None else summary
        return fields

    def _platform(self) -> Fact[dict[str, Any]]:
        if not self.part.platform:
            return UNSUPPORTED
        nvlink, own = self.machine.nvlink, self.own
        return {
            "ibGuid": sha256(gpu_uuid(self.gpu).encode()).hexdigest()[:32],
            "chassisSerialNumber": nvlink.chassis,
            "slotNumber": nvlink.slot,
            "trayIndex": nvlink.tray,
            "hostId": 1,
            "peerType": 1,
            "moduleId": self.index + 1 if own.module is None else own.module,
        }

    def _field(self, field: int, scope: int) -> dict[str, Any]:
        """One field with its own return code: 0 success, 2 unknown field, 3 not supported."""
        part = self.part
        links = len(self.links)
        active = scope < links and self.links[scope].active
        values: dict[int, int | None] = {
            asked.FIELD_NVLINK_COUNT: links,
            asked.FIELD_NVLINK_SPEED_COMMON: part.nvlink_mbytes_per_s if links else None,
            asked.FIELD_NVLINK_SPEED: part.nvlink_mbytes_per_s if active else 0,
            asked.FIELD_C2C_COUNT: part.c2c_links or None,
            asked.FIELD_C2C_STATUS: int(not self.own.c2c_down) if part.c2c_links else None,
            asked.FIELD_C2C_MAX_BANDWIDTH: part.c2c_mbytes_per_s or None,
            asked.FIELD_RECOVERY_ACTION: self.own.recovery_action,
        }
        value, code = values[field], 0
        if self.branch < FIELD_SINCE.get(field, 0):
            value, code = None, 2
        elif value is None:
            code = 3
        return {"field": field, "scope": scope, "return": code, "value": value or 0}

    def _nvlinks(self) -> dict[tuple[Any, ...], Fact[Any]]:
        found: dict[tuple[Any, ...], Fact[Any]] = {}
        for number, link in enumerate(self.links):
            found["NvLinkState", number] = int(link.active)
            found["NvLinkVersion", number] = self.part.nvlink_version
            field = self._field(asked.FIELD_NVLINK_SPEED, number)
            found[nvml_key("FieldValues", ([[asked.FIELD_NVLINK_SPEED, number]],))] = [field]
            if link.active:
                remote = _bus_id(link.remote) if link.remote else HIDDEN_SWITCH
                found["NvLinkRemotePciInfo", number] = {"busId": remote}
                found["NvLinkRemoteDeviceType", number] = 2 if link.switch else 0
        return found


def _processes(processes: list[dict[str, int]]) -> list[dict[str, int]]:
    """NVML's structures; instance ids are all ones outside MIG."""
    return [
        {
            "pid": process["pid"],
            "usedGpuMemory": process["memory"] * MIB,
            "gpuInstanceId": 0xFFFFFFFF,
            "computeInstanceId": 0xFFFFFFFF,
        }
        for process in processes
    ]


def _bus_id(function: Function) -> str:
    domain, _, rest = function.address.upper().partition(":")
    return f"{int(domain, 16):08X}:{rest}"


def _serial(gpu: Function) -> str:
    return str(1_320_000_000_000 + int(sha256(gpu.address.encode()).hexdigest()[:8], 16))


def _pair(
    found: dict[tuple[Any, ...], Fact[Any]],
    layout: Layout,
    processors: Processors,
    gpus: list[Function],
    a: int,
    b: int,
) -> None:
    """The common ancestor and what one GPU may do in the other."""
    lost = next((g.settings.error for g in (gpus[a], gpus[b]) if g.settings.error), None)
    path = matrix.path_class(layout, processors, gpus[a], gpus[b])
    direct = matrix.nvlinks(layout, gpus[a], gpus[b]) > 0
    part = gpu_part(gpus[a])
    # NVLink carries everything; over PCIe the part, the sockets between and the chipset decide.
    over_pcie = part.peer_over_pcie or (part.peer_across_sockets if path == "SYS" else 0)
    status = {
        "read": 0 if direct else over_pcie,
        "write": 0 if direct else over_pcie,
        "nvlink": 0 if direct else 5,
        "atomics": 0 if direct else 5,
        "prop": 0 if direct else over_pcie,
    }
    error: Missing | None = nvml_error(lost) if lost else None
    if a < b:
        key = nvml_key("nvmlDeviceGetTopologyCommonAncestor", (a, b))
        found[key] = error or ANCESTOR[path]
    for word, capability in asked.P2P_CAPABILITIES.items():
        key = nvml_key("nvmlDeviceGetP2PStatus", (a, b, capability))
        found[key] = error or status[word]
