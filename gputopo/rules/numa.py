"""NUM: NUMA nodes, memory and CPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations

from gputopo.cpulist import parse, render
from gputopo.facts import Missing, known
from gputopo.probes.cpu import CPUS
from gputopo.probes.numa import NODES
from gputopo.probes.pci import DEVICES
from gputopo.rules.common import count, is_isolated, is_virtual, listed, plural, unread
from gputopo.rules.finding import Cost, Evidence, Remedy, Severity, Skip, Verdict
from gputopo.rules.pci_links import Untold
from gputopo.rules.registry import rule
from gputopo.topology.graph import Topology
from gputopo.topology.model import Disagreement, Gpu, Hca, Numa, Package
from gputopo.topology.paths import label

SHOWN = 16
"""Devices that a folded finding shows one by one."""

LOCAL_DISTANCE = 10
"""Distance of a node to itself; a remote node is farther (ACPI specification, SLIT)."""

UNEVEN = 0.06
"""Share of the largest node's memory that another may lack. Firmware and the kernel keep back less
than one percent of a node on the machines seen; one DIMM of sixteen missing is 6.25 %."""

BALANCING_NODES = 1
"""The bit of numa_balancing that moves pages between nodes. Without it (2 alone) pages only move
between tiers of memory, and those near CPUs stay mapped (Linux, sysctl/kernel; mm/mprotect.c)."""

ADAPTIVE_DRIVERS = ("intel_pstate", "amd-pstate-epp")
"""Drivers whose governor called powersave lets the hardware choose the clock by the load."""

_JOB = re.compile(r"slurm|/pbs|/torque|/lsf|/sge|condor|kubepods|/flux")
"""Words in a job's cgroup path: what a workload manager calls its own."""


def _gpus_and_hcas(topology: Topology) -> list[Gpu | Hca]:
    return [*topology.gpus, *topology.physical_hcas]


@rule(
    code="NUM201",
    name="numa-node-unknown",
    severity="warning",
    needs=("pci", "numa"),
    rationale="""
        A machine with several NUMA nodes does not say to which one a GPU or HCA belongs (numa_node
        is -1). Whoever reads that as node 0 binds processes to the wrong socket. Other sources may
        know: the driver's memory affinity, the device's list of local CPUs, the bridges above it.
        If one answers it is a note, with what was believed. With a single node, and in virtual
        machines, -1 is the right answer.
    """,
    verify="cat /sys/bus/pci/devices/ADDRESS/{numa_node,local_cpulist}; nvidia-smi topo -m",
    mend="""
        Update the firmware: its tables (SRAT, _PXM) lack the root complex. Until then bind by hand,
        to the node that the finding names or that a bandwidth test shows to be nearer.
    """,
    sources=(
        "NVIDIA/cuCascade issue 119: -1 on bare metal by poor firmware",
        "tensorflow/models issue 10005: -1 taken for node 0",
        "Linux: Documentation/ABI/testing/sysfs-bus-pci, numa_node",
    ),
)
def numa_node_unknown(topology: Topology) -> Iterator[Verdict]:
    if len(topology.cpu_nodes) < 2 or is_virtual(topology):
        return
    pci = known(topology.facts.pci)
    assert pci is not None
    here = {function.address: function.numa_node for function in pci.functions}
    silent: list[Gpu | Hca] = []
    untold = Untold()
    for node in _gpus_and_hcas(topology):
        if node.pci not in here:
            untold.add("no PCI function tells its NUMA node", [node.id])
        elif unread(here[node.pci]):
            untold.add(f"its NUMA node cannot be read ({here[node.pci]})", [node.id])
        elif not _own_node(node):
            silent.append(node)
    if silent:
        yield _node_unknown(silent)
    untold.raise_skip()


def _own_node(node: Gpu | Hca) -> bool:
    """Whether the device's own numa_node names its node."""
    return node.sources.get("numa") == f"{DEVICES}/{node.pci}/numa_node"


