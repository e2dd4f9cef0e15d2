"""NIC: HCAs and GPUDirect."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gputopo.facts import Missing, known
from gputopo.hardware.gpu_parts import line_of
from gputopo.hardware.pcie import describe, gbytes_per_s
from gputopo.pciaddr import is_address
from gputopo.probes.pci import DEVICES as PCI_DEVICES
from gputopo.probes.rdma import DEVICES
from gputopo.probes.system import SystemFacts
from gputopo.rules.common import count, is_virtual, listed, plural, unread
from gputopo.rules.finding import Cost, Evidence, Remedy, Severity, Skip, Verdict
from gputopo.rules.pci_links import Untold
from gputopo.rules.registry import rule
from gputopo.topology.fabric_nics import ACTIVE, Kind, card_of, kinds_of, port_of, usable
from gputopo.topology.graph import Topology
from gputopo.topology.model import Gpu, Hca, Pcie, Port
from gputopo.topology.reach import (
    Rail,
    Reach,
    fabric_reach,
    hca_of,
    rails_of,
    usual_share,
    with_role,
)

DMABUF_KERNEL = (5, 12)
"""The first Linux in which an RDMA driver (mlx5) registers memory that comes as DMA-BUF."""

FAST_ETHERNET = 100.0
"""Gb/s. From here on an Ethernet HCA beside GPUs is taken to be bought for them: slower ones also
stand in ordinary servers, whose RDMA nobody uses."""

MELLANOX = 0x15B3
AMAZON = 0x1D0F


def port_file(hca: Hca, port: Port, name: str) -> str:
    return f"{DEVICES}/{hca.name}/ports/{port.port}/{name}"


def why(topology: Topology, hca: Hca) -> Evidence:
    """The signals that made an HCA what it is taken for."""
    role = topology.nic_roles[hca.id]
    return Evidence(
        source=f"{hca.id} is taken for {role.role}",
        seen="; ".join(role.reasons) or "no signal",
        expected="a fabric port of the GPUs",
    )


@rule(
    code="NIC501",
    name="port-down",
    severity="error",
    needs=("rdma",),
    rationale="""
        A fabric port without a link takes its GPUs' own way out of the machine: their traffic goes
        through another GPU's port or does not go at all. Which ports should have a link is told by
        their siblings: the same board at the same place. A second port that nobody cabled, virtual
        functions and management ports are no faults.
    """,
    verify="ibstat NAME, or cat /sys/class/infiniband/NAME/ports/1/{state,phys_state}",
    mend="""
        Polling: cable, transceiver, or the switch's port. Disabled: somebody switched it off.
        LinkUp but INIT: no subnet manager has brought the port up.
    """,
    sources=(
        "InfiniBand architecture specification, port states",
        "NVIDIA/NVSentinel issue 1361: unprovisioned ports are no faults",
        "leptonai/gpud issue 482: Polling",
    ),
)
def port_down(topology: Topology) -> Iterator[Verdict]:
    kinds = kinds_of(topology)
    down = [hca for hca in topology.physical_hcas if hca.ports and _told(hca) and not usable(hca)]
    dark: list[Hca] = []
    for hca in down:
        role = topology.nic_roles[hca.id].role
        port = port_of(hca)
        assert port is not None
        siblings = [
            other
            for other in topology.physical_hcas
            if other.id != hca.id
            and kinds[other.id] == kinds[hca.id]
            and _place(other) == _place(hca)
            and usable(other)
        ]
        second = _place(hca) != _first_place(topology, hca)
        waits = port.physical_state == "LinkUp"
        severity: Severity | None = None
        provisioned = len(siblings) > 1 if second else bool(siblings) or waits
        if role == "compute" and provisioned:
            severity = "error"
        elif siblings:
            severity = "note"
        elif not second and not _card_is_up(topology, hca) and port.physical_state != "Disabled":
            dark.append(hca)
        if severity is not None:
            yield _down(topology, hca, port, siblings, severity)
    yield from _all_dark(topology, dark)


def _told(hca: Hca) -> bool:
    """Whether the state of every port is known: what is unreadable is not down."""
    return all(port.state is not None for port in hca.ports)


def _place(hca: Hca) -> str:
    """The place of a function on its card."""
    return hca.pci.rpartition(".")[2] if hca.pci else "0"


def _first_place(topology: Topology, hca: Hca) -> str:
    return min(_place(other) for other in topology.physical_hcas if card_of(other) == card_of(hca))


def _card_is_up(topology: Topology, hca: Hca) -> bool:
    return any(usable(other) for other in topology.physical_hcas if card_of(other) == card_of(hca))


def _state(port: Port) -> str:
    return f"{port.state} ({port.physical_state or 'physical state unknown'})"


def _down(
    topology: Topology, hca: Hca, port: Port, siblings: list[Hca], severity: Severity
) -> Verdict:
    role = topology.nic_roles[hca.id]
    gpus = f" (beside {listed(role.gpus)})" if role.gpus else ""
    peers = (
        f"; {listed(o.id for o in siblings)} of the same board {plural(siblings, 'is', 'are')} up"
    )
    rate = max((p.rate_gbps or 0 for o in siblings for p in o.ports), default=0)
    return Verdict(
        severity=severity,
        subjects=[hca.id],
        summary=f"{hca.id}{gpus} is not up: {_state(port)}{peers if siblings else ''}",
        evidence=[
            Evidence(source=port_file(hca, port, "state"), seen=port.state or "?", expected=ACTIVE),
            Evidence(
                source=port_file(hca, port, "phys_state"),
                seen=port.physical_state or "unknown",
                expected="LinkUp",
            ),
            *([why(topology, hca)] if role.role == "compute" else []),
        ],
        confidence="reported",
        cost=Cost(
            text=f"{rate / 8:g} GB/s one way of network bandwidth",
            derivation=f"the rate of its siblings, {rate:g} Gb/s",
            gbytes_per_s=round(rate / 8, 1),
        )
        if rate
        else None,
        remedy=_bring_up(hca, port),
    )


def _mlxlink(hca: Hca, options: str = "") -> list[str]:
    """The vendor's look at a link, for adapters that have one."""
    return [f"mlxlink -d {hca.pci}{options}"] if hca.vendor == MELLANOX else []


