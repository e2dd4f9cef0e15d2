"""File trees that are not the live machine: links are resolved inside the tree and nowhere else."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Any

from gputopo.facts import ABSENT, Fact, Missing
from gputopo.host.base import FILE_LIMIT, Output, decode, printable

MAX_LINKS = 40
"""Symbolic links followed for one path, as in the kernel (MAXSYMLINKS)."""


MAX_PATH = 4096
"""Characters of a path, as in the kernel (PATH_MAX): a bound for what a damaged tree can cost."""

TOO_LONG = Missing("failed", os.strerror(36))


class Link(str):
    """The target of a symbolic link, as an entry of a tree."""

    __slots__ = ()


class Directory(list[str]):
    """The sorted names in a directory, as an entry of a tree."""

    __slots__ = ()


Entry = bytes | str | Link | Directory | Missing
"""What stands at one path: content (text where it was stored as text), link, names, or reason."""


class TreeHost:
    """A host that answers file questions from :meth:`entry` and has no commands and no NVML.

    Subclasses say what stands at a path; walking and confinement are here: ``..`` and absolute
    targets stay below the tree's own root, and a loop is an error of the tree, not a hang.
    """

    kind = "root"
    concurrent = False
    captured_at: str | None = None
    literal = True
    """Whether an entry may also stand at a path that leads through links, as it was asked for."""
    unknown = ABSENT
    """The answer where the tree does not tell whether something is there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._resolved: dict[str, str | Missing] = {}

    def entry(self, path: str) -> Entry | None:
        """What stands at a path whose parents are real directories; None for nothing."""
        raise NotImplementedError

    def target(self, path: str) -> str | None:
        """Where the link at a path (parents as for :meth:`entry`) points; None if it is none."""
        found = self.entry(path)
        return found if isinstance(found, Link) else None

    def read_bytes(self, path: str) -> Fact[bytes]:
        found = self._follow(path)
        if isinstance(found, Directory):
            return Missing("failed", "is a directory")
        return found.encode("utf-8", "replace") if isinstance(found, str) else found

    def read_text(self, path: str) -> Fact[str]:
        found = self._follow(path)
        if isinstance(found, bytes):
            return decode(found)
        if isinstance(found, Directory):
            return Missing("failed", "is a directory")
        return found.rstrip("\n\x00") if isinstance(found, str) else found

    def list_dir(self, path: str) -> Fact[list[str]]:
        found = self._follow(path)
        if isinstance(found, (Directory, Missing)):
            return found
        return Missing("failed", "not a directory")

    def read_link(self, path: str) -> Fact[str]:
        found = self._at(path)
        if found is None:
            return self._nothing(path)
        if isinstance(found, Link):
            return str(found)
        return found if isinstance(found, Missing) else Missing("failed", "not a symbolic link")

    def run(self, argv: Sequence[str], timeout: float) -> Fact[Output]:
        return Missing("absent", f"{self.kind} holds no command output")

    def nvml(self, call: str, *args: Any) -> Fact[Any]:
        return Missing("absent", f"{self.kind} holds no NVML answers")

    def remaining(self) -> float:
        return float("inf")

    def close(self) -> None:
        pass

    def _follow(self, path: str) -> Entry:
        """What stands at ``path`` once all links are followed: never a link."""
        found = self._find(path)
        return self._nothing(path) if found is None else found

    def _find(self, path: str) -> Entry | None:
        found = self._at(path)
        if isinstance(found, Link):
            if self.literal:
                found = self.entry(f"{path}/.")
                if found is not None:
                    return found
            real = self.real(path)
            found = real if isinstance(real, Missing) else self.entry(real)
        return found

    def _at(self, path: str) -> Entry | None:
        """What stands at ``path`` itself: links on the way are followed, one at its end is not."""
        if len(path) > MAX_PATH:
            return TOO_LONG
        if self.literal:
            found = self.entry(path)
            if found is not None:
                return found
        parent, _, base = path.rpartition("/")
        if base in ("", ".", ".."):
            real = self.real(path)
            return real if isinstance(real, Missing) else self.entry(real)
        real = self.real(parent)
        return real if isinstance(real, Missing) else self.entry(f"{real}/{base}")

    def _nothing(self, path: str) -> Missing:
        """Why nothing stands at ``path``, as the nearest thing above it that is known says."""
        real = self.real(path)
        if isinstance(real, Missing):
            return real
        return (self.literal and self._told_above(path)) or self._told_above(real) or self.unknown

    def _told_above(self, path: str) -> Missing | None:
        while path:
            path, _, base = path.rpartition("/")
            above = self.entry(path)
            if base in ("", ".", "..") or isinstance(above, Link):
                return None
            if isinstance(above, Directory):
                return self.unknown if base in above else ABSENT
            if isinstance(above, Missing) and above.reason in ("absent", "denied"):
                return above
            if isinstance(above, (str, bytes)):
                return ABSENT
        return None

    def real(self, path: str) -> str | Missing:
        """The path without links that a path with links leads to ('' is the root)."""
        known = self._resolved.get(path)
        if known is None:
            known = self._resolved[path] = self._resolve(path)
        return known

    def _resolve(self, path: str) -> str | Missing:
        done, links = "", 0
        todo = path.split("/")[::-1]
        while todo:
            component = todo.pop()
            if component in ("", "."):
                continue
            if component == "..":
                done = done.rpartition("/")[0]
                continue
            target = self.target(f"{done}/{component}")
            if target is None:
                done = f"{done}/{component}"
                if len(done) > MAX_PATH:
                    return TOO_LONG
                continue
            if len(target) > MAX_PATH:
                return TOO_LONG
            links += 1
            if links > MAX_LINKS:
                return Missing("failed", "too many levels of symbolic links")
            if target.startswith("/"):
                done = ""
            todo.extend(target.split("/")[::-1])
        return done


