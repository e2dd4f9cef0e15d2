"""From facts to the graph: joins what the probes read on PCI addresses, CPUs and NUMA nodes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gputopo.cpulist import parse, render
from gputopo.facts import ABSENT, Fact, Missing, ProbeStatus, known
from gputopo.hardware import nvlink as nvlink_table
from gputopo.hardware.pcie import GENERATIONS, SPEEDS, gbytes_per_s
from gputopo.pciaddr import sort_key
from gputopo.probes.cpu import CpuFacts, CpuModel
from gputopo.probes.net import NetDevice, NetFacts, NvmeDrive
from gputopo.probes.numa import NODES, NumaFacts, NumaNode
from gputopo.probes.nvidia_smi import SmiMatrix
from gputopo.probes.nvml import NvmlFacts, NvmlGpu
from gputopo.probes.pci import CLASS_BRIDGE, CLASS_NVME, DEVICES, ACS_BITS, PciFacts, PciFunction
from gputopo.probes.rdma import RdmaDevice, RdmaFacts, natural
from gputopo.probes.system import SystemFacts
from gputopo.topology import model
from gputopo.topology.graph import Topology
from gputopo.topology.locality import Locality, Place
from gputopo.topology.model import AnyNode, Disagreement, Link, Pcie
from gputopo.topology.paths import label, rank


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What all probes found, by probe."""

    pci: Fact[PciFacts] = ABSENT
    numa: Fact[NumaFacts] = ABSENT
    cpu: Fact[CpuFacts] = ABSENT
    rdma: Fact[RdmaFacts] = ABSENT
    net: Fact[NetFacts] = ABSENT
    system: Fact[SystemFacts] = ABSENT
    nvml: Fact[NvmlFacts] = ABSENT
    nvidia_smi: Fact[SmiMatrix] = ABSENT


class Found(dict[str, Missing]):
    """Collects values for a node and keeps the reason of each that is missing."""

    def get_or(self, field: str, fact: Fact[model.Any]) -> model.Any:
        """The value, or None with the reason noted under ``field``."""
        if isinstance(fact, Missing):
            self[field] = fact
            return None
        return fact


def build(
    facts: Facts,
    *,
    source_kind: str = "live",
    source_name: str = "this machine",
    captured_at: str | None = None,
    probes: list[ProbeStatus] | None = None,
) -> Topology:
    """The topology that the facts describe. Never raises for what a machine may say."""
    builder = _Builder(facts)
    builder.add_machine()
    builder.add_cpus()
    builder.add_pci()
    builder.add_links()
    topology = Topology(
        source_kind=source_kind,
        source_name=source_name,
        captured_at=captured_at,
        host=_host_info(facts),
        probes=probes or [],
        nodes=builder.nodes.values(),
        links=builder.links,
        disagreements=builder.disagreements,
        facts=facts,
    )
    return _with_nearest(topology)


def _host_info(facts: Facts) -> model.HostInfo:
    found = Found()
    system = known(facts.system)
    cpu = known(facts.cpu)
    nvml = known(facts.nvml)
    cpu_model: CpuModel | None = None
    if cpu is not None:
        cpu_model = found.get_or("cpu_model", cpu.model)
    driver: Fact[str] = nvml.driver if nvml else ABSENT
    if isinstance(driver, Missing) and system is not None:
        driver = system.nvidia_driver
    return model.HostInfo(
        hostname=found.get_or("hostname", system.hostname) if system else None,
        vendor=found.get_or("vendor", system.vendor) if system else None,
        product=found.get_or("product", system.product) if system else None,
        kernel=found.get_or("kernel", system.kernel) if system else None,
        architecture=cpu_model.architecture if cpu_model else None,
        driver=found.get_or("driver", driver),
        cuda=found.get_or("cuda", nvml.cuda) if nvml else None,
        cpu_model=known(cpu_model.name) if cpu_model else None,
        virtualization=virtualization(cpu_model, system),
        container=system.container if system else None,
        packages=len(cpu.packages) or None if cpu else None,
        cores=len(cpu.cores) or None if cpu else None,
        pus=len(parse(cpu.online)) if cpu else None,
        allowed_cpus=found.get_or("allowed_cpus", cpu.allowed) if cpu else None,
        memory_bytes=found.get_or("memory_bytes", system.memory_bytes) if system else None,
        missing=dict(found),
    )


def virtualization(cpu: CpuModel | None, system: SystemFacts | None) -> str | None:
    """The hypervisor under this machine; ``none`` on bare metal; None where it cannot be told.

    The CPU's hypervisor flag decides on x86; a DMI vendor alone does not, since clouds sell bare
    metal under the same name. Arm has no such flag: there the vendor is all there is.
    """
    named = known(system.hypervisor) if system else None
    if cpu is None:
        return named
    if cpu.hypervisor:
        return named or "unknown hypervisor"
    if cpu.architecture in ("x86_64", "i386"):
        return "none"
    return named