def _bring_up(hca: Hca, port: Port) -> Remedy:
    infiniband = port.link_layer == "InfiniBand"
    interface = hca.netdevs[0] if hca.netdevs else "INTERFACE"
    if port.physical_state == "LinkUp" and infiniband:
        return Remedy(
            text=f"The cable is fine; a subnet manager must bring {hca.id} up: see that one runs.",
            commands=["sminfo", f"ibstat {hca.name}"],
            needs="the fabric's administrator",
        )
    if port.physical_state in ("Disabled", "LinkUp"):
        return Remedy(
            text=f"Enable the port of {hca.id} again, if nobody meant it to be off.",
            commands=[
                f"ibportstate -C {hca.name} -D 0 {port.port} enable"
                if infiniband
                else f"ip link set dev {interface} up"
            ],
            needs="root",
            undo=f"ibportstate -C {hca.name} -D 0 {port.port} disable"
            if infiniband
            else f"ip link set dev {interface} down",
        )
    where = f" ({hca.pci})" if hca.pci else ""
    return Remedy(
        text=f"Check cable and transceiver of {hca.id}{where} and the switch port behind it.",
        commands=[f"ibstat {hca.name}", *_mlxlink(hca)],
        needs="hands at the machine",
    )


def _all_dark(topology: Topology, dark: list[Hca]) -> Iterator[Verdict]:
    """Ports without a link and without a sibling that has one: perhaps nobody ever cabled them."""
    compute = [hca for hca in dark if topology.nic_roles[hca.id].role == "compute"]
    lone = [
        hca for hca in dark if hca not in compute and link_layer(topology, hca.id) == "InfiniBand"
    ]
    for hcas in (compute, lone):
        if not hcas:
            continue
        cards = {card_of(hca) for hca in hcas}
        ports = [(hca, port) for hca in hcas if (port := port_of(hca)) is not None]
        yield Verdict(
            severity="warning" if hcas is compute and len(cards) > 1 else "note",
            subjects=[hca.id for hca in hcas],
            summary=(
                f"{listed(hca.id for hca in hcas)} {plural(hcas, 'has', 'have')} no link, "
                f"{_state(ports[0][1])}, and no sibling that has: not cabled, or the fabric is down"
            ),
            evidence=[
                Evidence(source=port_file(hca, port, "state"), seen=_state(port), expected=ACTIVE)
                for hca, port in ports[:8]
            ],
            confidence="reported",
            remedy=_bring_up(*ports[0]),
        )


@rule(
    code="NIC502",
    name="port-rate-low",
    severity="error",
    needs=("rdma",),
    rationale="""
        A port that trained to a lower rate than its siblings of the same board works, and slows
        every job that spans the machine to its pace. A worn cable or transceiver, or a port of the
        switch that was set to less, are the usual causes. Boards that run at different rates on
        purpose differ in link layer or in the number of ports.
    """,
    verify="cat /sys/class/infiniband/*/ports/*/rate",
    mend="Clean or swap cable and transceiver, let the port train again, check the switch's port.",
    sources=(
        "Azure/azurehpc-health-checks: check_hw_ib",
        "leptonai/gpud pull request 383: rates by port",
    ),
)
def port_rate_low(topology: Topology) -> Iterator[Verdict]:
    kinds = kinds_of(topology)
    groups: dict[Kind, list[tuple[Hca, Port, float]]] = {}
    for hca in topology.physical_hcas:
        for port in hca.ports:
            if port.state == ACTIVE and port.rate_gbps:
                group = (*kinds[hca.id], topology.nic_roles[hca.id].role)
                groups.setdefault(group, []).append((hca, port, port.rate_gbps))
    for members in groups.values():
        best = max(rate for _, _, rate in members)
        at_best = [hca.id for hca, _, rate in members if rate == best]
        for hca, port, rate in members:
            if rate < best:
                clear = len(at_best) * 2 > len(members)
                yield _slow(hca, port, rate, best, at_best, clear)


