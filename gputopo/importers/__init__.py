"""Other people's formats: what is told by its content and becomes a host that can be scanned."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gputopo.host.base import Host


def recognise(data: bytes, name: str) -> Host | None:
    """A host for what a source holds; None for what no importer knows.

    Raises SourceError for what is known and cannot be used.
    """
    from gputopo.importers import session

    return session.recognise(data, name)
