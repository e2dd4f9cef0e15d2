"""``scan --format json``: the topology and its findings as one object, schema gputopo.scan/1."""

from __future__ import annotations

from typing import Any

import msgspec

from gputopo import __version__
from gputopo.rules.finding import Report
from gputopo.topology.graph import Topology

SCAN_SCHEMA = "gputopo.scan/1"


def scan_document(topology: Topology, report: Report) -> dict[str, Any]:
    """The object, its values still structures that msgspec can encode."""
    return {
        "schema": SCAN_SCHEMA,
        "version": __version__,
        "source": {"kind": topology.source_kind, "name": topology.source_name},
        "captured_at": topology.captured_at,
        "host": topology.host,
        "probes": topology.probes,
        "nodes": list(topology.nodes.values()),
        "links": topology.links,
        "matrix": topology.matrix,
        "disagreements": topology.disagreements,
        "findings": report.findings,
        "skipped": report.skipped,
    }


def encode(document: Any) -> bytes:
    """Indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
