"""A recording: a whole machine's answers as one text file of JSON lines.

The first line is the header, then one line an entry, sorted, so that two recordings diff well::

    {"gputopo-recording": 1, "tool": "0.1.0", "captured_at": "...", "anonymized": [...], ...}
    {"command": ["nvidia-smi", "topo", "-m"], "exit": 0, "stdout": "...", "stderr": ""}
    {"dir": "/sys/class/infiniband", "entries": ["mlx5_0"]}
    {"file": "/sys/...", "text": "..."}        or "base64", or "error" with an optional "detail"
    {"link": "/sys/...", "target": "..."}      what it leads to is at its own path, or at LINK/.
    {"nvml": "nvmlDeviceGetName", "args": [0], "value": "..."}    or "error": "NOT_SUPPORTED"

An entry that is not there was not asked for: to replay it is ``absent``, with that detail.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast, get_args

import msgspec

from gputopo.errors import SourceError
from gputopo.facts import Fact, Missing, Reason
from gputopo.host.base import Output
from gputopo.host.tree import Directory, Entry, Link, TreeHost

FORMAT = 1
_REASONS = get_args(Reason)
NOT_RECORDED = Missing("absent", "not in the recording")
NOT_PASTED = Missing("absent", "not in this source")


class Header(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The first line of a recording."""

    format: int = msgspec.field(name="gputopo-recording")
    tool: str = ""
    captured_at: str | None = None
    kernel: str = ""
    anonymized: list[str] = []
    note: str = ""
    text: bool = False
    """Whether this was pasted text: what programs had printed, and no file of the machine."""
    entries: int | None = None
    """Lines after this one: fewer mean that the file was cut."""


