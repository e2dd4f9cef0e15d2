"""CPUs and NUMA nodes: numbering, and what the kernel shows of them."""

from __future__ import annotations

from dataclasses import dataclass

from composer.description import DescriptionError, Machine
from composer.files import Files
from gputopo.cpulist import render


@dataclass(frozen=True)
class Thread:
    """One hardware thread: the kernel's CPU number and where it is."""

    cpu: int
    package: int
    node: int
    core: int
    """Index of the core within its package."""
    thread: int


@dataclass(frozen=True)
class Node:
    """One NUMA node; ``gpu`` is the index of the GPU whose memory region it belongs to."""

    index: int
    package: int
    cpus: tuple[int, ...]
    mib: int
    gpu: int | None = None


class Processors:
    """The threads and nodes of a machine."""

    def __init__(self, machine: Machine, gpu_nodes: list[int]) -> None:
        """``gpu_nodes`` is the CPU node of each GPU whose memory is a node of its own."""
        self.machine = machine
        self.threads = _threads(machine)
        self.nodes = _nodes(machine, self.threads, gpu_nodes)

    @property
    def cpus(self) -> list[int]:
        return [thread.cpu for thread in self.threads]

    def local(self, node: int) -> tuple[int, ...]:
        """CPUs of a node; all of them for node -1, as the kernel has it."""
        return self.nodes[node].cpus if node >= 0 else tuple(self.cpus)

    def effective(self, node: int) -> int | None:
        """The node that the driver takes a device to be on: the only one of a machine with one
        (where the kernel says -1), unknown (None) for -1 on a machine with several."""
        if node >= 0:
            return node
        return 0 if len(self.nodes) == 1 else None

    def distance(self, a: Node, b: Node) -> int:
        memory = self.machine.memory
        own, other, same_gpu, other_gpu = memory.gpu_distances
        if a.index == b.index:
            return 10
        if a.gpu is None and b.gpu is None:
            return memory.near if a.package == b.package else memory.far
        if a.gpu is not None and b.gpu is not None:
            return same_gpu if a.gpu == b.gpu else other_gpu
        return own if a.package == b.package else other

    def mask(self, cpus: tuple[int, ...] | list[int]) -> str:
        """The kernel's hexadecimal mask: groups of 32 bits, as many digits as there are CPUs."""
        bits = len(self.cpus)
        value = sum(1 << cpu for cpu in cpus)
        digits = f"{value:0{(bits + 3) // 4}x}"
        head = len(digits) % 8
        groups = [digits[:head]] if head else []
        return ",".join([*groups, *(digits[i : i + 8] for i in range(head, len(digits), 8))])


def _threads(machine: Machine) -> list[Thread]:
    cpu = machine.cpu
    per_node = cpu.cores // cpu.nodes_per_package
    all_cores = cpu.packages * cpu.cores
    found = []
    for package in range(cpu.packages):
        for core in range(cpu.cores):
            for thread in range(cpu.threads):
                if cpu.numbering == "block":
                    number = thread * all_cores + package * cpu.cores + core
                elif cpu.numbering == "interleaved":
                    number = thread * all_cores + core * cpu.packages + package
                elif cpu.numbering == "paired":
                    number = (package * cpu.cores + core) * cpu.threads + thread
                else:
                    raise DescriptionError(f"no CPU numbering {cpu.numbering!r}")
                node = package * cpu.nodes_per_package + core // per_node
                found.append(Thread(number, package, node, core, thread))
    return sorted(found, key=lambda t: t.cpu)


def _nodes(machine: Machine, threads: list[Thread], gpu_nodes: list[int]) -> list[Node]:
    cpu, memory = machine.cpu, machine.memory
    count = cpu.packages * cpu.nodes_per_package
    sizes = memory.node_mib if isinstance(memory.node_mib, list) else [memory.node_mib] * count
    if len(sizes) != count:
        raise DescriptionError(f"{len(sizes)} memory sizes for {count} NUMA nodes")
    nodes = [
        Node(
            index,
            index // cpu.nodes_per_package,
            tuple(t.cpu for t in threads if t.node == index),
            sizes[index],
        )
        for index in range(count)
    ]
    for gpu, near in enumerate(gpu_nodes):
        for _ in range(memory.gpu_nodes_each):
            index = len(nodes)
            package = nodes[near].package
            nodes.append(Node(index, package, (), memory.gpu_mib.get(index, 0), gpu))
    return nodes


