"""The live NVML path: the real binding in the real child, with a library that makes trouble."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputopo.facts import Missing
from gputopo.host import worker
from gputopo.host.live import MAX_CRASHES, LiveHost
from gputopo.host.recorder import Recorder
from gputopo.host.recording import NOT_RECORDED, Answers, Header, RecordedHost, nvml_error, parse
from gputopo.probes.nvml import MAX_GPUS, NvmlFacts, probe
from gputopo.scanning import scan_host
from tests.standin import SONAME, TABLE_VARIABLE, table
from tests.standin.fixtures import (
    Driver,
    driver,  # noqa: F401
    hard_kill,
    impatient,  # noqa: F401
    libraries,  # noqa: F401
    no_leftovers,  # noqa: F401
    watchdog,  # noqa: F401
)
from tests.standin.machine import two_gpus

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = sorted(
    path for path in (ROOT / "fixtures").iterdir() if path.name.endswith((".jsonl", ".jsonl.gz"))
)
REFUSED = Missing("timeout", "not asked: the driver hung before")


def probed(host: Any) -> NvmlFacts:
    facts = probe(host)
    assert isinstance(facts, NvmlFacts), facts
    return facts


def child(host: LiveHost) -> subprocess.Popen[bytes]:
    """The process that the driver runs in."""
    process = host._driver._process
    assert process is not None
    return process


# What is recorded comes back


def test_the_machine_answers_every_question_of_the_probe() -> None:
    """Where this fails, the probe asks something new: add it to standin/machine.py and nvml.c."""
    recorder = Recorder(RecordedHost("two", two_gpus()))
    probed(recorder)
    unanswered = [key for key, value in recorder.answers.nvml.items() if value == NOT_RECORDED]
    assert unanswered == []
    assert recorder.answers.nvml.keys() == two_gpus().nvml.keys()


def test_a_live_scan_gives_back_the_recorded_answers(driver: Driver) -> None:  # noqa: F811
    answers = two_gpus()
    recorder = Recorder(driver(answers))
    facts = probed(recorder)
    assert recorder.answers.nvml == answers.nvml
    assert facts == probed(RecordedHost("two", answers))


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name.split(".")[0])
def test_a_live_scan_gives_back_a_fixtures_answers(path: Path, driver: Driver) -> None:  # noqa: F811
    data = path.read_bytes()
    replayed = parse(gzip.decompress(data) if path.suffix == ".gz" else data, path.name)
    recorder = Recorder(driver(replayed.answers))
    facts = probe(recorder)
    recorded = replayed.answers.nvml
    if isinstance(facts, Missing):
        assert facts == probe(replayed)
        return
    expected = probe(replayed)
    if isinstance(expected, Missing) and not expected.detail.startswith("NVML "):
        pytest.skip("recorded where there was no NVML to ask")
    assert facts.count == len(facts.gpus) > 0
    # A fixture may lack a question that the probe has learned since, and of a structure it may
    # hold the members that count, and no more.
    for key, got in recorder.answers.nvml.items():
        value = recorded.get(key, got)
        if isinstance(value, dict) and isinstance(got, dict):
            got = {name: got.get(name) for name in value}
        assert got == value, key
    assert len(recorder.answers.nvml.keys() & recorded.keys()) > 30 * facts.count


# Errors


@pytest.mark.parametrize(
    ("code", "reason", "name"),
    [
        (18, "failed", "LIB_RM_VERSION_MISMATCH"),
        (9, "absent", "DRIVER_NOT_LOADED"),
        (4, "denied", "NO_PERMISSION"),
        (12, "absent", "LIBRARY_NOT_FOUND"),
        (999, "failed", "UNKNOWN"),
        (77, "failed", "ERROR_77"),
    ],
)
def test_nvml_that_does_not_start(
    code: int,
    reason: str,
    name: str,
    driver: Driver,  # noqa: F811
) -> None:
    host = driver(two_gpus(), {"nvmlInit": f"!{code}"})
    assert probe(host) == Missing(reason, f"NVML {name}")  # type: ignore[arg-type]
    # Nothing else is made up after that: the driver says the same again.
    assert host.nvml("nvmlDeviceGetCount") == Missing(reason, f"NVML {name}")  # type: ignore[arg-type]


def test_no_table_is_no_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    host = driver(two_gpus())
    monkeypatch.setenv(TABLE_VARIABLE, "/nonexistent")
    assert probe(host) == nvml_error("DRIVER_NOT_LOADED")


@pytest.mark.parametrize("key", ["nvmlDeviceGetHandleByIndex 0", "@lost 0", "nvmlDeviceGetName 0"])
@pytest.mark.parametrize(("code", "name"), [(15, "GPU_IS_LOST"), (16, "RESET_REQUIRED")])
def test_a_lost_gpu_does_not_hide_the_other(
    key: str,
    code: int,
    name: str,
    driver: Driver,  # noqa: F811
) -> None:
    facts = probed(driver(two_gpus(), {key: f"{'' if key[0] == '@' else '!'}{code}"}))
    assert facts.count == 2
    assert facts.lost == {0: nvml_error(name)}
    assert facts.pairs == []
    assert any(problem.missing == nvml_error(name) for problem in facts.problems)
    whole = probed(RecordedHost("two", two_gpus()))
    assert facts.gpus[-1] == whole.gpus[1]


def test_what_the_library_lacks_is_unsupported(driver: Driver) -> None:  # noqa: F811
    host = driver(two_gpus())
    assert host.nvml("nvmlDeviceGetName", 0) == "NVIDIA H100 80GB HBM3"
    # The binding has this one, the library does not; and the other way about.
    assert host.nvml("nvmlSystemGetConfComputeState") == nvml_error("FUNCTION_NOT_FOUND")
    assert host.nvml("nvmlNoSuchCall") == nvml_error("FUNCTION_NOT_FOUND")
    assert host.nvml("nvmlDeviceGetName", 2) == nvml_error("INVALID_ARGUMENT")
    # A call that does not fit is the binding's error, not the end of the scan.
    answer = host.nvml("nvmlDeviceGetName", 0, "too", "many")
    assert isinstance(answer, Missing) and answer.reason == "failed"
    assert "TypeError" in answer.detail


def test_an_old_driver_is_asked_in_its_own_words(driver: Driver) -> None:  # noqa: F811
    facts = probed(driver(two_gpus(), old=True))
    now = probed(RecordedHost("two", two_gpus()))
    gpu, newer = facts.gpus[0], now.gpus[0]
    lacking = nvml_error("FUNCTION_NOT_FOUND")
    assert (gpu.numa_id, gpu.addressing_mode, gpu.c2c_enabled, gpu.platform) == (lacking,) * 4
    assert gpu.processes == newer.processes
    assert gpu.clock_reasons == newer.clock_reasons
    assert not isinstance(gpu.fabric, Missing) and not isinstance(newer.fabric, Missing)
    assert (gpu.fabric.state, gpu.fabric.clique) == ("completed", 7)
    assert gpu.fabric.cluster == newer.fabric.cluster
    assert gpu.fabric.health_mask is None and newer.fabric.health_mask == 341
    assert facts.problems == []


@pytest.mark.parametrize(
    ("fields", "mask", "summary"), [("341 1", 341, 1), ("341", 341, None), ("", None, None)]
)
def test_fabric_information_in_each_version(
    fields: str,
    mask: int | None,
    summary: int | None,
    driver: Driver,  # noqa: F811
) -> None:
    """A driver that lacks a version says ARGUMENT_VERSION_MISMATCH; the next older one is asked."""
    line = f"00112233445566778899aabbccddee00 0 7 3 {fields}".strip()
    (first, _) = probed(driver(two_gpus(), {"nvmlDeviceGetGpuFabricInfoV 0": line})).gpus
    assert not isinstance(first.fabric, Missing)
    assert (first.fabric.health_mask, first.fabric.health_summary) == (mask, summary)
    # A zero byte at the end of the UUID is a part of it.
    assert first.fabric.cluster == "00112233445566778899aabbccddee00"


def test_names_that_are_not_text(driver: Driver) -> None:  # noqa: F811
    """Driver 555 answered names with garbage bytes, which ended other tools."""
    host = driver(
        two_gpus(),
        {
            "nvmlDeviceGetName 0": "NVIDIA %F8%95%A0%81",
            "nvmlDeviceGetPciInfo 0": "%FF 0 27 0 1 2 %FF%FE",
            "nvmlSystemGetDriverVersion": "%80",
        },
    )
    facts = probed(host)
    first = facts.gpus[0]
    assert isinstance(first.name, Missing) and first.name.reason == "unparsed"
    assert first.name.detail.startswith("not UTF-8: NVIDIA \ufffd")
    assert isinstance(first.pci, Missing) and first.pci.reason == "unparsed"
    assert isinstance(facts.driver, Missing) and facts.driver.reason == "unparsed"
    assert first.uuid == "GPU-11111111-2222-3333-4444-555555555555"
    assert facts.gpus[1] == probed(RecordedHost("two", two_gpus())).gpus[1]
    assert facts.lost == {}


def test_a_library_that_prints_does_not_garble_the_answers(driver: Driver) -> None:  # noqa: F811
    facts = probed(driver(two_gpus(), {"@chatter": "1"}))
    assert facts == probed(RecordedHost("two", two_gpus()))


# Hangs and crashes


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetName", "nvmlDeviceGetP2PStatus"])
def test_a_hung_call_is_given_up_and_the_driver_left_alone(
    call: str,
    driver: Driver,  # noqa: F811
    impatient: Callable[[str], None],  # noqa: F811
) -> None:
    impatient(call)
    host = driver(two_gpus(), {f"@{call}": "hang"})
    facts = probe(host)
    if call == "nvmlInit":
        hung: Any = facts
    else:
        assert isinstance(facts, NvmlFacts)
        first = facts.gpus[0]
        hung = first.name if call == "nvmlDeviceGetName" else facts.pairs[0].p2p["read"]
        assert facts.driver == "580.95.05", "the versions are asked for before any GPU is touched"
        assert hung in [problem.missing for problem in facts.problems]
        if call == "nvmlDeviceGetName":
            assert first.pci == "0000:1b:00.0", "what was answered before the hang is kept"
            assert first.uuid == REFUSED
            assert facts.lost == {0: hung, 1: REFUSED}
    assert hung == Missing("timeout", "no answer within 0.3 s; its process was ended")
    assert psutil.Process().children() == []
    assert host.nvml("nvmlDeviceGetCount") == REFUSED
    assert psutil.Process().children() == [], "a refused question starts no child"


def test_after_a_hang_nvidia_smi_is_not_run(
    driver: Driver,  # noqa: F811
    impatient: Callable[[str], None],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("nvidia-smi", "other-tool"):
        (tmp_path / name).write_text("#!/bin/sh\necho ran\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    impatient("nvmlInit")
    host = driver(two_gpus(), {"@nvmlInit": "hang"})
    assert host.run(["nvidia-smi", "topo", "-m"], 5).stdout == "ran\n"  # type: ignore[union-attr]
    host.nvml("nvmlInit")
    assert host.run(["nvidia-smi", "topo", "-m"], 5) == Missing(
        "timeout", "not run: the driver hung before"
    )
    assert host.run(["other-tool"], 5).stdout == "ran\n"  # type: ignore[union-attr]


@pytest.mark.parametrize(("block", "ended_by"), [(False, signal.SIGTERM), (True, signal.SIGKILL)])
def test_a_child_that_ignores_term_is_killed(
    block: bool,
    ended_by: int,
    driver: Driver,  # noqa: F811
    impatient: Callable[[str], None],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where TERM works the grace is never waited for, so it may be long: no luck is needed.
    monkeypatch.setattr(worker, "TERM_GRACE", 0.2 if block else 10.0)
    impatient("nvmlDeviceGetCount")
    changes = {"@nvmlDeviceGetCount": "hang", **({"@block-term": "1"} if block else {})}
    host = driver(two_gpus(), changes)
    assert host.nvml("nvmlInit") is True
    process = child(host)
    hung = host.nvml("nvmlDeviceGetCount")
    assert isinstance(hung, Missing) and hung.reason == "timeout"
    assert process.returncode == -ended_by
    assert not psutil.pid_exists(process.pid)


def test_a_child_that_nothing_ends_is_left_behind(
    driver: Driver,  # noqa: F811
    impatient: Callable[[str], None],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in uninterruptible sleep, where signals wait: here they are not sent at all."""
    monkeypatch.setattr(worker, "TERM_GRACE", 0.05)
    monkeypatch.setattr(worker, "KILL_GRACE", 0.05)
    impatient("nvmlDeviceGetCount")
    host = driver(two_gpus(), {"@nvmlDeviceGetCount": "hang"})
    assert host.nvml("nvmlInit") is True
    pid = child(host).pid
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_kill_group", lambda group, number: None)
        hung = host.nvml("nvmlDeviceGetCount")
        try:
            assert isinstance(hung, Missing) and hung.reason == "timeout"
            expected = f"process {pid} could not be ended (state sleeping, in "
            assert expected in hung.detail and "left behind" in hung.detail
            start = time.monotonic()
            assert host.nvml("nvmlInit") == REFUSED
            host.close()
            assert time.monotonic() - start < 1.0, "nobody waits for what was left behind"
        finally:
            hard_kill(pid)


