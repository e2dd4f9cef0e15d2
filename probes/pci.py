"""PCI: the tree of functions, their links at both ends, and who drives them, from sysfs.

The place of a function in the tree is its path below /sys/devices: each component that is a PCI
address is a bridge above it, ``pciDDDD:BB`` is its root complex. ``max_link_*`` is what that end
can do, not what the slot allows; the other end of a link is the port above.
"""

from __future__ import annotations

import msgspec

from gputopo.facts import ABSENT, Fact, Missing, Problem, known
from gputopo.host.base import Host
from gputopo.pciaddr import host_bridge, is_address
from gputopo.probes.read import base_name, cpus, hexadecimal, integer

DEVICES = "/sys/bus/pci/devices"

CLASS_BRIDGE = 0x0604
CLASS_NVME = 0x0108
NVIDIA = 0x10DE

PORT_TYPES = {
    0x0: "endpoint",
    0x1: "legacy-endpoint",
    0x4: "root-port",
    0x5: "upstream-port",
    0x6: "downstream-port",
    0x7: "pcie-to-pci-bridge",
    0x8: "pci-to-pcie-bridge",
    0x9: "integrated-endpoint",
}
"""Device/Port Type of the PCI Express Capabilities register (PCIe base specification 7.5.3.2)."""

ACS_BITS = {
    0x01: "SrcValid",
    0x02: "TransBlk",
    0x04: "ReqRedir",
    0x08: "CmpltRedir",
    0x10: "UpstreamFwd",
    0x20: "EgressCtrl",
    0x40: "DirectTrans",
}
"""ACS control register bits in lspci's words (PCIe base specification 7.7.8.3)."""


class LinkEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A function's view of the link above it (a port's: of its own link). Speeds in GT/s a lane."""

    speed: Fact[float]
    width: Fact[int]
    max_speed: Fact[float]
    max_width: Fact[int]


class PciFunction(msgspec.Struct, frozen=True, kw_only=True):
    """One PCI function. ``parents`` are the bridges above it, the root port first."""

    address: str
    root_complex: str | None
    parents: tuple[str, ...]
    class_code: int
    vendor: int | None
    device: int | None
    subsystem_vendor: int | None = None
    subsystem_device: int | None = None
    numa_node: Fact[int] = ABSENT
    local_cpus: Fact[str] = ABSENT
    link: LinkEnd | None = None
    driver: Fact[str] = ABSENT
    iommu_group: Fact[str] = ABSENT
    iommu_type: Fact[str] = ABSENT
    physical_function: str | None = None
    virtual_functions: int = 0
    port_type: Fact[str] = ABSENT
    acs_control: Fact[int] = ABSENT
    product: str | None = None
    """Maker and product in the words of whoever listed it; sysfs has only numbers."""

    @property
    def base_class(self) -> int:
        """Class and subclass: 0x0604 for a PCI-to-PCI bridge."""
        return self.class_code >> 8

    @property
    def is_bridge(self) -> bool:
        return self.base_class == CLASS_BRIDGE

    @property
    def is_gpu(self) -> bool:
        """An NVIDIA display or 3D controller (its audio and USB functions are other classes)."""
        return self.vendor == NVIDIA and self.base_class in (0x0300, 0x0302)

    @property
    def may_be_gpu(self) -> bool:
        """A display or 3D controller whose vendor could not be read."""
        return self.vendor is None and self.base_class in (0x0300, 0x0302)

    @property
    def is_nvswitch(self) -> bool:
        return self.vendor == NVIDIA and self.base_class == 0x0680


class PciFacts(msgspec.Struct, frozen=True, kw_only=True):
    functions: list[PciFunction]
    problems: list[Problem]
    whole: bool = True
    """Whether these are all functions of the machine, so that they can be counted."""


def is_wanted(function: PciFunction) -> bool:
    """Whether a function is of a kind that is looked at closely: devices and what is above them."""
    return (
        function.base_class >> 8 in (0x02, 0x03, 0x12)
        or function.base_class in (CLASS_BRIDGE, CLASS_NVME)
        or function.is_nvswitch
    )


def probe(host: Host) -> Fact[PciFacts]:
    """All PCI functions in address order; Missing when sysfs has no PCI bus."""
    names = host.list_dir(DEVICES)
    if isinstance(names, Missing):
        return names
    functions: list[PciFunction] = []
    problems: list[Problem] = []
    iommu_types: dict[str, Fact[str]] = {}
    for name in names:
        if not is_address(name):
            continue
        function = _function(host, name, iommu_types)
        if isinstance(function, Missing):
            problems.append(Problem(f"{DEVICES}/{name}", function))
        else:
            functions.append(function)
    problems.extend(_grouped(functions))
    return PciFacts(functions=functions, problems=problems)


def _grouped(functions: list[PciFunction]) -> list[Problem]:
    """One problem for all ports whose ACS bits could not be read, since the cause is the same."""
    unread = [f for f in functions if isinstance(f.acs_control, Missing) and f.is_bridge]
    by_reason: dict[Missing, int] = {}
    for function in unread:
        assert isinstance(function.acs_control, Missing)
        if function.acs_control.reason not in ("absent", "unsupported"):
            by_reason[function.acs_control] = by_reason.get(function.acs_control, 0) + 1
    return [
        Problem(f"{DEVICES}/*/config of {count} bridge{'s' * (count != 1)} (ACS)", missing)
        for missing, count in by_reason.items()
    ]


def _function(host: Host, name: str, iommu_types: dict[str, Fact[str]]) -> PciFunction | Missing:
    place = f"{DEVICES}/{name}"
    class_code = hexadecimal(host.read_text(f"{place}/class"))
    if isinstance(class_code, Missing):
        return class_code
    vendor = known(hexadecimal(host.read_text(f"{place}/vendor")))
    device = known(hexadecimal(host.read_text(f"{place}/device")))
    root_complex, parents = _position(host, name)
    base = class_code >> 8
    wanted = (
        base >> 8 in (0x02, 0x03, 0x12)
        or base in (CLASS_BRIDGE, CLASS_NVME)
        or (vendor == NVIDIA and base == 0x0680)
    )
    numa_node = integer(host.read_text(f"{place}/numa_node"))
    if not wanted:
        return PciFunction(
            address=name,
            root_complex=root_complex,
            parents=parents,
            class_code=class_code,
            vendor=vendor,
            device=device,
            numa_node=numa_node,
            local_cpus=cpus(host, f"{place}/local_cpulist", f"{place}/local_cpus")
            if isinstance(numa_node, Missing)
            else ABSENT,
        )
    physical = host.read_link(f"{place}/physfn") if base >> 8 in (0x02, 0x03, 0x12) else ABSENT
    group = base_name(host.read_link(f"{place}/iommu_group"))
    port_type: Fact[str] = ABSENT
    acs: Fact[int] = ABSENT
    if base == CLASS_BRIDGE:
        port_type, acs = _config(host.read_bytes(f"{place}/config"))
    virtual: Fact[int] = ABSENT
    if isinstance(physical, Missing) and base >> 8 in (0x02, 0x03, 0x12):
        virtual = integer(host.read_text(f"{place}/sriov_numvfs"))
    return PciFunction(
        address=name,
        root_complex=root_complex,
        parents=parents,
        class_code=class_code,
        vendor=vendor,
        device=device,
        subsystem_vendor=known(hexadecimal(host.read_text(f"{place}/subsystem_vendor"))),
        subsystem_device=known(hexadecimal(host.read_text(f"{place}/subsystem_device"))),
        numa_node=numa_node,
        local_cpus=cpus(host, f"{place}/local_cpulist", f"{place}/local_cpus"),
        # A virtual function has no link of its own: its files repeat 0 and "Unknown".
        link=_link(host, place) if isinstance(physical, Missing) else None,
        driver=base_name(host.read_link(f"{place}/driver")),
        iommu_group=group,
        iommu_type=_iommu_type(host, group, iommu_types),
        physical_function=None if isinstance(physical, Missing) else physical.rpartition("/")[2],
        virtual_functions=virtual if isinstance(virtual, int) else 0,
        port_type=port_type,
        acs_control=acs,
    )


def _position(host: Host, name: str) -> tuple[str | None, tuple[str, ...]]:
    """The root complex and the bridges above a function, from the target of its link."""
    target = host.read_link(f"{DEVICES}/{name}")
    if isinstance(target, Missing):
        return None, ()
    root: str | None = None
    parents: list[str] = []
    for component in target.split("/")[:-1]:
        complex_ = host_bridge(component)
        if complex_ is not None:
            root, parents = complex_, []
        elif is_address(component):
            parents.append(component)
    return root, tuple(parents)


def _link(host: Host, place: str) -> LinkEnd:
    return LinkEnd(
        speed=_speed(host.read_text(f"{place}/current_link_speed")),
        width=_width(host.read_text(f"{place}/current_link_width")),
        max_speed=_speed(host.read_text(f"{place}/max_link_speed")),
        max_width=_width(host.read_text(f"{place}/max_link_width")),
    )


def _speed(text: Fact[str]) -> Fact[float]:
    """GT/s of ``32.0 GT/s PCIe``, ``8 GT/s``; the kernel's ``Unknown`` is no speed."""
    if isinstance(text, Missing):
        return text
    number, _, unit = text.strip().partition(" ")
    if number.lower().startswith("unknown"):
        return Missing("unsupported", "the kernel says Unknown")
    try:
        speed = float(number)
    except ValueError:
        speed = 0.0
    if not unit.startswith("GT/s") or not 0 < speed < 1000:
        return Missing("unparsed", f"not a link speed: {text[:40]!r}")
    return speed