def _slow(
    hca: Hca, port: Port, rate: float, best: float, at_best: list[str], clear: bool
) -> Verdict:
    where = f" port {port.port}" if len(hca.ports) > 1 else ""
    return Verdict(
        severity="error" if clear else "warning",
        subjects=[hca.id],
        summary=(
            f"{hca.id}{where} runs at {rate:g} Gb/s; {listed(at_best)} of the same board "
            f"{plural(at_best, 'runs', 'run')} at {best:g}"
        ),
        evidence=[
            Evidence(
                source=port_file(hca, port, "rate"),
                seen=f"{rate:g} Gb/s",
                expected=f"{best:g} Gb/s",
            )
        ],
        confidence="reported",
        cost=Cost(
            text=f"{(best - rate) / 8:g} GB/s of {best / 8:g} one way",
            derivation=f"{best:g} against {rate:g} Gb/s on the wire",
            gbytes_per_s=round((best - rate) / 8, 2),
        ),
        remedy=Remedy(
            text=f"Clean or swap cable and transceiver of {hca.id}; let the link train anew.",
            commands=[f"ibstat {hca.name}", *_mlxlink(hca, f" -p {port.port} -m -c")],
            needs="root; hands at the machine",
        ),
    )


@rule(
    code="NIC503",
    name="pcie-caps-nic",
    severity="warning",
    needs=("rdma", "pci"),
    rationale="""
        A port that is faster than the PCIe link behind it never reaches its rate: HDR200 needs Gen4
        x16 and NDR400 Gen5 x16. Two ports of one card share its link; that each can have its rate
        but both together cannot is common and only worth knowing. Adapters that spread one port
        over two slots (Socket Direct) show the port's whole rate on both.
    """,
    verify="lspci -vv -s ADDRESS | grep LnkSta:; cat /sys/class/infiniband/NAME/ports/1/rate",
    mend="Move the card to a slot of the width and generation that its rate needs.",
    sources=(
        "PCI Express base specification: line rates and encoding",
        "ConnectX-6 and ConnectX-7 user manuals: PCIe requirements",
    ),
)
def pcie_caps_nic(topology: Topology) -> Iterator[Verdict]:
    if is_virtual(topology) and topology.physical_hcas:
        raise Skip("in a virtual machine PCIe links are what the hypervisor tells")
    cards: dict[str, list[Hca]] = {}
    for hca in topology.physical_hcas:
        if any(port.state == ACTIVE and port.rate_gbps for port in hca.ports):
            cards.setdefault(card_of(hca), []).append(hca)
    shared: list[tuple[list[Hca], float, float]] = []
    for hcas in cards.values():
        link = _link(topology, hcas[0])
        if link is None:
            continue
        have = gbytes_per_s(*link) * 8
        rates = [
            port.rate_gbps or 0.0 for hca in hcas for port in hca.ports if port.state == ACTIVE
        ]
        if max(rates) > have:
            yield _capped(topology, hcas, link, max(rates), have)
        elif sum(rates) > have:
            shared.append((hcas, sum(rates), have))
    if shared:
        yield _shared(shared)


def _link(topology: Topology, hca: Hca) -> tuple[float, int] | None:
    """The narrowest trained link from the card to its slot: its own, or that of its own switch."""
    links = [hca.pcie]
    for bridge in topology.bridges_above(hca.id):
        if bridge.vendor != MELLANOX:
            break
        if bridge.role == "upstream-port":
            links.append(bridge.pcie)
    trained = [
        (link.speed_gts, link.width)
        for link in links
        if link is not None and link.speed_gts is not None and link.width is not None
    ]
    return min(trained, key=lambda link: gbytes_per_s(*link), default=None)


def _capped(
    topology: Topology, hcas: list[Hca], link: tuple[float, int], rate: float, have: float
) -> Verdict:
    hca = hcas[0]
    split = [other.id for other in topology.physical_hcas if _other_half(topology, hca, other)]
    compute = topology.nic_roles[hca.id].role == "compute"
    halves = f"; {listed(split)} is another half of the adapter" if split else ""
    return Verdict(
        severity="warning" if compute and not split else "note",
        subjects=[h.id for h in hcas],
        summary=(
            f"{listed(h.id for h in hcas)}: PCIe {describe(*link)} carries {have:.0f} Gb/s, "
            f"the port {rate:g}{halves}"
        ),
        evidence=[
            Evidence(
                source=f"{PCI_DEVICES}/{hca.pci}/current_link_speed, current_link_width",
                seen=describe(*link),
                expected=f"{rate:g} Gb/s or more",
            ),
            *(
                Evidence(
                    source=port_file(h, port, "rate"),
                    seen=f"{port.rate_gbps:g} Gb/s",
                    expected=f"at most {have:.0f} Gb/s, what the link carries",
                )
                for h in hcas
                for port in h.ports
                if port.rate_gbps
            ),
        ],
        confidence="reported",
        cost=Cost(
            text=f"{(rate - have) / 8:.1f} GB/s of {rate / 8:g} one way",
            derivation=f"{rate:g} Gb/s on the wire against {describe(*link)} (theoretical)",
            gbytes_per_s=round((rate - have) / 8, 1),
        ),
        remedy=_wider(hca, hca.pcie),
    )


def _other_half(topology: Topology, hca: Hca, other: Hca) -> bool:
    """Whether two functions in different slots are one adapter, by the identity of its chip."""
    if card_of(other) == card_of(hca) or other.id == hca.id:
        return False
    guids = _system_guids(topology)
    return hca.id in guids and guids.get(other.id) == guids[hca.id]


