"""What every host answers, whether it is the live machine or a recording of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from gputopo.facts import Fact

FILE_LIMIT = 1 << 20
"""Bytes read of one file. The largest that is asked for is /proc/cpuinfo (about 1.5 KB a CPU)."""

OUTPUT_LIMIT = 4 << 20
"""Bytes kept of one command's output."""


class Output(msgspec.Struct, frozen=True):
    """What a command printed. A non-zero ``exit`` is an answer too, and the probe's to judge."""

    exit: int
    stdout: str
    stderr: str


class Host(Protocol):
    """A machine that can be asked. Each answer is a value or the reason for having none.

    Paths are absolute paths of the machine (``/sys/...``, ``/proc/...``, ``/dev/...``). No method
    raises for what the machine does; none waits without a limit.
    """

    kind: str
    """``live``, ``recording``, ``root``, ``archive``, or ``text`` for pasted output of programs."""

    name: str
    """What the user called it: a path, ``fixture:NAME``, or ``this machine``."""

    captured_at: str | None
    """When it was read (RFC 3339, UTC), where known."""

    concurrent: bool
    """Whether waiting on the driver and reading files at once pays."""

    def read_bytes(self, path: str) -> Fact[bytes]:
        """The content of a file, up to :data:`FILE_LIMIT` bytes."""
        ...

    def read_text(self, path: str) -> Fact[str]:
        """The same as text (UTF-8, undecodable bytes replaced), without trailing newline."""
        ...

    def list_dir(self, path: str) -> Fact[list[str]]:
        """The names in a directory, sorted."""
        ...

    def read_link(self, path: str) -> Fact[str]:
        """The target of a symbolic link as it is written there."""
        ...

    def run(self, argv: Sequence[str], timeout: float) -> Fact[Output]:
        """The output of a program, found on a safe search path and run without a shell."""
        ...

    def nvml(self, call: str, *args: Any) -> Fact[Any]:
        """The answer of one NVML call; GPUs are named by their NVML index.

        Values are plain data (numbers, text, lists, dictionaries): structures are dictionaries
        with NVML's field names. :mod:`gputopo.host.nvml` lists the calls.
        """
        ...

    def remaining(self) -> float:
        """Seconds left of the time that all answers together may take (infinite off-line)."""
        ...

    def close(self) -> None:
        """Ends what the host started. Answers after that are ``failed``."""
        ...


def printable(name: str) -> str:
    """A file name or link target as text: bytes that are no UTF-8 are replaced.

    The system hands such bytes on as lone surrogates, which no JSON can hold.
    """
    return (
        name
        if name.isascii()
        else name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    )


def decode(data: bytes) -> str:
    """Text of a sysfs or procfs file: its one trailing newline and NULs cut, bad bytes replaced."""
    return data.decode("utf-8", "replace").rstrip("\n\x00")
