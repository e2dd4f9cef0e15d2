"""``lspci -vv`` and ``lspci -tv`` as they are pasted: the same facts as sysfs, where there is none.

The tree follows from the bus numbers that each bridge names (``secondary=17``), or from the picture
that ``-t`` draws. A paste of a few devices has neither; then their places are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from gputopo.facts import ABSENT, Fact, Missing, Problem
from gputopo.hardware.names import DEVICES as KNOWN_DEVICES
from gputopo.host.base import Host
from gputopo.pciaddr import normalise, sort_key
from gputopo.probes.pci import (
    ACS_BITS,
    CLASS_BRIDGE,
    LinkEnd,
    PciFacts,
    PciFunction,
    is_wanted,
)

COMMAND = ["lspci", "-vvv"]
TREE = ["lspci", "-tv"]
TIMEOUT = 10.0

NOT_SHOWN = Missing("absent", "not in this listing")

CLASSES = {
    "Host bridge": 0x0600,
    "ISA bridge": 0x0601,
    "PCI bridge": 0x0604,
    "Bridge": 0x0680,
    "VGA compatible controller": 0x0300,
    "3D controller": 0x0302,
    "Display controller": 0x0380,
    "Ethernet controller": 0x0200,
    "Infiniband controller": 0x0207,
    "InfiniBand controller": 0x0207,
    "Fabric controller": 0x0208,
    "Network controller": 0x0280,
    "Non-Volatile memory controller": 0x0108,
    "SATA controller": 0x0106,
    "RAID bus controller": 0x0104,
    "Serial Attached SCSI controller": 0x0107,
    "Audio device": 0x0403,
    "USB controller": 0x0C03,
    "SMBus": 0x0C05,
    "System peripheral": 0x0880,
    "Processing accelerators": 0x1200,
}
"""Classes and subclasses by their names in the PCI ID database; others are of no interest here."""

CLASS_HOST_BRIDGE = 0x0600

UNNAMED = 0xFF00
"""Unassigned class, for names that are not above."""

VENDORS = {
    "NVIDIA ": 0x10DE,
    "Mellanox ": 0x15B3,
    "Intel ": 0x8086,
    "Advanced Micro Devices, Inc. [AMD/ATI]": 0x1002,
    "Advanced Micro Devices, Inc. [AMD]": 0x1022,
    "Broadcom / LSI": 0x1000,
    "LSI Logic": 0x1000,
    "Broadcom ": 0x14E4,
    "PLX Technology": 0x10B5,
    "PMC-Sierra": 0x11F8,
    "Microsemi": 0x11F8,
    "Microsoft ": 0x1414,
    "Amazon.com": 0x1D0F,
    "Samsung ": 0x144D,
    "Micron ": 0x1344,
    "ASMedia ": 0x1B21,
    "ASPEED ": 0x1A03,
    "Red Hat": 0x1AF4,
    "Virtio": 0x1AF4,
}
"""Vendors by the beginning of their names in the PCI ID database."""

_PORTS = {
    "Root Port": "root-port",
    "Upstream Port": "upstream-port",
    "Downstream Port": "downstream-port",
    "Root Complex Integrated Endpoint": "integrated-endpoint",
    "Root Complex Event Collector": "event-collector",
    "Legacy Endpoint": "legacy-endpoint",
    "Endpoint": "endpoint",
    "to PCI/PCI-X Bridge": "pcie-to-pci-bridge",
    "PCI/PCI-X to PCI-Express Bridge": "pci-to-pcie-bridge",
}

ON_ROOT_BUS = ("root-port", "integrated-endpoint", "event-collector")
"""Kinds of function that stand on the bus of a root complex and nowhere else."""

_TITLE = re.compile(
    r"\s*((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]) "
    r"([^:\[]{2,60}?)(?: \[([0-9a-f]{4})\])?: (.{1,400})"
)
_NUMBERS = re.compile(r"\[([0-9a-f]{4}):([0-9a-f]{4})\]")
_TAIL = re.compile(r"(?: \(rev [0-9a-f]{2}\))?(?: \(prog-if [0-9a-f]{2}[^)]{0,60}\)?)?\s*$")
_PROGRAMMING = re.compile(r"\(prog-if ([0-9a-f]{2})")
_DEVICE = re.compile(r"\bDevice ([0-9a-f]{4})\b")
_LINK = (
    r"\s+(?:Port #\d{1,3},\s+)?Speed\s+(unknown|[\d.]{1,5}\s?GT/s)[^,]{0,30},\s+Width\s+x(\d{1,3})"
)
_ABLE = re.compile(rf"\bLnkCap:{_LINK}")
_TRAINED = re.compile(rf"\bLnkSta:{_LINK}")
_NODE = re.compile(r"\bNUMA node: (\d{1,5})")
_BUSES = re.compile(r"\bsecondary=([0-9a-f]{2}), subordinate=([0-9a-f]{2})")
_EXPRESS = re.compile(
    r"\] Express (?:\(v\d\) )?([A-Za-z][\w/ -]{2,60}?)(?: \(Slot[+-]\))?(?:,|\n|$)"
)
_ACS = re.compile(r"\bACSCtl:\s+((?:[A-Za-z]{5,12}[+-]\s?){1,8})")
_DRIVER = re.compile(r"\bKernel driver in use: ([\w-]{1,64})")
_GROUP = re.compile(r"\bIOMMU group: (\d{1,5})")
_VIRTUAL = re.compile(r"\bNumber of VFs: (\d{1,5})")

MAX_FUNCTIONS = 65_536


class _Listed(msgspec.Struct):
    """One function of the listing: the words of its title line, and the text below it."""

    address: str
    class_code: int
    vendor: int | None
    device: int | None
    product: str
    text: str = ""
    secondary: int | None = None
    port_type: str | None = None

    @property
    def bus(self) -> tuple[int, int]:
        domain, bus, _, _ = sort_key(self.address)
        return domain, bus


def printed(host: Host) -> Fact[PciFacts]:
    """The PCI functions of a listing, with their places where it shows them."""
    output = host.run(COMMAND, TIMEOUT)
    drawn = host.run(TREE, TIMEOUT)
    if isinstance(output, Missing) and isinstance(drawn, Missing):
        return output
    listed = {} if isinstance(output, Missing) else parse(output.stdout)
    tree = {} if isinstance(drawn, Missing) else parse_tree(drawn.stdout)
    if not listed and not tree:
        return Missing("unparsed", "no function with its address in the output of lspci")
    return _Listing({**tree, **_joined(listed, tree)}, drawn=bool(tree)).facts()


def _joined(listed: dict[str, _Listed], tree: dict[str, _Listed]) -> dict[str, _Listed]:
    """What is listed, with the buses behind bridges from the picture where only that has them."""
    for address, function in listed.items():
        if function.secondary is None and address in tree:
            function.secondary = tree[address].secondary
    return listed


def parse(text: str) -> dict[str, _Listed]:
    """The functions by address; one that is listed twice has the text of both."""
    found: dict[str, _Listed] = {}
    current: _Listed | None = None
    lines: list[str] = []

    def close() -> None:
        if current is not None:
            current.text += "\n".join(lines) + "\n"
        lines.clear()

    for line in text.split("\n"):
        match = _TITLE.match(line[:600])
        address = normalise(match[1]) if match else None
        if match is None or address is None:
            lines.append(line[:1000])
            continue
        close()
        if address not in found and len(found) >= MAX_FUNCTIONS:
            break
        current = found.setdefault(address, _titled(address, match))
    close()
    for function in found.values():
        buses = _BUSES.search(function.text)
        function.secondary = int(buses[1], 16) if buses else None
        express = _EXPRESS.search(function.text)
        function.port_type = _port_type(express[1]) if express else None
    return found


def _titled(address: str, match: re.Match[str]) -> _Listed:
    class_name, class_number, title = match[2], match[3], match[4]
    programming = _PROGRAMMING.search(title)
    title = _TAIL.sub("", title)
    numbers = _NUMBERS.search(title)
    base = int(class_number, 16) if class_number else CLASSES.get(class_name.strip(), UNNAMED)
    vendor = _vendor(title)
    device = _device(vendor, title)
    if numbers:
        vendor, device = int(numbers[1], 16), int(numbers[2], 16)
        title = title[: numbers.start()].strip()
    return _Listed(
        address=address,
        class_code=base << 8 | (int(programming[1], 16) if programming else 0),
        vendor=vendor,
        device=device,
        product=title,
    )


def _vendor(title: str) -> int | None:
    return next((number for name, number in VENDORS.items() if title.startswith(name)), None)


def _device(vendor: int | None, title: str) -> int | None:
    """The device number: lspci prints it where it has no name; a known name gives it back."""
    match = _DEVICE.search(title)
    if match:
        return int(match[1], 16)
    names = re.findall(r"\[([^\]]{2,60})\]", title)
    same = [
        number
        for (maker, number), name in KNOWN_DEVICES.items()
        if maker == vendor and name in names
    ]
    return same[0] if len(same) == 1 else None


def _product(title: str) -> str | None:
    """The name of a product without its maker's; None where lspci has none for it."""
    named = re.findall(r"\[([^\]]{2,60})\]", title)
    maker = next((name for name in VENDORS if title.startswith(name)), "")
    if _DEVICE.search(title) or not maker:
        return None
    return str(named[-1]) if named else title.removeprefix(maker).strip() or None


