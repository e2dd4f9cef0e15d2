"""PCI: links and paths."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gputopo.facts import Missing, known
from gputopo.hardware.gpu_parts import form_of, line_of
from gputopo.hardware.pcie import describe, gbytes_per_s
from gputopo.probes.pci import ACS_BITS, DEVICES
from gputopo.rules.common import count, driver_facts, is_virtual, listed, plural
from gputopo.rules.finding import Cost, Evidence, Remedy, Severity, Skip, Verdict
from gputopo.rules.pci_links import (
    PASSED_ON,
    PORTS,
    Reduced,
    Shared,
    Untold,
    UsedLink,
    Way,
    active_gbps,
    narrow_links,
    shared_uplinks,
    slow_links,
    used_links,
    ways,
)
from gputopo.rules.registry import rule
from gputopo.topology.graph import Topology
from gputopo.topology.model import Gpu, Hca, PciBridge, Pcie
from gputopo.topology.paths import Path

WORKING_STATES = (0, 1, 2)
"""Performance states with the link at full speed: P0, and P2 in which GeForce computes."""

CLOCKS_IDLE = 0x1
"""nvmlClocksEventReasonGpuIdle."""

FAST_PORT = 400.0
"""Gb/s of a port (NDR, 400GbE) from which a slot of the generation before is too slow for it."""

REDIRECTS = ("ReqRedir", "CmpltRedir", "UpstreamFwd")
"""ACS controls that send peer-to-peer traffic up to the root complex. SrcValid only checks."""

REFUSED = ("GNS", "TNS", "DR", "NS")
"""Answers of the driver after which no setting of a port matters: two GPUs will not talk over PCIe.
CNS blames the chipset, and what stands between may be why."""

GUEST_DRIVERS = ("vfio-pci", "pci-stub", "pciback", "xen-pciback")
"""Kernel drivers that hold a device for a virtual machine."""

TRANSLATING = ("DMA", "DMA-FQ")
"""Types of IOMMU group whose devices' addresses are translated (Linux ABI, iommu_groups/type)."""

SAMPLES = "needs two samples, and a scan takes one"

SHOWN = 16
"""Devices that a folded finding shows one by one."""

_LAPTOP = re.compile(r"\b(?:Laptop|Max-Q|Mobile)\b", re.IGNORECASE)


def _runs(link: UsedLink) -> str:
    """``gpu4 runs``, ``mlx5_0, mlx5_1 run``."""
    one = isinstance(link.end, PciBridge) or len(link.users) == 1
    return f"{link.what} {'runs' if one else 'run'}"


def _lspci(address: str | None) -> str:
    return f"lspci -vv -s {address} | grep -E 'LnkCap:|LnkSta:'"


