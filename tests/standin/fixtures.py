"""Fixtures of the tests that start processes: import the ones that a module wants."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Protocol

import psutil
import pytest

from gputopo.host.live import LiveHost
from gputopo.host.recording import Answers
from gputopo.host.worker import Worker
from tests.standin import NOT_IN_OLD_DRIVERS, TABLE_VARIABLE, build, compiler, table

WATCHDOG = 30
"""Seconds after which a test that waits is a test that failed."""


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """Makes a hang a failure of its own test."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def bark(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still not done after {WATCHDOG} s")

    before = signal.signal(signal.SIGALRM, bark)
    # Again every second: what is raised inside a destructor or a callback is lost.
    signal.setitimer(signal.ITIMER_REAL, WATCHDOG, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """No child of this process outlives the test, dead or alive."""
    me = psutil.Process()
    before = set(me.children(recursive=True))
    yield
    left = [child for child in me.children(recursive=True) if child not in before]
    assert not left, f"left behind: {left}"


class Driver(Protocol):
    """Starts a live host whose driver library answers from a recording."""

    def __call__(
        self, answers: Answers, changes: Mapping[str, str] | None = None, *, old: bool = False
    ) -> LiveHost: ...


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """The directory of the stand-in library, as it is today or as that of an old driver."""
    if compiler() is None:
        pytest.skip("no C compiler (cc, gcc or clang) to build the stand-in library with")
    built: dict[bool, Path] = {}

    def directory(old: bool) -> Path:
        if old not in built:
            place = tmp_path_factory.mktemp("old-driver" if old else "driver")
            built[old] = build(place, NOT_IN_OLD_DRIVERS if old else ()).parent
        return built[old]

    return directory


@pytest.fixture
def driver(
    libraries: Callable[[bool], Path],
    no_leftovers: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Driver]:
    """Live hosts with the stand-in library in their child; they are closed at the end.

    The child finds the library by LD_LIBRARY_PATH. This process has read that variable when it
    started, so its own look for the library is left out; test_nvml_live.py has that in a process
    of its own.
    """
    hosts: list[LiveHost] = []
    monkeypatch.setattr(LiveHost, "_nvml_library", lambda self: None)

    def start(
        answers: Answers, changes: Mapping[str, str] | None = None, *, old: bool = False
    ) -> LiveHost:
        path = tmp_path / f"table{len(hosts)}"
        path.write_text(table(answers, changes))
        monkeypatch.setenv(TABLE_VARIABLE, str(path))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries(old)))
        hosts.append(LiveHost(budget=60.0))
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the host wait for one call (or file) only a moment, and for all others as it does."""

    def choose(subject: str) -> None:
        ask = Worker.ask
        monkeypatch.setattr(
            Worker,
            "ask",
            lambda self, request, timeout: ask(
                self, request, min(timeout, 0.3) if request[1] == subject else timeout
            ),
        )

    return choose


def wait_gone(pid: int) -> bool:
    """Whether a process ends within seconds; one that waits for its parent to notice has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(process, select.POLLIN)
        return bool(poller.poll(5000))
    finally:
        os.close(process)


def hard_kill(pid: int) -> None:
    """Ends and reaps a child that a test made look as if nothing could end it."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
