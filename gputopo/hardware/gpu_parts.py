"""What a GPU's product name tells: its line of products, and how it is mounted.

NVML names a part, not its form: ``NVIDIA H100 80GB HBM3`` is the SXM module, ``NVIDIA H100 PCIe``
and ``NVIDIA H100 NVL`` are cards (NVIDIA's list of supported products in each driver's README).
"""

from __future__ import annotations

import re
from typing import Literal

Line = Literal["data-center", "professional", "geforce"]
Form = Literal["module", "superchip", "card"]

_GEFORCE = re.compile(r"\bGeForce\b|\bTITAN\b")
_PROFESSIONAL = re.compile(r"\b(?:Quadro|RTX|NVS)\b")
_SERVER = re.compile(r"\bServer Edition\b")
_DATA_CENTER = re.compile(
    r"\b(?:Tesla|GRID|PG\d{3}|G?[HB]\d{3}|[AVP]\d{3}X?|H20|A(?:2|10[GM]?|16|30X?|40)"
    r"|L(?:2|4|20|40[GS]?)|P(?:4|40)|[MK]\d{2}|T4)\b"
)
_SUPERCHIP = re.compile(r"\bG[BH]\d{3}\b")
_CARD = re.compile(r"\b(?:PCIe|NVL)\b|-PCIE-", re.IGNORECASE)
_MODULE = re.compile(r"SXM|\b(?:H100|H200|H800|H20|B100|B200|B300)\b")


def line_of(name: str | None) -> Line | None:
    """The product line of a part by its NVML name; None for a name that tells nothing."""
    if name is None:
        return None
    if _GEFORCE.search(name):
        return "geforce"
    if _PROFESSIONAL.search(name):
        return "data-center" if _SERVER.search(name) else "professional"
    return "data-center" if _DATA_CENTER.search(name) else None


def form_of(name: str | None) -> Form | None:
    """How a part is mounted: a module on a baseboard (SXM), with a Grace CPU, or a PCIe card."""
    if name is None:
        return None
    if _SUPERCHIP.search(name):
        return "superchip"
    if _CARD.search(name):
        return "card"
    return "module" if _MODULE.search(name) else "card"
