"""``scan`` as text: what the machine is, what is wrong with it, then the graph that shows it.

The order is that of an outage: the verdict comes before the tree. What is unknown is printed as
``?``, never left out as if it were fine; ``-v`` tells the reason of each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from gputopo.cpulist import parse
from gputopo.facts import ABSENT, Missing, ProbeStatus
from gputopo.hardware.names import device_name
from gputopo.report.devices import (
    NAME_CELLS,
    UNKNOWN,
    count,
    cpu_list,
    folded,
    model_of,
    name_of,
    port,
    ranges,
    size,
)
from gputopo.report.findings import write_findings, write_skipped, write_verdict
from gputopo.report.layout import Page, Span, cut, page_width, wants_colour
from gputopo.report.matrix import write_matrix
from gputopo.report.tree import write_tree
from gputopo.rules.finding import Report
from gputopo.topology.graph import Topology
from gputopo.topology.model import Gpu, HostBridge, NvSwitch, PciDevice

_MODEL_NOISE = re.compile(r"\((?:R|TM|tm)\)| CPU\b| @ [\d.]+GHz| \d+-Core(?:s| Processor)")

ACCELERATORS = (0x0302, 0x0380, 0x1200)
"""PCI classes of GPUs of other makers, which are named where NVIDIA's are missing."""


def render(
    topology: Topology,
    report: Report,
    *,
    tty: bool,
    verbose: int = 0,
    quiet: bool = False,
    width: int | None = None,
) -> str:
    """The whole text with its final newline; empty if ``quiet`` and there is nothing to say.

    ``tty`` allows colour (unless NO_COLOR is set) and the terminal's own width; ``width`` overrides
    that. ``quiet`` leaves findings alone; ``verbose`` 1 adds root ports, reasons and timings, 2
    every function.
    """
    page = Page(page_width(tty) if width is None else width, wants_colour(tty))
    if quiet:
        write_findings(page, report, verbose)
        # Silence would read as health.
        write_skipped(page, [skip for skip in report.skipped if skip.broken], verbose)
        return page.text()
    _write_headline(page, topology)
    page.line()
    write_verdict(page, report)
    write_findings(page, report, verbose)
    write_skipped(page, report.skipped, verbose)
    write_tree(page, topology, verbose)
    _write_nvlinks(page, topology)
    if topology.gpus or verbose:
        write_matrix(page, topology)
    if verbose:
        _write_missing(page, topology)
    _write_probes(page, topology, verbose)
    return page.text()


# Headline


def _write_headline(page: Page, topology: Topology) -> None:
    rows = [
        ("machine", _machine(topology)),
        ("CPUs", _cpus(topology)),
        ("GPUs", _gpus(topology)),
        ("HCAs", _hcas(topology)),
    ]
    if topology.source_kind != "live":
        taken = f"captured {topology.captured_at}" if topology.captured_at else "time unknown"
        rows.append(("source", [Span(topology.source_name), Span(taken)]))
    elif not topology.gpus:
        hint = "gputopo scan --from fixture:hgx-h100 shows a bundled machine with 8 GPUs"
        rows.append(("hint", [Span(hint)]))
    for title, items in rows:
        page.flow([Span(title.ljust(9), "dim")], items, separator=", ")


def _machine(topology: Topology) -> list[Span]:
    host = topology.host
    vendor, product = host.vendor or "", host.product or ""
    if product.startswith(vendor):
        vendor = ""
    built = " ".join(cut(word, NAME_CELLS) for word in (vendor, product) if word)
    named = f"{cut(host.hostname, 64)}: " if host.hostname else ""
    found = [Span(f"{named}{built or 'product unknown'}", "bold")]
    if host.virtualization == "none":
        found.append(Span("bare metal"))
    elif host.virtualization:
        found.append(Span(f"virtual machine ({cut(host.virtualization, NAME_CELLS)})"))
    else:
        found.append(Span("bare metal or virtual: unknown"))
    if host.container:
        found.append(Span(f"inside {cut(host.container, NAME_CELLS)}"))
    found.append(Span(f"Linux {cut(host.kernel or UNKNOWN, 64)}"))
    return found


