"""``lscpu`` as it is pasted: the CPUs and their NUMA nodes, where there is no sysfs to read."""

from __future__ import annotations

import re

from gputopo.cpulist import parse as parse_list
from gputopo.cpulist import render
from gputopo.facts import ABSENT, Fact, Missing
from gputopo.host.base import Host
from gputopo.probes.cpu import CpuFacts, CpuModel, Package

COMMAND = ["lscpu"]
TIMEOUT = 5.0

NOT_SHOWN = Missing("absent", "not in this source")

_PAIR = re.compile(r"\s*([A-Z][\w ()/-]{1,40}?):\s+(\S.{0,8000}?)\s*$")
_NODE = re.compile(r"NUMA node(\d{1,5}) CPU\(s\)")
_ROW = re.compile(r"\s*(\d{1,5})\s+(\d{1,5}|-)\s+(\d{1,5}|-)\s+(\d{1,5}|-)\s")
"""CPU, NODE, SOCKET, CORE of ``lscpu -e``."""


def printed(host: Host) -> Fact[CpuFacts]:
    """The CPUs; packages and cores only where ``lscpu -e`` lists them or one package is all."""
    output = host.run(COMMAND, TIMEOUT)
    if isinstance(output, Missing):
        return output
    pairs = _pairs(output.stdout)
    rows = [match for line in output.stdout.split("\n") if (match := _ROW.match(line[:200]))]
    online = _cpus(pairs.get("On-line CPU(s) list", "")) or frozenset(int(r[1]) for r in rows)
    if not online:
        return Missing("unparsed", "no list of CPUs in the output of lscpu")
    return CpuFacts(
        online=render(online),
        offline=render(_cpus(pairs.get("Off-line CPU(s) list", ""))),
        allowed=NOT_SHOWN,
        allowed_nodes=NOT_SHOWN,
        packages=_packages(pairs, rows, online),
        cores=_grouped(rows, 4, online),
        l3_groups=[],
        governor=NOT_SHOWN,
        model=_model(pairs),
        frequency_driver=ABSENT,
        problems=[],
    )


def nodes(text: str) -> dict[int, str]:
    """The CPUs of each NUMA node."""
    found: dict[int, str] = {}
    for key, value in _pairs(text).items():
        match = _NODE.fullmatch(key)
        if match:
            cpus = _cpus(value)
            if cpus or value == "-":
                found[int(match[1])] = render(cpus)
    return found


def _pairs(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.split("\n"):
        match = _PAIR.match(line[:8200])
        if match:
            found.setdefault(match[1], match[2])
    return found


def _cpus(text: str) -> frozenset[int]:
    try:
        return parse_list(text)
    except ValueError:
        return frozenset()


def _packages(
    pairs: dict[str, str], rows: list[re.Match[str]], online: frozenset[int]
) -> list[Package]:
    groups: dict[str, set[int]] = {}
    for row in rows:
        if row[3] != "-" and int(row[1]) in online:
            groups.setdefault(row[3], set()).add(int(row[1]))
    if groups:
        return [Package(index=int(i), cpus=render(cpus)) for i, cpus in sorted(groups.items())]
    if pairs.get("Socket(s)") == "1":
        return [Package(index=NOT_SHOWN, cpus=render(online))]
    return []


def _grouped(rows: list[re.Match[str]], column: int, online: frozenset[int]) -> list[str]:
    groups: dict[str, set[int]] = {}
    for row in rows:
        if row[column] != "-" and int(row[1]) in online:
            groups.setdefault(row[column], set()).add(int(row[1]))
    return [render(cpus) for cpus in groups.values()]


def _model(pairs: dict[str, str]) -> Fact[CpuModel]:
    """The model; Missing where a cut output does not tell whether a hypervisor is under it."""
    architecture = pairs.get("Architecture", "unknown")
    flags = pairs.get("Flags", "").split()
    virtual = "Hypervisor vendor" in pairs or "hypervisor" in flags
    if not virtual and not flags and architecture in ("x86_64", "i686"):
        return NOT_SHOWN
    names = {"i686": "i386", "ppc64le": "ppc64"}

    def number(key: str) -> Fact[int]:
        text = pairs.get(key, "")
        return int(text) if re.fullmatch(r"\d{1,6}", text) else NOT_SHOWN

    return CpuModel(
        architecture=names.get(architecture, architecture),
        name=pairs.get("Model name") or NOT_SHOWN,
        vendor=pairs.get("Vendor ID") or NOT_SHOWN,
        family=number("CPU family"),
        model=number("Model"),
        hypervisor=virtual,
    )