def test_a_scan_with_a_hung_driver_ends_in_a_report(
    driver: Driver,  # noqa: F811
    impatient: Callable[[str], None],  # noqa: F811
) -> None:
    impatient("nvmlDeviceGetMemoryInfo")
    topology = scan_host(driver(two_gpus(), {"@nvmlDeviceGetMemoryInfo": "hang"}))
    status = {probe.name: probe for probe in topology.probes}
    assert status["nvml"].status == "timeout"
    assert "nvmlDeviceGetMemoryInfo" in status["nvml"].detail or "GPU 0" in status["nvml"].detail
    assert status["nvidia_smi"].status in ("timeout", "absent")
    assert status["numa"].status == "ok"


def test_a_slow_answer_is_an_answer(driver: Driver) -> None:  # noqa: F811
    host = driver(two_gpus(), {"@nvmlDeviceGetName 0": "sleep 200"})
    start = time.monotonic()
    assert host.nvml("nvmlDeviceGetName", 0) == "NVIDIA H100 80GB HBM3"
    assert time.monotonic() - start >= 0.2


def test_a_timeout_that_the_driver_reports_is_no_hang(driver: Driver) -> None:  # noqa: F811
    host = driver(two_gpus(), {"nvmlDeviceGetName 0": "!10"})
    assert host.nvml("nvmlDeviceGetName", 0) == Missing("timeout", "NVML TIMEOUT")
    assert host.nvml("nvmlDeviceGetName", 1) == "!GB200 100% [bold] \u00b5 \x1b[31m"


