"""NVLink: generations by NVML's version number, and what one link carries in one direction."""

from __future__ import annotations

VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
"""Generation by nvmlNvlinkVersion_t."""

GBYTES_PER_S = {
    "1.0": 20.0,
    "2.0": 25.0,
    "2.2": 25.0,
    "3.0": 25.0,
    "3.1": 25.0,
    "4.0": 25.0,
    "5.0": 50.0,
}
"""GB/s of one link one way by generation, as NVIDIA's data sheets count it (300 GB/s both ways of
V100's 6 links, 600 of A100's 12, 900 of H100's 18, 1,800 of B200's 18). GeForce and RTX bridges of
generation 3.1 run slower: the driver's own figure (field 164) is used where it is given. That is
the raw line rate (26.562 GB/s on H100), about 6 % above the data sheet's."""


def gbytes_per_s(version: str | None, reported_mbytes: int | None) -> float | None:
    """GB/s of one link one way: the data sheet's figure, unless the driver reports a lower rate."""
    table = GBYTES_PER_S.get(version or "")
    reported = reported_mbytes / 1000 if reported_mbytes else None
    if table is None:
        return reported
    return reported if reported is not None and reported < 0.9 * table else table
