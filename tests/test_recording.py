"""Recordings: what is written is read back, what is damaged is named, a replay is the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gputopo.errors import SourceError
from gputopo.facts import ABSENT, Fact, Missing
from gputopo.host.base import Host, Output
from gputopo.host.recorder import Recorder
from gputopo.host.recording import (
    FORMAT,
    NOT_RECORDED,
    NVML_REASONS,
    Answers,
    Header,
    RecordedHost,
    is_recording,
    nvml_error,
    nvml_key,
    parse,
    render,
)
from gputopo.host.tree import Directory, Entry, Link, MemoryTree
from tests.standin.fixtures import watchdog  # noqa: F401
from tests.test_host_tree import QUESTIONS, Layout, in_memory, layouts

HEADER = b'{"gputopo-recording":1}'

# Any answers at all

TEXT = st.text(max_size=12)
PATHS = st.text(max_size=12).map(lambda text: f"/{text}")
MISSING = st.builds(
    Missing,
    st.sampled_from(("absent", "denied", "timeout", "failed", "unsupported", "unparsed")),
    TEXT | TEXT.map(lambda text: f"NVML {text}"),
) | st.sampled_from([*NVML_REASONS, "GPU_IS_LOST", "ERROR_77"]).map(nvml_error)
ENTRIES: st.SearchStrategy[Entry] = (
    TEXT
    | st.binary(max_size=12)
    | TEXT.map(Link)
    | st.lists(TEXT, max_size=4, unique=True).map(lambda names: Directory(sorted(names)))
    | MISSING
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, width=32) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
).filter(lambda value: "Infinity" not in repr(value) and "inf" not in repr(value))
ARGUMENTS = st.recursive(
    st.integers() | TEXT, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4
)
ANSWERS = st.builds(
    Answers,
    st.builds(
        Header,
        format=st.just(FORMAT),
        tool=TEXT,
        captured_at=st.none() | TEXT,
        kernel=TEXT,
        anonymized=st.lists(TEXT, max_size=3),
        note=TEXT,
    ),
    st.dictionaries(PATHS, ENTRIES, max_size=6),
    st.dictionaries(
        st.lists(TEXT, max_size=3).map(tuple),
        st.builds(Output, st.integers(), TEXT, TEXT) | MISSING,
        max_size=3,
    ),
    st.dictionaries(st.tuples(TEXT, ARGUMENTS) | st.tuples(TEXT), JSON | MISSING, max_size=4),
)


@settings(deadline=None)
@given(ANSWERS)
def test_what_is_written_is_read_back(answers: Answers) -> None:
    data = render(answers)
    assert is_recording(data)
    host, again = RecordedHost("before", answers), parse(data, "after")
    header = again.answers.header
    assert msgspec.structs.replace(header, entries=answers.header.entries) == answers.header
    assert header.entries == data.count(b"\n") - 1
    assert again.answers.commands == answers.commands
    assert again.answers.nvml == answers.nvml
    assert again.answers.files.keys() == answers.files.keys()
    for path in answers.files:
        # Bytes that are UTF-8 become text: not the same entry, but the same answer.
        assert again.read_bytes(path) == host.read_bytes(path)
        assert again.read_text(path) == host.read_text(path)
        assert again.list_dir(path) == host.list_dir(path)
        assert again.read_link(path) == host.read_link(path)
    for argv, output in answers.commands.items():
        assert again.run(argv, 1) == output
    for (call, *args), value in answers.nvml.items():
        assert again.nvml(call, *args) == value
    assert render(again.answers) == data, "written again it is the same text"


def test_a_recording_reads_as_its_documentation_says() -> None:
    answers = Answers(
        Header(format=1, tool="0.1.0"),
        {
            "/sys/b": "text\n",
            "/sys/a": b"\xff",
            "/sys/l": Link("../a"),
            "/sys": Directory(["a", "b", "l"]),
            "/sys/d": Missing("denied"),
        },
        {("nvidia-smi", "topo", "-m"): Output(255, "", "no\n"), ("lspci",): Missing("absent", "-")},
        {
            ("nvmlDeviceGetName", 0): "H100",
            ("nvmlDeviceGetFieldValues", 0, ((90, 0),)): [],
            ("nvmlInit",): nvml_error("DRIVER_NOT_LOADED"),
            ("nvmlDeviceGetSerial", 0): Missing("timeout", "no answer"),
        },
    )
    assert render(answers).decode().splitlines() == [
        '{"gputopo-recording":1,"tool":"0.1.0","entries":11}',
        '{"command":["lspci"],"error":"absent","detail":"-"}',
        '{"command":["nvidia-smi","topo","-m"],"exit":255,"stdout":"","stderr":"no\\n"}',
        '{"dir":"/sys","entries":["a","b","l"]}',
        '{"file":"/sys/a","base64":"/w=="}',
        '{"file":"/sys/b","text":"text\\n"}',
        '{"file":"/sys/d","error":"denied"}',
        '{"link":"/sys/l","target":"../a"}',
        '{"nvml":"nvmlDeviceGetFieldValues","args":[0,[[90,0]]],"value":[]}',
        '{"nvml":"nvmlDeviceGetName","args":[0],"value":"H100"}',
        '{"nvml":"nvmlDeviceGetSerial","args":[0],"error":"timeout","detail":"no answer"}',
        '{"nvml":"nvmlInit","args":[],"error":"DRIVER_NOT_LOADED"}',
    ]


def test_names_that_are_not_text_can_be_written() -> None:
    """Python holds the bytes of such a name as lone surrogates, which JSON text cannot."""
    answers = Answers(
        Header(format=1, note="\udcff"),
        {"/\udcff": Directory(["\udcfe"]), "/l": Link("\udcfd"), "/t": "\ud800"},
        {("\udcff",): Output(0, "\udcff", "")},
        {("call", "\udcff"): {"\udcff": ["\udcff"]}},
    )
    again = parse(render(answers), "odd")
    assert again.list_dir("/\ufffd") == ["\ufffd"]
    assert again.read_link("/l") == "\ufffd"
    assert again.read_bytes("/t") == "\ufffd".encode()
    assert again.run(["\ufffd"], 1) == Output(0, "\ufffd", "")
    assert again.nvml("call", "\ufffd") == {"\ufffd": ["\ufffd"]}
    assert RecordedHost("memory", answers).read_bytes("/t") == b"?"


# Damage

GOOD = [
    b'{"file":"/a","text":"x"}',
    b'{"link":"/l","target":"a"}',
    b'{"nvml":"nvmlInit","args":[],"value":true}',
]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not JSON", ""),
        (b"{", "truncated"),
        (b"[]", "object"),
        (b"null", ""),
        (b'"text"', ""),
        (b"{}", "names no file, link, dir, command or nvml"),
        (b'{"file":"/a"}', "a file needs text, base64 or error"),
        (b'{"file":"/a","text":5}', "text"),
        (b'{"file":5,"text":"x"}', "file"),
        (b'{"file":"/a","base64":"?"}', ""),
        (b'{"file":"/a","base64":"QQ"}', ""),
        (b'{"file":"/a","error":"tired"}', "unknown error 'tired'"),
        (b'{"file":"/a","text":"x","mode":7}', "mode"),
        (b'{"link":"/a"}', "a link needs target or error"),
        (b'{"dir":"/a"}', "a dir needs entries or error"),
        (b'{"dir":"/a","entries":"abc"}', "entries"),
        (b'{"dir":"/a","entries":[1]}', "entries"),
        (b'{"command":["x"]}', "a command needs exit or error"),
        (b'{"command":"x","exit":0}', "command"),
        (b'{"command":["x"],"exit":"0"}', "exit"),
        (b'{"command":["x"],"exit":1.5}', "exit"),
        (b'{"nvml":"nvmlInit"}', "an nvml entry needs value or error"),
        (b'{"nvml":"nvmlInit","error":"tired"}', "unknown error 'tired'"),
        (b'{"nvml":"nvmlInit","args":[{}],"value":1}', ""),
        (b'{"nvml":"nvmlInit","args":5,"value":1}', "args"),
        (b'{"nvml":"nvmlInit","value":1e999}', ""),
        (b'{"nvml":"nvmlInit","value":NaN}', ""),
        (b'{"nvml":"nvmlInit","value":' + b"9" * 10_000 + b"}", ""),
        (b'{"command":["x"],"exit":' + b"9" * 10_000 + b"}", ""),
        (b'{"nvml":"nvmlInit","value":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
        (b'{"nvml":"nvmlInit","args":' + b"[" * 100_000, "recursion"),
        (b'{"nvml":"nvmlInit","value":' + b'{"a":' * 100_000, "recursion"),
        (b'{"file":"/\xff","text":"x"}', "UTF-8"),
        (b'{"file":"/\\ud800","text":"x"}', ""),
        (b"\x00", ""),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_wrong_line_is_named(line: bytes, message: str, place: int) -> None:
    lines = [HEADER, *GOOD[:place], line, *GOOD[place:], b""]
    with pytest.raises(SourceError) as caught:
        parse(b"\n".join(lines), "some.jsonl")
    text = str(caught.value)
    assert text.startswith(f"some.jsonl: line {place + 2} is wrong: ")
    assert message in text
    assert len(text) < 500 and "\n" not in text


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "line 1 is no recording header"),
        (b"{}", "line 1 is no recording header"),
        (b"[" * 100_000, "line 1 is no recording header"),
        (b'{"gputopo-recording":"1"}', "line 1 is no recording header"),
        (b'{"gputopo-recording":1,"tool":5}', "line 1 is no recording header"),
        (b'{"gputopo-recording":true}', "line 1 is no recording header"),
        (b'{"gputopo-recording":2}', "recording format 2; this version reads format 1"),
        (b'{"gputopo-recording":2,"shape":{}}', "recording format 2; this version reads format 1"),
    ],
)
def test_a_wrong_header_is_refused(header: bytes, message: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse(b"\n".join([header, *GOOD]), "some.jsonl")
    assert message in str(caught.value)


def test_a_newer_tools_header_may_say_more() -> None:
    host = parse(b'{"gputopo-recording":1,"mood":"fine","captured_at":"2026-01-01T00:00:00Z"}', "x")
    assert host.captured_at == "2026-01-01T00:00:00Z"
    assert host.read_text("/a") == NOT_RECORDED


def test_what_an_editor_may_leave() -> None:
    host = parse(b"\r\n".join([HEADER, b"", *GOOD, b"  ", b""]), "edited")
    assert host.read_text("/l") == "x"
    assert host.nvml("nvmlInit") is True


def test_of_two_lines_for_one_thing_the_last_counts() -> None:
    lines = [
        HEADER,
        b'{"file":"/a","text":"first"}',
        b'{"file":"/a","text":"last"}',
        b'{"nvml":"nvmlInit","value":1}',
        b'{"nvml":"nvmlInit","args":[],"value":2}',
        b'{"file":"/b","text":"x","text":"y"}',
    ]
    host = parse(b"\n".join(lines), "twice")
    assert host.read_text("/a") == "last"
    assert host.nvml("nvmlInit") == 2
    assert host.read_text("/b") == "y"


def test_numbers_beyond_64_bits() -> None:
    answers = Answers(Header(format=1), {}, {}, {("call",): [2**64 - 1, 2**70, -(2**70), 5e-324]})
    assert parse(render(answers), "big").answers.nvml == answers.nvml


def sample() -> Answers:
    return Answers(
        Header(format=1, tool="0.1.0"),
        {"/a": "x", "/b": Link("a"), "/c": Directory(["d"]), "/c/d": b"\xff", "/e": ABSENT},
        {("tool", "-v"): Output(0, "1\n", "")},
        {("nvmlInit",): True, ("nvmlDeviceGetName", 0): nvml_error("GPU_IS_LOST")},
    )


def test_a_cut_recording_is_refused() -> None:
    """Cut at any byte: half a machine must not pass for a whole one without GPUs."""
    whole = render(sample())
    entries = whole.count(b"\n") - 1
    for size in range(1, len(whole) - 1):
        cut = whole[:size]
        with pytest.raises(SourceError) as error:
            parse(cut, "cut")
        number = cut.count(b"\n") + 1
        told = (f"line {number} is", f"cut short: it holds {number - 2} of its {entries} entries",
                f"cut short: it holds {number - 1} of its {entries} entries")  # fmt: skip
        assert any(text in str(error.value) for text in told), (size, str(error.value))
    assert parse(whole[:-1], "only the last newline is gone").answers.files


def test_a_recording_without_a_count_is_read() -> None:
    """Written by hand: nobody counts lines."""
    head, _, rest = render(sample()).partition(b"\n")
    header = msgspec.json.decode(head)
    del header["entries"]
    host = parse(msgspec.json.encode(header) + b"\n" + rest, "by hand")
    assert host.answers.files == parse(head + b"\n" + rest, "whole").answers.files


@settings(deadline=None)
@given(st.data())
def test_damage_is_refused_or_read(data: st.DataObject) -> None:
    """Whatever bytes a recording holds: a machine, or one error of this tool's own."""
    whole = bytearray(render(sample()))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    try:
        host = parse(bytes(whole), "damaged")
    except SourceError:
        return
    for path in [*host.answers.files, "/a", "/b", "/c/d", "/x"]:
        for ask in (host.read_bytes, host.read_text, host.list_dir, host.read_link):
            ask(path)
    render(host.answers)


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xef\xbb\xbf" + HEADER)
def test_any_bytes_at_all(data: bytes) -> None:
    with pytest.raises(SourceError):
        parse(data, "noise")