def _port_type(words: str) -> str | None:
    return next((kind for name, kind in _PORTS.items() if name in words), None)


class _Listing:
    """The functions of one listing, joined to a tree."""

    def __init__(self, listed: dict[str, _Listed], drawn: bool) -> None:
        self.listed = listed
        self.above = {
            (function.bus[0], function.secondary): function
            for function in listed.values()
            if function.secondary
        }
        bridges = [f for f in listed.values() if f.class_code >> 8 == CLASS_BRIDGE]
        self.whole = drawn or (
            any(f.class_code >> 8 == CLASS_HOST_BRIDGE for f in listed.values())
            and all(bridge.secondary is not None for bridge in bridges)
        )
        """Whether the whole machine is here: with its host bridges, and what is behind bridges."""
        self.root_buses = {
            function.bus
            for function in listed.values()
            if function.port_type in ON_ROOT_BUS or function.class_code >> 8 == CLASS_HOST_BRIDGE
        }
        self.tells_nodes = any(_NODE.search(function.text) for function in listed.values())
        self.tells_drivers = any(_DRIVER.search(function.text) for function in listed.values())

    def facts(self) -> PciFacts:
        functions = [
            self._function(self.listed[address]) for address in sorted(self.listed, key=sort_key)
        ]
        lost = [f.address for f in functions if f.root_complex is None and is_wanted(f)]
        problems: list[Problem] = []
        if lost:
            what = f"{', '.join(lost[:4])}{' and others' if len(lost) > 4 else ''}"
            missing = Missing("absent", f"no bridge above {what} is listed")
            problems.append(Problem("lspci", missing))
        return PciFacts(functions=functions, problems=problems, whole=self.whole and not lost)

    def _function(self, listed: _Listed) -> PciFunction:
        root, parents = self._position(listed)
        text = listed.text
        function = PciFunction(
            address=listed.address,
            root_complex=root,
            parents=parents,
            class_code=listed.class_code,
            vendor=listed.vendor,
            device=listed.device,
            numa_node=self._node(text),
            product=_product(listed.product),
        )
        if not is_wanted(function) and function.base_class != UNNAMED:
            return function
        virtual = _VIRTUAL.search(text)
        is_virtual = "Virtual Function" in listed.product
        return msgspec.structs.replace(
            function,
            local_cpus=NOT_SHOWN,
            link=None if is_virtual else _link(text),
            driver=self._driver(text),
            iommu_group=_word(_GROUP, text),
            iommu_type=NOT_SHOWN,
            virtual_functions=int(virtual[1]) if virtual else 0,
            port_type=(listed.port_type if function.is_bridge else None) or NOT_SHOWN,
            acs_control=_acs(text) if function.is_bridge else NOT_SHOWN,
        )

    def _node(self, text: str) -> Fact[int]:
        """lspci leaves the line out where the kernel says -1, and for a listing without details."""
        match = _NODE.search(text)
        if match:
            return int(match[1])
        return -1 if self.tells_nodes and "Control:" in text else NOT_SHOWN

    def _driver(self, text: str) -> Fact[str]:
        match = _DRIVER.search(text)
        if match:
            return match[1]
        if self.tells_drivers and "Control:" in text:
            return ABSENT
        return Missing("unsupported", "the listing names no driver")

    def _position(self, listed: _Listed) -> tuple[str | None, tuple[str, ...]]:
        """The root complex and the bridges above, root port first."""
        parents: list[str] = []
        bus = listed.bus
        while (bridge := self.above.get(bus)) is not None:
            if bridge.address in parents or bridge.address == listed.address:
                return None, ()  # a listing of two machines, or a damaged one
            parents.insert(0, bridge.address)
            bus = bridge.bus
        top = self.listed[parents[0]] if parents else listed
        known = self._is_root(bus, top)
        return f"{bus[0]:04x}:{bus[1]:02x}" if known else None, tuple(parents)

    def _is_root(self, bus: tuple[int, int], top: _Listed) -> bool:
        """Whether a bus to which no listed bridge leads is that of a root complex.

        In a whole listing it is, unless what stands there belongs below a port: then a piece of the
        listing is lost. Endpoints stand on a root's bus in virtual machines, which have no ports.
        """
        if bus in self.root_buses:
            return True
        if not self.whole or top.port_type in ("upstream-port", "downstream-port"):
            return False
        return top.port_type is None or not self.root_buses.intersection(self._with_ports)

    @property
    def _with_ports(self) -> set[tuple[int, int]]:
        return {f.bus for f in self.listed.values() if f.port_type == "root-port"}


