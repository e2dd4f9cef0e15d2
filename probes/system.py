"""The system around the hardware: kernel, firmware, virtualisation, limits, drivers, services."""

from __future__ import annotations

import re

import msgspec

from gputopo.facts import ABSENT, Fact, Missing, Problem
from gputopo.host.base import Host
from gputopo.probes.read import integer

DMI = "/sys/class/dmi/id"

MODULES = (
    "nvidia",
    "nvidia_uvm",
    "nvidia_peermem",
    "nv_peer_mem",
    "nouveau",
    "vfio_pci",
    "mlx5_core",
    "mlx5_ib",
    "ib_uverbs",
    "gdrdrv",
    "efa",
    "irdma",
    "bnxt_re",
)
"""Kernel modules that decide what a GPU or an HCA can do; others are nobody's business."""

SERVICES = (
    "nvidia-fabricmanager.service",
    "nvidia-imex.service",
    "nvidia-persistenced.service",
)
SYSTEMCTL = ["systemctl", "show", "--property=Id,LoadState,ActiveState,SubState", *SERVICES]
SYSTEMCTL_TIMEOUT = 3.0

SHM_COMMAND = ["df", "-P", "-k", "/dev/shm"]  # noqa: S108  (looked at, never written)
SHM_TIMEOUT = 2.0
"""The size of a tmpfs is in no file but the table of mounts, which names much more than it."""

CAP_IPC_LOCK = 14
"""Bit of the capability to lock memory without limit (linux/capability.h)."""

HYPERVISOR_VENDORS = {
    "QEMU": "kvm",
    "KVM": "kvm",
    "Amazon EC2": "aws",
    "Microsoft Corporation": "hyper-v",
    "Google": "google",
    "VMware, Inc.": "vmware",
    "Xen": "xen",
    "innotek GmbH": "virtualbox",
    "OpenStack Foundation": "kvm",
    "Alibaba Cloud": "kvm",
}
"""DMI system vendors of virtual machines. Amazon and Microsoft also sell bare metal under the same
name, so the vendor alone proves nothing: the CPU's hypervisor flag decides."""


class SystemFacts(msgspec.Struct, frozen=True, kw_only=True):
    hostname: Fact[str]
    kernel: Fact[str]
    command_line: Fact[str]
    vendor: Fact[str]
    product: Fact[str]
    bios: Fact[str]
    memory_bytes: Fact[int]
    numa_balancing: Fact[int]
    modules: dict[str, str]
    """Version (empty where it has none) of each module of MODULES that is loaded or built in."""
    hypervisor: Fact[str]
    container: str | None
    """``docker``, ``podman``, ``kubernetes`` or ``lxc``, as a marker file or the cgroup says."""
    cgroup: Fact[str]
    memlock_bytes: Fact[int]
    """Soft limit of locked memory; -1 is unlimited."""
    may_lock: Fact[bool] = ABSENT
    """Whether this process has CAP_IPC_LOCK, with which that limit does not hold."""
    shm_bytes: Fact[int] = ABSENT
    """Size of /dev/shm; asked for in a container only, where it may be 64 MiB."""
    device_nodes: Fact[list[str]]
    """/dev/nvidia* (names only)."""
    imex_channels: Fact[list[str]]
    nvidia_driver: Fact[str]
    """Version of the kernel module as /proc/driver/nvidia/version has it."""
    open_modules: bool | None
    """Whether the kernel module is the open one; None without driver."""
    nvidia_gpus: Fact[list[str]]
    """PCI addresses that the NVIDIA kernel module has (/proc/driver/nvidia/gpus)."""
    rdma_unread: Missing | None = None
    """Why modules or memory peers that are not named may be there all the same."""
    memory_peers: list[str]
    """RDMA memory peers registered with the OFED stack (nv_mem, nv_mem_nc)."""
    services: Fact[dict[str, str]]
    """``active``/``inactive``/``failed``/``not-found`` of SERVICES by unit name."""
    problems: list[Problem]


def probe(host: Host) -> Fact[SystemFacts]:
    """Never missing as a whole: each part says what it lacks."""
    driver_text = host.read_text("/proc/driver/nvidia/version")
    match = (
        re.search(r"(?:Kernel Module|Module for \S+)\s+(\d[\d.]{2,20})", driver_text)
        if isinstance(driver_text, str)
        else None
    )
    if isinstance(driver_text, Missing):
        driver: Fact[str] = driver_text
    else:
        driver = match[1] if match else Missing("unparsed", driver_text.split("\n")[0][:80])
    devices = host.list_dir("/dev")
    container, cgroup = _container(host), _line(host, "/proc/self/cgroup")
    return SystemFacts(
        hostname=_line(host, "/proc/sys/kernel/hostname"),
        kernel=_kernel(host),
        command_line=_line(host, "/proc/cmdline"),
        vendor=_line(host, f"{DMI}/sys_vendor"),
        product=_line(host, f"{DMI}/product_name"),
        bios=_line(host, f"{DMI}/bios_version"),
        memory_bytes=_memory(host.read_text("/proc/meminfo")),
        numa_balancing=integer(host.read_text("/proc/sys/kernel/numa_balancing")),
        modules=_modules(host),
        hypervisor=_hypervisor(host),
        container=container,
        cgroup=cgroup,
        memlock_bytes=_memlock(host.read_text("/proc/self/limits")),
        may_lock=_may_lock(host.read_text("/proc/self/status")),
        shm_bytes=_shm(host, container, cgroup),
        device_nodes=(
            devices
            if isinstance(devices, Missing)
            else [name for name in devices if name.startswith("nvidia")]
        ),
        imex_channels=host.list_dir("/dev/nvidia-caps-imex-channels"),
        nvidia_driver=driver,
        open_modules="Open Kernel Module" in driver_text if isinstance(driver_text, str) else None,
        nvidia_gpus=host.list_dir("/proc/driver/nvidia/gpus"),
        memory_peers=[
            name
            for name in ("nv_mem", "nv_mem_nc")
            if isinstance(host.read_text(f"/sys/kernel/mm/memory_peers/{name}/version"), str)
        ],
        # Without the driver there is nothing that these services could serve.
        rdma_unread=_rdma_unread(host),
        services=_services(host) if isinstance(driver_text, str) else ABSENT,
        problems=[],
    )


