"""The PCIe links between GPUs, HCAs and their root complexes: what the PCI rules compare.

A link is told by its lower end. Ports with nothing but drives or management devices below are not
among them: those run slower by design and carry no GPU's traffic.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from gputopo.facts import known
from gputopo.hardware.pcie import SPEEDS, gbytes_per_s
from gputopo.probes.pci import DEVICES
from gputopo.rules.common import is_virtual, listed
from gputopo.rules.finding import Skip
from gputopo.topology.graph import Topology
from gputopo.topology.model import Gpu, Hca, PciBridge, Pcie

PASSED_ON = "what a virtual machine shows of ports and IOMMU is its hypervisor's story"
"""Why a rule about what is above a device has no answer in a virtual machine."""

PORTS = ("root-port", "downstream-port")
"""Roles of a bridge whose own link is the one below it."""

GPU_FASTEST = SPEEDS[5]
"""GT/s that a GPU is expected to be given: Blackwell names 64, yet as of 2026 no GPU is attached so
(stas00/ml-engineering, network)."""

FILES = {
    "speed_gts": "current_link_speed",
    "width": "current_link_width",
    "device_max_speed_gts": "max_link_speed",
    "device_max_width": "max_link_width",
}

End: TypeAlias = Gpu | Hca | PciBridge


class UsedLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link on the way of GPUs or HCAs to the CPU: its lower end (of a card with several functions
    the first), what it trained to, and whose traffic takes it."""

    end: End
    pcie: Pcie | None
    users: tuple[str, ...]

    @property
    def subjects(self) -> list[str]:
        """The lower end, if it is a bridge, and the devices that use it."""
        return [*([self.end.id] if isinstance(self.end, PciBridge) else []), *self.users]

    @property
    def what(self) -> str:
        """``gpu4``, or ``switch 0000:17:00.0 (above gpu0, mlx5_0)``."""
        if isinstance(self.end, PciBridge):
            return f"switch {self.end.id} (above {listed(self.users)})"
        return listed(self.users)

    @property
    def ceiling(self) -> float | None:
        """Theoretical GB/s of what both ends can do."""
        if self.pcie is None or self.pcie.max_speed_gts is None or self.pcie.max_width is None:
            return None
        return gbytes_per_s(self.pcie.max_speed_gts, self.pcie.max_width)

    def source(self, field: str) -> str:
        """Where a value of this end was read."""
        other = self.end.sources.get(f"pcie.{field}")
        return other or f"{DEVICES}/{self.end.pci}/{FILES[field]}"


class Untold(dict[str, list[str]]):
    """Devices of which a rule can say nothing, by reason: what it cannot tell is not fine."""

    def add(self, reason: str, ids: Iterable[str]) -> None:
        told = self.setdefault(reason, [])
        told.extend(item for item in ids if item not in told)

    def raise_skip(self) -> None:
        """Raises Skip with all of them, if there are any. Verdicts yielded before it stand."""
        if self:
            raise Skip("; ".join(f"{listed(ids)}: {reason}" for reason, ids in self.items()))


def used_links(topology: Topology) -> list[UsedLink]:
    """Each link once, those of the devices before those of the switches above them."""
    ends: dict[str, End] = {}
    users: dict[str, list[str]] = {}
    above: dict[str, list[str]] = {}
    devices: list[Gpu | Hca] = [*topology.gpus, *topology.physical_hcas]
    for device in devices:
        if isinstance(device, Hca) and device.physical_function is not None:
            continue  # a virtual function has no link of its own
        key = f"{device.parent} {device.pci.rpartition('.')[0]}" if device.pci else device.id
        ends.setdefault(key, device)
        users.setdefault(key, []).append(device.id)
        for bridge in topology.bridges_above(device.id):
            if bridge.role not in PORTS and _is_whole(topology, bridge):
                ends.setdefault(bridge.id, bridge)
                above.setdefault(bridge.id, []).append(device.id)
    return [
        UsedLink(end=ends[key], pcie=ends[key].pcie, users=tuple(ids))
        for key, ids in (*users.items(), *above.items())
    ]


def _is_whole(topology: Topology, bridge: PciBridge) -> bool:
    """Whether a bridge is what it is taken for: a role told by the place in the tree holds only
    where all bridges above could be read."""
    pci = known(topology.facts.pci)
    if "role" not in bridge.sources or pci is None:
        return True
    functions = {function.address: function for function in pci.functions}
    own = functions.get(bridge.pci or "")
    return own is None or all(address in functions for address in own.parents)


def alike(link: UsedLink, links: Iterable[UsedLink]) -> list[UsedLink]:
    """The other links with the same part at the lower end, made for the same speed and width."""
    part = _part(link)
    return [other for other in links if other is not link and _part(other) == part]


def _part(link: UsedLink) -> tuple[object, ...]:
    end, pcie = link.end, link.pcie
    part = (end.vendor, end.device) if end.device is not None else (None, end.name or end.id)
    most = (pcie.device_max_speed_gts, pcie.device_max_width) if pcie else (None, None)
    return (type(end), *part, *most)


def port_is_real(pcie: Pcie, virtual: bool) -> bool:
    """Whether what the port above claims can be believed: one that can do less than what its link
    runs at is made up, and so may be all ports of a virtual machine."""
    lanes = pcie.port_max_width is None or (pcie.width or 0) <= pcie.port_max_width
    speed = pcie.port_max_speed_gts is None or (pcie.speed_gts or 0) <= pcie.port_max_speed_gts
    return not virtual and lanes and speed


class Reduced(msgspec.Struct, frozen=True, kw_only=True):
    """A link that trained to less than it can do, in lanes or in GT/s. ``better`` are links alike
    that have more."""

    link: UsedLink
    pcie: Pcie
    now: float
    should: float
    better: list[UsedLink]


