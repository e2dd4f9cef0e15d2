"""RDMA devices as ``ibstat``, ``ibv_devinfo``, ``rdma link`` and their like print them.

Each tells a part: ibstat rates, ibv_devinfo firmware and GIDs, ibdev2netdev interfaces, ``ls -l
/sys/class/infiniband`` PCI addresses. What several tell is taken from the first of them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Any

import msgspec

from gputopo.facts import Fact, Missing, Problem
from gputopo.host.base import Host
from gputopo.pciaddr import is_address
from gputopo.probes.rdma import EMPTY_GID, Gid, RdmaDevice, RdmaFacts, RdmaPort, natural

IBSTAT = ["ibstat"]
DEVINFO = ["ibv_devinfo"]
DEVICES = ["ibv_devices"]
NETDEVS = ["ibdev2netdev"]
GIDS = ["show_gids"]
RDMA_LINK = ["rdma", "link"]
CLASS = ["ls", "-l", "/sys/class/infiniband"]
TIMEOUT = 5.0

NOT_SHOWN = Missing("absent", "not in this source")

MAX_DEVICES = 4096

STATES = {"INITIALIZING": "INIT", "PORT_INIT": "INIT", "ARMED": "ARMED", "UP": "ACTIVE"}
"""Words for port states that differ from the kernel's; others are the same in capitals."""

PHYSICAL = {
    "LINK_UP": "LinkUp",
    "POLLING": "Polling",
    "DISABLED": "Disabled",
    "SLEEP": "Sleep",
    "PORT_CONFIGURATION_TRAINNING": "PortConfigurationTraining",
    "LINK_ERROR_RECOVERY": "LinkErrorRecovery",
}
"""Physical states in the kernel's words."""

_NAME = r"[\w.-]{1,64}"


class _Device(msgspec.Struct):
    """What is gathered of one device and of its ports: fields of RdmaDevice and RdmaPort."""

    values: dict[str, Any] = {}
    netdevs: list[str] = []
    ports: dict[int, dict[str, Any]] = {}
    gids: dict[int, list[Gid]] = {}

    def tell(self, field: str, value: Any) -> None:
        self.values = {field: value, **self.values}

    def port(self, number: int, field: str | None = None, value: Any = None) -> None:
        told = self.ports.get(number, {})
        self.ports = {**self.ports, number: {**({field: value} if field else {}), **told}}


class _Devices(dict[str, _Device]):
    def named(self, name: str) -> _Device:
        if name not in self and len(self) >= MAX_DEVICES:
            return _Device()
        return self.setdefault(name, _Device())


def printed(host: Host) -> Fact[RdmaFacts]:
    """The devices that any of the outputs names, in natural order; Missing without an output."""
    found = _Devices()
    told = False
    readers: list[tuple[list[str], Callable[[str, _Devices], None]]] = [
        (IBSTAT, _ibstat),
        (DEVINFO, _devinfo),
        (RDMA_LINK, _rdma_link),
        (NETDEVS, _netdevs),
        (GIDS, _show_gids),
        (CLASS, _class),
        (DEVICES, _devices),
    ]
    for command, read in readers:
        output = host.run(command, TIMEOUT)
        if not isinstance(output, Missing):
            told = True
            read(output.stdout, found)
    if not told:
        return NOT_SHOWN
    lost = found.pop("", None)
    problems: list[Problem] = []
    if lost is not None:
        missing = Missing("unparsed", "values of a device whose own line is cut")
        problems.append(Problem("ibv_devinfo", missing))
    devices = [_made(name, found[name]) for name in sorted(found, key=natural)]
    return RdmaFacts(devices=devices, problems=problems)


def _made(name: str, told: _Device) -> RdmaDevice:
    ports = {**{port: {} for port in sorted({*told.ports, *told.gids})}, **told.ports}
    blank = {
        **dict.fromkeys(RdmaPort.__struct_fields__, NOT_SHOWN),
        "counters": {},
    }
    return RdmaDevice(
        **{
            **dict.fromkeys(RdmaDevice.__struct_fields__, NOT_SHOWN),
            **told.values,
            "name": name,
            "software": False,
            "netdevs": list(dict.fromkeys(told.netdevs)),
            "ports": [
                RdmaPort(**{**blank, **port, "port": number, "gids": told.gids.get(number, [])})
                for number, port in ports.items()
            ],
        }
    )


