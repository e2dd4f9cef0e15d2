"""Where every PCI function of a description sits: addresses, bus numbers, links at both ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from composer import parts
from composer.description import DescriptionError, Item, Machine, Settings, read_tree, settings

GTS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
"""Line rate in GT/s a lane by PCIe generation."""

ENDPOINT, ROOT, UPSTREAM, DOWNSTREAM, PCI_BRIDGE, INTEGRATED = 0x0, 0x4, 0x5, 0x6, 0x7, 0x9
"""Device/Port Type of the PCI Express Capabilities register."""


@dataclass
class Link:
    """What a link trained to. Speed 0 and width 0: nothing at the other end."""

    speed: float
    width: int


@dataclass
class Function:
    """One PCI function. ``above`` are the addresses of the bridges between it and the root."""

    host: str
    above: tuple[str, ...]
    address: str
    part: parts.Part
    port_type: int
    values: dict[str, Any]
    kind: str
    part_name: str = ""
    rdma: str = ""
    ethernet: bool = False
    siblings: int = 1
    """Functions of the device that it belongs to."""
    secondary: int | None = None
    subordinate: int | None = None
    settings: Settings = field(default_factory=Settings)
    link: Link | None = None
    max_speed: float = 0.0
    max_width: int = 0
    node: int = -1
    index: int = -1
    """A GPU's place among all GPUs of the description, present or not."""
    physical: str | None = None
    """Address of the physical function, for a virtual one."""

    @property
    def path(self) -> str:
        """Its directory in sysfs."""
        return "/".join(("/sys/devices", f"pci{self.host}", *self.above, self.address))

    @property
    def driver(self) -> str:
        """The kernel driver bound to it; empty for none."""
        own = self.settings.driver
        return self.part.driver if own is None else own

    @property
    def bus(self) -> str:
        """``0000:19``."""
        return self.address[:-5]


@dataclass
class Layout:
    """All functions in bus order, and those with a role in the order that the driver gives them."""

    machine: Machine
    functions: dict[str, Function]
    hosts: dict[str, int]
    """NUMA node of each root complex (``0000:15``)."""
    gpus: list[Function]
    """In NVML's order, by address: those that are there and bound to NVIDIA's driver."""

    def of_kind(self, kind: str) -> list[Function]:
        return [f for f in self.functions.values() if f.kind == kind]

    def hcas(self) -> list[Function]:
        """RDMA devices in the natural order of their names."""
        named = [f for f in self.functions.values() if f.rdma]
        return sorted(named, key=lambda f: (len(f.rdma), f.rdma))