def _line(host: Host, path: str) -> Fact[str]:
    text = host.read_text(path)
    return text if isinstance(text, Missing) else text.strip()


def _kernel(host: Host) -> Fact[str]:
    release = _line(host, "/proc/sys/kernel/osrelease")
    if isinstance(release, str):
        return release
    version = host.read_text("/proc/version")
    match = re.match(r"Linux version (\S{1,100})", version) if isinstance(version, str) else None
    return match[1] if match else release


def _memory(text: Fact[str]) -> Fact[int]:
    if isinstance(text, Missing):
        return text
    match = re.search(r"^MemTotal:\s*(\d{1,16}) kB", text, re.M)
    return int(match[1]) * 1024 if match else Missing("unparsed", "no MemTotal line")


def _modules(host: Host) -> dict[str, str]:
    loaded = host.list_dir("/sys/module")
    found: dict[str, str] = {}
    for name in loaded if isinstance(loaded, list) else []:
        if name in MODULES:
            version = _line(host, f"/sys/module/{name}/version")
            found[name] = version if isinstance(version, str) else ""
    return found


def _rdma_unread(host: Host) -> Missing | None:
    """Whether the list of modules or a memory peer could not be read; absent ones are known."""
    peers = [f"/sys/kernel/mm/memory_peers/{name}/version" for name in ("nv_mem", "nv_mem_nc")]
    for answer in (host.list_dir("/sys/module"), *(host.read_text(peer) for peer in peers)):
        if isinstance(answer, Missing) and answer != ABSENT:
            return answer
    return None


def _hypervisor(host: Host) -> Fact[str]:
    """What virtualises this machine, if the firmware names it (the CPU flag is the cpu probe's)."""
    kind = _line(host, "/sys/hypervisor/type")
    if isinstance(kind, str):
        return kind
    vendor = _line(host, f"{DMI}/sys_vendor")
    if isinstance(vendor, Missing):
        return vendor
    return HYPERVISOR_VENDORS.get(vendor, Missing("absent", f"made by {vendor[:60]}"))


def _container(host: Host) -> str | None:
    if isinstance(host.read_bytes("/run/.containerenv"), bytes):
        return "podman"
    if isinstance(host.read_bytes("/.dockerenv"), bytes):
        return "docker"
    cgroup = host.read_text("/proc/self/cgroup")
    if isinstance(cgroup, str):
        for word, name in (
            ("kubepods", "kubernetes"),
            ("/docker", "docker"),
            ("libpod", "podman"),
            ("/lxc", "lxc"),
        ):
            if word in cgroup:
                return name
    return None


def _memlock(text: Fact[str]) -> Fact[int]:
    if isinstance(text, Missing):
        return text
    match = re.search(r"^Max locked memory\s+(unlimited|\d{1,20})", text, re.M)
    if match is None:
        return Missing("unparsed", "no line 'Max locked memory'")
    return -1 if match[1] == "unlimited" else int(match[1])


def _may_lock(text: Fact[str]) -> Fact[bool]:
    if isinstance(text, Missing):
        return text
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]{1,16})$", text, re.M)
    if match is None:
        return Missing("unsupported", "no line CapEff in /proc/self/status")
    return bool(int(match[1], 16) >> CAP_IPC_LOCK & 1)


def _shm(host: Host, container: str | None, cgroup: Fact[str]) -> Fact[int]:
    """Bytes of /dev/shm in a container; one with a cgroup namespace of its own is at ``0::/``."""
    if container is None and cgroup != "0::/":
        return Missing("unsupported", "not in a container")
    output = host.run(SHM_COMMAND, SHM_TIMEOUT)
    if isinstance(output, Missing):
        return output
    last = output.stdout.strip().rpartition("\n")[2].split()
    if output.exit != 0 or len(last) < 6 or not last[1].isdigit():
        said = (output.stderr.strip() or output.stdout.strip())[:120]
        return Missing("failed", f"exit code {output.exit}: {said}")
    return int(last[1][:20]) * 1024


def _services(host: Host) -> Fact[dict[str, str]]:
    output = host.run(SYSTEMCTL, SYSTEMCTL_TIMEOUT)
    if isinstance(output, Missing):
        return output
    if output.exit != 0:
        said = (output.stderr or output.stdout).strip().splitlines()
        return Missing("failed", f"exit code {output.exit}: {said[0][:120] if said else ''}")
    found: dict[str, str] = {}
    for block in output.stdout.split("\n\n"):
        unit = {
            key: value for key, _, value in (line.partition("=") for line in block.splitlines())
        }
        if unit.get("Id") in SERVICES:
            known = unit.get("LoadState") not in ("not-found", None)
            found[unit["Id"]] = unit.get("ActiveState", "unknown") if known else "not-found"
    return found
