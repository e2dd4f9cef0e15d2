"""What a probe can say about one thing: a value, or a typed reason for having none.

A fact is ``T | Missing``. Unknown is never an empty string, 0 or -1: code that wants the value
must first rule out :class:`Missing`, and the reason travels on to the report.
"""

from __future__ import annotations

from typing import Literal, TypeVar, Union

import msgspec

T = TypeVar("T")

Reason = Literal["absent", "denied", "timeout", "failed", "unsupported", "unparsed"]


class Missing(msgspec.Struct, frozen=True):
    """Why there is no value.

    ``absent``       the thing is not there (no such file, no such program, no library)
    ``denied``       it is there, and this user may not read it
    ``timeout``      no answer before the deadline
    ``failed``       an answer that is an error (exit code, errno, NVML error)
    ``unsupported``  the source says that it does not have this
    ``unparsed``     an answer that this tool could not read
    """

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


Fact = Union[T, Missing]  # noqa: UP007 (no | with a type variable on 3.10)

ABSENT = Missing("absent")


def known(fact: Fact[T], default: T | None = None) -> T | None:
    """The value of a fact, or ``default`` where it is missing."""
    return default if isinstance(fact, Missing) else fact


class Problem(msgspec.Struct, frozen=True):
    """A question that a probe asked in vain: where it looked and why it got nothing."""

    source: str
    missing: Missing


class ProbeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one probe fared. ``seconds`` is wall time and differs from run to run."""

    name: str
    status: Literal["ok", "partial", "absent", "denied", "timeout", "failed"]
    seconds: float
    detail: str = ""
