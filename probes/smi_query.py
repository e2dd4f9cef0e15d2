"""What ``nvidia-smi`` tells of each GPU: ``-q``, ``--query-gpu`` as CSV, and its own table.

All three print values of NVML. Here they are brought to one record a GPU, with NVML's own units.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gputopo.facts import Fact, Missing
from gputopo.pciaddr import normalise

QUERY = ["nvidia-smi", "-q"]
CSV = ["nvidia-smi", "--query-gpu", "--format=csv"]
SUMMARY = ["nvidia-smi"]

MAX_GPUS = 256


class SmiGpu(msgspec.Struct):
    """One GPU as one output has it: fields of :class:`gputopo.probes.nvml.NvmlGpu` by name.

    ``index`` is None where the output does not number its GPUs.
    """

    index: int | None
    values: dict[str, Fact[Any]]

    @property
    def pci(self) -> str | None:
        address = self.values.get("pci")
        return address if isinstance(address, str) else None


class SmiGpus(msgspec.Struct):
    """The GPUs of one output, and what it says of the driver."""

    gpus: list[SmiGpu]
    driver: str | None = None
    cuda: str | None = None
    count: int | None = None
    """GPUs that are attached, where the output counts them."""


def _number(text: str) -> Fact[int]:
    match = re.match(r"\s*(\d{1,12})(?:\.\d{1,9})?\b", text)
    return int(match[1]) if match else _none(text)


def _lanes(text: str) -> Fact[int]:
    match = re.fullmatch(r"\s*(\d{1,2})x?\s*", text)
    return int(match[1]) if match else _none(text)


def _none(text: str) -> Missing:
    said = text.strip()[:40]
    word = "unsupported" if said.strip("[]").lower() in ("n/a", "not supported") else "unparsed"
    return Missing(word, f"nvidia-smi says {said or 'nothing'}")  # type: ignore[arg-type]


def _text(text: str) -> Fact[str]:
    said = text.strip()[:200]
    return _none(said) if said.strip("[]").lower() in ("", "n/a", "not supported") else said


def _mebibytes(text: str) -> Fact[int]:
    number = _number(text)
    return number if isinstance(number, Missing) else number << 20


def _milliwatts(text: str) -> Fact[int]:
    match = re.match(r"\s*(\d{1,6}(?:\.\d{1,3})?)\b", text)
    return round(float(match[1]) * 1000) if match else _none(text)


def _enabled(text: str) -> Fact[bool]:
    word = text.strip().lower()
    return (
        word in ("enabled", "on") if word in ("enabled", "disabled", "on", "off") else _none(text)
    )


def _mode(text: str) -> Fact[int]:
    enabled = _enabled(text)
    return enabled if isinstance(enabled, Missing) else int(enabled)


def _state(text: str) -> Fact[int]:
    match = re.fullmatch(r"\s*P(\d{1,2})\s*", text)
    return int(match[1]) if match else _none(text)


def _address(text: str) -> Fact[str]:
    return normalise(text.strip()) or _none(text)


def _pending(text: str) -> Fact[int]:
    word = text.strip().lower()
    return int(word == "yes") if word in ("yes", "no") else _none(text)


def _action(text: str) -> Fact[str]:
    said = _text(text)
    return said if isinstance(said, Missing) else said.lower()


_Read = Callable[[str], Fact[Any]]

# nvidia-smi -q

_FIELDS: dict[tuple[str, str], tuple[str, _Read]] = {
    ("", "Product Name"): ("name", _text),
    ("", "GPU UUID"): ("uuid", _text),
    ("", "Minor Number"): ("minor", _number),
    ("", "GPU Part Number"): ("part_number", _text),
    ("", "Persistence Mode"): ("persistence", _enabled),
    ("", "Performance State"): ("performance_state", _state),
    ("", "GPU Recovery Action"): ("recovery_action", _action),
    ("", "Bus Id"): ("pci", _address),
    ("", "Pending Page Blacklist"): ("retired_pages_pending", _pending),
    ("Retired Pages", "Pending"): ("retired_pages_pending", _pending),
    ("MIG Mode", "Current"): ("mig_mode", _mode),
    ("PCIe Generation", "Max"): ("pcie_max_generation", _number),
    ("PCIe Generation", "Current"): ("pcie_generation", _number),
    ("PCIe Generation", "Device Max"): ("pcie_gpu_max_generation", _number),
    ("Link Width", "Max"): ("pcie_max_width", _lanes),
    ("Link Width", "Current"): ("pcie_width", _lanes),
    ("FB Memory Usage", "Total"): ("memory_bytes", _mebibytes),
    ("BAR1 Memory Usage", "Total"): ("bar1_bytes", _mebibytes),
}
"""By section and key; keys without a section stand for themselves wherever they are."""

_BLOCK = re.compile(r"\s*GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*$")
_KEY = re.compile(r"\s*([A-Za-z][\w ()/.-]{0,60}?)\s*:(?: (.{0,200}))?$")
_SECTION = re.compile(r"\s*([A-Z][\w ()/.-]{1,60}?)\s*$")


def parse_query(text: str) -> SmiGpus:
    """The text of ``-q``, whole or a piece of it, with or without indentation."""
    found = SmiGpus([])
    section = ""
    for line in text.split("\n"):
        line = line[:300]
        block = _BLOCK.match(line)
        if block:
            if len(found.gpus) == MAX_GPUS:
                break
            found.gpus.append(SmiGpu(None, {"pci": _address(block[1])}))
            continue
        key = _KEY.match(line)
        if key is None:
            title = _SECTION.match(line)
            section = title[1] if title else section
            continue
        name, value = key[1], key[2] or ""
        if name == "Driver Version":
            found.driver = found.driver or value.strip()[:40] or None
        elif name == "CUDA Version":
            found.cuda = found.cuda or value.strip()[:40] or None
        elif name == "Attached GPUs":
            counted = _number(value)
            found.count = counted if isinstance(counted, int) else None
        else:
            _keep(found, section, name, value)
    if found.count == len(found.gpus):
        for index, gpu in enumerate(found.gpus):  # listed in NVML's order, and all of them
            gpu.index = index
    return found


def _keep(found: SmiGpus, section: str, name: str, value: str) -> None:
    entry = _FIELDS.get((section, name)) or _FIELDS.get(("", name))
    if entry is None:
        return
    field, read = entry
    fact = read(value)
    if (
        field == "pci"
        and isinstance(fact, str)
        and (not found.gpus or found.gpus[-1].pci not in (None, fact))
    ):
        # A piece without the line that begins a GPU.
        if len(found.gpus) < MAX_GPUS:
            found.gpus.append(SmiGpu(None, {}))
    if not found.gpus:
        found.gpus.append(SmiGpu(None, {}))
    found.gpus[-1].values.setdefault(field, fact)


# nvidia-smi --query-gpu=... --format=csv

_COLUMNS: dict[str, tuple[str, _Read]] = {
    "index": ("index", _number),
    "name": ("name", _text),
    "gpu_name": ("name", _text),
    "uuid": ("uuid", _text),
    "gpu_uuid": ("uuid", _text),
    "pci.bus_id": ("pci", _address),
    "gpu_bus_id": ("pci", _address),
    "driver_version": ("driver", _text),
    "pcie.link.gen.current": ("pcie_generation", _number),
    "pcie.link.gen.gpucurrent": ("pcie_generation", _number),
    "pcie.link.gen.max": ("pcie_max_generation", _number),
    "pcie.link.gen.gpumax": ("pcie_gpu_max_generation", _number),
    "pcie.link.width.current": ("pcie_width", _lanes),
    "pcie.link.width.max": ("pcie_max_width", _lanes),
    "memory.total": ("memory_bytes", _mebibytes),
    "persistence_mode": ("persistence", _enabled),
    "pstate": ("performance_state", _state),
    "mig.mode.current": ("mig_mode", _mode),
    "enforced.power.limit": ("power_limit_mw", _milliwatts),
    "power.default_limit": ("power_default_mw", _milliwatts),
    "compute_cap": ("compute_capability", _text),
    "vbios_version": ("vbios", _text),
}


def columns_of(line: str) -> list[str] | None:
    """The fields that a line names, if it is the head of a CSV: ``index, name, pci.bus_id``."""
    names = [cell.partition(" [")[0].strip() for cell in line.split(",")]
    known = sum(name in _COLUMNS for name in names)
    if known < 2 or not all(re.fullmatch(r"[a-z][\w.]{1,60}", name) for name in names):
        return None
    return names


def parse_csv(text: str) -> SmiGpus:
    """Rows below each head line. Without the column ``index`` rows are numbered as they come, which
    is how nvidia-smi prints them."""
    found = SmiGpus([])
    columns: list[str] = []
    for line in text.split("\n"):
        line = line[:2000]
        head = columns_of(line)
        if head is not None:
            columns = head
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if not columns or len(cells) != len(columns) or len(found.gpus) == MAX_GPUS:
            continue
        values = {
            _COLUMNS[name][0]: _COLUMNS[name][1](cell)
            for name, cell in zip(columns, cells)
            if name in _COLUMNS
        }
        index = values.pop("index", len(found.gpus) if "index" not in columns else None)
        driver = values.pop("driver", None)
        if isinstance(driver, str):
            found.driver = found.driver or driver
        found.gpus.append(SmiGpu(index if isinstance(index, int) else None, values))
    return found


# nvidia-smi

_VERSIONS = re.compile(r"Driver Version: ([\d.]{3,20})(?:.{0,40}CUDA Version: ([\d.]{1,10}))?")
_ROW = re.compile(
    r"\s*\|\s{1,4}(\d{1,3})\s{1,4}(\S.{0,60}?)\s+(On|Off|N/A)\s+\|\s+"
    r"([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s"
)
_USAGE = re.compile(r"\s*\|.{0,20}\bP(\d{1,2})\s.{0,60}\|\s*\d{1,9}MiB\s*/\s*(\d{1,9})MiB\s*\|")


def parse_summary(text: str) -> SmiGpus:
    """The table that nvidia-smi prints by itself: numbers, addresses, names (cut at 24 letters)."""
    found = SmiGpus([])
    for line in text.split("\n"):
        line = line[:300]
        versions = _VERSIONS.search(line)
        if versions:
            found.driver, found.cuda = versions[1], versions[2] or found.cuda
        row = _ROW.match(line)
        if row and len(found.gpus) < MAX_GPUS:
            values: dict[str, Fact[Any]] = {
                "pci": _address(row[4]),
                "persistence": _enabled(row[3]),
            }
            if not row[2].endswith("..."):
                values["name"] = row[2]
            found.gpus.append(SmiGpu(int(row[1]), values))
        usage = _USAGE.match(line)
        if usage and found.gpus:
            found.gpus[-1].values.setdefault("performance_state", int(usage[1]))
            found.gpus[-1].values.setdefault("memory_bytes", int(usage[2]) << 20)
    return found


def all_of(outputs: Sequence[SmiGpus]) -> SmiGpus:
    """One record a GPU: those of different outputs with the same number, address or UUID joined."""
    joined = SmiGpus([])
    for output in outputs:
        joined.driver = joined.driver or output.driver
        joined.cuda = joined.cuda or output.cuda
        joined.count = joined.count or output.count
    # Those with a number first: the others can then be found by what these know of them.
    for record in sorted((g for o in outputs for g in o.gpus), key=lambda gpu: gpu.index is None):
        same = next((gpu for gpu in joined.gpus if _is_same(gpu, record)), None)
        if same is None:
            joined.gpus.append(SmiGpu(record.index, dict(record.values)))
            continue
        same.index = record.index if same.index is None else same.index
        for field, fact in record.values.items():
            known = same.values.get(field)
            if known is None or isinstance(known, Missing):
                same.values[field] = fact
    return joined


def _is_same(a: SmiGpu, b: SmiGpu) -> bool:
    if a.index is not None and b.index is not None:
        return a.index == b.index
    for field in ("pci", "uuid"):
        first, second = a.values.get(field), b.values.get(field)
        if isinstance(first, str) and first == second:
            return True
    return False
