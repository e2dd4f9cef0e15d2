"""The live machine, asked in such a way that no answer can hold up the scan."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gputopo.facts import ABSENT, Fact, Missing
from gputopo.host.base import OUTPUT_LIMIT, Output, decode, printable
from gputopo.host.tree import from_errno, read_regular
from gputopo.host.worker import TERM_GRACE, Worker, end_session, kill_session

if TYPE_CHECKING:
    import subprocess

READ_TIMEOUT = 2.0
"""Seconds for one guarded sysfs read; a healthy one takes microseconds."""

NVML_TIMEOUT = 10.0
"""Seconds for one NVML call. Without persistence mode nvmlInit alone can take several."""

MAX_CRASHES = 3
"""Children that the driver library may take down before no more are started."""

_GUARDED = re.compile(
    r"/sys/bus/pci/devices/[^/]+/(config|current_link_speed|current_link_width)"
    r"|/sys/class/infiniband/[^/]+/ports/.*"
)
"""Files whose reading asks the device itself, which may be off the bus: only a child reads them.
Config space and the current link of NVIDIA devices; port files, which are firmware commands."""

_NO_LIBRARY = "libnvidia-ml.so.1: cannot open shared object file: No such file"

_CLOSED = Missing("failed", "the host is closed")

_STANDARD_PATH = (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/wsl/lib:/opt/bin"
)


class LiveHost:
    """This machine. All waiting together is bounded by ``budget`` seconds from creation."""

    kind = "live"
    name = "this machine"
    concurrent = True

    def __init__(self, budget: float = 20.0) -> None:
        self.captured_at: str | None = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.budget = budget
        self._deadline = time.monotonic() + budget
        self._reader = Worker()
        self._driver = Worker()
        self._reader_lock = threading.Lock()
        self._driver_lock = threading.Lock()
        self._hung: dict[str, Missing] = {}
        self._driver_hung: Missing | None = None
        self._library: Missing | bool | None = None
        self._nvidia: dict[str, bool] = {}
        self._closed = False

    def remaining(self) -> float:
        """Seconds left of the budget (0 when it is spent)."""
        return max(0.0, self._deadline - time.monotonic())

    def read_bytes(self, path: str) -> Fact[bytes]:
        if _GUARDED.fullmatch(path) and self._guarded(path):
            return self._read_guarded(path)
        try:
            return read_regular(path)
        except (OSError, ValueError) as error:
            return from_errno(error)

    def read_text(self, path: str) -> Fact[str]:
        data = self.read_bytes(path)
        return data if isinstance(data, Missing) else decode(data)

    def list_dir(self, path: str) -> Fact[list[str]]:
        try:
            return sorted(map(printable, os.listdir(path)))
        except (OSError, ValueError) as error:
            missing = from_errno(error)
            if missing == ABSENT and os.path.exists(path):
                return Missing("failed", "not a directory")
            return missing

    def read_link(self, path: str) -> Fact[str]:
        try:
            return printable(os.readlink(path))
        except (OSError, ValueError) as error:
            if getattr(error, "errno", 0) == 22:  # EINVAL: something else than a link
                return Missing("failed", "not a symbolic link")
            return from_errno(error)

    def run(self, argv: Sequence[str], timeout: float) -> Fact[Output]:
        if self._closed:
            return _CLOSED
        program = find_program(argv[0])
        if program is None:
            return Missing("absent", f"no {argv[0]} on this machine")
        driver = argv[0].startswith("nvidia-")
        if driver and self._driver_hung is not None:
            return Missing("timeout", "not run: the driver hung before")
        allowed = min(timeout, self.remaining())
        if allowed <= 0:
            return self._spent()
        answer, left_behind = run_program([program, *argv[1:]], allowed)
        if driver and left_behind and isinstance(answer, Missing):
            self._driver_hung = answer
        return answer

    def nvml(self, call: str, *args: Any) -> Fact[Any]:
        with self._driver_lock:
            if self._closed:
                return _CLOSED
            if self._driver_hung is not None:
                return Missing("timeout", "not asked: the driver hung before")
            if self._driver.crashes >= MAX_CRASHES:
                return Missing("failed", "not asked: the driver library crashed time and again")
            absent = self._nvml_library()
            if absent is not None:
                return absent
            allowed = min(NVML_TIMEOUT, self.remaining())
            if allowed <= 0:
                return self._spent()
            answer = self._driver.ask(("nvml", call, *args), allowed)
            if (
                isinstance(answer, Missing)
                and answer.reason == "timeout"
                and not answer.detail.startswith("NVML ")  # TIMEOUT as the driver's own answer
            ):
                self._driver_hung = answer
            return answer

    def close(self) -> None:
        self._closed = True
        # What a thread still waits for when the scan ends (budget, Ctrl-C) must not outlive it.
        for pid in list(_running):
            kill_session(pid)
        for worker, lock in (
            (self._reader, self._reader_lock),
            (self._driver, self._driver_lock),
        ):
            if not lock.acquire(blocking=False):
                worker.interrupt()  # a thread still waits for an answer
                if not lock.acquire(timeout=1.0):
                    continue
            worker.close()
            lock.release()

    def _nvml_library(self) -> Missing | None:
        """None if libnvidia-ml.so.1 can be loaded. Loading it touches no device."""
        if self._library is None:
            import ctypes

            from gputopo.host.recording import nvml_error

            try:
                ctypes.CDLL("libnvidia-ml.so.1")
                self._library = True
            except OSError as error:
                # An empty file is what a container without its driver mounted has in its place.
                self._library = (
                    nvml_error("LIBRARY_NOT_FOUND")
                    if str(error).startswith(_NO_LIBRARY)
                    else Missing("failed", str(error)[:200])
                )
        return self._library if isinstance(self._library, Missing) else None

    def _guarded(self, path: str) -> bool:
        """Whether reading this file can hang on a dead device."""
        if path.startswith("/sys/class/infiniband/"):
            return True
        device = path.rpartition("/")[0]
        if device not in self._nvidia:
            vendor = self.read_text(f"{device}/vendor")
            self._nvidia[device] = vendor == "0x10de"
        return self._nvidia[device]

    def _read_guarded(self, path: str) -> Fact[bytes]:
        device = "/".join(path.split("/")[: 6 if path.startswith("/sys/bus") else 5])
        with self._reader_lock:
            if self._closed:
                return _CLOSED
            if self._reader.abandoned:
                return Missing("timeout", "not read: an earlier read hung and could not be ended")
            if device in self._hung:
                return Missing("timeout", "not read: an earlier read of this device hung")
            allowed = min(READ_TIMEOUT, self.remaining())
            if allowed <= 0:
                return self._spent()
            answer = self._reader.ask(("read", path), allowed)
            if isinstance(answer, Missing) and answer.reason == "timeout":
                self._hung[device] = answer
            return answer

    def _spent(self) -> Missing:
        return Missing("timeout", f"the scan's budget of {self.budget:g} s was spent")


def find_program(name: str) -> str | None:
    """The absolute path of a program: the user's PATH less relative entries, then the usual places.

    For root, programs and directories that everybody can write to are left out as well.
    """
    root = os.geteuid() == 0
    seen: set[str] = set()
    for directory in [*os.environ.get("PATH", "").split(":"), *_STANDARD_PATH.split(":")]:
        if not directory.startswith("/") or directory in seen:
            continue
        seen.add(directory)
        path = f"{directory}/{name}"
        if os.path.isfile(path) and os.access(path, os.X_OK):
            try:
                if root and (os.stat(directory).st_mode | os.stat(path).st_mode) & 0o002:
                    continue
            except OSError:
                continue
            return path
    return None


_running: set[int] = set()
"""Sessions of programs that are being waited for, by process id."""


def run_program(argv: list[str], timeout: float) -> tuple[Fact[Output], bool]:
    """Runs a program in a session of its own; returns its answer and whether it was left behind.

    Output past OUTPUT_LIMIT ends it. After the program itself has ended its pipes are read only as
    long as data is there, since what it started may keep them open.
    """
    import subprocess

    environment = {**os.environ, "LC_ALL": "C"}
    deadline = time.monotonic() + timeout
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=environment,
            cwd="/",
        )
    except (OSError, ValueError) as error:
        return from_errno(error), False
    _running.add(process.pid)
    try:
        texts, failure = _collect(process, deadline, timeout)
    except BaseException:
        end_session(process, 0.0)
        _running.discard(process.pid)
        raise
    finally:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    if failure is None:
        _running.discard(process.pid)
        return Output(process.returncode, texts[0], texts[1]), False
    left_behind = end_session(process, TERM_GRACE)
    kill_session(process.pid)
    _running.discard(process.pid)
    if left_behind:
        failure = Missing(failure.reason, f"{failure.detail}; {left_behind}")
    return failure, bool(left_behind)


def _collect(
    process: subprocess.Popen[bytes], deadline: float, timeout: float
) -> tuple[list[str], Missing | None]:
    """What the program printed (stdout, stderr), and why it has to be ended if it has to be."""
    import selectors
    import subprocess

    streams: dict[int, bytearray] = {}
    late = Missing("timeout", f"no end within {timeout:.3g} s")
    with selectors.DefaultSelector() as selector:
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            streams[pipe.fileno()] = bytearray()
            selector.register(pipe.fileno(), selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return [], late
            ended = process.poll() is not None
            ready = selector.select(0.0 if ended else min(left, 0.05))
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                streams[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
                elif len(streams[key.fd]) > OUTPUT_LIMIT:
                    return [], Missing("failed", f"printed more than {OUTPUT_LIMIT >> 20} MiB")
            if ended and not ready:
                break
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return [], late
    return [bytes(data).decode("utf-8", "replace") for data in streams.values()], None
