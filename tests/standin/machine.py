"""Two made-up GPUs for which NVML answers, or refuses, each question that the probe has."""

from __future__ import annotations

from typing import Any

from gputopo.host.recording import Answers, Header, nvml_error, nvml_key
from gputopo.probes.nvml import CLOCK_SM, FIELD_NVLINK_SPEED, GPU_FIELDS


def _pci(bus: int, device_id: int = 0x233010DE, subsystem: int = 0x16C110DE) -> dict[str, Any]:
    return {
        "busIdLegacy": f"0000:{bus:02X}:00.0",
        "domain": 0,
        "bus": bus,
        "device": 0,
        "pciDeviceId": device_id,
        "pciSubSystemId": subsystem,
        "busId": f"00000000:{bus:02X}:00.0",
    }


def _field(field: int, value: Any, code: int = 0, scope: int = 0) -> dict[str, Any]:
    return {"field": field, "scope": scope, "return": code, "value": value}


def _process(pid: int, used: int | None, instances: tuple[int, int]) -> dict[str, Any]:
    return {
        "pid": pid,
        "usedGpuMemory": used,
        "gpuInstanceId": instances[0],
        "computeInstanceId": instances[1],
    }


_REFUSED = nvml_error("NOT_SUPPORTED")

_SYSTEM: dict[tuple[Any, ...], Any] = {
    ("nvmlInit",): True,
    ("nvmlDeviceGetCount",): 2,
    ("nvmlSystemGetDriverVersion",): "580.95.05",
    ("nvmlSystemGetNVMLVersion",): "13.580.95.05",
    ("nvmlSystemGetCudaDriverVersion_v2",): 13000,
}

_LINKED: dict[str, Any] = {
    "PciInfo": _pci(0x1B),
    "FieldValues": [
        _field(90, 26562),
        _field(91, 2),
        _field(170, 0, code=3),
        _field(171, 0, code=3),
        _field(172, 0, code=3),
        _field(230, 1),
    ],
    "Architecture": 9,
    "PersistenceMode": 1,
    "MigMode": [0, 0],
    "Name": "NVIDIA H100 80GB HBM3",
    "UUID": "GPU-11111111-2222-3333-4444-555555555555",
    "Serial": "1650000000001",
    "MinorNumber": 0,
    "ModuleId": 4,
    "CudaComputeCapability": [9, 0],
    "BoardPartNumber": "692-2G520-0200-000",
    "VbiosVersion": "96.00.61.00.01",
    "MemoryInfo": {"total": 85520809984, "free": 85000000000, "used": 520809984},
    "BAR1MemoryInfo": {"bar1Total": 137438953472, "bar1Free": 137438000000, "bar1Used": 953472},
    "CurrPcieLinkGeneration": 5,
    "MaxPcieLinkGeneration": 5,
    "GpuMaxPcieLinkGeneration": 5,
    "CurrPcieLinkWidth": 16,
    "MaxPcieLinkWidth": 16,
    "PcieReplayCounter": 3,
    "NumaNodeId": _REFUSED,
    "CpuAffinity": [*range(24), *range(48, 72), 4095],
    "AddressingMode": 1,
    "C2cModeInfoV": _REFUSED,
    "PerformanceState": 0,
    "CurrentClocksEventReasons": 1 << 40 | 4,
    "EccMode": [1, 1],
    "RemappedRows": [0, 2, 1, 0],
    "RetiredPagesPendingStatus": _REFUSED,
    "EnforcedPowerLimit": 650000,
    "PowerManagementDefaultLimit": 700000,
    "GpuFabricInfoV": {
        "clusterUuid": "00112233445566778899aabbccddee00",
        "status": 0,
        "cliqueId": 7,
        "state": 3,
        "healthMask": 341,
        "healthSummary": 1,
    },
    "PlatformInfo": _REFUSED,
    "ComputeRunningProcesses": [
        _process(4242, 1 << 33, (4294967295, 4294967295)),
        _process(4243, None, (1, 2)),
    ],
    "GraphicsRunningProcesses": [],
    "MPSComputeRunningProcesses": nvml_error("NO_PERMISSION"),
}

