"""Recording is a by-product of scanning: the recorder writes down each question and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gputopo.facts import Fact
from gputopo.host.base import Host, Output
from gputopo.host.recording import Answers, Header, nvml_key
from gputopo.host.tree import Directory, Link


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
        self.answers = Answers(Header(format=1), {}, {}, {})

    def read_bytes(self, path: str) -> Fact[bytes]:
        kept = self.answers.files.get(path)
        if isinstance(kept, bytes):
            return kept
        answer = self.host.read_bytes(path)
        self.answers.files[path] = answer
        return answer

    def read_text(self, path: str) -> Fact[str]:
        kept = self.answers.files.get(path)
        if isinstance(kept, str) and not isinstance(kept, Link):
            return kept
        answer = self.host.read_text(path)
        self.answers.files[path] = answer
        return answer

    def list_dir(self, path: str) -> Fact[list[str]]:
        kept = self.answers.files.get(path)
        if isinstance(kept, Directory):
            return kept
        answer = self.host.list_dir(path)
        self.answers.files[path] = Directory(answer) if isinstance(answer, list) else answer
        return answer

    def read_link(self, path: str) -> Fact[str]:
        kept = self.answers.files.get(path)
        if isinstance(kept, Link):
            return str(kept)
        answer = self.host.read_link(path)
        self.answers.files[path] = Link(answer) if isinstance(answer, str) else answer
        return answer

    def run(self, argv: Sequence[str], timeout: float) -> Fact[Output]:
        key = tuple(argv)
        if key not in self.answers.commands:
            self.answers.commands[key] = self.host.run(argv, timeout)
        return self.answers.commands[key]

    def nvml(self, call: str, *args: Any) -> Fact[Any]:
        key = nvml_key(call, args)
        if key not in self.answers.nvml:
            self.answers.nvml[key] = self.host.nvml(call, *args)
        return self.answers.nvml[key]

    def remaining(self) -> float:
        return self.host.remaining()

    def close(self) -> None:
        self.host.close()