def _system_guids(topology: Topology) -> dict[str, str]:
    rdma = known(topology.facts.rdma)
    found = {d.name: known(d.system_image_guid) for d in (rdma.devices if rdma else [])}
    return {name: guid for name, guid in found.items() if guid and guid.strip("0:")}


def _wider(hca: Hca, pcie: Pcie | None) -> Remedy:
    commands = [f"lspci -vv -s {hca.pci} | grep -E 'LnkCap:|LnkSta:'"]
    below = (
        pcie is not None
        and pcie.max_speed_gts is not None
        and pcie.max_width is not None
        and (pcie.speed_gts, pcie.width) != (pcie.max_speed_gts, pcie.max_width)
    )
    if below:
        return Remedy(
            text="The link is below what both ends can do: mend that first (PCI101, PCI102).",
            commands=commands,
        )
    return Remedy(
        text=f"Move {hca.id} ({hca.pci}) to a slot with the generation and width that it needs.",
        commands=commands,
        needs="power-off and hands at the machine",
    )


def _shared(cards: list[tuple[list[Hca], float, float]]) -> Verdict:
    hcas = [hca for group, _, _ in cards for hca in group]
    first, rates, have = cards[0]
    link = first[0].pcie
    words = describe(link.speed_gts or 0, link.width or 0) if link is not None else "its link"
    return Verdict(
        severity="note",
        subjects=[hca.id for hca in hcas],
        summary=(
            f"the ports of {'; '.join(listed(h.id for h in group) for group, _, _ in cards)} share "
            f"one PCIe link a card: {rates:g} Gb/s of ports on {words} with {have:.0f}"
        ),
        evidence=[
            Evidence(
                source=f"{PCI_DEVICES}/{group[0].pci}/current_link_speed, current_link_width",
                seen=f"{carried:.0f} Gb/s",
                expected=f"{total:g} Gb/s for both ports at once",
            )
            for group, total, carried in cards
        ],
        confidence="reported",
        remedy=Remedy(text="None, unless both ports are to run at their full rate at once."),
    )


@rule(
    code="NIC504",
    name="port-errors-or-flaps",
    severity="warning",
    needs=("rdma",),
    rationale="""
        Symbol errors, link recoveries, lost links, receive errors, retransmissions and congestion
        counters that grow mean a poor cable, a flapping port or a network that drops packets.
        Totals prove nothing: the first training after boot counts too, and 32-bit counters stop at
        their maximum. Growth between two samples is judged.
    """,
    verify="grep . /sys/class/infiniband/NAME/ports/1/{counters,hw_counters}/*, twice",
    mend="Clean or swap cable and transceiver; on Ethernet check PFC and ECN on host and switch.",
    sources=(
        "Linux: Documentation/ABI/stable/sysfs-class-infiniband",
        "leptonai/gpud: flap detection; NVIDIA/NVSentinel issue 1212",
    ),
)
def port_errors_or_flaps(topology: Topology) -> Iterator[Verdict]:
    raise Skip("needs two samples, and a scan takes one")


@rule(
    code="NIC505",
    name="nic-far-from-gpu",
    severity="warning",
    needs=("rdma", "pci"),
    rationale="""
        A GPU and the fabric HCA that it uses belong under one PCIe switch. Through the CPU
        GPUDirect RDMA is off by default, and across NUMA nodes the inter-socket link takes half of
        the bandwidth and more. What counts is the nearest HCA that can be used: one may be nearer
        but down, run another link layer, or stand in a slot where it serves no GPU. That a machine
        has no HCA on that side at all is how it was bought. On Grace every HCA is a host bridge
        away, and in virtual machines the distance is often hidden: nothing is concluded there.
    """,
    verify="nvidia-smi topo -m (the NIC columns of each GPU's row); ibstat",
    mend="""
        Bring up the port, switch its link type, or move the card to the GPU's switch. Where it was
        bought so, place ranks that use the network most on the GPUs that are near.
    """,
    sources=(
        "linux-rdma/perftest issue 241: 23 GB/s between hosts, 11 between far GPUs (HDR200)",
        "NVIDIA/nccl 2.28 src/graph: GPUDirect RDMA up to PXB by default, PXN since 2.12",
        "NVIDIA/NVSentinel pull request 1221: telling fabric from storage NICs",
        "NVIDIA/nccl issue 1464: topology hidden in virtual machines",
    ),
)
def nic_far_from_gpu(topology: Topology) -> Iterator[Verdict]:
    reaches = fabric_reach(topology)
    compute = with_role(topology, "compute")
    if not reaches:
        up = [hca for hca in compute if usable(hca)]
        if topology.gpus and up:
            unknown = topology.path(topology.gpus[0].id, up[0].id).reason
            raise Skip(f"how near GPUs and HCAs are is unknown: {unknown or 'no PCI tree'}")
        return
    some_near = any(topology.nic_roles[hca.id].gpus for hca in compute)
    if is_virtual(topology) and not some_near:
        raise Skip(
            "the virtual machine hides how near HCAs and GPUs are: give NCCL_TOPO_FILE the "
            "provider's topology file"
        )
    groups: dict[tuple[str, ...], list[Reach]] = {}
    for reach in reaches:
        by_design = reach.tier == "cpu" and reach.reason == "purchase" and not some_near
        if reach.reason != "near" and not by_design:
            groups.setdefault((reach.reason, reach.tier, *reach.instead), []).append(reach)
    if groups:
        _untold(topology).raise_skip()
    for found in groups.values():
        yield _far(topology, found)