WITHOUT_NUMA = {
    "cpus": "/sys/devices/system/cpu/online (a kernel without NUMA: all CPUs are one node)",
    "memory_bytes": "/proc/meminfo",
}


def _numa_nodes(facts: Facts) -> list[NumaNode]:
    """The kernel's NUMA nodes with their online CPUs; of a kernel without NUMA, one node with all."""
    numa, cpu, system = known(facts.numa), known(facts.cpu), known(facts.system)
    if numa is not None and numa.nodes:
        online = parse(cpu.online) if cpu else None
        # POWER lists the CPUs of a node that are offline (SMT off) as well.
        return [
            msgspec.structs.replace(node, cpus=render(parse(node.cpus) & online))
            if isinstance(node.cpus, str) and online
            else node
            for node in numa.nodes
        ]
    if cpu is None:
        return []
    return [
        NumaNode(
            index=0,
            cpus=cpu.online,
            memory_bytes=system.memory_bytes if system else ABSENT,
            distances={0: 10},
            hugepages={},
        )
    ]


class _Builder:
    """Adds nodes and links in tree order; ids are unique."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.nodes: dict[str, AnyNode] = {}
        self.links: list[Link] = []
        self.disagreements: list[Disagreement] = []
        pci = known(facts.pci)
        self.functions = {f.address: f for f in pci.functions} if pci else {}
        self.numa = _numa_nodes(facts)
        self.cpu_nodes = {
            node.index: node.cpus
            for node in self.numa
            if isinstance(node.cpus, str) and node.cpus
        }
        self.locality = Locality(self.cpu_nodes, self.functions)
        self.ids: dict[str, str] = {}
        """Node id by PCI address."""

    def add(self, node: AnyNode) -> None:
        self.nodes[node.id] = node

    def unique(self, wanted: str) -> str:
        """An id that no other node has: devices can be renamed to anything."""
        candidate, number = wanted, 2
        while candidate in self.nodes:
            candidate, number = f"{wanted}~{number}", number + 1
        return candidate

    # Machine, packages, NUMA nodes

    def add_machine(self) -> None:
        system = known(self.facts.system)
        found = Found()
        memory = found.get_or("memory_bytes", system.memory_bytes) if system else None
        name = known(system.product) if system else None
        self.add(model.Machine(id="machine", name=name, memory_bytes=memory, missing=dict(found)))

    def add_cpus(self) -> None:
        self._add_packages()
        nvml = known(self.facts.nvml)
        owners: dict[int, str] = {}
        for gpu in nvml.gpus if nvml else []:
            if isinstance(gpu.numa_id, int) and gpu.numa_id >= 0:
                owners[gpu.numa_id] = f"gpu{gpu.index}"
        for node in self.numa:
            found = Found()
            cpus = found.get_or("cpus", node.cpus)
            memory = found.get_or("memory_bytes", node.memory_bytes)
            owner = owners.get(node.index) if not cpus else None
            if cpus:
                role = "cpu"
            elif owner:
                role = "gpu-memory"
            else:
                role = "memory" if memory else "empty"
            distances = found.get_or("distances", node.distances) or {}
            self.add(
                model.Numa(
                    id=f"numa{node.index}",
                    parent=self._package_of(cpus),
                    index=node.index,
                    role=role,
                    cpus=cpus,
                    memory_bytes=memory,
                    distances={str(index): value for index, value in distances.items()},
                    hugepages=node.hugepages,
                    gpu=owner,
                    sources={} if isinstance(self.facts.numa, NumaFacts) else WITHOUT_NUMA,
                    missing=dict(found),
                )
            )
        self._compare_numactl(known(self.facts.numa))

    def _package_of(self, cpus: str | None) -> str:
        """The package that holds all CPUs of a node, else the machine."""
        wanted = parse(cpus) if cpus else frozenset()
        for node in self.nodes.values():
            if isinstance(node, model.Package) and wanted and wanted <= parse(node.cpus):
                return node.id
        return "machine"

    def _add_packages(self) -> None:
        cpu = known(self.facts.cpu)
        added: list[str] = []
        for package in cpu.packages if cpu else []:
            assert cpu is not None
            cpus = parse(package.cpus)
            found = Found()
            index = found.get_or("index", package.index)
            node_id = self.unique(f"package{'?' if index is None else index}")
            added.append(node_id)
            self.add(
                model.Package(
                    id=node_id,
                    parent="machine",
                    index=index,
                    cpus=package.cpus,
                    cores=[core for core in cpu.cores if parse(core) <= cpus],
                    l3_groups=[group for group in cpu.l3_groups if parse(group) <= cpus],
                    numa=sorted(i for i, c in self.cpu_nodes.items() if parse(c) <= cpus),
                    missing=dict(found),
                )
            )
        for i, first in enumerate(added):
            for second in added[i + 1 :]:
                self.links.append(Link(a=first, b=second, kind="inter-socket"))

    def _compare_numactl(self, numa: NumaFacts | None) -> None:
        if numa is None or isinstance(numa.numactl, Missing):
            return
        for node in numa.nodes:
            other = numa.numactl.get(node.index)
            if other is not None and other.cpus is not None and isinstance(node.cpus, str):
                if other.cpus != node.cpus:
                    self.disagreements.append(
                        Disagreement(
                            subjects=[f"numa{node.index}"],
                            fact="cpus",
                            kept=node.cpus,
                            kept_source=f"{NODES}/node{node.index}/cpulist",
                            other=other.cpus,
                            other_source="numactl --hardware",
                        )
                    )

    # PCI devices

    def add_pci(self) -> None:
        nvml = known(self.facts.nvml)
        self.nvml_by_pci: dict[str, NvmlGpu] = {}
        for gpu in nvml.gpus if nvml else []:
            if isinstance(gpu.pci, str):
                self.nvml_by_pci.setdefault(gpu.pci, gpu)
        rdma: dict[str, list[RdmaDevice]] = {}
        for device in self._rdma():
            if isinstance(device.pci, str):
                rdma.setdefault(device.pci, []).append(device)
        net = known(self.facts.net)
        interfaces: dict[str, list[NetDevice]] = {}
        for interface in net.interfaces if net else []:
            interfaces.setdefault(interface.pci, []).append(interface)
        drives = {
            drive.pci: drive for drive in (net.drives if net else []) if isinstance(drive.pci, str)
        }
        self._number_gpus()
        # In address order parents come before children only inside one root complex with rising
        # bus numbers; depth first is what holds everywhere.
        for function in sorted(
            self.functions.values(), key=lambda f: (len(f.parents), sort_key(f.address))
        ):
            self._add_function(function, rdma, interfaces, drives)
        for gpu in nvml.gpus if nvml else []:
            if not isinstance(gpu.pci, str) or gpu.pci not in self.ids:
                self._add_gpu(None, gpu)
        for device in self._rdma():
            if not isinstance(device.pci, str) or device.pci not in self.functions:
                self._add_hca(None, device, [])
        self._sort_devices()

    def _rdma(self) -> list[RdmaDevice]:
        rdma = known(self.facts.rdma)
        return rdma.devices if rdma else []

    def _number_gpus(self) -> None:
        """GPU numbers: NVML's. Without NVML, PCI order, which is how NVML would count."""
        gpus = sorted((f.address for f in self.functions.values() if f.is_gpu), key=sort_key)
        if isinstance(self.facts.nvml, Missing):
            self.gpu_index = {address: index for index, address in enumerate(gpus)}
        else:
            self.gpu_index = {address: gpu.index for address, gpu in self.nvml_by_pci.items()}

    def _sort_devices(self) -> None:
        """GPUs by index and HCAs by name, in the places that GPUs and HCAs take in the order."""
        for kind, key in (
            (model.Gpu, lambda n: (n.index is None, n.index or 0, sort_key(n.pci or ""))),
            (model.Hca, lambda n: natural(n.id)),
        ):
            ids = [node.id for node in self.nodes.values() if isinstance(node, kind)]
            ordered = iter(sorted((self.nodes[i] for i in ids), key=key))  # type: ignore[no-any-return,arg-type]
            self.nodes = {
                node.id: node
                for node in (
                    next(ordered) if isinstance(old, kind) else old for old in self.nodes.values()
                )
            }

    def _parent(self, function: PciFunction) -> str:
        """The id of the bridge or root complex above, which is added when it is first met."""
        for address in reversed(function.parents):
            if address in self.ids:
                return self.ids[address]
        if function.root_complex is None:
            return "machine"
        bridge_id = f"pci{function.root_complex}"
        if bridge_id not in self.nodes:
            self._add_host_bridge(bridge_id, function.root_complex)
        return bridge_id

    def _add_host_bridge(self, bridge_id: str, root_complex: str) -> None:
        """A root complex has no NUMA node of its own in sysfs: it is where all below it are."""
        places: dict[int, str] = {}
        for function in self.functions.values():
            if function.root_complex == root_complex and not function.parents:
                place = self.locality.place(function, ABSENT, "")
                if place.numa is not None:
                    places.setdefault(place.numa, place.source)
        numa = next(iter(places)) if len(places) == 1 else None
        missing: dict[str, Missing] = {}
        if numa is None:
            why = f"functions below are on nodes {sorted(places)}" if places else "no node is named"
            missing["numa"] = Missing("unsupported", why)
        self.add(
            model.HostBridge(
                id=bridge_id,
                name=bridge_id,
                parent=f"numa{numa}" if numa is not None else "machine",
                numa=numa,
                cpus=self.cpu_nodes.get(numa) if numa is not None else None,
                sources={"numa": places[numa]} if numa is not None else {},
                missing=missing,
            )
        )

    def _add_function(
        self,
        function: PciFunction,
        rdma: dict[str, list[RdmaDevice]],
        interfaces: dict[str, list[NetDevice]],
        drives: dict[str, NvmeDrive],
    ) -> None:
        address = function.address
        if function.base_class == CLASS_BRIDGE:
            self._add_bridge(function)
        elif function.is_gpu:
            self._add_gpu(function, self.nvml_by_pci.get(address))
        elif function.is_nvswitch:
            self._add_nvswitch(function)
        elif address in rdma:
            for device in rdma[address]:
                self._add_hca(function, device, interfaces.get(address, []))
        elif function.base_class >> 8 == 0x02:
            self._add_nic(function, interfaces.get(address, []))
        elif function.base_class == CLASS_NVME:
            self._add_nvme(function, drives.get(address))
        else:
            place = self._place(function)
            self.ids[address] = address
            self.add(
                model.PciDevice(
                    id=address,
                    parent=self._parent(function),
                    pci=address,
                    numa=place.numa,
                    cpus=self._cpus(place),
                    class_code=function.class_code,
                    vendor=function.vendor,
                    device=function.device,
                    sources=_sources(place),
                    missing=_reasons(place),
                )
            )

    def _place(
        self, function: PciFunction | None, gpu: NvmlGpu | None = None, subject: str = ""
    ) -> Place:
        nodes: Fact[list[int]] = gpu.memory_nodes if gpu else ABSENT
        source = f"nvmlDeviceGetMemoryAffinity({gpu.index})" if gpu else ""
        if function is None:
            with_cpus = [n for n in known(nodes, []) or [] if n in self.cpu_nodes]
            if len(with_cpus) == 1:
                return Place(with_cpus[0], source)
            return Place(None, source, Missing("absent", "no PCI function"))
        place = self.locality.place(function, nodes, source)
        for other, other_source in place.others if subject else ():
            self.disagreements.append(
                Disagreement(
                    subjects=[subject],
                    fact="numa",
                    kept=str(place.numa),
                    kept_source=place.source,
                    other=str(other),
                    other_source=other_source,
                )
            )
        return place

    def _cpus(self, place: Place) -> str | None:
        return self.cpu_nodes.get(place.numa) if place.numa is not None else None

    def _add_bridge(self, function: PciFunction) -> None:
        place = self._place(function)
        parent = self._parent(function)
        found = Found(_reasons(place))
        sources = _sources(place)
        role = function.port_type if isinstance(function.port_type, str) else None
        if role is None or role.startswith("unknown"):
            role = self._role_in_tree(function)
            sources["role"] = "its place in the PCI tree"
        acs = found.get_or("acs", function.acs_control)
        self.ids[function.address] = function.address
        self.add(
            model.PciBridge(
                id=function.address,
                parent=parent,
                pci=function.address,
                numa=place.numa,
                cpus=self._cpus(place),
                role=role,
                vendor=function.vendor,
                device=function.device,
                pcie=self._pcie(function, role, found),
                acs=None if acs is None else [w for bit, w in ACS_BITS.items() if acs & bit],
                iommu_type=found.get_or("iommu_type", function.iommu_type),
                sources=sources,
                missing=dict(found),
            )
        )

    def _role_in_tree(self, function: PciFunction) -> str:
        """Root port below a root complex; below a switch's upstream port a downstream port.

        Config space says it outright but is readable by root only. In a PCIe tree the roles follow
        from the level, since a root or downstream port has one link with one device below it.
        """
        above = self.nodes.get(self._parent(function))
        if not isinstance(above, model.PciBridge):
            return "root-port"
        return "downstream-port" if above.role == "upstream-port" else "upstream-port"

    def _pcie(self, function: PciFunction, role: str, found: Found) -> Pcie | None:
        """The link above a device; of a root or downstream port its own link, which is below."""
        end = function.link
        if end is None:
            return None
        facts = (end.speed, end.width, end.max_speed, end.max_width)
        if all(isinstance(fact, Missing) for fact in facts):
            reason = end.max_width
            assert isinstance(reason, Missing)
            if reason.reason != "absent":
                found["pcie"] = reason
            return None
        speed = found.get_or("pcie.speed_gts", end.speed)
        width = found.get_or("pcie.width", end.width)
        own_speed = found.get_or("pcie.device_max_speed_gts", end.max_speed)
        own_width = found.get_or("pcie.device_max_width", end.max_width)
        port_speed: float | None = None
        port_width: int | None = None
        if role not in ("root-port", "downstream-port"):
            port = self.functions.get(function.parents[-1]) if function.parents else None
            if port is not None and port.link is not None:
                port_speed = found.get_or("pcie.port_max_speed_gts", port.link.max_speed)
                port_width = found.get_or("pcie.port_max_width", port.link.max_width)
            else:
                found["pcie.port_max_speed_gts"] = Missing("absent", "no port above is visible")
        both_speeds, both_widths = (own_speed, port_speed), (own_width, port_width)
        own_port = role in ("root-port", "downstream-port")
        return Pcie(
            speed_gts=speed,
            width=width,
            max_speed_gts=own_speed if own_port else _least(both_speeds),
            max_width=own_width if own_port else _least(both_widths),
            device_max_speed_gts=own_speed,
            device_max_width=own_width,
            port_max_speed_gts=port_speed,
            port_max_width=port_width,
        )

    def _add_gpu(self, function: PciFunction | None, gpu: NvmlGpu | None) -> None:
        nvml = self.facts.nvml
        address = function.address if function else known(gpu.pci) if gpu else None
        index = gpu.index if gpu else self.gpu_index.get(address or "")
        node_id = self.unique(f"gpu{index}" if index is not None else f"gpu@{address}")
        found = Found()
        sources: dict[str, str] = {}
        place = self._place(function, gpu, node_id)
        found.update(_reasons(place))
        sources.update(_sources(place))
        if isinstance(nvml, Missing):
            sources["index"] = "PCI order (NVML is missing)"
            found["nvml"] = nvml
        elif gpu is None:
            found["index"] = Missing("absent", "NVML does not list this GPU")
        pcie = self._pcie(function, "endpoint", found) if function else None
        if gpu is not None:
            pcie = _with_nvml(pcie, gpu, found, sources)
        if address:
            self.ids[address] = node_id

        def ask(field: str, fact: Fact[model.Any]) -> model.Any:
            return found.get_or(field, fact)

        absent: Missing = nvml if isinstance(nvml, Missing) else found.get("index", ABSENT)
        lost = nvml.lost.get(gpu.index) if gpu and isinstance(nvml, NvmlFacts) else None
        memory_numa = gpu.numa_id if gpu else absent
        if isinstance(memory_numa, int) and memory_numa in self.cpu_nodes:
            memory_numa = Missing("absent", "NVML names a node with CPUs")
        self.add(
            model.Gpu(
                id=node_id,
                name=ask("name", gpu.name if gpu else absent),
                parent=self._parent(function) if function else "machine",
                pci=address,
                numa=place.numa,
                cpus=self._cpus(place),
                index=index,
                uuid=ask("uuid", gpu.uuid if gpu else absent),
                architecture=ask("architecture", gpu.architecture if gpu else absent),
                compute_capability=ask(
                    "compute_capability", gpu.compute_capability if gpu else absent
                ),
                memory_bytes=ask("memory_bytes", gpu.memory_bytes if gpu else absent),
                bar1_bytes=ask("bar1_bytes", gpu.bar1_bytes if gpu else absent),
                memory_numa=ask("memory_numa", memory_numa),
                minor=ask("minor", gpu.minor if gpu else absent),
                vendor=function.vendor if function else None,
                device=function.device if function else None,
                driver=ask("driver", function.driver) if function else None,
                iommu_type=ask("iommu_type", function.iommu_type) if function else None,
                pcie=pcie,
                nvlink=_nvlinks(gpu, found) if gpu else None,
                fabric=_fabric(gpu, found) if gpu else None,
                mig_mode=_flag(ask("mig_mode", gpu.mig_mode if gpu else absent)),
                mig=[
                    model.Mig(index=m.index, uuid=m.uuid, name=m.name, memory_bytes=m.memory_bytes)
                    for m in (gpu.mig if gpu else [])
                ],
                persistence=ask("persistence", gpu.persistence if gpu else absent),
                performance_state=ask(
                    "performance_state", gpu.performance_state if gpu else absent
                ),
                processes=_count(ask("processes", gpu.processes if gpu else absent)),
                lost=str(lost) if lost is not None else None,
                sources=sources,
                missing=dict(found),
            )
        )

    def _add_nvswitch(self, function: PciFunction) -> None:
        place = self._place(function)
        found = Found(_reasons(place))
        number = sum(isinstance(node, model.NvSwitch) for node in self.nodes.values())
        node_id = self.unique(f"nvswitch{number}")
        self.ids[function.address] = node_id
        self.add(
            model.NvSwitch(
                id=node_id,
                parent=self._parent(function),
                pci=function.address,
                numa=place.numa,
                cpus=self._cpus(place),
                device=function.device,
                pcie=self._pcie(function, "endpoint", found),
                sources=_sources(place),
                missing=dict(found),
            )
        )

    def _add_hca(
        self, function: PciFunction | None, device: RdmaDevice, interfaces: list[NetDevice]
    ) -> None:
        node_id = self.unique(device.name)
        place = (
            self._place(function, None, node_id)
            if function
            else Place(None, "", device.pci if isinstance(device.pci, Missing) else ABSENT)
        )
        found = Found(_reasons(place))
        if function is None:
            found["pci"] = (
                device.pci
                if isinstance(device.pci, Missing)
                else Missing("absent", f"{device.pci} is not among the PCI functions")
            )
        else:
            self.ids.setdefault(function.address, node_id)
        self.add(
            model.Hca(
                id=node_id,
                name=device.name,
                parent=self._parent(function) if function else "machine",
                pci=function.address if function else known(device.pci),
                numa=place.numa,
                cpus=self._cpus(place),
                ports=[
                    model.Port(
                        port=port.port,
                        state=found.get_or(f"ports.{port.port}.state", port.state),
                        physical_state=found.get_or(
                            f"ports.{port.port}.physical_state", port.physical_state
                        ),
                        link_layer=found.get_or(f"ports.{port.port}.link_layer", port.link_layer),
                        rate_gbps=found.get_or(f"ports.{port.port}.rate_gbps", port.rate_gbps),
                    )
                    for port in device.ports
                ],
                software=device.software,
                netdevs=device.netdevs or [interface.name for interface in interfaces],
                firmware=found.get_or("firmware", device.firmware),
                board_id=found.get_or("board_id", device.board_id),
                model=found.get_or("model", device.hca_type),
                vendor=function.vendor if function else None,
                device=function.device if function else None,
                driver=found.get_or("driver", function.driver) if function else None,
                iommu_type=found.get_or("iommu_type", function.iommu_type) if function else None,
                pcie=self._pcie(function, "endpoint", found) if function else None,
                physical_function=function.physical_function if function else None,
                virtual_functions=function.virtual_functions if function else 0,
                sources=_sources(place),
                missing=dict(found),
            )
        )

    def _add_nic(self, function: PciFunction, interfaces: list[NetDevice]) -> None:
        node_id = self.unique(interfaces[0].name if interfaces else function.address)
        place = self._place(function, None, node_id)
        found = Found(_reasons(place))
        speed: Fact[int] = interfaces[0].speed_mbps if interfaces else ABSENT
        mbps = found.get_or("speed_gbps", speed)
        self.ids[function.address] = node_id
        self.add(
            model.Nic(
                id=node_id,
                name=interfaces[0].name if interfaces else None,
                parent=self._parent(function),
                pci=function.address,
                numa=place.numa,
                cpus=self._cpus(place),
                netdevs=[interface.name for interface in interfaces],
                vendor=function.vendor,
                device=function.device,
                state=found.get_or("state", interfaces[0].state) if interfaces else None,
                speed_gbps=mbps / 1000 if mbps else None,
                default_route=any(interface.default_route for interface in interfaces),
                driver=found.get_or("driver", function.driver),
                pcie=self._pcie(function, "endpoint", found),
                physical_function=function.physical_function,
                virtual_functions=function.virtual_functions,
                sources=_sources(place),
                missing=dict(found),
            )
        )

    def _add_nvme(self, function: PciFunction, drive: NvmeDrive | None) -> None:
        node_id = self.unique(drive.name if drive else function.address)
        place = self._place(function, None, node_id)
        found = Found(_reasons(place))
        self.ids[function.address] = node_id
        self.add(
            model.Nvme(
                id=node_id,
                name=drive.name if drive else None,
                parent=self._parent(function),
                pci=function.address,
                numa=place.numa,
                cpus=self._cpus(place),
                model=found.get_or("model", drive.model) if drive else None,
                vendor=function.vendor,
                device=function.device,
                driver=found.get_or("driver", function.driver),
                pcie=self._pcie(function, "endpoint", found),
                sources=_sources(place),
                missing=dict(found),
            )
        )

    # Links

    def add_links(self) -> None:
        for node in list(self.nodes.values()):
            pcie = getattr(node, "pcie", None)
            above = self.nodes.get(node.parent or "")
            if pcie is None or not isinstance(above, (model.PciBridge, model.HostBridge)):
                continue
            if isinstance(node, model.PciBridge) and node.role in ("root-port", "downstream-port"):
                continue
            self.links.append(_pcie_link(above.id, node.id, pcie))
        nvml = known(self.facts.nvml)
        for gpu in nvml.gpus if nvml else []:
            self._add_nvlinks(gpu)
            self._add_c2c(gpu)

    def _gpu_id(self, gpu: NvmlGpu) -> str:
        return f"gpu{gpu.index}"

    def _add_nvlinks(self, gpu: NvmlGpu) -> None:
        """One link for each peer, with the number of active NVLinks; each pair of GPUs once."""
        counts: dict[str, int] = {}
        version: str | None = None
        speed: float | None = None
        for link in gpu.nvlinks:
            if link.active is not True:
                continue
            peer = self._nvlink_peer(known(link.remote), known(link.remote_type))
            if peer is None:
                continue
            counts[peer] = counts.get(peer, 0) + 1
            version = _nvlink_version(known(link.version)) or version
            speed = nvlink_table.gbytes_per_s(version, known(link.mbytes_per_s)) or speed
        own = self._gpu_id(gpu)
        for peer, count in counts.items():
            if isinstance(self.nodes.get(peer), model.Gpu) and self._listed(peer, own):
                continue
            self.links.append(
                Link(
                    a=own,
                    b=peer,
                    kind="nvlink",
                    count=count,
                    version=version,
                    gbytes_per_s=round(count * speed, 1) if speed else None,
                    max_gbytes_per_s=round(count * speed, 1) if speed else None,
                    state="up",
                )
            )

    def _listed(self, a: str, b: str) -> bool:
        return any(link.a == a and link.b == b for link in self.links if link.kind == "nvlink")

    def _nvlink_peer(self, remote: str | None, remote_type: str | None) -> str | None:
        """The id at the other end; a switch without PCI function becomes one of its own."""
        if remote is not None and remote in self.ids:
            return self.ids[remote]
        if remote_type == "switch":
            # Hidden switches cannot be told apart where the driver makes their address up; all of
            # a GPU's links to them together are what a peer can use either way.
            node_id = "nvswitch"
            if node_id not in self.nodes:
                reason = Missing("absent", "seen through the GPUs' links only")
                self.add(model.NvSwitch(id=node_id, parent="machine", missing={"pci": reason}))
            return node_id
        return None

    def _add_c2c(self, gpu: NvmlGpu) -> None:
        count, speed = known(gpu.c2c_links), known(gpu.c2c_mbytes_per_s)
        node = self.nodes.get(self._gpu_id(gpu))
        if not count or not isinstance(node, model.Gpu) or node.numa is None:
            return
        status = known(gpu.c2c_status)
        total = round(count * speed / 1000, 1) if speed else None
        self.links.append(
            Link(
                a=f"numa{node.numa}",
                b=node.id,
                kind="c2c",
                count=count,
                gbytes_per_s=total,
                max_gbytes_per_s=total,
                state={0: "down", 1: "up"}.get(status if status is not None else -1, "unknown"),
            )
        )


