"""/sys of the PCI functions and of the class devices that hang on them: RDMA, network, NVMe."""

from __future__ import annotations

from hashlib import sha256

from composer import parts
from composer.config_space import config_space
from composer.files import Files
from composer.layout import INTEGRATED, Function, Layout
from composer.processors import Processors
from gputopo.cpulist import render
from gputopo.facts import Missing

INVALID = Missing("failed", "Invalid argument")
"""EINVAL: what the kernel answers for the speed of a link that is down, or an empty table slot."""

_CORRECTABLE = ("RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout", "NonFatalErr", "CorrIntErr")
_UNCORRECTABLE = (
    "Undefined", "DLP", "SDES", "TLP", "FCP", "CmpltTO", "CmpltAbrt", "UnxCmplt", "RxOF",
    "MalfTLP", "ECRC", "UnsupReq", "ACSViol", "UncorrIntErr", "BlockedTLP", "AtomicOpBlocked",
    "TLPBlockedErr", "PoisonTLPBlocked",
)  # fmt: skip

_RATES = {10: "4X SDR", 25: "1X EDR", 40: "4X QDR", 50: "2X EDR", 56: "4X FDR", 100: "4X EDR",
          200: "4X HDR", 400: "4X NDR", 800: "4X XDR"}  # fmt: skip
"""Gb/s in InfiniBand's words, as ib_core prints ``rate``."""

_STATES = {"DOWN": 1, "INIT": 2, "ARMED": 3, "ACTIVE": 4}
_PHYSICAL = {"Sleep": 1, "Polling": 2, "Disabled": 3, "LinkUp": 5, "LinkErrorRecovery": 6}


def write(files: Files, layout: Layout, processors: Processors) -> None:
    groups = _groups(layout)
    files.directory("/sys/bus/pci/devices")
    for number, members in groups.items():
        place = f"/sys/kernel/iommu_groups/{number}"
        files.text(f"{place}/type", layout.machine.iommu)
        for function in members:
            files.link(f"{place}/devices/{function.address}", function.path)
    group_of = {f.address: number for number, members in groups.items() for f in members}
    for function in layout.functions.values():
        _function(files, function, layout, processors)
        if function.address in group_of:
            files.link(
                f"{function.path}/iommu_group",
                f"/sys/kernel/iommu_groups/{group_of[function.address]}",
            )
    for index, function in enumerate(layout.hcas()):
        _rdma(files, function, index, layout)
    _network(files, layout)
    for index, function in enumerate(layout.of_kind("nvme")):
        _nvme(files, function, index)


def _groups(layout: Layout) -> dict[int, list[Function]]:
    """IOMMU groups: one for each port, one for each device with all its functions."""
    if not layout.machine.iommu:
        return {}
    by_key: dict[str, list[Function]] = {}
    for function in layout.functions.values():
        alone = function.secondary is not None or function.physical
        key = function.address if alone else function.address[:-2]
        by_key.setdefault(key, []).append(function)
    return dict(enumerate(by_key.values()))


def _function(files: Files, function: Function, layout: Layout, processors: Processors) -> None:
    place, part = function.path, function.part
    machine = layout.machine
    files.link(f"/sys/bus/pci/devices/{function.address}", place)
    subsystem = part.subsystem or (0, 0)
    local = processors.local(function.node)
    for name, value in (
        ("class", f"0x{part.class_code:06x}"),
        ("vendor", f"0x{part.vendor:04x}"),
        ("device", f"0x{part.device:04x}"),
        ("subsystem_vendor", f"0x{subsystem[0]:04x}"),
        ("subsystem_device", f"0x{subsystem[1]:04x}"),
        ("revision", f"0x{part.revision:02x}"),
        ("numa_node", function.node),
        ("local_cpulist", render(local)),
        ("local_cpus", processors.mask(local)),
        ("irq", 0),
    ):
        files.text(f"{place}/{name}", value)
    files.data(f"{place}/config", config_space(function, machine.root))
    if function.link is not None:
        files.text(f"{place}/current_link_speed", _speed(function.link.speed, machine.kernel))
        files.text(f"{place}/current_link_width", function.link.width)
        files.text(f"{place}/max_link_speed", _speed(function.max_speed, machine.kernel))
        files.text(f"{place}/max_link_width", function.max_width)
    if function.port_type != INTEGRATED and not machine.hypervisor:
        _errors(files, function)
    if function.secondary is not None:
        files.text(f"{place}/secondary_bus_number", function.secondary)
        files.text(f"{place}/subordinate_bus_number", function.subordinate or 0)
    if function.driver:
        files.link(f"{place}/driver", f"/sys/bus/pci/drivers/{function.driver}")
        files.link(f"/sys/bus/pci/drivers/{function.driver}/{function.address}", place)
    empty = f"0x{0:016x} 0x{0:016x} 0x{0:016x}\n" * 13
    files.raw(f"{place}/resource", _resource(function) if function.kind == "gpu" else empty)
    if part.virtual_functions and not machine.hypervisor:
        children = [f for f in layout.functions.values() if f.physical == function.address]
        files.text(f"{place}/sriov_totalvfs", part.virtual_functions)
        files.text(f"{place}/sriov_numvfs", len(children))
        for index, child in enumerate(children):
            files.link(f"{place}/virtfn{index}", child.path)
            files.link(f"{child.path}/physfn", place)