def _untold(topology: Topology) -> Untold:
    """What could not be read of GPUs, HCAs and the PCI tree above them. A nearer HCA, or one that
    serves no GPU, may then be one that is not seen where it is."""
    untold = Untold()
    pci, rdma = known(topology.facts.pci), known(topology.facts.rdma)
    functions = {function.address: function for function in pci.functions} if pci else {}
    for problem in pci.problems if pci else []:
        address = problem.source.rpartition("/")[2]
        if is_address(address):
            untold.add(f"the PCI function cannot be read ({problem.missing})", [address])
    blank = [
        f.address for f in functions.values() if f.vendor is None and f.base_class >> 8 in (2, 3)
    ]
    if blank:
        untold.add("whose device it is cannot be read", blank)
    devices: list[Gpu | Hca] = [*topology.gpus, *topology.physical_hcas]
    for device in devices:
        function = functions.get(device.pci or "")
        parents = function.parents if function is not None else ()
        if function is not None and (
            function.root_complex is None or not all(parent in functions for parent in parents)
        ):
            untold.add("its place in the PCI tree cannot be read", [device.id])
        if unread(device.missing.get("numa")):
            untold.add(f"its NUMA node cannot be read ({device.missing['numa']})", [device.id])
    for hca in rdma.devices if rdma is not None else []:
        if hca.software:
            continue
        told = [hca.pci, hca.board_id, *(f for p in hca.ports for f in (p.state, p.link_layer))]
        why_not = next((fact for fact in told if unread(fact)), None)
        if why_not is not None or not hca.ports:
            untold.add(f"its port or board cannot be read ({why_not or 'no port'})", [hca.name])
    return untold


def _far(topology: Topology, reaches: list[Reach]) -> Verdict:
    first = reaches[0]
    gpus = [reach.gpu.id for reach in reaches]
    nics = list(dict.fromkeys(nic for reach in reaches for nic in reach.nics))
    severity, because = _because(topology, first)
    way = "across NUMA nodes" if first.tier == "sockets" else "through the CPU"
    return Verdict(
        severity=severity,
        subjects=[*gpus, *first.instead],
        summary=(
            f"{listed(gpus)} {plural(gpus, 'reaches', 'reach')} the fabric {way} "
            f"({first.best} to {listed(nics)}): {because}"
        ),
        evidence=[
            *(
                Evidence(
                    source=f"the PCI tree, {reach.gpu.id} ({reach.gpu.pci}, NUMA node "
                    f"{reach.gpu.numa})",
                    seen=f"{reach.best} to {listed(reach.nics)}",
                    expected="PIX or PXB to a fabric HCA",
                )
                for reach in reaches[:8]
            ),
            *_instead(topology, first),
        ],
        confidence="reported" if first.reason == "down" else "inferred",
        cost=_cost_of_distance(topology, reaches),
        remedy=_nearer(topology, first),
    )


def _because(topology: Topology, reach: Reach) -> tuple[Severity, str]:
    """How bad it is, and why it is so."""
    across = reach.tier == "sockets"
    them = listed(reach.instead)
    if reach.reason == "down":
        text = f"the nearer {them} {plural(reach.instead, 'is', 'are')} down"
        return ("warning" if across else "note"), text
    if reach.reason == "slot":
        node = hca_of(topology, reach.instead[0]).numa
        rails = [r for r in rails_of(fabric_reach(topology)) if set(r.nics) & set(reach.instead)]
        if rails:
            have = f"{listed(rails[0].gpus)} {plural(rails[0].gpus, 'has', 'have')}"
            return "warning", f"{have} {them} on NUMA node {node}, more than others have"
        verb = plural(reach.instead, "serves no GPU where it stands", "serve no GPU there")
        return "warning", f"{them} on NUMA node {node} {verb}"
    if reach.reason == "kind":
        layer = link_layer(topology, reach.instead[0]) or "another link layer"
        text = f"the nearer {them} {plural(reach.instead, 'runs', 'run')} {layer}"
        return ("warning" if across and _same_board(topology, reach) else "note"), text
    where = f"on NUMA node {reach.gpu.numa}" if across else "below the same switch"
    return "note", f"no fabric HCA is {where}, as the machine is built"


def link_layer(topology: Topology, node_id: str) -> str | None:
    port = port_of(hca_of(topology, node_id))
    return port.link_layer if port is not None else None


def _same_board(topology: Topology, reach: Reach) -> bool:
    """Whether what is nearer could be a fabric port: it is the same board, set otherwise."""
    boards = {hca_of(topology, nic).board_id for nic in reach.nics} - {None}
    nearer = [hca_of(topology, nic) for nic in reach.instead]
    return any(hca.board_id in boards and hca.vendor == MELLANOX for hca in nearer)


