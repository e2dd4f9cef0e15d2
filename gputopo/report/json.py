"""``scan --format json``: the topology and its findings as one object, schema gputopo.scan/1."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from gputopo import __version__
from gputopo.facts import ProbeStatus
from gputopo.nccl.predict import NcclChoice, Remark, prediction
from gputopo.rules.finding import Finding, Report, Skipped, Waived, Waiver
from gputopo.topology.graph import Topology
from gputopo.topology.model import AnyNode, Disagreement, HostInfo, Link
from gputopo.topology.paths import Matrix

UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""What JSON need not escape and a terminal may act on: DEL, C1, bidi and invisible marks."""

SCAN_SCHEMA: Final = "gputopo.scan/1"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What was read (``live``, ``recording``, ``root``, ``archive``), and what it was called."""

    kind: str
    name: str


class ScanDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One machine: its graph, what is wrong with it, and what could not be told.

    Null means unknown or not applicable; ``missing`` of the node says which, and why. Fields may be
    added within a schema's number and are never renamed: readers pass over what they do not know.
    """

    schema: Literal["gputopo.scan/1"]
    version: str
    """Version of gputopo."""
    source: Source
    captured_at: str | None
    """When the machine was read (RFC 3339, UTC); null for a live scan or where unknown."""
    host: HostInfo
    probes: list[ProbeStatus]
    nodes: list[AnyNode]
    """In tree order; ``parent`` is the id of the node above."""
    links: list[Link]
    matrix: Matrix
    disagreements: list[Disagreement]
    nccl: list[NcclChoice]
    """What NCCL does by default, for each GPU that the driver has."""
    nccl_remarks: list[Remark]
    """What holds for NCCL on the machine as a whole."""
    findings: list[Finding]
    """Worst first."""
    skipped: list[Skipped]
    """Rules that could not be asked: what they would have found is unknown."""
    asked: int
    """Rules that gave an answer, findings or none."""
    waived: list[Waived]
    expired: list[Waiver]


def scan_document(topology: Topology, report: Report) -> ScanDocument:
    """The object for one scan."""
    nccl = prediction(topology)
    return ScanDocument(
        schema=SCAN_SCHEMA,
        version=__version__,
        source=Source(kind=topology.source_kind, name=topology.source_name),
        captured_at=topology.captured_at,
        host=topology.host,
        probes=topology.probes,
        nodes=list(topology.nodes.values()),
        links=topology.links,
        matrix=topology.matrix,
        disagreements=topology.disagreements,
        nccl=nccl.choices,
        nccl_remarks=nccl.remarks,
        findings=report.findings,
        skipped=report.skipped,
        asked=report.asked,
        waived=report.waived,
        expired=report.expired,
    )


def encode(document: Any) -> bytes:
    """Indented JSON with a final newline."""
    try:
        data = msgspec.json.encode(document)
    except UnicodeEncodeError:
        # The kernel lets interfaces have names that are no UTF-8: Python keeps them by surrogates.
        data = msgspec.json.encode(_without_surrogates(msgspec.to_builtins(document)))
    text = msgspec.json.format(data, indent=2).decode()
    # A terminal must not be steered by what is printed there; to a reader of JSON it is the same.
    return UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode() + b"\n"


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub("[\ud800-\udfff]", "\ufffd", value)
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value