def test_the_budget_bounds_every_wait(driver: Driver) -> None:  # noqa: F811
    host = driver(two_gpus(), {"@nvmlDeviceGetCount": "hang"})
    assert host.nvml("nvmlInit") is True
    host._deadline = time.monotonic() + 0.2
    start = time.monotonic()
    hung = host.nvml("nvmlDeviceGetCount")
    assert isinstance(hung, Missing) and hung.reason == "timeout"
    assert time.monotonic() - start < 5.0, "ten seconds is what a call may take at most"


def test_a_spent_budget_asks_nothing(driver: Driver) -> None:  # noqa: F811
    host = driver(two_gpus())
    host._deadline = time.monotonic()
    assert host.nvml("nvmlInit") == Missing("timeout", "the scan's budget of 60 s was spent")
    assert host.run(["true"], 5) == Missing("timeout", "the scan's budget of 60 s was spent")
    assert psutil.Process().children() == []


def test_a_crash_costs_one_answer(driver: Driver) -> None:  # noqa: F811
    """The next child starts NVML anew, so that one bad GPU does not hide the rest."""
    facts = probed(driver(two_gpus(), {"@nvmlDeviceGetSerial 0": "crash"}))
    serial = facts.gpus[0].serial
    assert serial == Missing(
        "failed", "the worker process ended (signal 11) during nvmlDeviceGetSerial"
    )
    whole = probed(RecordedHost("two", two_gpus()))
    assert msgspec.structs.replace(facts.gpus[0], serial=whole.gpus[0].serial) == whole.gpus[0]
    assert facts.gpus[1] == whole.gpus[1]
    assert facts.pairs == whole.pairs
    assert [(problem.source, problem.missing) for problem in facts.problems] == [
        ("nvmlDeviceGetSerial(0)", serial)
    ]