def _instead(topology: Topology, reach: Reach) -> Iterator[Evidence]:
    for node_id in reach.instead[:4]:
        hca = hca_of(topology, node_id)
        port = port_of(hca)
        if reach.reason == "down" and port is not None:
            yield Evidence(source=port_file(hca, port, "state"), seen=_state(port), expected=ACTIVE)
        elif reach.reason == "kind" and port is not None:
            yield Evidence(
                source=port_file(hca, port, "link_layer"),
                seen=port.link_layer or "unknown",
                expected=f"{link_layer(topology, reach.nics[0])}, as {reach.nics[0]} has",
            )
        else:
            gpus = topology.nic_roles[node_id].gpus
            yield Evidence(
                source=f"{PCI_DEVICES}/{hca.pci}",
                seen=f"below {hca.parent}, NUMA node {hca.numa}, beside {listed(gpus) or 'no GPU'}",
                expected=f"beside {reach.gpu.id}",
            )


def _cost_of_distance(topology: Topology, reaches: list[Reach]) -> Cost:
    if reaches[0].tier == "sockets":
        text = "about half of the port's bandwidth from and to GPU memory"
        derivation = "HDR200 across sockets: 11 GB/s between GPUs against 23 between hosts"
    else:
        text = "GPUDirect RDMA is off by default here: data takes a step through host memory"
        derivation = "NCCL_NET_GDR_LEVEL is PXB by default"
    relay = next((r for reach in reaches if (r := _relay(topology, reach)) is not None), None)
    if relay is not None:
        text += f"; NCCL softens it by sending through {relay} over NVLink (PXN), receiving not"
    return Cost(text=text, derivation=derivation)


def _relay(topology: Topology, reach: Reach) -> str | None:
    """A GPU that is joined with this one by NVLink and has a usable fabric HCA below its switch."""
    for other in fabric_reach(topology):
        path_class = topology.path_class(reach.gpu.id, other.gpu.id)
        if other.tier == "switch" and path_class.startswith("NV"):
            return other.gpu.id
    return None


def _nearer(topology: Topology, reach: Reach) -> Remedy:
    hca = hca_of(topology, (reach.instead or reach.nics)[0])
    port = port_of(hca)
    if reach.reason == "down" and port is not None:
        return _bring_up(hca, port)
    if reach.reason == "slot":
        ports = (b.id for b in topology.bridges_above(reach.gpu.id) if b.role == "upstream-port")
        switch = next(ports, None)
        place = f"the switch {switch}" if switch else f"the root complex of {reach.gpu.pci}"
        alone = len(reach.instead) == 1
        which = f"{hca.id} ({hca.pci})" if alone else f"one of {listed(reach.instead)}"
        return Remedy(
            text=f"Move {which} to a slot below {place}, beside {reach.gpu.id}.",
            commands=["lspci -tv", "nvidia-smi topo -m"],
            needs="power-off and hands at the machine",
        )
    if reach.reason == "kind" and _same_board(topology, reach):
        infiniband = link_layer(topology, reach.nics[0]) == "InfiniBand"
        return Remedy(
            text=f"Set the port of {hca.id} to the fabric's link type, if it is cabled to it.",
            commands=[f"mlxconfig -d {hca.pci} set LINK_TYPE_P1={1 if infiniband else 2}"],
            needs="root; a reboot; a cable to the fabric's switch",
            undo=f"mlxconfig -d {hca.pci} set LINK_TYPE_P1={2 if infiniband else 1}",
        )
    return Remedy(
        text=(
            "Place what uses the network most on GPUs that are near; measure whether "
            "NCCL_NET_GDR_LEVEL=SYS helps the others."
        ),
        commands=["NCCL_NET_GDR_LEVEL=SYS COMMAND"],
        undo="unset NCCL_NET_GDR_LEVEL",
    )


@rule(
    code="NIC506",
    name="rail-imbalance",
    severity="warning",
    needs=("rdma", "pci"),
    rationale="""
        Each GPU sends through the HCA nearest to it. Where several GPUs have the same one nearest,
        while another HCA beside them is nearest to none, they share one port's bandwidth and the
        other idles. Fewer HCAs than GPUs, spread evenly, are how a machine was bought.
    """,
    verify="nvidia-smi topo -m: how many GPU rows have their nearest NIC in one column",
    mend="""
        Give NCCL a topology file (NCCL_TOPO_FILE) that ties each GPU to its own HCA, or move a
        card; where firmware orders the ports of a switch the wrong way round, update it.
    """,
    sources=(
        "NVIDIA/nccl issues 820 and 856: firmware of a switch reversed the NICs",
        "NVIDIA/nccl 2.28 src/graph/topo.cc: choice of local NICs",
    ),
)
def rail_imbalance(topology: Topology) -> Iterator[Verdict]:
    rails = rails_of(fabric_reach(topology))
    shared = [rail for rail in rails if rail.share > 1]
    if not shared:
        return
    compute = with_role(topology, "compute")
    served = {nic for rail in rails for nic in rail.nics}
    idle = [hca.id for hca in compute if usable(hca) and hca.id not in served]
    down = [hca.id for hca in compute if not usable(hca)]
    _untold(topology).raise_skip()
    told = False
    for rail in shared:
        off, unused = _beside(topology, down, rail.gpus), _beside(topology, idle, rail.gpus)
        if off:
            yield _imbalance(rail, off, "note", "is down (NIC501)")
        elif unused:
            yield _imbalance(rail, unused, "warning", "beside them is nearest to none")
        told = told or bool(off or unused)
    apart = [hca.id for hca in with_role(topology, "spare") if usable(hca)]
    if told:
        return
    if apart:
        gpus, nics = [g for r in shared for g in r.gpus], [n for r in shared for n in r.nics]
        yield _imbalance(Rail(gpus=gpus, nics=nics), apart, "note", "stands beside no GPU")
        return
    for rail in shared:
        if rail.share > usual_share(rails):
            yield _imbalance(rail, [], "note", "")


