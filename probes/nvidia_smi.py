"""``nvidia-smi topo -m``: the driver's own matrix, to compare with what the PCI tree says."""

from __future__ import annotations

import re

import msgspec

from gputopo.facts import Fact, Missing
from gputopo.host.base import Host

COMMAND = ["nvidia-smi", "topo", "-m"]

TIMEOUT = 60.0
"""Seconds; nvidia-smi without persistence mode has been seen to take 112 s on two GPUs. The scan's
own budget is usually shorter and wins."""

_CLASS = re.compile(r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|C2C|INT")
_AFFINITY = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")


class SmiMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """The matrix of ``topo -m``. NIC columns carry device names once the legend is applied.

    ``rows`` holds only what was printed: a row may be shorter than the header or missing.
    """

    devices: list[str]
    rows: dict[str, dict[str, str]]
    cpu_affinity: dict[str, str]
    numa_affinity: dict[str, str]
    gpu_numa_id: dict[str, str]


def probe(host: Host) -> Fact[SmiMatrix]:
    """The parsed matrix, or why there is none."""
    output = host.run(COMMAND, TIMEOUT)
    if isinstance(output, Missing):
        return output
    if output.exit != 0:
        said = [
            line.strip() for line in (output.stdout + output.stderr).splitlines() if line.strip()
        ]
        return Missing(
            "failed", f"exit code {output.exit}: {said[-1][:160] if said else 'no text'}"
        )
    return parse(output.stdout)


def parse(text: str) -> Fact[SmiMatrix]:
    """Reads the table as drivers print it: tab-separated, or aligned with two or more blanks."""
    lines = [re.sub(r"\x1b\[[0-9;]{0,8}m", "", line.rstrip("\r")) for line in text.split("\n")]
    header = next((i for i, line in enumerate(lines) if re.match(r"\s*GPU0\b", line)), None)
    if header is None:
        return Missing("unparsed", "no header line with GPU0")
    columns = [cell for cell in _cells(lines[header]) if cell]
    devices = [cell for cell in columns if cell not in _AFFINITY]
    matrix = SmiMatrix(devices=devices, rows={}, cpu_affinity={}, numa_affinity={}, gpu_numa_id={})
    tails = (matrix.cpu_affinity, matrix.numa_affinity, matrix.gpu_numa_id)
    names: dict[str, str] = {}
    for line in lines[header + 1 :]:
        legend = re.fullmatch(r"\s*(NIC\d{1,3}):\s*(\S{1,64})\s*", line)
        if legend:
            names[legend[1]] = legend[2]
            continue
        label, *cells = _cells(line) or [""]
        if label not in devices or label in matrix.rows:
            continue
        classes = cells[: len(devices)]
        if not all(_CLASS.fullmatch(cell) for cell in classes):
            return Missing(
                "unparsed",
                f"row {label}: {next(c for c in classes if not _CLASS.fullmatch(c))[:20]!r} is no path class",
            )
        matrix.rows[label] = {
            device: "SYS" if cell == "SOC" else cell for device, cell in zip(devices, classes)
        }
        rest = cells[len(devices) :]
        if len(rest) > 3:  # the driver pads the NUMA column with one more tab
            rest = [*rest[:2], *[cell for cell in rest[2:] if cell]]
        for kept, cell in zip(tails, rest):
            kept[label] = cell
    return _renamed(matrix, names)


def _cells(line: str) -> list[str]:
    if "\t" in line:
        return [cell.strip() for cell in line.split("\t")]
    return re.split(r"\s{2,}", line.strip())


def _renamed(matrix: SmiMatrix, names: dict[str, str]) -> SmiMatrix:
    """NICn replaced by the device names of the legend."""

    def name(device: str) -> str:
        return names.get(device, device)

    return SmiMatrix(
        devices=[name(device) for device in matrix.devices],
        rows={
            name(row): {name(column): cell for column, cell in cells.items()}
            for row, cells in matrix.rows.items()
        },
        cpu_affinity=matrix.cpu_affinity,
        numa_affinity=matrix.numa_affinity,
        gpu_numa_id=matrix.gpu_numa_id,
    )
