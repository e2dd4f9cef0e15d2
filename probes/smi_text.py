"""A pasted table as words with their places, once broken and cut lines are seen to.

Two things happen to whole tables: a terminal breaks lines at its width, anywhere, and a screen shot
or ``cut`` drops what is beyond a column. Broken lines are put together again; the last words of
lines that were all cut at one column are taken out, since they may be half words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_LINES = 20_000
MAX_LINE = 1 << 16
"""Characters of a line; sixteen GPUs and forty NICs all on one line are 25,000."""

TAB = 8
"""Columns at most between two words of a table that was printed with tabs."""

_NAME = re.compile(r"\s*(?:GPU\d|NIC\d|[a-z]\w*\d|Legend|NIC Legend|X\s+=|[A-Z#]{2,4}\s+=)")
"""How a line of a table begins that is no rest of the line before."""

_TITLES = re.compile(r"\bGPU0\s+(?:GPU1|NIC0|mlx\d_|CPU)")

_WORD = re.compile(
    r"X|NV\d{1,2}|[A-Z]{3,4}|Affinity|GPU\d{1,3}|NIC\d{1,3}|mlx\d_\d{1,3}|N/A|\d[\d,-]*"
)
"""What may be a whole cell."""

DOUBT = "\ufffd"

_JOINT = re.compile(
    r"(?<=\d)(?=GPU\d|NIC\d|mlx\d_|CPU\b)|(?<=Affinity)(?=NUMA\b|GPU\b)"
    r"|(?<=N/A)(?=GPU\d|NIC\d|mlx\d_)"
)
"""Where a word of a header or a row begins though no blank is left before it."""


class Token(NamedTuple):
    text: str
    line: int
    start: int
    end: int


class TableText:
    """The words of a text, in order. ``open_end``: the last one may be half a word."""

    def __init__(self, text: str) -> None:
        lines = [line[:MAX_LINE].rstrip() for line in text.split("\n")[:MAX_LINES]]
        whole = _without_half_words(_joined(lines))
        self.lines = whole or _joined(lines)
        self.cropped = whole is not None
        self.open_end = not text.endswith("\n")
        self.tokens = list(_tokens(self.lines))

    def word(self, at: int) -> str:
        """The word at a place; empty beyond the last one."""
        return self.tokens[at].text if at < len(self.tokens) else ""

    def begins_line(self, at: int) -> bool:
        """Whether nothing but quotation marks stands before a word."""
        token = self.tokens[at]
        return not self.lines[token.line][: token.start].strip(" \t>#|*")


def _joined(lines: list[str]) -> list[str]:
    """The lines as they were before a terminal broke them at its width."""
    width = max(map(len, lines), default=0)
    full = [number for number, line in enumerate(lines[:-1]) if len(line) == width]
    if not any(_is_broken(lines[number], lines[number + 1]) for number in full):
        return lines
    joined: list[str] = []
    last = 0
    for line in lines:
        if joined and last > width - TAB and _goes_on(line):
            # Blanks at the break are gone; a table is expanded where this happens.
            joined[-1] += (" " * (width - last) or _joint(joined[-1], line)) + line
        else:
            joined.append(line)
        last = len(line)
    return joined


def _ends(line: str, rest: str) -> list[str]:
    """The words on both sides of a line's end."""
    return [word[:4096] for word in (*line.split()[-1:], *rest.split()[:1])]


def _is_broken(line: str, rest: str) -> bool:
    """Whether a word was broken between two lines: together they are one, and apart not both."""
    words = _ends(line, rest)
    apart = all(_WORD.fullmatch(word) for word in words)
    return _goes_on(rest) and not apart and _WORD.fullmatch("".join(words)) is not None


def _joint(line: str, rest: str) -> str:
    """Nothing where a word was broken, a blank where two words met; between digits, where nobody
    can tell, a mark that is no cell."""
    words = _ends(line, rest)
    if not all(_WORD.fullmatch(word) for word in words):
        return ""
    return DOUBT if words[0][-1] in "0123456789,-" and words[1][0] in "0123456789,-" else " "


def _goes_on(line: str) -> bool:
    return bool(line.strip()) and not _NAME.match(line)


def _without_half_words(lines: list[str]) -> list[str] | None:
    """The lines without their last words where a table was cut at its right edge, else None.

    Then rows end at one column, beyond which nothing goes, and the header there or a blank before,
    in the midst of its titles.
    """
    width = max(map(len, lines), default=0)
    full = [number for number, line in enumerate(lines) if len(line) == width]
    header = next((number for number, line in enumerate(lines) if _TITLES.search(line)), None)
    if header is None or len(full) < 3 or len(lines[header]) < width - 2:
        return None
    if lines[header].endswith(("Affinity", "NUMA ID")) or any(map(_goes_on, _after(lines, full))):
        return None
    return [re.sub(r"\S+$", "", line).rstrip() if len(line) == width else line for line in lines]


def _after(lines: list[str], numbers: list[int]) -> list[str]:
    return [lines[number + 1] for number in numbers if number + 1 < len(lines)]


def _tokens(lines: Sequence[str]) -> Iterator[Token]:
    """Words with their places, split where a blank was lost before a name."""
    for number, line in enumerate(lines):
        for match in re.finditer(r"\S+", line):
            start = match.start()
            for part in _JOINT.split(match[0]) if len(match[0]) > 4 else [match[0]]:
                if part:
                    yield Token(part, number, start, start + len(part))
                start += len(part)