def test_what_a_recording_is_told_by() -> None:
    assert is_recording(HEADER)
    assert is_recording(b"\n  " + HEADER)
    for other in (b"", b"{}", b"PK\x03\x04", b"<?xml?>", b'{"schema":"gputopo.scan/1"}'):
        assert not is_recording(other)


# Absent, and not asked for


def test_not_recorded_is_told_from_absent() -> None:
    host = RecordedHost(
        "x",
        Answers(
            Header(format=1),
            {
                "/sys": Directory(["class", "link", "file", "closed"]),
                "/sys/class": Directory(["net"]),
                "/sys/link": Link("class"),
                "/sys/file": "x",
                "/sys/closed": Missing("denied"),
                "/sys/gone": ABSENT,
                "/proc/cpuinfo": "processor : 0\n",
                "/dev/disk/size": ABSENT,
            },
            {("known",): Output(0, "", "")},
            {("nvmlInit",): True},
        ),
    )
    for path in (
        "/sys/gone",  # asked for
        "/sys/gone/below",
        "/sys/nothing",  # the listing lacks it
        "/sys/class/infiniband",
        "/sys/class/infiniband/mlx5_0/ports",
        "/sys/link/infiniband",
        "/sys/file/below",
        "/dev/disk/size",
        "/dev/disk/size/below",
    ):
        assert host.read_text(path) == ABSENT, path
    for path in (
        "/sys/class/net",  # listed, but not asked for
        "/sys/class/net/eth0",
        "/sys/link/net",
        "/proc/meminfo",  # nothing is known of its directory
        "/proc",
        "/etc/os-release",
        "/dev/disk/queue",
    ):
        for ask in (host.read_text, host.read_bytes, host.list_dir, host.read_link):
            assert ask(path) == NOT_RECORDED, path
    assert host.read_text("/sys/closed/x") == Missing("denied")
    assert host.run(["unknown"], 1) == NOT_RECORDED
    assert host.run(["known", "-v"], 1) == NOT_RECORDED
    assert host.nvml("nvmlInit") is True
    assert host.nvml("nvmlInit", 0) == NOT_RECORDED


