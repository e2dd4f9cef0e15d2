"""gputopo: what this GPU server is made of, what is wrong with it, and how to mend it.

The Python interface is :func:`scan`, which returns a :class:`gputopo.topology.graph.Topology`, and
:func:`gputopo.rules.check`, which returns what is wrong with one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["__version__", "scan"]

if TYPE_CHECKING:
    from gputopo.host.base import Host
    from gputopo.topology.graph import Topology


def scan(source: str | Host | None = None, *, timeout: float = 20.0) -> Topology:
    """Reads a machine and returns its topology.

    ``source`` is None for this machine, ``fixture:NAME`` for a bundled one, a path to a recording,
    root directory or archive, ``-`` for standard input, or a host. ``timeout`` bounds a live scan
    in seconds; what was cut is said in ``Topology.probes``. Raises
    :class:`gputopo.errors.SourceError` for a source that cannot be read. A machine in any state,
    without GPU or with a dead one, raises nothing.
    """
    from gputopo.scanning import scan_host

    if source is None or isinstance(source, str):
        from gputopo.host.source import open_source

        host = open_source(source, budget=timeout)
        try:
            return scan_host(host)
        finally:
            host.close()
    return scan_host(source)
