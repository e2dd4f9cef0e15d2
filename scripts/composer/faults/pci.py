"""PCI: links and paths."""

from __future__ import annotations

from composer.driver import gpu_part
from composer.faults.registry import Subjects, fault
from composer.layout import GTS, Function
from composer.twin import ONE_SWITCH, Twin


@fault("PCI101")
def gpu_link_at_half_width(twin: Twin) -> Subjects | None:
    """The link of a GPU trained to half of the lanes that both ends have."""
    gpu = twin.last_gpu()
    if gpu is None or gpu.link is None or twin.port_above(gpu) is None:
        return None
    return twin.changed(gpu, width=gpu.link.width // 2)


@fault("PCI101", also=("NIC503",))
def hca_link_at_quarter_width(twin: Twin) -> Subjects | None:
    """The link of an HCA trained to a quarter of its lanes: less than its port carries."""
    hca = twin.fabric_hca()
    if hca is None or hca.link is None or twin.port_above(hca) is None:
        return None
    twin.changed(hca, width=hca.link.width // 4)
    return [other.rdma for other in twin.card(hca)]


@fault("PCI101")
def switch_uplink_at_half_width(twin: Twin) -> Subjects | None:
    """The link between a switch and its root port trained to half of its lanes."""
    gpu = twin.last_gpu()
    if gpu is None or len(gpu.above) < 3:
        return None
    root, switch = (twin.layout.functions[address] for address in gpu.above[:2])
    assert root.link is not None
    twin.change(root.address, width=root.link.width // 2)
    below = [f for f in (*twin.gpus, *twin.layout.hcas()) if switch.address in f.above]
    return [switch.address, *(twin.node_id(f) for f in below)]


@fault("PCI102")
def gpu_link_at_gen3_under_load(twin: Twin) -> Subjects | None:
    """The link of a GPU stays at 8 GT/s while the GPU works."""
    gpu = twin.last_gpu()
    if gpu is None or twin.port_above(gpu) is None or gpu.link is None or gpu.link.speed <= 8:
        return None
    busy = {"performance_state": 0, "clock_reasons": 0, "processes": [_process(gpu)]}
    return twin.changed(gpu, speed=8.0, **busy)


@fault("PCI102", also=("NIC503",))
def hca_link_at_gen1(twin: Twin) -> Subjects | None:
    """The link of an HCA trained to 2.5 GT/s, which no power management asks of it."""
    hca = twin.fabric_hca()
    if hca is None or twin.port_above(hca) is None:
        return None
    twin.changed(hca, speed=2.5)
    return [other.rdma for other in twin.card(hca)]


@fault("PCI103")
def gpu_in_a_slow_slot(twin: Twin) -> Subjects | None:
    """The port above a GPU is of an older generation than the GPU."""
    gpu = twin.last_gpu()
    port = twin.port_above(gpu) if gpu is not None else None
    if gpu is None or port is None or twin.arm:
        return None  # a Grace GPU has C2C for what matters
    slower = max(speed for speed in GTS.values() if speed < min(gpu.max_speed, port.max_speed))
    return twin.changed(gpu, slot_speed=slower)


@fault("PCI103", also=("NIC503",), quiet=True)
def hca_in_a_narrow_slot(twin: Twin) -> Subjects | None:
    """An HCA of sixteen lanes sits in a slot of eight."""
    hca = twin.fabric_hca()
    if hca is None or twin.port_above(hca) is None:
        return None
    twin.changed(hca, slot_width=8)
    return [other.rdma for other in twin.card(hca)]


@fault("PCI104")
def acs_redirect_above_a_gpu(twin: Twin) -> Subjects | None:
    """The port above a GPU sends peer-to-peer requests up to the root complex."""
    gpu = twin.last_gpu()
    port = twin.port_above(gpu) if gpu is not None else None
    partners = len(twin.gpus) + len(twin.layout.hcas()) > 1
    if port is None or not (twin.bare_metal and twin.healthy.root and partners) or twin.arm:
        return None
    # Source validation, request and completion redirect, upstream forwarding.
    twin.change(port.address, acs="1d")
    return [port.address]


@fault("PCI105")
def iommu_translates(twin: Twin) -> Subjects | None:
    """The IOMMU translates what devices ask of memory, and of each other."""
    if not twin.bare_metal or twin.arm or not (twin.peers_over_pcie() or twin.fabric_hca()):
        return None
    twin.machine["iommu"] = "DMA-FQ"
    return [twin.node_id(gpu) for gpu in twin.gpus]


@fault("PCI108", also=("NIC505", "NIC506"), quiet=True)
def gpus_behind_one_switch(twin: Twin) -> Subjects | None:
    """A GPU was put behind its neighbour's switch: both share one link to the CPU."""
    if len(twin.gpus) < 2 or not twin.bare_metal:
        return None
    neighbour, gpu = twin.gpus[-2:]
    if twin.path_class(neighbour, gpu) in ONE_SWITCH or len(neighbour.above) != 3:
        return None
    theirs, own = [row for row in twin.rows if " gpu " in row][-2:]
    twin.move_beside(own, theirs, "1d.0")
    return [twin.node_id(neighbour), twin.node_id(gpu)]


@fault("PCI109")
def bar1_of_256_mib(twin: Twin) -> Subjects | None:
    """The window into a GPU's memory is 256 MiB, where HCAs would register all of it."""
    gpu = twin.last_gpu()
    if gpu is None or twin.fabric_hca() is None or twin.arm or gpu_part(gpu).bar1_mib == 256:
        return None
    return twin.changed(gpu, bar1_mib=256)


def _process(gpu: Function) -> dict[str, int]:
    """A program that has taken half of a GPU's memory."""
    return {"pid": 4711, "memory": gpu_part(gpu).memory_mib // 2}
