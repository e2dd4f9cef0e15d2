"""The file tree under construction: files, links, and the directories that hold them."""

from __future__ import annotations

from gputopo.facts import Missing
from gputopo.host.tree import Directory, Entry, Link

NODE = Missing("failed", "not a regular file")
"""What a host answers for a device node."""


class Files:
    """Collects entries; directories come from the paths of all, so that none is forgotten."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._names: dict[str, set[str]] = {"": set()}

    def text(self, path: str, value: str | int) -> None:
        """A file as the kernel prints it, with its newline."""
        self._put(path, f"{value}\n")

    def data(self, path: str, value: bytes) -> None:
        self._put(path, value)

    def raw(self, path: str, value: str) -> None:
        """A file whose text is given whole."""
        self._put(path, value)

    def link(self, path: str, target: str) -> None:
        """A symbolic link to an absolute path, written relative, as sysfs does."""
        self._put(path, Link(_relative(path, target)))

    def missing(self, path: str, reason: Missing) -> None:
        """A file that is there and cannot be read."""
        self._put(path, reason)

    def node(self, name: str) -> None:
        """A device node in /dev: it is listed, and reading it is not a matter of text."""
        self._put(f"/dev/{name}", NODE)

    def directory(self, path: str) -> None:
        """A directory, empty so far."""
        if path not in self._names:
            self._names[path] = set()
            self._enter(path)

    def finish(self) -> dict[str, Entry]:
        """All entries, with every directory listing its children."""
        entries = dict(self._entries)
        for path, names in self._names.items():
            entries[path or "/"] = Directory(sorted(names))
        return entries

    def _put(self, path: str, value: Entry) -> None:
        self._entries[path] = value
        self._enter(path)

    def _enter(self, path: str) -> None:
        while path:
            parent, _, base = path.rpartition("/")
            siblings = self._names.setdefault(parent, set())
            if base in siblings:
                return
            siblings.add(base)
            path = parent


def _relative(path: str, target: str) -> str:
    here, there = path.split("/")[1:-1], target.split("/")[1:]
    common = 0
    while common < min(len(here), len(there) - 1) and here[common] == there[common]:
        common += 1
    return "/".join([".."] * (len(here) - common) + there[common:])