@rule(
    code="PCI101",
    name="link-width-reduced",
    severity="error",
    needs=("pci",),
    rationale="""
        A link trains to the most lanes that both of its ends have and that work. Fewer lanes than
        both ends can do mean a bad contact, a damaged lane or riser, or a slot that the firmware
        split in two. Width is not part of power management, so unlike speed it counts at idle. What
        counts is what both ends can do: a card with sixteen lanes in a slot of eight is as it
        should be. In a virtual machine the port above is made up; there only a sibling of the same
        part that runs wider is proof.
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
        "aws/aws-k8s-tester issue 806: cards that are x8 by design",
    ),
)
def link_width_reduced(topology: Topology) -> Iterator[Verdict]:
    narrow, untold = narrow_links(topology)
    for found in narrow:
        yield _narrow(found, is_virtual(topology))
    untold.raise_skip()


def _narrow(found: Reduced, virtual: bool) -> Verdict:
    link, end, pcie = found.link, found.link.end, found.pcie
    others = [other.end.id for other in found.better]
    if virtual:
        why = f"{count(len(others), 'other')} of its kind {plural(others, 'runs', 'run')} at"
    elif pcie.port_max_width is None:
        why = "the card and its slot can do"
    else:
        why = f"the card and its port {end.parent} can both do"
    should = f"{found.should:g}"
    evidence = [
        Evidence(source=link.source("width"), seen=f"{found.now:g}", expected=should),
        Evidence(
            source=link.source("device_max_width"),
            seen=str(pcie.device_max_width or pcie.max_width),
            expected=f"{should} or more",
        ),
    ]
    if pcie.port_max_width is not None:
        source = f"{DEVICES}/{end.parent}/max_link_width"
        seen = str(pcie.port_max_width)
        evidence.append(Evidence(source=source, seen=seen, expected=f"{should} or more"))
    if others:
        source = f"current_link_width of {listed(others)}"
        evidence.append(Evidence(source=source, seen=should, expected=f"the same of {end.id}"))
    return Verdict(
        severity="note" if _LAPTOP.search(end.name or "") else "error",
        subjects=link.subjects,
        summary=f"{_runs(link)} at x{found.now:g}; {why} x{should}",
        evidence=evidence,
        confidence="reported",
        cost=_width_cost(pcie, int(found.now), int(found.should)),
        remedy=_reseat(end, virtual),
    )


def _reseat(end: Gpu | Hca | PciBridge, virtual: bool) -> Remedy:
    if virtual:
        return Remedy(
            text=f"Have the operator of the host look at the device passed through as {end.pci}.",
            commands=[_lspci(end.pci)],
            needs="the host of this virtual machine",
        )
    what = "the board or cable with" if isinstance(end, PciBridge) else end.name or end.id
    return Remedy(
        text=(
            f"Reseat {what} at {end.pci} and its riser; check that the slot below {end.parent} is "
            "not bifurcated; swap it with a sibling to tell card from slot."
        ),
        commands=[_lspci(end.pci), _lspci(end.parent)],
        needs="power-off and hands at the machine",
    )


def _width_cost(pcie: Pcie, width: int, should: int) -> Cost | None:
    speed = pcie.max_speed_gts or pcie.device_max_speed_gts
    if speed is None:
        return None
    cost = _cost((speed, should), (speed, width))
    if pcie.speed_gts is None or pcie.speed_gts >= speed:
        return cost
    now = gbytes_per_s(pcie.speed_gts, width)
    return Cost(
        text=cost.text,
        derivation=f"{cost.derivation}; just now {describe(pcie.speed_gts, width)}, {now} GB/s",
        gbytes_per_s=cost.gbytes_per_s,
    )


def _cost(could: tuple[float, int], has: tuple[float, int]) -> Cost:
    """What is lost between two links, each a speed in GT/s and a width."""
    most, now = gbytes_per_s(*could), gbytes_per_s(*has)
    return Cost(
        text=f"{round(most - now, 1)} GB/s of {most} one way",
        derivation=f"theoretical, {describe(*could)} against {describe(*has)}",
        gbytes_per_s=round(most - now, 2),
    )


@rule(
    code="PCI102",
    name="link-speed-reduced-under-load",
    severity="warning",
    needs=("pci",),
    rationale="""
        A GPU that idles lets its link fall to 2.5 GT/s, which saves power and costs nothing: it is
        back at full speed before the first copy is through. So a slow link counts only while the
        GPU works (a performance state of P0 to P2, a process that computes, clocks not held for
        being idle), or where siblings in P0 run faster. All other GPUs with slow links are one
        note: nobody can tell. HCAs and switches do not slow their links by themselves; one that is
        slower than others of its part is told. A link that is too narrow is PCI101's, whatever its
        speed.
    """,
    verify="""
nvidia-smi --query-gpu=index,pstate,pcie.link.gen.gpucurrent,pcie.link.gen.max --format=csv -l 1
while something copies to the GPU
    """.strip(),
    mend="""
        Set the slot's link speed to Auto in the firmware; clean the contacts, change riser, cable
        or retimer; update the firmware of card and board. Where the board was told to save PCIe
        power, turn that off.
    """,
    sources=(
        "open-mpi/hwloc issue 653: idle links read as slow ones",
        "NVIDIA/open-gpu-kernel-modules issue 1010: 2.5 GT/s also under load",
        "local-inference-lab/rtx6kpro issue 88: hours at 5 GT/s, and no error anywhere",
        "NVML API reference: nvmlDeviceGetPerformanceState, nvmlClocksEventReasonGpuIdle",
    ),
)
def link_speed_reduced(topology: Topology) -> Iterator[Verdict]:
    slow, untold = slow_links(topology)
    idle: list[Reduced] = []
    for found in slow:
        proof = _proof(topology, found)
        if proof:
            yield _slow(found, proof)
        else:
            idle.append(found)
    for kind in (True, False):
        same = [found for found in idle if isinstance(found.link.end, Gpu) is kind]
        if same:
            yield _cannot_tell(same, gpus=kind)
    untold.raise_skip()


def _proof(topology: Topology, found: Reduced) -> list[Evidence]:
    """What shows that a link should run at full speed now; nothing if it may be saving power."""
    end = found.link.end
    if not isinstance(end, Gpu):
        return _better(found.better)
    facts = driver_facts(topology).get(end.id)
    state = end.performance_state
    if facts is None or state not in WORKING_STATES:
        return []
    shown = [
        Evidence(
            source=f"nvmlDeviceGetPerformanceState({end.index})",
            seen=f"P{state}",
            expected="full link speed in this state",
        )
    ]
    computing = [p for p in known(facts.processes) or [] if p.kind != "graphics"]
    reasons = known(facts.clock_reasons)
    if computing and reasons is not None and not reasons & CLOCKS_IDLE:
        processes = "1 process" if len(computing) == 1 else f"{len(computing)} processes"
        shown.append(
            Evidence(
                source=f"nvmlDeviceGetComputeRunningProcesses({end.index})",
                seen=f"{processes}, and clocks not held for being idle",
                expected="full link speed while they work",
            )
        )
        return [*shown, *_better(found.better)]
    # Two in the same state that are faster: one alone may just have been woken.
    same = [b for b in found.better if isinstance(b.end, Gpu) and b.end.performance_state == state]
    return [*shown, *_better(same)] if state == 0 and len(same) > 1 else []


def _better(better: Sequence[UsedLink]) -> list[Evidence]:
    """The links alike that are faster, as evidence."""
    if not better:
        return []
    speeds = {link.pcie.speed_gts for link in better if link.pcie and link.pcie.speed_gts}
    return [
        Evidence(
            source=f"current_link_speed of {listed(link.end.id for link in better)}",
            seen=f"{' or '.join(f'{speed:g}' for speed in sorted(speeds))} GT/s",
            expected="the same of all of this part",
        )
    ]


def _slow(found: Reduced, proof: list[Evidence]) -> Verdict:
    link, end, pcie = found.link, found.link.end, found.pcie
    gpu = isinstance(end, Gpu)
    look = f"nvidia-smi -i {end.pci} --query-gpu=pstate,pcie.link.gen.gpucurrent --format=csv -l 1"
    return Verdict(
        subjects=link.subjects,
        summary=(
            f"{_runs(link)} at {found.now:g} GT/s "
            f"{'in a working state' if gpu else 'where others of its part are faster'}; "
            f"the link can do {found.should:g}"
        ),
        evidence=[
            Evidence(
                source=link.source("speed_gts"),
                seen=f"{found.now:g} GT/s",
                expected=f"{found.should:g} GT/s",
            ),
            *proof,
        ],
        confidence="inferred",
        cost=_cost((found.should, pcie.width), (found.now, pcie.width)) if pcie.width else None,
        remedy=Remedy(
            text=(
                f"Watch the link of {end.pci} while something copies. If it stays slow, set the "
                f"slot below {end.parent} to Auto in the firmware, then change riser or cable."
            ),
            commands=[
                *([look] if gpu else []),
                _lspci(end.pci),
                f"setpci -s {end.parent} CAP_EXP+30.w",
            ],
            needs="root; for a change the firmware's setup and a reboot",
        ),
    )


def _cannot_tell(slow: list[Reduced], gpus: bool) -> Verdict:
    """One note for all links of which only a look under load can tell."""
    ids = [name for found in slow for name in found.link.subjects]
    at = " and ".join(f"{speed:g}" for speed in sorted({found.now for found in slow}))
    if gpus:
        says = (
            f"{plural(ids, 'idles', 'idle')} at {at} GT/s: cannot tell what a link does under load"
        )
        commands = [
            "nvidia-smi --query-gpu=index,pstate,pcie.link.gen.gpucurrent --format=csv -l 1"
        ]
    else:
        says = (
            f"{plural(ids, 'is', 'are')} at {at} GT/s, below what both ends can do: the platform "
            "saves power or the firmware holds them back"
        )
        commands = [_lspci(found.link.end.pci) for found in slow[:SHOWN]]
    return Verdict(
        severity="note",
        subjects=ids,
        summary=f"{listed(ids)} {says}",
        evidence=[
            Evidence(
                source=found.link.source("speed_gts"),
                seen=f"{found.now:g} GT/s",
                expected=f"{found.should:g} GT/s under load",
            )
            for found in slow[:SHOWN]
        ],
        confidence="inferred",
        remedy=Remedy(text="Look again while something copies.", commands=commands),
    )


@rule(
    code="PCI103",
    name="slot-caps-device",
    severity="note",
    needs=("pci",),
    rationale="""
        A card can do more than its slot, or the switch above it, gives: fewer lanes, or an older
        generation. Nothing is broken, and for a new card in an older server it is what was bought.
        It is a warning where it costs and can be mended: another card of the same part has the
        better slot, a single GPU has too few lanes, or a port of 400 Gb/s or more gets less than
        its rate. Slots that are all alike are one note. That Blackwell GPUs name 64 GT/s is not
        held against a slot, nor an older generation against an HCA whose ports need no more.
    """,
    verify="""
lspci -vv -s ADDRESS | grep LnkCap:, and the same for each port above; dmesg | grep 'limited by'
    """.strip(),
    mend="Move the card to a slot with more lanes or of a newer generation, or expect no more.",
    sources=(
        "Linux: pcie_print_link_status, which logs 'limited by'",
        "PCI Express base specification: line rates and encoding",
        "stas00/ml-engineering, network: no GPU is attached at 64 GT/s",
    ),
)
def slot_caps_device(topology: Topology) -> Iterator[Verdict]:
    if is_virtual(topology) and used_links(topology):
        raise Skip(PASSED_ON)
    found, untold = ways(topology)
    groups: dict[tuple[tuple[object, ...], float, bool], list[Way]] = {}
    best: dict[tuple[object, ...], float] = {}
    for way in found:
        end = way.link.end
        part: tuple[object, ...] = (type(end), end.vendor, end.device, way.wish)
        best[part] = max(best.get(part, 0.0), way.gets)
        if way.gets < way.wish:
            groups.setdefault((part, way.gets, way.lanes), []).append(way)
    for (kind, *_), cards in groups.items():
        if isinstance(cards[0].link.end, Gpu):
            yield _capped(cards, _gpu_severity(topology, cards, best[kind]))
            continue
        for severity in ("warning", "note"):
            same = [card for card in cards if _hca_severity(topology, card) == severity]
            if same:
                yield _capped(same, severity, _needed(topology, same))
    untold.raise_skip()


def _gpu_severity(topology: Topology, cards: list[Way], best: float) -> Severity:
    """A warning if a card of the same part has more, or a single one has too few lanes. With a link
    to a Grace CPU, or soldered into a laptop, PCIe is what the maker wanted."""
    gpu = cards[0].link.end
    fixed = _LAPTOP.search(gpu.name or "") or any(
        link.kind == "c2c" and link.b == gpu.id for link in topology.links
    )
    alone = sum(other.device == gpu.device for other in topology.gpus) == 1
    costs = best > cards[0].gets or (alone and cards[0].lanes)
    return "warning" if costs and not fixed else "note"


def _hca_severity(topology: Topology, card: Way) -> Severity | None:
    """A warning if fast ports need more than they get; None if a slower slot costs them nothing."""
    needs = active_gbps(topology, card.link)
    if needs is not None and needs > 8 * card.gets:
        rates = (
            port.rate_gbps or 0.0
            for hca in topology.physical_hcas
            if hca.id in card.link.users
            for port in hca.ports
        )
        return "warning" if max(rates) >= FAST_PORT else "note"
    return "note" if card.lanes else None


def _needed(topology: Topology, cards: list[Way]) -> str:
    """What the ports of HCAs make of it."""
    rates = sorted({rate for card in cards if (rate := active_gbps(topology, card.link))})
    if not rates:
        return "; no port is active"
    carries = 8 * cards[0].gets
    shown = " or ".join(f"{rate:g}" for rate in rates)
    verb = "need more" if max(rates) > carries else "need no more"
    return f"; the active ports run at {shown} Gb/s and {verb}"


def _capped(cards: list[Way], severity: Severity, ports: str = "") -> Verdict:
    first = cards[0]
    ids = [name for card in cards for name in card.link.users]
    own, at = first.link.pcie, first.at.pcie
    assert own is not None and own.device_max_speed_gts is not None
    assert own.device_max_width is not None
    assert at is not None and at.max_speed_gts is not None and at.max_width is not None
    can = describe(own.device_max_speed_gts, own.device_max_width)
    gets = describe(at.max_speed_gts, at.max_width)
    cards_above = list(dict.fromkeys(card.at.end.id for card in cards))
    above = "the slot" if first.at is first.link else f"switch {first.at.end.id}"
    if len(cards_above) > 1:
        above = "their slots" if first.at is first.link else "the switches above"
    lost = round(first.wish - first.gets, 2)
    return Verdict(
        severity=severity,
        subjects=ids,
        summary=(
            f"{listed(ids)} can do {can}, {above} {plural(cards_above, 'gives', 'give')} {gets}: "
            f"{first.gets} of {first.wish} GB/s one way{ports}"
        ),
        evidence=[_cap_evidence(card, gets, can) for card in cards[:SHOWN]],
        confidence="reported",
        cost=Cost(
            text=f"up to {lost:g} GB/s of {first.wish} one way",
            derivation=f"theoretical, {can} against {gets}",
            gbytes_per_s=lost,
        ),
        remedy=Remedy(
            text=(
                f"Move {listed(ids)} to a slot that gives {can}, if there is one."
                if severity == "warning"
                else "None, unless a better slot is free."
            ),
            commands=[_lspci(card.at.end.parent) for card in cards[:SHOWN]],
            needs="power-off and hands at the machine",
        ),
    )


def _cap_evidence(card: Way, gets: str, can: str) -> Evidence:
    at = card.at.end
    where = (
        f"{DEVICES}/{at.parent}" if card.at is card.link else f"{DEVICES}/{{{at.pci},{at.parent}}}"
    )
    return Evidence(source=f"{where}/max_link_{{speed,width}}", seen=gets, expected=can)


@rule(
    code="PCI104",
    name="acs-redirect-on-p2p-path",
    severity="warning",
    needs=("pci",),
    rationale="""
        Access Control Services can send every request between two devices below one switch up to
        the root complex, which isolates them and takes GPU-to-GPU and GPU-to-HCA copies off their
        short way: they lose bandwidth on the shared uplink, hang, or fail. Only ports between two
        such partners count, and only ReqRedir, CmpltRedir and UpstreamFwd: SrcValid alone checks
        and redirects nothing. Virtual machines and address translation services (DirectTrans) need
        these bits, and so does a host that gives devices to virtual machines.
    """,
    verify="""
lspci -vvv -s ADDRESS | grep ACSCtl (as root), for each port between the two devices
    """.strip(),
    mend="""
        Turn ACS off in the firmware (AMD also: the IOMMU). Else clear the bits with setpci at each
        boot, on exactly the ports named here.
    """,
    sources=(
        "NVIDIA NCCL user guide, troubleshooting: PCI access control services",
        "NVIDIA/nccl issues 2079, 304, 523: hangs and crashes with redirection on",
        "NVIDIA/nccl issue 606: SrcValid alone is harmless",
        "PCI Express base specification 7.7.8: ACS control register",
    ),
)
def acs_redirect(topology: Topology) -> Iterator[Verdict]:
    between = _ports_between_partners(topology)
    if not between:
        return
    _bare_metal_only(topology)
    unread: dict[str, str] = {}
    found: list[PciBridge] = []
    for port in between:
        node = topology.nodes[port]
        assert isinstance(node, PciBridge)
        missing = node.missing.get("acs")
        if missing is not None and missing.reason != "unsupported":
            unread[port] = str(missing)
        elif node.acs and "DirectTrans" not in node.acs and set(REDIRECTS) & set(node.acs):
            found.append(node)
    if found:
        yield _redirecting(found, between)
    if unread:
        reason = next(iter(unread.values()))
        more = f", of {len(between)} between partners" if found else ""
        raise Skip(f"ACS of {count(len(unread), 'port')}{more} cannot be read: {reason}")


def _bare_metal_only(topology: Topology) -> None:
    """Raises Skip where isolating devices is right, or may be."""
    if is_virtual(topology):
        raise Skip(PASSED_ON)
    if topology.host.virtualization != "none":
        raise Skip("whether this is bare metal or a virtual machine cannot be told")
    guests = [
        node.id for node in topology.devices() if getattr(node, "driver", None) in GUEST_DRIVERS
    ]
    if guests:
        raise Skip(
            f"{listed(guests)} {plural(guests, 'is', 'are')} held for virtual machines, "
            "which rely on isolation"
        )


def _ports_between_partners(topology: Topology) -> dict[str, list[tuple[str, str]]]:
    """Ports that peer-to-peer traffic of GPUs passes below a root complex, each with the pairs."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in _peer_paths(topology):
        for step in path.via:
            node = topology.nodes[step]
            if isinstance(node, PciBridge) and node.role in PORTS:
                found.setdefault(step, []).append((path.a, path.b))
    return found


def _peer_paths(topology: Topology) -> Iterator[Path]:
    """PCIe paths below one root complex between GPUs that may talk so, and from GPUs to HCAs."""
    gpus = topology.gpus
    refused = _refused_pairs(topology)
    hcas = [hca for hca in topology.physical_hcas if hca.pci is not None]
    for place, gpu in enumerate(gpus):
        others: list[Gpu | Hca] = [g for g in gpus[place + 1 :] if (gpu.id, g.id) not in refused]
        if line_of(gpu.name) != "geforce":  # has no GPUDirect RDMA
            others += hcas
        for other in others:
            if topology.path_class(gpu.id, other.id) in ("PIX", "PXB", "PHB"):
                yield topology.path(gpu.id, other.id)


def _refused_pairs(topology: Topology) -> set[tuple[str, str]]:
    """Pairs of GPUs that may neither read nor write each other, whatever the ports do."""
    nvml = known(topology.facts.nvml)
    return {
        pair
        for found in (nvml.pairs if nvml else [])
        if known(found.p2p.get("read", "")) in REFUSED
        and known(found.p2p.get("write", "")) in REFUSED
        for pair in ((f"gpu{found.a}", f"gpu{found.b}"), (f"gpu{found.b}", f"gpu{found.a}"))
    }


def _redirecting(ports: list[PciBridge], between: dict[str, list[tuple[str, str]]]) -> Verdict:
    bits = {
        port.id: sum(bit for bit, word in ACS_BITS.items() if word in (port.acs or []))
        for port in ports
    }
    clear = sum(bit for bit, word in ACS_BITS.items() if word in REDIRECTS)
    devices = list(dict.fromkeys(d for port in ports for pair in between[port.id] for d in pair))
    devices.sort(key=lambda device: not device.startswith("gpu"))
    name, sends = ("port", "sends") if len(ports) == 1 else ("ports", "send")
    return Verdict(
        subjects=[*bits, *devices],
        summary=(
            f"{count(len(ports), 'port')} {sends} the peer traffic of {listed(devices)} "
            f"up to the root complex: {', '.join(bits)}"
        ),
        evidence=[
            Evidence(
                source=f"{DEVICES}/{port.id}/config, ACS control",
                seen=" ".join(f"{word}+" for word in port.acs or []),
                expected="no ReqRedir, CmpltRedir or UpstreamFwd",
            )
            for port in ports[:SHOWN]
        ],
        confidence="reported",
        cost=Cost(
            text="their copies share the uplink and cross the root complex, or hang",
            derivation="RTX A6000: 26.3 GB/s below one switch, 22 across (nvbandwidth issue 50)",
        ),
        remedy=Remedy(
            text=(
                f"Turn ACS off in the firmware, or clear the three bits on the {name} named, and "
                "do so again at each boot (a systemd unit before the first job)."
            ),
            commands=[f"setpci -s {port} ECAP_ACS+6.w=0000:{clear:04x}" for port in bits],
            needs="root; the setting is lost with a reboot",
            undo="; ".join(
                f"setpci -s {port} ECAP_ACS+6.w={value & clear:04x}:{clear:04x}"
                for port, value in bits.items()
            ),
        ),
    )


@rule(
    code="PCI105",
    name="iommu-translating",
    severity="warning",
    needs=("pci", "cpu"),
    rationale="""
        An IOMMU that translates takes part in every access of a device, so that copies between
        GPUs, and between GPUs and HCAs, go up to it and come back, slower, or not at all: hangs and
        wrong data have been reported. On a bare-metal server passthrough (group type identity)
        keeps it for the devices of virtual machines alone. No group means that it is off. Arm's
        SMMU, virtual machines and confidential computing need it; with more than 255 CPUs x86 needs
        it for interrupts, which passthrough leaves as they are.
    """,
    verify="cat /sys/bus/pci/devices/ADDRESS/iommu_group/type; cat /proc/cmdline",
    mend="Boot with iommu=pt (on Intel with intel_iommu=on as well, where it was there).",
    sources=(
        "NVIDIA/nccl issue 257 and NVIDIA/nccl-tests issue 115: hangs with the IOMMU on",
        "pytorch/pytorch issue 84803, NVIDIA/cuda-samples issue 48: wrong data between GPUs",
        "ROCm/rccl issue 1129",
        "Linux: Documentation/ABI/testing/sysfs-kernel-iommu_groups, type",
    ),
)
def iommu_translating(topology: Topology) -> Iterator[Verdict]:
    if not topology.gpus or topology.host.architecture not in ("x86_64", "i386"):
        return
    if is_virtual(topology):
        raise Skip(PASSED_ON)
    both: list[Gpu | Hca] = [*topology.gpus, *topology.physical_hcas]
    devices = [n for n in both if n.pci is not None and n.driver not in GUEST_DRIVERS]
    found = [node for node in devices if node.iommu_type in TRANSLATING]
    if found:
        yield _translating(topology, found)
    untold = Untold()
    for node in devices:
        missing = node.missing.get("iommu_type")
        if missing is not None and missing.reason not in ("absent", "unsupported"):
            untold.add(f"the type of its IOMMU group: {missing}", [node.id])
    untold.raise_skip()


def _translating(topology: Topology, found: list[Gpu | Hca]) -> Verdict:
    system = known(topology.facts.system)
    line: str | Missing = system.command_line if system is not None else Missing("absent")
    ids = [node.id for node in found]
    evidence = [
        Evidence(
            source=f"{DEVICES}/{node.pci}/iommu_group/type",
            seen=str(node.iommu_type),
            expected="identity, or no IOMMU",
        )
        for node in found[:SHOWN]
    ]
    if isinstance(line, str):
        words = [word for word in line.split() if "iommu" in word]
        seen = " ".join(words) or "no word of iommu"
        evidence.append(Evidence(source="/proc/cmdline", seen=seen, expected="iommu=pt"))
    return Verdict(
        severity=None if _peers_at_stake(topology) else "note",
        subjects=ids,
        summary=(
            f"the IOMMU translates for {listed(ids)} (type {found[0].iommu_type}): "
            "peer-to-peer and GPUDirect copies go through it"
        ),
        evidence=evidence,
        confidence="reported",
        cost=Cost(
            text="peer-to-peer and GPUDirect bandwidth; hangs or wrong data on some platforms",
            derivation="reports (see the page); no figure holds for all",
        ),
        remedy=Remedy(
            text=(
                "Boot with iommu=pt: add it to GRUB_CMDLINE_LINUX in /etc/default/grub. Virtual "
                "machines keep their isolation."
            ),
            commands=[
                "grubby --update-kernel=ALL --args=iommu=pt   # Red Hat and kin",
                "update-grub   # Debian, Ubuntu, once the file is changed",
            ],
            needs="root, and a reboot",
            undo="grubby --update-kernel=ALL --remove-args=iommu=pt, or take the word out again",
        ),
    )


def _peers_at_stake(topology: Topology) -> bool:
    """Whether any GPU may copy to another over PCIe, or has an HCA to serve."""
    refused = _refused_pairs(topology)
    gpus = topology.gpus
    if topology.physical_hcas and any(line_of(gpu.name) != "geforce" for gpu in gpus):
        return True
    return any((a.id, b.id) not in refused for i, a in enumerate(gpus) for b in gpus[i + 1 :])


@rule(
    code="PCI106",
    name="aer-correctable-rate",
    severity="warning",
    needs=("pci",),
    rationale="""
        A healthy link corrects an error now and then. A steady rate of them means a link at its
        limit, which slows down by retrying and may fail. The counters run since boot and say
        nothing by themselves: only their rise within a known time does. Above 32 a minute on a Gen5
        x16 link and 16 on others is DCGM's limit, found after fixed limits had taken good machines
        out; fatal and non-fatal errors should not rise at all.
    """,
    verify="cat /sys/bus/pci/devices/ADDRESS/aer_dev_correctable, twice, a minute apart",
    mend="Reseat card, riser or cable; have the retimer's and the board's firmware updated.",
    sources=(
        "DCGM 4.6: PCIe plugin, rate of correctable errors",
        "NVIDIA/DCGM issue 184: fixed limits misfire on faster links",
        "Linux: Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats",
    ),
)
def aer_correctable_rate(topology: Topology) -> Iterator[Verdict]:
    raise Skip(SAMPLES)


@rule(
    code="PCI107",
    name="replay-growing",
    severity="warning",
    needs=("nvml",),
    rationale="""
        The GPU counts the packets that it had to send again over PCIe. The count starts with the
        driver and proves nothing by itself; more than 80 within one test is DCGM's limit for a link
        with a bad contact, cable or retimer.
    """,
    verify="nvidia-smi -q | grep 'Replays Since Reset', twice, with copies in between",
    mend="Reseat card, riser or cable; have the retimer's and the board's firmware updated.",
    sources=(
        "DCGM: max_pcie_replays of the PCIe plugin, 80",
        "NVML API reference: nvmlDeviceGetPcieReplayCounter",
    ),
)
def replay_growing(topology: Topology) -> Iterator[Verdict]:
    raise Skip(SAMPLES)


@rule(
    code="PCI108",
    name="uplink-oversubscribed",
    severity="note",
    needs=("pci",),
    rationale="""
        GPUs behind one switch share its link to the CPU: if all copy from or to host memory at
        once, each gets a part. That is how most servers with switches are built, and nothing is
        broken. It is told once, since data loading and offloading feel it. A GPU with its own HCA
        behind the switch is no case: what they exchange turns round in the switch. HCAs without a
        GPU are told if their active ports carry more than the uplink.
    """,
    verify="lspci -tv; lspci -vv -s ADDRESS | grep LnkSta:, for the switch's upstream port",
    mend="Spread what works with host memory over GPUs behind different switches.",
    sources=(
        "NVIDIA/nvbandwidth issue 50: host copies of neighbours slow each other down",
        "PCI Express base specification: line rates and encoding",
    ),
)
def uplink_oversubscribed(topology: Topology) -> Iterator[Verdict]:
    if is_virtual(topology) and used_links(topology):
        raise Skip(PASSED_ON)
    shares = shared_uplinks(topology)
    for kind in (Gpu, Hca):
        same = [share for share in shares if isinstance(share.below[0].end, kind)]
        if same:
            yield _oversubscribed(same)


def _oversubscribed(shares: list[Shared]) -> Verdict:
    worst = max(shares, key=lambda share: share.wanted / share.carries)
    groups = [listed(name for card in share.below for name in card.users) for share in shares]
    each = round(worst.carries / len(worst.below), 1)
    pcie = worst.uplink.pcie
    assert pcie is not None and pcie.max_speed_gts is not None and pcie.max_width is not None
    link = describe(pcie.max_speed_gts, pcie.max_width)
    return Verdict(
        subjects=[name for share in shares for card in share.below for name in card.users],
        summary=(
            f"{'; '.join(groups)} {'each ' if len(groups) > 1 else ''}share one {link} link to "
            f"the CPU: {each:g} GB/s each when all copy at once"
        ),
        evidence=[
            Evidence(
                source=f"{DEVICES}/{share.uplink.end.pci}/max_link_{{speed,width}}",
                seen=f"{share.carries} GB/s above {group}",
                expected=f"{round(share.wanted, 1):g} GB/s, what they could take together",
            )
            for share, group in list(zip(shares, groups))[:SHOWN]
        ],
        confidence="inferred",
        cost=Cost(
            text=f"{round(worst.wanted / len(worst.below) - each, 1):g} GB/s each while all copy",
            derivation=f"theoretical, one {link} shared by {len(worst.below)}",
            gbytes_per_s=round(worst.wanted / len(worst.below) - each, 2),
        ),
        remedy=Remedy(
            text="None needed; put work that moves much host memory on GPUs of different groups."
        ),
    )


@rule(
    code="PCI109",
    name="bar1-too-small",
    severity="warning",
    needs=("nvml",),
    rationale="""
        An HCA reaches GPU memory through the window of BAR1. A window smaller than the memory
        limits what can be registered: buffers above a few hundred MB fail on a window of 256 MiB.
        GeForce has no GPUDirect RDMA, and a Grace GPU's memory is reached without a window; without
        an RDMA device here it does not matter.
    """,
    verify="nvidia-smi -q -d MEMORY | grep -A1 BAR1; lspci -vv -s ADDRESS | grep 'Memory at'",
    mend="""
        Turn on "Above 4G decoding" and "Resizable BAR" in the firmware. A T4 has a small window by
        design: stage through host memory there.
    """,
    sources=(
        "Mellanox/nv_peer_memory issue 101, openucx/ucx issue 8049: 256 MiB are too few",
        "NVML API reference: nvmlDeviceGetBAR1MemoryInfo",
    ),
)
def bar1_too_small(topology: Topology) -> Iterator[Verdict]:
    hcas = topology.physical_hcas
    if not hcas:
        return
    groups: dict[tuple[str | None, int, int], list[Gpu]] = {}
    untold = Untold()
    for gpu in topology.gpus:
        if line_of(gpu.name) == "geforce" or form_of(gpu.name) == "superchip" or gpu.memory_numa:
            continue
        if gpu.bar1_bytes is None or gpu.memory_bytes is None:
            missing = gpu.missing.get("bar1_bytes") or gpu.missing.get("memory_bytes")
            untold.add(f"the size of its BAR1 or memory is unknown ({missing})", [gpu.id])
        elif gpu.bar1_bytes < gpu.memory_bytes:
            groups.setdefault((gpu.name, gpu.bar1_bytes, gpu.memory_bytes), []).append(gpu)
    for (_, bar1, memory), gpus in groups.items():
        yield _small_window(gpus, bar1 >> 20, memory >> 20)
    untold.raise_skip()


def _small_window(gpus: list[Gpu], bar1: int, memory: int) -> Verdict:
    ids = [gpu.id for gpu in gpus]
    return Verdict(
        subjects=ids,
        summary=(
            f"BAR1 of {listed(ids)} is {bar1} MiB for {memory} MiB of memory: "
            "HCAs cannot register all of it"
        ),
        evidence=[
            Evidence(
                source=f"nvmlDeviceGetBAR1MemoryInfo({gpu.index})",
                seen=f"{bar1} MiB",
                expected=f"{memory} MiB or more",
            )
            for gpu in gpus[:SHOWN]
        ],
        confidence="reported",
        cost=Cost(
            text=f"GPUDirect RDMA for buffers above {bar1} MiB together",
            derivation="what is registered must fit into the window",
        ),
        remedy=Remedy(
            text=(
                'Turn on "Above 4G decoding" and "Resizable BAR" in the firmware (and off again to '
                "undo it)."
            ),
            commands=[f"lspci -vv -s {gpu.pci} | grep -E 'Region|BAR 1'" for gpu in gpus[:SHOWN]],
            needs="the firmware's setup, and a reboot",
        ),
    )