def write(files: Files, processors: Processors) -> None:
    """All of /sys and /proc that tells of CPUs and nodes."""
    _write_cpus(files, processors)
    _write_nodes(files, processors)
    _write_cpuinfo(files, processors)


def _write_cpus(files: Files, processors: Processors) -> None:
    cpu = processors.machine.cpu
    top = "/sys/devices/system/cpu"
    everything = render(processors.cpus)
    for name, value in (
        ("online", everything),
        ("possible", everything),
        ("present", everything),
        ("offline", ""),
        ("isolated", ""),
        ("kernel_max", "8191"),
        ("smt/active", int(cpu.threads > 1)),
        ("smt/control", "on" if cpu.threads > 1 else "notsupported"),
    ):
        files.text(f"{top}/{name}", value)
    cores: dict[tuple[int, int], list[int]] = {}
    packages: dict[int, list[int]] = {}
    for thread in processors.threads:
        cores.setdefault((thread.package, thread.core), []).append(thread.cpu)
        packages.setdefault(thread.package, []).append(thread.cpu)
    shared = cpu.l3_cores or cpu.cores
    last_level: dict[tuple[int, int], list[int]] = {}
    for thread in processors.threads:
        last_level.setdefault((thread.package, thread.core // shared), []).append(thread.cpu)
    for thread in processors.threads:
        place = f"{top}/cpu{thread.cpu}"
        core = cores[thread.package, thread.core]
        siblings = render(core)
        package = render(packages[thread.package])
        # Masks beside lists, though gputopo reads lists: hwloc reads masks, and is a good second
        # opinion on a composed machine.
        for name, value in (
            ("physical_package_id", thread.package),
            ("die_id", 0),
            ("core_id", thread.core),
            ("core_cpus_list", siblings),
            ("thread_siblings_list", siblings),
            ("package_cpus_list", package),
            ("core_siblings_list", package),
            ("core_cpus", processors.mask(core)),
            ("package_cpus", processors.mask(packages[thread.package])),
        ):
            files.text(f"{place}/topology/{name}", value)
        if thread.cpu:
            files.text(f"{place}/online", 1)
        files.link(f"/sys/bus/cpu/devices/cpu{thread.cpu}", place)
        if cpu.governor:
            files.text(f"{place}/cpufreq/scaling_governor", cpu.governor)
        levels = ((1, "Data"), (1, "Instruction"), (2, "Unified"), (3, "Unified"))
        for index, (level, kind) in enumerate(levels):
            cache = f"{place}/cache/index{index}"
            group = last_level[thread.package, thread.core // shared] if level == 3 else core
            files.text(f"{cache}/level", level)
            files.text(f"{cache}/type", kind)
            files.text(f"{cache}/size", f"{cpu.cache_kib[index]}K")
            files.text(f"{cache}/shared_cpu_list", render(group))
            files.text(f"{cache}/shared_cpu_map", processors.mask(group))


def _write_nodes(files: Files, processors: Processors) -> None:
    top = "/sys/devices/system/node"
    nodes = processors.nodes
    pages = processors.machine.memory.hugepages
    everything = render(node.index for node in nodes)
    with_memory = render(node.index for node in nodes if node.mib)
    files.text(f"{top}/online", everything)
    files.text(f"{top}/possible", everything)
    files.text(f"{top}/has_cpu", render(node.index for node in nodes if node.cpus))
    files.text(f"{top}/has_memory", with_memory)
    files.text(f"{top}/has_normal_memory", with_memory)
    for node in nodes:
        place = f"{top}/node{node.index}"
        files.link(f"/sys/bus/node/devices/node{node.index}", place)
        files.text(f"{place}/cpulist", render(node.cpus))
        files.text(f"{place}/cpumap", processors.mask(node.cpus))
        distances = (str(processors.distance(node, other)) for other in nodes)
        files.text(f"{place}/distance", " ".join(distances))
        total = node.mib * 1024
        reserved = pages if node.cpus else 0
        free = free_mib(node) * 1024
        files.raw(f"{place}/meminfo", _meminfo(node.index, total, free, reserved))
        for name, value in (("nr", reserved), ("free", reserved), ("surplus", 0)):
            files.text(f"{place}/hugepages/hugepages-2048kB/{name}_hugepages", value)


def free_mib(node: Node) -> int:
    """What an idle machine has free: all but 3 % of a CPU node, all of a GPU's memory."""
    return node.mib - node.mib * 3 // 100 if node.cpus else node.mib


def _meminfo(index: int, total: int, free: int, pages: int) -> str:
    rows = (("MemTotal", total), ("MemFree", free), ("MemUsed", total - free))
    text = "".join(f"Node {index} {name + ':':<15}{kib:>8} kB\n" for name, kib in rows)
    for name, value in (("Total", pages), ("Free", pages), ("Surp", 0)):
        text += f"Node {index} HugePages_{name}: {value:>5}\n"
    return text


_INTEL = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush dts acpi mmx "
    "fxsr sse sse2 ss ht tm pbe syscall nx pdpe1gb rdtscp lm constant_tsc arch_perfmon rep_good "
    "nopl xtopology nonstop_tsc cpuid aperfmperf pni pclmulqdq ssse3 fma cx16 pcid sse4_1 sse4_2 "
    "x2apic movbe popcnt aes xsave avx f16c rdrand{} lahf_lm abm fsgsbase bmi1 avx2 smep bmi2 erms "
    "invpcid rdseed adx smap xsaveopt arat"
)
_AMD = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse "
    "sse2 ht syscall nx mmxext fxsr_opt pdpe1gb rdtscp lm constant_tsc rep_good nopl nonstop_tsc "
    "cpuid extd_apicid aperfmperf pni pclmulqdq monitor ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt "
    "aes xsave avx f16c rdrand{} lahf_lm cmp_legacy svm extapic abm sse4a topoext fsgsbase bmi1 "
    "avx2 smep bmi2 rdseed adx smap clflushopt clwb sha_ni xsaveopt arat"
)
_ARM = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma "
    "lrcpc dcpop sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm sb dcpodp sve2 "
    "sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svebf16 i8mm bf16 dgh bti"
)


