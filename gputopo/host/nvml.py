"""NVML as plain data: one function, called only inside the worker process.

GPUs go in as NVML indices, structures come out as dictionaries with NVML's own field names. The
binding is nvidia-ml-py (module ``pynvml``); it loads ``libnvidia-ml.so.1`` at ``nvmlInit`` and
looks symbols up lazily, so an old driver answers FUNCTION_NOT_FOUND for what it lacks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml

CPU_WORDS = 1024 // 64 * 4
"""64-bit words of a CPU mask asked for: 4,096 CPUs."""

NODE_WORDS = 1024 // 64
"""64-bit words of a NUMA mask asked for: MAX_NUMNODES of today's distributions is 1,024."""

DEVICE_ARGUMENTS = {
    "nvmlDeviceGetTopologyCommonAncestor": 2,
    "nvmlDeviceGetP2PStatus": 2,
    "nvmlDeviceOnSameBoard": 2,
}
"""How many leading arguments of a call are GPUs, where it is not one for nvmlDevice*, else none."""


OLDER = {
    "nvmlDeviceGetComputeRunningProcesses_v3": "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v3": "nvmlDeviceGetGraphicsRunningProcesses_v2",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": "nvmlDeviceGetMPSComputeRunningProcesses_v2",
    "nvmlDeviceGetCurrentClocksEventReasons": "nvmlDeviceGetCurrentClocksThrottleReasons",
}
"""What a call was named, with the same answer, in drivers that lack it (before 510, before 535)."""


class Refused(Exception):
    """An NVML error, by its name without the NVML_ERROR_ prefix."""


_started = False


def call(name: str, args: list[Any]) -> Any:
    """Makes one call. Raises :class:`Refused` for what NVML refuses.

    NVML is started where it was not: by an earlier child that the library took down, for one.
    """
    global _started
    try:
        if not _started:
            pynvml.nvmlInit()
            _started = True
        special = _SPECIAL.get(name)
        if special is not None:
            return special(*args)
        if name.endswith("RunningProcesses"):
            name += "_v3"  # without it the binding hides which function it did not find
        try:
            return _call(name, args)
        except pynvml.NVMLError_FunctionNotFound:
            if name not in OLDER:
                raise
            return _call(OLDER[name], args)
    except pynvml.NVMLError as error:
        raise Refused(error_name(error.value)) from None


def _call(name: str, args: list[Any]) -> Any:
    function = getattr(pynvml, name, None)
    if function is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    devices = DEVICE_ARGUMENTS.get(name, 1 if name.startswith("nvmlDevice") else 0)
    return _plain(function(*(_handle(index) for index in args[:devices]), *args[devices:]))


def error_name(code: int) -> str:
    """``NOT_SUPPORTED`` for 3; the number itself for a code that the binding does not know."""
    return _ERRORS.get(code, f"ERROR_{code}")


_ERRORS: dict[int, str] = {
    value: name[len("NVML_ERROR_") :]
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and isinstance(value, int)
}
_ERRORS[18] = "LIB_RM_VERSION_MISMATCH"


def _plain(value: Any) -> Any:
    """Numbers, text, lists and dictionaries for whatever the binding returned."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, bytes):
        return value.split(b"\0", 1)[0].decode("utf-8", "replace")
    if isinstance(value, ctypes.Array):
        return bytes(value).hex() if getattr(value, "_type_", None) in _BYTES else _items(value)
    if isinstance(value, (list, tuple)):
        return _items(value)
    if isinstance(value, (ctypes.Structure, ctypes.Union)):
        return {field[0]: _plain(getattr(value, field[0])) for field in value._fields_}
    fields = {key: item for key, item in vars(value).items() if not key.startswith("_")}
    return {key: _plain(item) for key, item in fields.items()}


_BYTES = (ctypes.c_ubyte, ctypes.c_byte)


def _items(values: Any) -> list[Any]:
    return [_plain(value) for value in values]


def _handle(index: int) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def _mask(words: Any) -> list[int]:
    """The set bits of an NVML mask, as CPU or node numbers."""
    return [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def _cpu_affinity(index: int) -> list[int]:
    return _mask(pynvml.nvmlDeviceGetCpuAffinity(_handle(index), CPU_WORDS))


def _cpu_affinity_within(index: int, scope: int) -> list[int]:
    return _mask(pynvml.nvmlDeviceGetCpuAffinityWithinScope(_handle(index), CPU_WORDS, scope))


def _memory_affinity(index: int, scope: int) -> list[int]:
    return _mask(pynvml.nvmlDeviceGetMemoryAffinity(_handle(index), NODE_WORDS, scope))


def _field_values(index: int, wanted: list[Any]) -> list[dict[str, int]]:
    """Each field with its own return code (``return`` 0 is success): items are [field, scope]."""
    asked = [(field, scope) for field, scope in wanted]
    got = pynvml.nvmlDeviceGetFieldValues(_handle(index), asked)
    return [
        {
            "field": int(item.fieldId),
            "scope": int(item.scopeId),
            "return": int(item.nvmlReturn),
            "value": _field_value(item),
        }
        for item in got
    ]


def _field_value(item: Any) -> Any:
    """A field's number by its declared type (nvmlValueType_t 0 to 6)."""
    names = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    kind = int(item.valueType)
    return getattr(item.value, names[kind]) if 0 <= kind < len(names) else None


