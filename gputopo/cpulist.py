"""CPU and node sets in the kernel's notations: lists (``0-3,8``) and masks (``ff,00000000``)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

MAX_CPU = 1 << 16
"""Highest index accepted: far above CONFIG_NR_CPUS of any distribution, low enough that a
damaged ``0-4294967295`` cannot eat the memory."""


@lru_cache(maxsize=4096)
def parse(text: str) -> frozenset[int]:
    """The set that a kernel list such as ``0-3,8-11`` or ``0-31:2/4`` means.

    Raises ValueError for anything else; an empty or blank text is the empty set.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            if text.strip():
                raise ValueError(f"not a CPU list: {text[:60]!r}")
            continue
        span, _, stride = part.partition(":")
        first, dash, last = span.partition("-")
        low = _index(first, text)
        high = _index(last, text) if dash else low
        if high < low:
            raise ValueError(f"not a CPU list: {text[:60]!r}")
        if stride:
            used, slash, group = stride.partition("/")
            if not slash:
                raise ValueError(f"not a CPU list: {text[:60]!r}")
            take, step = _index(used, text), _index(group, text)
            if not 0 < take <= step:
                raise ValueError(f"not a CPU list: {text[:60]!r}")
            found.update(i for i in range(low, high + 1) if (i - low) % step < take)
        else:
            found.update(range(low, high + 1))
    return frozenset(found)


def is_index(text: str) -> bool:
    """Whether a text is the number of a CPU or node that could be."""
    return text.isascii() and text.isdigit() and len(text) <= 6 and int(text) <= MAX_CPU


def _index(text: str, whole: str) -> int:
    if not is_index(text):
        raise ValueError(f"not a CPU list: {whole[:60]!r}")
    return int(text)


def parse_mask(text: str) -> frozenset[int]:
    """The set that a kernel hex mask such as ``00000000,000000ff`` means (ValueError if none)."""
    digits = text.strip().replace(",", "")
    if not digits or len(digits) > MAX_CPU // 4:
        raise ValueError(f"not a CPU mask: {text[:60]!r}")
    bits = int(digits, 16)
    return frozenset(i for i in range(bits.bit_length()) if bits >> i & 1)


def render(cpus: Iterable[int]) -> str:
    """The kernel's list notation of a set: ``{0,1,2,5}`` is ``0-2,5``."""
    runs: list[str] = []
    start = previous = -2
    for cpu in [*sorted(cpus), -1]:
        if cpu == previous + 1 and cpu >= 0:
            previous = cpu
            continue
        if start >= 0:
            runs.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = cpu
    return ",".join(runs)
