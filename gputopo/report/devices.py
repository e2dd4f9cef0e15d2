"""A device in a few words: the same in the headline, in the tree and beside the matrix."""

from __future__ import annotations

from gputopo.cpulist import parse, render
from gputopo.hardware.names import device_name, hca_name
from gputopo.hardware.pcie import GENERATIONS
from gputopo.report.layout import Span, cut
from gputopo.topology.graph import Topology
from gputopo.topology.model import Device, Gpu, Hca, Nic, Nvme, NvSwitch, PciBridge, Pcie, Port

UNKNOWN = "?"
"""Stands where a value is unknown; ``-v`` prints the reason of each."""

NAME_CELLS = 40
"""Columns that a name may take: what a device calls itself has no limit of its own."""

LAYERS = {"InfiniBand": "IB", "Ethernet": "Eth"}
"""Link layers in short, for narrow pages."""


def size(count: int | None) -> str:
    """Bytes as people say them, in powers of 1024."""
    if count is None:
        return UNKNOWN
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.3g} {unit}"


def cpu_list(cpus: str | None) -> str:
    """A CPU list, every second one of a long row written ``0-126:2`` as taskset does."""
    if cpus is None:
        return UNKNOWN
    if cpus.count(",") < 4:
        return cpus
    try:
        numbers = sorted(parse(cpus))
    except ValueError:
        return cpus
    step = numbers[1] - numbers[0]
    if numbers == list(range(numbers[0], numbers[-1] + 1, step)):
        return f"{numbers[0]}-{numbers[-1]}:{step}"
    return cpus


def ranges(prefix: str, numbers: list[int]) -> str:
    """``GPU0-3,6`` of ``GPU`` and [0, 1, 2, 3, 6]."""
    return f"{prefix}{render(numbers)}"


def lanes(speed: float | None, width: int | None) -> str:
    """``Gen5 x16``; what is unknown of it is ``?``."""
    generation = GENERATIONS.get(speed) if speed is not None else None
    rate = f"Gen{generation}" if generation else f"{speed:g} GT/s" if speed else f"Gen{UNKNOWN}"
    return f"{rate} x{width or UNKNOWN}"


def may_sleep(gpu: Gpu) -> bool:
    """Whether a GPU's lower link speed can be power management: it is not known to be at work."""
    return not (gpu.performance_state == 0 and gpu.processes)


def pcie_link(node: Device) -> Span:
    """The link above a device: ``Gen5 x16``, or what it is of what it can be."""
    pcie: Pcie | None = getattr(node, "pcie", None)
    if pcie is None:
        return Span(UNKNOWN if "pcie" in node.missing else "")
    now = lanes(pcie.speed_gts, pcie.width)
    most_speed = pcie.max_speed_gts or pcie.speed_gts
    most_width = pcie.max_width or pcie.width
    narrow = pcie.width is not None and most_width is not None and pcie.width < most_width
    slow = pcie.speed_gts is not None and most_speed is not None and pcie.speed_gts < most_speed
    if not narrow and not slow:
        return Span(now)
    text = f"{now} of {lanes(most_speed, most_width)}"
    if narrow:
        return Span(text, "error")
    if isinstance(node, Gpu) and may_sleep(node):
        return Span(f"{text}, idle?", "note")
    return Span(text, "warning")


def name_of(node: Device) -> str:
    """What a device is called in lists: ``GPU0``, ``mlx5_0``, ``nvme0``."""
    if isinstance(node, Gpu):
        return f"GPU{node.index}" if node.index is not None else "GPU?"
    if isinstance(node, NvSwitch):
        return node.id
    if isinstance(node, (Nic, Nvme)):
        return node.name or node.id
    return node.id


def model_of(node: Device) -> str:
    """What a device is: its own name for its product, else its numbers."""
    if isinstance(node, Gpu):
        found = node.name or device_name(node.vendor, node.device)
    elif isinstance(node, Hca):
        found = hca_name(node.vendor, node.device, node.model)
    elif isinstance(node, Nvme):
        found = node.model or device_name(node.vendor, node.device)
    elif isinstance(node, (Nic, PciBridge)):
        found = device_name(node.vendor, node.device)
    else:
        found = None
    return cut(found or UNKNOWN, NAME_CELLS)


