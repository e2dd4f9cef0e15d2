"""Harmless changes: what looks like a fault and is none. Nothing above a note may be said of it.

Each is a function on a :class:`~composer.twin.Twin`, under the code of the rule that it tempts; it
returns whether it applies to the machine. Most are false alarms that other tools have raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from composer import matrix
from composer.driver import gpu_part
from composer.layout import Function
from composer.pci import netdev
from composer.twin import Twin
from gputopo.cpulist import render
from gputopo.facts import Missing
from gputopo.host.base import Output
from gputopo.probes import kernel_log, nvidia_smi
from gputopo.probes import numa as numa_probe
from gputopo.probes import system as system_probe

Change = Callable[[Twin], bool]


class Harmless(msgspec.Struct, frozen=True, kw_only=True):
    """A harmless change, and the code that it tempts."""

    name: str
    code: str
    text: str
    change: Change

    def inject(self, description: dict[str, Any]) -> Twin | None:
        """The changed twin of a machine; None where the change does not apply."""
        twin = Twin(description)
        return twin if self.change(twin) else None


HARMLESS: dict[str, Harmless] = {}
"""All harmless changes by name."""


def harmless(code: str) -> Callable[[Change], Change]:
    """Registers a change under the function's name, with dashes."""

    def register(change: Change) -> Change:
        name = change.__name__.replace("_", "-")
        if name in HARMLESS:
            raise ValueError(f"there is a change {name} already")
        text = " ".join((change.__doc__ or "").split())
        HARMLESS[name] = Harmless(name=name, code=code, text=text, change=change)
        return change

    return register


@harmless("PCI101")
def cards_of_eight_lanes(twin: Twin) -> bool:
    """The GPUs are cards with eight lanes."""
    return _every_gpu(twin, max_width=8)


@harmless("PCI102")
def gpus_idle_at_gen1(twin: Twin) -> bool:
    """Power management has lowered the links of all GPUs, which do nothing."""
    return _every_gpu(twin, speed=2.5, performance_state=8, clock_reasons=1)


@harmless("PCI104")
def acs_validates_sources(twin: Twin) -> bool:
    """All ports check who asks, and redirect nothing."""
    ports = [f for f in twin.layout.functions.values() if f.kind == "port" and f.secondary]
    for port in ports:
        twin.change(port.address, acs="01")
    return bool(ports) and twin.bare_metal


@harmless("PCI104")
def acs_redirects_above_a_drive(twin: Twin) -> bool:
    """The port above a drive redirects: no GPU's traffic takes it."""
    ports = [twin.port_above(drive) for drive in twin.layout.of_kind("nvme")]
    for port in ports:
        if port is not None:
            twin.change(port.address, acs="1d")
    return twin.bare_metal and any(ports)


@harmless("PCI104")
def acs_redirects_in_a_guest(twin: Twin) -> bool:
    """The hypervisor keeps the devices of a virtual machine apart, as it must."""
    gpu = twin.last_gpu()
    port = twin.port_above(gpu) if gpu is not None else None
    if port is None or not twin.bare_metal:
        return False
    twin.change(port.address, acs="1d")
    twin.machine["hypervisor"] = "kvm"
    twin.machine.setdefault("dmi", {})["sys_vendor"] = "QEMU"
    return True


@harmless("PCI105")
def iommu_passes_through(twin: Twin) -> bool:
    """The IOMMU is on, and leaves addresses as they are."""
    twin.machine["iommu"] = "identity"
    return twin.bare_metal


@harmless("PCI106")
def pcie_errors_since_boot(twin: Twin) -> bool:
    """Some thousand errors were corrected since boot; none is new, as far as one scan tells."""
    return _every_gpu(twin, correctable_errors=5000)


@harmless("PCI107")
def replays_since_boot(twin: Twin) -> bool:
    """Packets were sent again since the driver was loaded."""
    return _every_gpu(twin, replays=1000)


@harmless("PCI109")
def small_bar1_without_hcas(twin: Twin) -> bool:
    """The window into GPU memory is 256 MiB, and no HCA would use it."""
    return not twin.layout.hcas() and _every_gpu(twin, bar1_mib=256)