class _Builder:
    """Walks the tree depth first and hands out bus numbers."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.functions: list[Function] = []
        self.hosts: dict[str, int] = {}
        self.host = ""
        self.domain = ""
        self.devices: dict[str, list[Function]] = {}
        """Functions behind each port."""

    def add_host(self, item: Item) -> None:
        self.host = item.number
        self.domain, _, digits = item.number.rpartition(":")
        bus = used = int(digits, 16)
        port, own = parts.PLATFORMS[item.part]
        values = {**item.settings, **self.machine.change.get(item.number, {})}
        host = settings(values)
        self.hosts[self.host] = -1 if host.node is None else host.node
        for number, name in own.items():
            self._function(bus, number, (), parts.DEVICES[name], INTEGRATED, {}, "device", name)
        for child in item.children:
            used = self._child(child, bus, used, (), parts.PORTS[port], ROOT, host.ports_acs)

    def _function(
        self,
        bus: int,
        number: str,
        above: tuple[str, ...],
        part: parts.Part,
        port_type: int,
        values: dict[str, Any],
        kind: str,
        part_name: str = "",
    ) -> Function:
        function = Function(
            host=self.host,
            above=above,
            address=f"{self.domain}:{bus:02x}:{number}",
            part=part,
            port_type=port_type,
            values=dict(values),
            kind=kind,
            part_name=part_name,
            node=self.hosts[self.host],
        )
        self.functions.append(function)
        return function

    def _child(
        self,
        item: Item,
        bus: int,
        used: int,
        above: tuple[str, ...],
        port_part: parts.Part,
        port_type: int,
        ports_acs: str | None,
    ) -> int:
        """Places one line, and returns the highest bus number handed out so far."""
        if item.direct:
            self._device(item, bus, item.number, above, direct=True)
            return used
        own = {"acs": item.settings.get("acs", ports_acs), "node": item.settings.get("node")}
        values = {key: value for key, value in own.items() if value is not None}
        port_part = _part(parts.PORTS, item.port) if item.port else port_part
        port = self._function(bus, item.number, above, port_part, port_type, values, "port")
        first = int(item.settings["bus"], 16) if "bus" in item.settings else used + 1
        if first <= used:
            raise DescriptionError(f"{port.address}: bus {first:02x} is taken")
        port.secondary, last = first, first
        below = (*above, port.address)
        if item.kind == "switch":
            last = self._switch(item, first, below)
        elif item.kind == "bridge":
            last = self._bridge(item, first, below)
        elif item.kind != "empty":
            self._device(item, first, "00.0", below)
        port.subordinate = last
        self.devices[port.address] = [f for f in self.functions if f.above == below]
        return last

    def _switch(self, item: Item, bus: int, above: tuple[str, ...]) -> int:
        part = _part(parts.SWITCHES, item.part)
        values = {k: v for k, v in item.settings.items() if k not in ("acs", "ports_acs", "bus")}
        up = self._function(bus, "00.0", above, part, UPSTREAM, values, "switch", item.part)
        up.siblings = 1 + len(part.companions)
        self._companions(up, bus, "00", above)
        up.secondary = bus + 1
        below, last = (*above, up.address), bus + 1
        for child in item.children:
            last = self._child(
                child, bus + 1, last, below, part, DOWNSTREAM, item.settings.get("ports_acs")
            )
        up.subordinate = last
        return last

    def _bridge(self, item: Item, bus: int, above: tuple[str, ...]) -> int:
        """A PCIe-to-PCI bridge: its devices share one conventional bus, without links."""
        part = _part(parts.BRIDGES, item.part)
        up = self._function(bus, "00.0", above, part, PCI_BRIDGE, item.settings, "bridge")
        up.secondary = up.subordinate = bus + 1
        for child in item.children:
            self._device(child, bus + 1, child.number, (*above, up.address), direct=True)
        return bus + 1

    def _device(
        self,
        item: Item,
        bus: int,
        number: str,
        above: tuple[str, ...],
        direct: bool = False,
    ) -> None:
        part = _part(parts.DEVICES, item.part)
        if part.kind != item.kind:
            raise DescriptionError(f"{item.part} is a {part.kind}, not a {item.kind}")
        slot, _, first = number.partition(".")
        values = {k: v for k, v in item.settings.items() if k not in ("acs", "bus")}
        kind = ENDPOINT if part.width or not direct else INTEGRATED
        count = max(1, len(item.names))
        siblings = count + len(part.companions)
        made: list[Function] = []
        for offset in range(count):
            function = self._function(
                bus,
                f"{slot}.{int(first) + offset}",
                above,
                part,
                kind,
                values,
                item.kind,
                item.part,
            )
            function.siblings = siblings
            function.ethernet = item.ethernet
            if item.kind == "hca":
                function.rdma = item.names[offset]
            elif item.names:
                function.values.setdefault("netdev", item.names[offset])
            if item.kind == "hca" and not item.ethernet:
                function.part = msgspec.structs.replace(part, class_code=0x020700)
            made.append(function)
        self._companions(made[0], bus, slot, above)
        self._virtual(made[0], bus, above)

    def _companions(self, main: Function, bus: int, slot: str, above: tuple[str, ...]) -> None:
        for extra in main.part.companions:
            part = msgspec.structs.replace(
                main.part,
                kind="device",
                vendor=extra.vendor,
                device=extra.device,
                class_code=extra.class_code,
                driver=extra.driver,
                companions=(),
                virtual_functions=0,
            )
            function = self._function(
                bus, f"{slot}.{extra.function}", above, part, ENDPOINT, {}, "device"
            )
            function.siblings = main.siblings

    def _virtual(self, main: Function, bus: int, above: tuple[str, ...]) -> None:
        """Virtual functions of an adapter, in the slots behind its physical ones."""
        count = int(main.values.get("virtual_functions", 0))
        part = msgspec.structs.replace(
            main.part, device=main.part.virtual_device, virtual_functions=0
        )
        for index in range(count):
            place = main.siblings + index
            function = self._function(
                bus, f"{place // 8:02x}.{place % 8}", above, part, ENDPOINT, {}, "virtual"
            )
            function.physical = main.address


def _part(table: dict[str, parts.Part], name: str) -> parts.Part:
    if name not in table:
        raise DescriptionError(f"no part {name!r}; there are {', '.join(sorted(table))}")
    return table[name]


def place(machine: Machine) -> Layout:
    """Lays out a machine: addresses, then changes, then what is gone, then links."""
    builder = _Builder(machine)
    for item in read_tree(machine.tree):
        builder.add_host(item)
    functions = {f.address: f for f in sorted(builder.functions, key=lambda f: f.address)}
    if len(functions) != len(builder.functions):
        raise DescriptionError("two functions have one address")
    gpus = [f for f in functions.values() if f.kind == "gpu"]
    for index, gpu in enumerate(gpus):
        gpu.index = index
    _change(machine, functions, gpus, builder.hosts)
    for function in functions.values():
        function.settings = settings(function.values)
        if function.settings.node is not None:
            function.node = function.settings.node
        function.part = _with_ids(function.part, function.settings)
    gone = {f.address for f in functions.values() if f.settings.absent}
    # Without its function 0 a device is not found at all.
    gone |= {f.address for f in functions.values() if f"{f.address[:-1]}0" in gone}
    gone |= {f.address for f in functions.values() if gone & set(f.above) or f.physical in gone}
    for port in [f for f in functions.values() if f.port_type in (ROOT, DOWNSTREAM)]:
        _train(port, [f for f in builder.devices[port.address] if f.address not in gone])
    for function in functions.values():
        if function.link is None and function.port_type == ENDPOINT and function.part.width:
            _train_alone(function)
    return Layout(
        machine=machine,
        functions={a: f for a, f in functions.items() if a not in gone},
        hosts=builder.hosts,
        gpus=[f for f in gpus if f.address not in gone and f.driver == "nvidia"],
    )


def _change(
    machine: Machine,
    functions: dict[str, Function],
    gpus: list[Function],
    hosts: dict[str, int],
) -> None:
    """Adds the table ``change`` to the functions that its keys name."""
    named = {f"gpu{index}": f for index, f in enumerate(gpus)}
    named.update({f.rdma: f for f in functions.values() if f.rdma})
    named.update(functions)
    for name, values in machine.change.items():
        if name in hosts:
            continue
        if name not in named:
            raise DescriptionError(f"change of {name!r}: no such device in the tree")
        named[name].values.update(values)


def _with_ids(part: parts.Part, own: Settings) -> parts.Part:
    if own.id is not None:
        vendor, _, device = own.id.partition(":")
        part = msgspec.structs.replace(part, vendor=int(vendor, 16), device=int(device, 16))
    if own.subsystem is not None:
        vendor, _, device = own.subsystem.partition(":")
        part = msgspec.structs.replace(part, subsystem=(int(vendor, 16), int(device, 16)))
    return part


def _train(port: Function, devices: list[Function]) -> None:
    """The link between a port and what hangs on it: both ends show the same, each its own limit."""
    most = GTS[port.part.generation]
    if not devices:
        port.max_speed = port.settings.max_speed or most
        port.max_width = port.settings.max_width or port.part.width
        port.link = Link(2.5, 0)
        return
    device = devices[0]
    own, above = device.settings, port.settings
    for function in devices:
        function.max_speed = own.max_speed or GTS.get(function.part.generation, 2.5)
        function.max_width = own.max_width or function.part.width or 1
    port.max_speed = above.max_speed or own.slot_speed or most
    # A port is bifurcated to fit what is plugged in, unless the description says otherwise.
    port.max_width = above.max_width or own.slot_width or device.max_width
    speed = own.speed or above.speed or min(port.max_speed, device.max_speed)
    width = own.width or above.width or min(port.max_width, device.max_width)
    port.link = Link(speed, width)
    for function in devices:
        function.link = Link(0.0, 0) if function.physical else port.link


def _train_alone(function: Function) -> None:
    """The link of a device whose port is not visible (a virtual machine)."""
    own = function.settings
    function.max_speed = own.max_speed or GTS[function.part.generation]
    function.max_width = own.max_width or function.part.width
    function.link = Link(own.speed or function.max_speed, own.width or function.max_width)
