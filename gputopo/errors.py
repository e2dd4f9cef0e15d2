"""The tool's own errors: each is one line for the user and an exit code, never a traceback."""

from __future__ import annotations


class GputopoError(Exception):
    """A refusal that the user can act on; its text is the one line that is printed."""

    exit_code = 2


class SourceError(GputopoError):
    """A ``--from`` source that cannot be read as a machine."""
