"""A child process that asks the dangerous questions, so that the scan can leave it behind.

A call into a GPU that fell off the bus, or a read of its config space, can sleep uninterruptibly in
the kernel; only another process can be given up. The child answers framed requests on its standard
input and output; the parent never waits for it without a deadline.
"""

from __future__ import annotations

import marshal
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from gputopo.facts import Fact, Missing

if TYPE_CHECKING:
    import subprocess

TERM_GRACE = 2.0
"""Seconds between TERM and KILL, and again between KILL and abandoning."""

FRAME_LIMIT = 64 << 20


class Worker:
    """One child. After a timeout it is killed, or abandoned where it cannot be killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.abandoned = False
        """True once a child could not be killed: it sleeps in the driver still."""
        self.crashes = 0
        """How many children ended by themselves."""

    def ask(self, request: tuple[Any, ...], timeout: float) -> Fact[Any]:
        """The answer to one request, or ``timeout`` with what became of the child."""
        deadline = time.monotonic() + timeout
        try:
            process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            data = marshal.dumps(request)
            os.write(process.stdin.fileno(), len(data).to_bytes(4, "little") + data)
            frame = _read_frame(process.stdout.fileno(), deadline)
            if frame:
                kind, *rest = marshal.loads(frame)
                return rest[0] if kind == "value" else Missing(*rest)
        except BrokenPipeError:
            frame = b""
        except (OSError, ValueError, EOFError, TypeError) as error:
            self._end(0.0)
            return Missing("failed", f"the worker process broke: {error}")
        except BaseException:
            # Interrupted: the answer that comes late must not be taken for the next request's.
            self._end(0.0)
            raise
        if frame is None:
            where = self._end(TERM_GRACE)
            return Missing("timeout", f"no answer within {timeout:.3g} s; {where}")
        self.crashes += 1
        code = _exit_code(process)
        self._end(0.0)
        return Missing("failed", f"the worker process ended ({code}) during {request[1]}")

    def interrupt(self) -> None:
        """Kills the child while another thread asks it, which then gets its answer at once."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the child; it is idle, so TERM suffices."""
        if self._process is not None:
            self._end(0.2)

    def _start(self) -> subprocess.Popen[bytes]:
        import subprocess

        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        start = "import gputopo.host.worker as worker; worker.serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {start}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        return self._process

    def _end(self, grace: float) -> str:
        """TERM, KILL, abandon; says in words what became of the child."""
        process, self._process = self._process, None
        if process is None:
            return "no child"
        state = end_session(process, grace)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass
        if state:
            self.abandoned = True
        return state or "its process was ended"


def _exit_code(process: subprocess.Popen[bytes]) -> str:
    import subprocess

    try:
        code = process.wait(0.5)
    except subprocess.TimeoutExpired:
        return "still running"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


KILL_GRACE = 1.0
"""The least time to die that a killed process gets: on a busy machine even that is not at once."""


def end_session(process: subprocess.Popen[bytes], grace: float) -> str:
    """Ends a process and its group: TERM, ``grace`` s, KILL, ``grace`` s, then no more.

    Returns "" when it is gone, else a sentence on the process that was left behind.
    """
    import signal
    import subprocess

    for number, patience in (
        (signal.SIGTERM, grace),
        (signal.SIGKILL, max(grace, KILL_GRACE)),
    ):
        _kill_group(process.pid, number)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        # What it started goes too, even when it ended at once itself.
        _kill_group(process.pid, signal.SIGKILL)
        return ""
    # Popen's destructor would try to reap it and warn; there is nothing more to be done with it.
    process.returncode = 0
    return describe(process.pid)


def _kill_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


def kill_session(session: int) -> None:
    """Kills what is left of a session: process groups that its leader made (job control)."""
    import signal

    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.getsid(int(name)) == session:
                os.kill(int(name), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def describe(pid: int) -> str:
    """Where a process that cannot be killed is: its state and the kernel function it sleeps in."""
    import psutil

    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        state = "unknown"
    try:
        with open(f"/proc/{pid}/wchan") as file:
            wchan = file.read(64).strip() or "?"
    except OSError:
        wchan = "unreadable"
    return f"process {pid} could not be ended (state {state}, in {wchan}) and was left behind"


def _read_frame(fd: int, deadline: float) -> bytes | None:
    """One frame; None when the deadline passes first, b"" when the child closed its end."""
    import select

    poller = select.poll()
    poller.register(fd, select.POLLIN | select.POLLHUP)
    wanted, data = 4, b""
    sized = False
    while len(data) < wanted:
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            return None
        chunk = os.read(fd, wanted - len(data))
        if not chunk:
            return b""
        data += chunk
        if not sized and len(data) == 4:
            wanted, data, sized = int.from_bytes(data, "little"), b"", True
            if wanted > FRAME_LIMIT:
                return b""
    return data


def serve() -> None:
    """The child's loop: requests in, answers out, until the parent closes the pipe."""
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)  # whatever a driver library prints must not land among the frames
    while True:
        head = _read_exactly(source, 4)
        if len(head) < 4:
            return
        request = marshal.loads(_read_exactly(source, int.from_bytes(head, "little")))
        data = marshal.dumps(_answer(request))
        frame = len(data).to_bytes(4, "little") + data
        while frame:
            frame = frame[os.write(sink, frame) :]


def _read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            break
        data += chunk
    return data


def _answer(request: tuple[Any, ...]) -> tuple[Any, ...]:
    verb, subject, *args = request
    if verb == "read":
        from gputopo.host.tree import from_errno, read_regular

        try:
            found = read_regular(subject)
        except (OSError, ValueError) as error:
            found = from_errno(error)
        if isinstance(found, Missing):
            return ("missing", found.reason, found.detail)
        return ("value", found)
    from gputopo.host import nvml
    from gputopo.host.recording import nvml_error

    try:
        return ("value", nvml.call(subject, args))
    except nvml.Refused as refused:
        missing = nvml_error(str(refused))
        return ("missing", missing.reason, missing.detail)
    except UnicodeDecodeError as error:  # driver 555 gave garbage for names
        return ("missing", "unparsed", f"not UTF-8: {error.object[:60].decode('utf-8', 'replace')}")
    except Exception as error:  # a binding at odds with its library must not end the scan
        return ("missing", "failed", f"{type(error).__name__}: {error}"[:200])