def narrow_links(topology: Topology) -> tuple[list[Reduced], Untold]:
    """Links that trained to fewer lanes than both ends have, and those of which nobody can tell."""
    return _reduced(topology, used_links(topology), "width", "x{:g}")


def slow_links(topology: Topology) -> tuple[list[Reduced], Untold]:
    """Links that run at less than the speed of both ends. What is too narrow is left out."""
    taken = {found.link.end.id for found in narrow_links(topology)[0]}
    links = [link for link in used_links(topology) if link.end.id not in taken]
    return _reduced(topology, links, "speed_gts", "{:g} GT/s")


def _reduced(
    topology: Topology, links: list[UsedLink], field: str, form: str
) -> tuple[list[Reduced], Untold]:
    virtual = is_virtual(topology)
    found: list[Reduced] = []
    untold = Untold()
    for link in links:
        pcie, now = link.pcie, _value(link, field)
        if pcie is None or now is None:
            if not isinstance(link.end, PciBridge):
                untold.add(f"the {field.partition('_')[0]} of its link cannot be read", link.users)
            continue
        better = [other for other in alike(link, links) if (_value(other, field) or 0) > now]
        should: float | None = (
            getattr(pcie, f"max_{field}") if port_is_real(pcie, virtual) else None
        )
        if should is None and better:
            should = max(_value(other, field) or 0 for other in better)
        wish: float | None = getattr(pcie, f"device_max_{field}")
        if should is not None:
            if now < should:
                found.append(Reduced(link=link, pcie=pcie, now=now, should=should, better=better))
        elif wish is None or now < wish:
            of = f" of {form.format(wish)}" if wish is not None else ""
            untold.add(f"{form.format(now)}{of}, and the real port above is hidden", link.users)
    return found, untold


def _value(link: UsedLink, field: str) -> float | None:
    value: float | None = getattr(link.pcie, field, None)
    return value


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """What a device could take (``wish``) and what the way to its root complex gives it (``gets``),
    theoretical GB/s; ``at`` is the narrowest link, ``lanes`` whether it has too few of those."""

    link: UsedLink
    wish: float
    gets: float
    at: UsedLink
    lanes: bool


def ways(topology: Topology) -> tuple[list[Way], Untold]:
    """The way of each device whose links are as they should be: too narrow ones are left out."""
    links = used_links(topology)
    taken = {name for found in narrow_links(topology)[0] for name in found.link.subjects}
    by_end = {link.end.id: link for link in links}
    found: list[Way] = []
    untold = Untold()
    for link in links:
        pcie = link.pcie
        if isinstance(link.end, PciBridge) or pcie is None or taken & set(link.users):
            continue
        speed, width = pcie.device_max_speed_gts, pcie.device_max_width
        if speed is None or width is None:
            untold.add("what the device itself can do cannot be read", link.users)
            continue
        if link.ceiling is None or not port_is_real(pcie, virtual=False):
            untold.add("the real port above is hidden", link.users)
            continue
        if isinstance(link.end, Gpu):
            speed = min(speed, GPU_FASTEST)
        way = [link, *(by_end[b.id] for b in topology.bridges_above(link.end.id) if b.id in by_end)]
        at = min((step for step in way if step.ceiling is not None), key=lambda s: s.ceiling or 0)
        wish = gbytes_per_s(speed, width)
        assert at.ceiling is not None and at.pcie is not None
        found.append(
            Way(
                link=link,
                wish=wish,
                gets=min(wish, at.ceiling),
                at=at,
                lanes=(at.pcie.max_width or width) < width,
            )
        )
    return found, untold


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """An uplink that carries less than what is below it could send: ``wanted`` and the uplink's own
    figure are theoretical GB/s."""

    uplink: UsedLink
    below: list[UsedLink]
    wanted: float
    carries: float


def shared_uplinks(topology: Topology) -> list[Shared]:
    """Uplinks of two GPUs or more, or of HCAs and no GPU, that are narrower than these.

    A GPU and its own HCA behind one uplink are no case: their traffic turns round in the switch. Of
    switches in series the one with the worst share counts.
    """
    links = used_links(topology)
    cards = [link for link in links if not isinstance(link.end, PciBridge)]
    found: list[Shared] = []
    for uplink in links:
        if not isinstance(uplink.end, PciBridge) or uplink.ceiling is None:
            continue
        below = [card for card in cards if card.end.id in uplink.users]
        gpus = [card for card in below if isinstance(card.end, Gpu)]
        wants = [card.ceiling for card in gpus] if gpus else [_rate(topology, c) for c in below]
        wanted = sum(want for want in wants if want is not None)
        if len(wants) > 1 and None not in wants and wanted > 1.01 * uplink.ceiling:
            share = Shared(
                uplink=uplink, below=gpus or below, wanted=wanted, carries=uplink.ceiling
            )
            found.append(share)
    found.sort(key=lambda s: (-s.wanted / s.carries, -len(s.below)))
    kept: list[Shared] = []
    for share in found:
        ids = {card.end.id for card in share.below}
        if not any(ids & {card.end.id for card in other.below} for other in kept):
            kept.append(share)
    return sorted(kept, key=lambda share: cards.index(share.below[0]))


def _rate(topology: Topology, link: UsedLink) -> float | None:
    gbits = active_gbps(topology, link)
    return gbits / 8 if gbits else None


def active_gbps(topology: Topology, link: UsedLink) -> float | None:
    """Gb/s of all active ports of an HCA's card together; None where none is active or tells."""
    rates = [
        port.rate_gbps
        for hca in topology.physical_hcas
        if hca.id in link.users
        for port in hca.ports
        if port.state == "ACTIVE" and port.rate_gbps is not None
    ]
    return sum(rates) if rates else None
