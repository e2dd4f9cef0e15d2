"""Links between nodes: PCIe below each port, NVLinks by peer, C2C."""

from __future__ import annotations

from gputopo.facts import Missing, known
from gputopo.hardware import nvlink as nvlink_table
from gputopo.hardware.pcie import GENERATIONS, gbytes_per_s
from gputopo.probes.nvml import NvmlGpu
from gputopo.topology import model
from gputopo.topology.draft import Draft
from gputopo.topology.gpu import nvlink_version
from gputopo.topology.model import Link, Pcie


def add_links(draft: Draft) -> None:
    for node in list(draft.nodes.values()):
        pcie = getattr(node, "pcie", None)
        above = draft.nodes.get(node.parent or "")
        if pcie is None or not isinstance(above, (model.PciBridge, model.HostBridge)):
            continue
        if isinstance(node, model.PciBridge) and node.role in ("root-port", "downstream-port"):
            continue
        draft.links.append(_pcie_link(above.id, node.id, pcie))
    nvml = known(draft.facts.nvml)
    for gpu in nvml.gpus if nvml else []:
        _add_nvlinks(draft, gpu)
        _add_c2c(draft, gpu)


def _add_nvlinks(draft: Draft, gpu: NvmlGpu) -> None:
    """One link for each peer, with the number of active NVLinks; each pair of GPUs once."""
    counts: dict[str, int] = {}
    version: str | None = None
    speed: float | None = None
    for link in gpu.nvlinks:
        if link.active is not True:
            continue
        peer = _nvlink_peer(draft, known(link.remote), known(link.remote_type))
        if peer is None:
            continue
        counts[peer] = counts.get(peer, 0) + 1
        version = nvlink_version(known(link.version)) or version
        speed = nvlink_table.gbytes_per_s(version, known(link.mbytes_per_s)) or speed
    own = f"gpu{gpu.index}"
    for peer, count in counts.items():
        if isinstance(draft.nodes.get(peer), model.Gpu) and _listed(draft, peer, own):
            continue
        draft.links.append(
            Link(
                a=own,
                b=peer,
                kind="nvlink",
                count=count,
                version=version,
                gbytes_per_s=round(count * speed, 1) if speed else None,
                max_gbytes_per_s=round(count * speed, 1) if speed else None,
                state="up",
            )
        )


def _listed(draft: Draft, a: str, b: str) -> bool:
    return any(link.a == a and link.b == b for link in draft.links if link.kind == "nvlink")


def _nvlink_peer(draft: Draft, remote: str | None, remote_type: str | None) -> str | None:
    """The id at the other end; a switch without PCI function becomes one of its own."""
    if remote is not None and remote in draft.ids:
        return draft.ids[remote]
    if remote_type == "switch":
        # Hidden switches cannot be told apart where the driver makes their address up; all of
        # a GPU's links to them together are what a peer can use either way.
        node_id = "nvswitch"
        if node_id not in draft.nodes:
            reason = Missing("absent", "seen through the GPUs' links only")
            draft.add(model.NvSwitch(id=node_id, parent="machine", missing={"pci": reason}))
        return node_id
    return None


def _add_c2c(draft: Draft, gpu: NvmlGpu) -> None:
    count, speed = known(gpu.c2c_links), known(gpu.c2c_mbytes_per_s)
    node = draft.nodes.get(f"gpu{gpu.index}")
    if not count or not isinstance(node, model.Gpu) or node.numa is None:
        return
    status = known(gpu.c2c_status)
    total = round(count * speed / 1000, 1) if speed else None
    draft.links.append(
        Link(
            a=f"numa{node.numa}",
            b=node.id,
            kind="c2c",
            count=count,
            gbytes_per_s=total,
            max_gbytes_per_s=total,
            state={0: "down", 1: "up"}.get(status if status is not None else -1, "unknown"),
        )
    )


def _pcie_link(above: str, below: str, pcie: Pcie) -> Link:
    """The PCIe link between a port and what is below it."""
    now = most = version = None
    if pcie.speed_gts is not None and pcie.width is not None:
        now = gbytes_per_s(pcie.speed_gts, pcie.width)
        generation = GENERATIONS.get(pcie.speed_gts)
        version = f"Gen{generation}" if generation else f"{pcie.speed_gts:g} GT/s"
    if pcie.max_speed_gts is not None and pcie.max_width is not None:
        most = gbytes_per_s(pcie.max_speed_gts, pcie.max_width)
    return Link(
        a=above,
        b=below,
        kind="pcie",
        count=pcie.width,
        version=version,
        gbytes_per_s=now,
        max_gbytes_per_s=most,
        state="up" if now else "unknown",
    )
