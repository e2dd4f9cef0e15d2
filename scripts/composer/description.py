"""The description of a machine: typed settings, and the PCI tree as indented lines.

The tree is read line by line; what is indented deeper hangs below::

    host 0000:15 sapphire-rapids node=0
      01.0 switch pex890xx
        00.0 nvme micron-7450
        01.0 gpu h100-sxm5-80gb
        02.0 hca cx7 mlx5_0 eth

``host DOMAIN:BUS PLATFORM`` is a root complex. Every other line is ``DEVICE.FUNCTION KIND PART``
with RDMA device names (or interface names of a NIC) and ``setting=value`` behind it. The number is
that of the port which carries the device: ports are made, not described, and bus numbers are handed
out depth first, as firmware does. ``direct`` puts a device on the host's own bus without a port,
``empty`` is a port with nothing behind it, ``port=PART`` chooses another port than the platform's,
``eth`` makes an RDMA port an Ethernet one.

Settings of any function can also stand in the table ``change``, by PCI address, ``gpuN`` (NVML
order) or RDMA device name: ``change.gpu3 = {width = 8}``.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from composer import parts


class DescriptionError(ValueError):
    """The description names something that does not exist or cannot be."""


class Settings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What may differ from the part's own values, for one function."""

    absent: bool = False
    """The device is not there; its port stays, with the link down."""

    # PCI
    bus: str | None = None
    """First bus number (hex) behind the port, where firmware skipped some."""
    node: int | None = None
    """NUMA node; by default that of the host bridge. -1 where firmware does not say."""
    speed: float | None = None
    """GT/s of the trained link, at both its ends."""
    width: int | None = None
    """Lanes of the trained link, at both its ends."""
    max_speed: float | None = None
    max_width: int | None = None
    slot_speed: float | None = None
    """The most that the port above can do, GT/s."""
    slot_width: int | None = None
    acs: str | None = None
    """ACS control bits (hex) of the port above the device; of this port when given for a port."""
    ports_acs: str | None = None
    """ACS control bits (hex) of the ports that a host bridge or switch has."""
    driver: str | None = None
    correctable_errors: int = 0
    virtual_functions: int = 0
    id: str | None = None
    """vendor:device instead of the part's."""
    subsystem: str | None = None

    # GPU
    module: int | None = None
    """NVML's module id; by default the index plus one."""
    memory_node: int | None = None
    """NUMA node that the GPU's memory is (Grace)."""
    error: str | None = None
    """NVML error that every call on this GPU answers (GPU_IS_LOST, RESET_REQUIRED)."""
    links_down: list[int] = []
    """NVLink ports that are inactive."""
    persistence: bool = True
    mig: bool = False
    performance_state: int | None = None
    clock_reasons: int = 1
    """Bit mask of NVML; 1 is idle."""
    ecc: bool = True
    remapped_rows: list[int] = msgspec.field(default_factory=lambda: [0, 0, 0, 0])
    """Correctable, uncorrectable, pending, failed."""
    recovery_action: int = 0
    replays: int = 0
    fabric_state: int = 3
    fabric_status: int = 0
    fabric_health_mask: int | None = None
    fabric_health_summary: int | None = None
    c2c_down: bool = False
    bar1_mib: int | None = None
    processes: list[dict[str, int]] = []
    """Compute processes, each with pid and memory (MiB)."""
    graphics: list[dict[str, int]] = []
    """Graphics processes: a display server."""

    # HCA and NIC
    state: str = "ACTIVE"
    physical_state: str | None = None
    rate: int | None = None
    """Gb/s of the port, where it runs below its part."""
    firmware: str | None = None
    board_id: str | None = None
    netdev: str | None = None
    counters: dict[str, int] = {}


class Item(msgspec.Struct, kw_only=True):
    """One line of the tree."""

    number: str
    kind: str
    part: str
    names: list[str] = []
    ethernet: bool = False
    direct: bool = False
    port: str = ""
    """Part of the port above, where it is not the host's or switch's own."""
    settings: dict[str, str] = {}
    children: list[Item] = []