def _state(word: str) -> str:
    upper = word.strip().upper()
    return STATES.get(upper, upper.removeprefix("PORT_"))


def _physical(word: str) -> str:
    return PHYSICAL.get(word.strip().upper(), word.strip())


# ibstat

_CA = re.compile(rf"\s*CA '({_NAME})'")
_PORT = re.compile(r"\s*Port (\d{1,3}):\s*$")
_KEY = re.compile(r"\s*([A-Za-z][\w ]{1,40}?):\s+(\S.{0,100}?)\s*$")

_CA_FIELDS = {
    "CA type": "hca_type",
    "Firmware version": "firmware",
    "Node GUID": "node_guid",
    "System image GUID": "system_image_guid",
}


def _ibstat(text: str, found: _Devices) -> None:
    """By keys alone: a mail may have lost all indentation."""
    device: _Device | None = None
    port = 0
    for line in text.split("\n"):
        line = line[:300]
        if head := _CA.match(line):
            device, port = found.named(head[1]), 0
        elif device is None:
            continue
        elif head := _PORT.match(line):
            port = int(head[1])
            device.port(port)
        elif pair := _KEY.match(line):
            key, value = pair[1], pair[2]
            if port == 0 and key in _CA_FIELDS:
                told = _guid(value) if key.endswith("GUID") else value
                device.tell(_CA_FIELDS[key], told)
            elif port:
                _ibstat_port(device, port, key, value)


def _ibstat_port(device: _Device, port: int, key: str, value: str) -> None:
    if key == "State":
        device.port(port, "state", _state(value))
    elif key == "Physical state":
        device.port(port, "physical_state", _physical(value))
    elif key == "Link layer":
        device.port(port, "link_layer", value)
    elif key == "Base lid" and value.isdigit():
        device.port(port, "lid", f"0x{int(value[:9]):x}")
    elif key == "Rate" and re.fullmatch(r"\d{1,5}(?:\.\d{1,3})?", value):
        device.port(port, "rate_gbps", float(value))
        device.port(port, "rate_text", f"{value} Gb/sec")


def _guid(text: str) -> str:
    """``0200:c0ff:0000:0001`` of ``0x0200c0ff00000001``."""
    digits = text.strip().lower().removeprefix("0x").replace(":", "")
    return ":".join(digits[i : i + 4] for i in range(0, len(digits), 4))[:19]


# ibv_devinfo, ibv_devices

_HCA = re.compile(rf"\bhca_id:\s*({_NAME})")
_ENTRY = re.compile(r"\s*([a-z_]{3,24}):\s*(\S.{0,100}?)\s*$")
_GID = re.compile(
    r"\s*GID\[\s*(\d{1,4})\]:\s*([0-9a-fA-F:.]{2,45})(?:,\s*(RoCE v[12](?:\.\d)?|IB))?"
)

_HCA_FIELDS = {
    "fw_ver": "firmware",
    "node_guid": "node_guid",
    "sys_image_guid": "system_image_guid",
    "board_id": "board_id",
}


def _devinfo(text: str, found: _Devices) -> None:
    name, port = "", 1
    vendor = ""
    for line in text.split("\n"):
        line = line[:300]
        if head := _HCA.search(line):
            name, port, vendor = head[1], 0, ""
            found.named(name)
            continue
        gid = _GID.match(line)
        if gid:
            _keep_gid(found.named(name), port or 1, int(gid[1]), gid[2], gid[3])
            continue
        entry = _ENTRY.match(line)
        if entry is None:
            continue
        key, value = entry[1], entry[2]
        device = found.named(name)
        if key == "port" and value.isdigit():
            port = int(value[:3])
            device.port(port)
        elif key == "vendor_id":
            vendor = value.lower()
        elif key == "vendor_part_id" and vendor == "0x02c9" and value.isdigit():
            device.tell("hca_type", f"MT{value[:8]}")
        elif key == "transport":
            device.tell("node_type", "RNIC" if value.startswith("iWARP") else "CA")
        elif port == 0 and key in _HCA_FIELDS:
            device.tell(_HCA_FIELDS[key], value)
        elif port:
            word = value.partition(" (")[0]
            if key == "state":
                device.port(port, "state", _state(word))
            elif key == "phys_state":
                device.port(port, "physical_state", _physical(word))
            elif key == "link_layer":
                device.port(port, "link_layer", word)


