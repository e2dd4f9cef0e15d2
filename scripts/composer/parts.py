"""The parts that machines are put together from: ids, sizes and limits, each with its source.

Vendor and device ids are those of the PCI ID database and of the machines named in the fixtures;
memory sizes in MiB are what the driver reports (``nvidia-smi -q``), somewhat below what is sold;
NVLink rates are those of NVIDIA's NVML mock (NVIDIA/k8s-test-infra). Subsystem ids, VBIOS, firmware
and board numbers without a source beside them are stand-ins of the right form.
"""

from __future__ import annotations

import msgspec


class Companion(msgspec.Struct, frozen=True):
    """Another function of the same device: a GPU's audio, a switch's management endpoint."""

    function: int
    class_code: int
    vendor: int
    device: int
    driver: str = ""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A PCI device. ``generation`` and ``width`` are the most its link can do; width 0 is no link
    (a function inside the root complex)."""

    kind: str
    vendor: int
    device: int
    class_code: int
    revision: int = 0
    subsystem: tuple[int, int] | None = None
    generation: int = 0
    width: int = 0
    driver: str = ""
    companions: tuple[Companion, ...] = ()
    virtual_functions: int = 0
    """TotalVFs of the SR-IOV capability; 0 without one."""
    virtual_device: int = 0
    acs_capability: int | None = None
    """ACS capability bits of a switch's downstream ports, or of a root port; None without ACS."""
    name: str = ""
    """The model text of a drive."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML says of a GPU beyond PCI. ``nvlink_mbytes_per_s`` is one link, one direction;
    ``nvlink_version`` is NVML's enumeration (2: 2.0, 4: 3.0, 6: 4.0, 7: 5.0)."""

    name: str
    architecture: int
    capability: tuple[int, int]
    memory_mib: int
    bar1_mib: int
    vbios: str
    part_number: str | None = None
    nvlink_version: int = 0
    nvlink_links: int = 0
    nvlink_mbytes_per_s: int = 0
    mig: bool = False
    ecc: bool = True
    row_remapping: bool = True
    fabric: bool = False
    """Registers with a fabric manager (Hopper and later behind NVSwitch)."""
    fabric_health_mask: int = 0
    fabric_health_summary: int = 0
    platform: bool = False
    """Answers nvmlDeviceGetPlatformInfo (Blackwell)."""
    c2c_links: int = 0
    c2c_mbytes_per_s: int = 0
    peer_over_pcie: int = 0
    """nvmlGpuP2PStatus_t of two such GPUs without NVLink: 0 allowed, 2 not supported by the GPU."""
    peer_across_sockets: int = 0
    """The same for GPUs on different sockets: 3 is topology not supported (DGX-1's zeros in
    p2pBandwidthLatencyTest)."""
    power_w: int = 0
    """Default power limit in W (data sheets: TDP)."""
    clock_mhz: int = 0
    """Default application clock of the SMs in MHz (``nvidia-smi -q`` of B200, GB200 and T4; data
    sheets' boost clock else); 0 where there are no application clocks (GeForce)."""
    idle_state: int = 0
    """Performance state at idle: data-centre parts stay in P0, others drop to P8."""


