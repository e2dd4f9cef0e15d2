"""NVL: NVLink and fabric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from gputopo.cpulist import render
from gputopo.facts import Missing, known
from gputopo.hardware.gpu_parts import form_of, line_of
from gputopo.probes.nvml import NvmlGpu, Pair
from gputopo.rules.common import (
    count,
    driver_facts,
    is_virtual,
    listed,
    nvml_of,
    plural,
    same_part,
    service_state,
    unread,
)
from gputopo.rules.finding import Cost, Evidence, Remedy, Severity, Skip, Verdict
from gputopo.rules.pci_links import Untold
from gputopo.rules.registry import rule
from gputopo.topology.graph import Topology
from gputopo.topology.model import Gpu, NvSwitch
from gputopo.topology.paths import rank

BRIDGE_LINKS = 4
"""NVLinks of one bridge between two cards of BRIDGED: a pair of A6000, A40 or RTX 3090 has one
bridge (NV4), A100 and H100 PCIe have room for three (NV12). Product briefs of these cards."""

BRIDGED = ("Ampere", "Hopper")

FABRIC_MANAGER = "nvidia-fabricmanager.service"

UNTIL_HOPPER = ("Volta", "Ampere")
"""Architectures on which CUDA programs cannot start while the fabric manager is down, and running
ones are ended (ABORT_CUDA_JOBS_ON_FM_EXIT in its configuration; without effect on Hopper and
later)."""

IMEX = "nvidia-imex.service"
CHANNELS = "/dev/nvidia-caps-imex-channels"

SUMMARY = {2: "unhealthy", 3: "at limited capacity"}
"""NVML_GPU_FABRIC_HEALTH_SUMMARY_* that are not healthy."""

HEALTH = (
    # name, shift, width, values that are trouble, what they mean
    ("DEGRADED_BW", 0, 0x3, {1: ("error", "its NVLink bandwidth is degraded")}),
    ("ROUTE_RECOVERY", 2, 0x3, {1: ("warning", "a route is being recovered")}),
    ("ROUTE_UNHEALTHY", 4, 0x3, {1: ("error", "a route is unhealthy")}),
    ("ACCESS_TIMEOUT_RECOVERY", 6, 0x3, {1: ("warning", "it recovers from an access time-out")}),
    (
        "INCORRECT_CONFIGURATION",
        8,
        0xF,
        {
            2: ("error", "its system GUID is wrong"),
            3: ("error", "its chassis serial number is wrong"),
            4: ("warning", "it is in no partition"),
            5: ("error", "too few NVLinks are up"),
            6: ("error", "its firmware does not fit the fabric's"),
            7: ("error", "it is in the wrong place"),
            8: ("error", "its state is invalid"),
        },
    ),
    ("GFM_STATE", 14, 0x3, {2: ("warning", "the fabric manager is not connected")}),
)  # fmt: skip
"""NVML_GPU_FABRIC_HEALTH_MASK_*: fields of two bits are 1 for true, 2 for false; 0 is not told."""

MEANINGS = {
    "CNS": "the chipset or the platform between them does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "DR": "it is switched off in the driver's registry",
    "NS": "it is not supported",
}
"""The letters of `nvidia-smi topo -p2p`."""


@rule(
    code="NVL401",
    name="nvlink-inactive",
    severity="error",
    needs=("nvml",),
    rationale="""
        NVLinks that are down on one GPU while its siblings have them up cost it their share of the
        bandwidth to its peers, or cut it off; jobs over all GPUs then run at its pace. Links that
        no sibling has up are not there by design: an H100 PCIe has 12 of 18, A800 and H800 8, a
        card without bridge none. Only as many links as the part has count; the driver answers for
        more.
    """,
    verify="nvidia-smi nvlink -s",
    mend="""
        Reset all GPUs of the board together, then look at the fabric manager; if the links stay
        down reseat the module or bridge, and have it serviced.
    """,
    sources=(
        "NVML API reference: nvmlDeviceGetNvLinkState, NVML_FI_DEV_NVLINK_LINK_COUNT",
        "NVIDIA/DCGM issue 198: diagnostics passed with all links down",
        "Azure/azurehpc-health-checks issue 162: 12 of 18 links are by design",
        "NVIDIA/NVSentinel issue 1481: links told down on cards that have none",
    ),
)
def nvlink_inactive(topology: Topology) -> Iterator[Verdict]:
    facts = driver_facts(topology)
    with_links = [gpu for gpu in topology.gpus if _counts(gpu)]
    if not with_links and any("nvlink.active" in gpu.missing for gpu in topology.gpus):
        raise Skip("the state of the NVLinks is unknown")
    untold = Untold()
    for name, siblings in same_part(with_links).items():
        best = max(_active(gpu) for gpu in siblings)
        form = form_of(name)
        if best == 0:
            yield from _all_down(topology, name, siblings)
            continue
        unbridged = [gpu for gpu in siblings if form == "card" and _active(gpu) == 0]
        usual = _usual(siblings, best)
        for gpu in siblings:
            links = gpu.nvlink
            if gpu in unbridged or links is None or not links.inactive or _active(gpu) >= best:
                continue
            by_bridge = form == "card" and gpu.architecture in BRIDGED
            if by_bridge and _active(gpu) % BRIDGE_LINKS:
                continue  # a part of a bridge is its pair's finding, NVL402
            if gpu.id not in facts:
                untold.add("the driver's answers cannot be told to be of this GPU", [gpu.id])
                continue
            yield _fewer(gpu, facts[gpu.id], best, usual, "warning" if by_bridge else "error")
        unbridged = [gpu for gpu in unbridged if gpu.id in facts]
        if unbridged:
            yield _unbridged(unbridged, facts)
    untold.raise_skip()


def _counts(gpu: Gpu) -> bool:
    """Whether a GPU's NVLinks can be judged: it has some, they are told, and there is no MIG."""
    links = gpu.nvlink
    return links is not None and links.count > 0 and links.active is not None and not gpu.mig_mode


