"""Tar archives held in memory, read member by member; nothing is ever written to disk.

Not by Python's :mod:`tarfile`: that ends without a word at a damaged header, so that half a machine
would pass for a whole one; up to Python 3.13.5 a negative size makes it loop for ever; and it takes
several times as long. Read are the ustar, GNU and pax formats, which is what ``tar``,
``hwloc-gather-topology`` and :mod:`tarfile` write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

BLOCK = 512
MAX_MEMBERS = 500_000
"""The largest archive so far has 11,500; one with 10,000 SR-IOV functions has about 400,000."""

_EXTENSION_LIMIT = 1 << 20
"""Bytes of one extended header (pax records, GNU long name); paths are far shorter."""


class TarError(ValueError):
    """The archive is damaged, cut short or beyond the limits."""


class Member(NamedTuple):
    """One file, directory or link. ``path`` is relative, without ``.`` and ``..`` components."""

    path: str
    kind: Literal["file", "directory", "symlink", "hardlink"]
    data: bytes
    """A file's content up to the limit asked for."""
    target: str
    """What a symbolic link says, or the path of the member that a hard link is another name of."""
    errno: int | None
    """Why a file could not be read when the archive was made (pax record GPUTOPO.errno)."""


_KINDS: dict[bytes, Literal["file", "directory", "symlink", "hardlink"]] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"5": "directory",
}
_WITHOUT_DATA = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))


def is_tar(head: bytes) -> bool:
    """Whether data whose first block is ``head`` is an archive of a format read here."""
    return head[257:262] == b"ustar"


def members(data: bytes, file_limit: int) -> Iterator[Member]:
    """The members in the archive's order; devices, FIFOs and paths with ``..`` are left out.

    Raises TarError when the archive has no proper end, for at that place something is missing.
    """
    at = count = 0
    defaults: dict[str, str] = {}
    records: dict[str, str] = {}
    while True:
        header = data[at : at + BLOCK]
        if len(header) < BLOCK:
            raise TarError("the archive is cut short")
        if not header.strip(b"\0"):
            return
        if header[257:262] != b"ustar" or _number(header[148:156]) != _checksum(header):
            raise TarError(f"the archive is damaged at byte {at}")
        count += 1
        if count > MAX_MEMBERS:
            raise TarError(f"the archive has more than {MAX_MEMBERS:,} members")
        at += BLOCK
        kind = header[156:157]
        size = _number(header[124:136])
        if "size" in records:  # beyond what the header's octal digits can say
            size = _number(records["size"].encode(), base=10)
        if kind == b"S":  # GNU sparse: the map of holes goes on in blocks of its own
            more = header[482]
            while more:
                if at + BLOCK > len(data):
                    raise TarError("the archive is cut short")
                more = data[at + 504]
                at += BLOCK
        start = at
        if kind not in _WITHOUT_DATA:
            at += -(-size // BLOCK) * BLOCK
            if at > len(data):
                raise TarError("the archive is cut short")
        if kind in b"xgLK":
            if size > _EXTENSION_LIMIT:
                raise TarError(f"the archive is damaged at byte {start - BLOCK}")
            content = data[start : start + size]
            if kind == b"x":
                records.update(_pax(content))
            elif kind == b"g":
                defaults.update(_pax(content))
            else:
                records["path" if kind == b"L" else "linkpath"] = _text(content)
            continue
        known, records = {**defaults, **records}, {}
        name = known.get("path") or _name(header)
        path = clean_path(name)
        what = _KINDS.get(kind)
        if what is None or not path:
            continue
        if what == "file" and name.endswith("/"):  # how archivers older than POSIX say directory
            what = "directory"
        target = ""
        if what in ("symlink", "hardlink"):
            target = known.get("linkpath") or _text(header[157:257])
        if what == "hardlink":
            target = clean_path(target) or ""
        content = data[start : start + min(size, file_limit)] if what == "file" else b""
        yield Member(path, what, content, target, _errno(known.get("GPUTOPO.errno")))


def clean_path(name: str) -> str | None:
    """``a/b`` for ``./a//b`` or ``/a/b``; None for the top itself and for any path with ``..``."""
    if "/." not in name and "//" not in name and name[:1] not in ("/", "."):
        return name.rstrip("/") or None
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return None if ".." in parts else "/".join(parts) or None


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "replace")


def _name(header: bytes) -> str:
    name = _text(header[:100])
    if header[257:263] == b"ustar\0" and header[345]:  # GNU uses these bytes otherwise
        return f"{_text(header[345:500])}/{name}"
    return name


def _number(field: bytes, base: int = 8) -> int:
    """A header's number: digits, or for large ones GNU's big-endian binary."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0") or b"0"
    try:
        if digits.isdigit() and len(digits) < 20:  # int() alone also takes signs and underscores
            return int(digits, base)
    except ValueError:
        pass
    raise TarError("the archive is damaged: a header holds a wrong number")


def _checksum(header: bytes) -> int:
    return sum(header) - sum(header[148:156]) + 8 * ord(" ")


_RECORD = re.compile(rb"(\d{1,7}) ([^=\n]{1,200})=")


def _pax(content: bytes) -> dict[str, str]:
    """The records of an extended header: ``LENGTH KEY=VALUE`` and a newline each."""
    found: dict[str, str] = {}
    at = 0
    while at < len(content) and content[at]:
        match = _RECORD.match(content, at)
        end = at + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(content):
            raise TarError("the archive is damaged: an extended header cannot be read")
        found[_text(match[2])] = content[match.end() : end - 1].decode("utf-8", "replace")
        at = end
    return found


def _errno(record: str | None) -> int | None:
    return int(record) if record and re.fullmatch(r"[0-9]{1,4}", record) else None
