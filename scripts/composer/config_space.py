"""PCI configuration space: a header and the capabilities that tell the topology.

Offsets and bits: PCI Express base specification, chapter 7. What firmware keeps in registers that
nobody here reads (BARs, MSI, power management) is left zero.
"""

from __future__ import annotations

import struct

from composer.layout import DOWNSTREAM, ENDPOINT, GTS, INTEGRATED, ROOT, Function

EXPRESS, ADVANCED_ERRORS, ACCESS_CONTROL = 0x40, 0x100, 0x148
"""Where the capabilities are put."""

VISIBLE_TO_ALL = 64
"""Bytes that a user without CAP_SYS_ADMIN can read (pci_read_config)."""

_CODES = {speed: code for code, speed in GTS.items()}


def config_space(function: Function, root: bool) -> bytes:
    """The 256 or 4,096 bytes of a function; only the header for a reader who is not root."""
    express = function.port_type != INTEGRATED
    data = bytearray(4096 if express else 256)
    _header(data, function, express)
    if express:
        _express(data, function)
        controlled = _access_control(data, function)
        _extended(data, ADVANCED_ERRORS, 0x0001, 2, ACCESS_CONTROL if controlled else 0)
    return bytes(data if root else data[:VISIBLE_TO_ALL])


def _header(data: bytearray, function: Function, express: bool) -> None:
    part = function.part
    bridge = function.secondary is not None
    # Command: memory and bus master; status: capability list.
    struct.pack_into("<HHHH", data, 0, part.vendor, part.device, 0x0406, 0x0010 if express else 0)
    struct.pack_into("<I", data, 8, part.class_code << 8 | part.revision)
    data[0x0C] = 0x10
    data[0x0E] = (1 if bridge else 0) | (0x80 if function.siblings > 1 else 0)
    if bridge:
        primary = int(function.bus[-2:], 16)
        data[0x18:0x1B] = bytes((primary, function.secondary or 0, function.subordinate or 0))
    elif part.subsystem:
        struct.pack_into("<HH", data, 0x2C, *part.subsystem)
    if express:
        data[0x34] = EXPRESS


def _express(data: bytearray, function: Function) -> None:
    at = EXPRESS
    slot = 1 if function.port_type in (ROOT, DOWNSTREAM) else 0
    struct.pack_into("<BBH", data, at, 0x10, 0, 2 | function.port_type << 4 | slot << 8)
    if function.link is None:
        return
    most = _CODES[function.max_speed]
    port = int(function.address[-4:-2], 16) if function.port_type != ENDPOINT else 0
    struct.pack_into("<I", data, at + 0x0C, most | function.max_width << 4 | port << 24)
    now = _CODES.get(function.link.speed, 0) | function.link.width << 4
    active = 1 << 13 if function.port_type in (ROOT, DOWNSTREAM) and function.link.width else 0
    struct.pack_into("<H", data, at + 0x12, now | active)
    struct.pack_into("<I", data, at + 0x2C, (2 << most) - 2)


def _access_control(data: bytearray, function: Function) -> bool:
    """The ACS capability of a root or downstream port; whether there is one."""
    capability = function.part.acs_capability
    if capability is None or function.port_type not in (ROOT, DOWNSTREAM):
        return False
    _extended(data, ACCESS_CONTROL, 0x000D, 1, 0)
    control = int(function.settings.acs or "0", 16)
    struct.pack_into("<HH", data, ACCESS_CONTROL + 4, capability, control & capability)
    return True


def _extended(data: bytearray, at: int, identity: int, version: int, following: int) -> None:
    struct.pack_into("<I", data, at, identity | version << 16 | following << 20)