def _node_unknown(silent: list[Gpu | Hca]) -> Verdict:
    unknown = [node.id for node in silent if node.numa is None]
    told = [node for node in silent if node.numa is not None]
    parts: list[str] = []
    if unknown:
        parts.append(f"no source places {listed(unknown)} on a NUMA node with CPUs")
    if told:
        nodes = sorted({node.numa for node in told if node.numa is not None})
        parts.append(
            f"firmware names no NUMA node for {listed(n.id for n in told)}; other sources say "
            f"{' and '.join(map(str, nodes))}"
        )
    return Verdict(
        severity="warning" if unknown else "note",
        subjects=[node.id for node in silent],
        summary="; ".join(parts),
        evidence=[
            Evidence(
                source=f"{DEVICES}/{node.pci}/numa_node",
                seen=f"-1; node {node.numa} by {node.sources.get('numa', '?')}"
                if node.numa is not None
                else str(node.missing.get("numa", "unknown")),
                expected="a node with CPUs",
            )
            for node in silent[:SHOWN]
        ],
        confidence="reported",
        cost=Cost(
            text="processes are placed by guess: the far socket costs bandwidth and latency",
            derivation="an HCA across the sockets: 11 instead of 23 GB/s (linux-rdma/perftest 241)",
        )
        if unknown
        else None,
        remedy=Remedy(
            text="Update the firmware, whose tables lack these devices; until then bind by hand.",
            commands=[f"cat {DEVICES}/{node.pci}/local_cpulist" for node in silent[:SHOWN]],
            needs="a firmware update and a reboot",
        ),
    )


@rule(
    code="NUM202",
    name="numa-sources-disagree",
    severity="warning",
    needs=("pci", "numa"),
    rationale="""
        Two sources place a device on different NUMA nodes: sysfs (numa_node, local_cpulist), the
        driver's affinity, the affinity columns of nvidia-smi topo -m. Tools that believe different
        ones bind differently, and one of them binds to the far socket. Here sysfs is believed
        before the driver. Only a bandwidth measured from both nodes settles it.
    """,
    verify="cat /sys/bus/pci/devices/ADDRESS/{numa_node,local_cpulist}; nvidia-smi topo -m",
    mend="Measure from both nodes and bind to the faster one; update the firmware or the driver.",
    sources=(
        "Project-HAMi/HAMi issues 99 and 1363: texts of the affinity column",
        "NVIDIA/nccl issue 820: firmware that swaps what it tells",
        "NVML API reference: nvmlDeviceGetMemoryAffinity",
    ),
)
def numa_sources_disagree(topology: Topology) -> Iterator[Verdict]:
    found = [other for other in topology.disagreements if other.fact == "numa"]
    taken = {subject for other in found for subject in other.subjects}
    found += [other for other in _by_nvidia_smi(topology) if other.subjects[0] not in taken]
    if not found:
        return
    ids = list(dict.fromkeys(subject for other in found for subject in other.subjects))
    first = found[0]
    rest = f" (and {count(len(found) - 1, 'more')})" if len(found) > 1 else ""
    yield Verdict(
        subjects=ids,
        summary=(
            f"sources place {listed(ids)} on different NUMA nodes: {first.subjects[0]} on "
            f"{first.kept} by {_short(first.kept_source)}, on {first.other} by "
            f"{_short(first.other_source)}{rest}"
        ),
        evidence=[
            Evidence(
                source=f"{other.subjects[0]}: {other.other_source}",
                seen=f"node {other.other}",
                expected=f"node {other.kept}, as {other.kept_source} has it",
            )
            for other in found[:SHOWN]
        ],
        confidence="reported",
        cost=Cost(
            text="whoever believes the wrong one runs across the sockets",
            derivation="not known before it is measured from both nodes",
        ),
        remedy=Remedy(
            text="Measure from both nodes, bind by hand to the faster, update the firmware.",
            commands=[
                f"numactl -N {node} -m {node} nvbandwidth -t host_to_device_memcpy_ce"
                for node in sorted({first.kept, *re.findall(r"\d+", first.other)})
            ],
            needs="an idle GPU",
        ),
    )


def _short(source: str) -> str:
    return source.rpartition("/")[2].partition("(")[0]