def test_a_failed_call_is_not_inherited_by_what_is_below() -> None:
    """A directory that was taken for a link, in vain, is a directory all the same."""
    files: dict[str, Entry] = {
        "/sys/d": Missing("failed", "not a symbolic link"),
        "/sys/d/x": "1",
        "/sys/l": Link("d"),
    }
    host = RecordedHost("x", Answers(Header(format=1), files))
    assert host.read_text("/sys/l/x") == "1"
    assert host.read_text("/sys/d/y") == NOT_RECORDED


# Recording, and replaying


class Machine(MemoryTree):
    """A tree with a command and NVML answers, whose answers can be made to change."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        super().__init__("machine", entries)
        self.asked = 0

    def run(self, argv: Sequence[str], timeout: float) -> Fact[Output]:
        self.asked += 1
        return Output(self.asked, " ".join(argv), "") if argv[0] == "tool" else ABSENT

    def nvml(self, call: str, *args: Any) -> Fact[Any]:
        self.asked += 1
        return [self.asked, *args] if call == "known" else nvml_error("NOT_SUPPORTED")


ASKED = st.lists(
    st.tuples(st.sampled_from(("read_bytes", "read_text", "list_dir", "read_link")), QUESTIONS),
    min_size=1,
    max_size=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal; or errors of one kind, for a path keeps the words of one failed question alone."""
    if isinstance(one, Missing) and isinstance(other, Missing):
        return one == other or one.reason == other.reason == "failed"
    return bool(one == other)


