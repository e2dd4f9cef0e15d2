"""TOML that users write: read with limits, and refused in one line that names the file."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from gputopo.errors import GputopoError
from gputopo.text import clean

T = TypeVar("T")

SIZE_LIMIT = 1 << 20
LINE_LIMIT = 4096
"""Bytes of a file and of a line: a line of 60 kB of dotted keys takes the parser minutes."""


def decode(data: bytes, kind: type[T], name: str) -> T:
    """The structure that a TOML text holds. Raises GputopoError for what is wrong in it."""
    shown = clean(name)
    if len(data) > SIZE_LIMIT or max(map(len, data.split(b"\n"))) > LINE_LIMIT:
        raise GputopoError(f"{shown}: larger than a file of this kind can be")
    try:
        return msgspec.toml.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise GputopoError(f"{shown}: {clean(str(error))}") from None