def _by_nvidia_smi(topology: Topology) -> Iterator[Disagreement]:
    """GPUs whose node is not among those of their NUMA Affinity column; it may list several."""
    smi = known(topology.facts.nvidia_smi)
    if smi is None or len(topology.cpu_nodes) < 2:
        return
    guessed = [gpu for gpu in topology.gpus if gpu.sources.get("index", "").startswith("PCI order")]
    if guessed and len(guessed) != len(smi.numa_affinity):
        return  # GPUs numbered by their place on the bus, and not all of them are there
    for gpu in topology.gpus:
        text = smi.numa_affinity.get(label(gpu), "").strip()
        if gpu.numa is None or not re.fullmatch(r"[\d,-]{1,200}", text):
            continue  # N/A, or nothing
        try:
            said = parse(text) & {node.index for node in topology.cpu_nodes}
        except ValueError:
            continue
        if said and gpu.numa not in said:
            yield Disagreement(
                subjects=[gpu.id],
                fact="numa",
                kept=str(gpu.numa),
                kept_source=gpu.sources.get("numa", "sysfs"),
                other=render(said),
                other_source="nvidia-smi topo -m, NUMA Affinity",
            )


@rule(
    code="NUM203",
    name="local-cpus-not-allowed",
    severity="error",
    needs=("cpu", "numa"),
    rationale="""
        This process may use no CPU of the NUMA node that a visible GPU is attached to: a job got
        CPUs of the other socket. All its copies and launches cross between the sockets, and
        libraries that bind to the GPU's CPUs find an empty set and fail or give up silently; NCCL
        keeps the mask that it was given. Outside a job it is a note: a shell may be bound on
        purpose. CPUs of the same socket but another node (NPS, SNC) are a warning.
    """,
    verify="grep _allowed_list /proc/self/status; cat /sys/devices/system/node/node*/cpulist",
    mend="""
        Ask for cores near the GPUs: with Slurm --gpu-bind=closest and --cores-per-gpu, with
        Kubernetes the topology manager's policy single-numa-node; check Cores= in gres.conf.
    """,
    sources=(
        "nvidia-cosmos/cosmos-predict1 issue 11, rapidsai/dask-cuda issue 1381: the empty mask",
        "NVML API reference: nvmlDeviceGetCpuAffinity is cut to the caller's cpuset",
        "Slurm: gres.conf, Cores; srun, --gpu-bind",
    ),
)
def local_cpus_not_allowed(topology: Topology) -> Iterator[Verdict]:
    cpu = known(topology.facts.cpu)
    gpus = [gpu for gpu in topology.gpus if gpu.index is not None]
    assert cpu is not None
    if not gpus or len(topology.cpu_nodes) < 2:
        return
    if isinstance(cpu.allowed, Missing):
        raise Skip(f"the CPUs that this process may use: {cpu.allowed}")
    allowed = parse(cpu.allowed)
    nodes = parse(known(cpu.allowed_nodes) or "")
    far = [gpu for gpu in gpus if gpu.cpus and not parse(gpu.cpus) & allowed]
    without = [gpu for gpu in gpus if gpu not in far and gpu.numa is not None]
    without = [gpu for gpu in without if nodes and gpu.numa not in nodes]
    if (far or without) and isinstance(topology.facts.nvml, Missing):
        raise Skip(f"which GPUs this process may use is unknown: nvml {topology.facts.nvml}")
    near = [gpu for gpu in far if _package_cpus(topology, gpu) & allowed]
    job = _in_job(topology)
    across = [gpu for gpu in far if gpu not in near]
    if across:
        yield _cpus_elsewhere(across, cpu.allowed, "on another socket", "error" if job else "note")
    if near:
        where = "of the same socket, but of another node"
        yield _cpus_elsewhere(near, cpu.allowed, where, "warning" if job else "note")
    if without:
        yield _memory_elsewhere(without, render(nodes), "warning" if job else "note")
    untold = Untold()
    for gpu in gpus:
        if gpu.numa is None:
            untold.add("its NUMA node is unknown", [gpu.id])
    untold.raise_skip()


def _in_job(topology: Topology) -> bool:
    """Whether somebody else chose the CPUs of this process: a container or a workload manager."""
    system = known(topology.facts.system)
    cgroup = known(system.cgroup) if system is not None else None
    return is_isolated(topology) or bool(_JOB.search(cgroup or ""))


def _package_cpus(topology: Topology, gpu: Gpu) -> frozenset[int]:
    """The CPUs of the package that a GPU's node is in."""
    node = topology.nodes.get(f"numa{gpu.numa}")
    package = topology.nodes.get(node.parent or "") if node is not None else None
    return parse(package.cpus) if isinstance(package, Package) else frozenset()


