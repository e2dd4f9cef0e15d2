"""Takes off a paste what mail programs, terminals, browsers and loggers put round it.

What comes out are the lines that the programs printed, more or less; whoever reads them has to
bear with lost tabs and broken lines.
"""

from __future__ import annotations

import html
import os
import re

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?|[()][0-9A-B]|[@-Z\\^_=>])"
)
"""Escape sequences of a terminal: colours, titles, character sets (ECMA-48)."""

_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b-\u200f\u2060\ufeff]")
_BREAKS = re.compile(r"</?(?:br|p|div|tr|li|pre|blockquote|h[1-6])(?:\s[^<>]{0,500})?/?>", re.I)
_CELLS = re.compile(r"</t[dh]>", re.I)
_TAGS = re.compile(
    r"</?(?:a|b|body|code|em|font|head|html|i|meta|ol|samp|small|span|strong|style|table|tbody|td|th"
    r"|thead|title|tt|u|ul)(?:\s[^<>]{0,500})?/?>",
    re.I,
)
"""Only what is surely HTML: nvidia-smi prints ``<inactive>``, numactl ``<not available>``."""

_MARKED_UP = re.compile(r"&(?:nbsp|lt|gt|amp|#\d{1,5});|<(?:br|pre|p|code)\b", re.I)

_QUOTE = re.compile(r"[ \t]{0,3}(?:>[ \t]?)+")
"""The marks of a mail that is quoted, perhaps several times."""

_LOGGED = re.compile(
    r"\[\d{1,6},\d{1,6}\]<std(?:out|err)>:[ \t]?"  # mpirun --tag-output
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]{0,12}(?:Z|[+-]\d\d:?\d\d)?\]?[ \t:|-]{0,4}"
    r"(?:\[?(?:TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR)\]?[ \t:|-]{0,4})?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,64} [\w./-]{1,64}(?:\[\d{1,8}\])?: "  # syslog
)
_PREFIX = re.compile(r"(?=[^:|]*\d)(?:[\w.-]{1,64}|\[[^\]]{1,64}\])[:|][ \t]?")
"""What ``srun -l``, ``pdsh`` and container tools put before a line: a number, a host's name."""

_NAMED = re.compile(r"\b(?:GPU|NIC)\d")


def clean(data: bytes) -> list[str]:
    """The lines of a text without ornament. Takes time linear in the text."""
    text = data.decode("utf-8", "replace")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if "\\tGPU" in text or "\\nGPU" in text:  # a string of JSON or of Python, as it is written
        text = text.replace("\\n", "\n").replace("\\t", "\t")
    if _MARKED_UP.search(text):
        text = html.unescape(_TAGS.sub("", _CELLS.sub("\t", _BREAKS.sub("\n", text))))
    text = _CONTROLS.sub("", text).replace("\xa0", " ")
    lines = [_bare(line) for line in text.split("\n")]
    return _without_common_prefix(lines)


def _bare(line: str) -> str:
    quote = _QUOTE.match(line)
    if quote:
        line = line[quote.end() :]
    logged = _LOGGED.match(line)
    if logged:
        line = line[logged.end() :]
    line = line.rstrip()
    if line.endswith("|") and line.lstrip().startswith("|") and _NAMED.search(line):
        line = line.replace("|", "\t")  # a matrix as a table in Markdown
    return line


def _without_common_prefix(lines: list[str]) -> list[str]:
    """Without what every line begins with, if it looks like the name of a process or a host."""
    filled = [line for line in lines if line.strip()]
    if len(filled) < 3:
        return lines
    match = _PREFIX.match(os.path.commonprefix([min(filled), max(filled)]))  # noqa: RUF071
    return [line[match.end() :] for line in lines] if match else lines