class Cpu(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    vendor: str
    name: str = ""
    family: int = 0
    model: int = 0
    stepping: int = 0
    part: int = 0
    """MIDR part number (Arm)."""
    packages: int
    nodes_per_package: int = 1
    cores: int
    """Cores of one package."""
    threads: int = 1
    numbering: str = "block"
    """``block``: all first threads, then all second threads. ``interleaved``: packages take turns.
    ``paired``: the threads of a core are neighbours (virtual machines)."""
    cache_kib: list[int]
    """Level 1 data, level 1 instructions, level 2, level 3."""
    l3_cores: int | None = None
    """Cores that share a level-3 cache; by default a package."""
    mhz: float = 2000.0
    governor: str = ""
    """Empty without frequency scaling (virtual machines)."""


class Memory(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    node_mib: int | list[int]
    near: int = 12
    """Distance to a node of the same package."""
    far: int = 21
    """Distance to a node of another package."""
    gpu_mib: dict[int, int] = {}
    """MiB by node for nodes that are GPU memory (Grace)."""
    gpu_nodes_each: int = 8
    """Nodes that firmware sets aside for a GPU: its memory and places for MIG instances."""
    gpu_distances: tuple[int, int, int, int] = (80, 120, 11, 40)
    """From a GPU's node to its own package, other packages, the same GPU's nodes, other GPUs'."""
    hugepages: int = 0
    """2 MiB pages reserved on each node with CPUs."""


class Switched(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """GPUs whose links go to NVSwitches. ``switches`` are places in the list of NVSwitch functions;
    empty where the switches are no PCI functions of this machine."""

    gpus: list[int]
    links: list[int]
    """Links to each switch."""
    switches: list[int] = []


class NvLink(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pairs: dict[str, int] = {}
    """``0-3 = 2``: two links between GPU 0 and GPU 3."""
    switched: list[Switched] = []
    clique: int = 0
    cluster: str = "00000000-0000-0000-0000-000000000000"
    chassis: str = ""
    slot: int = 255
    tray: int = 255


class Machine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    hostname: str
    captured_at: str = "2026-09-01T12:00:00Z"
    kernel: str
    build: str = "(buildd@lcy02) (gcc 11.4.0) #1 SMP"
    command_line: str = "BOOT_IMAGE=/boot/vmlinuz root=/dev/mapper/root ro"
    root: bool = True
    """Recorded as root: config space is readable whole; otherwise its first 64 bytes."""
    driver: str = ""
    """NVIDIA driver version; empty without a driver."""
    cuda: str = ""
    open_modules: bool = False
    dmi: dict[str, str] = {}
    hypervisor: str = ""
    """``microsoft``, ``kvm``, ``xen``: sets the CPU's flag; empty on bare metal."""
    iommu: str = ""
    """Default domain type: ``identity``, ``DMA``, ``DMA-FQ``; empty without IOMMU groups."""
    modules: dict[str, str] = {}
    """Kernel modules beyond the drivers in use, by name with their version."""
    memory_peers: list[str] = []
    services: dict[str, str] = {}
    """systemd units of the driver: ``active``, ``inactive``, ``failed``."""
    imex_channels: int = 0
    numa_balancing: int = 0
    memlock_kib: int = -1
    allowed_cpus: str = ""
    """CPUs that the recording process may use; all by default."""
    cgroup: str = "0::/user.slice/user-1000.slice/session-4.scope"
    gateway: str = ""
    """Network interface with the default route."""
    nic_order: list[str] = []
    """Order of the RDMA devices in ``nvidia-smi topo -m``; by default that of their names."""
    cpu: Cpu
    memory: Memory
    nvlink: NvLink = msgspec.field(default_factory=NvLink)
    tree: str
    change: dict[str, dict[str, Any]] = {}


_NUMBER = re.compile(r"[0-9a-f]{2}\.[0-7]")
_FLAGS = {"eth", "ib", "direct"}


def read_tree(text: str) -> list[Item]:
    """The root complexes of a tree text, with all that hangs below them."""
    roots: list[Item] = []
    open_items: list[tuple[int, Item]] = []
    for raw in text.splitlines():
        line = raw.partition("#")[0].rstrip()
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        item = _read_line(line.split())
        while open_items and open_items[-1][0] >= depth:
            open_items.pop()
        (open_items[-1][1].children if open_items else roots).append(item)
        open_items.append((depth, item))
    if any(item.kind != "host" for item in roots):
        raise DescriptionError("the tree's outermost lines must be hosts")
    return roots


def _read_line(words: list[str]) -> Item:
    """One line: number and kind, part, then names, flags and settings in any order."""
    if words[0] == "host":
        number, kind, rest = words[1], "host", words[2:]
        if not rest or rest[0] not in parts.PLATFORMS:
            raise DescriptionError(f"host {number} needs a platform: {', '.join(parts.PLATFORMS)}")
    else:
        number, kind, rest = words[0], words[1], words[2:]
        if not _NUMBER.fullmatch(number):
            raise DescriptionError(f"{number!r} is no device number such as 01.0")
    bare = [word for word in rest if "=" not in word]
    plain = [word for word in bare if word not in _FLAGS]
    values = dict(word.split("=", 1) for word in rest if "=" in word)
    return Item(
        number=number,
        kind=kind,
        part=plain[0] if plain else "",
        names=plain[1:],
        ethernet="eth" in bare,
        direct="direct" in bare,
        port=values.pop("port", ""),
        settings=values,
    )


def settings(values: dict[str, Any]) -> Settings:
    """Settings from a line's words or a table of ``change``; both spell numbers alike."""
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise DescriptionError(f"{values}: {error}") from None


def read(description: dict[str, Any]) -> Machine:
    """The typed machine of a description as TOML gives it."""
    try:
        return msgspec.convert(description["machine"], Machine, strict=False)
    except KeyError:
        raise DescriptionError("no [machine] table") from None
    except msgspec.ValidationError as error:
        raise DescriptionError(str(error)) from None