def _keep_gid(
    device: _Device, port: int, index: int, text: str, kind: str | None, netdev: str | None = None
) -> None:
    """A GID in the kernel's form: eight groups, whatever short form a tool prints."""
    try:
        gid = ipaddress.IPv6Address(text).exploded
    except ValueError:
        return
    told = device.gids.get(port, [])
    if gid == EMPTY_GID or len(told) >= 1024 or any(other.index == index for other in told):
        return
    types = {"v1": "IB/RoCE v1", "v2": "RoCE v2", "RoCE v1": "IB/RoCE v1", "IB": "IB/RoCE v1"}
    word = types.get(kind or "", kind or "")
    entry = Gid(index=index, gid=gid, type=word or NOT_SHOWN, netdev=netdev or NOT_SHOWN)
    device.gids = {**device.gids, port: [*told, entry]}


_DEVICE_ROW = re.compile(rf"\s*({_NAME})\s+([0-9a-f]{{16}})\s*$")


def _devices(text: str, found: _Devices) -> None:
    for line in text.split("\n"):
        row = _DEVICE_ROW.match(line[:300])
        if row:
            found.named(row[1]).tell("node_guid", _guid(row[2]))


# ibdev2netdev, rdma link, show_gids, ls

_NETDEV = re.compile(rf"\s*({_NAME}) port (\d{{1,3}}) ==> (\S{{1,64}}) \((Up|Down)\)")
_LINK = re.compile(rf"\s*(?:\d{{1,3}}: )?link ({_NAME})/(\d{{1,3}}) (.{{1,400}})")
_GID_ROW = re.compile(
    rf"\s*({_NAME})\s+(\d{{1,3}})\s+(\d{{1,4}})\s+([0-9a-fA-F:]{{39}})"
    r"(?:\s+[\d.]{7,15})?\s+(v[12])(?:\s+(\S{1,64}))?\s*$"
)
_CLASS_LINK = re.compile(rf"({_NAME}) -> (\S{{1,400}})/infiniband/({_NAME})\s*$")


def _netdevs(text: str, found: _Devices) -> None:
    for line in text.split("\n"):
        row = _NETDEV.match(line[:300])
        if row:
            device = found.named(row[1])
            device.netdevs = [*device.netdevs, row[3]]
            device.port(int(row[2]), "state", _state(row[4]))


def _rdma_link(text: str, found: _Devices) -> None:
    for line in text.split("\n"):
        row = _LINK.match(line[:500])
        if row is None:
            continue
        words = row[3].split()
        pairs = dict(zip(words[::2], words[1::2]))
        device, port = found.named(row[1]), int(row[2])
        device.port(port)
        if "state" in pairs:
            device.port(port, "state", _state(pairs["state"]))
        if "physical_state" in pairs:
            device.port(port, "physical_state", _physical(pairs["physical_state"]))
        if "netdev" in pairs:
            device.netdevs = [*device.netdevs, pairs["netdev"]]
        if "subnet_prefix" in pairs:  # only InfiniBand has subnets
            device.port(port, "link_layer", "InfiniBand")
        if pairs.get("lid", "").isdigit():
            device.port(port, "lid", f"0x{int(pairs['lid'][:9]):x}")


def _show_gids(text: str, found: _Devices) -> None:
    for line in text.split("\n"):
        row = _GID_ROW.match(line[:300])
        if row:
            _keep_gid(found.named(row[1]), int(row[2]), int(row[3]), row[4], row[5], row[6])


def _class(text: str, found: _Devices) -> None:
    """The links of the class: the last PCI address on the way is the device's function."""
    for line in text.split("\n"):
        row = _CLASS_LINK.search(line[:600])
        if row is None or row[1] != row[3]:
            continue
        device = found.named(row[1])
        address = next((part for part in reversed(row[2].split("/")) if is_address(part)), None)
        if address is not None:
            device.tell("pci", address)
        elif "/virtual/" in row[2]:
            device.tell("pci", Missing("absent", "a software device, no PCI function"))