def _least(values: Iterable[model.Any]) -> model.Any:
    """The smaller of both ends; None while one end is unknown."""
    found = list(values)
    return None if None in found else min(found)


def _sources(place: Place) -> dict[str, str]:
    return {"numa": place.source} if place.numa is not None else {}


def _reasons(place: Place) -> dict[str, Missing]:
    return {"numa": place.missing} if place.missing is not None else {}


def _flag(value: int | None) -> bool | None:
    return None if value is None else value == 1


def _count(values: list[model.Any] | None) -> int | None:
    return None if values is None else len(values)


def _with_nvml(
    pcie: Pcie | None, gpu: NvmlGpu, found: Found, sources: dict[str, str]
) -> Pcie | None:
    """Fills what sysfs could not tell of a GPU's link. NVML's maximum is that of both ends."""
    now, most = known(gpu.pcie_generation), known(gpu.pcie_max_generation)
    width, most_width = known(gpu.pcie_width), known(gpu.pcie_max_width)
    own = known(gpu.pcie_gpu_max_generation)
    base = pcie or Pcie()
    filled: dict[str, model.Any] = {}
    for field, value, call in (
        ("speed_gts", SPEEDS.get(now or 0), "nvmlDeviceGetCurrPcieLinkGeneration"),
        ("width", width or None, "nvmlDeviceGetCurrPcieLinkWidth"),
        ("max_speed_gts", SPEEDS.get(most or 0), "nvmlDeviceGetMaxPcieLinkGeneration"),
        ("max_width", most_width or None, "nvmlDeviceGetMaxPcieLinkWidth"),
        ("device_max_speed_gts", SPEEDS.get(own or 0), "nvmlDeviceGetGpuMaxPcieLinkGeneration"),
    ):
        if getattr(base, field) is None and value is not None:
            filled[field] = value
            sources[f"pcie.{field}"] = f"{call}({gpu.index})"
            found.pop(f"pcie.{field}", None)
    if not filled:
        return pcie
    found.pop("pcie", None)
    return msgspec.structs.replace(base, **filled)