def _beside(topology: Topology, hcas: list[str], gpus: list[str]) -> list[str]:
    return [hca for hca in hcas if set(topology.nic_roles[hca].gpus) & set(gpus)]


def _imbalance(rail: Rail, others: list[str], severity: Severity, what: str) -> Verdict:
    gpus, nics = rail.gpus, rail.nics
    idle = f", while {listed(others)} {what}" if others else "; most HCAs have fewer GPUs"
    if others and severity == "warning":
        remedy = Remedy(
            text=f"Tie each GPU to an HCA of its own by a topology file, or move {listed(others)}.",
            commands=["NCCL_TOPO_DUMP_FILE=topo.xml COMMAND", "NCCL_TOPO_FILE=topo.xml COMMAND"],
            undo="unset NCCL_TOPO_FILE",
        )
    elif what.startswith("is down"):
        remedy = Remedy(text=f"Bring up {listed(others)}.")
    else:
        remedy = Remedy(text="None; place what uses the network most on GPUs that share less.")
    return Verdict(
        severity=severity,
        subjects=[*gpus, *nics, *others],
        summary=f"{listed(gpus)} share {listed(nics)}{idle}",
        evidence=[
            Evidence(
                source="the PCI tree: nearest usable fabric HCAs",
                seen=f"{count(len(gpus), 'GPU')} on {count(len(nics), 'HCA')}",
                expected="as many GPUs on each HCA",
            )
        ],
        confidence="inferred",
        cost=Cost(
            text=f"{len(nics)} of {len(gpus)} ports' worth of bandwidth for these GPUs",
            derivation=f"{len(gpus)} GPUs have the same {count(len(nics), 'HCA')} nearest",
        ),
        remedy=remedy,
    )


@rule(
    code="NIC507",
    name="gpudirect-path-missing",
    severity="error",
    needs=("rdma", "system"),
    rationale="""
        For GPUDirect RDMA the RDMA stack must be able to pin GPU memory: by the nvidia-peermem
        module, or by DMA-BUF, which needs Linux 5.12 and NVIDIA's open kernel modules and makes the
        module unnecessary. With neither, everything between GPU and network is copied through host
        memory. GeForce GPUs never have it; Amazon's EFA and DMA-BUF bring their own way.
    """,
    verify="lsmod | grep peermem; grep Open /proc/driver/nvidia/version; uname -r",
    mend="Load nvidia-peermem (after the RDMA drivers), or change to the open kernel modules.",
    sources=(
        "NVIDIA GPUDirect RDMA documentation; NVIDIA/nccl src/transport/net_ib",
        "NVIDIA/nccl issues 897, 1343, 1537: not loaded after a reboot; 1939: not registered",
    ),
)
def gpudirect_path_missing(topology: Topology) -> Iterator[Verdict]:
    system = known(topology.facts.system)
    assert system is not None
    gpus = [gpu for gpu in topology.gpus if line_of(gpu.name) in ("data-center", "professional")]
    hcas = [
        hca for hca in with_role(topology, "compute") if usable(hca) and _wants_gdr(topology, hca)
    ]
    if not gpus or not hcas:
        return
    dmabuf = dmabuf_of(system)
    modules = [name for name in ("nvidia_peermem", "nv_peer_mem") if name in system.modules]
    if system.memory_peers or dmabuf == "":
        return
    if modules:
        yield _unregistered(topology, gpus, hcas, modules[0], dmabuf)
    elif dmabuf is None:
        raise Skip("no peer memory module is loaded, and whether DMA-BUF works is unknown")
    elif system.rdma_unread is not None:
        raise Skip(f"whether a peer memory module is loaded is unknown ({system.rdma_unread})")
    else:
        _untold(topology).raise_skip()
        yield _no_gdr(topology, gpus, hcas, dmabuf)


def _wants_gdr(topology: Topology, hca: Hca) -> bool:
    """Whether an HCA is there for the GPUs' traffic, rather than one that any server has."""
    if hca.vendor == AMAZON:
        return False
    port = port_of(hca)
    if port is None or port.link_layer != "Ethernet":
        return port is not None and port.link_layer == "InfiniBand"
    net = known(topology.facts.net)
    routed = {i.pci for i in net.interfaces if i.default_route} if net is not None else set()
    return (port.rate_gbps or 0) >= FAST_ETHERNET and hca.pci not in routed


