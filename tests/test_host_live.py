"""The live host: whatever a program, a file or a child does, it answers, in time, and cleans up."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gputopo.facts import ABSENT, Missing
from gputopo.host import live, worker
from gputopo.host.base import FILE_LIMIT, OUTPUT_LIMIT, Output
from gputopo.host.live import LiveHost, find_program
from tests.standin.fixtures import (
    hard_kill,
    no_leftovers,  # noqa: F401
    wait_gone,
    watchdog,  # noqa: F401
)

ROOT = Path(__file__).resolve().parents[1]
PORT = "/sys/class/infiniband/gputopo-test{}/ports/1/state"
"""A file that only a child may read; no machine has it, so a child answers that it is absent."""

OWN_GROUP = """
import os, sys
os.setpgid(0, 0)
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
os.execvp("sleep", ["sleep", "1000"])
"""
"""What a shell with job control does for each job."""

Program = Callable[[str, str], None]


@pytest.fixture
def host(no_leftovers: None) -> Iterator[LiveHost]:  # noqa: F811
    host = LiveHost(budget=60.0)
    yield host
    host.close()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Puts a shell script on the PATH."""
    directory = tmp_path / "bin"
    directory.mkdir(mode=0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")

    def write(name: str, text: str) -> None:
        (directory / name).write_text(f"#!/bin/sh\n{text}\n")
        (directory / name).chmod(0o755)

    return write


@pytest.fixture
def late_once_there(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Lets a long time pass, for deadlines alone, as soon as a file is there.

    So a time-out strikes when the program is where the test wants it, on the slowest machine too.
    """

    def choose(path: Path) -> None:
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + (1000 if path.exists() else 0))

    return choose


def pid_in(path: Path) -> int:
    return int(path.read_text())


# Programs


def test_a_programs_answer(host: LiveHost, program: Program) -> None:
    program("tool", "echo out; echo err >&2; exit 3")
    assert host.run(["tool"], 10) == Output(3, "out\n", "err\n")


def test_a_program_that_dies_of_a_signal(host: LiveHost, program: Program) -> None:
    program("tool", "echo before; kill -SEGV $$")
    assert host.run(["tool"], 10) == Output(-signal.SIGSEGV, "before\n", "")


def test_programs_speak_english_at_the_root(
    host: LiveHost, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    program("tool", 'echo "$LC_ALL"; pwd')
    assert host.run(["tool"], 10) == Output(0, "C\n/\n", "")


def test_programs_have_no_input(host: LiveHost, program: Program) -> None:
    """They would wait for what the user types."""
    program("tool", "cat; echo done")
    typed, keyboard = os.pipe()
    before = os.dup(0)
    os.dup2(typed, 0)
    try:
        assert host.run(["tool"], 10) == Output(0, "done\n", "")
    finally:
        os.dup2(before, 0)
        for descriptor in (before, typed, keyboard):
            os.close(descriptor)


def test_arguments_are_passed_as_they_are(host: LiveHost, program: Program) -> None:
    program("tool", 'printf "%s|" "$@"')
    answer = host.run(["tool", "$(echo no)", "a b", "", ";"], 10)
    assert answer == Output(0, "$(echo no)|a b||;|", "")


def test_output_that_is_not_text(host: LiveHost, program: Program) -> None:
    program("tool", r"printf 'a\377b\000c'")
    assert host.run(["tool"], 10) == Output(0, "a\ufffdb\x00c", "")


def test_large_output_on_both_streams(host: LiveHost, program: Program) -> None:
    """Neither stream may fill its pipe while the other is read."""
    size = 3 << 20
    program("tool", f"head -c {size} /dev/zero >&2 & head -c {size} /dev/zero; wait")
    answer = host.run(["tool"], 20)
    assert isinstance(answer, Output)
    assert (len(answer.stdout), len(answer.stderr)) == (size, size)


def test_output_without_end_is_cut_off(host: LiveHost, program: Program, tmp_path: Path) -> None:
    """The program is ended with all that it started, in process groups of their own too."""
    program(
        "tool",
        f"""
        sleep 1000 & echo $! > {tmp_path}/same-group
        {sys.executable} -S -c '{OWN_GROUP}' {tmp_path}/own-group &
        until [ -s {tmp_path}/own-group ]; do :; done
        exec yes
        """,
    )
    answer = host.run(["tool"], 30)
    assert answer == Missing("failed", f"printed more than {OUTPUT_LIMIT >> 20} MiB")
    assert wait_gone(pid_in(tmp_path / "same-group"))
    assert wait_gone(pid_in(tmp_path / "own-group"))


def test_a_timeout_ends_the_whole_session(
    host: LiveHost,
    program: Program,
    tmp_path: Path,
    late_once_there: Callable[[Path], None],
) -> None:
    program(
        "tool",
        f"""
        echo partial
        sh -c 'echo $$ > {tmp_path}/child; sleep 1000 & echo $! > {tmp_path}/grandchild; wait' &
        until [ -s {tmp_path}/grandchild ]; do :; done
        touch {tmp_path}/ready
        wait
        """,
    )
    late_once_there(tmp_path / "ready")
    assert host.run(["tool"], 30) == Missing("timeout", "no end within 30 s")
    assert wait_gone(pid_in(tmp_path / "child"))
    assert wait_gone(pid_in(tmp_path / "grandchild"))


def test_a_program_that_closed_its_output_still_has_a_deadline(
    host: LiveHost, program: Program
) -> None:
    program("tool", "exec >&- 2>&-; exec sleep 1000")
    assert host.run(["tool"], 0.3) == Missing("timeout", "no end within 0.3 s")


def test_a_program_that_ignores_term_is_killed(
    host: LiveHost,
    program: Program,
    tmp_path: Path,
    late_once_there: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "TERM_GRACE", 0.1)
    program("tool", f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 1000; done")
    late_once_there(tmp_path / "pid")
    assert host.run(["tool"], 30) == Missing("timeout", "no end within 30 s")
    assert not psutil.pid_exists(pid_in(tmp_path / "pid"))


def test_a_grandchild_that_keeps_the_pipe_does_not_hold_up_the_answer(
    host: LiveHost, program: Program, tmp_path: Path
) -> None:
    program("tool", f"echo answer; sleep 1000 & echo $! > {tmp_path}/pid")
    start = time.monotonic()
    try:
        assert host.run(["tool"], 25) == Output(0, "answer\n", "")
        assert time.monotonic() - start < 10
    finally:
        os.kill(pid_in(tmp_path / "pid"), signal.SIGKILL)


def test_a_grandchild_that_floods_the_pipe_does_not_hold_up_the_answer(
    host: LiveHost, program: Program, tmp_path: Path
) -> None:
    """It is ended at the limit, or by the closed pipe when it paused for a moment."""
    program("tool", f"yes & echo $! > {tmp_path}/pid")
    answer = host.run(["tool"], 25)
    assert isinstance(answer, Output) or answer.reason == "failed"
    assert wait_gone(pid_in(tmp_path / "pid"))


def test_a_program_that_nothing_ends_is_left_behind(
    host: LiveHost,
    program: Program,
    tmp_path: Path,
    late_once_there: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nvidia-smi in uninterruptible sleep: after it the driver is asked nothing more."""
    monkeypatch.setattr(live, "TERM_GRACE", 0.05)
    monkeypatch.setattr(worker, "KILL_GRACE", 0.05)
    program("nvidia-smi", f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    late_once_there(tmp_path / "pid")
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_kill_group", lambda group, number: None)
        patch.setattr(live, "kill_session", lambda session: None)
        answer = host.run(["nvidia-smi"], 30)
    pid = pid_in(tmp_path / "pid")
    try:
        assert isinstance(answer, Missing) and answer.reason == "timeout"
        assert f"process {pid} could not be ended (state sleeping" in answer.detail
        (tmp_path / "pid").unlink()  # time is as it was
        program("nvidia-smi", "echo ran")
        refused = Missing("timeout", "not run: the driver hung before")
        assert host.run(["nvidia-smi", "-L"], 10) == refused
        assert host.nvml("nvmlInit") == Missing("timeout", "not asked: the driver hung before")
    finally:
        hard_kill(pid)


def test_an_interrupt_ends_the_program(
    host: LiveHost, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C does not reach a program in a session of its own; no_leftovers looks for it."""

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    program("tool", "sleep 1000")
    monkeypatch.setattr(live, "_collect", interrupt)
    with pytest.raises(KeyboardInterrupt):
        host.run(["tool"], 30)


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ("#!/nonexistent/interpreter\n", 0o755, "absent"),
        ("\x7fELF, but no more", 0o755, "failed"),
        ("", 0o755, "failed"),
        ("#!/bin/sh\n", 0o644, "absent"),
    ],
    ids=["no-interpreter", "broken-binary", "empty", "not-executable"],
)
def test_programs_that_cannot_run(
    text: str, mode: int, expected: str, host: LiveHost, program: Program, tmp_path: Path
) -> None:
    path = tmp_path / "bin" / "gputopo-test-tool"
    path.write_text(text)
    path.chmod(mode)
    answer = host.run(["gputopo-test-tool"], 10)
    assert isinstance(answer, Missing) and answer.reason == expected


def test_a_program_that_is_not_there(host: LiveHost) -> None:
    answer = host.run(["gputopo-no-such-tool"], 10)
    assert answer == Missing("absent", "no gputopo-no-such-tool on this machine")
    for odd in ("", "a\0b", "\ud800", "x" * 5000):
        answer = host.run([odd], 10)
        assert isinstance(answer, Missing) and answer.reason == "absent", odd
    answer = host.run(["true", "a\0b"], 10)
    assert isinstance(answer, Missing)


# The search path


def test_relative_search_path_entries_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in (tmp_path, tmp_path / "sub", tmp_path / "good"):
        directory.mkdir(exist_ok=True, mode=0o755)
        (directory / "gputopo-test-tool").write_text("#!/bin/sh\n")
        (directory / "gputopo-test-tool").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", ":.:sub:./sub:../:")
    assert find_program("gputopo-test-tool") is None
    monkeypatch.setenv("PATH", f".:{tmp_path}/good")
    assert find_program("gputopo-test-tool") == f"{tmp_path}/good/gputopo-test-tool"


@pytest.mark.parametrize(("uid", "expected"), [(0, None), (1000, "tool")])
@pytest.mark.parametrize("writable", ["directory", "program"])
def test_root_runs_nothing_that_everybody_can_replace(
    writable: str,
    uid: int,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "gputopo-test-tool"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o777 if writable == "program" else 0o755)
    tmp_path.chmod(0o1777 if writable == "directory" else 0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert find_program("gputopo-test-tool") == (str(path) if expected else None)


def test_the_usual_places_are_searched_without_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    assert find_program("sh") in ("/usr/bin/sh", "/bin/sh")


# Files


def test_what_can_stand_at_a_path(host: LiveHost, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text\xff\n")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "b").touch()
    (tmp_path / "dir" / "a").touch()
    os.mkfifo(tmp_path / "fifo")
    os.symlink("file", tmp_path / "link")
    os.symlink("nowhere", tmp_path / "dangling")
    os.symlink("loop", tmp_path / "loop")
    at = f"{tmp_path}/{{}}".format
    assert host.read_bytes(at("file")) == host.read_bytes(at("link")) == b"text\xff\n"
    assert host.read_text(at("file")) == "text\ufffd"
    assert host.read_bytes(at("dir")) == Missing("failed", "is a directory")
    assert host.list_dir(at("dir")) == ["a", "b"]
    assert host.list_dir(at("file")) == Missing("failed", "not a directory")
    assert host.read_link(at("link")) == "file"
    assert host.read_link(at("dangling")) == "nowhere"
    assert host.read_link(at("file")) == Missing("failed", "not a symbolic link")
    # A FIFO has no writer here: to wait for one would be to wait for ever.
    assert host.read_bytes(at("fifo")) == Missing("failed", "not a regular file")
    assert host.read_bytes("/dev/zero") == Missing("failed", "not a regular file")
    for ask in (host.read_bytes, host.read_text, host.list_dir, host.read_link):
        for path in ("none", "file/below", "none/below", "nul\0inside", "\ud800"):
            assert ask(at(path)) == ABSENT, path
        long = ask(at("x" * 5000))
        assert isinstance(long, Missing) and long.reason == "failed"
    for ask in (host.read_bytes, host.list_dir):
        assert ask(at("dangling")) == ABSENT
        loop = ask(at("loop"))
        assert isinstance(loop, Missing) and loop.reason == "failed"


def test_names_that_are_not_text(host: LiveHost, tmp_path: Path) -> None:
    """Python holds their bytes as lone surrogates, which no report and no recording can."""
    raw = os.fsencode(tmp_path)
    os.mkdir(raw + b"/\xff")
    os.symlink(b"\xfe", raw + b"/link")
    assert host.list_dir(str(tmp_path)) == ["link", "\ufffd"]
    assert host.read_link(f"{tmp_path}/link") == "\ufffd"


def test_a_huge_file_is_cut_off(host: LiveHost, tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(FILE_LIMIT * 5)
    data = host.read_bytes(f"{tmp_path}/huge")
    assert isinstance(data, bytes) and len(data) == FILE_LIMIT


def test_a_proc_file_is_read_to_its_end(host: LiveHost) -> None:
    """One read of procfs gives a part: of 16 CPUs in /proc/cpuinfo it gave 5."""
    data = host.read_bytes("/proc/self/maps")
    assert isinstance(data, bytes)
    assert len(data) > 4096, "the test needs a file of several pages"
    assert data.endswith(b"\n") and data.count(b"\n") > 50
    assert b"[stack]" in data, "one of the last mappings"


CLOSED = """
import json, os, sys
from gputopo.host.live import LiveHost
top = sys.argv[1]
host = LiveHost()
if os.geteuid() == 0:
    os.seteuid(65534)
print(json.dumps([
    host.read_bytes(top + "/file").reason,
    host.read_text(top + "/file").reason,
    host.list_dir(top + "/dir").reason,
    host.read_bytes(top + "/dir/file").reason,
    host.read_link(top + "/dir/link").reason,
]))
"""


def test_what_this_user_may_not_read_is_denied() -> None:
    """In a process of its own: root may read everything, so it must first cease to be root."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        (top / "dir").mkdir()
        for path in (top / "file", top / "dir" / "file"):
            path.touch(mode=0o000)
        os.symlink("file", top / "dir" / "link")
        (top / "dir").chmod(0o000)
        done = subprocess.run(
            [sys.executable, "-c", CLOSED, name], cwd=ROOT, capture_output=True, timeout=30
        )
        (top / "dir").chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["denied"] * 5


def test_no_file_descriptors_left(
    host: LiveHost, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    """Out of descriptors everything fails, and nothing raises or is lost for later."""
    program("tool", "echo ran")
    monkeypatch.setattr(LiveHost, "_nvml_library", lambda self: None)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        answers: list[Any] = [
            host.read_bytes("/proc/version"),
            host.list_dir("/proc"),
            host.run(["tool"], 10),
            host.nvml("nvmlInit"),
            host.read_bytes(PORT.format(0)),
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for answer in answers:
        assert isinstance(answer, Missing) and answer.reason == "failed", answer
        assert "Too many open files" in answer.detail
    assert host.run(["tool"], 10) == Output(0, "ran\n", "")
    assert host.read_bytes(PORT.format(0)) == ABSENT


def test_no_descriptors_are_leaked(host: LiveHost, program: Program, tmp_path: Path) -> None:
    program("tool", "echo ran")
    os.mkfifo(tmp_path / "fifo")

    def ask_everything() -> None:
        host.run(["tool"], 10)
        host.run(["gputopo-no-such-tool"], 10)
        host.read_bytes(f"{tmp_path}/fifo")
        host.read_bytes(f"{tmp_path}")
        host.read_bytes("/proc/version")
        host.read_bytes(PORT.format(0))
        host._reader.close()

    ask_everything()
    before = sorted(os.listdir("/proc/self/fd"))
    ask_everything()
    assert sorted(os.listdir("/proc/self/fd")) == before


# Files that only a child may read


@pytest.mark.parametrize(
    ("path", "vendor", "child"),
    [
        ("/sys/bus/pci/devices/0000:17:00.0/config", "0x10de", True),
        ("/sys/bus/pci/devices/0000:17:00.0/current_link_speed", "0x10de", True),
        ("/sys/bus/pci/devices/0000:17:00.0/current_link_width", "0x10de", True),
        ("/sys/bus/pci/devices/0000:17:00.0/config", "0x15b3", False),
        ("/sys/bus/pci/devices/0000:17:00.0/max_link_speed", "0x10de", False),
        ("/sys/bus/pci/devices/0000:17:00.0/numa_node", "0x10de", False),
        ("/sys/class/infiniband/mlx5_0/ports/1/rate", "", True),
        ("/sys/class/infiniband/mlx5_0/ports/1/gids/0", "", True),
        ("/sys/class/infiniband/mlx5_0/node_guid", "", False),
        ("/proc/cpuinfo", "", False),
    ],
)
def test_which_files_a_child_reads(
    path: str, vendor: str, child: bool, host: LiveHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that make the kernel ask a device which may no longer answer."""
    asked: list[tuple[Any, ...]] = []

    def ask(self: worker.Worker, request: tuple[Any, ...], timeout: float) -> Any:
        asked.append(request)
        return b"by the child"

    monkeypatch.setattr(worker.Worker, "ask", ask)
    monkeypatch.setattr(live, "read_regular", lambda path: b"directly")
    monkeypatch.setattr(LiveHost, "read_text", lambda self, path: vendor)
    assert host.read_bytes(path) == (b"by the child" if child else b"directly")
    assert asked == ([("read", path)] if child else [])


@pytest.fixture
def all_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a child read every file."""
    monkeypatch.setattr(live.LiveHost, "_guarded", lambda self, path: True)
    monkeypatch.setattr(live, "_GUARDED", re.compile(".*", re.DOTALL))


def test_a_child_reads_as_the_host_does(host: LiveHost, all_guarded: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x00\xff\n" * 3000)
    os.mkfifo(tmp_path / "fifo")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(FILE_LIMIT * 5)
    assert host.read_bytes(f"{tmp_path}/file") == b"\x00\xff\n" * 3000
    assert host.read_bytes(f"{tmp_path}/fifo") == Missing("failed", "not a regular file")
    assert host.read_bytes(f"{tmp_path}") == Missing("failed", "is a directory")
    assert host.read_bytes(f"{tmp_path}/huge") == bytes(FILE_LIMIT)
    for path in ("none", "file/below", "nul\0inside", "\ud800"):
        assert host.read_bytes(f"{tmp_path}/{path}") == ABSENT, path
    assert len(psutil.Process().children()) == 1, "one child reads them all"


def reader(host: LiveHost) -> subprocess.Popen[bytes]:
    """The child that reads, started if need be."""
    assert host.read_bytes(PORT.format("-unused")) == ABSENT
    process = host._reader._process
    assert process is not None
    return process


def test_a_hung_read_gives_up_its_device_alone(
    host: LiveHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child is stopped, so that it answers as little as one that sleeps in the kernel."""
    process = reader(host)
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(live, "READ_TIMEOUT", 0.2)
    monkeypatch.setattr(worker, "TERM_GRACE", 0.1)
    answer = host.read_bytes(PORT.format(0))
    assert answer == Missing("timeout", "no answer within 0.2 s; its process was ended")
    assert process.returncode == -signal.SIGKILL, "a stopped process does not see TERM"
    monkeypatch.setattr(live, "READ_TIMEOUT", 20.0)
    for path in (PORT.format(0), PORT.format(0).replace("state", "rate")):
        refused = Missing("timeout", "not read: an earlier read of this device hung")
        assert host.read_bytes(path) == refused
    assert host.read_bytes(PORT.format(1)) == ABSENT, "another device is asked, by a new child"


def test_a_read_that_nothing_ends_is_the_last(
    host: LiveHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = reader(host)
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(live, "READ_TIMEOUT", 0.1)
    monkeypatch.setattr(worker, "TERM_GRACE", 0.05)
    monkeypatch.setattr(worker, "KILL_GRACE", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_kill_group", lambda group, number: None)
        answer = host.read_bytes(PORT.format(0))
    try:
        assert isinstance(answer, Missing) and answer.reason == "timeout"
        assert "could not be ended (state stopped" in answer.detail
        other = host.read_bytes(PORT.format(1))
        assert isinstance(other, Missing) and other.detail.startswith("not read: ")
        assert host.read_bytes("/proc/version") != ABSENT, "what cannot hang is still read"
    finally:
        hard_kill(process.pid)


def test_a_child_that_was_killed_costs_one_answer(host: LiveHost) -> None:
    process = reader(host)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    answer = host.read_bytes(PORT.format(0))
    assert isinstance(answer, Missing) and answer.reason == "failed"
    assert "signal 9" in answer.detail
    assert host.read_bytes(PORT.format(0)) == ABSENT


@pytest.mark.parametrize(
    ("executable", "expected"),
    [
        ("exit 0", "exit code 0"),
        ("kill -9 $$", "signal 9"),
        ("printf '\\377\\377\\377\\377'; cat", "ended"),  # a frame of 4 GiB
        ("printf '\\000\\000\\000\\000'; cat", "ended"),
        ("printf '\\004\\000\\000\\000junk'; cat", "broke"),
        ("printf '\\001\\000\\000\\000N'; cat", "broke"),  # marshal's None
        ("printf 'ab'", "ended"),
    ],
)
def test_a_child_that_answers_nonsense(
    executable: str,
    expected: str,
    host: LiveHost,
    program: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program("python", executable)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/bin/python")
    for _ in range(2):
        answer = host.read_bytes(PORT.format(0))
        assert isinstance(answer, Missing) and answer.reason == "failed"
        assert expected in answer.detail


def test_a_child_that_cannot_be_started(host: LiveHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    answer = host.read_bytes(PORT.format(0))
    assert isinstance(answer, Missing) and answer.reason == "failed"
    assert "No such file" in answer.detail


def test_a_spent_budget_answers_at_once(host: LiveHost) -> None:
    host._deadline = time.monotonic() - 1
    assert host.remaining() == 0.0
    spent = Missing("timeout", "the scan's budget of 60 s was spent")
    assert host.read_bytes(PORT.format(0)) == spent
    assert host.run(["sh", "-c", "sleep 1000"], 30) == spent
    assert isinstance(host.read_bytes("/proc/version"), bytes), "what cannot wait is still read"
    assert psutil.Process().children() == []


def test_threads_get_their_own_answers(host: LiveHost, all_guarded: None, tmp_path: Path) -> None:
    names = [f"{tmp_path}/{number}" for number in range(8)]
    for name in names:
        Path(name).write_text(name)
    wrong: list[Any] = []

    def ask(name: str) -> None:
        for _ in range(50):
            answer = host.read_text(name)
            if answer != name:
                wrong.append((name, answer))

    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert wrong == []


def test_closing_while_a_child_reads(host: LiveHost) -> None:
    process = reader(host)
    process.send_signal(signal.SIGSTOP)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(host.read_bytes(PORT.format(0))))
    thread.start()
    while not host._reader_lock.locked():
        os.sched_yield()
    start = time.monotonic()
    host.close()
    thread.join(5)
    assert time.monotonic() - start < live.READ_TIMEOUT
    (answer,) = answers
    assert isinstance(answer, Missing) and answer.reason == "failed"


def test_a_child_ends_with_its_parent() -> None:
    """Even when the parent is killed and can end nothing itself."""
    code = (
        "import os; from gputopo.host.live import LiveHost; host = LiveHost();"
        f"host.read_bytes({PORT.format(0)!r}); print(host._reader._process.pid, flush=True);"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=30)
    assert done.returncode == -9
    assert wait_gone(int(done.stdout))