def _fabric(index: int) -> dict[str, Any]:
    """Fabric information by the newest version that the driver takes: v3, v2, the legacy call."""
    handle = _handle(index)
    for structure in (pynvml.c_nvmlGpuFabricInfo_v3_t, pynvml.c_nvmlGpuFabricInfo_v2_t):
        info = structure()
        try:
            pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        except (
            pynvml.NVMLError_ArgumentVersionMismatch,
            pynvml.NVMLError_FunctionNotFound,
            pynvml.NVMLError_InvalidArgument,
        ):
            continue
        return _fabric_fields(info)
    legacy = pynvml.c_nvmlGpuFabricInfo_t()
    pynvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(legacy))
    return _fabric_fields(legacy)


def _platform(index: int) -> dict[str, Any]:
    """Rack position of a GPU. The binding cuts char fields at NUL, so memory is read instead."""
    info = pynvml.c_nvmlPlatformInfo_v2_t()
    pynvml.nvmlDeviceGetPlatformInfo(_handle(index), ctypes.byref(info))
    memory = bytes(memoryview(info))
    result: dict[str, Any] = {}
    for name, *_ in info._fields_:
        place = getattr(type(info), name)
        piece = memory[place.offset : place.offset + place.size]
        if name == "ibGuid":
            result[name] = piece.hex()
        elif name == "chassisSerialNumber":
            result[name] = _plain(piece)
        elif name != "version":
            result[name] = piece[0]
    return result


def _fabric_fields(info: Any) -> dict[str, Any]:
    """The structure's fields; the cluster UUID in hex, whole (a zero byte is no end of text)."""
    place = type(info).clusterUuid
    fields = {name: _plain(getattr(info, name)) for name, *_ in info._fields_ if name != "version"}
    fields["clusterUuid"] = bytes(memoryview(info))[place.offset : place.offset + place.size].hex()
    return fields


def _mig_instance(index: int, instance: int) -> dict[str, Any]:
    """One MIG device of a GPU: its UUID, instance ids and memory in bytes."""
    mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(_handle(index), instance)
    return {
        "uuid": pynvml.nvmlDeviceGetUUID(mig),
        "name": pynvml.nvmlDeviceGetName(mig),
        "gpu_instance": pynvml.nvmlDeviceGetGpuInstanceId(mig),
        "compute_instance": pynvml.nvmlDeviceGetComputeInstanceId(mig),
        "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(mig).total,
    }


def _c2c_mode(index: int) -> int:
    """Whether C2C is on. The structure of this call has no version field."""
    answer = pynvml.nvmlDeviceGetC2cModeInfoV(_handle(index))
    return int(getattr(answer, "isC2cEnabled", answer))


_SPECIAL: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda: True,
    "nvmlDeviceGetCount": lambda: pynvml.nvmlDeviceGetCount(),
    "nvmlDeviceGetHandleByIndex": lambda index: bool(_handle(index)),
    "nvmlDeviceGetCpuAffinity": _cpu_affinity,
    "nvmlDeviceGetCpuAffinityWithinScope": _cpu_affinity_within,
    "nvmlDeviceGetMemoryAffinity": _memory_affinity,
    "nvmlDeviceGetFieldValues": _field_values,
    "nvmlDeviceGetGpuFabricInfoV": _fabric,
    "nvmlDeviceGetPlatformInfo": _platform,
    "nvmlDeviceGetMigDeviceHandleByIndex": _mig_instance,
    "nvmlDeviceGetC2cModeInfoV": _c2c_mode,
}
"""Calls whose arguments or structures need more than passing on; they answer plain data."""
