"""RDMA devices: HCAs and their ports, from /sys/class/infiniband."""

from __future__ import annotations

import re

import msgspec

from gputopo.facts import Fact, Missing, Problem
from gputopo.host.base import Host
from gputopo.probes.read import integer, is_virtual, pci_parent

DEVICES = "/sys/class/infiniband"

GID_SLOTS = 16
"""GID table slots read of a port: link-local, RoCE v1 and v2, IPv4 and IPv6 of one interface and a
few VLANs fit; a software device has 1,024 of them."""

COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "port_xmit_discards",
)

EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


class Gid(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    gid: str
    type: Fact[str]
    netdev: Fact[str]


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True):
    """One port. ``rate_gbps`` is Gb/s on the wire; a port that is down reports its lowest rate."""

    port: int
    state: Fact[str]
    physical_state: Fact[str]
    link_layer: Fact[str]
    rate_gbps: Fact[float]
    rate_text: Fact[str]
    lid: Fact[str]
    gids: list[Gid]
    counters: dict[str, int]


class RdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One RDMA device. A software device (rxe, siw) stands on an interface and has no ``pci``."""

    name: str
    pci: Fact[str]
    software: bool
    firmware: Fact[str]
    board_id: Fact[str]
    hca_type: Fact[str]
    node_type: Fact[str]
    node_guid: Fact[str]
    system_image_guid: Fact[str]
    netdevs: list[str]
    ports: list[RdmaPort]


class RdmaFacts(msgspec.Struct, frozen=True, kw_only=True):
    devices: list[RdmaDevice]
    problems: list[Problem]


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts ``mlx5_10`` after ``mlx5_9``."""
    return [(1, int(p), "") if p.isdigit() else (0, 0, p) for p in re.split(r"(\d{1,18})", name)]


def probe(host: Host) -> Fact[RdmaFacts]:
    """All RDMA devices in natural order of their names.

    A kernel without the subsystem has none, which is known and not missing; missing is only what
    could not be looked at.
    """
    names = host.list_dir(DEVICES)
    if isinstance(names, Missing):
        classes = host.list_dir(DEVICES.rpartition("/")[0])
        if names.reason != "absent":
            return names
        if isinstance(classes, Missing) or not classes:
            return Missing("absent", "no /sys/class to look in")
        names = []
    devices = [_device(host, name) for name in sorted(names, key=natural)]
    problems = [
        Problem(f"{DEVICES}/{device.name}/ports/{port.port}/state", port.state)
        for device in devices
        for port in device.ports
        if isinstance(port.state, Missing)
    ]
    return RdmaFacts(devices=devices, problems=problems)


def _device(host: Host, name: str) -> RdmaDevice:
    place = f"{DEVICES}/{name}"

    def read(file: str) -> Fact[str]:
        text = host.read_text(f"{place}/{file}")
        return text if isinstance(text, Missing) else text.strip()

    ports = host.list_dir(f"{place}/ports")
    netdevs = host.list_dir(f"{place}/device/net")
    return RdmaDevice(
        name=name,
        pci=pci_parent(host, place),
        software=is_virtual(host, place),
        firmware=read("fw_ver"),
        board_id=read("board_id"),
        hca_type=read("hca_type"),
        node_type=_after_colon(read("node_type")),
        node_guid=read("node_guid"),
        system_image_guid=read("sys_image_guid"),
        netdevs=netdevs if isinstance(netdevs, list) else [],
        ports=[
            _port(host, f"{place}/ports/{port}", int(port))
            for port in sorted(ports if isinstance(ports, list) else [], key=natural)
            if port.isdigit()
        ],
    )


def _port(host: Host, place: str, number: int) -> RdmaPort:
    rate = host.read_text(f"{place}/rate")
    return RdmaPort(
        port=number,
        state=_after_colon(host.read_text(f"{place}/state")),
        physical_state=_after_colon(host.read_text(f"{place}/phys_state")),
        link_layer=_stripped(host.read_text(f"{place}/link_layer")),
        rate_gbps=_rate(rate),
        rate_text=_stripped(rate),
        lid=_stripped(host.read_text(f"{place}/lid")),
        gids=_gids(host, place),
        counters=_counters(host, place),
    )


def _gids(host: Host, place: str) -> list[Gid]:
    found: list[Gid] = []
    for index in range(GID_SLOTS):
        gid = host.read_text(f"{place}/gids/{index}")
        if isinstance(gid, Missing):
            break
        if gid.strip() == EMPTY_GID:
            continue
        found.append(
            Gid(
                index=index,
                gid=gid.strip(),
                type=_stripped(host.read_text(f"{place}/gid_attrs/types/{index}")),
                netdev=_stripped(host.read_text(f"{place}/gid_attrs/ndevs/{index}")),
            )
        )
    return found


def _counters(host: Host, place: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in COUNTERS:
        value = integer(host.read_text(f"{place}/counters/{name}"))
        if isinstance(value, int):
            found[name] = value
    return found


def _after_colon(text: Fact[str]) -> Fact[str]:
    """``ACTIVE`` of ``4: ACTIVE``."""
    return text if isinstance(text, Missing) else text.rpartition(":")[2].strip()


def _stripped(text: Fact[str]) -> Fact[str]:
    return text if isinstance(text, Missing) else text.strip()


def _rate(text: Fact[str]) -> Fact[float]:
    """Gb/s of ``400 Gb/sec (4X NDR)``."""
    if isinstance(text, Missing):
        return text
    match = re.match(r"\s*(\d{1,5}(?:\.\d{1,3})?) Gb/sec", text)
    return float(match[1]) if match else Missing("unparsed", f"not a rate: {text[:40]!r}")