def _speed(gts: float, kernel: str) -> str:
    """``32.0 GT/s PCIe`` since Linux 5.8, ``8 GT/s`` before; ``Unknown`` where no link is."""
    if not gts:
        return "Unknown"
    major, minor = (int(number) for number in kernel.split(".")[:2])
    return f"{gts:.1f} GT/s PCIe" if (major, minor) >= (5, 8) else f"{gts:g} GT/s"


def _errors(files: Files, function: Function) -> None:
    """Advanced error reporting's counters since boot."""
    count = function.settings.correctable_errors
    rows = [f"{name} {count if name == 'BadTLP' else 0}" for name in _CORRECTABLE]
    files.raw(
        f"{function.path}/aer_dev_correctable",
        "\n".join([*rows, "HeaderOF 0", f"TOTAL_ERR_COR {count}", ""]),
    )
    for name in ("fatal", "nonfatal"):
        total = f"TOTAL_ERR_{name.upper()} 0"
        text = "\n".join([*(f"{row} 0" for row in _UNCORRECTABLE), total, ""])
        files.raw(f"{function.path}/aer_dev_{name}", text)


def _resource(function: Function) -> str:
    """A GPU's BARs: 16 MiB of registers, its memory window (BAR1), 32 MiB more; 64-bit each."""
    window = bar1_mib(function) << 20
    index = int(sha256(function.address.encode()).hexdigest()[:3], 16)
    rows = []
    for start, size, flags in (
        (0x9000_0000 + (index << 26), 16 << 20, 0x40200),
        (0x2000_0000_0000 + (index << 39), window, 0x14220C),
        (0x2000_0000_0000 + (index << 39) + window, 32 << 20, 0x14220C),
    ):
        rows.append(f"0x{start:016x} 0x{start + size - 1:016x} 0x{flags:016x}\n")
    empty = f"0x{0:016x} 0x{0:016x} 0x{0:016x}\n"
    first, second, third = rows
    return first + second + empty + third + empty * 9


def bar1_mib(function: Function) -> int:
    return function.settings.bar1_mib or parts.GPUS[function.part_name].bar1_mib


def hardware_address(name: str) -> str:
    """Six bytes of a Mellanox address in hex, made from the device's name."""
    return "946dae" + sha256(name.encode()).hexdigest()[:6]


def _guid(address: str) -> str:
    digits = address[:6] + "0300" + address[6:]
    return ":".join(digits[i : i + 4] for i in range(0, 16, 4))


def _rdma(files: Files, function: Function, index: int, layout: Layout) -> None:
    own, part = function.settings, parts.HCAS[function.part_name]
    place = f"{function.path}/infiniband/{function.rdma}"
    files.link(f"/sys/class/infiniband/{function.rdma}", place)
    files.link(f"{place}/device", function.path)
    address = hardware_address(function.rdma)
    first = hardware_address(next(f.rdma for f in layout.hcas() if f.bus == function.bus))
    for name, value in (
        ("node_guid", _guid(address)),
        ("sys_image_guid", _guid(first)),
        ("fw_ver", own.firmware or part.firmware),
        ("hca_type", part.hca_type),
        ("board_id", own.board_id or part.board_id),
        ("node_type", "1: CA"),
        ("node_desc", f"{layout.machine.hostname} {function.rdma}"),
    ):
        files.text(f"{place}/{name}", value)
    active = own.state == "ACTIVE"
    physical = own.physical_state or ("LinkUp" if active else "Polling")
    # A port without a link shows its driver's default rate: 10 (InfiniBand) or 40 (Ethernet) Gb/s.
    down = 40 if function.ethernet else 10
    rate = own.rate or (part.rate if physical == "LinkUp" else down)
    port = f"{place}/ports/1"
    for name, value in (
        ("state", f"{_STATES[own.state]}: {own.state}"),
        ("phys_state", f"{_PHYSICAL[physical]}: {physical}"),
        ("rate", f"{rate} Gb/sec ({_RATES[rate]})"),
        ("link_layer", "Ethernet" if function.ethernet else "InfiniBand"),
        ("lid", "0x0" if function.ethernet else f"{17 + index:#x}"),
        ("sm_lid", "0x0" if function.ethernet or not active else "0x1"),
        ("cap_mask", "0x04010000" if function.ethernet else "0xa651e848"),
    ):
        files.text(f"{port}/{name}", value)
    counters = {
        "symbol_error": 0,
        "link_error_recovery": 0,
        "link_downed": 0,
        "local_link_integrity_errors": 0,
        "port_rcv_errors": 0,
        "port_xmit_discards": 0,
        "port_rcv_data": 8_214_406_553 + index,
        "port_xmit_data": 8_190_733_012 + index,
        **own.counters,
    }
    for name, count in counters.items():
        files.text(f"{port}/counters/{name}", count)
    _gids(files, port, address, index, netdev(function) if function.ethernet else "")


