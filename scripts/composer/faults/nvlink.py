"""NVL: NVLink and fabric."""

from __future__ import annotations

from composer import matrix
from composer.driver import gpu_part
from composer.faults.registry import Subjects, fault
from composer.layout import Function
from composer.twin import Twin

FABRIC_MANAGER = "nvidia-fabricmanager.service"

CHIPSET_NOT_SUPPORTED, NOT_SUPPORTED = 1, 5
"""nvmlGpuP2PStatus_t."""


@fault("NVL401", also=("NVL402",))
def one_nvlink_down(twin: Twin) -> Subjects | None:
    """NVLink 3 of a GPU is down, at both its ends."""
    gpu = twin.last_gpu()
    return None if gpu is None else _links_down(twin, gpu, [3])


@fault("NVL401", also=("NVL402", "NVL404"))
def all_nvlinks_of_a_gpu_down(twin: Twin) -> Subjects | None:
    """None of a GPU's NVLinks is up."""
    gpu = twin.last_gpu()
    if gpu is None:
        return None
    named = _links_down(twin, gpu, list(range(len(matrix.links(twin.layout, gpu)))))
    if named is None:
        return None
    twin.concerned = named[1:]
    return named[:1]


@fault("NVL402")
def pair_with_fewer_nvlinks(twin: Twin) -> Subjects | None:
    """Two GPUs have one NVLink less between them than all other pairs; the driver does not know
    of a link that is missing."""
    pairs = twin.machine.get("nvlink", {}).get("pairs", {})
    if len(set(pairs.values())) != 1:
        return None
    pair = next(iter(pairs))
    pairs[pair] -= 1
    return [f"gpu{number}" for number in pair.split("-")]


@fault("NVL403")
def nvlink_peers_refused(twin: Twin) -> Subjects | None:
    """Two GPUs have NVLinks between them, and the driver refuses peer-to-peer access."""
    if len(twin.gpus) < 2:
        return None
    a, b = len(twin.gpus) - 2, len(twin.gpus) - 1
    if not matrix.nvlinks(twin.layout, twin.gpus[a], twin.gpus[b]):
        return None
    twin.refuse_peers(a, b, NOT_SUPPORTED)
    return [f"gpu{a}", f"gpu{b}"]


@fault("NVL403")
def pcie_peers_refused(twin: Twin) -> Subjects | None:
    """Two GPUs under one switch may not reach each other: the chipset does not support it."""
    if not twin.peers_over_pcie():
        return None
    a, b = len(twin.gpus) - 2, len(twin.gpus) - 1
    first, second = twin.gpus[a], twin.gpus[b]
    if matrix.nvlinks(twin.layout, first, second) or twin.path_class(first, second) != "PIX":
        return None
    twin.refuse_peers(a, b, CHIPSET_NOT_SUPPORTED)
    return [f"gpu{a}", f"gpu{b}"]


@fault("NVL404", also=("NVL402",))
def gpu_off_the_fabric(twin: Twin) -> Subjects | None:
    """A GPU has no NVLink at all, where its siblings are all connected."""
    nvlink = twin.machine.get("nvlink", {})
    last = len(twin.gpus) - 1
    groups = [group for group in nvlink.get("switched", []) if last in group["gpus"]]
    pairs = nvlink.get("pairs", {})
    mesh = len(pairs) == len(twin.gpus) * last // 2
    if last < 2 or not (groups or (pairs and mesh)):
        return None
    for group in groups:
        group["gpus"].remove(last)
    nvlink["pairs"] = {p: count for p, count in pairs.items() if str(last) not in p.split("-")}
    return [f"gpu{last}"]


@fault("NVL405")
def fabric_manager_stopped(twin: Twin) -> Subjects | None:
    """The fabric manager of a machine with NVSwitches ended; the fabric is as it left it."""
    if twin.healthy.services.get(FABRIC_MANAGER) != "active" or not twin.bare_metal:
        return None
    if not twin.layout.of_kind("nvswitch"):
        return None  # B200's switches are not to be seen, so nothing says that they need it here
    twin.machine["services"][FABRIC_MANAGER] = "inactive"
    return ["machine"]


@fault("NVL405")
def fabric_manager_failed_to_start(twin: Twin) -> Subjects | None:
    """The fabric manager failed at boot, and no GPU is registered with the fabric."""
    if twin.healthy.services.get(FABRIC_MANAGER) != "active" or not twin.bare_metal:
        return None
    if not all(gpu_part(gpu).fabric for gpu in twin.gpus):
        return None
    twin.machine["services"][FABRIC_MANAGER] = "failed"
    for index in range(len(twin.gpus)):
        twin.change(f"gpu{index}", fabric_state=2)
    return [f"gpu{index}" for index in range(len(twin.gpus))]


@fault("NVL405")
def gpu_not_registered_with_the_fabric(twin: Twin) -> Subjects | None:
    """A GPU is still registering with the NVLink fabric, long after its siblings."""
    gpu = twin.last_gpu()
    if gpu is None or not gpu_part(gpu).fabric:
        return None
    return twin.changed(gpu, fabric_state=2)


@fault("NVL405")
def fabric_bandwidth_degraded(twin: Twin) -> Subjects | None:
    """The fabric says that a GPU has not all of its bandwidth."""
    gpu = twin.last_gpu()
    if gpu is None or not gpu_part(gpu).fabric_health_mask:
        return None
    mask = gpu_part(gpu).fabric_health_mask
    # NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW: bits 0 and 1, 1 is true; summary 2 is unhealthy.
    return twin.changed(gpu, fabric_health_mask=mask & ~3 | 1, fabric_health_summary=2)


@fault("NVL407")
def c2c_link_down(twin: Twin) -> Subjects | None:
    """The link between a Grace CPU and its GPU is down."""
    gpu = twin.last_gpu()
    if gpu is None or not gpu_part(gpu).c2c_links:
        return None
    return twin.changed(gpu, c2c_down=True)


def _links_down(twin: Twin, gpu: Function, numbers: list[int]) -> Subjects | None:
    """Takes NVLinks down at both ends; those to NVSwitches have one that a GPU tells of."""
    ends = matrix.links(twin.layout, gpu)
    if len(ends) <= max(numbers, default=0):
        return None
    down: dict[str, list[int]] = {twin.node_id(gpu): numbers}
    for number in numbers:
        peer = ends[number].remote
        if peer is None or ends[number].switch:
            continue
        place = sum(end.remote is peer for end in ends[:number])
        theirs = [i for i, end in enumerate(matrix.links(twin.layout, peer)) if end.remote is gpu]
        down.setdefault(twin.node_id(peer), []).append(theirs[place])
    for name, links in down.items():
        twin.change(name, links_down=links)
    return list(down)
