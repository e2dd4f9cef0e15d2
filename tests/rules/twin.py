"""Broken twins of bundled machines: the same recording with a few answers changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gputopo.facts import Fact
from gputopo.host.base import Output
from gputopo.host.recording import RecordedHost, nvml_key
from gputopo.host.source import open_source
from gputopo.host.tree import Directory, Entry
from gputopo.rules import check
from gputopo.rules.finding import Report
from gputopo.scanning import scan_host
from gputopo.topology.graph import Topology


def recorded(fixture: str) -> RecordedHost:
    """A bundled machine whose answers the caller may change."""
    host = open_source(f"fixture:{fixture}")
    assert isinstance(host, RecordedHost)
    return host


def twin(
    fixture: str,
    *,
    files: Mapping[str, Entry | None] | None = None,
    nvml: Mapping[tuple[Any, ...], Fact[Any]] | None = None,
    commands: Mapping[tuple[str, ...], Fact[Output]] | None = None,
) -> Topology:
    """The topology of a bundled machine with other answers.

    ``files`` goes by path (links on the way are followed; None takes the entry away), ``nvml`` by
    call and arguments (``("nvmlDeviceGetName", 0)``), ``commands`` by argument vector.
    """
    host = recorded(fixture)
    answers = host.answers
    for path, entry in (files or {}).items():
        parent, _, base = path.rpartition("/")
        real = host.real(parent)
        assert isinstance(real, str)
        names = answers.files.get(real)
        if isinstance(names, Directory):
            kept = set(names) - {base} if entry is None else set(names) | {base}
            answers.files[real] = Directory(sorted(kept))
        if entry is None:
            answers.files.pop(f"{real}/{base}", None)
        else:
            answers.files[f"{real}/{base}"] = entry
    for (call, *args), value in (nvml or {}).items():
        answers.nvml[nvml_key(call, args)] = value
    answers.commands.update(commands or {})
    return scan_host(host)


def codes(topology: Topology, *, at_least: str = "note") -> set[str]:
    """The codes found, down to a severity."""
    order = ("error", "warning", "note")
    wanted = order[: order.index(at_least) + 1]
    return {finding.code for finding in check(topology).findings if finding.severity in wanted}


def report(topology: Topology, code: str) -> Report:
    """What one rule says."""
    return check(topology, only=[code])
