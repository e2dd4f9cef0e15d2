"""The commands as a shell sees them: exit codes, streams, files, signals, terminals."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import re
import resource
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gputopo import __version__
from gputopo.cli import main as cli
from gputopo.cli.options import encode_text, exit_code
from gputopo.rules.finding import Evidence, Finding, Remedy, Report, Severity, Skipped

ROOT = Path(__file__).resolve().parents[1]
HEALTHY = "fixture:no-gpu"
HEAVY = ("msgspec", "rich", "psutil", "pynvml", "numpy", "subprocess", "importlib.metadata")
HOSTILE = "\x1b]52;c;aGk=\x07\x1b[31m\x9b1m\u202e[/][red]\nERROR   forged"
ENVIRONMENT = {
    key: value
    for key, value in os.environ.items()
    if key not in ("COLUMNS", "NO_COLOR", "LC_ALL", "PYTHONIOENCODING", "TERM")
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gputopo", *arguments]


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    usual: dict[str, Any] = {
        "cwd": ROOT,
        "env": ENVIRONMENT,
        "timeout": 60,
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "encoding": "utf-8",
    }
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command(*arguments), check=False, **(usual | options)
    )
    return done


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, nothing on standard output, one line on standard error that holds the words."""
    assert done.returncode == 2, done.stderr
    assert not done.stdout
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def altered(tmp_path: Path) -> Callable[..., str]:
    """Writes a bundled machine's recording with some lines changed; returns its path."""

    def write(fixture: str, changes: dict[str, Any]) -> str:
        """``changes`` by the end of a file's path, or by NVML call: what is to stand there."""
        path = tmp_path / f"{fixture}.jsonl"
        left = set(changes)
        with (
            gzip.open(ROOT / "fixtures" / f"{fixture}.jsonl.gz", "rt") as old,
            path.open("w") as new,
        ):
            for line in old:
                entry = json.loads(line)
                for subject, value in changes.items():
                    if entry.get("file", "").endswith(subject) or entry.get("nvml") == subject:
                        entry = {k: entry[k] for k in ("file", "nvml", "args") if k in entry}
                        entry |= value if isinstance(value, dict) else {"text": value}
                        left.discard(subject)
                new.write(json.dumps(entry) + "\n")
        assert not left, f"not in the recording: {left}"
        return str(path)

    return write


WIDTH = {"/0000:3b:00.0/current_link_width": "8\n"}
HUNG = {"nvmlInit": {"error": "timeout", "detail": "nvmlInit() gave no answer"}}


