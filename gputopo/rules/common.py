"""What several rules need: names in a line, the driver's facts of a GPU, where the tool runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gputopo.facts import ABSENT, Missing, known
from gputopo.probes.nvml import NvmlFacts, NvmlGpu
from gputopo.topology.graph import Topology
from gputopo.topology.model import Gpu


def listed(ids: Iterable[str]) -> str:
    """Ids in a line, numbers that follow each other as a range: ``gpu0-3, gpu6, mlx5_0``."""
    words: list[str] = []
    start = last = ("", -2)
    for item in [*ids, ""]:
        match = re.fullmatch(r"(.*?)(0|[1-9]\d{0,8})", item)
        here = (match[1], int(match[2])) if match else (item, -2)
        if here == (last[0], last[1] + 1) and here[1] >= 0:
            last = here
            continue
        if start != ("", -2):
            words.append(_range(start, last))
        start = last = here
    return ", ".join(words)


def _range(start: tuple[str, int], last: tuple[str, int]) -> str:
    if start[1] < 0:
        return start[0]
    first = f"{start[0]}{start[1]}"
    if last == start:
        return first
    joint = "-" if last[1] > start[1] + 1 else f", {start[0]}"
    return f"{first}{joint}{last[1]}"


def count(number: int, thing: str) -> str:
    """``1 link``, ``2 links``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def plural(ids: Sequence[object], one: str, many: str) -> str:
    """The form of a verb that goes with these subjects."""
    return one if len(ids) == 1 else many


def nvml_of(topology: Topology) -> NvmlFacts | None:
    return known(topology.facts.nvml)


def driver_facts(topology: Topology) -> dict[str, NvmlGpu]:
    """What NVML says of each GPU, by node id; without those that answer nothing."""
    nvml = nvml_of(topology)
    if nvml is None:
        return {}
    by_index = {gpu.index: gpu for gpu in nvml.gpus if gpu.index not in nvml.lost}
    return {
        gpu.id: by_index[gpu.index]
        for gpu in topology.gpus
        if gpu.index is not None and gpu.index in by_index
    }


def same_part(gpus: Iterable[Gpu]) -> dict[str, list[Gpu]]:
    """GPUs by product name; those without one are left out."""
    parts: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        if gpu.name is not None:
            parts.setdefault(gpu.name, []).append(gpu)
    return parts


def service_state(topology: Topology, unit: str) -> str | None:
    """What systemd says of a unit: ``active``, ``inactive``, ``failed``, ``not-found``."""
    system = known(topology.facts.system)
    services = known(system.services) if system is not None else None
    return services.get(unit) if services else None


def unread(fact: object) -> bool:
    """Whether a value may be there and was not read: denied, timed out, broken, or not recorded.
    What is truly absent, or said not to be supported, is known."""
    return isinstance(fact, Missing) and fact != ABSENT and fact.reason != "unsupported"


def is_virtual(topology: Topology) -> bool:
    """Whether a hypervisor is known to stand between this machine and the hardware."""
    return topology.host.virtualization not in (None, "none")


def is_isolated(topology: Topology) -> bool:
    """Whether devices may be hidden from this process: a container, or a job's device cgroup.

    A container with a cgroup namespace of its own sees its place as the root, ``0::/``.
    """
    if topology.host.container is not None:
        return True
    system = known(topology.facts.system)
    cgroup = known(system.cgroup) if system is not None else None
    return cgroup == "0::/"
