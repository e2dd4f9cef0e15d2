"""Nodes and links of the graph. All are frozen; GB/s is 10^9 bytes per second in one direction.

A field that is None is unknown or not applicable; ``missing`` says which and why, ``sources`` says
where a value was read when more than one place could have told it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from gputopo.facts import Missing


class Pcie(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The link above a device: what it trained to, and what each end could do.

    Speeds are GT/s a lane. ``max_speed_gts`` and ``max_width`` are the smaller of both ends, which
    is what the link can do; where only one end is readable the other is None and so are these.
    """

    speed_gts: float | None = None
    width: int | None = None
    max_speed_gts: float | None = None
    max_width: int | None = None
    device_max_speed_gts: float | None = None
    device_max_width: int | None = None
    port_max_speed_gts: float | None = None
    port_max_width: int | None = None


class Node(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=False):
    """What all nodes have. ``parent`` is the node above in the tree (None for the machine)."""

    id: str
    name: str | None = None
    parent: str | None = None
    sources: dict[str, str] = {}
    missing: dict[str, Missing] = {}


class Machine(Node, frozen=True, kw_only=True, tag="machine"):
    memory_bytes: int | None = None


class Package(Node, frozen=True, kw_only=True, tag="package"):
    """A CPU package. ``cores`` lists the hardware threads of each core."""

    index: int | None
    cpus: str
    cores: list[str]
    l3_groups: list[str]
    numa: list[int]


class Numa(Node, frozen=True, kw_only=True, tag="numa"):
    """A NUMA node. ``role``: ``cpu``; ``gpu-memory`` (Grace, POWER9); ``memory`` (CXL, Optane, or
    GPU memory that no driver claimed); ``empty``; ``unknown`` where the source tells no CPUs."""

    index: int
    role: str
    cpus: str | None
    memory_bytes: int | None
    distances: dict[str, int]
    hugepages: dict[str, int] = {}
    gpu: str | None = None


class Device(Node, frozen=True, kw_only=True):
    """What all PCI devices have. ``numa`` is the CPU node that the device is attached to."""

    pci: str | None = None
    numa: int | None = None
    cpus: str | None = None


class HostBridge(Device, frozen=True, kw_only=True, tag="host-bridge"):
    """A PCI root complex as the kernel names it (``pci0000:15``)."""


class PciBridge(Device, frozen=True, kw_only=True, tag="pci-bridge"):
    """A root port, a switch port or a bridge. ``role``: ``root-port``, ``upstream-port``,
    ``downstream-port``, ``pcie-to-pci-bridge``; from config space, else from its place in the tree.
    """

    role: str
    vendor: int | None
    device: int | None
    pcie: Pcie | None = None
    acs: list[str] | None = None
    iommu_type: str | None = None


class PciDevice(Device, frozen=True, kw_only=True, tag="pci-device"):
    """A function that is nothing of the kinds below: storage, chipset, display."""

    class_code: int
    vendor: int | None
    device: int | None


class NvLinks(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's NVLinks: how many it has, how many are active, which are not (None: cannot tell)."""

    count: int
    active: int | None
    inactive: list[int]
    version: str | None
    gbytes_per_s: float | None


class GpuFabric(msgspec.Struct, frozen=True, kw_only=True):
    state: str
    status: int
    cluster: str
    clique: int
    health_mask: int | None = None
    health_summary: int | None = None


class Mig(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    uuid: str
    name: str
    memory_bytes: int


class Gpu(Device, frozen=True, kw_only=True, tag="gpu"):
    """A GPU. ``index`` is NVML's, which is PCI order; None if NVML runs and does not have it.

    ``numa`` is its CPU node, ``memory_numa`` the node that its own memory is (Grace, POWER9).
    """

    index: int | None
    uuid: str | None = None
    architecture: str | None = None
    compute_capability: str | None = None
    memory_bytes: int | None = None
    bar1_bytes: int | None = None
    memory_numa: int | None = None
    minor: int | None = None
    vendor: int | None = None
    device: int | None = None
    driver: str | None = None
    iommu_type: str | None = None
    pcie: Pcie | None = None
    nvlink: NvLinks | None = None
    fabric: GpuFabric | None = None
    mig_mode: bool | None = None
    mig: list[Mig] = []
    persistence: bool | None = None
    performance_state: int | None = None
    processes: int | None = None
    lost: str | None = None
    nearest_hcas: list[str] = []
    nearest_hca_class: str | None = None


class NvSwitch(Device, frozen=True, kw_only=True, tag="nvswitch"):
    """An NVSwitch; without PCI address where the host sees it only through its GPUs' links."""

    device: int | None = None
    pcie: Pcie | None = None


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA port; ``rate_gbps`` is Gb/s on the wire."""

    port: int
    state: str | None
    physical_state: str | None
    link_layer: str | None
    rate_gbps: float | None


class Hca(Device, frozen=True, kw_only=True, tag="hca"):
    """An RDMA device. A software device (rxe, siw) has no ``pci`` and stands in no path."""

    ports: list[Port]
    netdevs: list[str]
    software: bool = False
    firmware: str | None = None
    board_id: str | None = None
    model: str | None = None
    vendor: int | None = None
    device: int | None = None
    driver: str | None = None
    iommu_type: str | None = None
    pcie: Pcie | None = None
    physical_function: str | None = None
    virtual_functions: int = 0


class Nic(Device, frozen=True, kw_only=True, tag="nic"):
    """A network function without an RDMA device. ``speed_gbps`` is Gb/s; None while down."""

    netdevs: list[str]
    vendor: int | None
    device: int | None
    state: str | None = None
    speed_gbps: float | None = None
    default_route: bool = False
    driver: str | None = None
    pcie: Pcie | None = None
    physical_function: str | None = None
    virtual_functions: int = 0


class Nvme(Device, frozen=True, kw_only=True, tag="nvme"):
    model: str | None = None
    vendor: int | None = None
    device: int | None = None
    driver: str | None = None
    pcie: Pcie | None = None


AnyNode = (
    Machine
    | Package
    | Numa
    | HostBridge
    | PciBridge
    | PciDevice
    | Gpu
    | NvSwitch
    | Hca
    | Nic
    | Nvme
)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A link between two nodes. ``count`` is lanes for PCIe, links for NVLink and C2C.

    ``gbytes_per_s`` is what it carries as it is trained, ``max_gbytes_per_s`` what both ends could
    do; both theoretical. ``state``: ``up``, ``down``, or ``unknown``.
    """

    PCIE: ClassVar[str] = "pcie"

    a: str
    b: str
    kind: str
    count: int | None = None
    version: str | None = None
    gbytes_per_s: float | None = None
    max_gbytes_per_s: float | None = None
    state: str = "unknown"


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    """Two sources that say different things of one fact; ``kept`` is the one that was believed."""

    subjects: list[str]
    fact: str
    kept: str
    kept_source: str
    other: str
    other_source: str


class HostInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The machine in a few words. ``packages``, ``cores`` and ``pus`` count what is online."""

    hostname: str | None
    vendor: str | None
    product: str | None
    kernel: str | None
    architecture: str | None
    driver: str | None
    cuda: str | None
    cpu_model: str | None
    virtualization: str | None
    container: str | None
    packages: int | None
    cores: int | None
    pus: int | None
    allowed_cpus: str | None
    memory_bytes: int | None
    missing: dict[str, Missing] = {}


def plain(value: Any) -> Any:
    """A node or link as plain data (for JSON and for tests)."""
    return msgspec.to_builtins(value)