def cpu_model(name: str | None) -> str:
    """``Intel Xeon Platinum 8480C`` of ``Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz``."""
    short = _MODEL_NOISE.sub("", name or UNKNOWN)
    return cut(" ".join(short.split()), 60)


def _cpus(topology: Topology) -> list[Span]:
    host = topology.host
    found = [
        Span(f"{host.packages or UNKNOWN} x {cpu_model(host.cpu_model)}"),
        Span(count(host.cores, "core") if host.cores else f"{UNKNOWN} cores"),
        Span(count(host.pus, "thread") if host.pus else f"{UNKNOWN} threads"),
        Span(_numa(topology)),
        Span(f"memory {size(host.memory_bytes)}"),
    ]
    if host.allowed_cpus and host.pus and len(parse(host.allowed_cpus)) < host.pus:
        allowed = cut(cpu_list(host.allowed_cpus), NAME_CELLS)
        found.append(Span(f"only CPUs {allowed} allowed here", "warning"))
    return found


def _numa(topology: Topology) -> str:
    """``8 NUMA nodes (NPS4)``: how many a package has, in the word of its maker."""
    nodes = topology.cpu_nodes
    if not nodes:
        return f"{UNKNOWN} NUMA nodes"
    text = count(len(nodes), "NUMA node")
    packages = topology.host.packages or 0
    if packages and len(nodes) > packages and len(nodes) % packages == 0:
        each = len(nodes) // packages
        real = topology.host.virtualization == "none"
        name = (topology.host.cpu_model or "").upper() if real else ""
        word = "NPS" if "AMD" in name else "SNC" if "INTEL" in name else ""
        text += f" ({word}{each})" if word else f" ({each} a package)"
    others = len(topology.numa_nodes) - len(nodes)
    return f"{text} + {others} without CPUs" if others else text


def _gpus(topology: Topology) -> list[Span]:
    if not topology.gpus:
        return _why_no_gpu(topology)
    found = [
        Span(f"{number} x {model}", "bold")
        for model, number in Counter(model_of(gpu) for gpu in topology.gpus).items()
    ]
    lost = sum(gpu.lost is not None for gpu in topology.gpus)
    if lost:
        found.append(Span(f"{lost} LOST", "error"))
    nvml = topology.facts.nvml
    driver = topology.host.driver
    if driver is None and topology.source_kind == "text":
        found.append(Span(f"driver {UNKNOWN}"))
    elif driver is None:
        found.append(Span("no NVIDIA driver seen", "warning"))
    else:
        found.append(Span(f"driver {cut(driver, NAME_CELLS)}"))
    if isinstance(nvml, Missing):
        found.append(Span(f"NVML {cut(str(nvml), 80)}", "warning"))
    else:
        found.append(Span(f"CUDA {cut(topology.host.cuda or UNKNOWN, NAME_CELLS)}"))
    return found


def _why_no_gpu(topology: Topology) -> list[Span]:
    """Why there is no GPU to be seen, as far as the facts go."""
    pci, nvml = topology.facts.pci, topology.facts.nvml
    if isinstance(pci, Missing):
        found = [Span(f"none seen: no PCI functions ({cut(str(pci), 80)})", "warning")]
    else:
        functions = count(len(pci.functions), "PCI function")
        found = [Span(f"none: no NVIDIA GPU among {functions}", "bold")]
        nameless = sum(function.may_be_gpu for function in pci.functions)
        if nameless:
            shown = count(nameless, "display function")
            found = [Span(f"unknown: {shown} of a vendor that cannot be read", "warning")]
        others = Counter(
            device_name(function.vendor, function.device) or UNKNOWN
            for function in pci.functions
            if function.base_class in ACCELERATORS
        )
        if others:
            named = ", ".join(f"{number} x {name}" for name, number in others.items())
            found.append(Span(f"other accelerators: {named}"))
    if topology.host.driver is None:
        found.append(Span("no NVIDIA driver seen"))
    else:
        found.append(Span(f"driver {cut(topology.host.driver, NAME_CELLS)} loaded", "warning"))
    if isinstance(nvml, Missing):
        found.append(Span(f"NVML {cut(str(nvml), 80)}"))
    return found