def _nvlinks(gpu: NvmlGpu, found: Found) -> model.NvLinks | None:
    if isinstance(gpu.nvlink_count, Missing) and not gpu.nvlinks:
        found["nvlink"] = gpu.nvlink_count
        return None
    unreadable = [link for link in gpu.nvlinks if isinstance(link.active, Missing)]
    if unreadable:
        assert isinstance(unreadable[0].active, Missing)
        found["nvlink.active"] = unreadable[0].active
    versions = [v for v in (_nvlink_version(known(link.version)) for link in gpu.nvlinks) if v]
    speeds = [known(link.mbytes_per_s) for link in gpu.nvlinks if link.active is True]
    version = versions[0] if versions else None
    return model.NvLinks(
        count=len(gpu.nvlinks),
        active=None if unreadable else sum(link.active is True for link in gpu.nvlinks),
        inactive=[link.index for link in gpu.nvlinks if link.active is False],
        version=version,
        gbytes_per_s=nvlink_table.gbytes_per_s(
            version, min((s for s in speeds if s), default=None)
        ),
    )


def _nvlink_version(number: int | None) -> str | None:
    """The generation; a number newer than the table keeps its number."""
    if not number:
        return None
    return nvlink_table.VERSIONS.get(number, f"unknown ({number})")


