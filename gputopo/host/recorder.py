"""Recording is a by-product of scanning: the recorder writes down each question and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gputopo.facts import Fact, Missing
from gputopo.host.base import Host, Output, decode
from gputopo.host.recording import Answers, Header, nvml_key
from gputopo.host.tree import Directory, Entry, Link


class Recorder:
    """A host that passes questions on and keeps the answers, errors included.

    A question asked twice gets its first answer, so that the run and its replay see one machine.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.kind = host.kind
        self.name = host.name
        self.captured_at = host.captured_at
        self.concurrent = host.concurrent
        self._bytes: dict[str, Fact[bytes]] = {}
        self._texts: dict[str, Fact[str]] = {}
        self._listings: dict[str, Fact[list[str]]] = {}
        self._links: dict[str, Fact[str]] = {}
        self._commands: dict[tuple[str, ...], Fact[Output]] = {}
        self._nvml: dict[tuple[Any, ...], Fact[Any]] = {}

    @property
    def answers(self) -> Answers:
        """What was answered so far, as a recording."""
        return Answers(Header(format=1), self._files(), self._commands.copy(), self._nvml.copy())

    def read_bytes(self, path: str) -> Fact[bytes]:
        if path not in self._bytes:
            self._bytes[path] = self.host.read_bytes(path)
        return self._bytes[path]

    def read_text(self, path: str) -> Fact[str]:
        if path not in self._texts:
            kept = self._bytes.get(path)
            if kept is None:
                self._texts[path] = self.host.read_text(path)
            else:
                self._texts[path] = kept if isinstance(kept, Missing) else decode(kept)
        return self._texts[path]

    def list_dir(self, path: str) -> Fact[list[str]]:
        if path not in self._listings:
            self._listings[path] = self.host.list_dir(path)
        return self._listings[path]

    def read_link(self, path: str) -> Fact[str]:
        if path not in self._links:
            self._links[path] = self.host.read_link(path)
        return self._links[path]

    def run(self, argv: Sequence[str], timeout: float) -> Fact[Output]:
        key = tuple(argv)
        if key not in self._commands:
            self._commands[key] = self.host.run(argv, timeout)
        return self._commands[key]

    def nvml(self, call: str, *args: Any) -> Fact[Any]:
        key = nvml_key(call, args)
        if key not in self._nvml:
            self._nvml[key] = self.host.nvml(call, *args)
        return self._nvml[key]

    def remaining(self) -> float:
        return self.host.remaining()

    def close(self) -> None:
        self.host.close()

    def _files(self) -> dict[str, Entry]:
        """One entry a path. What was read through a link that was itself asked for stands at
        ``LINK/.``, where a replay looks for it.

        The dictionaries are copied before they are gone through: a thread that the scan gave up
        may still be adding to them.
        """
        links = self._links.copy()
        files: dict[str, Entry] = {
            path: Link(target) for path, target in links.items() if isinstance(target, str)
        }
        contents: list[tuple[str, Entry]] = [
            *self._texts.copy().items(),
            *self._bytes.copy().items(),
            *(
                (path, names if isinstance(names, Missing) else Directory(names))
                for path, names in self._listings.copy().items()
            ),
            *((path, target) for path, target in links.items() if isinstance(target, Missing)),
        ]
        # Of two answers on one path the one that is a value stays: what the other question was
        # told follows from it (a directory cannot be read, a file cannot be listed).
        for path, found in contents:
            place = f"{path}/." if isinstance(files.get(path), Link) else path
            if not isinstance(found, Missing) or place not in files:
                files[place] = found
        return files
