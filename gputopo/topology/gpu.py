"""What NVML adds to a GPU: its link where sysfs is silent, its NVLinks, its fabric."""

from __future__ import annotations

from typing import Any

import msgspec

from gputopo.facts import Missing, known
from gputopo.hardware import nvlink as nvlink_table
from gputopo.hardware.pcie import SPEEDS
from gputopo.probes.nvml import NvmlGpu
from gputopo.topology import model
from gputopo.topology.draft import Found
from gputopo.topology.model import Pcie


def with_nvml(
    pcie: Pcie | None, gpu: NvmlGpu, found: Found, sources: dict[str, str]
) -> Pcie | None:
    """Fills what sysfs could not tell of a GPU's link. NVML's maximum is that of both ends."""
    now, most = known(gpu.pcie_generation), known(gpu.pcie_max_generation)
    width, most_width = known(gpu.pcie_width), known(gpu.pcie_max_width)
    own = known(gpu.pcie_gpu_max_generation)
    base = pcie or Pcie()
    filled: dict[str, Any] = {}
    for field, value, call in (
        ("speed_gts", SPEEDS.get(now or 0), "nvmlDeviceGetCurrPcieLinkGeneration"),
        ("width", width or None, "nvmlDeviceGetCurrPcieLinkWidth"),
        ("max_speed_gts", SPEEDS.get(most or 0), "nvmlDeviceGetMaxPcieLinkGeneration"),
        ("max_width", most_width or None, "nvmlDeviceGetMaxPcieLinkWidth"),
        ("device_max_speed_gts", SPEEDS.get(own or 0), "nvmlDeviceGetGpuMaxPcieLinkGeneration"),
    ):
        if getattr(base, field) is None and value is not None:
            filled[field] = value
            sources[f"pcie.{field}"] = f"{call}({gpu.index})"
            found.pop(f"pcie.{field}", None)
    if not filled:
        return pcie
    found.pop("pcie", None)
    return msgspec.structs.replace(base, **filled)


def nvlinks_of(gpu: NvmlGpu, found: Found) -> model.NvLinks | None:
    if isinstance(gpu.nvlink_count, Missing) and not gpu.nvlinks:
        found["nvlink"] = gpu.nvlink_count
        return None
    unreadable = [link for link in gpu.nvlinks if isinstance(link.active, Missing)]
    if unreadable:
        assert isinstance(unreadable[0].active, Missing)
        found["nvlink.active"] = unreadable[0].active
    versions = [v for v in (nvlink_version(known(link.version)) for link in gpu.nvlinks) if v]
    speeds = [known(link.mbytes_per_s) for link in gpu.nvlinks if link.active is True]
    version = versions[0] if versions else None
    return model.NvLinks(
        count=len(gpu.nvlinks),
        active=None if unreadable else sum(link.active is True for link in gpu.nvlinks),
        inactive=[link.index for link in gpu.nvlinks if link.active is False],
        version=version,
        gbytes_per_s=nvlink_table.gbytes_per_s(
            version, min((s for s in speeds if s), default=None)
        ),
    )


def nvlink_version(number: int | None) -> str | None:
    """The generation; a number newer than the table keeps its number."""
    if not number:
        return None
    return nvlink_table.VERSIONS.get(number, f"unknown ({number})")


def fabric_of(gpu: NvmlGpu, found: Found) -> model.GpuFabric | None:
    fabric = found.get_or("fabric", gpu.fabric)
    if fabric is None:
        return None
    return model.GpuFabric(
        state=fabric.state,
        status=fabric.status,
        cluster=fabric.cluster,
        clique=fabric.clique,
        health_mask=fabric.health_mask,
        health_summary=fabric.health_summary,
    )