class MemoryTree(TreeHost):
    """A tree held in memory: an archive, or a machine put together by the composer."""

    kind = "archive"

    def __init__(self, name: str, entries: dict[str, Entry]) -> None:
        super().__init__(name)
        self._entries = entries
        self._directories: dict[str, Directory] | None = None

    def entry(self, path: str) -> Entry | None:
        found = self._entries.get(path)
        if found is None or isinstance(found, Directory):
            return self._listing().get(path, found)
        return found

    def target(self, path: str) -> str | None:
        found = self._entries.get(path)
        return found if isinstance(found, Link) else None

    def _listing(self) -> dict[str, Directory]:
        """Each directory's names, from the paths of all entries."""
        if self._directories is None:
            names: dict[str, set[str]] = {"": set()}
            for path, what in self._entries.items():
                if isinstance(what, Directory):
                    names.setdefault(path, set()).update(what)
                while path:
                    parent, _, base = path.rpartition("/")
                    siblings = names.setdefault(parent, set())
                    if base in siblings:
                        break
                    siblings.add(base)
                    path = parent
            self._directories = {path: Directory(sorted(found)) for path, found in names.items()}
        return self._directories


class RootHost(TreeHost):
    """An unpacked root directory: ``ROOT/sys`` and ``ROOT/proc`` of another machine."""

    kind = "root"
    literal = False  # the kernel would follow links in a path, and out of the root

    def __init__(self, name: str, root: str) -> None:
        super().__init__(name)
        self._root = root.rstrip("/")

    def entry(self, path: str) -> Entry | None:
        real = self._root + path
        try:
            mode = os.lstat(real or "/").st_mode
            if stat.S_ISLNK(mode):
                return Link(printable(os.readlink(real)))
            if stat.S_ISDIR(mode):
                return Directory(sorted(map(printable, os.listdir(real or "/"))))
            if not stat.S_ISREG(mode):
                return Missing("failed", "not a regular file")
            return read_regular(real, os.O_NOFOLLOW)
        except (OSError, ValueError) as error:
            missing = from_errno(error)
            return None if missing == ABSENT else missing

    def target(self, path: str) -> str | None:
        try:
            return os.readlink(self._root + path)
        except (OSError, ValueError):
            return None

    def _nothing(self, path: str) -> Missing:
        return ABSENT


def read_regular(path: str, flags: int = 0) -> bytes | Missing:
    """The first :data:`FILE_LIMIT` bytes of a regular file; never waits on a FIFO or a device."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | flags)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            kind = "is a directory" if stat.S_ISDIR(mode) else "not a regular file"
            return Missing("failed", kind)
        data = os.read(fd, 4096)
        if len(data) < 4096 and not path.startswith("/proc/"):
            return data
        chunks = [data]
        size = len(data)
        while data and size < FILE_LIMIT:
            data = os.read(fd, min(65536, FILE_LIMIT - size))
            chunks.append(data)
            size += len(data)
        return b"".join(chunks)
    finally:
        os.close(fd)


_NOWHERE = {2, 20}  # ENOENT, ENOTDIR


def from_errno(error: OSError | ValueError) -> Missing:
    """The reason that an operating-system error stands for.

    A ValueError is Python's, for a path that no file can have (a NUL in it, a lone surrogate).
    """
    code = getattr(error, "errno", 0) or 0
    if code in _NOWHERE or isinstance(error, ValueError):
        return ABSENT
    if code in (1, 13):  # EPERM, EACCES
        return Missing("denied")
    if code in (95, 38):  # EOPNOTSUPP, ENOSYS
        return Missing("unsupported", os.strerror(code))
    return Missing("failed", os.strerror(code))