def _fabric(gpu: NvmlGpu, found: Found) -> model.GpuFabric | None:
    fabric = found.get_or("fabric", gpu.fabric)
    if fabric is None:
        return None
    return model.GpuFabric(
        state=fabric.state,
        status=fabric.status,
        cluster=fabric.cluster,
        clique=fabric.clique,
        health_mask=fabric.health_mask,
        health_summary=fabric.health_summary,
    )


def _pcie_link(above: str, below: str, pcie: Pcie) -> Link:
    """The PCIe link between a port and what is below it."""
    now = most = version = None
    if pcie.speed_gts is not None and pcie.width is not None:
        now = gbytes_per_s(pcie.speed_gts, pcie.width)
        generation = GENERATIONS.get(pcie.speed_gts)
        version = f"Gen{generation}" if generation else f"{pcie.speed_gts:g} GT/s"
    if pcie.max_speed_gts is not None and pcie.max_width is not None:
        most = gbytes_per_s(pcie.max_speed_gts, pcie.max_width)
    return Link(
        a=above,
        b=below,
        kind="pcie",
        count=pcie.width,
        version=version,
        gbytes_per_s=now,
        max_gbytes_per_s=most,
        state="up" if now else "unknown",
    )


def _with_nearest(topology: Topology) -> Topology:
    """Fills each GPU's nearest HCAs, and notes where the driver's classes differ from ours."""
    hcas = [hca for hca in topology.physical_hcas if hca.pci is not None]
    for gpu in topology.gpus:
        classes = {hca.id: topology.path_class(gpu.id, hca.id) for hca in hcas}
        if not classes:
            continue
        best = min(classes.values(), key=rank)
        topology.nodes[gpu.id] = msgspec.structs.replace(
            gpu,
            nearest_hcas=[hca for hca, found in classes.items() if found == best],
            nearest_hca_class=best,
        )
    topology.__dict__.pop("gpus", None)
    topology.disagreements.extend(_compare_matrix(topology))
    topology.disagreements.extend(_compare_ancestors(topology))
    return topology