def _cpus_elsewhere(gpus: list[Gpu], allowed: str, where: str, severity: Severity) -> Verdict:
    ids = [gpu.id for gpu in gpus]
    local = sorted({gpu.cpus for gpu in gpus if gpu.cpus})
    return Verdict(
        severity=severity,
        subjects=ids,
        summary=(
            f"no CPU beside {listed(ids)} may be used: allowed are {allowed}, {where}; "
            f"beside {plural(ids, 'it', 'them')} are {'; '.join(local)}"
        ),
        evidence=[
            Evidence(
                source="/proc/self/status, Cpus_allowed_list",
                seen=allowed,
                expected=f"some of {gpu.cpus}, for {gpu.id}",
            )
            for gpu in gpus[:SHOWN]
        ],
        confidence="reported",
        cost=Cost(
            text="host copies and kernel launches cross between the sockets",
            derivation="the interconnect is shared by all that cross it; no figure without a test",
        )
        if severity != "note"
        else None,
        remedy=Remedy(
            text="Ask for cores beside the GPUs, or for GPUs beside the cores.",
            commands=[
                "srun --gpu-bind=closest --cpus-per-gpu=N ...",
                f"taskset -c {local[0]} COMMAND   # where the cpuset allows it",
            ],
        ),
    )


def _memory_elsewhere(gpus: list[Gpu], nodes: str, severity: Severity) -> Verdict:
    ids = [gpu.id for gpu in gpus]
    return Verdict(
        severity=severity,
        subjects=ids,
        summary=f"no memory beside {listed(ids)} may be used: allowed are nodes {nodes}",
        evidence=[
            Evidence(
                source="/proc/self/status, Mems_allowed_list",
                seen=nodes,
                expected=f"{gpu.numa} among them, for {gpu.id}",
            )
            for gpu in gpus[:SHOWN]
        ],
        confidence="reported",
        remedy=Remedy(text="Have the node's memory added to the cpuset of the job."),
    )


@rule(
    code="NUM204",
    name="numa-balancing-on",
    severity="warning",
    needs=("system", "numa"),
    rationale="""
        The kernel takes pages away from their mapping to see who touches them and moves them
        between nodes. Processes stall on the faults, with GPU jobs for tens of milliseconds at a
        time, and pinned buffers gain nothing. Jobs that are bound to their node need none of it.
        Mode 2 moves pages between tiers of memory alone (Grace, CXL), and leaves those beside CPUs
        where they are.
    """,
    verify="cat /proc/sys/kernel/numa_balancing",
    mend="sysctl kernel.numa_balancing=0, and the same line in a file in /etc/sysctl.d.",
    sources=(
        "deepseek-ai/DeepEP issue 624: stalls of 16 to 31 ms",
        "ROCm/rccl issue 1562: half again as fast without",
        "NVIDIA Grace performance tuning guide: numa_balancing off",
        "Linux: Documentation/admin-guide/sysctl/kernel.rst, numa_balancing",
    ),
)
def numa_balancing_on(topology: Topology) -> Iterator[Verdict]:
    system = known(topology.facts.system)
    assert system is not None
    if not topology.gpus or sum(node.role != "empty" for node in topology.numa_nodes) < 2:
        return
    mode = system.numa_balancing
    if isinstance(mode, Missing):
        if mode.reason == "absent":  # a kernel without it
            return
        raise Skip(f"/proc/sys/kernel/numa_balancing: {mode}")
    if not mode & BALANCING_NODES:
        return
    yield Verdict(
        subjects=["machine"],
        summary=(
            "automatic NUMA balancing is on: the kernel unmaps and moves pages under running jobs"
        ),
        evidence=[Evidence(source="/proc/sys/kernel/numa_balancing", seen=str(mode), expected="0")],
        confidence="reported",
        cost=Cost(
            text="stalls of 16 to 31 ms in reports; collectives up to half again as slow",
            derivation="DeepEP issue 624, rccl issue 1562",
        ),
        remedy=Remedy(
            text="Turn it off, now and for the next boot.",
            commands=[
                "sysctl kernel.numa_balancing=0",
                "echo kernel.numa_balancing=0 > /etc/sysctl.d/90-numa-balancing.conf",
            ],
            needs="root" + (", on the host of this container" if is_isolated(topology) else ""),
            undo=f"sysctl kernel.numa_balancing={mode}; rm /etc/sysctl.d/90-numa-balancing.conf",
        ),
    )


