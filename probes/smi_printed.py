"""NVML's facts as the outputs of ``nvidia-smi`` have them, where a paste is all there is.

What none of them shows is missing; a GPU that no output numbers is left to the PCI facts, since all
that asks NVML asks by number.
"""

from __future__ import annotations

import re
from typing import Any

from gputopo.facts import Fact, Missing, Problem
from gputopo.host.base import Host
from gputopo.probes import smi_nvlink, smi_query
from gputopo.probes.nvml import P2P_CAPABILITIES, NvLink, NvmlFacts, NvmlGpu, Pair
from gputopo.probes.smi_nvlink import GpuLinks
from gputopo.probes.smi_query import SmiGpu, SmiGpus
from gputopo.probes.smi_table import tables

NOT_SHOWN = Missing("absent", "not in this source")

TIMEOUT = 10.0

P2P_LETTERS = {
    "r": ["read"],
    "w": ["write"],
    "rw": ["read", "write"],
    "n": ["nvlink"],
    "a": ["atomics"],
    "p": ["prop"],
    "?": ["unnamed"],
}
"""Capabilities by the letter of ``nvidia-smi topo -p2p``; ``?`` without the command."""


def printed(host: Host) -> Fact[NvmlFacts]:
    """All that is pasted of ``nvidia-smi`` but the matrix; Missing where there is nothing."""
    records = smi_query.all_of(outputs(host))
    links = _links(host)
    pairs, peers, problems = _pairs(host)
    numbered = {gpu.index: gpu.values for gpu in records.gpus if gpu.index is not None}
    indices = sorted({*numbered, *(i for i in links if i is not None), *peers})
    unnamed = links.get(None)
    if unnamed is not None:
        told = sorted({*unnamed.mbytes_per_s, *unnamed.remote, *unnamed.capable})
        what = f"links {', '.join(map(str, told[:18]))} of a GPU whose own line is cut"
        problems.append(Problem("nvidia-smi nvlink", Missing("unparsed", what)))
    if not indices and not problems:
        return NOT_SHOWN
    return NvmlFacts(
        driver=records.driver or NOT_SHOWN,
        nvml=NOT_SHOWN,
        cuda=records.cuda or NOT_SHOWN,
        count=NOT_SHOWN if records.count is None else records.count,
        gpus=[_gpu(i, numbered.get(i, {}), links) for i in indices],
        lost={},
        pairs=pairs,
        problems=problems,
    )


def outputs(host: Host) -> list[SmiGpus]:
    """What each output tells of the GPUs, the most detailed first."""
    found: list[SmiGpus] = []
    for command, parse in (
        (smi_query.QUERY, smi_query.parse_query),
        (smi_query.CSV, smi_query.parse_csv),
        (smi_query.SUMMARY, smi_query.parse_summary),
    ):
        output = host.run(command, TIMEOUT)
        if not isinstance(output, Missing):
            found.append(parse(output.stdout))
    listed: list[SmiGpu] = []
    for index, links in _links(host).items():
        named = {"name": links.name, "uuid": links.uuid}
        values: dict[str, Fact[Any]] = {field: text for field, text in named.items() if text}
        if links.mig:
            values["mig_mode"] = 1
        if index is not None and values:
            listed.append(SmiGpu(index, values))
    return [*found, SmiGpus(listed)]


def _links(host: Host) -> dict[int | None, GpuLinks]:
    """The NVLinks of each GPU, of all listings of them together."""
    text = ""
    for command in (
        smi_nvlink.STATE,
        smi_nvlink.REMOTE,
        smi_nvlink.CAPABILITIES,
        smi_nvlink.LIST,
    ):
        output = host.run(command, TIMEOUT)
        if not isinstance(output, Missing):
            text += output.stdout
    return smi_nvlink.parse(text)


def _gpu(
    index: int, values: dict[str, Fact[Any]], all_links: dict[int | None, GpuLinks]
) -> NvmlGpu:
    links = all_links.get(index, GpuLinks())
    if links.all_down and not links.mbytes_per_s:
        # Not listed one by one, but there are as many as on others of the part.
        listed = [list(o.mbytes_per_s) for o in all_links.values() if o.name == links.name]
        longest = max(listed, key=len)
        links.mbytes_per_s = dict.fromkeys(longest, 0)
    remote = smi_nvlink.remote_by_link(links)
    numbers = sorted({*links.mbytes_per_s, *remote})
    known: dict[str, Any] = {
        **dict.fromkeys(NvmlGpu.__struct_fields__, NOT_SHOWN),
        **values,
        "index": index,
        "mig": [],
        "nvlinks": [_nvlink(number, links, remote.get(number)) for number in numbers],
        "nvlink_count": len(numbers) if links.mbytes_per_s else NOT_SHOWN,
    }
    return NvmlGpu(**known)


def _nvlink(number: int, links: GpuLinks, remote: str | None) -> NvLink:
    speed = links.mbytes_per_s.get(number)
    active = NOT_SHOWN if speed is None and remote is None else bool(speed or remote)
    return NvLink(
        index=number,
        active=active,
        version=NOT_SHOWN,
        remote=remote or NOT_SHOWN,
        remote_type=NOT_SHOWN,
        mbytes_per_s=speed or NOT_SHOWN,
    )


def _pairs(host: Host) -> tuple[list[Pair], set[int], list[Problem]]:
    """What ``topo -p2p`` shows of each pair, of all capabilities that are pasted; and the GPUs."""
    peers: set[int] = set()
    found: dict[tuple[int, int], dict[str, Fact[str]]] = {}
    problems: list[Problem] = []
    for letter, capabilities in P2P_LETTERS.items():
        command = ["nvidia-smi", "topo", "-p2p", letter]
        output = host.run(command, TIMEOUT)
        if isinstance(output, Missing):
            continue
        table = next((t for t in tables(output.stdout) if t.kind == "p2p"), None)
        if table is None:
            continue
        peers |= {i for device in table.devices if (i := _number(device)) is not None}
        problems += [
            Problem(" ".join(command), Missing("unparsed", text)) for text in table.problems
        ]
        for row, cells in table.rows.items():
            for column, cell in cells.items():
                pair = _number(row), _number(column)
                if pair[0] is None or pair[1] is None or pair[0] == pair[1]:
                    continue
                known = found.setdefault((pair[0], pair[1]), {})
                known.update(dict.fromkeys(capabilities, cell))
    pairs = [
        Pair(
            a=a,
            b=b,
            ancestor=NOT_SHOWN,
            p2p={**dict.fromkeys(P2P_CAPABILITIES, NOT_SHOWN), **told},
        )
        for (a, b), told in sorted(found.items())
    ]
    return pairs, peers, problems


def _number(label: str) -> int | None:
    match = re.fullmatch(r"GPU(\d{1,3})", label)
    return int(match[1]) if match else None
