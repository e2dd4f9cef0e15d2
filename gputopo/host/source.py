"""Where a machine comes from: this one, a recording, an unpacked root, an archive.

A source is told by its content, never by its name, and whatever cannot be used is refused with one
line that names it and says what is wrong.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from gputopo.errors import SourceError
from gputopo.host import recording
from gputopo.host.base import FILE_LIMIT, Host
from gputopo.host.tree import Directory, Entry, Link, MemoryTree, RootHost, from_errno
from gputopo.text import clean

INPUT_LIMIT = 256 << 20
"""Bytes read of a file or of standard input. The largest recording so far is under 2 MiB."""

UNPACKED_LIMIT = 512 << 20
"""Bytes that a compressed source may grow to; reading stops there."""

TEXT_LIMIT = 64 << 20
"""Bytes of a text that are searched for the output of programs: the log of a long job has 50 MB."""

FORMATS = (
    "a recording or a tar archive of sys/ and proc/, plain or compressed (gzip, bzip2, xz), "
    "a directory that holds sys/ or proc/, or a text with the output of nvidia-smi topo -m, "
    "numactl -H, lspci -vv, ibstat and their like"
)

_ROOTS = ("sys", "proc")
_NAME_LIMIT = 300
_LINE_LIMIT = 500


class FixtureInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A bundled machine. ``origin`` is ``recorded`` or ``composed``."""

    name: str
    title: str
    origin: str


def open_source(spec: str | None, budget: float = 20.0) -> Host:
    """The machine that ``--from`` means: None is this one, asked for ``budget`` seconds at most.

    ``-`` is standard input, ``fixture:NAME`` a bundled recording, everything else a path. Raises
    SourceError for what cannot be used as a machine.
    """
    if spec is None:
        from gputopo.host.live import LiveHost

        return LiveHost(budget)
    try:
        if spec == "-":
            return _open_stdin()
        if spec.startswith("fixture:"):
            return _open_file(_fixture(spec.removeprefix("fixture:")), _shown(spec))
        return _open_path(spec)
    except SourceError as error:  # its text quotes the source, whose author may be anybody
        raise SourceError(clean(str(error), _LINE_LIMIT)) from None


def list_fixtures() -> list[FixtureInfo]:
    """The bundled machines in the order of their names."""
    import msgspec.toml

    place = _fixtures()
    found: list[FixtureInfo] = []
    for file in sorted(os.listdir(place)) if os.path.isdir(place) else []:
        if not file.endswith(".toml"):
            continue
        name = file.removesuffix(".toml")
        with open(f"{place}/{file}", "rb") as case:
            try:
                told = msgspec.toml.decode(case.read(), type=_Case)
            except msgspec.MsgspecError as error:
                raise SourceError(f"fixture:{name}: {file} is wrong: {error}") from None
        found.append(FixtureInfo(name=name, title=told.title, origin=told.origin))
    return found


class _Case(msgspec.Struct):
    """The part of a fixture's TOML that a list shows; the rest is for the tests."""

    title: str
    origin: Literal["recorded", "composed"]


def _fixtures() -> str:
    return f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/fixtures"


def _fixture(name: str) -> str:
    """The path of a bundled recording."""
    place = _fixtures()
    if re.fullmatch(r"[a-z0-9-]+", name):
        for path in (f"{place}/{name}.jsonl", f"{place}/{name}.jsonl.gz"):
            if os.path.exists(path):
                return path
    import difflib

    known = [info.name for info in list_fixtures()]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "--list-fixtures names all"
    raise SourceError(f"fixture:{name}: there is no such fixture; {hint}")


def _shown(spec: str) -> str:
    """The source's name as it may stand in a report (a path can hold any byte)."""
    return clean(spec, _NAME_LIMIT)


def _open_path(path: str) -> Host:
    name = _shown(path) or "''"
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise _os_error(name, error) from None
    except ValueError:  # Python's, for a NUL in it
        raise SourceError(f"{name}: not a path") from None
    return _open_directory(path, name) if stat.S_ISDIR(mode) else _open_file(path, name)


def _os_error(name: str, error: OSError) -> SourceError:
    said = os.strerror(error.errno or 0)
    return SourceError(f"{name}: {said[:1].lower()}{said[1:]}")


