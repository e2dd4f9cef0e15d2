"""``nvidia-smi nvlink`` (``-s`` state, ``-R`` remote ends, ``-c`` capabilities), ``nvidia-smi -L``.

All four name a GPU in one line, and what they tell of it below.
"""

from __future__ import annotations

import re

import msgspec

from gputopo.pciaddr import normalise

LIST = ["nvidia-smi", "-L"]
STATE = ["nvidia-smi", "nvlink", "-s"]
REMOTE = ["nvidia-smi", "nvlink", "-R"]
CAPABILITIES = ["nvidia-smi", "nvlink", "-c"]

_GPU = re.compile(r"^\s*GPU (\d{1,3}): (.{1,120}?)(?: \(UUID: (GPU-[0-9a-fA-F-]{8,40})\))?\s*$")
_STATE = re.compile(r"^\s*Link (\d{1,3}): (?:([\d.]{1,9}) GB/s|(<inactive>))\s*$")
_REMOTE = re.compile(r"^\s*Link (\d{1,3}): Remote Device ([0-9a-fA-F:.]{7,20}): Link (\d{1,3})")
_CAPABILITY = re.compile(r"^\s*Link (\d{1,3}), (.{1,60}) supported: (true|false)")
_MIG = re.compile(r"^\s+MIG \S{1,24}\s+Device\s+\d{1,3}:")
_ALL_DOWN = re.compile(r"all links are inActive")


class GpuLinks(msgspec.Struct):
    """What was printed of one GPU. ``mbytes_per_s`` has 0 for a link that is inactive; ``remote``
    counts its links otherwise: without those that are inactive."""

    name: str = ""
    uuid: str = ""
    mbytes_per_s: dict[int, int] = {}
    remote: dict[int, str] = {}
    capable: list[int] = []
    """Links of which capabilities were listed, which says that they are there and no more."""
    all_down: bool = False
    mig: bool = False


def parted(text: str) -> list[tuple[list[str], str]]:
    """Each command with the lines of a text that are its own, and the lines that name GPUs."""
    found: list[tuple[list[str], str]] = []
    for command, patterns in (
        (STATE, (_STATE, _ALL_DOWN)),
        (REMOTE, (_REMOTE,)),
        (CAPABILITIES, (_CAPABILITY,)),
        (LIST, (_MIG,)),
    ):
        own = [line for line in text.split("\n") if any(p.search(line) for p in (_GPU, *patterns))]
        told = any(pattern.search(line) for line in own for pattern in patterns)
        if told or (own and command is LIST and not found):
            found.append((command, "\n".join(own) + "\n"))
    return found


def parse(text: str) -> dict[int | None, GpuLinks]:
    """By GPU number; None stands for a GPU whose line is not there."""
    found: dict[int | None, GpuLinks] = {}
    current: int | None = None
    for line in text.split("\n"):
        line = line[:400]
        gpu = _GPU.match(line)
        if gpu:
            current = int(gpu[1])
            links = found.setdefault(current, GpuLinks())
            links.name = links.name or gpu[2].strip()
            links.uuid = links.uuid or gpu[3] or ""
            continue
        if _MIG.match(line):
            found.setdefault(current, GpuLinks()).mig = True
        elif _ALL_DOWN.search(line):
            found.setdefault(current, GpuLinks()).all_down = True
        elif state := _STATE.match(line):
            speed = 0 if state[3] else _mbytes(state[2])
            if speed is not None:
                links = found.setdefault(current, GpuLinks())
                links.mbytes_per_s = {**links.mbytes_per_s, int(state[1]): speed}
        elif remote := _REMOTE.match(line):
            address = normalise(remote[2])
            if address is not None:
                links = found.setdefault(current, GpuLinks())
                links.remote = {**links.remote, int(remote[1]): address}
        elif capability := _CAPABILITY.match(line):
            links = found.setdefault(current, GpuLinks())
            if int(capability[1]) not in links.capable:
                links.capable = [*links.capable, int(capability[1])]
    return found


def remote_by_link(links: GpuLinks) -> dict[int, str]:
    """The remote end of each link by its number in the state listing.

    ``-R`` counts active links only on some drivers. Where both listings have the same number of
    them, they are in the same order.
    """
    active = [number for number, speed in sorted(links.mbytes_per_s.items()) if speed]
    if not links.mbytes_per_s or set(links.remote) <= set(active):
        return dict(links.remote)
    if len(active) == len(links.remote):
        return dict(zip(active, (address for _, address in sorted(links.remote.items()))))
    return {}


def _mbytes(text: str) -> int | None:
    try:
        speed = round(float(text) * 1000)
    except ValueError:
        return None
    return speed if 0 < speed < 10_000_000 else None