def _write_cpuinfo(files: Files, processors: Processors) -> None:
    machine = processors.machine
    blocks = [
        _arm_block(t, machine) if machine.cpu.vendor == "ARM" else _x86_block(t, processors)
        for t in processors.threads
    ]
    files.raw("/proc/cpuinfo", "".join(blocks))


def _arm_block(thread: Thread, machine: Machine) -> str:
    rows = (
        f"processor\t: {thread.cpu}",
        "BogoMIPS\t: 2000.00",
        f"Features\t: {_ARM}",
        "CPU implementer\t: 0x41",
        "CPU architecture: 8",
        "CPU variant\t: 0x0",
        f"CPU part\t: {machine.cpu.part:#x}",
        "CPU revision\t: 0",
    )
    return "\n".join(rows) + "\n\n"


def _x86_block(thread: Thread, processors: Processors) -> str:
    machine = processors.machine
    cpu = machine.cpu
    apic = thread.package * cpu.cores * cpu.threads + thread.core * cpu.threads + thread.thread
    flags = (_INTEL if cpu.vendor == "GenuineIntel" else _AMD).format(
        " hypervisor" if machine.hypervisor else ""
    )
    rows = (
        f"processor\t: {thread.cpu}",
        f"vendor_id\t: {cpu.vendor}",
        f"cpu family\t: {cpu.family}",
        f"model\t\t: {cpu.model}",
        f"model name\t: {cpu.name}",
        f"stepping\t: {cpu.stepping}",
        "microcode\t: 0xffffffff",
        f"cpu MHz\t\t: {cpu.mhz:.3f}",
        f"cache size\t: {cpu.cache_kib[3]} KB",
        f"physical id\t: {thread.package}",
        f"siblings\t: {cpu.cores * cpu.threads}",
        f"core id\t\t: {thread.core}",
        f"cpu cores\t: {cpu.cores}",
        f"apicid\t\t: {apic}",
        f"initial apicid\t: {apic}",
        "fpu\t\t: yes",
        "fpu_exception\t: yes",
        "cpuid level\t: 22",
        "wp\t\t: yes",
        f"flags\t\t: {flags}",
        f"bogomips\t: {cpu.mhz * 2:.2f}",
        "clflush size\t: 64",
        "cache_alignment\t: 64",
        "address sizes\t: 46 bits physical, 48 bits virtual",
        "power management:",
    )
    return "\n".join(rows) + "\n\n"