def _word(pattern: re.Pattern[str], text: str) -> Fact[str]:
    match = pattern.search(text)
    return match[1] if match else NOT_SHOWN


def _link(text: str) -> LinkEnd | None:
    """The link as its own end has it; None for a function without one."""
    able, trained = _ABLE.search(text), _TRAINED.search(text)
    if able is None and trained is None:
        return None
    return LinkEnd(
        speed=_speed(trained),
        width=_width(trained),
        max_speed=_speed(able),
        max_width=_width(able),
    )


def _speed(match: re.Match[str] | None) -> Fact[float]:
    if match is None:
        return NOT_SHOWN
    try:
        speed = float(match[1].rstrip("GT/s "))
    except ValueError:
        return Missing("unsupported", "lspci says unknown")
    return speed if 0 < speed < 1000 else Missing("unparsed", f"not a link speed: {match[1]}")


def _width(match: re.Match[str] | None) -> Fact[int]:
    if match is None:
        return NOT_SHOWN
    width = int(match[2])
    if width in (1, 2, 4, 8, 12, 16, 32):
        return width
    return Missing("unsupported", f"lspci says x{width}")


def _acs(text: str) -> Fact[int]:
    match = _ACS.search(text)
    if match:
        on = {word[:-1] for word in match[1].split() if word.endswith("+")}
        return sum(bit for bit, word in ACS_BITS.items() if word in on)
    if "<access denied>" in text:
        return Missing("denied", "lspci was not run by root")
    if "Capabilities: [100" in text:
        return Missing("unsupported", "no ACS capability")
    return NOT_SHOWN