@rule(
    code="NUM205",
    name="firmware-topology-suspect",
    severity="warning",
    needs=("cpu", "numa"),
    rationale="""
        The tables of the firmware, or the definition of the virtual machine, contradict themselves:
        nodes that share CPUs, a node with CPUs of two packages, the threads of one core on two
        nodes, a remote node as near as the own one, two nodes of one package as far from each other
        as from the other package, or one node for several packages on a GPU server (memory
        interleaved). Whatever binds by them binds wrong. Several nodes in a package (NPS, SNC) are
        fine, as are nodes without CPUs.
    """,
    verify="numactl --hardware; lscpu -e; cat /sys/devices/system/node/node*/{cpulist,distance}",
    mend="""
        Update the firmware, or set its memory interleaving and its nodes per socket anew. In a
        virtual machine correct the CPUs of the NUMA cells and the threads of the cores.
    """,
    sources=(
        "open-mpi/hwloc issues 712 and 541: guests and firmware with impossible nodes",
        "NVIDIA/nccl-tests issue 293: nodes per socket and what they bring",
        "ACPI specification: SRAT and SLIT",
    ),
)
def firmware_topology_suspect(topology: Topology) -> Iterator[Verdict]:
    nodes = {node.id: parse(node.cpus) for node in topology.cpu_nodes if node.cpus}
    packages = {package.id: parse(package.cpus) for package in topology.of(Package)}
    found = [*_shared_cpus(nodes), *_split_cores(topology, nodes)]
    untold = _processors_untold(topology, nodes, packages)
    if not untold:
        found += [*_spanning(topology, nodes, packages), *_flat_distances(topology, packages)]
    if not found:
        untold.raise_skip()
        return
    virtual = is_virtual(topology)
    yield Verdict(
        severity="note" if virtual else None,
        subjects=["machine", *dict.fromkeys(i for ids, _, _ in found for i in ids)],
        summary="; ".join(dict.fromkeys(text for _, text, _ in found)),
        evidence=[evidence for _, _, evidence in found[:SHOWN]],
        confidence="reported",
        remedy=Remedy(
            text="Correct the NUMA cells in the definition of this virtual machine."
            if virtual
            else "Update the firmware; look at its memory interleaving and nodes per socket.",
            commands=["numactl --hardware", "lscpu -e"],
            needs="the host's operator" if virtual else "the firmware's setup, and a reboot",
        ),
    )


def _processors_untold(
    topology: Topology, nodes: dict[str, frozenset[int]], packages: dict[str, frozenset[int]]
) -> Untold:
    """Nodes and packages of which too little was read to set them against each other."""
    untold = Untold()
    for package in topology.of(Package):
        if unread(package.missing.get("index")):
            untold.add("its number cannot be read", [package.id])
    for node in topology.of(Numa):
        if unread(node.missing.get("cpus")):
            untold.add("its CPUs cannot be read", [node.id])
    placed = frozenset().union(*packages.values())
    if packages and any(cpus - placed for cpus in nodes.values()):
        untold.add("the packages of some CPUs cannot be read", ["machine"])
    return untold


Suspect = tuple[list[str], str, Evidence]
"""Ids, what is wrong in a line, and what shows it."""


def _node(node_id: str) -> str:
    """The kernel's name of a node: ``node1`` of ``numa1``."""
    return node_id.replace("numa", "node")


def _shared_cpus(nodes: dict[str, frozenset[int]]) -> Iterator[Suspect]:
    for (a, first), (b, second) in combinations(nodes.items(), 2):
        if first & second:
            yield (
                [a, b],
                "NUMA nodes share CPUs",
                Evidence(
                    source=f"{NODES}/{{{_node(a)},{_node(b)}}}/cpulist",
                    seen=f"{render(first & second)} in both",
                    expected="each CPU in one node",
                ),
            )


