"""Rules: each judges the topology and yields findings; see :mod:`gputopo.rules.registry`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from gputopo.rules.finding import Report
    from gputopo.topology.graph import Topology


def check(
    topology: Topology, *, only: Collection[str] = (), ignore: Collection[str] = ()
) -> Report:
    """All findings on a topology, and the rules that could not be asked, with the reason.

    ``only`` and ``ignore`` are codes or their beginnings (``PCI``, ``NIC505``).
    """
    from gputopo.rules.registry import check_all

    return check_all(topology, only=only, ignore=ignore)