# lspci -tv

_DOMAIN = re.compile(r"-\[(?:([0-9a-f]{4,8}):)?([0-9a-f]{2})(?:-[0-9a-f]{2})?\]-")
_STEP = re.compile(
    r"([0-9a-f]{2}\.[0-7])(?:-\[(?:[0-9a-f]{4,8}:)?([0-9a-f]{2})(?:-[0-9a-f]{2})?\])?"
)
_BRANCH = re.compile(r"[\s|+\\-]*")

_GUESSES = (
    (r"^NVIDIA .*\b(?:Audio|USB|UCSI|NVSwitch|Bridge)\b", UNNAMED),
    (r"^NVIDIA Corporation [A-Z]{1,2}\d{2}\w{0,8} \[", 0x0302),
    (r"^Mellanox .*\[ConnectX", 0x0200),
    (r"\b(?:Ethernet|NetXtreme)\b", 0x0200),
    (r"\b(?:NVMe|SSD Controller)\b", 0x0108),
)
"""Classes by product names: the picture shows none. What it has no name for stays unclassed."""


def parse_tree(text: str) -> dict[str, _Listed]:
    """The functions of a picture, which draws the whole machine. Bridges show the bus behind them.

    A line goes on to the right as deep as the tree goes, and the next one begins below the place at
    which it branches off: what stands to the left of that column is above it.
    """
    found: dict[str, _Listed] = {}
    buses: list[tuple[int, int]] = []
    """The columns at which the devices of the buses above begin, and these buses."""
    domain = 0
    for line in text.split("\n"):
        line = line[:4096]
        at = 0
        head = _DOMAIN.search(line)
        if head and not _STEP.search(line[: head.start()]):
            domain = int(head[1] or "0", 16)
            at = head.end()
            buses = [(at, int(head[2], 16))]
        for step in _steps(line, at):
            while len(buses) > 1 and step.start() < buses[-1][0]:
                buses.pop()
            if not buses or len(found) >= MAX_FUNCTIONS:
                break
            address = f"{domain:04x}:{buses[-1][1]:02x}:{step[1]}"
            if step[2]:
                buses.append((step.end(), int(step[2], 16)))
            found[address] = _drawn(address, step, line)
    return found


def _drawn(address: str, step: re.Match[str], line: str) -> _Listed:
    title = "" if step[2] else line[step.end() :].strip()[:400]
    base = CLASS_BRIDGE
    if not step[2]:
        base = next((code for mark, code in _GUESSES if re.search(mark, title)), UNNAMED)
    vendor = _vendor(title)
    return _Listed(
        address=address,
        class_code=base << 8,
        vendor=vendor,
        device=_device(vendor, title),
        product=title,
        secondary=int(step[2], 16) if step[2] else None,
    )


def _steps(line: str, at: int) -> Iterator[re.Match[str]]:
    """The devices on one line, each followed by what is behind it; the last one by its name."""
    while match := _BRANCH.match(line, at):
        step = _STEP.match(line, match.end())
        if step is None:
            return
        yield step
        if not step[2]:
            return
        at = step.end()