_SPLIT: dict[str, Any] = {
    **_LINKED,
    "PciInfo": _pci(0xC3, device_id=0x294110DE),
    "FieldValues": [
        _field(90, 0, code=3),
        _field(91, 0, code=3),
        _field(170, 10),
        _field(171, 1),
        _field(172, 44712),
        _field(230, 0, code=2),
    ],
    "Architecture": 10,
    "PersistenceMode": nvml_error("UNKNOWN"),
    "MigMode": [1, 0],
    # Names are foreign text: a percent sign, markup, an escape sequence, a leading mark.
    "Name": "!GB200 100% [bold] \u00b5 \x1b[31m",
    "UUID": "GPU-99999999-2222-3333-4444-555555555555",
    "Serial": nvml_error("NOT_SUPPORTED"),
    "MinorNumber": 7,
    "ModuleId": nvml_error("FUNCTION_NOT_FOUND"),
    "VbiosVersion": "",
    "NumaNodeId": 2,
    "CpuAffinity": [],
    "C2cModeInfoV": 1,
    "PerformanceState": 32,
    "EccMode": nvml_error("NO_DATA"),
    "RemappedRows": nvml_error("ERROR_77"),
    "RetiredPagesPendingStatus": 1,
    "GpuFabricInfoV": {
        "clusterUuid": "0" * 32,
        "status": 3,
        "cliqueId": 0,
        "state": 1,
        "healthMask": 0,
    },
    "PlatformInfo": {
        "ibGuid": "00ff" * 8,
        "chassisSerialNumber": "1234567890ABCDEF",
        "slotNumber": 0,
        "trayIndex": 255,
        "hostId": 1,
        "peerType": 1,
        "moduleId": 2,
    },
    "ComputeRunningProcesses": [],
    "MaxMigDeviceCount": 3,
}

_LINKS: dict[tuple[Any, ...], Any] = {
    ("nvmlDeviceGetNvLinkState", 0, 0): 1,
    ("nvmlDeviceGetNvLinkRemotePciInfo", 0, 0): _pci(0x05, device_id=0x22A310DE, subsystem=0),
    ("nvmlDeviceGetNvLinkRemoteDeviceType", 0, 0): 2,
    ("nvmlDeviceGetFieldValues", 0, ((FIELD_NVLINK_SPEED, 0),)): [_field(164, 26562)],
    ("nvmlDeviceGetNvLinkVersion", 0, 0): 7,
    ("nvmlDeviceGetNvLinkState", 0, 1): 0,
    ("nvmlDeviceGetFieldValues", 0, ((FIELD_NVLINK_SPEED, 1),)): nvml_error("INVALID_ARGUMENT"),
    ("nvmlDeviceGetNvLinkVersion", 0, 1): nvml_error("GPU_IS_LOST"),
    ("nvmlDeviceGetNvLinkState", 1, 0): _REFUSED,
}

_INSTANCES: dict[tuple[Any, ...], Any] = {
    ("nvmlDeviceGetMigDeviceHandleByIndex", 1, 0): {
        "uuid": "MIG-11111111-2222-3333-4444-555555555555",
        "name": "NVIDIA GB200 MIG 1g.23gb",
        "gpu_instance": 9,
        "compute_instance": 0,
        "memory_bytes": 23622320128,
    },
    ("nvmlDeviceGetMigDeviceHandleByIndex", 1, 1): nvml_error("NOT_FOUND"),
    ("nvmlDeviceGetMigDeviceHandleByIndex", 1, 2): nvml_error("NOT_FOUND"),
}

_PAIRS: dict[tuple[Any, ...], Any] = {
    ("nvmlDeviceGetTopologyCommonAncestor", 0, 1): 50,
    **{("nvmlDeviceGetP2PStatus", 0, 1, capability): 0 for capability in range(4)},
    **{("nvmlDeviceGetP2PStatus", 1, 0, capability): capability for capability in range(4)},
    ("nvmlDeviceGetP2PStatus", 0, 1, 4): _REFUSED,
    ("nvmlDeviceGetP2PStatus", 1, 0, 4): 6,
}


def two_gpus() -> Answers:
    """A linked H100 and a GB200 that is split by MIG, with an error here and there."""
    nvml = {**_SYSTEM, **_LINKS, **_INSTANCES, **_PAIRS}
    for index, gpu in enumerate((_LINKED, _SPLIT)):
        nvml["nvmlDeviceGetHandleByIndex", index] = True
        nvml["nvmlDeviceGetMemoryAffinity", index, 0] = [index, 1023]
        nvml["nvmlDeviceGetApplicationsClock", index, CLOCK_SM] = 1980 - index
        nvml["nvmlDeviceGetDefaultApplicationsClock", index, CLOCK_SM] = 1980
        for call, value in gpu.items():
            fields = [GPU_FIELDS] if call == "FieldValues" else []
            nvml[nvml_key(f"nvmlDeviceGet{call}", [index, *fields])] = value
    return Answers(Header(format=1), {}, {}, nvml)