def port(found: Port, *, short: bool = False) -> tuple[str, str, str]:
    """State, rate with link layer, and style: ``ACTIVE``, ``400 Gb/s InfiniBand``.

    The rate of a port that is down is the least it can do and says nothing: it is left out.
    """
    layer = found.link_layer or UNKNOWN
    layer = cut(LAYERS.get(layer, layer) if short else layer, NAME_CELLS)
    if found.state == "ACTIVE":
        rate = f"{found.rate_gbps:g}" if found.rate_gbps is not None else UNKNOWN
        return "ACTIVE", f"{rate} Gb/s {layer}", ""
    physical = "" if found.physical_state in (None, "LinkUp") else f" ({found.physical_state})"
    return cut((found.state or UNKNOWN) + physical, NAME_CELLS), layer, "warning"


def about_gpu(gpu: Gpu) -> list[Span]:
    """What stands behind a GPU in the tree, the worst first."""
    found: list[Span] = []
    if gpu.lost is not None:
        found.append(Span(f"LOST ({cut(gpu.lost, NAME_CELLS)})", "error"))
    found.append(Span(model_of(gpu)))
    if gpu.index is None:
        found.append(Span("not listed by NVML", "warning"))
    if gpu.driver is not None and gpu.driver != "nvidia":
        found.append(Span(f"driver {cut(gpu.driver, NAME_CELLS)}", "warning"))
    if gpu.driver is None and gpu.pci and gpu.name is None:
        why = gpu.missing.get("driver")
        absent = why is None or why.reason == "absent"
        found.append(Span("no driver" if absent else f"driver {UNKNOWN}", "warning"))
    if gpu.mig_mode:
        found.append(Span(f"MIG, {count(len(gpu.mig), 'instance')}"))
    if gpu.memory_numa is not None:
        found.append(Span(f"memory on NUMA {gpu.memory_numa}"))
    return found


def about_hca(hca: Hca, *, short: bool = False) -> list[Span]:
    """What stands behind an HCA in the tree: port states first, since they change."""
    found: list[Span] = []
    for each in hca.ports:
        state, rate, style = port(each, short=short)
        number = f"port {each.port} " if len(hca.ports) > 1 else ""
        found.append(Span(f"{number}{state} {rate}", style))
    if not hca.ports:
        unknown = "ports" in hca.missing
        found.append(
            Span(f"port {UNKNOWN}" if unknown else "no port", "" if unknown else "warning")
        )
    found.append(Span(model_of(hca)))
    found += [Span(cut(name, NAME_CELLS)) for name in hca.netdevs]
    return found


def about_nic(nic: Nic) -> list[Span]:
    found: list[Span] = []
    if nic.netdevs:
        speed = f" {nic.speed_gbps:g} Gb/s" if nic.speed_gbps is not None else ""
        found.append(Span(f"{cut(nic.state or UNKNOWN, NAME_CELLS)}{speed}"))
    else:
        unknown = "netdevs" in nic.missing
        found.append(Span(f"interface {UNKNOWN}" if unknown else "no interface"))
    found.append(Span(model_of(nic)))
    found += [Span(cut(name, NAME_CELLS)) for name in nic.netdevs if name != name_of(nic)]
    if nic.default_route:
        found.append(Span("default route"))
    return found


def folded(topology: Topology) -> dict[str, str]:
    """Virtual functions that another node stands for: the physical one, else the first of them."""
    found: dict[str, str] = {}
    first: dict[str, str] = {}
    for node in topology.of(Device):
        physical: str | None = getattr(node, "physical_function", None)
        if physical is None:
            continue
        there = topology.by_pci.get(physical)
        leader = there.id if there else first.setdefault(physical, node.id)
        if leader != node.id:
            found[node.id] = leader
    return found


def count(number: int, noun: str, plural: str = "") -> str:
    """``1 error``, ``2 errors``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