def test_a_library_that_always_crashes_is_given_up(driver: Driver) -> None:  # noqa: F811
    host = driver(two_gpus(), {"@nvmlInit": "crash"})
    for _ in range(MAX_CRASHES):
        answer = host.nvml("nvmlInit")
        assert isinstance(answer, Missing) and "signal 11" in answer.detail
    answer = host.nvml("nvmlInit")
    assert isinstance(answer, Missing) and answer.detail.startswith("not asked: ")
    assert psutil.Process().children() == []


def test_closing_ends_another_threads_wait(driver: Driver) -> None:  # noqa: F811
    host = driver(two_gpus(), {"@nvmlDeviceGetCount": "hang"})
    assert host.nvml("nvmlInit") is True
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(host.nvml("nvmlDeviceGetCount")))
    thread.start()
    while not host._driver_lock.locked():
        os.sched_yield()
    host.close()
    thread.join(5)
    assert not thread.is_alive()
    (answer,) = answers
    assert isinstance(answer, Missing) and answer.reason == "failed"
    assert host.nvml("nvmlInit") == Missing("failed", "the host is closed")
    assert psutil.Process().children() == []


def test_an_interrupted_question_leaves_no_answer_for_the_next(
    driver: Driver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = driver(two_gpus())
    assert host.nvml("nvmlInit") is True

    def interrupt(fd: int, deadline: float) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker, "_read_frame", interrupt)
        with pytest.raises(KeyboardInterrupt):
            host.nvml("nvmlSystemGetDriverVersion")
    assert host.nvml("nvmlDeviceGetCount") == 2


