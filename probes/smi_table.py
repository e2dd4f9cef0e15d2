"""The tables of ``nvidia-smi topo`` in every shape in which they are handed on.

The driver prints cells between tabs. By the time that somebody shows a table, tabs have become
blanks, the first of them is gone, rows are wrapped, glued, cut short, all on one line. So a table
is read as a stream of words: the header names the columns, and a row is a name of the header with
words of the vocabulary after it. What keeps that honest is the diagonal: the ``X`` of a row must
stand in the row's own column. Where it does not, or cells are lacking, a row tells only what cannot
be shifted, and the rest comes from the other half of the symmetric table or is unknown.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from gputopo.probes.smi_text import TAB, TableText

MAX_DEVICES = 512
MAX_PROBLEMS = 50

PATHS = frozenset(("PIX", "PXB", "PHB", "NODE", "SYS"))
P2P = frozenset(("OK", "CNS", "GNS", "TNS", "NS", "DR", "U"))

_WORD = re.compile(
    r"NV(?:[12]\d|3[0-6]|[1-9])(?!\d)|PIX|PXB|PHB|NODE|SYS|SOC|C2C|INT|OK|CNS|GNS|TNS|NS|DR|X|U"
)
_WORDS = re.compile(rf"(?:{_WORD.pattern})+")
_GPU = re.compile(r"GPU(\d{1,3})")
_NIC = re.compile(r"NIC\d{1,3}|[a-z](?=\w*\d)[\w.-]{0,62}[a-zA-Z\d]")
"""A column of a NIC: numbered, or by its own name (``mlx5_0``, ``ibp14s0``)."""

_SET = re.compile(r"N/A|\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*")
"""A cell of the affinity columns: a list of CPUs or nodes."""

_MORE = re.compile(r"[\dN/A, \t-]*[\dA-][\dN/A, \t-]*")
"""A line with nothing but more of such cells."""

_LAST_AND_SET = re.compile(r"(PIX|PXB|PHB|NODE|SYS|SOC|X)(\d[\d,-]*)")
"""A last cell with the CPU list glued to it. After NV18 nobody can tell which digits are whose."""

AFFINITY = {"CPU": "cpus", "NUMA": "numa", "GPU": "memory"}
"""The affinity columns by the first word of their titles."""


class Table:
    """One table. ``rows`` holds the cells that are certain, ``kind`` is ``path``, ``p2p`` or empty
    (a single GPU's table has no cell that would tell)."""

    def __init__(self, devices: list[str], columns: list[str]) -> None:
        self.devices = devices
        self.columns = columns
        self.rows: dict[str, dict[str, str]] = {}
        self.affinity: dict[str, dict[str, str]] = {column: {} for column in columns}
        """Cells of the affinity columns (``cpus``, ``numa``, ``memory``) by row."""
        self.names: dict[str, str] = {}
        """Device names of the NIC legend by NICn."""
        self.legend: set[str] = set()
        """Words that the legend explains."""
        self.problems: list[str] = []

    @property
    def kind(self) -> str:
        words = {cell for cells in self.rows.values() for cell in cells.values()} | self.legend
        if words & P2P:
            return "p2p"
        return "path" if words & PATHS or any(w.startswith("NV") for w in words) else ""

    def cell(self, a: str, b: str) -> str | None:
        """What the table says of a pair, from whichever of the two rows has it."""
        return self.rows.get(a, {}).get(b) or self.rows.get(b, {}).get(a)


def tables(text: str) -> list[Table]:
    """All tables in a text, in order. Never raises; takes time linear in the text."""
    reader = _Reader(text)
    found: list[Table] = []
    while (table := reader.next()) is not None:
        found.append(table)
    return found


def words_of(token: str) -> list[str]:
    """The cells in one word: several where blanks between them were lost; none if it is no cell."""
    if len(token) > 256 or not _WORDS.fullmatch(token):
        return []
    return _WORD.findall(token)


class _Reader:
    """Finds the tables of a text, one after the other."""

    def __init__(self, text: str) -> None:
        self.text = TableText(text)
        self.at = 0

    def next(self) -> Table | None:
        """The next table that has a header and at least a row or a reason why it has none."""
        while self.at < len(self.text.tokens):
            if self.is_header(self.at):
                table = self._table()
                if table.rows or table.problems:
                    return table
            else:
                self.at += 1
        return None

    def is_header(self, at: int) -> bool:
        """Whether a table begins here: GPU0, and after it anything but a cell."""
        if self.text.word(at) != "GPU0":
            return False
        after = self.text.word(at + 1)
        if after == "GPU0":  # a single column; the second is the row, if there is a cell behind it
            return bool(words_of(self.text.word(at + 2)))
        return _GPU.fullmatch(after) is not None or after in AFFINITY or bool(_NIC.fullmatch(after))

    def _table(self) -> Table:
        devices: list[str] = []
        columns: dict[str, int] = {}
        line = self.text.tokens[self.at].line
        while self.at < len(self.text.tokens) and len(devices) < MAX_DEVICES:
            token = self.text.tokens[self.at]
            if token.text in AFFINITY:
                if self.text.word(self.at + 1) not in ("Affinity", "NUMA", ""):
                    break
                columns.setdefault(AFFINITY[token.text], token.start if token.line == line else -1)
                self.at += 3 if token.text == "GPU" else 2
                continue
            if columns or token.text in devices:
                break
            if token.text != f"GPU{len(devices)}" and not _NIC.fullmatch(token.text):
                break
            devices.append(token.text)
            self.at += 1
        after = self.text.word(self.at)
        if not columns and after and not after.startswith(tuple(devices)) and len(devices) > 1:
            devices.pop()  # what stands there may be the rest of the name
        table = Table(devices, list(columns))
        if self.text.cropped:
            table.problems.append("all lines end at the same column: they were cut there")
        _Rows(self, table, list(columns.values())).read()
        return table


class _Rows:
    """Reads the rows of one table, up to where another begins."""

    def __init__(self, reader: _Reader, table: Table, starts: list[int]) -> None:
        self.reader = reader
        self.table = table
        self.starts = starts
        self.index = {device: number for number, device in enumerate(table.devices)}
        longest_first = sorted(table.devices, key=len, reverse=True)
        self.glued = re.compile(f"({'|'.join(map(re.escape, longest_first))})(.+)")
        self.seen: set[str] = set()
        self.wide = False
        """Whether a row has more cells than the header has columns."""

    def read(self) -> None:
        reader = self.reader
        while reader.at < len(reader.text.tokens):
            text = reader.text.word(reader.at)
            if reader.is_header(reader.at):
                break
            label, glued = self.label(text)
            if label and label not in self.seen and self._row(label, glued):
                continue
            self._legend(text)
            reader.at += 1
        self._keep_certain()

    def label(self, text: str) -> tuple[str, list[str]]:
        """The row that a word begins, and the cells that are glued to its name."""
        if text in self.index:
            return text, []
        match = self.glued.fullmatch(text)
        words = words_of(match[2]) if match else []
        return (match[1], words) if match and words else ("", [])

    def _legend(self, text: str) -> None:
        reader, table = self.reader, self.table
        after = reader.text.word(reader.at + 1)
        if after == "=" and (words_of(text) or text == "NV#"):
            table.legend.add(text)
        elif text[-1] == ":" and text[:-1] in self.index and text.startswith("NIC"):
            half = reader.text.open_end and reader.at + 2 == len(reader.text.tokens)
            name = "" if half else after[:64]
            if name and name not in table.names.values():
                table.names.setdefault(text[:-1], name)

    def _row(self, label: str, cells: list[str]) -> bool:
        """Reads one row; False, and nothing is read, if what follows the name is no row."""
        reader, table, wanted = self.reader, self.table, len(self.table.devices)
        start = reader.at
        at = start + 1
        tail = ""
        while len(cells) < wanted:
            words = words_of(reader.text.word(at))
            if words:
                cells = [*cells, *words]
                at += 1
                continue
            glued = _LAST_AND_SET.fullmatch(reader.text.word(at)[:4096])
            if glued and len(cells) + 1 == wanted:
                cells, tail = [*cells, glued[1]], glued[2]
                at += 1
            break
        if not cells:
            if reader.text.begins_line(start):
                self._complain(label, f"{reader.text.word(at)[:20]!r} is no path class")
            return False
        self.seen.add(label)
        if len(cells) < wanted:
            self._short_row(label, cells, start, at)
        else:
            self.wide |= len(cells) > wanted or bool(words_of(reader.text.word(at)))
            half = reader.text.open_end and at == len(reader.text.tokens)
            self._whole_row(label, _uncut(cells[:wanted]) if half else cells[:wanted])
            if label.startswith("GPU") and table.columns:
                self._affinity(label, at, tail)
        reader.at = at
        return True

    def _complain(self, row: str, what: str) -> None:
        text = f"row {row}: {what}"
        if len(self.table.problems) < MAX_PROBLEMS and text not in self.table.problems:
            self.table.problems.append(text)

    def _whole_row(self, label: str, cells: list[str]) -> None:
        if [number for number, cell in enumerate(cells) if cell == "X"] != [self.index[label]]:
            self._complain(label, "its X is not in its own column: cells are shifted")
            return
        self._keep(label, dict(enumerate(cells)))

    def _short_row(self, label: str, cells: list[str], start: int, at: int) -> None:
        """Keeps what cannot be shifted of a row that lacks cells."""
        reader, own = self.reader, self.index[label]
        placed = self._by_tabs(label, start)
        cut = at >= len(reader.text.tokens)
        if placed is not None:
            self._keep(label, placed)
        elif [number for number, cell in enumerate(cells) if cell == "X"] == [own]:
            # Left of the X nothing can be lacking; right of it only the end of a text that was cut.
            self._keep(label, dict(enumerate(_uncut(cells) if cut else cells[: own + 1])))
        elif cut and "X" not in cells and len(cells) <= own:
            self._keep(label, dict(enumerate(_uncut(cells))))
        what = f"{len(cells)} of {len(self.table.devices)} cells"
        if not cut and reader.text.tokens[at].line == reader.text.tokens[at - 1].line:
            what += f", then {reader.text.word(at)[:20]!r}"
        self._complain(label, what)

    def _by_tabs(self, label: str, start: int) -> dict[int, str] | None:
        """The cells of a row with empty ones between tabs; None where tabs do not tell."""
        token = self.reader.text.tokens[start]
        if token.text != label:
            return None
        parts = self.reader.text.lines[token.line][token.end :].split("\t")[1:]
        cells = [part.strip() for part in parts[: len(self.table.devices)]]
        if len(cells) < len(self.table.devices) or cells[self.index[label]] != "X":
            return None
        if any(cell and len(words_of(cell)) != 1 for cell in cells) or cells.count("X") != 1:
            return None
        return {number: cell for number, cell in enumerate(cells) if cell}

    def _keep(self, label: str, cells: dict[int, str]) -> None:
        self.table.rows[label] = {
            self.table.devices[number]: "SYS" if cell == "SOC" else cell
            for number, cell in cells.items()
        }

    # The affinity columns

    def _affinity(self, label: str, at: int, glued: str) -> None:
        """Reads what stands behind the cells of a GPU's row: all of it, or nothing."""
        reader, columns = self.reader, self.table.columns
        last = reader.text.tokens[at - 1]
        begin = last.end - len(glued)
        line = reader.text.lines[last.line]
        stop = next(
            (
                t.start
                for t in reader.text.tokens[at : at + 8]
                if t.line == last.line and self.label(t.text)[0]
            ),
            len(line),
        )
        rest = line[begin:stop]
        more = self._next_line(last.line) if stop == len(line) else ""
        if more:
            values = self._wrapped(rest, more)
        else:
            values = self._by_cells(rest) or self._by_count(rest)
            values = values or self._by_place(last.line, begin, stop)
        if values is None:
            if rest.strip():
                self._complain(
                    label, f"{rest.strip()[:40]!r} cannot be told apart as {' and '.join(columns)}"
                )
            return
        for column, value in zip(columns, values):
            if value is not None:
                self.table.affinity[column][label] = value

    def _by_cells(self, rest: str) -> list[str | None] | None:
        """By tabs. CPUs may be an empty cell; the driver pads the columns after it with tabs."""
        if "\t" not in rest:
            return None
        cells = [cell.strip() for cell in rest.split("\t")]
        if not cells[0]:
            del cells[0]
        others = [cell for cell in cells[1:] if cell]
        values = [cells[0], *others]
        if len(values) != len(self.table.columns) or not _are_sets(v for v in values if v):
            return None
        return list(values)

    def _by_count(self, rest: str) -> list[str | None] | None:
        values = rest.split()
        blank = rest[: len(rest) - len(rest.lstrip())]
        if blank.count("\t") > 1 or len(blank) > TAB:
            return None  # the first cell is empty
        whole = len(values) == len(self.table.columns) and _are_sets(values)
        return list(values) if whole else None

    def _by_place(self, number: int, begin: int, stop: int) -> list[str | None] | None:
        """By the columns in which the header's titles begin, where tabs became blanks."""
        line = self.reader.text.lines[number]
        if "\t" in line or len(self.starts) != len(self.table.columns):
            return None
        words = list(re.finditer(r"\S+", line[begin:stop]))
        if [begin + word.start() for word in words] != self.starts[1:]:
            return None  # only the CPUs may be an empty cell
        values = [word[0] for word in words]
        return ["", *values] if values and _are_sets(values) else None

    def _next_line(self, number: int) -> str:
        """What the next line has of these columns, where a row was broken in or before them."""
        lines = self.reader.text.lines
        more = lines[number + 1].strip() if number + 1 < len(lines) else ""
        return more if _MORE.fullmatch(more[:4096]) else ""

    def _wrapped(self, rest: str, more: str) -> list[str | None] | None:
        """Both lines together: broken between two cells, or after a comma."""
        joint = "" if rest.rstrip().endswith((",", "-")) else " "
        return self._by_count(rest.rstrip() + joint + more)

    # Once all rows are read

    def _keep_certain(self) -> None:
        table = self.table
        absent = [device for device in table.devices if device not in self.seen]
        if absent and self.reader.text.open_end:
            self._drop_last_value()
        self._drop_cut_lists()
        if self.wide:
            # A title is lost, and to the right of it nothing is under its own. GPUs are counted.
            table.problems.append("rows have more cells than the header has columns")
            gpus = {device for device in table.devices if device.startswith("GPU")}
            table.rows = {
                row: {column: cell for column, cell in cells.items() if column in gpus}
                for row, cells in table.rows.items()
            }
            table.affinity = {column: {} for column in table.columns}
        if table.kind != "p2p":
            self._drop_contradictions()
        vocabulary = P2P if table.kind == "p2p" else None
        for row, cells in table.rows.items():
            for column, cell in list(cells.items()):
                if cell != "X" and (cell in P2P) is (vocabulary is None):
                    self._complain(row, f"{cell!r} is no class of this table")
                    del cells[column]
        if table.rows and absent:
            table.problems.append(f"no row of {_listed(absent)}: the table was cut")

    def _drop_last_value(self) -> None:
        """Of a table that was cut, the last word may be half a word."""
        last = self.reader.text.tokens[-1].text
        for column, values in self.table.affinity.items():
            row = next(reversed(values), "")
            if row and values[row] and last.endswith(values[row]) and values[row] != "N/A":
                del values[row]
                self._complain(row, f"its {column}, {last[:40]!r}, may be cut")

    def _drop_cut_lists(self) -> None:
        """Of two lists of CPUs of which one goes on where the other ends, that which fewer GPUs
        have is cut, or has the next column glued to it."""
        lists = self.table.affinity.get("cpus", {})
        counts = Counter(lists.values())
        for a, b in itertools.permutations(counts, 2):
            if a and b.startswith(a):
                fewer = min(counts[a], counts[b])
                wrong = [row for row, text in lists.items() if text in (a, b)]
                for row in wrong:
                    if counts[lists[row]] == fewer:
                        self._complain(row, f"its CPUs, {lists.pop(row)[:40]!r}, may be cut")

    def _drop_contradictions(self) -> None:
        rows = self.table.rows
        for a, cells in rows.items():
            for b, cell in list(cells.items()):
                back = rows.get(b, {}).get(a)
                if back is not None and back != cell:
                    self._complain(a, f"{cell} to {b}, which has {back} to it")
                    del cells[b], rows[b][a]


def _uncut(cells: list[str]) -> list[str]:
    """The cells of a row at the end of a text, less a last one that may be half a word."""
    return cells[:-1] if cells[-1].startswith("NV") else cells


def _are_sets(values: Iterator[str] | Sequence[str]) -> bool:
    return all(_SET.fullmatch(value) for value in values)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