def _compare_ancestors(topology: Topology) -> list[Disagreement]:
    """Pairs of GPUs whose common PCIe ancestor NVML sees otherwise than the PCI tree here."""
    nvml = known(topology.facts.nvml)
    found: list[Disagreement] = []
    alone = len(topology.cpu_nodes) <= 1
    for pair in nvml.pairs if nvml else []:
        a, b = f"gpu{pair.a}", f"gpu{pair.b}"
        if pair.a > pair.b or a not in topology.nodes or b not in topology.nodes:
            continue
        ours = topology.pcie_class(a, b)
        other = known(pair.ancestor)
        if other is None or ours == other or (alone and {ours, other} == {"NODE", "SYS"}):
            continue
        found.append(
            Disagreement(
                subjects=[a, b],
                fact="PCIe common ancestor",
                kept=ours,
                kept_source="the PCI tree",
                other=other,
                other_source=f"nvmlDeviceGetTopologyCommonAncestor({pair.a}, {pair.b})",
            )
        )
    return found


def _compare_matrix(topology: Topology) -> list[Disagreement]:
    """Cells of ``nvidia-smi topo -m`` that differ from the classes computed here."""
    smi = known(topology.facts.nvidia_smi)
    if smi is None:
        return []
    found: list[Disagreement] = []
    devices = {label(node): node for node in [*topology.gpus, *topology.physical_hcas]}
    alone = len(topology.cpu_nodes) <= 1
    for row, cells in smi.rows.items():
        for column, cell in cells.items():
            a, b = devices.get(row), devices.get(column)
            if a is None or b is None or a.id >= b.id:
                continue
            ours = topology.path_class(a.id, b.id)
            # The driver says SYS for different host bridges of a machine with one NUMA node.
            if ours == cell or (alone and {ours, cell} == {"NODE", "SYS"}):
                continue
            found.append(
                Disagreement(
                    subjects=[a.id, b.id],
                    fact="path class",
                    kept=ours,
                    kept_source="the PCI tree and NVLink",
                    other=cell,
                    other_source="nvidia-smi topo -m",
                )
            )
    return found
