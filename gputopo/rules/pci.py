"""PCI: links and paths."""

from __future__ import annotations

from collections.abc import Iterator

from gputopo.hardware.pcie import describe, gbytes_per_s
from gputopo.probes.pci import DEVICES
from gputopo.rules.finding import Cost, Evidence, Remedy, Verdict
from gputopo.rules.registry import rule
from gputopo.topology.graph import Topology
from gputopo.topology.model import Gpu, Hca, Pcie


@rule(
    code="PCI101",
    name="link-width-reduced",
    severity="error",
    needs=("pci",),
    rationale="""
        A link trains to the most lanes that both of its ends have and that work. Fewer lanes than
        both ends can do mean a bad contact, a damaged lane or riser, or a slot that the firmware
        split in two. Width is not part of power management, so unlike speed it counts at idle.
    """,
    verify="lspci -vv -s ADDRESS | grep -E 'LnkCap:|LnkSta:', and the same for the port above",
    mend="""
        Power off, reseat the card and its riser or cable; look in the firmware whether the slot is
        bifurcated; swap the card with a sibling to tell card from slot.
    """,
    sources=(
        "PCI Express base specification, link training",
        "DCGM: DCGM_FR_PCIE_WIDTH",
        "Linux: Documentation/ABI/testing/sysfs-bus-pci, current_link_width",
    ),
)
def link_width_reduced(topology: Topology) -> Iterator[Verdict]:
    for node in topology.devices():
        if not isinstance(node, (Gpu, Hca)) or node.pcie is None:
            continue
        link = node.pcie
        if link.width is None or link.max_width is None or link.width >= link.max_width:
            continue
        port = node.parent
        yield Verdict(
            subjects=[node.id],
            summary=(
                f"{node.id} runs at x{link.width}; the card and its port {port} can both do "
                f"x{link.max_width}"
            ),
            evidence=[
                Evidence(
                    source=f"{DEVICES}/{node.pci}/current_link_width",
                    seen=str(link.width),
                    expected=str(link.max_width),
                ),
                Evidence(
                    source=f"{DEVICES}/{node.pci}/max_link_width",
                    seen=str(link.device_max_width),
                    expected=f"{link.max_width} or more",
                ),
                Evidence(
                    source=f"{DEVICES}/{port}/max_link_width",
                    seen=str(link.port_max_width),
                    expected=f"{link.max_width} or more",
                ),
            ],
            confidence="reported",
            cost=_width_cost(link),
            remedy=Remedy(
                text=(
                    f"Reseat {node.name or node.id} at {node.pci} and its riser; check that the "
                    f"slot below {port} is not bifurcated."
                ),
                commands=[f"lspci -vv -s {node.pci} | grep -E 'LnkCap:|LnkSta:'"],
                needs="power-off and hands at the machine",
            ),
        )


def _width_cost(link: Pcie) -> Cost | None:
    speed = link.max_speed_gts
    if speed is None or link.width is None or link.max_width is None:
        return None
    now, should = gbytes_per_s(speed, link.width), gbytes_per_s(speed, link.max_width)
    return Cost(
        text=f"{round(should - now, 1)} GB/s of {should} one way",
        derivation=(
            f"theoretical, {describe(speed, link.max_width)} against {describe(speed, link.width)}"
        ),
        gbytes_per_s=round(should - now, 2),
    )
