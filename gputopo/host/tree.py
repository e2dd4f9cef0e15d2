"""File trees that are not the live machine: links are resolved inside the tree and nowhere else."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Any

from gputopo.facts import ABSENT, Fact, Missing
from gputopo.host.base import FILE_LIMIT, Output, decode

MAX_LINKS = 40
"""Symbolic links followed for one path, as in the kernel (MAXSYMLINKS)."""


class Link(str):
    """The target of a symbolic link, as an entry of a tree."""

    __slots__ = ()


class Directory(list[str]):
    """The sorted names in a directory, as an entry of a tree."""

    __slots__ = ()


Entry = bytes | str | Link | Directory | Missing
"""What stands at one path of a tree: content (text where it was stored as text), link, names, or reason."""


class TreeHost:
    """A host that answers file questions from :meth:`entry` and has no commands and no NVML.

    Subclasses say what stands at a path; walking and confinement are here: ``..`` and absolute
    targets stay below the tree's own root, and a loop is an error of the tree, not a hang.
    """

    kind = "root"
    concurrent = False
    captured_at: str | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self._resolved: dict[str, str | Missing] = {}

    def entry(self, path: str) -> Entry | None:
        """What stands at a path whose parents are real directories; None for nothing."""
        raise NotImplementedError

    def read_bytes(self, path: str) -> Fact[bytes]:
        found = self._follow(path)
        if isinstance(found, (Directory, Link)):
            return Missing("failed", "is a directory")
        return found.encode("utf-8") if isinstance(found, str) else found

    def read_text(self, path: str) -> Fact[str]:
        found = self._follow(path)
        if isinstance(found, bytes):
            return decode(found)
        if isinstance(found, (Directory, Link)):
            return Missing("failed", "is a directory")
        return found.rstrip("\n\x00") if isinstance(found, str) else found

    def list_dir(self, path: str) -> Fact[list[str]]:
        found = self._follow(path)
        if isinstance(found, (Directory, Missing)):
            return found
        return Missing("failed", "not a directory")

    def read_link(self, path: str) -> Fact[str]:
        found = self.entry(path)
        if found is None:
            parent, _, base = path.rpartition("/")
            real = self._real(parent)
            found = real if isinstance(real, Missing) else self.entry(f"{real}/{base}")
        if found is None:
            return ABSENT
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
        """What stands at ``path`` once all links on the way are followed."""
        found = self.entry(path)
        if found is None or isinstance(found, Link):
            parent, _, base = path.rpartition("/")
            real = self._real(parent)
            if isinstance(real, Missing):
                return real
            found = self.entry(f"{real}/{base}")
            if isinstance(found, Link):
                real = self._real(path)
                found = real if isinstance(real, Missing) else self.entry(real)
        return ABSENT if found is None else found

    def _real(self, path: str) -> str | Missing:
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
            done = f"{done}/{component}"
            found = self.entry(done)
            if isinstance(found, Missing):
                return found
            if isinstance(found, Link):
                links += 1
                if links > MAX_LINKS:
                    return Missing("failed", "too many levels of symbolic links")
                done = "" if found.startswith("/") else done.rpartition("/")[0]
                todo.extend(found.split("/")[::-1])
        return done


class MemoryTree(TreeHost):
    """A tree held in memory: an archive, or a machine put together by the composer."""

    kind = "archive"

    def __init__(self, name: str, entries: dict[str, Entry]) -> None:
        super().__init__(name)
        self._entries = entries
        self._names: dict[str, set[str]] | None = None

    def entry(self, path: str) -> Entry | None:
        found = self._entries.get(path)
        if found is None and path in self._children():
            return Directory(sorted(self._children()[path]))
        return found

    def _children(self) -> dict[str, set[str]]:
        """The names in each directory, from the paths of all entries."""
        if self._names is None:
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
            self._names = names
        return self._names


class RootHost(TreeHost):
    """An unpacked root directory: ``ROOT/sys`` and ``ROOT/proc`` of another machine."""

    kind = "root"

    def __init__(self, name: str, root: str) -> None:
        super().__init__(name)
        self._root = root.rstrip("/")

    def entry(self, path: str) -> Entry | None:
        real = self._root + path
        try:
            mode = os.lstat(real).st_mode
            if stat.S_ISLNK(mode):
                return Link(os.readlink(real))
            if stat.S_ISDIR(mode):
                return Directory(sorted(os.listdir(real)))
            if not stat.S_ISREG(mode):
                return Missing("failed", "neither file, directory nor link")
            return read_regular(real)
        except OSError as error:
            return None if error.errno in _NOWHERE else from_errno(error)
        except ValueError:
            return None


def read_regular(path: str) -> bytes | Missing:
    """The first :data:`FILE_LIMIT` bytes of a regular file; never waits on a FIFO or a device."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return Missing("failed", "not a regular file")
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


def from_errno(error: OSError) -> Missing:
    """The reason that an operating-system error stands for."""
    code = error.errno or 0
    if code in _NOWHERE:
        return ABSENT
    if code in (1, 13):  # EPERM, EACCES
        return Missing("denied")
    if code in (95, 38):  # EOPNOTSUPP, ENOSYS
        return Missing("unsupported", os.strerror(code))
    return Missing("failed", os.strerror(code))