# Fast paths


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["-V"], ["-h"]])
def test_the_fast_path_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys, click\n"  # which is free to import what it likes
        "before = set(sys.modules)\n"
        "from gputopo.cli.main import main\n"
        "try:\n"
        f"    main({arguments})\n"
        "finally:\n"
        f"    print(sorted((set(sys.modules) - before) & set({HEAVY})), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert done.stdout


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"gputopo {__version__}\n", "")


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help(name: str) -> None:
    done = run(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: gputopo {name} ")
    assert cli.COMMANDS[name] in run("--help").stdout


# Exit codes


def test_nothing_wrong_is_0() -> None:
    done = run("scan", "--from", HEALTHY)
    assert (done.returncode, done.stderr) == (0, "")
    assert "verdict  " in done.stdout
    assert "ERROR" not in done.stdout


def test_something_wrong_is_1(altered: Callable[..., str]) -> None:
    source = altered("hgx-h100", WIDTH)
    done = run("scan", "--from", source, "--only", "PCI101")
    assert (done.returncode, done.stderr) == (1, "")
    assert "ERROR   PCI101" in done.stdout
    assert run("scan", "--from", source, "--fail-on", "never").returncode == 0
    assert run("scan", "--from", source, "--only", "PRB003").returncode == 0
    assert run("scan", "--from", source, "--ignore", "PCI,NIC,NVL,GPU,NUM,VIR").returncode == 0


def test_a_probe_that_broke_is_3(altered: Callable[..., str]) -> None:
    done = run("scan", "--from", altered("hgx-h100", HUNG), "--only", "PRB001")
    assert (done.returncode, done.stderr) == (3, "")
    assert "ERROR   PRB001" in done.stdout
    assert "nvmlInit() gave no answer" in done.stdout
    both = run("scan", "--from", altered("hgx-h100", HUNG | WIDTH), "--only", "PRB001,PCI101")
    assert both.returncode == 1


def report(*findings: tuple[Severity, str], broken: Severity | None = None) -> Report:
    return Report(
        findings=[
            Finding(
                code=code, name="n", severity=severity, confidence="reported", subjects=[],
                summary="s", evidence=[Evidence(source="f", seen="1", expected="2")],
                cost=None, remedy=Remedy(text="t"),
            )
            for severity, code in findings
        ],
        skipped=[
            Skipped(code="NVL401", name="n", severity=broken, reason="r", broken=True),
            Skipped(code="NVL402", name="n", severity="error", reason="r", broken=False),
        ]
        if broken
        else [],
        asked=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("of", "error", "warning", "note"),
    [
        (report(), 0, 0, 0),
        (report(("error", "PCI101")), 1, 1, 1),
        (report(("warning", "PCI105")), 0, 1, 1),
        (report(("note", "PRB003")), 0, 0, 1),
        (report(broken="error"), 3, 3, 3),
        (report(broken="note"), 0, 0, 3),
        (report(("error", "PRB001"), broken="error"), 3, 3, 3),
        (report(("warning", "PCI105"), broken="error"), 3, 1, 1),
        (report(("error", "PCI101"), ("error", "PRB001"), broken="error"), 1, 1, 1),
    ],
)
def test_exit_codes(of: Report, error: int, warning: int, note: int) -> None:
    codes = tuple(exit_code(of, gate) for gate in ("error", "warning", "note", "never"))
    assert codes == (error, warning, note, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--colour"],
        ["sacn"],
        ["scan", "--no-such-option"],
        ["scan", "--format", "yaml"],
        ["scan", "--timeout", "0"],
        ["scan", "--timeout", "nan"],
        ["scan", "--fail-on", "fatal"],
        ["scan", "--only", "PCI1011"],
        ["scan", "--ignore", "pci;rm"],
        ["scan", "extra"],
        ["record"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gputopo: ")
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_source_that_cannot_be_used_is_2(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 64)
    (tmp_path / "empty").touch()
    (tmp_path / "dir").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    for name in ("none", "binary", "empty", "dir", "loop", "fifo"):
        start = time.monotonic()
        refused(run("scan", "--from", str(tmp_path / name)), f"gputopo: {tmp_path / name}: ")
        assert time.monotonic() - start < 10
    refused(run("scan", "--from", "fixture:hgx-h1000"), "fixture:hgx-h1000", "did you mean")
    refused(run("scan", "--from", "-"), "gputopo: standard input: ")
    shown = run("scan", "--from", f"/{HOSTILE}")
    refused(shown)
    assert "\x1b" not in shown.stderr


def test_standard_input_is_a_source() -> None:
    with (ROOT / "fixtures" / "t4-vm.jsonl.gz").open("rb") as file:
        done = run("scan", "--from", "-", "--fail-on", "never", stdin=file)
    assert done.returncode == 0
    assert "Tesla T4" in done.stdout


def test_interrupting_is_130() -> None:
    process = subprocess.Popen(
        command("scan", "--from", "-"), cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        # The header line is taken once gputopo reads, so that it is past its imports.
        while not _reads_standard_input(process.pid):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


def _reads_standard_input(pid: int) -> bool:
    """Whether a process sleeps in a read of descriptor 0."""
    call = Path(f"/proc/{pid}/syscall").read_text().split()
    return call[0] == "0" and int(call[1], 16) == 0 if len(call) > 1 else False


def test_a_fault_of_its_own_is_3_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError(f"odd {HOSTILE}")

    monkeypatch.setattr("gputopo.scan", broken)
    with pytest.raises(SystemExit) as end:
        cli.main(["scan", "--from", HEALTHY])
    assert end.value.code == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" in said.err
    assert "a fault of gputopo itself" in said.err
    assert "\x1b" not in said.err


# Where the output goes


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_file_gets_what_a_pipe_gets(tmp_path: Path, style: str) -> None:
    path = tmp_path / "out"
    printed = run("scan", "--from", HEALTHY, "--format", style)
    done = run("scan", "--from", HEALTHY, "--format", style, "-o", str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    seconds = re.compile(r'"seconds": [\d.e-]+')
    assert seconds.sub("", path.read_text()) == seconds.sub("", printed.stdout)
    assert list(tmp_path.iterdir()) == [path]
    assert run("scan", "--from", HEALTHY, "-o", "-").stdout.startswith("machine ")


def test_the_mode_of_a_file_is_the_users(tmp_path: Path) -> None:
    path = tmp_path / "out"
    run("scan", "--from", HEALTHY, "-o", str(path), umask=0o027)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    run("scan", "--from", HEALTHY, "-o", str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text().startswith("machine ")


def test_files_that_cannot_be_written_are_2(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").touch()
    for name in ("none/out", "file/out"):
        refused(run("scan", "--from", HEALTHY, "-o", str(tmp_path / name)), name)
    done = run("scan", "--from", HEALTHY, "-o", str(tmp_path / "dir"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "is a directory" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dir", "file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_2(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    refused(run("scan", "--from", HEALTHY, "-o", str(tmp_path / "out")), "Permission denied")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """A limit of the file size stands for the disk: the write fails half way through."""
    path = tmp_path / "out"
    path.write_text("old")
    done = run(
        "scan", "--from", HEALTHY, "-o", str(path),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )  # fmt: skip
    refused(done, "cannot write", "File too large")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_to_and_not_replaced() -> None:
    done = run("scan", "--from", HEALTHY, "-o", "/dev/full")
    refused(done, "cannot write /dev/full", "No space left on device")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    assert run("scan", "--from", HEALTHY, "-o", "/dev/null").returncode == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("arguments", [["scan", "--from", HEALTHY], ["explain"], ["schema"]])
def test_a_full_standard_output_is_2(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        refused(run(*arguments, stdout=full), "No space left on device")


def test_a_closed_standard_output_is_2() -> None:
    done = run("scan", "--from", HEALTHY, stdout=None, preexec_fn=lambda: os.close(1))
    refused(done, "standard output is closed")


@pytest.mark.parametrize(
    "arguments",
    [
        ["scan", "--from", HEALTHY],
        ["scan", "--from", HEALTHY, "--format", "json"],
        ["scan", "--list-fixtures"],
        ["explain", "--all"],
        ["schema"],
    ],
)
def test_a_reader_that_goes_away_ends_it_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(*arguments, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_the_first_line_can_be_had_alone(unbuffered: str) -> None:
    with subprocess.Popen(
        command("scan", "--from", "fixture:hgx-h100", "--format", "json"), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"{\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 141


# Terminals


@pytest.fixture
def terminal() -> Iterator[Callable[..., bytes]]:
    """Runs a command with a terminal of a given width for its standard output."""
    master, slave = os.openpty()

    def output(*arguments: str, columns: int = 120, **environment: str) -> bytes:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        settings = termios.tcgetattr(slave)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        environment = {**ENVIRONMENT, "TERM": "xterm", **environment}
        process = subprocess.Popen(
            command(*arguments), cwd=ROOT, stdout=slave, stderr=subprocess.DEVNULL, env=environment
        )
        found = b""
        os.set_blocking(master, False)
        while True:
            ended = process.poll() is not None
            try:
                found += os.read(master, 1 << 16)
            except BlockingIOError:
                if ended:
                    return found
                time.sleep(0.01)

    yield output
    os.close(master)
    os.close(slave)


SGR = re.compile(rb"\x1b\[[0-9;]*m")


def test_a_terminal_gets_colour_and_its_own_width(terminal: Callable[..., bytes]) -> None:
    wide = terminal("scan", "--from", "fixture:dgx-2", columns=200)
    assert SGR.search(wide)
    lines = SGR.sub(b"", wide).decode().splitlines()
    assert 150 < max(map(len, lines)) <= 200
    narrow = terminal("scan", "--from", "fixture:dgx-2", columns=80)
    assert max(map(len, SGR.sub(b"", narrow).decode().splitlines())) <= 80
    plain = terminal("scan", "--from", "fixture:dgx-2", columns=80, NO_COLOR="1")
    assert b"\x1b" not in plain
    assert plain == SGR.sub(b"", narrow)


def test_json_is_never_coloured(terminal: Callable[..., bytes]) -> None:
    found = terminal("scan", "--from", HEALTHY, "--format", "json")
    assert b"\x1b" not in found
    assert json.loads(found)["schema"] == "gputopo.scan/1"


def test_hostile_names_do_not_reach_the_terminal(
    terminal: Callable[..., bytes], altered: Callable[..., str]
) -> None:
    source = altered(
        "hgx-h100",
        {
            "/kernel/hostname": f"{HOSTILE}\n",
            "/id/product_name": "x" * 10_000 + "\n",
            "nvmlDeviceGetName": {"value": HOSTILE},
            "nvmlSystemGetDriverVersion": {"value": f"570{HOSTILE}"},
            "/nvme0/model": f"{HOSTILE}\n",
            "/mlx5_0/hca_type": f"{HOSTILE}\n",
            "/mlx5_0/ports/1/state": f"4: {HOSTILE}\n",
            "/mlx5_0/ports/1/link_layer": f"{HOSTILE}\n",
            **WIDTH,
        },
    )
    for verbose in ([], ["-vv"]):
        found = SGR.sub(b"", terminal("scan", "--from", source, *verbose)).decode()
        assert "forged" in found, "it is shown, made harmless"
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", found)
        assert not re.search("^ERROR   forged", found, re.M)
        assert max(map(len, found.splitlines())) < 300


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_terminals_of_other_encodings(encoding: str) -> None:
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        command("scan", "--from", HEALTHY),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    shown = done.stdout.decode(encoding)
    branch = "├ pci0000:00" if encoding == "cp437" else "+ pci0000:00"
    assert branch in shown
    assert encode_text("é ├", "no-such-encoding") == b"? +"


# The other commands


def test_quiet_is_empty_when_all_is_well(altered: Callable[..., str]) -> None:
    done = run("scan", "-q", "--from", HEALTHY, "--only", "PCI101")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    loud = run("scan", "-q", "--from", altered("hgx-h100", WIDTH), "--only", "PCI101")
    assert loud.returncode == 1
    assert loud.stdout.startswith("ERROR   PCI101 ")
    assert "Tree" not in loud.stdout


def test_waivers(tmp_path: Path, altered: Callable[..., str]) -> None:
    source = altered("hgx-h100", WIDTH)
    file = tmp_path / "waivers.toml"
    waiver = '[[waiver]]\ncode = "PCI101"\nsubject = "gpu1"\nreason = "riser on order"\n'
    file.write_text(waiver)
    scan = ("scan", "--from", source, "--only", "PCI101", "--waivers", str(file))
    done = run(*scan)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 waived" in done.stdout
    file.write_text(waiver + "expires = 2020-01-31\n")
    done = run(*scan)
    assert done.returncode == 1
    assert "EXPIRED waiver of PCI101 on gpu1 ended 2020-01-31: riser on order" in done.stdout
    file.write_text("[[waiver]\n")
    refused(run(*scan), str(file))
    refused(run("scan", "--from", source, "--waivers", str(tmp_path / "none")), "none")


def test_json_of_a_scan_is_valid() -> None:
    schema = run("schema")
    assert schema.returncode == 0
    validator = Draft202012Validator(json.loads(schema.stdout))
    done = run("scan", "--from", "fixture:gh200", "--format", "json", "--fail-on", "never")
    document = json.loads(done.stdout)
    validator.validate(document)
    assert document["version"] == __version__
    assert run("schema", "scan").stdout == schema.stdout


@pytest.mark.parametrize("name", ["nothing", "../setup", "scan.json", HOSTILE])
def test_no_other_schema(name: str) -> None:
    done = run("schema", name)
    refused(done, "no schema is called", "scan")
    assert "\x1b" not in done.stderr


def test_explain() -> None:
    listed = run("explain")
    assert re.search(r"^PCI101 +error +link-width-reduced$", listed.stdout, re.M)
    by_code = run("explain", "pci101")
    assert by_code.returncode == 0
    assert by_code.stdout == run("explain", "link-width-reduced").stdout
    for title in ("Why", "Verify by hand", "Mend", "Sources"):
        assert f"\n{title}\n" in by_code.stdout
    assert by_code.stdout.strip() in run("explain", "--all").stdout
    refused(run("explain", "PCI999"), "PCI999", "gputopo explain")


def test_list_fixtures() -> None:
    done = run("scan", "--list-fixtures")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert "fixture:hgx-h100" in names
    assert names == sorted(names)
    assert all(re.search(r" (recorded|composed) +\S", line) for line in done.stdout.splitlines())