def _hcas(topology: Topology) -> list[Span]:
    """HCAs by product and the states of their ports."""
    rdma = topology.facts.rdma
    if not topology.hcas and isinstance(rdma, Missing):
        if rdma == ABSENT:
            return [Span("none (no /sys/class/infiniband)")]
        return [Span(f"{UNKNOWN} ({cut(str(rdma), 80)})", "warning")]
    groups: Counter[tuple[str, str]] = Counter()
    hidden = folded(topology)
    for hca in topology.hcas:
        if hca.software or hca.id in hidden:
            continue
        ports = [port(each) for each in hca.ports]
        states = " + ".join(f"{rate} {state}" for state, rate, _ in ports)
        if not states:
            states = f"port {UNKNOWN}" if "ports" in hca.missing else "without port"
        style = next((style for _, _, style in ports if style), "")
        groups[(f"{model_of(hca)} {states}", style)] += 1
    found = [Span(f"{number} x {text}", style) for (text, style), number in groups.items()]
    virtual = sum(hca.id in hidden for hca in topology.hcas)
    software = sum(hca.software for hca in topology.hcas)
    if virtual:
        found.append(Span(count(virtual, "VF")))
    if software:
        found.append(Span(f"{software} software"))
    return found or [Span("none")]


# NVLink and C2C


def _write_nvlinks(page: Page, topology: Topology) -> None:
    """A line for each GPU; GPUs of which the same can be said share one."""
    rows: dict[tuple[Span, ...], list[Gpu]] = {}
    for gpu in topology.gpus:
        for items in (_nvlink(topology, gpu), _c2c(topology, gpu)):
            if items:
                rows.setdefault(tuple(items), []).append(gpu)
    if not rows:
        return
    c2c = any(link.kind == "c2c" for link in topology.links)
    nvlink = any(gpu.nvlink is None or gpu.nvlink.count for gpu in topology.gpus)
    title = " and ".join(name for name, there in (("NVLink", nvlink), ("C2C", c2c)) if there)
    page.heading(title, "GB/s in one direction, theoretical")
    for spans, gpus in rows.items():
        numbers = [gpu.index for gpu in gpus if gpu.index is not None]
        named = ranges("GPU", numbers) if numbers else name_of(gpus[0])
        page.fields([Span(f"{cut(named, 24):<9} ", "bold")], spans)


def _nvlink(topology: Topology, gpu: Gpu) -> list[Span]:
    links = gpu.nvlink
    if links is None:
        why = gpu.missing.get("nvlink") or gpu.missing.get("nvml")
        if why is None or why.reason in ("unsupported", "absent"):
            return []
        return [Span(f"NVLink {UNKNOWN} ({cut(str(why), 80)})", "warning")]
    if not links.count:
        return []
    active = UNKNOWN if links.active is None else str(links.active)
    whole = links.active == links.count
    found = [
        Span(f"{active} of {count(links.count, 'link')}", "" if whole else "warning"),
        Span(f"NVLink {links.version or UNKNOWN}"),
    ]
    if links.active:
        total = f"{links.active * links.gbytes_per_s:g}" if links.gbytes_per_s else UNKNOWN
        found.append(Span(f"{total} GB/s"))
    if links.inactive:
        found.append(Span(f"inactive: {ranges('', links.inactive)}", "warning"))
    if links.active is None and "nvlink.active" in gpu.missing:
        found.append(Span(cut(str(gpu.missing["nvlink.active"]), 80), "warning"))
    found += _peers(topology, gpu)
    fabric = gpu.fabric
    if fabric is not None and fabric.state != "not supported":
        bad = fabric.state != "completed" or fabric.status != 0
        text = f"fabric {fabric.state}" + (f", status {fabric.status}" if fabric.status else "")
        found.append(Span(text, "warning" if bad else ""))
    return found