@harmless("NUM201")
def no_numa_node_where_there_is_one(twin: Twin) -> bool:
    """Devices are on no NUMA node, on a machine that has but one."""
    if len(twin.processors.nodes) != 1:
        return False
    for host in twin.layout.hosts:
        twin.change(host, node=-1)
    return True


@harmless("NUM203")
def shell_on_one_socket(twin: Twin) -> bool:
    """Somebody's shell, no job, is bound to the first socket."""
    cpus = [thread.cpu for thread in twin.processors.threads if thread.package == 0]
    twin.machine["allowed_cpus"] = render(cpus)
    twin.machine["cgroup"] = "0::/user.slice/user-1000.slice/session-4.scope"
    return twin.packages > 1


@harmless("NUM204")
def numa_balancing_between_tiers(twin: Twin) -> bool:
    """The kernel moves pages between tiers of memory alone."""
    twin.machine["numa_balancing"] = 2
    return True


@harmless("NUM206")
def node_with_a_little_less_memory(twin: Twin) -> bool:
    """Firmware keeps five percent of one node's memory."""
    sizes = [node.mib for node in twin.processors.nodes if node.cpus]
    twin.machine["memory"]["node_mib"] = [*sizes[:-1], sizes[-1] * 95 // 100]
    return len(sizes) > 1


@harmless("GPU302")
def gpu_hidden_from_a_container(twin: Twin) -> bool:
    """A container was given all GPUs but one."""
    if len(twin.gpus) < 2:
        return False
    without = Twin(twin.description)
    without.change(twin.gpus[-1].address, driver="")
    twin.edit(lambda answers: answers.nvml.clear())
    twin.edit(lambda answers: answers.nvml.update(without.answers().nvml))
    twin.machine["cgroup"] = "0::/docker/8f2b4c"
    twin.command(nvidia_smi.COMMAND, Missing("absent", "not installed"))
    head = "Filesystem     1024-blocks      Used Available Capacity Mounted on\n"
    row = "shm               16777216         0  16777216       0% /dev/shm\n"
    twin.command(system_probe.SHM_COMMAND, Output(0, head + row, ""))
    return not twin.machine.get("nvlink", {}).get("pairs")


@harmless("GPU305")
def programs_that_failed(twin: Twin) -> bool:
    """The kernel log has programs that touched what was not theirs, and were ended."""
    lines = [
        f"[{900 + number:5}.000000] NVRM: Xid (PCI:{gpu.address[:-2]}): {code}, "
        f"pid={4000 + number}, name=python3, {text}\n"
        for gpu in twin.gpus
        for number, (code, text) in enumerate(
            ((13, "Graphics Exception"), (31, "MMU Fault"), (43, "Ch 10"), (45, "Ch 10"))
        )
    ]
    twin.command(kernel_log.COMMAND, Output(0, "".join(lines), ""))
    return bool(twin.gpus)


@harmless("GPU305")
def kernel_log_denied(twin: Twin) -> bool:
    """Only root may read the kernel log."""
    refused = "dmesg: read kernel buffer failed: Operation not permitted\n"
    twin.command(kernel_log.COMMAND, Output(1, "", refused))
    return bool(twin.gpus)


@harmless("GPU307")
def power_capped_alike(twin: Twin) -> bool:
    """The site lets every GPU draw four fifths of what it could."""
    for index, gpu in enumerate(twin.gpus):
        twin.nvml("nvmlDeviceGetEnforcedPowerLimit", index, answer=800 * gpu_part(gpu).power_w)
    return bool(twin.gpus)


@harmless("GPU308")
def memory_repaired(twin: Twin) -> bool:
    """Rows of memory were replaced by spare ones, and all is done."""
    able = all(gpu_part(gpu).row_remapping for gpu in twin.gpus)
    return able and _every_gpu(twin, remapped_rows=[12, 3, 0, 0])


@harmless("GPU309")
def all_gpus_for_guests(twin: Twin) -> bool:
    """A host of virtual machines: vfio-pci holds all GPUs."""
    twin.machine["driver"] = ""
    twin.machine["modules"] = {}
    return twin.bare_metal and not twin.arm and _every_gpu(twin, driver="vfio-pci")


@harmless("NVL401")
def fewer_nvlinks_by_design(twin: Twin) -> bool:
    """No GPU has its last two links to a switch up: how an export version of the part is made."""
    counts = {len(matrix.links(twin.layout, gpu)) for gpu in twin.gpus}
    switched = all(end.switch for gpu in twin.gpus for end in matrix.links(twin.layout, gpu))
    if len(counts) != 1 or not switched or (count := counts.pop()) < 6:
        return False
    return _every_gpu(twin, links_down=[count - 2, count - 1])


@harmless("NVL405")
def fabric_manager_with_nothing_to_do(twin: Twin) -> bool:
    """The fabric manager ended at once, on a machine without NVSwitches."""
    nvlink = any(gpu_part(gpu).nvlink_links for gpu in twin.gpus)
    twin.machine.setdefault("services", {})["nvidia-fabricmanager.service"] = "failed"
    return bool(twin.gpus) and not nvlink


@harmless("NVL405")
def no_fabric_manager_in_a_guest(twin: Twin) -> bool:
    """The fabric manager runs in the host of a virtual machine."""
    services = twin.machine.get("services", {})
    return not twin.bare_metal and bool(services.pop("nvidia-fabricmanager.service", ""))


@harmless("NVL405")
def imex_not_started(twin: Twin) -> bool:
    """No job shares memory between the nodes of a rack: IMEX is not running."""
    services = twin.machine.get("services", {})
    twin.machine["imex_channels"] = 0
    return bool(services.pop("nvidia-imex.service", ""))


@harmless("NIC501")
def second_port_not_cabled(twin: Twin) -> bool:
    """The second ports of cards with two have no cable."""
    seconds = [hca for hca in twin.layout.hcas() if not hca.address.endswith(".0")]
    for hca in seconds:
        twin.change(hca.address, state="DOWN")
    return bool(seconds)


@harmless("NIC501")
def management_port_down(twin: Twin) -> bool:
    """A network interface that is no HCA has no cable."""
    nics = [nic for nic in twin.layout.of_kind("nic") if netdev(nic) != twin.healthy.gateway]
    for nic in nics:
        twin.change(nic.address, state="DOWN")
    return bool(nics)


@harmless("NIC507")
def dmabuf_instead_of_peermem(twin: Twin) -> bool:
    """The open kernel modules on a new kernel need no peer memory module."""
    major, minor = (int(word) for word in twin.healthy.kernel.split(".")[:2])
    if not twin.gpus or not twin.layout.hcas() or (major, minor) < (5, 12):
        return False
    modules = twin.healthy.modules
    twin.machine["modules"] = {name: v for name, v in modules.items() if "peer" not in name}
    twin.machine.update(memory_peers=[], open_modules=True)
    return True


@harmless("VIR902")
def memlock_small_without_hcas(twin: Twin) -> bool:
    """A process may lock 64 KiB, and there is no RDMA that would lock more."""
    twin.machine["memlock_kib"] = 64
    return not twin.layout.hcas()


@harmless("PRB001")
def recorded_without_root(twin: Twin) -> bool:
    """An ordinary user scans, who may read neither all of config space nor the kernel log."""
    twin.machine["root"] = False
    return twin.healthy.root


@harmless("PRB002")
def tools_not_installed(twin: Twin) -> bool:
    """Neither nvidia-smi nor numactl is in the path."""
    for command in (nvidia_smi.COMMAND, numa_probe.NUMACTL):
        twin.command(command, Missing("absent", "not installed"))
    return True


@harmless("PRB003")
def machine_at_work(twin: Twin) -> bool:
    """Jobs run on all GPUs, at full clocks."""
    return all(_busy(twin, gpu) for gpu in twin.gpus) and bool(twin.gpus)


def _busy(twin: Twin, gpu: Function) -> bool:
    # A link that power management had lowered is back at what both ends can do.
    port = twin.port_above(gpu)
    if port is not None:
        twin.change(gpu.address, speed=min(gpu.max_speed, port.max_speed))
    process = {"pid": 4711, "memory": gpu_part(gpu).memory_mib // 2}
    twin.change(gpu.address, performance_state=0, clock_reasons=0x4, processes=[process])
    return True


def _every_gpu(twin: Twin, **settings: Any) -> bool:
    for gpu in twin.gpus:
        twin.change(gpu.address, **settings)
    return bool(twin.gpus)
