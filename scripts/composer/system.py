"""The rest of the file tree: firmware, kernel, process limits, drivers, device nodes, services."""

from __future__ import annotations

from composer.description import Machine
from composer.driver import gpu_part, gpu_uuid
from composer.files import Files
from composer.layout import Function, Layout
from composer.processors import Processors, free_mib
from gputopo.cpulist import render
from gputopo.host.base import Output
from gputopo.probes.system import SERVICES


def write(files: Files, layout: Layout, processors: Processors) -> None:
    machine = layout.machine
    _kernel(files, machine, processors)
    _process(files, machine, processors)
    _modules(files, layout)
    _driver(files, layout)
    _devices(files, layout)
    for name, value in machine.dmi.items():
        files.text(f"/sys/class/dmi/id/{name}", value)
    if machine.hypervisor == "xen":
        files.text("/sys/hypervisor/type", "xen")
    for name in machine.memory_peers:
        files.text(f"/sys/kernel/mm/memory_peers/{name}/version", machine.driver)
    for path in ("/bin", "/etc", "/home", "/lib", "/root", "/tmp", "/usr", "/var", "/run"):
        files.directory(path)
    for path in ("/run/lock", "/run/systemd", "/run/udev"):
        files.directory(path)
    if machine.services.get("nvidia-fabricmanager.service") == "active":
        files.text("/run/nvidia-fabricmanager/nv-fabricmanager.pid", 2301)


def _kernel(files: Files, machine: Machine, processors: Processors) -> None:
    files.raw("/proc/version", f"Linux version {machine.kernel} {machine.build}\n")
    files.text("/proc/cmdline", machine.command_line)
    files.text("/proc/sys/kernel/hostname", machine.hostname)
    files.text("/proc/sys/kernel/osrelease", machine.kernel)
    files.text("/proc/sys/kernel/numa_balancing", machine.numa_balancing)
    total = sum(node.mib for node in processors.nodes) * 1024
    free = sum(free_mib(node) for node in processors.nodes) * 1024
    pages = machine.memory.hugepages * sum(1 for node in processors.nodes if node.cpus)
    files.raw(
        "/proc/meminfo",
        f"MemTotal:       {total:>8} kB\nMemFree:        {free:>8} kB\n"
        f"MemAvailable:   {free:>8} kB\nHugePages_Total: {pages:>7}\nHugePages_Free:  {pages:>7}\n"
        "Hugepagesize:       2048 kB\n",
    )


def _process(files: Files, machine: Machine, processors: Processors) -> None:
    allowed = machine.allowed_cpus or render(processors.cpus)
    nodes = render(node.index for node in processors.nodes if node.cpus or node.mib)
    files.raw(
        "/proc/self/status",
        "Name:\tgputopo\nState:\tR (running)\nPid:\t4021\nThreads:\t1\n"
        f"Cpus_allowed_list:\t{allowed}\nMems_allowed_list:\t{nodes}\n",
    )
    locked = "unlimited" if machine.memlock_kib < 0 else str(machine.memlock_kib * 1024)
    rows = (
        ("Max stack size", "8388608", "unlimited", "bytes"),
        ("Max processes", "1030894", "1030894", "processes"),
        ("Max open files", "1048576", "1048576", "files"),
        ("Max locked memory", locked, locked, "bytes"),
    )
    header = ("Limit", "Soft Limit", "Hard Limit", "Units")
    files.raw(
        "/proc/self/limits",
        "".join(f"{a:<25} {b:<20} {c:<20} {d:<10}\n" for a, b, c, d in (header, *rows)),
    )
    files.text("/proc/self/cgroup", machine.cgroup)
    files.text("/proc/1/cgroup", "0::/init.scope")
    rows_of = [
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"
    ]
    if machine.gateway:
        tail = "\t0\t0\t0"
        rows_of.append(f"{machine.gateway}\t00000000\t0101000A\t0003\t0\t0\t100\t00000000{tail}")
        rows_of.append(f"{machine.gateway}\t0001000A\t00000000\t0001\t0\t0\t100\t00FFFFFF{tail}")
    files.raw("/proc/net/route", "".join(f"{row:<127}\n" for row in rows_of))


