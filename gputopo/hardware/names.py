"""What PCI vendor and device numbers are called, for the few devices that stand beside GPUs.

Names are those of the PCI ID database (pci-ids.ucw.cz), shortened. A device that is not here keeps
its numbers: a wrong name would be worse.
"""

from __future__ import annotations

MELLANOX = 0x15B3
PLX = 0x10B5

VENDORS = {
    0x1000: "Broadcom",
    0x1002: "AMD",
    0x1022: "AMD",
    0x10B5: "PLX",
    0x10DE: "NVIDIA",
    0x10EC: "Realtek",
    0x11F8: "Microchip",
    0x1344: "Micron",
    0x1414: "Microsoft",
    0x144D: "Samsung",
    0x14E4: "Broadcom",
    0x15B3: "Mellanox",
    0x1AE0: "Google",
    0x1AF4: "virtio",
    0x1B21: "ASMedia",
    0x1B36: "Red Hat",
    0x1C5C: "SK hynix",
    0x1D0F: "Amazon",
    0x1D6A: "Aquantia",
    0x1E0F: "KIOXIA",
    0x8086: "Intel",
}

DEVICES = {
    (0x1000, 0xC010): "Broadcom PEX880xx",
    (0x1000, 0xC012): "Broadcom PEX880xx",
    (0x1000, 0xC030): "Broadcom PEX890xx",
    (0x1000, 0xC034): "Broadcom PEX890xx",
    (0x11F8, 0x4128): "Microchip Switchtec PFX",
    (0x1414, 0x00BA): "Microsoft MANA",
    (0x14E4, 0x165F): "Broadcom BCM5720",
    (0x14E4, 0x16D7): "Broadcom BCM57414",
    (0x14E4, 0x1750): "Broadcom BCM57508",
    (0x14E4, 0x1751): "Broadcom BCM57504",
    (0x14E4, 0x1760): "Broadcom BCM57608",
    (0x15AD, 0x07B0): "VMware vmxnet3",
    (0x15B3, 0x1003): "ConnectX-3",
    (0x15B3, 0x1004): "ConnectX-3 VF",
    (0x15B3, 0x1007): "ConnectX-3 Pro",
    (0x15B3, 0x1011): "Connect-IB",
    (0x15B3, 0x1012): "Connect-IB VF",
    (0x15B3, 0x1013): "ConnectX-4",
    (0x15B3, 0x1014): "ConnectX-4 VF",
    (0x15B3, 0x1015): "ConnectX-4 Lx",
    (0x15B3, 0x1016): "ConnectX-4 Lx VF",
    (0x15B3, 0x1017): "ConnectX-5",
    (0x15B3, 0x1018): "ConnectX-5 VF",
    (0x15B3, 0x1019): "ConnectX-5 Ex",
    (0x15B3, 0x101A): "ConnectX-5 Ex VF",
    (0x15B3, 0x101B): "ConnectX-6",
    (0x15B3, 0x101C): "ConnectX-6 VF",
    (0x15B3, 0x101D): "ConnectX-6 Dx",
    (0x15B3, 0x101E): "ConnectX VF",
    (0x15B3, 0x101F): "ConnectX-6 Lx",
    (0x15B3, 0x1021): "ConnectX-7",
    (0x15B3, 0x1023): "ConnectX-8",
    (0x15B3, 0x1976): "ConnectX-6 bridge",
    (0x15B3, 0x1977): "ConnectX-6 Dx bridge",
    (0x15B3, 0x1978): "BlueField-2 bridge",
    (0x15B3, 0x1979): "ConnectX-7 bridge",
    (0x15B3, 0x197B): "BlueField-3 bridge",
    (0x15B3, 0xA2D2): "BlueField",
    (0x15B3, 0xA2D6): "BlueField-2",
    (0x15B3, 0xA2DC): "BlueField-3",
    (0x1AE0, 0x0042): "Google gVNIC",
    (0x1AF4, 0x1000): "virtio network",
    (0x1AF4, 0x1041): "virtio network",
    (0x1D0F, 0xEC20): "Amazon ENA",
    (0x1D0F, 0xEFA0): "Amazon EFA",
    (0x1D0F, 0xEFA1): "Amazon EFA",
    (0x1D0F, 0xEFA2): "Amazon EFA",
    (0x8086, 0x1533): "Intel I210",
    (0x8086, 0x1563): "Intel X550",
    (0x8086, 0x1572): "Intel X710",
    (0x8086, 0x1592): "Intel E810-C",
    (0x8086, 0x1593): "Intel E810-C",
    (0x8086, 0x159B): "Intel E810-XXV",
}


def device_name(vendor: int | None, device: int | None) -> str | None:
    """``ConnectX-7``, else the numbers (``Intel 8086:1234``); None where these are unknown."""
    if vendor is None or device is None:
        return None
    known = DEVICES.get((vendor, device))
    if known is not None:
        return known
    if vendor == PLX:
        return f"PLX PEX {device:04x}"
    numbers = f"{vendor:04x}:{device:04x}"
    return f"{VENDORS[vendor]} {numbers}" if vendor in VENDORS else numbers


def hca_name(vendor: int | None, device: int | None, hca_type: str | None) -> str | None:
    """The product of an RDMA device.

    Mellanox's ``hca_type`` is ``MT`` and the PCI device number in decimal (``MT4129``: 0x1021): it
    serves where the PCI numbers are not visible.
    """
    digits = (hca_type or "").removeprefix("MT")
    if vendor is None and hca_type != digits and digits.isascii() and digits.isdigit():
        known = DEVICES.get((MELLANOX, int(digits[:6])))
        if known is not None:
            return known
    return device_name(vendor, device) or hca_type or None
