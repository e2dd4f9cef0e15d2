"""PCI Express: what a link of a given speed and width carries, in one direction.

Theoretical figures are line rate times encoding (PCIe base specification): 8b/10b up to 5 GT/s,
128b/130b up to 32 GT/s, 242 of 256 bytes of a FLIT at 64 GT/s. Protocol overhead comes on top.
"""

from __future__ import annotations

GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}
"""Generation by line rate in GT/s."""

SPEEDS = {generation: speed for speed, generation in GENERATIONS.items()}
"""Line rate in GT/s by generation."""

PRACTICAL = {16.0: 0.84, 32.0: 0.88}
"""Share of the theoretical figure that pinned copies reach on a healthy x16 link, by line rate.
16 GT/s: 26.28 GB/s on A100 SXM, of 31.5 (Azure AI benchmarking guide). 32 GT/s: 55.4 GB/s on eight
H200, of 63.0 (stas00/ml-engineering, network). No figure is held for other rates."""


def encoding(speed: float) -> float:
    """Payload share of the line rate."""
    if speed <= 5.0:
        return 0.8
    return 128 / 130 if speed <= 32.0 else 242 / 256


def gbytes_per_s(speed: float, width: int) -> float:
    """Theoretical GB/s one way of ``width`` lanes at ``speed`` GT/s: 32 GT/s x16 is 63.0."""
    return round(speed * width * encoding(speed) / 8, 2)


def practical_gbytes_per_s(speed: float, width: int) -> float | None:
    """What pinned copies reach on such a link, where a measurement is held; else None."""
    share = PRACTICAL.get(speed)
    return round(gbytes_per_s(speed, width) * share, 1) if share else None


def describe(speed: float, width: int) -> str:
    """``Gen5 x16``."""
    generation = GENERATIONS.get(speed)
    return f"Gen{generation} x{width}" if generation else f"{speed:g} GT/s x{width}"