def _open_directory(path: str, name: str) -> Host:
    """A root directory, or the one directory in it that is one, as hwloc archives unpack to."""
    if _is_root(path):
        return RootHost(name, path)
    try:
        with os.scandir(path) as found:
            inner = [
                entry.path
                for entry in found
                if entry.is_dir(follow_symlinks=False) and _is_root(entry.path)
            ]
    except OSError as error:
        raise _os_error(name, error) from None
    if len(inner) == 1:
        return RootHost(name, inner[0])
    if inner:
        listed = ", ".join(sorted(os.path.basename(root) for root in inner)[:5])
        raise SourceError(f"{name}: holds {len(inner)} machines; name one of them: {listed}")
    raise SourceError(f"{name}: a directory without sys/ or proc/, so not the root of a machine")


def _is_root(path: str) -> bool:
    """Whether sys/ or proc/ stand in a directory themselves: a link could lead out of it.

    The one called sys in /proc is not what a root has there: it holds the kernel's settings.
    """

    def mode(below: str) -> int:
        try:
            return os.lstat(f"{path}/{below}").st_mode
        except OSError:
            return 0

    settings = stat.S_ISREG(mode("sys/kernel/osrelease"))
    return stat.S_ISDIR(mode("proc")) or (stat.S_ISDIR(mode("sys")) and not settings)


def _open_file(path: str, name: str) -> Host:
    try:
        _check_regular(os.stat(path), name)  # first, since to open a FIFO wakes its writer
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            _check_regular(os.fstat(fd), name)
            return _open_data(_read(fd, name), name)
        finally:
            os.close(fd)
    except OSError as error:
        raise _os_error(name, error) from None


def _check_regular(status: os.stat_result, name: str) -> None:
    kinds: dict[Callable[[int], bool], str] = {
        stat.S_ISFIFO: "a FIFO",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a character device",
        stat.S_ISBLK: "a block device",
    }
    for test, kind in kinds.items():
        if test(status.st_mode):
            raise SourceError(f"{name}: {kind}, not a file; a pipe can be read with --from -")
    if status.st_size > INPUT_LIMIT:
        raise SourceError(
            f"{name}: {status.st_size / 1e6:,.0f} MB large; a source has {INPUT_LIMIT >> 20} MiB "
            "at most"
        )


def _open_stdin() -> Host:
    name = "standard input"
    try:
        if os.isatty(0):
            raise SourceError(f"{name}: a terminal; --from - reads {FORMATS} from a pipe or a file")
        return _open_data(_read(0, name), name)
    except OSError as error:
        raise _os_error(name, error) from None


def _read(fd: int, name: str) -> bytes:
    """Everything, once the first bytes are those of a format that is read here."""
    chunks: list[bytes] = []
    size = 0
    limit = 0
    while chunk := os.read(fd, 1 << 20):
        chunks.append(chunk)
        size += len(chunk)
        if not limit and size >= 512:
            is_text = _format(b"".join(chunks), name) == "text"
            limit = TEXT_LIMIT if is_text else INPUT_LIMIT
        if limit and size > limit:
            if limit == TEXT_LIMIT:
                _open_text(b"".join(chunks), name)
            raise SourceError(f"{name}: such a source has {limit >> 20} MiB at most")
    return b"".join(chunks)


_Format = Literal["compressed", "recording", "archive", "text"]


def _format(data: bytes, name: str) -> _Format:
    """What kind of source the first bytes begin; refuses what is none."""
    if _compression(data):
        return "compressed"
    if recording.is_recording(data):
        return "recording"
    from gputopo.host.tar import is_tar

    if is_tar(data):
        return "archive"
    for magic, kind in _UNREAD.items():
        if data.startswith(magic):
            raise SourceError(f"{name}: {kind}, which is not read here; a source is {FORMATS}")
    if b"\0" in data[:512]:
        raise SourceError(f"{name}: a binary file of unknown kind; a source is {FORMATS}")
    return "text"


_UNREAD = {b"PK\3\4": "a zip archive", b"\x28\xb5\x2f\xfd": "compressed with zstd"}


