"""NUM: NUMA nodes, memory and CPUs."""

from __future__ import annotations

from composer.faults.registry import Subjects, fault
from composer.twin import Twin
from gputopo.cpulist import render
from gputopo.facts import Missing
from gputopo.probes import numa


@fault("NUM201", quiet=True)
def gpu_without_a_numa_node(twin: Twin) -> Subjects | None:
    """Firmware does not say on which NUMA node a GPU is."""
    gpu = twin.last_gpu()
    if gpu is None or not twin.bare_metal or twin.cpu_nodes < 2:
        return None
    return twin.changed(gpu, node=-1)


@fault("NUM201", also=("NIC505",))
def root_complex_without_a_numa_node(twin: Twin) -> Subjects | None:
    """Firmware does not say to which NUMA node a root complex belongs, with all that is below."""
    gpu = twin.last_gpu()
    if gpu is None or not twin.bare_metal or twin.cpu_nodes < 2:
        return None
    twin.change(gpu.host, node=-1)
    below = [f for f in (*twin.gpus, *twin.layout.hcas()) if f.host == gpu.host]
    return [twin.node_id(f) for f in below]


@fault("NUM202")
def driver_names_another_numa_node(twin: Twin) -> Subjects | None:
    """The driver and sysfs name different nodes for a GPU."""
    gpu = twin.last_gpu()
    if gpu is None or twin.cpu_nodes < 2 or gpu.node < 0:
        return None
    index, other = twin.gpus.index(gpu), (gpu.node + 1) % twin.cpu_nodes
    twin.nvml("nvmlDeviceGetMemoryAffinity", index, 0, answer=[other])
    twin.nvml("nvmlDeviceGetCpuAffinity", index, answer=list(twin.processors.local(other)))
    return [twin.node_id(gpu)]


@fault("NUM203")
def cpus_of_the_other_socket_allowed(twin: Twin) -> Subjects | None:
    """A job got CPUs of the first socket, and GPUs of the second."""
    far = [gpu for gpu in twin.gpus if gpu.node >= 0 and twin.package_of(gpu) > 0]
    if not far:
        return None
    allowed = {t.cpu for t in twin.processors.threads if t.package == 0}
    twin.machine["allowed_cpus"] = render(allowed)
    twin.machine["cgroup"] = "0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0"
    for index, gpu in enumerate(twin.gpus):
        # The driver cuts its answer to what the asking process may use.
        local = [cpu for cpu in twin.processors.local(gpu.node) if cpu in allowed]
        twin.nvml("nvmlDeviceGetCpuAffinity", index, answer=local)
    return [twin.node_id(gpu) for gpu in far]


@fault("NUM204")
def numa_balancing_on(twin: Twin) -> Subjects | None:
    """The kernel moves pages between NUMA nodes under running jobs."""
    if twin.cpu_nodes < 2 or not twin.gpus:
        return None
    twin.machine["numa_balancing"] = 1
    return ["machine"]


@fault("NUM205")
def distances_flat(twin: Twin) -> Subjects | None:
    """Firmware says that every node is as far from a socket as every other."""
    if twin.packages < 2 or not twin.bare_metal:
        return None
    twin.machine["memory"].update(near=10, far=10)
    return ["machine"]


@fault("NUM205", also=("NUM202",))
def nodes_across_sockets(twin: Twin) -> Subjects | None:
    """Two NUMA nodes have each half of the CPUs of two sockets."""
    if twin.packages != 2 or twin.cpu_nodes != 2 or not twin.bare_metal:
        return None
    first, second = (list(twin.processors.local(node)) for node in (0, 1))
    middle = len(first) // 2
    mixed = (first[:middle] + second[middle:], second[:middle] + first[middle:])
    for node, cpus in enumerate(mixed):
        twin.file(f"{numa.NODES}/node{node}/cpulist", f"{render(cpus)}\n")
    twin.command(numa.NUMACTL, Missing("absent", "not installed"))
    return ["numa0", "numa1"]


@fault("NUM206")
def node_with_half_its_memory(twin: Twin) -> Subjects | None:
    """One NUMA node lacks half of its memory."""
    count = twin.cpu_nodes
    if count < 2 or not twin.bare_metal:
        return None
    sizes = [node.mib for node in twin.processors.nodes[:count]]
    twin.machine["memory"]["node_mib"] = [*sizes[:-1], sizes[-1] // 2]
    return [f"numa{count - 1}"]


@fault("NUM206")
def node_without_memory(twin: Twin) -> Subjects | None:
    """One NUMA node with CPUs has no memory at all."""
    count = twin.cpu_nodes
    if count < 2 or not twin.bare_metal:
        return None
    sizes = [node.mib for node in twin.processors.nodes[:count]]
    twin.machine["memory"]["node_mib"] = [0, *sizes[1:]]
    return ["numa0"]


@fault("NUM207", quiet=True)
def governor_ondemand(twin: Twin) -> Subjects | None:
    """CPUs change their clock as they are loaded."""
    if twin.healthy.cpu.governor != "performance" or not twin.gpus:
        return None
    twin.machine["cpu"]["governor"] = "ondemand"
    return ["machine"]