@example(
    {"/a/b": Link("c"), "/a/c": "inside", "/d": "other"},
    [("read_link", "/a/b"), ("read_text", "/a/b"), ("read_text", "/a/c"), ("list_dir", "/a")],
)
@example(
    # A link in a directory that is itself reached by a link: its target cannot be told from
    # its own path, where another file stands.
    {"/a/a/c": Link("../b"), "/a/b": "inside", "/b": "other", "/c": Link("a/a")},
    [("read_link", "/c/c"), ("read_text", "/c/c"), ("read_text", "/b")],
)
@settings(deadline=None)
@given(layouts(), ASKED)
def test_a_replay_answers_as_the_machine_did(layout: Layout, asked: list[tuple[str, str]]) -> None:
    machine = in_memory(layout)
    recorder = Recorder(machine)
    seen = [getattr(recorder, question)(path) for question, path in asked]
    assert seen == [getattr(machine, question)(path) for question, path in asked]
    assert seen == [getattr(recorder, question)(path) for question, path in asked]
    replay = parse(render(recorder.answers), "replay")
    for (question, path), answer in zip(asked, seen, strict=True):
        assert same(getattr(replay, question)(path), answer), (question, path)


def test_a_link_and_what_it_leads_to_are_both_kept() -> None:
    """Most of /sys/class is links to directories, and probes ask for both."""
    machine = in_memory({"/sys/class/net/eth0": Link("../../devices/x"), "/sys/devices/x/mtu": "1"})
    for order in (("read_link", "list_dir"), ("list_dir", "read_link")):
        recorder = Recorder(machine)
        for question in order:
            getattr(recorder, question)("/sys/class/net/eth0")
        replay = parse(render(recorder.answers), "replay")
        assert replay.read_link("/sys/class/net/eth0") == "../../devices/x"
        assert replay.list_dir("/sys/class/net/eth0") == ["mtu"]