def _open_data(data: bytes, name: str) -> Host:
    """A host for the whole content of a source."""
    if not data:
        raise SourceError(f"{name}: empty")
    compression = _compression(data)
    if compression:
        data = _unpacked(data, compression, name)
        if not data or _compression(data):
            what = "compressed twice" if data else "empty once unpacked"
            raise SourceError(f"{name}: {what}")
    kind = _format(data, name)
    if kind == "recording":
        return recording.parse(data, name)
    if kind == "archive":
        return _open_archive(data, name)
    if len(data) > TEXT_LIMIT:
        raise SourceError(f"{name}: a text has {TEXT_LIMIT >> 20} MiB at most once unpacked")
    return _open_text(data, name)


def _open_text(data: bytes, name: str) -> Host:
    """The machine of which a text tells: pasted output of programs, or a format of another tool."""
    from gputopo.importers import recognise

    host = recognise(data, name)
    if host is None:
        raise SourceError(f"{name}: a text of unknown kind; a source is {FORMATS}")
    return host


def _compression(data: bytes) -> str | None:
    """``gzip``, ``bzip2`` or ``xz`` where the data starts as those do."""
    for magic, kind in _MAGIC.items():
        if data.startswith(magic):
            return kind
    return None


_MAGIC = {b"\x1f\x8b\x08": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz"}

_MEMORY_LIMIT = 256 << 20
"""Bytes that xz may use to decompress: ``xz -9`` needs 65 MiB, a crafted header asks for 4 GiB."""

_COPY_LIMIT = 8 << 30
"""Bytes copied between the parts of one source: parallel compressors write many, bombs millions."""


def _decompressor(kind: str) -> tuple[Any, type[Exception]]:
    """A new decompressor, and the error that it raises for damaged data."""
    if kind == "gzip":
        import zlib

        return zlib.decompressobj(wbits=31), zlib.error
    if kind == "bzip2":
        import bz2

        return bz2.BZ2Decompressor(), OSError
    import lzma

    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY_LIMIT), lzma.LZMAError


def _unpacked(data: bytes, kind: str, name: str) -> bytes:
    """The content of one or more compressed parts, as ``zcat`` and its like print it."""
    parts: list[bytes] = []
    size = copied = 0
    while data:
        engine, damage = _decompressor(kind)
        try:
            part = engine.decompress(data, UNPACKED_LIMIT + 1 - size)
        except damage as error:
            raise SourceError(f"{name}: the {kind} data is damaged: {error}") from None
        size += len(part)
        if size > UNPACKED_LIMIT:
            raise SourceError(f"{name}: unpacks to more than {UNPACKED_LIMIT >> 20} MiB")
        if not engine.eof:
            raise SourceError(f"{name}: the {kind} data is cut short")
        parts.append(part)
        data = engine.unused_data.lstrip(b"\0")  # padding to the block size of a tape
        copied += len(data)
        if copied > _COPY_LIMIT:
            raise SourceError(f"{name}: the {kind} data is in too many parts")
    return b"".join(parts)


def _open_archive(data: bytes, name: str) -> Host:
    """The machine in a tar archive, rooted at its top or at one directory below."""
    from gputopo.host import tar

    found: dict[str, Entry] = {}
    try:
        for member in tar.members(data, FILE_LIMIT):
            if member.kind == "directory":
                found.setdefault(member.path, Directory())
            elif member.kind == "symlink":
                found[member.path] = Link(member.target)
            elif member.kind == "hardlink":
                if member.target in found:
                    found[member.path] = found[member.target]
            elif member.errno is not None:
                found[member.path] = from_errno(OSError(member.errno, ""))
            else:
                found[member.path] = member.data
    except tar.TarError as error:
        raise SourceError(f"{name}: {error}") from None
    top = _archive_root(found, name)
    cut = len(top)
    return MemoryTree(
        name, {f"/{path[cut:]}": entry for path, entry in found.items() if path.startswith(top)}
    )


def _archive_root(paths: dict[str, Entry], name: str) -> str:
    """The prefix of the machine's paths in an archive: "" or the one top directory with a slash."""
    tops: set[str] = set()
    for path in paths:
        first, _, rest = path.partition("/")
        if first in _ROOTS:
            return ""
        if rest.partition("/")[0] in _ROOTS:
            tops.add(first)
    if len(tops) == 1:
        return f"{tops.pop()}/"
    if tops:
        listed = ", ".join(sorted(tops)[:5])
        raise SourceError(f"{name}: the archive holds {len(tops)} machines: {listed}")
    raise SourceError(f"{name}: the archive holds no sys/ or proc/")
