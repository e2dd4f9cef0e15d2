"""``diff --format json`` and ``check --format json`` as objects, each with its schema's name."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from gputopo import __version__
from gputopo.expect.promise import Kept, Promise
from gputopo.expect.shape import Difference
from gputopo.report.json import Source
from gputopo.topology.graph import Topology

DIFF_SCHEMA: Final = "gputopo.diff/1"
CHECK_SCHEMA: Final = "gputopo.check/1"


class DiffDocument(msgspec.Struct, frozen=True, kw_only=True):
    """In what two machines differ in shape; nothing listed means no difference."""

    schema: Literal["gputopo.diff/1"]
    version: str
    """Version of gputopo."""
    a: Source
    b: Source
    differences: list[Difference]


class CheckDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Each line of a promise against one machine."""

    schema: Literal["gputopo.check/1"]
    version: str
    """Version of gputopo."""
    source: Source
    promise: str
    """Title of the promise."""
    checks: list[Kept]


def diff_document(a: Topology, b: Topology, found: list[Difference]) -> DiffDocument:
    return DiffDocument(
        schema=DIFF_SCHEMA,
        version=__version__,
        a=Source(kind=a.source_kind, name=a.source_name),
        b=Source(kind=b.source_kind, name=b.source_name),
        differences=found,
    )


def check_document(topology: Topology, promise: Promise, lines: list[Kept]) -> CheckDocument:
    return CheckDocument(
        schema=CHECK_SCHEMA,
        version=__version__,
        source=Source(kind=topology.source_kind, name=topology.source_name),
        promise=promise.title,
        checks=lines,
    )
