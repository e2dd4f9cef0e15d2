"""NIC: HCAs and GPUDirect."""

from __future__ import annotations

from composer import parts
from composer.driver import gpu_part
from composer.faults.registry import Subjects, fault
from composer.twin import Twin
from gputopo.host.base import Output
from gputopo.host.tree import Link
from gputopo.probes import nvidia_smi
from gputopo.probes.rdma import DEVICES


@fault("NIC501", also=("NIC505", "NIC506"))
def port_down(twin: Twin) -> Subjects | None:
    """The port of the HCA beside a GPU is down."""
    hca = twin.fabric_hca()
    return None if hca is None else twin.changed(hca, state="DOWN")


@fault("NIC501", also=("NIC505", "NIC506"))
def port_waits_for_a_subnet_manager(twin: Twin) -> Subjects | None:
    """The cable is fine, but no subnet manager has brought the port up."""
    hca = twin.fabric_hca()
    if hca is None or hca.ethernet:
        return None
    return twin.changed(hca, state="INIT", physical_state="LinkUp")


@fault("NIC502")
def port_at_half_rate(twin: Twin) -> Subjects | None:
    """The port of an HCA came up at half the rate of its siblings."""
    hca = twin.fabric_hca()
    same = [h for h in twin.layout.hcas() if hca is not None and h.part_name == hca.part_name]
    if hca is None or len(same) < 3:
        return None
    rate = hca.settings.rate or parts.HCAS[hca.part_name].rate
    return twin.changed(hca, rate=rate // 2)


@fault("NIC503", also=("PCI103",))
def hca_in_a_slot_of_four_lanes(twin: Twin) -> Subjects | None:
    """The slot of an HCA carries less than its port."""
    hca = twin.fabric_hca()
    if hca is None or twin.port_above(hca) is None:
        return None
    twin.changed(hca, slot_width=4)
    return [other.rdma for other in twin.card(hca)]


@fault("NIC505", also=("NIC506",))
def hca_on_the_other_socket(twin: Twin) -> Subjects | None:
    """What HCAs a GPU had under its switch were put into slots of the other socket."""
    gpu = twin.last_gpu()
    if gpu is None or not twin.bare_metal or twin.packages < 2 or gpu.node < 0:
        return None
    near = twin.under_one_switch(gpu)
    if not near:
        return None
    package = twin.package_of(gpu)
    other = next(n.index for n in twin.processors.nodes if n.package != package)
    platform = next(row.split()[2] for row in twin.rows if row.startswith("host"))
    twin.move(near, f"host 0001:00 {platform} node={other}")
    served = [g for g in twin.gpus if near[0] in twin.under_one_switch(g)]
    return [*(twin.node_id(g) for g in served), *(hca.rdma for hca in near)]


@fault("NIC505", also=("NIC506",))
def hca_in_ethernet_mode(twin: Twin) -> Subjects | None:
    """The port of the HCA beside a GPU runs Ethernet, where the fabric is InfiniBand, and the next
    one is across the sockets."""
    gpu = twin.last_gpu()
    near = twin.under_one_switch(gpu) if gpu is not None and twin.bare_metal else []
    if gpu is None or len(near) != 1 or near[0].ethernet:
        return None
    others = [h for h in twin.layout.hcas() if h.part_name == near[0].part_name and h not in near]
    if any(twin.path_class(gpu, other) != "SYS" for other in others):
        return None
    own = twin.row_of(near[0])
    twin.rows = [f"{row} eth" if row == own else row for row in twin.rows]
    return [twin.node_id(gpu), near[0].rdma]


@fault("NIC505", also=("NIC506",), quiet=True)
def hca_beside_the_neighbours(twin: Twin) -> Subjects | None:
    """The HCA of one GPU was put beside its neighbour's: one GPU has two, the other none."""
    if len(twin.gpus) < 2 or not twin.bare_metal:
        return None
    gpu, neighbour = twin.gpus[-1], twin.gpus[-2]
    own, theirs = twin.under_one_switch(gpu), twin.under_one_switch(neighbour)
    if len(own) != 1 or not theirs or own == theirs or gpu.node != neighbour.node:
        return None
    twin.move_beside(twin.row_of(own[0]), twin.row_of(theirs[0]), "1e.0")
    return [twin.node_id(gpu)]


@fault("NIC506")
def hca_beside_the_switch(twin: Twin) -> Subjects | None:
    """Two GPUs under one switch share one HCA there, while another beside the switch is idle."""
    gpu = twin.last_gpu()
    near = twin.under_one_switch(gpu) if gpu is not None and twin.bare_metal else []
    sharing = [g for g in twin.gpus if near and near[0] in twin.under_one_switch(g)]
    if gpu is None or len(sharing) < 2:
        return None
    if len(near) > 1:
        twin.move(near[1:], gpu.host)
        return [*(twin.node_id(g) for g in sharing), *(hca.rdma for hca in near)]
    rate = f" rate={near[0].settings.rate}" if near[0].settings.rate else ""
    layer = " eth" if near[0].ethernet else ""
    twin.add(gpu.host, [f"hca {near[0].part_name} mlx5_90{layer}{rate}"])
    # Whoever shares an HCA on this root complex could use it.
    sharing = [g for g in twin.gpus if g.host == gpu.host]
    shared = {hca.rdma for g in sharing for hca in twin.under_one_switch(g)}
    return [*(twin.node_id(g) for g in sharing), *sorted(shared), "mlx5_90"]


@fault("NIC507")
def peermem_gone(twin: Twin) -> Subjects | None:
    """Nothing lets an HCA reach GPU memory: no peer memory module, no dmabuf."""
    modern = any(gpu_part(gpu).architecture >= 10 for gpu in twin.gpus)
    if not twin.gpus or not twin.layout.hcas() or modern or twin.arm:
        return None
    modules = twin.healthy.modules
    twin.machine["modules"] = {name: v for name, v in modules.items() if "peer" not in name}
    twin.machine.update(memory_peers=[], open_modules=False)
    return [twin.node_id(gpu) for gpu in twin.gpus]


@fault("NIC508", quiet=True)
def soft_rdma_device(twin: Twin) -> Subjects | None:
    """Someone made a software RDMA device on a network interface."""
    _soft_rdma(twin)
    return ["rxe0"]


@fault("NIC508")
def soft_rdma_device_breaks_topo(twin: Twin) -> Subjects | None:
    """A software RDMA device, with a driver whose ``topo -m`` fails at the sight of it."""
    if not twin.gpus:
        return None
    _soft_rdma(twin)
    twin.command(nvidia_smi.COMMAND, Output(255, "Failed to get topology information\n", ""))
    return ["rxe0"]


def _soft_rdma(twin: Twin) -> None:
    """What rdma_rxe shows of its device: no PCI function, and the rate of no wire."""
    place = "/sys/devices/virtual/infiniband/rxe0"
    twin.file(f"{DEVICES}/rxe0", Link("../../devices/virtual/infiniband/rxe0"))
    for file, text in (
        ("node_type", "1: CA"),
        ("node_guid", "946d:aeff:fe12:3456"),
        ("sys_image_guid", "946d:aeff:fe12:3456"),
        ("fw_ver", ""),
        ("ports/1/state", "4: ACTIVE"),
        ("ports/1/phys_state", "5: LinkUp"),
        ("ports/1/link_layer", "Ethernet"),
        ("ports/1/rate", "2.5 Gb/sec (1X SDR)"),
        ("ports/1/lid", "0x0"),
    ):
        twin.file(f"{place}/{file}", f"{text}\n")