def _gids(files: Files, port: str, address: str, index: int, interface: str) -> None:
    """The GID table: link-local, and on Ethernet the IPv4 address too, each as RoCE v1 and v2."""
    if interface:
        pieces = f"{int(address[:2], 16) ^ 2:02x}{address[2:6]}fffe{address[6:]}"
        local = "fe80000000000000" + pieces
        mapped = f"00000000000000000000ffff0a00{index + 1:02x}0a"
        rows = [(local, 1), (local, 2), (mapped, 1), (mapped, 2)]
    else:
        rows = [("fe80000000000000" + _guid(address).replace(":", ""), 1)]
    for slot, (digits, version) in enumerate(rows):
        text = ":".join(digits[i : i + 4] for i in range(0, 32, 4))
        files.text(f"{port}/gids/{slot}", text)
        files.text(f"{port}/gid_attrs/types/{slot}", ("IB/RoCE v1", "RoCE v2")[version - 1])
        if interface:
            files.text(f"{port}/gid_attrs/ndevs/{slot}", interface)
        else:
            files.missing(f"{port}/gid_attrs/ndevs/{slot}", INVALID)
    empty = ":".join(["0000"] * 8)
    for slot in range(len(rows), 8):
        files.text(f"{port}/gids/{slot}", empty)
        files.missing(f"{port}/gid_attrs/types/{slot}", INVALID)
        files.missing(f"{port}/gid_attrs/ndevs/{slot}", INVALID)


def netdev(function: Function) -> str:
    """The interface of an adapter: as described, else by systemd's predictable scheme."""
    if function.settings.netdev is not None:
        return function.settings.netdev
    domain, bus, rest = function.address.split(":")
    slot, _, index = rest.partition(".")
    prefix = "en" if function.ethernet or function.kind == "nic" else "ib"
    where = f"P{int(domain, 16)}" if int(domain, 16) else ""
    several = f"f{index}" if function.siblings > 1 else ""
    port = "np" + index if function.kind == "hca" and function.ethernet else ""
    return f"{prefix}{where}p{int(bus, 16)}s{int(slot, 16)}{several}{port}"


def _network(files: Files, layout: Layout) -> None:
    files.directory("/sys/class/net")
    for function in layout.functions.values():
        if function.kind in ("hca", "nic") and netdev(function):
            _interface(files, function)
    loopback = "/sys/devices/virtual/net/lo"
    files.link("/sys/class/net/lo", loopback)
    for name, value in (("operstate", "unknown"), ("mtu", "65536"), ("type", "772"),
                        ("carrier", "1"), ("address", "00:00:00:00:00:00")):  # fmt: skip
        files.text(f"{loopback}/{name}", value)


def _interface(files: Files, function: Function) -> None:
    own, name = function.settings, netdev(function)
    place = f"{function.path}/net/{name}"
    ethernet = function.kind == "nic" or function.ethernet
    up = own.state == "ACTIVE"
    digits = hardware_address(function.rdma or name)
    if ethernet:
        address = ":".join(digits[i : i + 2] for i in range(0, 12, 2))
    else:
        guid = _guid(digits).replace(":", "")
        raw = "00001049fe80000000000000" + guid
        address = ":".join(raw[i : i + 2] for i in range(0, 40, 2))
    files.link(f"/sys/class/net/{name}", place)
    files.link(f"{place}/device", function.path)
    for file, value in (
        ("operstate", "up" if up else "down"),
        ("mtu", "9000" if function.ethernet else "1500" if ethernet else "4092"),
        ("address", address),
        ("type", "1" if ethernet else "32"),
        ("carrier", "1" if up else "0"),
    ):
        files.text(f"{place}/{file}", value)
    part = parts.HCAS.get(function.part_name)
    rate = own.rate or (part.rate if part else 1)
    if up and ethernet:
        files.text(f"{place}/speed", rate * 1000)
        files.text(f"{place}/duplex", "full")
    else:
        files.missing(f"{place}/speed", INVALID)


def _nvme(files: Files, function: Function, index: int) -> None:
    place = f"{function.path}/nvme/nvme{index}"
    files.link(f"/sys/class/nvme/nvme{index}", place)
    files.link(f"{place}/device", function.path)
    for name, value in (
        ("model", f"{function.part.name:<40}"),
        ("state", "live"),
        ("transport", "pcie"),
        ("address", function.address),
        ("numa_node", str(function.node)),
        ("firmware_rev", "1.0.0   "),
    ):
        files.text(f"{place}/{name}", value)