def _peers(topology: Topology, gpu: Gpu) -> list[Span]:
    """Through which switches, or to which GPUs, with the number of links to each."""
    peers: dict[str, int] = {}
    for link in topology.links:
        if link.kind == "nvlink" and gpu.id in (link.a, link.b):
            peers[link.b if link.a == gpu.id else link.a] = link.count or 0
    switches = [peer for peer in peers if isinstance(topology.nodes.get(peer), NvSwitch)]
    found: list[Span] = []
    if switches:
        hidden = all(getattr(topology.nodes[peer], "pci", None) is None for peer in switches)
        number = count(len(switches), "NVSwitch", "NVSwitches")
        each = "+".join(str(peers[peer]) for peer in switches)
        found.append(Span("through NVSwitch" if hidden else f"through {number} ({each})"))
    for peer, links in peers.items():
        node = topology.nodes.get(peer)
        if isinstance(node, Gpu):
            found.append(Span(f"{name_of(node)} x{links}"))
    return found


def _c2c(topology: Topology, gpu: Gpu) -> list[Span]:
    found: list[Span] = []
    for link in topology.links:
        if link.kind == "c2c" and gpu.id in (link.a, link.b):
            other = link.a if link.b == gpu.id else link.b
            speed = UNKNOWN if link.gbytes_per_s is None else f"{link.gbytes_per_s:g}"
            found += [
                Span(f"C2C to NUMA {other.removeprefix('numa')}"),
                Span(f"{link.count or UNKNOWN} links"),
                Span(f"{speed} GB/s"),
                Span(link.state, "" if link.state == "up" else "warning"),
            ]
    return found


# What is unknown, and how the probes fared


def _write_missing(page: Page, topology: Topology) -> None:
    """Each field that is unknown with the reason, and the sources that are not the usual ones."""
    missing: dict[str, dict[str, list[str]]] = {}
    sources: dict[str, dict[str, list[str]]] = {}
    for field, why in topology.host.missing.items():
        missing.setdefault(str(why), {}).setdefault(field, []).append("host")
    for node in topology.nodes.values():
        if isinstance(node, (PciDevice, HostBridge)):
            continue
        for field, why in node.missing.items():
            missing.setdefault(str(why), {}).setdefault(field, []).append(node.id)
        own = getattr(node, "pci", None)
        for field, source in node.sources.items():
            if not own or own not in source:
                sources.setdefault(source, {}).setdefault(field, []).append(node.id)
    _write_reasons(page, "Unknown", missing)
    _write_reasons(page, "Sources", sources)


def _write_reasons(page: Page, title: str, reasons: dict[str, dict[str, list[str]]]) -> None:
    """For each reason (or source) the fields, those of the same nodes together."""
    if reasons:
        page.heading(title)
    for why, fields in sorted(reasons.items()):
        page.prose([], cut(why, 200))
        together: dict[tuple[str, ...], list[str]] = {}
        for field, ids in fields.items():
            together.setdefault(tuple(ids), []).append(field)
        for nodes, names in together.items():
            page.prose([Span("  ")], f"{', '.join(names)} of {_some(nodes)}", "dim")


def _some(ids: Sequence[str]) -> str:
    shown = " ".join(cut(node, 24) for node in ids[:8])
    return shown if len(ids) <= 8 else f"{shown} +{len(ids) - 8} more"


def _write_probes(page: Page, topology: Topology, verbose: int) -> None:
    def took(probe: ProbeStatus) -> str:
        return f" {probe.seconds * 1000:.0f} ms" if verbose else ""

    if topology.probes:
        page.line()
    fine = [probe for probe in topology.probes if probe.status == "ok"]
    if fine:
        names = [probe.name + took(probe) for probe in fine]
        page.flow([Span("probes ok".ljust(11), "dim")], map(Span, names), separator=" ")
    for probe in topology.probes:
        if probe.status == "ok":
            continue
        style = "warning" if probe.status in ("timeout", "failed") else ""
        detail = f": {cut(probe.detail, 300)}" if probe.detail else ""
        text = f"{probe.name} {probe.status}{took(probe)}{detail}"
        page.prose([Span("probe".ljust(11), "dim")], text, style)
