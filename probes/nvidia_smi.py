"""``nvidia-smi topo -m``: the driver's own matrix, to compare with what the PCI tree says."""

from __future__ import annotations

import msgspec

from gputopo.facts import Fact, Missing, Problem
from gputopo.host.base import Host
from gputopo.probes.smi_table import Table, tables

COMMAND = ["nvidia-smi", "topo", "-m"]

PCIE_COMMAND = ["nvidia-smi", "topo", "-mp"]
"""The same without NVLink: its cells tell the PCIe path of every pair. Never run, but pasted."""

UNNAMED_COMMAND = ["nvidia-smi", "topo"]
"""Stands for one of the two, where a matrix is pasted without the command."""

TIMEOUT = 60.0
"""Seconds; nvidia-smi without persistence mode has been seen to take 112 s on two GPUs. The scan's
own budget is usually shorter and wins."""


class SmiMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """The matrix of ``topo -m``. NIC columns carry device names once the legend is applied.

    ``rows`` holds only what was printed: a row may be shorter than the header or missing.
    ``nvlink`` tells whether NVLinks are among what is shown: not by ``-mp``, and None where neither
    the command nor the output says which of the two it is.
    """

    devices: list[str]
    rows: dict[str, dict[str, str]]
    cpu_affinity: dict[str, str]
    numa_affinity: dict[str, str]
    gpu_numa_id: dict[str, str]
    nvlink: bool | None = True
    problems: list[Problem] = []

    @property
    def command(self) -> str:
        """The command that prints such a matrix, for a report."""
        return " ".join(PCIE_COMMAND if self.nvlink is False else COMMAND)

    def cell(self, a: str, b: str) -> str | None:
        """What was printed for a pair, in whichever of its two rows."""
        return self.rows.get(a, {}).get(b) or self.rows.get(b, {}).get(a)


def probe(host: Host) -> Fact[SmiMatrix]:
    """The parsed matrix, or why there is none."""
    output = host.run(COMMAND, TIMEOUT)
    if isinstance(output, Missing):
        return output
    if output.exit != 0:
        said = [line.strip() for line in (output.stdout + output.stderr).splitlines()]
        last = next((line for line in reversed(said) if line), "no text")
        return Missing("failed", f"exit code {output.exit}: {last[:160]}")
    return parse(output.stdout)


def printed(host: Host) -> Fact[SmiMatrix]:
    """The matrix that is pasted: that of ``-m``, else what may be one, else that of ``-mp``."""
    for command, nvlink in ((COMMAND, True), (UNNAMED_COMMAND, None), (PCIE_COMMAND, False)):
        output = host.run(command, TIMEOUT)
        if not isinstance(output, Missing):
            return parse(output.stdout, nvlink)
    return Missing("absent", "not in this source")


def parse(text: str, nvlink: bool | None = True) -> Fact[SmiMatrix]:
    """The first matrix in a text."""
    found = [table for table in tables(text) if table.kind != "p2p"]
    if not found:
        return Missing("unparsed", "no header line with GPU0")
    table = next((table for table in found if table.rows), found[0])
    if not table.rows:
        return Missing("unparsed", table.problems[0])
    if any(other.rows and other.rows != table.rows for other in found if other is not table):
        table.problems.append("another matrix, which differs from this one, is left out")
    return matrix_of(table, nvlink)


def matrix_of(table: Table, nvlink: bool | None) -> SmiMatrix:
    """A table with NICn replaced by the device names of the legend."""

    def name(device: str) -> str:
        return table.names.get(device, device)

    shown = any(cell.startswith("NV") for cells in table.rows.values() for cell in cells.values())
    return SmiMatrix(
        devices=[name(device) for device in table.devices],
        rows={
            name(row): {name(column): cell for column, cell in cells.items()}
            for row, cells in table.rows.items()
        },
        cpu_affinity=table.affinity.get("cpus", {}),
        numa_affinity=table.affinity.get("numa", {}),
        gpu_numa_id=table.affinity.get("memory", {}),
        nvlink=True if shown or "NV#" in table.legend else nvlink,
        problems=[
            Problem(" ".join(COMMAND), Missing("unparsed", problem)) for problem in table.problems
        ],
    )
