"""One scan: runs the probes on a host, builds the topology from what they found.

Probes that read files run here in turn; those that wait for the driver run beside them on a live
machine. Trust goes in the same order: sysfs, then NVML, then nvidia-smi.
"""

from __future__ import annotations

import time
from typing import Any

from gputopo.facts import Fact, Missing, ProbeStatus, Problem
from gputopo.host.base import Host
from gputopo.topology.build import Facts, build
from gputopo.topology.graph import Topology

FILE_PROBES = ("pci", "numa", "cpu", "rdma", "net", "system", "kernel_log")
DRIVER_PROBES = ("nvml", "nvidia_smi")

PRINTED = {
    "pci": "pci_printed",
    "numa": "numa",
    "cpu": "lscpu",
    "rdma": "ib_tools",
    "nvml": "smi_printed",
    "nvidia_smi": "nvidia_smi",
}
"""For pasted text, which has no files and no driver: modules whose function ``printed`` makes the
same facts of what programs print. Of the rest such a source tells nothing."""

GRACE = 1.0
"""Seconds granted to the driver's thread past the budget, to come back from its last time-out."""


def scan_host(host: Host) -> Topology:
    """The topology of a host, which stays open. Raises nothing, whatever the machine's state."""
    found: dict[str, Fact[Any]] = {}
    status: dict[str, ProbeStatus] = {}
    if host.concurrent:
        import threading

        driver = threading.Thread(
            target=_run, args=(host, DRIVER_PROBES, found, status), daemon=True
        )
        driver.start()
        _run(host, FILE_PROBES, found, status)
        driver.join(host.remaining() + GRACE)
    else:
        _run(host, (*FILE_PROBES, *DRIVER_PROBES), found, status)
    for name in DRIVER_PROBES:
        if name not in status:
            late = Missing("timeout", "no answer within the scan's budget")
            found[name] = late
            status[name] = ProbeStatus(name=name, status="timeout", seconds=0.0, detail=str(late))
    return build(
        Facts(**dict(found)),
        source_kind=host.kind,
        source_name=host.name,
        captured_at=host.captured_at,
        probes=[status[name] for name in (*FILE_PROBES, *DRIVER_PROBES)],
    )


def _run(
    host: Host, names: tuple[str, ...], found: dict[str, Fact[Any]], status: dict[str, ProbeStatus]
) -> None:
    import importlib

    for name in names:
        start = time.perf_counter()
        try:
            if host.kind != "text":
                fact = importlib.import_module(f"gputopo.probes.{name}").probe(host)
            elif name in PRINTED:
                fact = importlib.import_module(f"gputopo.probes.{PRINTED[name]}").printed(host)
            else:
                fact = Missing("absent", "not in this source")
        except Exception as error:  # one probe's fault must not cost the others' answers
            fact = Missing("failed", f"{type(error).__name__}: {error}"[:200])
        seconds = round(time.perf_counter() - start, 4)
        # The status goes first: whoever sees the fact can rely on it.
        status[name] = _status(name, fact, seconds)
        found[name] = fact


def _status(name: str, fact: Fact[Any], seconds: float) -> ProbeStatus:
    if isinstance(fact, Missing):
        word = {"unsupported": "absent", "unparsed": "failed"}.get(fact.reason, fact.reason)
        return ProbeStatus(name=name, status=word, seconds=seconds, detail=fact.detail)  # type: ignore[arg-type]
    problems: list[Problem] = getattr(fact, "problems", [])
    detail = "; ".join(f"{problem.source}: {problem.missing}" for problem in problems[:3])
    if len(problems) > 3:
        detail += f"; and {len(problems) - 3} more"
    if any(problem.missing.reason == "timeout" for problem in problems):
        return ProbeStatus(name=name, status="timeout", seconds=seconds, detail=detail)
    return ProbeStatus(
        name=name, status="partial" if problems else "ok", seconds=seconds, detail=detail
    )