def test_content_survives_a_question_that_failed() -> None:
    machine = in_memory({"/file": "x\n", "/dir/y": "z"})
    questions = ("read_bytes", "read_text", "list_dir", "read_link")
    for first in questions:
        for second in questions:
            recorder = Recorder(machine)
            for path in ("/file", "/dir"):
                getattr(recorder, first)(path)
                getattr(recorder, second)(path)
            replay = parse(render(recorder.answers), "replay")
            for path in ("/file", "/dir"):
                for question in (first, second):
                    answer = getattr(replay, question)(path)
                    assert same(answer, getattr(machine, question)(path)), (first, second, path)


def test_a_question_asked_twice_gets_its_first_answer() -> None:
    entries: dict[str, Entry] = {"/file": "first\n", "/gone": Missing("denied"), "/l": Link("file")}
    recorder = Recorder(Machine(entries))

    def ask() -> list[Any]:
        return [
            recorder.read_text("/file"),
            recorder.read_text("/gone"),
            recorder.list_dir("/"),
            recorder.read_link("/l"),
            recorder.run(["tool", "-x"], 1),
            recorder.run(["other"], 1),
            recorder.nvml("known", 1, [2, [3]]),
            recorder.nvml("other"),
        ]

    before = ask()
    assert before[0] == "first" and before[4] == Output(1, "tool -x", "")
    changed: dict[str, Entry] = {"/file": "second", "/gone": "back", "/new": "x", "/l": Link("new")}
    recorder.host = Machine(changed)
    assert ask() == before
    replay = parse(render(recorder.answers), "replay")
    assert [
        replay.read_text("/file"),
        replay.read_text("/gone"),
        replay.list_dir("/"),
        replay.read_link("/l"),
        replay.run(["tool", "-x"], 1),
        replay.run(["other"], 1),
        replay.nvml("known", 1, [2, [3]]),
        replay.nvml("other"),
    ] == before