def _width(text: Fact[str]) -> Fact[int]:
    """Lanes; 0 and 255 are what the kernel prints for a link that is not there."""
    width = integer(text)
    if isinstance(width, Missing):
        return width
    if width in (1, 2, 4, 8, 12, 16, 32):
        return width
    if width in (0, 255):
        return Missing("unsupported", f"the kernel says {width}")
    return Missing("unparsed", f"not a link width: {width}")


def _config(data: Fact[bytes]) -> tuple[Fact[str], Fact[int]]:
    """Port type and ACS control bits of a port from its config space.

    Without CAP_SYS_ADMIN the kernel gives only the first 64 bytes, which hold neither.
    """
    if isinstance(data, Missing):
        return data, data
    if len(data) <= 64:
        denied = Missing("denied", "config space beyond byte 64 needs root")
        return denied, denied
    port_type: Fact[str] = ABSENT
    pointer = data[0x34] & 0xFC
    for _ in range(48):
        if pointer < 0x40 or pointer + 4 > len(data):
            break
        if data[pointer] == 0x10:
            kind = data[pointer + 2] >> 4
            port_type = PORT_TYPES.get(kind, f"unknown ({kind})")
            break
        pointer = data[pointer + 1] & 0xFC
    acs: Fact[int] = Missing("unsupported", "no ACS capability")
    if len(data) <= 256:
        return port_type, Missing("unsupported", "no extended config space")
    pointer = 0x100
    for _ in range(480):
        if pointer < 0x100 or pointer + 8 > len(data):
            break
        header = int.from_bytes(data[pointer : pointer + 4], "little")
        if header & 0xFFFF == 0x000D:
            acs = int.from_bytes(data[pointer + 6 : pointer + 8], "little")
            break
        pointer = header >> 20 & 0xFFC
    return port_type, acs


def _iommu_type(host: Host, group: Fact[str], seen: dict[str, Fact[str]]) -> Fact[str]:
    if isinstance(group, Missing):
        return group
    if group not in seen:
        seen[group] = host.read_text(f"/sys/kernel/iommu_groups/{group}/type")
    return seen[group]