def _spanning(
    topology: Topology, nodes: dict[str, frozenset[int]], packages: dict[str, frozenset[int]]
) -> Iterator[Suspect]:
    """Nodes with CPUs of several packages. A node of whole packages is what machines of one memory
    bus have, and guests: it is told on bare metal with GPUs only."""
    server = bool(topology.gpus) and topology.host.virtualization == "none"
    for node, cpus in nodes.items():
        held = [package for package, own in packages.items() if own & cpus]
        cut = [package for package in held if not packages[package] <= cpus]
        if len(held) < 2 or not (cut or server):
            continue
        yield (
            [node],
            "nodes with parts of several packages" if cut else "one NUMA node for several packages",
            Evidence(
                source=f"{NODES}/{_node(node)}/cpulist",
                seen=f"{render(cpus)}, of {', '.join(held)}",
                expected="CPUs of one package",
            ),
        )


def _split_cores(topology: Topology, nodes: dict[str, frozenset[int]]) -> Iterator[Suspect]:
    """One of the cores whose threads are on different nodes, and how many there are."""
    owner = {cpu: node for node, cpus in nodes.items() for cpu in cpus}
    split: list[tuple[str, list[str]]] = []
    for package in topology.of(Package):
        for core in package.cores:
            held = sorted({owner[cpu] for cpu in parse(core) if cpu in owner})
            if len(held) > 1:
                split.append((core, held))
    if split:
        core, held = split[0]
        yield (
            held,
            f"{count(len(split), 'core')} with threads on two NUMA nodes",
            Evidence(
                source=f"{CPUS}/cpu{min(parse(core))}/topology/core_cpus_list",
                seen=f"{core}, on {' and '.join(held)}",
                expected="all threads of a core on one node",
            ),
        )


def _flat_distances(topology: Topology, packages: dict[str, frozenset[int]]) -> Iterator[Suspect]:
    """Distances that tell no near from far, on a machine with several packages."""
    nodes = topology.cpu_nodes
    if len(packages) < 2 or len(nodes) < 2:
        return
    inside: set[int] = set()
    across: set[int] = set()
    for a, b in combinations(nodes, 2):
        distance = a.distances.get(str(b.index))
        if distance is None:
            return
        same = a.parent == b.parent and a.parent in packages
        (inside if same else across).add(distance)
    remote = inside | across
    source = f"{NODES}/node*/distance"
    if remote and max(remote) <= LOCAL_DISTANCE:
        text = "every NUMA node is as near as the own one"
        expected = f"more than {LOCAL_DISTANCE} to other nodes"
    elif inside and across and len(remote) == 1:
        text = "nodes of one package are as far from each other as from the other package"
        expected = "less within a package than between packages"
    else:
        return
    seen = f"{' or '.join(map(str, sorted(remote)))} between all of {len(nodes)} nodes"
    yield [], text, Evidence(source=source, seen=seen, expected=expected)


@rule(
    code="NUM206",
    name="node-memory-uneven",
    severity="warning",
    needs=("numa",),
    rationale="""
        NUMA nodes with CPUs have different amounts of memory, or one has none: a DIMM is missing,
        failed at boot, or sits in the wrong slot. Fewer channels mean less bandwidth for the GPUs
        of that node, and a node without memory cannot be bound to at all (numactl refuses it).
        Nodes without CPUs are left out: they are memory of GPUs (Grace, POWER9) or of CXL.
    """,
    verify="numactl --hardware | grep size; dmidecode -t memory | grep -E 'Locator|Size'",
    mend="Look for failed or missing DIMMs in the BMC's log; fill all channels alike.",
    sources=(
        "numactl/numactl issue 165, open-mpi/hwloc issue 438: nodes with CPUs and no memory",
        "eth-cscs/cscs-docs issue 179: GPU memory is no node to bind to",
    ),
)
def node_memory_uneven(topology: Topology) -> Iterator[Verdict]:
    nodes = topology.cpu_nodes
    if len(nodes) < 2:
        return
    sizes = {node.id: node.memory_bytes for node in nodes if node.memory_bytes is not None}
    most = max(sizes.values(), default=0)
    less = {node: size for node, size in sizes.items() if size < (1 - UNEVEN) * most}
    if less:
        yield _uneven(topology, less, most)
    untold = Untold()
    for node in nodes:
        if node.memory_bytes is None:
            untold.add(f"its memory is unknown ({node.missing.get('memory_bytes')})", [node.id])
    untold.raise_skip()


