"""Network interfaces and NVMe drives with a PCI function, from sysfs."""

from __future__ import annotations

import msgspec

from gputopo.facts import Fact, Missing, Problem
from gputopo.host.base import Host
from gputopo.probes.rdma import natural
from gputopo.probes.read import base_name, integer, pci_parent

NET = "/sys/class/net"
NVME = "/sys/class/nvme"


class NetDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One interface of a PCI function. ``speed_mbps`` is Mb/s, missing while the link is down."""

    name: str
    pci: str
    state: Fact[str]
    speed_mbps: Fact[int]
    mtu: Fact[int]
    bond: str | None
    default_route: bool


class NvmeDrive(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pci: Fact[str]
    model: Fact[str]
    state: Fact[str]


class NetFacts(msgspec.Struct, frozen=True, kw_only=True):
    interfaces: list[NetDevice]
    drives: list[NvmeDrive]
    default_routes: list[str]
    """Interfaces with an IPv4 default route; a bond's members carry it too (``bond``)."""
    problems: list[Problem]


def probe(host: Host) -> Fact[NetFacts]:
    """Interfaces and drives in natural order; Missing when sysfs has neither class."""
    names = host.list_dir(NET)
    drives = host.list_dir(NVME)
    if isinstance(names, Missing) and isinstance(drives, Missing):
        return names
    routes = _default_routes(host.read_text("/proc/net/route"))
    interfaces: list[NetDevice] = []
    for name in sorted(names if isinstance(names, list) else [], key=natural):
        pci = pci_parent(host, f"{NET}/{name}")
        if isinstance(pci, str):
            interfaces.append(_interface(host, name, pci, routes))
    return NetFacts(
        interfaces=interfaces,
        drives=[
            _drive(host, name)
            for name in sorted(drives if isinstance(drives, list) else [], key=natural)
        ],
        default_routes=routes,
        problems=[],
    )


def _interface(host: Host, name: str, pci: str, routes: list[str]) -> NetDevice:
    place = f"{NET}/{name}"
    bond = base_name(host.read_link(f"{place}/master"))
    speed = integer(host.read_text(f"{place}/speed"))
    if isinstance(speed, int) and speed <= 0:
        speed = Missing("unsupported", f"the kernel says {speed}")
    state = host.read_text(f"{place}/operstate")
    return NetDevice(
        name=name,
        pci=pci,
        state=state if isinstance(state, Missing) else state.strip(),
        speed_mbps=speed,
        mtu=integer(host.read_text(f"{place}/mtu")),
        bond=bond if isinstance(bond, str) else None,
        default_route=name in routes or (isinstance(bond, str) and bond in routes),
    )


def _drive(host: Host, name: str) -> NvmeDrive:
    place = f"{NVME}/{name}"
    model = host.read_text(f"{place}/model")
    state = host.read_text(f"{place}/state")
    return NvmeDrive(
        name=name,
        pci=pci_parent(host, place),
        model=model if isinstance(model, Missing) else model.strip(),
        state=state if isinstance(state, Missing) else state.strip(),
    )


def _default_routes(table: Fact[str]) -> list[str]:
    """Interfaces of /proc/net/route whose destination and mask are 0."""
    found: list[str] = []
    for line in (table.splitlines() if isinstance(table, str) else [])[1:]:
        cells = line.split()
        if len(cells) > 7 and cells[1] == "00000000" and cells[7] == "00000000":
            found.append(cells[0])
    return found
