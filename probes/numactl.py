"""``numactl --hardware`` as it is printed, pasted, wrapped, elided or cut."""

from __future__ import annotations

import re

import msgspec

from gputopo.cpulist import parse as parse_list
from gputopo.cpulist import render
from gputopo.facts import Fact, Missing

MAX_NODES = 4096

_AVAILABLE = re.compile(r"\bavailable: \d{1,5} nodes? \(([\d,-]{1,200})\)")
_NODE = re.compile(r"\bnode (\d{1,5}) (cpus|size|free):(.*)")
_HEADER = re.compile(r"\bnode((?:\s+\d{1,5})+)\s*$")
_ROW = re.compile(r"(?:^|\s)(\d{1,5}):((?:\s+\d{1,5})+)\s*$")
_MORE = re.compile(r"[\s\d.]*\d[\s\d.]*$")
"""A line that goes on with a list of numbers, which may be elided (``130 ... 141``)."""

_NO_NUMA = re.compile(r"No NUMA support available|no numa system|/sys not mounted")

CUT = Missing("absent", "cut off or left out in this source")


class NumactlNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node. ``cpus`` is an empty list for memory of a GPU; what is cut or elided is missing."""

    cpus: Fact[str] = CUT
    memory_mib: Fact[int] = CUT
    distances: Fact[dict[int, int]] = CUT


def parse(text: str) -> Fact[dict[int, NumactlNode]]:
    """The nodes by their index, those included that are only counted; Missing without any."""
    reader = _Reader()
    for line in text.split("\n"):
        reader.line(line[:20_000])
    return reader.nodes()


class _Reader:
    def __init__(self) -> None:
        self.named: frozenset[int] = frozenset()
        """Nodes that the first line counts."""
        self.cpus: dict[int, str] = {}
        self.sizes: dict[int, str] = {}
        self.columns: list[int] = []
        self.distances: dict[int, list[int]] = {}
        self.refused = ""
        self.doubtful: set[int] = set()
        """Nodes after whose CPUs came something that may have been more of them."""
        self.last: tuple[str, int] = ("", -1)
        """What the previous line told of: a wrapped one goes on."""

    def line(self, line: str) -> None:
        found = _NODE.search(line)
        if found:
            index, what, rest = int(found[1]), found[2], found[3]
            self.last = (what, index)
            if what == "cpus":
                self.cpus.setdefault(index, rest)
            elif what == "size":
                self.sizes.setdefault(index, rest.strip())
        elif match := _AVAILABLE.search(line):
            self.named |= _indices(match[1])
        elif _NO_NUMA.search(line):
            self.refused = line.strip()[:160]
        elif match := _HEADER.search(line):
            self.columns = _numbers(match[1])
            self.last = ("header", -1)
        elif self.columns and (match := _ROW.search(line)):
            self.last = ("row", int(match[1]))
            self.distances.setdefault(int(match[1]), _numbers(match[2]))
        elif _MORE.match(line):
            self._go_on(line)
        elif line.strip():
            if self.last[0] == "cpus":
                self.doubtful.add(self.last[1])
            self.last = ("", -1)

    def _go_on(self, line: str) -> None:
        what, index = self.last
        if what == "cpus":
            self.cpus[index] += f" {line}"
        elif what == "header":
            self.columns += _numbers(line)
        elif what == "row":
            self.distances[index] += _numbers(line)

    def nodes(self) -> Fact[dict[int, NumactlNode]]:
        seen = {*self.cpus, *self.sizes, *self.distances}
        if not seen and self.refused:
            return Missing("unsupported", self.refused)
        if not seen:
            return Missing("unparsed", "no node line in the output of numactl --hardware")
        indices = sorted({*seen, *self.named, *self.columns})[:MAX_NODES]
        return {
            index: NumactlNode(
                cpus=self._cpus(index), memory_mib=self._size(index), distances=self._row(index)
            )
            for index in indices
        }

    def _cpus(self, index: int) -> Fact[str]:
        text = self.cpus.get(index)
        if text is None or index in self.doubtful or not re.fullmatch(r"[\s\d]*", text):
            return CUT
        if self.last == ("cpus", index) and self.sizes:
            return CUT  # its size would follow: the last number may be half a number
        if not text.strip() and (self.refused or "not available" in self.sizes.get(index, "")):
            return Missing("unsupported", self.refused or "numactl knows no CPUs of this node")
        numbers = _numbers(text)
        try:
            return render(parse_list(",".join(map(str, numbers)))) if numbers else ""
        except ValueError as error:
            return Missing("unparsed", str(error))

    def _size(self, index: int) -> Fact[int]:
        text = self.sizes.get(index)
        if text is None:
            return CUT
        match = re.fullmatch(r"(\d{1,12}) MB", text)
        return int(match[1]) if match else Missing("unsupported", f"numactl says {text[:40]!r}")

    def _row(self, index: int) -> Fact[dict[int, int]]:
        values = self.distances.get(index)
        if values is None or len(values) != len(self.columns):
            return CUT
        row = dict(zip(self.columns, values))
        if self.last == ("row", index) and not self._is_whole(index, row):
            return CUT  # the last line of the text, and its last number differs from its mirror
        return row

    def _is_whole(self, index: int, row: dict[int, int]) -> bool:
        last = self.columns[-1]
        mirror = self.distances.get(last, []) if last != index else [10] * len(self.columns)
        place = self.columns.index(index) if index in self.columns else -1
        return len(mirror) != len(self.columns) or mirror[place] == row[last]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdigit() and len(word) < 6]


def _indices(text: str) -> frozenset[int]:
    try:
        found = parse_list(text)
    except ValueError:
        return frozenset()
    return found if len(found) <= MAX_NODES else frozenset()
