"""Twins that need another tree or other settings than a recording can be given by hand."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import msgspec

from gputopo.facts import Fact
from gputopo.host.recording import RecordedHost, nvml_key
from gputopo.rules.finding import Finding
from gputopo.scanning import scan_host
from gputopo.topology.graph import Topology
from tests.rules.twin import report

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from composer import compose  # noqa: E402

FIXTURES = {
    path.stem: path
    for path in sorted((ROOT / "fixtures").glob("*.toml"))
    if path.stem != "qemu-8gpu-vm"  # recorded, and broken on purpose
}

UNEVENTFUL = {
    "dgx-2": {"NIC503"},
    "hgx-b200": {"NIC503"},
    "rtx4090-workstation": {"NVL403"},
}
"""Notes of the families GPU, NVL and NIC that are true of a healthy machine."""


def composed(
    fixture: str,
    *,
    tree: tuple[tuple[str, str], ...] = (),
    machine: dict[str, Any] | None = None,
    nvml: dict[tuple[Any, ...], Fact[Any]] | None = None,
    **change: dict[str, Any],
) -> Topology:
    """A bundled machine with other lines in its tree, other settings, devices or NVML answers."""
    description = copy.deepcopy(msgspec.toml.decode(FIXTURES[fixture].read_bytes()))
    told = description["machine"]
    for before, after in tree:
        assert told["tree"].count(before) == 1, before
        told["tree"] = told["tree"].replace(before, after)
    told.update(machine or {})
    told.setdefault("change", {}).update(change)
    answers = compose(description)
    for (call, *args), value in (nvml or {}).items():
        answers.nvml[nvml_key(call, args)] = value
    return scan_host(RecordedHost(fixture, answers))


def all_gpus(number: int, **settings: Any) -> dict[str, dict[str, Any]]:
    """The same settings for GPUs 0 to ``number`` - 1."""
    return {f"gpu{index}": dict(settings) for index in range(number)}


def findings(topology: Topology, code: str) -> list[Finding]:
    return report(topology, code).findings


def only(topology: Topology, code: str) -> Finding:
    """The one finding of a rule."""
    found = findings(topology, code)
    assert len(found) == 1, [f.summary for f in found]
    return found[0]


def skipped(topology: Topology, code: str) -> str:
    """Why a rule was not asked; empty if it was."""
    reasons = [skip.reason for skip in report(topology, code).skipped]
    return reasons[0] if reasons else ""
