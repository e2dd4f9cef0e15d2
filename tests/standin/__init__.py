"""A stand-in for the NVIDIA driver's library, fed from a recording.

:func:`build` compiles ``nvml.c`` into a ``libnvidia-ml.so.1`` that the real binding loads, and
:func:`table` turns the NVML answers of a recording into the table that it answers from; so a live
scan through it must give back what was recorded.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pynvml

from gputopo.cpulist import render
from gputopo.facts import Missing
from gputopo.host.recording import Answers

SONAME = "libnvidia-ml.so.1"
TABLE_VARIABLE = "GPUTOPO_TEST_NVML"

NOT_IN_OLD_DRIVERS = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetAddressingMode",
    "nvmlDeviceGetC2cModeInfoV",
    "nvmlDeviceGetPlatformInfo",
    "nvmlDeviceGetNumaNodeId",
)
"""Functions that a driver of 2021 does not export, though today's binding asks for them."""


def compiler() -> str | None:
    """A C compiler of this machine."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(directory: Path, hidden: Iterable[str] = ()) -> Path:
    """Compiles the library into ``directory``, without exporting the ``hidden`` functions."""
    found = compiler()
    assert found is not None
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "hidden.map"
    script.write_text("{ local: " + "".join(f"{name}; " for name in ("none", *hidden)) + "};\n")
    library = directory / SONAME
    subprocess.run(
        [
            *(found, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-fvisibility=hidden"),
            *(f"-Wl,-soname,{SONAME}", f"-Wl,--version-script={script}"),
            *("-o", str(library), str(Path(__file__).with_name("nvml.c"))),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return library


def table(answers: Answers, changes: Mapping[str, str] | None = None) -> str:
    """The library's table for a recording's NVML answers.

    ``changes`` adds or replaces lines, by key (see ``nvml.c``): a trouble, an error, odd bytes.
    Answers that are no NVML error (a time-out, say) have no line.
    """
    lines: dict[str, str] = {}
    for (call, *args), value in answers.nvml.items():
        if not isinstance(value, Missing):
            lines.update(_ENCODERS.get(call, _plain)(call, args, value))
        elif value.detail.startswith("NVML "):
            # An error of a whole field query is that of its first field.
            key = _key(call, [args[0], *args[1][0]] if call.endswith("FieldValues") else args)
            lines[key] = f"!{error_code(value.detail[len('NVML ') :])}"
    lines.update(changes or {})
    return "".join(f"{key}\t{value}\n" for key, value in lines.items())


def error_code(name: str) -> int:
    """The number of an NVML error: 15 for GPU_IS_LOST, 77 for ERROR_77."""
    if name.startswith("ERROR_"):
        return int(name[len("ERROR_") :])
    return int(getattr(pynvml, f"NVML_ERROR_{name}"))


def escape(text: str | bytes) -> str:
    """Text as the table holds it; spaces stay."""
    return quote(text, safe=" !\"#$&'()*+,-./:;<=>?@[]^_`{|}~")


def _key(call: str, args: Iterable[Any]) -> str:
    return " ".join([call, *(str(arg) for arg in args)])


Lines = dict[str, str]


def _plain(call: str, args: list[Any], value: Any) -> Lines:
    if isinstance(value, str):
        # A leading exclamation mark would be an error.
        text = escape(value)
        return {_key(call, args): f"%21{text[1:]}" if text.startswith("!") else text}
    values = value if isinstance(value, list) else [value]
    return {_key(call, args): " ".join(str(int(item)) for item in values)}


def _cpus(call: str, args: list[Any], value: list[int]) -> Lines:
    return {_key(call, args): render(value)}


def _members(*names: str) -> Callable[[str, list[Any], dict[str, int]], Lines]:
    """Encodes a structure as the numbers of its members, in this order."""

    def encode(call: str, args: list[Any], value: dict[str, int]) -> Lines:
        return {_key(call, args): " ".join(str(value.get(name, 0)) for name in names)}

    return encode


def _pci(call: str, args: list[Any], value: dict[str, Any]) -> Lines:
    """A composed recording may hold the bus id alone; NVML always says the rest too."""
    bus_id = value["busId"]
    domain, bus, device = (int(part, 16) for part in bus_id.partition(".")[0].split(":"))
    words = [
        quote(value.get("busIdLegacy", bus_id[4:]), safe=":"),
        value.get("domain", domain),
        value.get("bus", bus),
        value.get("device", device),
        value.get("pciDeviceId", 0),
        value.get("pciSubSystemId", 0),
        escape(bus_id),
    ]
    return {_key(call, args): " ".join(str(word) for word in words)}


def _fields(call: str, args: list[Any], value: list[dict[str, Any]]) -> Lines:
    """The type is not recorded; any that holds the value will do (unsigned long long, double)."""
    lines: Lines = {}
    for item in value:
        answer = item["value"]
        kind = 99 if answer is None else 0 if isinstance(answer, float) else 3 if answer >= 0 else 4
        lines[_key(call, [args[0], item["field"], item["scope"]])] = (
            f"{item['return']} {kind} {answer or 0}"
        )
    return lines


def _fabric(call: str, args: list[Any], value: dict[str, Any]) -> Lines:
    names = ("status", "cliqueId", "state", "healthMask", "healthSummary")
    words = [value["clusterUuid"], *(str(value[name]) for name in names if name in value)]
    return {_key(call, args): " ".join(words)}


def _platform(call: str, args: list[Any], value: dict[str, Any]) -> Lines:
    names = ("slotNumber", "trayIndex", "hostId", "peerType", "moduleId")
    words = [value["ibGuid"], *(str(value[name]) for name in names)]
    return {_key(call, args): " ".join([*words, escape(value["chassisSerialNumber"])])}


def _mig(call: str, args: list[Any], value: dict[str, Any]) -> Lines:
    name = f"{args[0]}/{args[1]}"
    return {
        _key(call, args): "1",
        f"nvmlDeviceGetUUID {name}": escape(value["uuid"]),
        f"nvmlDeviceGetName {name}": escape(value["name"]),
        f"nvmlDeviceGetGpuInstanceId {name}": str(value["gpu_instance"]),
        f"nvmlDeviceGetComputeInstanceId {name}": str(value["compute_instance"]),
        f"nvmlDeviceGetMemoryInfo {name}": f"{value['memory_bytes']} 0 0",
    }


def _processes(call: str, args: list[Any], value: list[dict[str, Any]]) -> Lines:
    whole = (1 << 32) - 1
    words: list[int] = []
    for process in value:
        used = process["usedGpuMemory"]
        words += [process["pid"], (1 << 64) - 1 if used is None else used]
        words += [process.get(key, whole) for key in ("gpuInstanceId", "computeInstanceId")]
    return {_key(call, args): " ".join(map(str, words))}


_ENCODERS: dict[str, Callable[[str, list[Any], Any], Lines]] = {
    "nvmlDeviceGetCpuAffinity": _cpus,
    "nvmlDeviceGetCpuAffinityWithinScope": _cpus,
    "nvmlDeviceGetMemoryAffinity": _cpus,
    "nvmlDeviceGetMemoryInfo": _members("total", "free", "used"),
    "nvmlDeviceGetBAR1MemoryInfo": _members("bar1Total", "bar1Free", "bar1Used"),
    "nvmlDeviceGetPciInfo": _pci,
    "nvmlDeviceGetNvLinkRemotePciInfo": _pci,
    "nvmlDeviceGetFieldValues": _fields,
    "nvmlDeviceGetGpuFabricInfoV": _fabric,
    "nvmlDeviceGetPlatformInfo": _platform,
    "nvmlDeviceGetMigDeviceHandleByIndex": _mig,
    "nvmlDeviceGetComputeRunningProcesses": _processes,
    "nvmlDeviceGetGraphicsRunningProcesses": _processes,
    "nvmlDeviceGetMPSComputeRunningProcesses": _processes,
}