def _uneven(topology: Topology, less: dict[str, int], most: int) -> Verdict:
    empty = [node for node, size in less.items() if size == 0]
    fewer = [node for node in less if node not in empty]
    virtual = is_virtual(topology)
    parts: list[str] = []
    if empty:
        parts.append(f"{listed(empty)} {plural(empty, 'has', 'have')} CPUs and no memory")
    if fewer:
        sizes = " and ".join(_gib(less[node]) for node in fewer[:2])
        parts.append(
            f"{listed(fewer)} {plural(fewer, 'has', 'have')} {sizes}, another has {_gib(most)}"
        )
    gpus = [gpu.id for gpu in topology.gpus if f"numa{gpu.numa}" in less]
    return Verdict(
        severity="note" if virtual else None,
        subjects=list(less),
        summary="; ".join(parts) + (f" ({listed(gpus)} beside)" if gpus else ""),
        evidence=[
            Evidence(
                source=f"{NODES}/{_node(node)}/meminfo, MemTotal",
                seen=_gib(size),
                expected=f"{_gib(most)}, as on the largest node",
            )
            for node, size in list(less.items())[:SHOWN]
        ],
        confidence="reported",
        cost=Cost(
            text="memory bandwidth of that node, by the share of channels that are empty",
            derivation="channels are inferred from sizes; dmidecode tells them",
        ),
        remedy=Remedy(
            text="Give the NUMA cells of this virtual machine equal memory."
            if virtual
            else "Look for failed or missing DIMMs, and fill the channels alike.",
            commands=[]
            if virtual
            else ["dmidecode -t memory | grep -E 'Locator|Size'", "ipmitool sel list"],
            needs="the host's operator" if virtual else "root; power-off for DIMMs",
        ),
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


@rule(
    code="NUM207",
    name="cpu-clock-policy",
    severity="note",
    needs=("cpu",),
    rationale="""
        The CPUs raise their clock only after they have been loaded for a while. Threads that launch
        kernels or serve the network sleep and wake all the time and run at low clocks, which shows
        in latency. The governor performance keeps them up. With intel_pstate or amd-pstate in
        active mode, powersave is not what it says: the hardware chooses by the load, and it is no
        finding.
    """,
    verify="cat /sys/devices/system/cpu/cpu0/cpufreq/scaling_{driver,governor}",
    mend="cpupower frequency-set -g performance, or a tuned profile such as hpc-compute.",
    sources=(
        "oracle-quickstart/oci-hpc health checks: the governor",
        "linux-rdma/perftest: warns unless CPUs run at full clock",
        "Linux: Documentation/admin-guide/pm/intel_pstate.rst, active mode",
    ),
)
def cpu_clock_policy(topology: Topology) -> Iterator[Verdict]:
    cpu = known(topology.facts.cpu)
    assert cpu is not None
    if not topology.gpus:
        return
    if isinstance(cpu.governor, Missing):
        if cpu.governor.reason in ("absent", "unsupported"):
            raise Skip("the kernel does not steer the CPUs' clock: firmware or a hypervisor does")
        raise Skip(f"the governor of the CPUs: {cpu.governor}")
    driver = known(cpu.frequency_driver)
    if cpu.governor == "performance" or (
        cpu.governor == "powersave" and driver in ADAPTIVE_DRIVERS
    ):
        return
    doubt = cpu.governor == "powersave" and driver is None
    place = f"{CPUS}/cpu*/cpufreq"
    yield Verdict(
        subjects=["machine"],
        summary=f"the CPUs' clock follows the load (governor {cpu.governor})"
        + (", unless intel_pstate is active: its powersave does not slow down" if doubt else ""),
        evidence=[
            Evidence(source=f"{place}/scaling_governor", seen=cpu.governor, expected="performance"),
            *(
                [
                    Evidence(
                        source=f"{place}/scaling_driver",
                        seen=driver,
                        expected="any, with the governor performance",
                    )
                ]
                if driver
                else []
            ),
        ],
        confidence="reported",
        remedy=Remedy(
            text="Set the governor performance where latency counts.",
            commands=["cpupower frequency-set -g performance"],
            needs="root; lost with a reboot",
            undo=f"cpupower frequency-set -g {cpu.governor.rpartition(' ')[2]}",
        ),
    )
