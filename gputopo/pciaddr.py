"""PCI addresses: the join key between sysfs, NVML, nvidia-smi and RDMA devices."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})\.([0-7])")
_HOST_BRIDGE = re.compile(r"pci([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2})")


def normalise(text: str) -> str | None:
    """``0000:1b:00.0`` for any spelling of an address (``1B:00.0``, NVML's ``00000000:1B:00.0``).

    The kernel's own spelling, which ``lspci -s`` and sysfs take as it is: lower case, a domain of
    four digits that grows only where its value does (``10000:e0:06.0`` behind Intel VMD). None if
    ``text`` is no PCI address.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    number = int(domain or "0", 16)
    slot = int(device, 16)
    if slot > 0x1F:
        return None
    return f"{number:04x}:{int(bus, 16):02x}:{slot:02x}.{function}"


def is_address(component: str) -> bool:
    """Whether a path component of /sys/devices is a PCI function (``0000:17:00.0``)."""
    return len(component) >= 12 and _ADDRESS.fullmatch(component) is not None


def host_bridge(component: str) -> str | None:
    """``0000:15`` if a path component of /sys/devices is a root complex (``pci0000:15``)."""
    match = _HOST_BRIDGE.fullmatch(component)
    return f"{match[1].lower()}:{match[2].lower()}" if match else None


def sort_key(address: str) -> tuple[int, int, int, int]:
    """Orders addresses as the bus does: domain, bus, device, function."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return (1 << 40, 0, 0, 0)
    return (int(match[1] or "0", 16), int(match[2], 16), int(match[3], 16), int(match[4], 16))