def test_closing_twice_and_unused() -> None:
    host = LiveHost()
    host.close()
    host.close()
    assert host.nvml("nvmlInit") == Missing("failed", "the host is closed")
    assert host.run(["true"], 1) == Missing("failed", "the host is closed")


# The library as this process finds it, which needs a process of its own

FIND = """
import json, sys
from gputopo.host.live import LiveHost
host = LiveHost()
answer = host.nvml("nvmlInit")
print(json.dumps(answer if answer is True else [answer.reason, answer.detail]))
host.close()
"""


def found(directory: Path, table_path: Path | None = None) -> Any:
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(directory),
        TABLE_VARIABLE: str(table_path or "/nonexistent"),
    }
    done = subprocess.run(
        [sys.executable, "-c", FIND], cwd=ROOT, env=environment, capture_output=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_library_is_found_on_the_library_path(
    libraries: Callable[[bool], Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "table"
    path.write_text(table(two_gpus()))
    assert found(libraries(False), path) is True
    assert found(libraries(False)) == ["absent", "NVML DRIVER_NOT_LOADED"]


def test_no_library_is_told_from_a_broken_one(tmp_path: Path) -> None:
    """A container whose driver is not mounted holds an empty file in the library's place."""
    library = tmp_path / SONAME
    library.write_bytes(b"")
    reason, detail = found(tmp_path)
    assert reason == "failed" and "too short" in detail
    library.write_bytes(b"\x7fELF" + bytes(1000))
    assert found(tmp_path)[0] == "failed"
    library.unlink()
    # A machine of NVIDIA's own has its library in a standard place.
    assert found(tmp_path) in (["absent", "NVML LIBRARY_NOT_FOUND"], True)


# A recording that lies

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
WHOLE = two_gpus().nvml


def mangled(value: Any) -> st.SearchStrategy[Any]:
    """Something else in place of an answer, or of one member of it."""
    if isinstance(value, dict):
        return VALUES | st.sampled_from(sorted(value)).flatmap(
            lambda key: mangled(value[key]).map(lambda new: {**value, key: new})
        )
    if isinstance(value, list) and value:
        return VALUES | st.integers(0, len(value) - 1).flatmap(
            lambda at: mangled(value[at]).map(lambda new: [*value[:at], new, *value[at + 1 :]])
        )
    return VALUES


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(sorted(WHOLE, key=repr)).flatmap(
            lambda key: st.tuples(st.just(key), mangled(WHOLE[key]))
        ),
        min_size=1,
        max_size=3,
    )
)
def test_no_answer_breaks_the_probe(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    answers = Answers(Header(format=1), {}, {}, {**WHOLE, **dict(changes)})
    facts = probe(RecordedHost("mangled", answers))
    assert isinstance(facts, (NvmlFacts, Missing))


def test_a_count_that_is_garbage_is_bounded() -> None:
    answers = two_gpus()
    answers.nvml["nvmlDeviceGetCount",] = 1 << 31
    facts = probed(RecordedHost("mangled", answers))
    assert len(facts.gpus) == 2
    assert facts.lost == {}, "what nobody asked is not lost"
    assert sum("HandleByIndex" in p.source for p in facts.problems) == MAX_GPUS - 2
    assert facts.problems[0].source == "nvmlDeviceGetCount"