def test_bytes_and_text_of_one_file_are_one_answer() -> None:
    recorder = Recorder(Machine({"/file": b"\xff\n"}))
    assert recorder.read_bytes("/file") == b"\xff\n"
    recorder.host = Machine({"/file": "changed"})
    assert recorder.read_text("/file") == "\ufffd"
    assert parse(render(recorder.answers), "x").read_bytes("/file") == b"\xff\n"


def test_a_recorder_passes_for_the_host_it_wraps() -> None:
    machine = Machine({})
    machine.captured_at = "2026-01-01T00:00:00Z"
    recorder: Host = Recorder(machine)
    assert (recorder.kind, recorder.name) == ("archive", "machine")
    assert (recorder.captured_at, recorder.concurrent) == ("2026-01-01T00:00:00Z", False)
    assert recorder.remaining() == float("inf")
    recorder.close()


def test_answers_can_be_taken_while_a_thread_still_asks() -> None:
    """A scan gives up a thread that waits for the driver, and records what there is."""
    recorder = Recorder(Machine({}))

    def ask() -> None:
        for number in range(1000):
            for question in (recorder.read_text, recorder.list_dir, recorder.read_link):
                question(f"/{number}")
            recorder.nvml("known", number)
            recorder.run(["tool", str(number)], 1)

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        assert recorder.answers.header.format == FORMAT
    thread.join()
    assert len(recorder.answers.nvml) == 1000


def test_a_replay_of_a_recording_can_be_recorded() -> None:
    first = RecordedHost("first", sample())
    recorder = Recorder(first)
    questions: list[tuple[Callable[[str], Any], str]] = [
        (recorder.read_text, "/a"),
        (recorder.read_link, "/b"),
        (recorder.list_dir, "/c"),
        (recorder.read_bytes, "/c/d"),
        (recorder.read_text, "/e"),
    ]
    for ask, path in questions:
        ask(path)
    recorder.run(["tool", "-v"], 1)
    recorder.nvml("nvmlInit")
    recorder.nvml("nvmlDeviceGetName", 0)
    recorder.read_text("/never")
    answers = recorder.answers
    assert answers.files.pop("/never") == NOT_RECORDED
    assert answers.files == sample().files
    assert answers.commands == sample().commands
    assert answers.nvml == sample().nvml


def test_nvml_keys_are_one_however_arguments_are_held() -> None:
    assert nvml_key("call", [0, [[90, 0]]]) == nvml_key("call", (0, ((90, 0),)))
    assert hash(nvml_key("call", [0, [[90, 0]]])) is not None
    assert nvml_key("call", [0]) != nvml_key("call", [[0]])