class Hca(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA adapter. ``rate`` is Gb/s of one port."""

    hca_type: str
    board_id: str
    firmware: str
    rate: int


PORTS = {
    # Dell server with 8 H100 (lspci -vvv): root port of Sapphire Rapids, chipset root port.
    "intel-spr": Part(
        kind="port", vendor=0x8086, device=0x352A, class_code=0x060400, revision=0x04,
        subsystem=(0x8086, 0x0000), generation=5, width=16, driver="pcieport", acs_capability=0x1F,
    ),
    "intel-chipset": Part(
        kind="port", vendor=0x8086, device=0x1BBC, class_code=0x060400, revision=0x11,
        generation=3, width=1, driver="pcieport", acs_capability=0x13,
    ),
    "intel-bdw": Part(
        kind="port", vendor=0x8086, device=0x6F08, class_code=0x060400, revision=0x01,
        subsystem=(0x8086, 0x0000), generation=3, width=16, driver="pcieport", acs_capability=0x1F,
    ),
    "intel-skx": Part(
        kind="port", vendor=0x8086, device=0x2030, class_code=0x060400, revision=0x04,
        subsystem=(0x8086, 0x0000), generation=3, width=16, driver="pcieport", acs_capability=0x1F,
    ),
    "intel-raptor": Part(
        kind="port", vendor=0x8086, device=0xA70D, class_code=0x060400, revision=0x01,
        generation=5, width=16, driver="pcieport", acs_capability=0x1F,
    ),
    "amd-rome": Part(
        kind="port", vendor=0x1022, device=0x1483, class_code=0x060400,
        generation=4, width=16, driver="pcieport", acs_capability=0x5F,
    ),
    "amd-genoa": Part(
        kind="port", vendor=0x1022, device=0x14AB, class_code=0x060400, revision=0x01,
        generation=5, width=16, driver="pcieport", acs_capability=0x5F,
    ),
    "grace": Part(
        kind="port", vendor=0x10DE, device=0x22B1, class_code=0x060400,
        generation=5, width=16, driver="pcieport", acs_capability=0x5F,
    ),
}  # fmt: skip
"""Root ports by platform."""

SWITCHES = {
    # Dell server with 8 H100: one PEX89144-class switch for each GPU.
    "pex890xx": Part(
        kind="switch", vendor=0x1000, device=0xC030, class_code=0x060400, revision=0xB0,
        subsystem=(0x1028, 0x224B), generation=5, width=16, driver="pcieport", acs_capability=0x5F,
    ),
    "pex880xx": Part(
        kind="switch", vendor=0x1000, device=0xC010, class_code=0x060400, revision=0xB0,
        subsystem=(0x1000, 0xA064), generation=4, width=16, driver="pcieport", acs_capability=0x5F,
    ),
    "pex8796": Part(
        kind="switch", vendor=0x10B5, device=0x8796, class_code=0x060400, revision=0xAB,
        subsystem=(0x10B5, 0x8796), generation=3, width=16, driver="pcieport", acs_capability=0x5F,
    ),
    # hwloc XML of a DGX-2: GPUs behind two levels of 97xx, NVSwitches behind an 8725.
    "pex9781": Part(
        kind="switch", vendor=0x10B5, device=0x9781, class_code=0x060400, revision=0xB0,
        subsystem=(0x10B5, 0x9781), generation=3, width=16, driver="pcieport", acs_capability=0x5F,
    ),
    "pex9797": Part(
        kind="switch", vendor=0x10B5, device=0x9797, class_code=0x060400, revision=0xB0,
        subsystem=(0x10B5, 0x9797), generation=3, width=16, driver="pcieport", acs_capability=0x5F,
    ),
    "pex8725": Part(
        kind="switch", vendor=0x10B5, device=0x8725, class_code=0x060400, revision=0xCA,
        subsystem=(0x10B5, 0x8725), generation=3, width=4, driver="pcieport", acs_capability=0x5F,
    ),
    # HGX H100 baseboard: the management switch in front of the NVSwitches, x2 (Dell lspci).
    "switchtec": Part(
        kind="switch", vendor=0x11F8, device=0x4128, class_code=0x060400,
        subsystem=(0x10DE, 0x1643), generation=4, width=2, driver="pcieport", acs_capability=0x7F,
        companions=(Companion(1, 0x058000, 0x11F8, 0x4128, "switchtec"),),
    ),
    # The switch inside a ConnectX-7 or BlueField-3 that carries its functions.
    "cx7-bridge": Part(
        kind="switch", vendor=0x15B3, device=0x197B, class_code=0x060400,
        subsystem=(0x15B3, 0x197B), generation=5, width=16, driver="pcieport", acs_capability=0x5F,
    ),
}  # fmt: skip
"""PCIe switches; a part stands for the upstream port and all downstream ports."""

BRIDGES = {
    "plda": Part(
        kind="bridge", vendor=0x1556, device=0xBE00, class_code=0x060400, revision=0x02,
        generation=2, width=1,
    ),
    "ast1150": Part(
        kind="bridge", vendor=0x1A03, device=0x1150, class_code=0x060400, revision=0x04,
        generation=2, width=1,
    ),
}  # fmt: skip
"""PCIe-to-PCI bridges in front of a server's display controller."""


def _gpu(device: int, subsystem: int, generation: int, revision: int = 0xA1, vfs: int = 0) -> Part:
    return Part(
        kind="gpu",
        vendor=0x10DE,
        device=device,
        class_code=0x030200,
        revision=revision,
        subsystem=(0x10DE, subsystem),
        generation=generation,
        width=16,
        driver="nvidia",
        virtual_functions=vfs,
    )


def _mellanox(device: int, generation: int, subsystem: int, vfs: int = 16) -> Part:
    return Part(
        kind="hca", vendor=0x15B3, device=device, class_code=0x020000,
        subsystem=(0x15B3, subsystem), generation=generation, width=16,
        driver="mlx5_core", virtual_functions=vfs, virtual_device=0x101E,
    )  # fmt: skip


DEVICES = {
    "v100-sxm2-32gb": _gpu(0x1DB5, 0x1249, 3),
    "v100-sxm3-32gb": _gpu(0x1DB8, 0x131D, 3),
    "a100-sxm4-40gb": _gpu(0x20B0, 0x134F, 4, vfs=20),
    "a100-sxm4-80gb": _gpu(0x20B2, 0x1463, 4, vfs=20),
    "h100-sxm5-80gb": _gpu(0x2330, 0x16C1, 5, vfs=32),
    "b200-sxm": _gpu(0x2901, 0x1999, 5, vfs=32),
    "gb200": _gpu(0x2941, 0x2046, 6, vfs=32),
    "gh200-480gb": _gpu(0x2342, 0x16EB, 5),
    "l40s": _gpu(0x26B9, 0x1851, 4, vfs=32),
    "t4": _gpu(0x1EB8, 0x12A2, 3),
    "rtx-4090": Part(
        kind="gpu", vendor=0x10DE, device=0x2684, class_code=0x030000, revision=0xA1,
        subsystem=(0x10DE, 0x167C), generation=4, width=16, driver="nvidia",
        companions=(Companion(1, 0x040300, 0x10DE, 0x22BA, "snd_hda_intel"),),
    ),
    "nvswitch1": Part(
        kind="nvswitch", vendor=0x10DE, device=0x1AC2, class_code=0x068000, revision=0xA1,
        subsystem=(0x10DE, 0x12FD), generation=3, width=1, driver="nvidia-nvswitch",
    ),
    "nvswitch2": Part(
        kind="nvswitch", vendor=0x10DE, device=0x1AF1, class_code=0x068000, revision=0xA1,
        subsystem=(0x10DE, 0x1463), generation=4, width=4, driver="nvidia-nvswitch",
    ),
    "nvswitch3": Part(
        kind="nvswitch", vendor=0x10DE, device=0x22A3, class_code=0x068000, revision=0xA1,
        subsystem=(0x10DE, 0x1796), generation=4, width=2, driver="nvidia-nvswitch",
    ),
    "cx4": _mellanox(0x1013, 3, 0x0014),
    "cx5": _mellanox(0x1017, 3, 0x0008),
    "cx6": _mellanox(0x101B, 4, 0x0007),
    "cx6dx": _mellanox(0x101D, 4, 0x0016, vfs=8),
    "cx7": _mellanox(0x1021, 5, 0x0023),
    "bf3": _mellanox(0xA2DC, 5, 0x0009),
    # A virtual function that a hypervisor passed to a guest: the guest sees no SR-IOV of its own.
    "cx7-vf": msgspec.structs.replace(
        _mellanox(0x101E, 5, 0x0023, vfs=0), virtual_device=0, kind="hca"
    ),
    "cx5-vf": msgspec.structs.replace(
        _mellanox(0x1018, 3, 0x0190, vfs=0), virtual_device=0, kind="hca"
    ),
    "bcm5720": Part(
        kind="nic", vendor=0x14E4, device=0x165F, class_code=0x020000, subsystem=(0x1028, 0x0A6B),
        generation=2, width=2, driver="tg3",
    ),
    "i210": Part(
        kind="nic", vendor=0x8086, device=0x1533, class_code=0x020000, revision=0x03,
        subsystem=(0x8086, 0x0001), generation=1, width=1, driver="igb",
    ),
    "x550": Part(
        kind="nic", vendor=0x8086, device=0x1563, class_code=0x020000, revision=0x01,
        subsystem=(0x8086, 0x001D), generation=3, width=4, driver="ixgbe",
    ),
    "aqc113": Part(
        kind="nic", vendor=0x1D6A, device=0x04C0, class_code=0x020000, revision=0x03,
        subsystem=(0x1043, 0x87F5), generation=4, width=1, driver="atlantic",
    ),
    "ena": Part(
        kind="nic", vendor=0x1D0F, device=0xEC20, class_code=0x020000, subsystem=(0x1D0F, 0xEC20),
        driver="ena",
    ),
    "micron-7450": Part(
        kind="nvme", vendor=0x1344, device=0x51C3, class_code=0x010802, revision=0x01,
        subsystem=(0x1028, 0x2278), generation=4, width=4, driver="nvme",
        name="Dell Ent NVMe PM 7450 RI 960GB",
    ),
    "intel-p5600": Part(
        kind="nvme", vendor=0x8086, device=0x0B60, class_code=0x010802, subsystem=(0x8086, 0x8008),
        generation=4, width=4, driver="nvme", name="Dell Ent NVMe P5600 MU U.2 3.2TB",
    ),
    "samsung-pm1733": Part(
        kind="nvme", vendor=0x144D, device=0xA824, class_code=0x010802, subsystem=(0x144D, 0xA801),
        generation=4, width=4, driver="nvme", name="SAMSUNG MZWLJ3T8HBLS-00007",
    ),
    "samsung-pm1725": Part(
        kind="nvme", vendor=0x144D, device=0xA822, class_code=0x010802, revision=0x01,
        subsystem=(0x144D, 0xA801), generation=3, width=4, driver="nvme",
        name="SAMSUNG MZWLL3T8HAJQ-00005",
    ),
    "samsung-980pro": Part(
        kind="nvme", vendor=0x144D, device=0xA80A, class_code=0x010802, subsystem=(0x144D, 0xA801),
        generation=4, width=4, driver="nvme", name="Samsung SSD 980 PRO 2TB",
    ),
    "amazon-ebs": Part(
        kind="nvme", vendor=0x1D0F, device=0x8061, class_code=0x010802, driver="nvme",
        subsystem=(0x1D0F, 0x8061), name="Amazon Elastic Block Store",
    ),
    "azure-nvme": Part(
        kind="nvme", vendor=0x1414, device=0xB111, class_code=0x010802, subsystem=(0x1414, 0xB111),
        generation=3, width=4, driver="nvme", name="Microsoft NVMe Direct Disk v2",
    ),
    "broadcom-endpoint": Part(
        kind="device", vendor=0x1000, device=0x00B2, class_code=0x010700, revision=0xB0,
        subsystem=(0x1028, 0x224B), generation=5, width=16, driver="mpt3sas",
    ),
    "aspeed": Part(
        kind="vga", vendor=0x1A03, device=0x2000, class_code=0x030000, revision=0x41,
        subsystem=(0x1A03, 0x2000), driver="ast",
    ),
    "matrox": Part(
        kind="vga", vendor=0x102B, device=0x0536, class_code=0x030000, revision=0x04,
        subsystem=(0x1028, 0x0B73), driver="mgag200",
    ),
    "uhd770": Part(
        kind="vga", vendor=0x8086, device=0xA780, class_code=0x030000, revision=0x04,
        subsystem=(0x1043, 0x8882), driver="i915",
    ),
    "qemu-vga": Part(
        kind="vga", vendor=0x1D0F, device=0x1111, class_code=0x030000, subsystem=(0x1D0F, 0x1111),
    ),
    # Functions inside a root complex: no link.
    "intel-vtd": Part(kind="device", vendor=0x8086, device=0x09A2, class_code=0x088000,
                      revision=0x20, subsystem=(0x1028, 0x0B73)),
    "intel-mesh": Part(kind="device", vendor=0x8086, device=0x09A4, class_code=0x088000,
                       revision=0x20, subsystem=(0x1028, 0x0B73)),
    "intel-ras": Part(kind="device", vendor=0x8086, device=0x09A3, class_code=0x088000,
                      revision=0x20, subsystem=(0x1028, 0x0B73)),
    "intel-rcec": Part(kind="device", vendor=0x8086, device=0x0B23, class_code=0x080700,
                       subsystem=(0x1028, 0x0B73), driver="pcieport"),
    "amd-root": Part(kind="device", vendor=0x1022, device=0x1480, class_code=0x060000,
                     subsystem=(0x1022, 0x1480)),
    "amd-dummy": Part(kind="device", vendor=0x1022, device=0x1482, class_code=0x060000),
    "amd-genoa-root": Part(kind="device", vendor=0x1022, device=0x14A4, class_code=0x060000,
                           subsystem=(0x1022, 0x14A4)),
    "i440fx": Part(kind="device", vendor=0x8086, device=0x1237, class_code=0x060000,
                   subsystem=(0x1AF4, 0x1100)),
    "piix3-isa": Part(kind="device", vendor=0x8086, device=0x7000, class_code=0x060100,
                      subsystem=(0x1AF4, 0x1100)),
    "intel-xhci": Part(kind="device", vendor=0x8086, device=0x1BCD, class_code=0x0C0330,
                       revision=0x11, subsystem=(0x1028, 0x0B73), driver="xhci_hcd"),
    "intel-ahci": Part(kind="device", vendor=0x8086, device=0x1BF2, class_code=0x010601,
                       revision=0x11, subsystem=(0x1028, 0x0B73), driver="ahci"),
    "intel-lpc": Part(kind="device", vendor=0x8086, device=0x1B81, class_code=0x060100,
                      revision=0x11, subsystem=(0x1028, 0x0B73)),
    "pc-host": Part(kind="device", vendor=0x8086, device=0xA703, class_code=0x060000, revision=0x01,
                    subsystem=(0x1043, 0x8882)),
    "pc-xhci": Part(kind="device", vendor=0x8086, device=0x7A60, class_code=0x0C0330,
                    revision=0x11, subsystem=(0x1043, 0x8882), driver="xhci_hcd"),
}  # fmt: skip
"""Everything that is neither port nor switch."""

PLATFORMS: dict[str, tuple[str, dict[str, str]]] = {
    "sapphire-rapids": (
        "intel-spr",
        {"00.0": "intel-vtd", "00.1": "intel-mesh", "00.2": "intel-ras", "00.4": "intel-rcec"},
    ),
    "broadwell": ("intel-bdw", {}),
    "skylake": ("intel-skx", {}),
    "rome": ("amd-rome", {"00.0": "amd-root", "01.0": "amd-dummy"}),
    "genoa": ("amd-genoa", {"00.0": "amd-genoa-root"}),
    "grace": ("grace", {}),
    "raptor-lake": ("intel-raptor", {"00.0": "pc-host"}),
    "none": ("intel-spr", {}),
}
"""Of a host bridge: its root-port part, and the functions every such root complex has."""

GPUS = {
    "v100-sxm2-32gb": Gpu(
        name="Tesla V100-SXM2-32GB", power_w=300, clock_mhz=1290,
        architecture=5, capability=(7, 0), memory_mib=32510,
        bar1_mib=32768, vbios="88.00.48.00.02", nvlink_version=2, nvlink_links=6,
        nvlink_mbytes_per_s=25781, row_remapping=False, peer_across_sockets=3,
    ),
    "v100-sxm3-32gb": Gpu(
        name="Tesla V100-SXM3-32GB", power_w=350, clock_mhz=1290,
        architecture=5, capability=(7, 0), memory_mib=32510,
        bar1_mib=32768, vbios="88.00.6B.00.01", nvlink_version=2, nvlink_links=6,
        nvlink_mbytes_per_s=25781, row_remapping=False, peer_across_sockets=3,
    ),
    "a100-sxm4-40gb": Gpu(
        name="NVIDIA A100-SXM4-40GB", power_w=400, clock_mhz=1095,
        architecture=7, capability=(8, 0), memory_mib=40960,
        bar1_mib=65536, vbios="92.00.19.00.10", part_number="692-2G506-0200-002",
        nvlink_version=4, nvlink_links=12, nvlink_mbytes_per_s=25781, mig=True,
    ),
    "a100-sxm4-80gb": Gpu(
        name="NVIDIA A100-SXM4-80GB", power_w=400, clock_mhz=1275,
        architecture=7, capability=(8, 0), memory_mib=81920,
        bar1_mib=131072, vbios="92.00.45.00.03", part_number="692-2G506-0210-002",
        nvlink_version=4, nvlink_links=12, nvlink_mbytes_per_s=25781, mig=True,
    ),
    "h100-sxm5-80gb": Gpu(
        name="NVIDIA H100 80GB HBM3", power_w=700, clock_mhz=1980,
        architecture=9, capability=(9, 0), memory_mib=81559,
        bar1_mib=131072, vbios="96.00.74.00.1C", part_number="692-2G520-0200-000",
        nvlink_version=6, nvlink_links=18, nvlink_mbytes_per_s=26562, mig=True, fabric=True,
    ),
    # nvidia-smi -q -x of eight B200: health knows only the access timeout (False is 2 at bit 6).
    "b200-sxm": Gpu(
        name="NVIDIA B200", power_w=1000, clock_mhz=1965,
        architecture=10, capability=(10, 0), memory_mib=183359,
        bar1_mib=262144, vbios="97.00.FA.00.09", part_number="692-2G525-0220-500",
        nvlink_version=7, nvlink_links=18, nvlink_mbytes_per_s=53125, mig=True, fabric=True,
        fabric_health_mask=0x80, fabric_health_summary=1, platform=True,
    ),
    # nvidia-smi -q -x of a GB200 tray; C2C as NCCL dumps print it (5 links of 44,712 MB/s a GPU).
    "gb200": Gpu(
        name="NVIDIA GB200", power_w=1200, clock_mhz=2062,
        architecture=10, capability=(10, 0), memory_mib=189471,
        bar1_mib=262144, vbios="97.00.B9.00.69", part_number="900-2G548-A801-000",
        nvlink_version=7, nvlink_links=18, nvlink_mbytes_per_s=53125, mig=True, fabric=True,
        fabric_health_mask=0xAA, fabric_health_summary=1, platform=True,
        c2c_links=5, c2c_mbytes_per_s=44712,
    ),
    "gh200-480gb": Gpu(
        name="NVIDIA GH200 480GB", power_w=900, clock_mhz=1980,
        architecture=9, capability=(9, 0), memory_mib=97871,
        bar1_mib=131072, vbios="96.00.84.00.02", part_number="900-2G530-0000-000",
        nvlink_version=6, nvlink_links=18, nvlink_mbytes_per_s=26562, mig=True,
        c2c_links=10, c2c_mbytes_per_s=44712,
    ),
    "l40s": Gpu(
        name="NVIDIA L40S", power_w=350, clock_mhz=2520,
        architecture=8, capability=(8, 9), memory_mib=46068,
        bar1_mib=65536, vbios="95.02.66.00.02", part_number="900-2G133-0080-000", idle_state=8,
    ),
    "t4": Gpu(
        name="Tesla T4", power_w=70, clock_mhz=585,
        architecture=6, capability=(7, 5), memory_mib=15360,
        bar1_mib=256, vbios="90.04.96.00.02", part_number="900-2G183-A800-001",
        row_remapping=False,
    ),
    "rtx-4090": Gpu(
        name="NVIDIA GeForce RTX 4090", power_w=450,
        architecture=8, capability=(8, 9), memory_mib=24564,
        bar1_mib=32768, vbios="95.02.3C.00.8C", ecc=False, row_remapping=False,
        peer_over_pcie=2, idle_state=8,
    ),
}  # fmt: skip

HCAS = {
    "cx4": Hca(hca_type="MT4115", board_id="MT_2180110032", firmware="12.28.2006", rate=100),
    "cx5": Hca(hca_type="MT4119", board_id="MT_0000000008", firmware="16.31.1014", rate=100),
    "cx6": Hca(hca_type="MT4123", board_id="MT_0000000223", firmware="20.36.1010", rate=200),
    "cx6dx": Hca(hca_type="MT4125", board_id="MT_0000000359", firmware="22.36.1010", rate=100),
    # A recorded /sys/class/infiniband of an 8x H100 server (400 Gb/s, BlueField-3 200 Gb/s).
    "cx7": Hca(hca_type="MT4129", board_id="MT_0000000838", firmware="28.41.1000", rate=400),
    "bf3": Hca(hca_type="MT41692", board_id="MT_0000000884", firmware="32.38.3056", rate=200),
    "cx5-vf": Hca(hca_type="MT4120", board_id="MSF0000000012", firmware="16.30.1284", rate=50),
    "cx7-vf": Hca(hca_type="MT4126", board_id="MT_0000000838", firmware="28.41.1000", rate=400),
}