def _active(gpu: Gpu) -> int:
    return gpu.nvlink.active or 0 if gpu.nvlink is not None else 0


def _usual(siblings: Sequence[Gpu], best: int) -> list[int]:
    """The links that are up on GPUs that have them all."""
    for gpu in siblings:
        if gpu.nvlink is not None and gpu.nvlink.active == best:
            return [i for i in range(gpu.nvlink.count) if i not in gpu.nvlink.inactive]
    return []


def _fewer(gpu: Gpu, fact: NvmlGpu, best: int, usual: list[int], severity: Severity) -> Verdict:
    links = gpu.nvlink
    assert links is not None
    down = [i for i in links.inactive if i in usual] or links.inactive
    active = _active(gpu)
    each = links.gbytes_per_s
    fabric = f"; its fabric state is {gpu.fabric.state}" if gpu.fabric is not None else ""
    return Verdict(
        severity=severity,
        subjects=[gpu.id],
        summary=(
            f"{gpu.id} has {active} of {best} NVLinks up; "
            f"{count(len(down), 'link')} {plural(down, 'is', 'are')} down ({render(down)})"
        ),
        evidence=[
            Evidence(
                source=f"nvmlDeviceGetNvLinkState({fact.index}, {render(down)})",
                seen=f"inactive{fabric}",
                expected=f"active, as on siblings of {gpu.name}",
            )
        ],
        confidence="reported",
        cost=None
        if each is None
        else Cost(
            text=f"{round((best - active) * each, 1):g} GB/s of {best * each:g} one way",
            derivation=f"{best - active} links of {each:g} GB/s (data sheet)",
            gbytes_per_s=round((best - active) * each, 1),
        ),
        remedy=Remedy(
            text=(
                f"Look whether a peer at the other end is missing; reset the GPUs of the board "
                f"together; reseat or replace {gpu.name} at {gpu.pci} if the links stay down."
            ),
            commands=[
                f"nvidia-smi nvlink -s -i {gpu.index}",
                f"nvidia-smi nvlink -e -i {gpu.index}",
                "nvidia-smi --gpu-reset",
            ],
            needs="root; no process on any GPU",
        ),
    )


def _unbridged(gpus: list[Gpu], facts: dict[str, NvmlGpu]) -> Verdict:
    nodes = [gpu.id for gpu in gpus]
    return Verdict(
        severity="note",
        subjects=nodes,
        summary=f"{listed(nodes)} {plural(nodes, 'has', 'have')} no NVLink bridge, others have",
        evidence=[
            Evidence(
                source=f"nvmlDeviceGetNvLinkState({render(facts[n].index for n in nodes)}, all)",
                seen="inactive",
                expected="active, if a bridge is fitted",
            )
        ],
        confidence="inferred",
        remedy=Remedy(
            text="Reseat the bridge, if one is fitted; else keep such GPUs apart in jobs."
        ),
    )


def _all_down(topology: Topology, name: str, siblings: list[Gpu]) -> Iterator[Verdict]:
    """No GPU of a part has a link up: a fault on modules, which are wired to each other."""
    if form_of(name) == "card" or len(siblings) < 2:
        return
    nodes = [gpu.id for gpu in siblings]
    virtual = is_virtual(topology)
    yield Verdict(
        severity="note" if virtual else "error",
        subjects=nodes,
        summary=(
            f"no NVLink is up on {listed(nodes)}, though {name} are modules wired to each other"
            + (" (a provider may switch them off for virtual machines)" if virtual else "")
        ),
        evidence=[
            Evidence(
                source=f"nvmlDeviceGetNvLinkState({render(g.index or 0 for g in siblings)}, all)",
                seen="inactive",
                expected="active",
            )
        ],
        confidence="reported",
        remedy=Remedy(
            text="See that the fabric manager runs and fits the driver; reset all GPUs together.",
            commands=[
                "systemctl status nvidia-fabricmanager",
                "dmesg | grep -iE 'nvlink|nvswitch|sxid'",
                "nvidia-smi --gpu-reset",
            ],
            needs="root; no process on any GPU",
        ),
    )