class _Line(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """One entry; which fields are set tells its kind. Fields stand in the order they are written.

    It is plain data and so never part of a reference cycle (``gc``).
    """

    command: list[str] | None = None
    dir: str | None = None
    file: str | None = None
    link: str | None = None
    nvml: str | None = None
    args: list[Any] | None = None
    exit: int | None = None
    stdout: str | None = None
    stderr: str | None = None
    entries: list[str] | None = None
    target: str | None = None
    text: str | None = None
    base64: str | None = None
    value: Any = msgspec.UNSET
    error: str | None = None
    detail: str = ""


class Answers(msgspec.Struct):
    """What a recording holds, by question."""

    header: Header
    files: dict[str, Entry] = {}
    commands: dict[tuple[str, ...], Fact[Output]] = {}
    nvml: dict[tuple[Any, ...], Fact[Any]] = {}


NVML_REASONS: dict[str, Reason] = {
    "NOT_SUPPORTED": "unsupported",
    "FUNCTION_NOT_FOUND": "unsupported",
    "ARGUMENT_VERSION_MISMATCH": "unsupported",
    "DEPRECATED": "unsupported",
    "LIBRARY_NOT_FOUND": "absent",
    "DRIVER_NOT_LOADED": "absent",
    "NOT_FOUND": "absent",
    "NO_PERMISSION": "denied",
    "TIMEOUT": "timeout",
}
"""NVML's error names (NVML_ERROR_*) by reason; every other one is ``failed``."""


def nvml_error(name: str) -> Missing:
    """The reason that an NVML error stands for; its name is kept as the detail."""
    return Missing(NVML_REASONS.get(name, "failed"), f"NVML {name}")


def nvml_key(call: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """The question as a dictionary key (arguments may be nested lists)."""
    return (call, *(_frozen(arg) for arg in args))


def _frozen(arg: Any) -> Any:
    return tuple(_frozen(item) for item in arg) if isinstance(arg, (list, tuple)) else arg


class RecordedHost(TreeHost):
    """Answers from a recording; never touches the live machine."""

    kind = "recording"
    unknown = NOT_RECORDED

    def __init__(self, name: str, answers: Answers) -> None:
        super().__init__(name)
        self.answers = answers
        if answers.header.text:
            self.kind, self.unknown = "text", NOT_PASTED
        self.captured_at = answers.header.captured_at
        self._files = answers.files
        self._commands = answers.commands
        self._nvml = answers.nvml

    def entry(self, path: str) -> Entry | None:
        return self._files.get(path)

    def run(self, argv: Sequence[str], timeout: float) -> Fact[Output]:
        return self._commands.get(tuple(argv), self.unknown)

    def nvml(self, call: str, *args: Any) -> Fact[Any]:
        return self._nvml.get(nvml_key(call, args), self.unknown)


def is_recording(data: bytes) -> bool:
    """Whether the data starts as a recording does."""
    return data[:64].lstrip().startswith(b'{"gputopo-recording"')


_WRONG = (ValueError, RecursionError, TypeError)
"""What a wrong line raises; TypeError for an NVML argument that is a JSON object."""


def parse(data: bytes, name: str) -> RecordedHost:
    """Reads a recording. Raises SourceError that names the first wrong line."""
    first, _, rest = data.partition(b"\n")
    try:
        header = msgspec.json.decode(first, type=Header)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name}: line 1 is no recording header: {error}") from None
    if header.format != FORMAT:
        raise SourceError(
            f"{name}: recording format {header.format}; this version reads format {FORMAT}"
        )
    _check_size(rest, name)
    answers = Answers(header, {}, {}, {})
    try:
        lines = msgspec.json.Decoder(_Line).decode_lines(rest)
        for line in lines:
            _keep(line, answers)
    except _WRONG:
        raise SourceError(f"{name}: {_first_fault(rest)}") from None
    if header.entries is not None and len(lines) < header.entries:
        raise SourceError(
            f"{name}: cut short: it holds {len(lines)} of its {header.entries} entries"
        )
    return RecordedHost(name, answers)


LINE_LIMIT = 8 << 20
"""Bytes of a line: a file of 1 MiB whose every byte is escaped takes 6."""

LINES_LIMIT = 2_000_000
"""Lines of a recording; the largest machine known makes 20,000, 10,000 SR-IOV functions 400,000."""


def _check_size(data: bytes, name: str) -> None:
    """Refuses what would take gigabytes once it is objects."""
    if data.count(b"\n") > LINES_LIMIT:
        raise SourceError(f"{name}: more than {LINES_LIMIT} lines")
    start, number = 0, 2
    while len(data) - start > LINE_LIMIT:
        end = data.find(b"\n", start, start + LINE_LIMIT)
        if end < 0:
            raise SourceError(
                f"{name}: line {number} or one after it has over {LINE_LIMIT >> 20} MiB"
            )
        # Jump to the last line end within reach: every line up to there is short enough.
        start = data.rfind(b"\n", start, start + LINE_LIMIT) + 1
        number += 1


def _keep(line: _Line, answers: Answers) -> None:
    """Files one entry; ValueError for one that is none."""
    if line.file is not None:
        # A text is the most frequent entry by far.
        answers.files[line.file] = line.text if line.text is not None else _content(line)
    elif line.link is not None:
        answers.files[line.link] = _link(line)
    elif line.dir is not None:
        answers.files[line.dir] = _directory(line)
    elif line.command is not None:
        answers.commands[tuple(line.command)] = _output(line)
    elif line.nvml is not None:
        answers.nvml[nvml_key(line.nvml, line.args or [])] = _nvml_value(line)
    else:
        raise ValueError("names no file, link, dir, command or nvml")


def _first_fault(rest: bytes) -> str:
    """Which line after the header is wrong, and how: found by reading them one by one."""
    decoder = msgspec.json.Decoder(_Line)
    scratch = Answers(Header(format=FORMAT), {}, {}, {})
    for number, raw in enumerate(rest.split(b"\n"), start=2):
        try:
            if raw.strip():
                _keep(decoder.decode(raw), scratch)
        except _WRONG as error:
            return f"line {number} is wrong: {error}"
    return "a line is wrong: an entry is spread over several lines"


def _missing(line: _Line) -> Missing | None:
    if line.error is None:
        return None
    if line.error in _REASONS:
        return Missing(cast(Reason, line.error), line.detail)
    raise ValueError(f"unknown error {line.error!r}")


def _content(line: _Line) -> Entry:
    if line.base64 is not None:
        return base64.b64decode(line.base64, validate=True)
    missing = _missing(line)
    if missing is None:
        raise ValueError("a file needs text, base64 or error")
    return missing


def _link(line: _Line) -> Entry:
    if line.target is not None:
        return Link(line.target)
    missing = _missing(line)
    if missing is None:
        raise ValueError("a link needs target or error")
    return missing


def _directory(line: _Line) -> Entry:
    if line.entries is not None:
        return Directory(sorted(line.entries))
    missing = _missing(line)
    if missing is None:
        raise ValueError("a dir needs entries or error")
    return missing


def _output(line: _Line) -> Fact[Output]:
    if line.exit is not None:
        return Output(line.exit, line.stdout or "", line.stderr or "")
    missing = _missing(line)
    if missing is None:
        raise ValueError("a command needs exit or error")
    return missing


def _nvml_value(line: _Line) -> Fact[Any]:
    if line.value is not msgspec.UNSET:
        return line.value
    if line.error is None:
        raise ValueError("an nvml entry needs value or error")
    if line.error.isupper():
        return nvml_error(line.error)
    missing = _missing(line)
    assert missing is not None
    return missing


def render(answers: Answers) -> bytes:
    """The recording's text: header first, then entries sorted by their own text."""
    lines = sorted(_encode(line) for line in _lines(answers))
    header = msgspec.structs.replace(answers.header, entries=len(lines))
    return b"\n".join([_encode(header), *lines, b""])


def _encode(line: Header | _Line) -> bytes:
    try:
        return msgspec.json.encode(line)
    except UnicodeEncodeError:  # a name that is not UTF-8 holds lone surrogates (PEP 383)
        return msgspec.json.encode(_without_surrogates(msgspec.to_builtins(line)))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, list) else value


_SURROGATES = re.compile("[\ud800-\udfff]")


def _lines(answers: Answers) -> Iterator[_Line]:
    for path, found in answers.files.items():
        if isinstance(found, Directory):
            yield _Line(dir=path, entries=found)
        elif isinstance(found, Link):
            yield _Line(link=path, target=str(found))
        elif isinstance(found, Missing):
            yield _Line(file=path, error=found.reason, detail=found.detail)
        elif isinstance(found, str):
            yield _Line(file=path, text=found)
        else:
            try:
                yield _Line(file=path, text=found.decode("utf-8"))
            except UnicodeDecodeError:
                yield _Line(file=path, base64=base64.b64encode(found).decode("ascii"))
    for argv, output in answers.commands.items():
        if isinstance(output, Missing):
            yield _Line(command=list(argv), error=output.reason, detail=output.detail)
        else:
            yield _Line(
                command=list(argv), exit=output.exit, stdout=output.stdout, stderr=output.stderr
            )
    for (call, *args), value in answers.nvml.items():
        line = _Line(nvml=call, args=_listed(args))
        if isinstance(value, Missing):
            name = value.detail.removeprefix("NVML ")
            if name.isupper() and nvml_error(name) == value:
                line.error = name
            else:
                line.error, line.detail = value.reason, value.detail
        else:
            line.value = value
        yield line


def _listed(arg: Any) -> Any:
    return [_listed(item) for item in arg] if isinstance(arg, (list, tuple)) else arg