def _modules(files: Files, layout: Layout) -> None:
    """/sys/module and /proc/modules: drivers in use, and what the description adds."""
    machine = layout.machine
    loaded: dict[str, str] = {}
    for function in layout.functions.values():
        driver = function.driver
        if driver and driver not in ("pcieport", "nvidia-nvswitch", "xhci_hcd"):
            loaded[driver.replace("-", "_")] = ""
    if any(function.rdma for function in layout.functions.values()):
        loaded.update({"mlx5_core": "", "mlx5_ib": "", "ib_core": "", "ib_uverbs": ""})
    if machine.driver:
        for name in ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"):
            loaded[name] = machine.driver
    loaded.update(machine.modules)
    rows = []
    for name, version in sorted(loaded.items()):
        place = f"/sys/module/{name}"
        files.text(f"{place}/refcnt", 0)
        files.text(f"{place}/initstate", "live")
        if version:
            files.text(f"{place}/version", version)
        rows.append(f"{name} 1048576 0 - Live 0x0000000000000000\n")
    files.raw("/proc/modules", "".join(rows))


def _driver(files: Files, layout: Layout) -> None:
    machine = layout.machine
    if not machine.driver:
        return
    word = "Open Kernel Module for x86_64" if machine.open_modules else "x86_64 Kernel Module"
    if machine.cpu.vendor == "ARM":
        word = word.replace("x86_64", "aarch64")
    files.raw(
        "/proc/driver/nvidia/version",
        f"NVRM version: NVIDIA UNIX {word}  {machine.driver}  Release Build\n"
        "GCC version:  gcc version 11.4.0\n",
    )
    files.directory("/proc/driver/nvidia/gpus")
    for minor, gpu in enumerate(layout.gpus):
        files.raw(f"/proc/driver/nvidia/gpus/{gpu.address}/information", _information(gpu, minor))


def _information(gpu: Function, minor: int) -> str:
    rows = (
        ("Model:", gpu_part(gpu).name),
        ("IRQ:", str(200 + minor)),
        ("GPU UUID:", gpu_uuid(gpu)),
        ("Video BIOS:", gpu_part(gpu).vbios),
        ("Bus Type:", "PCIe"),
        ("Bus Location:", gpu.address),
        ("Device Minor:", str(minor)),
    )
    return "".join(f"{name:<16} {value}\n" for name, value in rows)


def _devices(files: Files, layout: Layout) -> None:
    """Names in /dev; what stands behind them is never read."""
    machine = layout.machine
    names = ["null", "zero", "full", "random", "urandom", "tty", "kmsg", "shm", "pts", "mem"]
    numbers = ["Character devices:", "  1 mem", "  5 /dev/tty", " 10 misc"]
    if machine.driver:
        names += [f"nvidia{minor}" for minor in range(len(layout.gpus))]
        names += ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps"]
        numbers += ["195 nvidia", "195 nvidiactl", "234 nvidia-caps", "509 nvidia-uvm"]
        switches = layout.of_kind("nvswitch")
        names += [f"nvidia-nvswitch{index}" for index in range(len(switches))]
        if switches:
            names.append("nvidia-nvswitchctl")
        if machine.imex_channels:
            names.append("nvidia-caps-imex-channels")
            numbers.append("235 nvidia-caps-imex-channels")
    names += [f"nvme{index}" for index in range(len(layout.of_kind("nvme")))]
    for name in names:
        files.directory(f"/dev/{name}") if name in _DEVICE_DIRECTORIES else files.node(name)
    for name in ("nvidia-cap1", "nvidia-cap2") if machine.driver else ():
        files.node(f"nvidia-caps/{name}")
    for channel in range(machine.imex_channels):
        files.node(f"nvidia-caps-imex-channels/channel{channel}")
    for index in range(len(layout.hcas())):
        files.node(f"infiniband/uverbs{index}")
    if layout.hcas():
        files.node("infiniband/rdma_cm")
    files.raw("/proc/devices", "\n".join([*numbers, "", "Block devices:", "259 blkext", ""]))


_DEVICE_DIRECTORIES = {"shm", "pts", "nvidia-caps", "nvidia-caps-imex-channels"}


def services(machine: Machine) -> Output:
    """What ``systemctl show`` prints of the driver's units; one that is not there is not-found."""
    blocks = []
    for unit in SERVICES:
        state = machine.services.get(unit)
        load = "loaded" if state else "not-found"
        active = state or "inactive"
        sub = {"active": "running", "failed": "failed"}.get(active, "dead")
        blocks.append(f"Id={unit}\nLoadState={load}\nActiveState={active}\nSubState={sub}\n")
    return Output(0, "\n".join(blocks), "")