def dmabuf_of(system: SystemFacts) -> str | None:
    """Why DMA-BUF cannot work: empty where it can, None where that is unknown."""
    kernel = known(system.kernel)
    version = re.match(r"(\d{1,3})\.(\d{1,4})", kernel or "")
    if system.open_modules is False:
        return "NVIDIA's kernel modules are not the open ones"
    if version is None or system.open_modules is None:
        return None
    if (int(version[1]), int(version[2])) < DMABUF_KERNEL:
        return f"Linux {kernel} is older than 5.12"
    return ""


def _gdr_evidence(system: SystemFacts, dmabuf: str | None) -> list[Evidence]:
    return [
        Evidence(
            source="/sys/kernel/mm/memory_peers",
            seen=", ".join(system.memory_peers) or "none registered",
            expected="nv_mem, or DMA-BUF",
        ),
        Evidence(
            source="/proc/driver/nvidia/version, /proc/sys/kernel/osrelease",
            seen=dmabuf or "DMA-BUF unknown",
            expected="open kernel modules and Linux 5.12 or later, or nvidia_peermem",
        ),
    ]


def _no_gdr(topology: Topology, gpus: list[Gpu], hcas: list[Hca], dmabuf: str) -> Verdict:
    system = known(topology.facts.system)
    assert system is not None
    return Verdict(
        subjects=[*(gpu.id for gpu in gpus), *(hca.id for hca in hcas)],
        summary=(
            f"no GPUDirect RDMA between {listed(g.id for g in gpus)} and "
            f"{listed(h.id for h in hcas)}: nvidia_peermem is not loaded, and DMA-BUF cannot take "
            f"its place ({dmabuf})"
        ),
        evidence=[
            Evidence(source="/sys/module/nvidia_peermem", seen="absent", expected="loaded"),
            *_gdr_evidence(system, dmabuf),
        ],
        confidence="reported",
        cost=Cost(
            text="every byte between GPU and network is copied through host memory",
            derivation="one report of 10 GB/s where 180 were reached with it (NVIDIA/nccl 1676)",
        ),
        remedy=Remedy(
            text="Load the module now and at every boot, after the RDMA drivers.",
            commands=[
                "modprobe nvidia-peermem",
                "echo nvidia-peermem > /etc/modules-load.d/nvidia-peermem.conf",
            ],
            needs="root, on the host",
            undo="modprobe -r nvidia-peermem; rm /etc/modules-load.d/nvidia-peermem.conf",
        ),
    )


def _unregistered(
    topology: Topology, gpus: list[Gpu], hcas: list[Hca], module: str, dmabuf: str | None
) -> Verdict:
    system = known(topology.facts.system)
    assert system is not None
    return Verdict(
        severity="note",
        subjects=[*(gpu.id for gpu in gpus), *(hca.id for hca in hcas)],
        summary=(
            f"{module} is loaded but has not registered with the RDMA stack, as far as it shows; "
            "GPUDirect RDMA may fail"
        ),
        evidence=[
            Evidence(source=f"/sys/module/{module}", seen="loaded", expected="loaded"),
            *_gdr_evidence(system, dmabuf),
        ],
        confidence="inferred",
        remedy=Remedy(
            text="Load it after the RDMA drivers; it must be built for the RDMA stack in use.",
            commands=[f"modprobe -r {module} && modprobe {module}", "dmesg | grep -i peer"],
            needs="root, on the host; no GPU job",
        ),
    )


@rule(
    code="NIC508",
    name="soft-rdma-device",
    severity="note",
    needs=("rdma",),
    rationale="""
        A software RDMA device (rxe, siw) has no PCI function. It is harmless by itself, but one
        such device makes `nvidia-smi topo -m` fail on some driver versions, and whatever reads the
        topology from there then sees none.
    """,
    verify="readlink /sys/class/infiniband/NAME (a path below /sys/devices/virtual)",
    mend="Leave it, or remove it with `rdma link delete NAME` if nobody uses it.",
    sources=("NVIDIA/NVSentinel issue 1485: topo -m exits with 255 on every node",),
)
def soft_rdma_device(topology: Topology) -> Iterator[Verdict]:
    soft = [hca for hca in topology.hcas if hca.software]
    if not soft:
        return
    names = [hca.id for hca in soft]
    smi = topology.facts.nvidia_smi
    stopped = smi if isinstance(smi, Missing) and smi.reason == "failed" else None
    yield Verdict(
        severity="warning" if stopped else "note",
        subjects=names,
        summary=(
            f"{listed(names)} {plural(names, 'is', 'are')} software RDMA: no PCI function behind"
            + ("; nvidia-smi topo -m fails, which they can cause" if stopped else "")
        ),
        evidence=[
            Evidence(
                source=f"{DEVICES}/{hca.name}",
                seen="a link below /sys/devices/virtual",
                expected="a link below a PCI function",
            )
            for hca in soft[:8]
        ]
        + (
            [Evidence(source="nvidia-smi topo -m", seen=stopped.detail, expected="the matrix")]
            if stopped
            else []
        ),
        confidence="inferred" if stopped else "reported",
        remedy=Remedy(
            text="Keep them out of NCCL_IB_HCA; delete those that nobody uses.",
            commands=[f"rdma link delete {hca.name}" for hca in soft[:8]],
            needs="root",
            undo=f"rdma link add {soft[0].name} type TYPE netdev INTERFACE",
        ),
    )
