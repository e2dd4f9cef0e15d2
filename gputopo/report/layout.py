"""Lines of styled text for a terminal, laid out by the cells that characters take.

A report is built of spans, and a span is printed through :func:`gputopo.text.clean` and only there:
no text of a device, process or host can reach the terminal another way.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gputopo.text import clean

STYLES = {
    "error": "1;31",
    "warning": "33",
    "note": "36",
    "good": "32",
    "bold": "1",
    "dim": "2",
}
"""Select Graphic Rendition parameters (ECMA-48) by style; colours of the terminal's own palette."""

NARROWEST = 60
"""Below that many columns a report is laid out for this many, and the terminal wraps it."""

WITHOUT_TERMINAL = 100
"""Columns where nobody says how wide the page is."""

LINE_LIMIT = 100_000
"""Characters of one span; what makes spans cuts names much shorter."""


class Span(NamedTuple):
    """Text of one style; it may be foreign text."""

    text: str
    style: str = ""


def cell_len(text: str) -> int:
    """Terminal columns of a text: two for wide East Asian characters, none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def cut(text: str, cells: int) -> str:
    """``text``, or its beginning and an ellipsis where it takes more than ``cells`` columns."""
    if cell_len(text) <= cells:
        return text
    kept, used = "", 1
    for character in text:
        used += cell_len(character)
        if used > cells:
            break
        kept += character
    return kept + "…"


def pad(span: Span, cells: int) -> Span:
    """The span with blanks behind it up to ``cells`` columns."""
    return Span(span.text + " " * (cells - cell_len(span.text)), span.style)


def page_width(tty: bool) -> int:
    """Columns to fill: COLUMNS if it is set, else the terminal's own, else 100."""
    told = os.environ.get("COLUMNS", "")
    if told.isascii() and told.isdigit() and int(told[:6]):
        return int(told[:6])
    if tty:
        try:
            return os.get_terminal_size(sys.stdout.fileno()).columns or WITHOUT_TERMINAL
        except (OSError, ValueError):
            pass
    return WITHOUT_TERMINAL


def wants_colour(tty: bool) -> bool:
    """Colour goes to terminals only, and never against the user's NO_COLOR (no-color.org)."""
    return tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Page:
    """Collects lines."""

    def __init__(self, width: int, colour: bool) -> None:
        self.width = max(width, NARROWEST)
        self.colour = colour
        self.lines: list[list[Span]] = []

    def line(self, *spans: Span | str) -> None:
        """One line, however long."""
        self.lines.append([span if isinstance(span, Span) else Span(span) for span in spans])

    def heading(self, title: str, remark: str = "") -> None:
        """A blank line (unless at the top) and the title of a section."""
        if self.lines:
            self.line()
        self.line(Span(title, "bold"), *([Span(f"  {remark}", "dim")] if remark else []))

    def flow(
        self,
        lead: Sequence[Span],
        items: Iterable[Span],
        *,
        separator: str,
        hang: Sequence[Span] | None = None,
    ) -> None:
        """``lead``, then the items, as many on a line as fit; further lines begin with ``hang``.

        An item goes on to the next line whole; one that no line can hold is broken at its blanks,
        and a word that no line can hold stands out.
        """
        indent = sum(cell_len(span.text) for span in lead)
        following = list(hang) if hang is not None else [Span(" " * indent)]
        current, used, empty = list(lead), indent, True
        start = sum(cell_len(span.text) for span in following)
        room = self.width - len(separator.strip())
        for item in items:
            if cell_len(item.text) <= room - start:
                words, gaps = [item.text], [separator]
            else:
                words = item.text.split(" ")
                gaps = [separator] + [" "] * (len(words) - 1)
            for word, gap in zip(words, gaps, strict=True):
                needed = cell_len(word) + (0 if empty else cell_len(gap))
                if not empty and used + needed > room:
                    if gap.strip():
                        current.append(Span(gap.rstrip()))
                    self.lines.append(current)
                    current, used, empty = list(following), start, True
                if not empty:
                    current.append(Span(gap))
                    used += cell_len(gap)
                current.append(Span(word, item.style))
                used += cell_len(word)
                empty = False
        self.lines.append(current)

    def fields(
        self, lead: Sequence[Span], items: Sequence[Span], hang: Sequence[Span] | None = None
    ) -> None:
        """As :meth:`flow`; two blanks between items, or one if that saves a further line."""
        taken = sum(cell_len(span.text) for span in (*lead, *items)) + len(items) - 1
        tight = taken <= self.width < taken + len(items) - 1
        self.flow(lead, items, separator=" " if tight else "  ", hang=hang)

    def prose(self, lead: Sequence[Span], text: str, style: str = "") -> None:
        """Running text behind ``lead``, broken between words."""
        self.flow(lead, (Span(word, style) for word in text.split(" ")), separator=" ")

    def text(self) -> str:
        """The page; each line ends in a newline, none in blanks."""
        return "".join(f"{self._render(line)}\n" for line in self.lines)

    def _render(self, line: list[Span]) -> str:
        while line and not line[-1].text.strip(" "):
            line = line[:-1]
        if line:
            line = [*line[:-1], line[-1]._replace(text=line[-1].text.rstrip(" "))]
        return "".join(self._paint(span) for span in line)

    def _paint(self, span: Span) -> str:
        text = clean(span.text, LINE_LIMIT)
        if not self.colour or not span.style or not text.strip(" "):
            return text
        return f"\x1b[{STYLES[span.style]}m{text}\x1b[0m"