@rule(
    code="NVL402",
    name="nvlink-count-asymmetric",
    severity="warning",
    needs=("nvml",),
    rationale="""
        Pairs of GPUs that are wired alike should have equally many NVLinks up. A bridge that does
        not sit right brings up a part of its links, and then both ends agree on too few. Meshes
        with pairs of one, two or no links (DGX-1) are so by design, and links through NVSwitches
        belong to no pair.
    """,
    verify="nvidia-smi topo -m; nvidia-smi nvlink -s",
    mend="Power off, reseat the bridge between the two cards, or swap it with another pair's.",
    sources=(
        "NVIDIA/nccl issue 557: NV3 on a pair whose bridge has four links",
        "NVIDIA/nccl issue 1182: NVSwitches invisible in virtual machines",
    ),
)
def nvlink_count_asymmetric(topology: Topology) -> Iterator[Verdict]:
    facts = driver_facts(topology)
    untold = Untold()
    for node, fact in facts.items():
        reason = _end_unknown(fact)
        if reason is not None:
            untold.add(f"where its NVLinks lead is unknown ({reason})", [node])
    blank = {node for nodes in untold.values() for node in nodes}
    ends = {pair: n for pair, n in _ends(topology, facts).items() if not blank & {*pair}}
    for (a, b), links in sorted(ends.items()):
        back = ends.get((b, a), 0)
        # Where the end that tells of fewer says that links are down, NVL401 tells of them; and no
        # link can be told to lead to a GPU whose address NVML did not give.
        named = _gpu(topology, a).pci is not None
        if back < links and named and b in facts and not _has_down(topology, b):
            yield _ends_differ(topology, a, b, links, back)
    pairs = {(a, b): links for (a, b), links in ends.items() if a < b and ends.get((b, a)) == links}
    odd = [pair for pair in pairs if _is_part_of_bridge(topology, pair, pairs[pair])]
    for pair in sorted(odd):
        yield _part_of_bridge(topology, pair, pairs[pair])
    yield from _off_the_mode(topology, {p: n for p, n in pairs.items() if p not in odd})
    untold.raise_skip()


def _end_unknown(fact: NvmlGpu) -> Missing | None:
    """Why not all of a GPU's active NVLinks and their other ends are known."""
    if unread(fact.nvlink_count) and isinstance(fact.nvlink_count, Missing):
        return fact.nvlink_count
    for link in fact.nvlinks:
        for told in (link.active, link.remote):
            if isinstance(told, Missing) and link.active is not False and unread(told):
                return told
    return None


def _ends(topology: Topology, facts: dict[str, NvmlGpu]) -> dict[tuple[str, str], int]:
    """Active NVLinks from each GPU to each other, as the first of the two tells them."""
    by_pci = {gpu.pci: gpu.id for gpu in topology.gpus if gpu.pci is not None}
    found: Counter[tuple[str, str]] = Counter()
    for node, fact in facts.items():
        for link in fact.nvlinks:
            peer = by_pci.get(known(link.remote) or "")
            if link.active is True and peer is not None and peer != node:
                found[node, peer] += 1
    return dict(found)


def _has_down(topology: Topology, node: str) -> bool:
    links = _gpu(topology, node).nvlink
    return links is not None and bool(links.inactive)


def _gpu(topology: Topology, node: str) -> Gpu:
    gpu = topology.nodes[node]
    assert isinstance(gpu, Gpu)
    return gpu


def _is_part_of_bridge(topology: Topology, pair: tuple[str, str], links: int) -> bool:
    first, second = (_gpu(topology, node) for node in pair)
    return (
        first.name == second.name
        and form_of(first.name) == "card"
        and first.architecture in BRIDGED
        and links % BRIDGE_LINKS != 0
    )


def _ends_differ(topology: Topology, a: str, b: str, links: int, back: int) -> Verdict:
    return Verdict(
        subjects=[a, b],
        summary=f"{a} tells of {count(links, 'NVLink')} to {b}, {b} of {back} to {a}",
        evidence=[
            _pair_evidence(topology, a, b, links, f"{back}, as the other end tells"),
            _pair_evidence(topology, b, a, back, f"{links}, as the other end tells"),
        ],
        confidence="reported",
        remedy=_reseat(topology, a, b),
    )


def _pair_evidence(topology: Topology, a: str, b: str, links: int, expected: str) -> Evidence:
    return Evidence(
        source=f"nvmlDeviceGetNvLinkRemotePciInfo({_gpu(topology, a).index}, all) that lead to {b}",
        seen=count(links, "active link"),
        expected=expected,
    )


