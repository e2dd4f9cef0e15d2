"""The one door through which text of devices, processes and hosts goes to a person's terminal.

rich lets ESC, C1 and bidirectional controls through in ``Text`` and table cells, and reads ``[`` in
a device name as markup; so everything foreign is cleaned here first and printed as plain ``Text``.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL, C1
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"  # marks, bidi, invisible
    "\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"  # lone surrogates, annotations, tags
)


def clean(text: str, limit: int = 200) -> str:
    """``text`` without characters that steer a terminal, on one line, cut to ``limit``."""
    safe = _UNSAFE.sub("\ufffd", text)
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def clean_block(text: str) -> str:
    """As :func:`clean` for a whole report: newlines stay, nothing is cut."""
    return "\n".join(_UNSAFE.sub("\ufffd", line) for line in text.split("\n"))
