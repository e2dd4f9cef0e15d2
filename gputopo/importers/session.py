"""A pasted session: finds what commands printed in a text, and makes it the answers of a host.

A chat, a log, Markdown, a terminal's scrollback: what is in it is told by its shape, by line. A
piece begins with a line that only one program prints, and lasts until another program's line, a
prompt or a code fence. What a piece means is the probes' business: they ask the same questions
as on a live machine, and get the pieces as answers.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from gputopo.errors import SourceError
from gputopo.host.base import OUTPUT_LIMIT, Output
from gputopo.host.recording import FORMAT, Answers, Header, RecordedHost
from gputopo.importers.clean import clean
from gputopo.probes import ib_tools, lscpu, lspci, nvidia_smi, smi_nvlink, smi_query
from gputopo.probes.numa import NUMACTL
from gputopo.probes.smi_table import tables

WHOLE = 2 << 20
"""Bytes of a text that are all looked at. Of a larger one only what is near a known word is."""

BEFORE, AFTER = 16 << 10, 256 << 10
"""Bytes before and after such a word."""

MAX_LINES = 1_000_000
MAX_PIECES = 10_000

MAX_IDLE = 1000
"""Lines without anything known after which a piece is over: a matrix of sixty devices and legends
are two hundred."""

_ADDRESS = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"
_NAME = r"[\w.-]{1,64}"


class Shape(NamedTuple):
    """A line that nothing but one kind of output has: a word to look for first, and its pattern."""

    kind: str
    word: str
    pattern: re.Pattern[str]


def _shapes(**kinds: list[tuple[str, str]]) -> tuple[Shape, ...]:
    return tuple(
        Shape(kind, word, re.compile(pattern))
        for kind, lines in kinds.items()
        for word, pattern in lines
    )


SHAPES = _shapes(
    topo=[
        (
            "GPU0",
            r"\bGPU0(?=\s*(?:GPU1|NIC\d|mlx\d_|CPU Aff|$)|\s+(?:[a-z][\w.-]{0,63}\d|GPU0\s*X))",
        ),
    ],
    numactl=[
        ("available: ", r"\bavailable: \d{1,5} nodes? \("),
        (" cpus:", r"\bnode \d{1,5} cpus:"),
        (" size:", r"\bnode \d{1,5} size:"),
        ("node distances:", r"\bnode distances:"),
        ("No NUMA support", r"No NUMA support available"),
    ],
    nvlink=[
        ("GPU ", r"^\s*GPU \d{1,3}: \S"),
        (" GB/s", r"^\s*Link \d{1,3}: [\d.]{1,9} GB/s"),
        ("<inactive>", r"^\s*Link \d{1,3}: <inactive>"),
        ("Remote Device", r"^\s*Link \d{1,3}: Remote Device"),
        (" supported: ", r"^\s*Link \d{1,3}, .{1,60} supported: "),
    ],
    query=[
        ("NVSMI LOG", r"=NVSMI LOG="),
        ("Attached GPUs", r"^\s*Attached GPUs\s+: \d"),
        ("GPU ", r"^\s*GPU [0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:"),
        ("GPU Link Info", r"^\s*GPU Link Info\s*$"),
        ("Bus Id", r"^\s*Bus Id\s+: [0-9A-Fa-f]{8}:"),
    ],
    summary=[("| NVIDIA-SMI ", r"^\s*\| NVIDIA-SMI \d")],
    tree=[
        ("]-", r"^[\s|]*[-+\\]{1,2}-?\[(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}(?:-[0-9a-f]{2})?\]-"),
    ],
    lspci=[
        (": ", rf"^\s*{_ADDRESS} [A-Z\"][^:]{{2,60}}: "),
        ("LnkCap:", r"\bLnkCap:\s"),
        ("LnkSta:", r"\bLnkSta:\s"),
        ("ACSCtl:", r"\bACSCtl:\s"),
    ],
    ibstat=[("CA '", rf"^\s*CA '{_NAME}'")],
    devinfo=[
        ("hca_id:", r"\bhca_id:\s*\S"),
        ("GID[", r"^\s*GID\[\s*\d{1,3}\]:"),
    ],
    devices=[("node GUID", r"^\s*device\s+node GUID")],
    netdevs=[(" ==> ", rf"^\s*{_NAME} port \d{{1,3}} ==> \S{{1,64}} \((?:Up|Down)\)")],
    gids=[("INDEX", r"^\s*DEV\s+PORT\s+INDEX\s+GID")],
    rdma=[
        ("link ", rf"^\s*(?:\d{{1,3}}: )?link {_NAME}/\d{{1,3}} .{{0,200}}\bstate [A-Z]"),
    ],
    ibclass=[("/infiniband/", rf"{_NAME} -> \S{{0,200}}/infiniband/{_NAME}$")],
    lscpu=[
        ("Architecture:", r"^\s*Architecture:\s+\S"),
        ("NUMA node", r"^\s*NUMA node\d{1,5} CPU\(s\):"),
        ("On-line CPU", r"^\s*On-line CPU\(s\) list:"),
        ("CPU NODE", r"^\s*CPU NODE SOCKET CORE"),
    ],
)

_PROGRAMS = (
    "nvidia-smi",
    "numactl",
    "lspci",
    "ibstat",
    "ibv_dev",
    "ibdev2netdev",
    "show_gids",
    "rdma ",
    "lscpu",
)
_COMMAND = re.compile(
    r"(?:^|[\s$#%>`;|&(/\"'])(?:nvidia-smi|numactl|lspci|ibstat|ibv_devinfo|ibv_devices|ibdev2netdev"
    r"|show_gids|rdma (?:-d )?link|lscpu)(?=[\s`\"');:,|.]|$)(.{0,200})"
)
_PROMPT = re.compile(
    r"\s*(?:[$#%>]\s)?(?:\([\w.-]{1,64}\)\s?)?\[?[\w.-]{1,64}@[\w.-]{1,64}[\s:][^$#%>]{0,200}[$#%>]\]?(?:\s|$)"
)
_TOPO = re.compile(
    r"topo\s(?:.{0,60}\s)?(?:-mp|-m|--matrix\w{0,10}|-p2p|--p2p\w{0,20})\b(?:\s+([a-z]{1,2})\b)?"
)
_COMMENT = re.compile(r"\s*#[ \t]?")

FOREIGN = {
    "rocm-smi (AMD)": r"ROCm System Management Interface|\brocm-smi\b",
    "amd-smi (AMD)": r"\bamd-smi\b|\bXGMI\b",
    "npu-smi (Huawei)": r"\bnpu-smi\b|\bHCCS\b",
    "xpu-smi (Intel)": r"\bxpu-smi\b|\bGPU \d{1,3}/\d{1,3}\b",
    "mx-smi (MetaX)": r"\bmx-smi\b|\bMetaXLink\b",
    "ixsmi (Iluvatar)": r"\bixsmi\b|\bIX-SMI\b",
    "mthreads-gmi (Moore Threads)": r"\bmthreads-gmi\b|\bMTLink\b",
    "cnmon (Cambricon)": r"\bcnmon\b|\bMLULink\b",
    "hy-smi (Hygon)": r"\bhy-smi\b",
}
"""Tools of other makers that print much the same, and mean other things by it."""


class Piece(msgspec.Struct):
    """What one program printed, and the command that was typed for it, where that is there."""

    kind: str
    typed: str
    lines: list[str]
    idle: int = 0
    is_last: bool = False
    """Whether the text ends with it; then its last line may have been cut."""

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + ("" if self.is_last else "\n")


def recognise(data: bytes, name: str) -> RecordedHost | None:
    """A host that answers with what is pasted; None for a text with nothing that is known.

    Raises SourceError for the output of another maker's tool.
    """
    lines = clean(_near_anchors(data))
    commands: dict[tuple[str, ...], str] = {}
    for piece in pieces(lines):
        for command, text in _answers(piece):
            commands[command] = commands.get(command, "") + text
    foreign = _foreign(lines)
    if foreign and not any("-smi" in command[0] for command in commands):
        raise SourceError(f"{name}: the output of {foreign}; only NVIDIA's nvidia-smi is read here")
    if not commands:
        return None
    return RecordedHost(
        name,
        Answers(
            Header(format=FORMAT, text=True),
            {},
            {argv: Output(0, text[:OUTPUT_LIMIT], "") for argv, text in commands.items()},
            {},
        ),
    )


def pieces(lines: list[str]) -> list[Piece]:
    """The pieces of a text in their order."""
    found: list[Piece] = []
    current: Piece | None = None
    typed = ""
    for line in lines[:MAX_LINES]:
        kind = _kind(line)
        command = "" if kind and line[0].isspace() else _command(line)
        if command:
            current, typed = None, command
            listed = _listed_columns(command)
            if listed:
                current = Piece("csv", typed, [listed])
                found.append(current)
                continue
        elif not kind and line.lstrip()[:2] in ("``", "~~", "##"):
            current = None
            continue
        elif not kind and "@" in line and _PROMPT.match(line):
            current, typed = None, ""
            continue
        elif not kind and line.lstrip()[:1] == "#":
            line = _COMMENT.sub("", line, count=1)
            kind = _kind(line)
        if kind and (current is None or current.kind != kind or kind == "topo"):
            if len(found) == MAX_PIECES:
                break
            current = Piece(kind, typed, _head(kind, line, typed))
            found.append(current)
        if current is not None:
            current.idle = 0 if kind else current.idle + 1
            if current.idle > MAX_IDLE and current.kind != "tree":
                current = None
            else:
                current.lines.append(line)
    if current is not None:
        current.is_last = True
    return found


def _kind(line: str) -> str:
    """The kind of output that a line belongs to for sure; empty for most lines."""
    for shape in SHAPES:
        if shape.word in line and shape.pattern.search(line[:4096]):
            return shape.kind
    return "csv" if ", " in line and smi_query.columns_of(line[:4096]) else ""


def _command(line: str) -> str:
    """The command of these programs that a line tells was typed."""
    if not any(program in line for program in _PROGRAMS):
        return ""
    match = _COMMAND.search(line[:1000])
    return match[0].strip() if match else ""


def _listed_columns(command: str) -> str:
    """The columns that a typed ``--query-gpu=...`` asked for, if their titles are not printed."""
    match = re.search(r"--query-gpu=(\S{1,2000})", command)
    return match[1].strip("'\"") if match and "noheader" in command else ""


def _head(kind: str, line: str, typed: str) -> list[str]:
    """A title for lines of ``lspci -s ADDRESS`` that lost theirs to a grep."""
    if kind == "lspci" and not re.match(rf"\s*{_ADDRESS} ", line):
        asked = re.search(rf"\s-\w{{0,6}}s\s?({_ADDRESS})\b", typed)
        return [f"{asked[1]} Device: shown by its link alone"] if asked else []
    return []


def _near_anchors(data: bytes) -> bytes:
    """The text, or of a large one the stretches in which something may stand."""
    if len(data) <= WHOLE:
        return data
    stretches: list[tuple[int, int]] = []
    for shape in SHAPES:
        word = shape.word.encode()
        if word in _FREQUENT:
            continue
        at = data.find(word)
        while at >= 0:
            start = data.rfind(b"\n", max(0, at - 4096), at) + 1
            after = at + len(word)
            if word != b"GPU0" or _HEADER.match(data, at):
                stretches.append((start - BEFORE, at + AFTER))
                after = max(after, at + AFTER // 4)
            at = data.find(word, after)
    merged: list[bytes] = []
    end = 0
    for start, stop in sorted(stretches):
        if stop > end:
            start = data.rfind(b"\n", 0, max(start, 1)) + 1
            merged.append(data[max(start, end) : stop])
            end = stop
    return b"\n".join(merged)


_FREQUENT = (b"GPU ", b" GB/s", b": ", b"]-", b"link ", b" supported: ", b" size:", b"available: ")
"""Words that are in ordinary logs too; those outputs have another one."""

_HEADER = re.compile(
    rb"GPU0(?:[ \t]*(?:GPU1\b|NIC\d|mlx\d_|CPU Aff)|[ \t]*\r?\n[^\n]{0,80}GPU0[ \t]*X\b)"
)
"""The beginning of a matrix; ``GPU0`` alone is on every line of some logs."""


def _foreign(lines: list[str]) -> str:
    """The tool of another maker that printed this, if its name or its links are in it."""
    text = "\n".join(lines[:20_000])[: 1 << 20]
    return next((tool for tool, mark in FOREIGN.items() if re.search(mark, text)), "")


def _answers(piece: Piece) -> list[tuple[tuple[str, ...], str]]:
    """The commands that a piece answers, each with its part of the text."""
    simple = {
        "numactl": NUMACTL,
        "query": smi_query.QUERY,
        "summary": smi_query.SUMMARY,
        "csv": smi_query.CSV,
        "tree": lspci.TREE,
        "lspci": lspci.COMMAND,
        "ibstat": ib_tools.IBSTAT,
        "devinfo": ib_tools.DEVINFO,
        "devices": ib_tools.DEVICES,
        "netdevs": ib_tools.NETDEVS,
        "gids": ib_tools.GIDS,
        "rdma": ib_tools.RDMA_LINK,
        "ibclass": ib_tools.CLASS,
        "lscpu": lscpu.COMMAND,
    }
    if piece.kind in simple:
        return [(tuple(simple[piece.kind]), piece.text)]
    if piece.kind == "nvlink":
        return [(tuple(command), text) for command, text in smi_nvlink.parted(piece.text)]
    return _topo(piece)


def _topo(piece: Piece) -> list[tuple[tuple[str, ...], str]]:
    """A matrix by what it shows, which its cells tell, and by how it was asked for, if told."""
    table = next((table for table in tables(piece.text) if table.rows), None)
    if table is None:
        return []
    asked = _TOPO.search(piece.typed)
    if table.kind == "p2p":
        letters = asked[1] if asked and "p2p" in asked[0] and asked[1] else "?"
        return [(("nvidia-smi", "topo", "-p2p", letters), piece.text)]
    if asked is None:
        command = nvidia_smi.UNNAMED_COMMAND
    elif re.search(r"-mp\b|pci", asked[0]):
        command = nvidia_smi.PCIE_COMMAND
    else:
        command = nvidia_smi.COMMAND
    return [(tuple(command), piece.text)]