def _part_of_bridge(topology: Topology, pair: tuple[str, str], links: int) -> Verdict:
    a, b = pair
    whole = -(-links // BRIDGE_LINKS) * BRIDGE_LINKS
    each = _each(topology, a)
    return Verdict(
        subjects=[a, b],
        summary=(
            f"{a} and {b} have {count(links, 'NVLink')}; bridges between cards carry "
            f"{BRIDGE_LINKS} each, so {whole - links} did not come up"
        ),
        evidence=[_pair_evidence(topology, a, b, links, str(whole))],
        confidence="inferred",
        cost=_lost(whole - links, whole, each),
        remedy=_reseat(topology, a, b),
    )


def _each(topology: Topology, node: str) -> float | None:
    links = _gpu(topology, node).nvlink
    return links.gbytes_per_s if links is not None else None


def _lost(missing: int, whole: int, each: float | None) -> Cost | None:
    if each is None:
        return None
    return Cost(
        text=f"{missing * each:g} GB/s of {whole * each:g} one way",
        derivation=f"{missing} of {whole} links of {each:g} GB/s (data sheet or driver)",
        gbytes_per_s=round(missing * each, 1),
    )


def _reseat(topology: Topology, a: str, b: str) -> Remedy:
    first, second = _gpu(topology, a), _gpu(topology, b)
    return Remedy(
        text=f"Power off; reseat what connects {a} ({first.pci}) and {b} ({second.pci}).",
        commands=[
            f"nvidia-smi nvlink -s -i {first.index}",
            f"nvidia-smi nvlink -s -i {second.index}",
        ],
        needs="power-off and hands at the machine",
    )


def _off_the_mode(topology: Topology, pairs: dict[tuple[str, str], int]) -> Iterator[Verdict]:
    """A pair with fewer links than the others, where every GPU is linked with every other."""
    gpus = {node for pair in pairs for node in pair}
    if len(gpus) < 3 or len(pairs) != len(gpus) * (len(gpus) - 1) // 2:
        return  # a mesh or bridged pairs: unequal by design
    usual, often = Counter(pairs.values()).most_common(1)[0]
    if often <= len(pairs) / 2:
        return
    for (a, b), links in sorted(pairs.items()):
        if links < usual:
            yield Verdict(
                subjects=[a, b],
                summary=f"{a} and {b} have {count(links, 'NVLink')}, the other pairs {usual}",
                evidence=[_pair_evidence(topology, a, b, links, str(usual))],
                confidence="inferred",
                cost=_lost(usual - links, usual, _each(topology, a)),
                remedy=_reseat(topology, a, b),
            )


@rule(
    code="NVL403",
    name="nvlink-p2p-not-ok",
    severity="error",
    needs=("nvml",),
    rationale="""
        Whether one GPU may read and write another's memory is told by the driver pair by pair. Over
        NVLink it must be allowed; where it is not, copies go through the host at a tenth of the
        speed, or NCCL stops with an error. Over PCIe a refusal can be policy (GeForce), the way
        between two sockets, the chipset, a hypervisor, an IOMMU, or a switch in the driver's
        registry; MIG instances never have it.
    """,
    verify="nvidia-smi topo -p2p r; nvidia-smi topo -p2p w; nvidia-smi topo -p2p n",
    mend="""
        Over NVLink: see to the links and the fabric manager first. CNS over PCIe: look at ACS, the
        IOMMU, and whether a hypervisor stands between. DR: somebody switched it off by a module
        option.
    """,
    sources=(
        "NVML API reference: nvmlDeviceGetP2PStatus, nvmlGpuP2PStatus_t",
        "NVIDIA/nccl issues 175 and 2329; NVIDIA/cuda-samples issue 284: P2P works across sockets",
    ),
)
def nvlink_p2p_not_ok(topology: Topology) -> Iterator[Verdict]:
    nvml = nvml_of(topology)
    assert nvml is not None
    pairs = [pair for pair in nvml.pairs if _judged(topology, pair)]
    if pairs and not any(isinstance(v, str) for pair in pairs for v in pair.p2p.values()):
        raise Skip(f"the P2P status is unknown: {next(iter(pairs[0].p2p.values()), '')}")
    ends = _ends(topology, driver_facts(topology))
    over_nvlink: dict[tuple[str, ...], list[Pair]] = {}
    over_pcie: dict[str, list[Pair]] = {}
    for pair in pairs:
        a, b = f"gpu{pair.a}", f"gpu{pair.b}"
        if topology.path_class(a, b).startswith("NV"):
            if ((a, b) in ends) != ((b, a) in ends):
                continue  # one end says that the link is down
            bad = _refused(pair, ("read", "write", "nvlink"))
            if bad:
                over_nvlink.setdefault(bad, []).append(pair)
        else:
            for letters in {word.split()[1] for word in _refused(pair, ("read", "write"))}:
                over_pcie.setdefault(letters, []).append(pair)
    for words, found in over_nvlink.items():
        yield _over_nvlink(topology, words, found)
    for letters, found in over_pcie.items():
        yield from _over_pcie(topology, letters, found)


def _judged(topology: Topology, pair: Pair) -> bool:
    a, b = topology.nodes.get(f"gpu{pair.a}"), topology.nodes.get(f"gpu{pair.b}")
    return isinstance(a, Gpu) and isinstance(b, Gpu) and not a.mig_mode and not b.mig_mode


def _refused(pair: Pair, capabilities: Sequence[str]) -> tuple[str, ...]:
    """``read CNS`` for each capability that is refused; what is unknown is not refused."""
    found: list[str] = []
    for capability in capabilities:
        letters = known(pair.p2p.get(capability, Missing("absent")))
        if letters in MEANINGS:
            found.append(f"{capability} {letters}")
    return tuple(found)


def _ids(pairs: Sequence[Pair]) -> list[str]:
    return [f"gpu{i}" for i in sorted({index for pair in pairs for index in (pair.a, pair.b)})]


def _told(pairs: Sequence[Pair]) -> str:
    """``0-1, 0-2``: each pair once."""
    words = sorted({(min(p.a, p.b), max(p.a, p.b)) for p in pairs})
    shown = ", ".join(f"{a}-{b}" for a, b in words[:8])
    return shown if len(words) <= 8 else f"{shown} and {len(words) - 8} more"


def _over_nvlink(topology: Topology, words: tuple[str, ...], pairs: list[Pair]) -> Verdict:
    letters = words[0].split()[1]
    nodes = _ids(pairs)
    return Verdict(
        subjects=nodes,
        summary=(
            f"{listed(nodes)}: NVLink is up, but P2P is refused ({', '.join(words)}: "
            f"{MEANINGS[letters]})"
        ),
        evidence=[
            Evidence(
                source=f"nvmlDeviceGetP2PStatus, GPU pairs {_told(pairs)}",
                seen=", ".join(words),
                expected="OK",
            )
        ],
        confidence="reported",
        cost=Cost(
            text="copies between them go through host memory, or NCCL gives up",
            derivation="NCCL treats refused P2P on an NVLink pair as an error "
            "unless NCCL_IGNORE_DISABLED_P2P=1",
        ),
        remedy=_allow(letters)
        if letters == "DR"
        else Remedy(
            text="Restart the fabric manager, if there is one, and reset all GPUs together.",
            commands=[
                "nvidia-smi topo -p2p n",
                "systemctl status nvidia-fabricmanager",
                "nvidia-smi --gpu-reset",
            ],
            needs="root; no process on any GPU",
        ),
    )


def _allow(letters: str) -> Remedy:
    if letters == "DR":
        return Remedy(
            text="Find the module option that switches P2P off, and drop it if it is not meant.",
            commands=["grep -rn nvidia /etc/modprobe.d", "cat /proc/driver/nvidia/params"],
            needs="root; a reload of the driver",
        )
    return Remedy(
        text="Look at ACS on the ports between them (PCI104) and at the IOMMU (PCI105).",
        commands=["nvidia-smi topo -p2p r", "cat /proc/cmdline"],
    )


def _over_pcie(topology: Topology, letters: str, pairs: list[Pair]) -> Iterator[Verdict]:
    gpus = [_gpu(topology, node) for node in _ids(pairs)]
    geforce = all(line_of(gpu.name) == "geforce" for gpu in gpus)
    near = [
        pair
        for pair in pairs
        if rank(topology.pcie_class(f"gpu{pair.a}", f"gpu{pair.b}")) <= rank("PHB")
    ]
    if not (geforce or near or letters == "DR" or (letters == "CNS" and is_virtual(topology))):
        return  # between sockets, or between parts that lack it: how these machines are
    severity: Severity = "note"
    why = MEANINGS[letters]
    remedy = Remedy(text="None: NCCL goes through shared memory of the host by itself.")
    if geforce and letters in ("NS", "GNS", "CNS"):
        why = "NVIDIA's driver does not offer it for GeForce"
    elif letters == "DR":
        remedy = _allow(letters)
    elif is_virtual(topology):
        why += "; the hypervisor stands between"
    elif letters == "CNS" and near:
        severity, pairs, remedy = "warning", near, _allow(letters)
    nodes = _ids(pairs)
    yield Verdict(
        severity=severity,
        subjects=nodes,
        summary=f"no P2P over PCIe between {listed(nodes)} ({letters}): {why}",
        evidence=[
            Evidence(
                source=f"nvmlDeviceGetP2PStatus, GPU pairs {_told(pairs)}",
                seen=letters,
                expected="OK, where the platform has it",
            )
        ],
        confidence="reported",
        cost=Cost(
            text="copies between them take two steps through host memory",
            derivation="NCCL falls back from P2P to SHM",
        ),
        remedy=remedy,
    )


@rule(
    code="NVL404",
    name="pcie-fallback",
    severity="error",
    needs=("nvml",),
    rationale="""
        A pair of GPUs that should talk over NVLink and has only PCIe runs at a tenth of the speed,
        and one such GPU slows every collective of the machine; NCCL may even take it for a machine
        of its own. Behind NVSwitches every GPU reaches every other, so a GPU off the fabric is a
        fault. Cards with bridges, and meshes such as the DGX-1's, link only some pairs: there the
        placement of ranks decides.
    """,
    verify="nvidia-smi topo -m (NODE or SYS in the row of one GPU, NV# in all others)",
    mend="""
        See to the links (NVL401) and the fabric (NVL405). Where only some pairs are linked put
        ranks that exchange most on the two ends of a link.
    """,
    sources=(
        "vllm-project/vllm issue 16336: one GPU of eight off the fabric",
        "NVIDIA/nccl-tests issue 178: 208 GB/s inside a bridged pair, 20 across",
    ),
)
def pcie_fallback(topology: Topology) -> Iterator[Verdict]:
    told = [g for g in topology.gpus if g.nvlink is not None and g.nvlink.active is not None]
    for name, siblings in same_part(gpu for gpu in told if not gpu.mig_mode).items():
        linked = _linked(topology, siblings)
        joined = {node for pair in linked for node in pair}
        on = [gpu for gpu in siblings if gpu.id in joined]
        if form_of(name) == "card" and not any(_on_switch(topology, gpu) for gpu in on):
            yield from _bridged(topology, siblings, linked)
        elif len(on) > 1:
            for gpu in siblings:
                # One whose links are up has its peers hidden from here: a container, a guest.
                if gpu not in on and not _active(gpu):
                    yield _off_fabric(topology, gpu, on, linked[0])


def _linked(topology: Topology, gpus: list[Gpu]) -> list[tuple[str, str]]:
    """The pairs that have NVLink between them."""
    return [
        (first.id, second.id)
        for i, first in enumerate(gpus)
        for second in gpus[i + 1 :]
        if topology.path_class(first.id, second.id).startswith("NV")
    ]


def _on_switch(topology: Topology, gpu: Gpu) -> bool:
    return any(
        link.kind == "nvlink"
        and gpu.id in (link.a, link.b)
        and isinstance(topology.nodes.get(link.b if link.a == gpu.id else link.a), NvSwitch)
        for link in topology.links
    )


def _off_fabric(
    topology: Topology, gpu: Gpu, others: list[Gpu], example: tuple[str, str]
) -> Verdict:
    peer = next((other for other in others if other.numa == gpu.numa), others[0])
    path = topology.path(gpu.id, peer.id)
    usual = topology.path(*example)
    classes = sorted({topology.path_class(gpu.id, other.id) for other in others}, key=rank)
    return Verdict(
        subjects=[gpu.id],
        summary=(
            f"{gpu.id} reaches {listed(other.id for other in others)} over PCIe "
            f"({', '.join(classes)}); these have NVLink among each other"
        ),
        evidence=[
            Evidence(
                source=f"NVLinks of GPU {gpu.index} that lead to an NVSwitch or a GPU",
                seen="none active",
                expected=f"{usual.path_class}, as between {example[0]} and {example[1]}",
            )
        ],
        confidence="reported",
        cost=Cost(
            text=(
                f"{usual.gbytes_per_s or 0:g} GB/s over NVLink become "
                f"{f'{path.gbytes_per_s:g}' if path.gbytes_per_s else 'what PCIe gives'}"
            ),
            derivation=f"theoretical, {usual.path_class} against {path.path_class} to {peer.id}",
            gbytes_per_s=round(usual.gbytes_per_s - path.gbytes_per_s, 1)
            if usual.gbytes_per_s and path.gbytes_per_s
            else None,
        ),
        remedy=Remedy(
            text=f"Leave {gpu.id} out until its NVLinks are up again (NVL401, NVL405).",
            commands=[
                "systemctl status nvidia-fabricmanager",
                f"nvidia-smi -i {gpu.index} -q | grep -A8 Fabric",
            ],
            needs="root to restart the fabric manager and reset the GPUs",
        ),
    )


def _bridged(
    topology: Topology, siblings: list[Gpu], linked: list[tuple[str, str]]
) -> Iterator[Verdict]:
    """Some pairs of cards have a bridge and others have not: worth knowing for placement."""
    rest = len(siblings) * (len(siblings) - 1) // 2 - len(linked)
    if not linked or not rest:
        return
    best = topology.path(*linked[0])
    yield Verdict(
        severity="note",
        subjects=[gpu.id for gpu in siblings],
        summary=(
            f"NVLink joins only {', '.join(f'{a} with {b}' for a, b in linked[:8])} "
            f"({best.path_class}); all other pairs have PCIe alone"
        ),
        evidence=[
            Evidence(
                source="NVLinks by remote end (nvmlDeviceGetNvLinkRemotePciInfo)",
                seen=f"{count(len(linked), 'pair')} linked, {rest} not",
                expected="by design: bridges join cards two by two",
            )
        ],
        confidence="reported",
        remedy=Remedy(
            text="Put the ranks that exchange most, such as tensor parallel ones, on linked pairs.",
            commands=[f"CUDA_VISIBLE_DEVICES={','.join(a[3:] for a in linked[0])} COMMAND"],
        ),
    )


@rule(
    code="NVL405",
    name="fabric-not-ready",
    severity="error",
    needs=("nvml",),
    rationale="""
        GPUs behind NVSwitches work only after the fabric manager has set up the switches and each
        GPU has registered: before that CUDA fails with error 802, although nvidia-smi looks fine.
        It must be of the driver's version. Newer drivers tell the health of the fabric GPU by GPU.
        On machines without NVSwitch the service fails for want of work, which is no fault; in a
        virtual machine it runs in the host; in a multi-node NVLink rack on the switch trays, with
        IMEX on each node.
    """,
    verify="nvidia-smi -q | grep -A10 -w Fabric; systemctl status nvidia-fabricmanager nvidia-imex",
    mend="""
        Install the fabric manager of the driver's version, enable and start it with no job running;
        if it was restarted under running jobs, reset the GPUs.
    """,
    sources=(
        "NVIDIA fabric manager user guide; fabricmanager.cfg: ABORT_CUDA_JOBS_ON_FM_EXIT",
        "NVML API reference: nvmlGpuFabricState_t, NVML_GPU_FABRIC_HEALTH_MASK_*",
        "NVIDIA/gpu-operator issue 610: NV_WARN_NOTHING_TO_DO is no fault",
        "NVIDIA/nccl issues 976 and 1488: restarted under running jobs",
    ),
)
def fabric_not_ready(topology: Topology) -> Iterator[Verdict]:
    yield from _registration(topology)
    yield from _health(topology)
    yield from _manager(topology)
    yield from _imex(topology)


def _registration(topology: Topology) -> Iterator[Verdict]:
    groups: dict[tuple[str, int], list[Gpu]] = {}
    for gpu in topology.gpus:
        fabric = gpu.fabric
        if fabric is None or fabric.state == "not supported":
            continue
        if fabric.state != "completed" or fabric.status != 0:
            groups.setdefault((fabric.state, fabric.status), []).append(gpu)
    for (state, status), gpus in groups.items():
        nodes = [gpu.id for gpu in gpus]
        failed = state == "completed"
        word = f"ended with NVML error {status}" if failed else f"is {state}"
        yield Verdict(
            subjects=nodes,
            summary=(
                f"the NVLink fabric is not ready for {listed(nodes)}: the registration {word}; "
                "CUDA fails there with error 802"
            ),
            evidence=[
                Evidence(
                    source=f"nvmlDeviceGetGpuFabricInfoV({render(gpu.index or 0 for gpu in gpus)})",
                    seen=f"state {state}, status {status}",
                    expected="state completed, status 0",
                ),
                *_service_evidence(topology, FABRIC_MANAGER),
            ],
            confidence="reported",
            remedy=_start_manager(topology),
        )


def _service_evidence(topology: Topology, unit: str) -> list[Evidence]:
    state = service_state(topology, unit)
    return (
        []
        if state is None
        else [Evidence(source=f"systemctl, {unit}", seen=state, expected="active")]
    )


def _start_manager(topology: Topology) -> Remedy:
    if is_virtual(topology):
        return Remedy(
            text=(
                "In a virtual machine the fabric manager runs in the host or a service VM, unless "
                "all NVSwitches were passed in: ask the provider, or stop and start the machine."
            ),
            commands=["systemctl status nvidia-fabricmanager"],
            needs="the provider",
        )
    log = "journalctl -u nvidia-fabricmanager -b --no-pager | tail -30"
    if service_state(topology, FABRIC_MANAGER) == "active":
        return Remedy(
            text=(
                "The fabric manager runs: give it a minute after boot, then read its log; reset "
                "the GPUs, with no job running, if they stay as they are."
            ),
            commands=[log, "nvidia-smi -q | grep -A10 -w Fabric"],
            needs="root; for a reset (nvidia-smi --gpu-reset) no process on any GPU",
        )
    driver = topology.host.driver
    return Remedy(
        text=(
            f"Install the fabric manager of driver version {driver or 'in use'}, start it while no "
            "job runs, and reset the GPUs if they stay as they are."
        ),
        commands=[
            log,
            "systemctl enable --now nvidia-fabricmanager",
            "nvidia-smi --gpu-reset",
        ],
        needs="root; no process on any GPU",
        undo="systemctl disable --now nvidia-fabricmanager",
    )


def _health(topology: Topology) -> Iterator[Verdict]:
    groups: dict[tuple[Severity, str], list[Gpu]] = {}
    for gpu in topology.gpus:
        trouble = _trouble(gpu)
        if trouble is not None:
            groups.setdefault(trouble, []).append(gpu)
    for (severity, what), gpus in groups.items():
        nodes = [gpu.id for gpu in gpus]
        yield Verdict(
            severity=severity,
            subjects=nodes,
            summary=f"the NVLink fabric of {listed(nodes)} is not healthy: {what}",
            evidence=[
                Evidence(
                    source=f"nvmlDeviceGetGpuFabricInfoV({gpu.index})",
                    seen=f"health mask {gpu.fabric.health_mask or 0:#x}, "
                    f"summary {gpu.fabric.health_summary}",
                    expected="no field true, summary 1 (healthy) or 0 (not told)",
                )
                for gpu in gpus
                if gpu.fabric is not None
            ],
            confidence="reported",
            remedy=Remedy(
                text="Look at the links and the fabric manager's log; reset the GPUs of the board.",
                commands=[
                    "nvidia-smi nvlink -s",
                    "journalctl -u nvidia-fabricmanager -b --no-pager | tail -30",
                    "nvidia-smi --gpu-reset",
                ],
                needs="root; no process on any GPU",
            ),
        )


def _trouble(gpu: Gpu) -> tuple[Severity, str] | None:
    """What the fabric's health says of a GPU that is registered, and how bad it is."""
    fabric = gpu.fabric
    if fabric is None or fabric.state != "completed":
        return None
    found: list[tuple[Severity, str]] = []
    for _, shift, width, values in HEALTH:
        value = values.get((fabric.health_mask or 0) >> shift & width)
        if value is not None:
            found.append(("error" if value[0] == "error" else "warning", value[1]))
    word = SUMMARY.get(fabric.health_summary or 0)
    if word is not None and not found:
        found.append(("error" if fabric.health_summary == 2 else "warning", f"it is {word}"))
    if not found:
        return None
    worst: Severity = "error" if any(severity == "error" for severity, _ in found) else "warning"
    return worst, "; ".join(what for _, what in found)


def _manager(topology: Topology) -> Iterator[Verdict]:
    """The service itself, where it belongs here: on bare metal with NVSwitches of its own."""
    state = service_state(topology, FABRIC_MANAGER)
    switches = [switch for switch in topology.of(NvSwitch) if switch.pci is not None]
    if state in (None, "active", "activating", "reloading") or not switches:
        return
    if is_virtual(topology) or any(_unregistered(gpu) for gpu in topology.gpus):
        return  # the registration's own finding tells of it
    if state == "not-found" and any(_on_switch(topology, gpu) for gpu in topology.gpus):
        return  # links come up by a fabric manager alone: it runs elsewhere, in a driver container
    needed = any(gpu.architecture in UNTIL_HOPPER for gpu in topology.gpus)
    number = f"{len(switches)} NVSwitch{'' if len(switches) == 1 else 'es'}"
    yield Verdict(
        severity="error" if needed else "warning",
        subjects=["machine"],
        summary=(
            f"the fabric manager is {state} on a machine with {number}: "
            + (
                "new CUDA programs fail with error 802"
                if needed
                else "what runs goes on, but a GPU that is reset does not come back to the fabric"
            )
        ),
        evidence=_service_evidence(topology, FABRIC_MANAGER),
        confidence="reported",
        remedy=_start_manager(topology),
    )


def _unregistered(gpu: Gpu) -> bool:
    return gpu.fabric is not None and gpu.fabric.state not in ("completed", "not supported")


def _is_absent(fact: object) -> bool:
    return isinstance(fact, Missing) and fact.reason == "absent"


def _imex(topology: Topology) -> Iterator[Verdict]:
    """IMEX, which shares memory between the nodes of an NVLink rack: its failure, not its absence,
    since schedulers start it with the job that needs it."""
    in_rack = [
        gpu
        for gpu in topology.gpus
        if gpu.fabric is not None
        and gpu.fabric.cluster.strip("0-")
        and form_of(gpu.name) == "superchip"
    ]
    state = service_state(topology, IMEX)
    system = known(topology.facts.system)
    if not in_rack or state is None or system is None:
        return
    if state == "failed":
        yield Verdict(
            severity="warning",
            subjects=["machine"],
            summary="IMEX has failed: no memory is shared over NVLink with the rack's other nodes",
            evidence=_service_evidence(topology, IMEX),
            confidence="reported",
            remedy=Remedy(
                text="See why; all nodes of a domain need the same list of addresses.",
                commands=["journalctl -u nvidia-imex -b --no-pager | tail -30",
                          "systemctl restart nvidia-imex"],
                needs="root",
            ),
        )  # fmt: skip
    elif state == "active" and (system.imex_channels == [] or _is_absent(system.imex_channels)):
        yield Verdict(
            severity="note",
            subjects=["machine"],
            summary="IMEX runs, but there is no IMEX channel that this process could use",
            evidence=[Evidence(source=CHANNELS, seen="no channel", expected="channel0")],
            confidence="reported",
            remedy=Remedy(
                text="Create the channel's device node, or give the container the device.",
                commands=[
                    "grep nvidia-caps-imex-channels /proc/devices",
                    f"mkdir -p {CHANNELS} && mknod {CHANNELS}/channel0 c MAJOR 0",
                ],
                needs="root",
                undo=f"rm {CHANNELS}/channel0",
            ),
        )


@rule(
    code="NVL406",
    name="nvlink-errors",
    severity="warning",
    needs=("nvml",),
    rationale="""
        CRC errors, replays and recoveries that keep growing mean a link whose signal is poor: it
        retries, loses bandwidth, and may fail under load. Totals since the last reset prove
        nothing, so growth between two samples is judged. From NVLink 5 on bit error rates take
        their place.
    """,
    verify="nvidia-smi nvlink -e, twice, some minutes apart under load",
    mend="Reset the GPUs; reseat the module or bridge; replace what stays at fault.",
    sources=(
        "DCGM: DCGM_FR_NVLINK_ERROR_THRESHOLD, DCGM_FR_NVLINK_CRC_ERROR_THRESHOLD",
        "NVML API reference: nvmlDeviceGetNvLinkErrorCounter",
    ),
)
def nvlink_errors(topology: Topology) -> Iterator[Verdict]:
    raise Skip("needs two samples, and a scan takes one")


@rule(
    code="NVL407",
    name="c2c-degraded",
    severity="error",
    needs=("nvml",),
    rationale="""
        The C2C link is the way between a Grace CPU and its GPU: host memory, and on many machines
        the network, go over it. If it is down, or has fewer links than its siblings, the GPU falls
        back to a fraction of the bandwidth.
    """,
    verify="nvidia-smi c2c -s",
    mend="Reset the GPU, so that the link trains anew; if it stays down, have the module serviced.",
    sources=("NVML API reference: NVML_FI_DEV_C2C_LINK_COUNT, _GET_STATUS, _GET_MAX_BW",),
)
def c2c_degraded(topology: Topology) -> Iterator[Verdict]:
    facts = {node: fact for node, fact in driver_facts(topology).items() if known(fact.c2c_links)}
    for node, fact in facts.items():
        if known(fact.c2c_status) == 0 or known(fact.c2c_enabled) == 0:
            yield _c2c_down(topology, node, fact)
    whole = {node: _c2c_figure(fact) for node, fact in facts.items()}
    for node, fact in facts.items():
        siblings = [
            other
            for other in facts
            if other != node and _gpu(topology, other).name == _gpu(topology, node).name
        ]
        best = max((whole[other] for other in siblings), default=0)
        if 0 < whole[node] < best:
            links, speed = known(fact.c2c_links), known(fact.c2c_mbytes_per_s) or 0
            yield Verdict(
                subjects=[node],
                summary=(
                    f"{node}: C2C carries {whole[node] / 1000:.0f} GB/s one way, "
                    f"that of its siblings {best / 1000:.0f}"
                ),
                evidence=[
                    Evidence(
                        source=f"nvmlDeviceGetFieldValues({fact.index}), C2C count and bandwidth",
                        seen=f"{links} links of {speed / 1000:.1f} GB/s",
                        expected=f"{best / 1000:.0f} GB/s together",
                    )
                ],
                confidence="reported",
                cost=Cost(
                    text=f"{(best - whole[node]) / 1000:.0f} GB/s one way to the CPU's memory",
                    derivation="links times bandwidth, against the best sibling",
                    gbytes_per_s=round((best - whole[node]) / 1000, 1),
                ),
                remedy=_reset_c2c(fact),
            )


def _c2c_figure(gpu: NvmlGpu) -> int:
    return (known(gpu.c2c_links) or 0) * (known(gpu.c2c_mbytes_per_s) or 0)


def _c2c_down(topology: Topology, node: str, fact: NvmlGpu) -> Verdict:
    figure = _c2c_figure(fact)
    return Verdict(
        subjects=[node],
        summary=f"{node}: the C2C link to its Grace CPU is down",
        evidence=[
            Evidence(
                source=f"nvmlDeviceGetFieldValues({fact.index}), C2C_LINK_GET_STATUS",
                seen=str(known(fact.c2c_status)),
                expected="1",
            ),
            Evidence(
                source=f"nvmlDeviceGetC2cModeInfoV({fact.index})",
                seen=str(known(fact.c2c_enabled)),
                expected="1",
            ),
        ],
        confidence="reported",
        cost=Cost(
            text=f"{figure / 1000:.0f} GB/s one way to the CPU's memory",
            derivation=f"{known(fact.c2c_links)} links, as the driver counts them",
            gbytes_per_s=round(figure / 1000, 1),
        )
        if figure
        else None,
        remedy=_reset_c2c(fact),
    )


def _reset_c2c(fact: NvmlGpu) -> Remedy:
    return Remedy(
        text="Reset the GPU once nothing runs on it; if that does not help, have it serviced.",
        commands=["nvidia-smi c2c -s", f"nvidia-smi --gpu-reset -i {fact.index}"],
        needs="root; no process on the GPU",
    )
