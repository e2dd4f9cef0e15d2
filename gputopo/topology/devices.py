"""PCI functions as nodes, joined with what NVML, RDMA, network and NVMe say of the same address."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gputopo.facts import ABSENT, Fact, Missing, known
from gputopo.pciaddr import sort_key
from gputopo.probes.net import NetDevice, NvmeDrive
from gputopo.probes.nvml import NvmlFacts, NvmlGpu
from gputopo.probes.pci import ACS_BITS, CLASS_BRIDGE, CLASS_NVME, PciFunction
from gputopo.probes.rdma import RdmaDevice, natural
from gputopo.topology import model
from gputopo.topology.draft import Draft, Found, reasons_of, sources_of
from gputopo.topology.gpu import fabric_of, nvlinks_of, with_nvml
from gputopo.topology.locality import Place
from gputopo.topology.model import Disagreement, Pcie


class Devices:
    """Adds the devices of a machine to a draft."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def add_all(self) -> None:
        """Adds every PCI function, and GPUs and RDMA devices that have none."""
        nvml_gpus = self._nvml_gpus()
        self.nvml_by_pci: dict[str, NvmlGpu] = {}
        for gpu in nvml_gpus:
            if isinstance(gpu.pci, str):
                self.nvml_by_pci.setdefault(gpu.pci, gpu)
        rdma: dict[str, list[RdmaDevice]] = {}
        for device in self._rdma():
            if isinstance(device.pci, str):
                rdma.setdefault(device.pci, []).append(device)
        net = known(self.draft.facts.net)
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
            self.draft.functions.values(), key=lambda f: (len(f.parents), sort_key(f.address))
        ):
            self._add_function(function, rdma, interfaces, drives)
        for gpu in nvml_gpus:
            if not isinstance(gpu.pci, str) or gpu.pci not in self.draft.ids:
                self._add_gpu(None, gpu)
        for device in self._rdma():
            if not isinstance(device.pci, str) or device.pci not in self.draft.functions:
                self._add_hca(None, device, [])
        self._sort_devices()

    def _rdma(self) -> list[RdmaDevice]:
        rdma = known(self.draft.facts.rdma)
        return rdma.devices if rdma else []

    def _nvml_gpus(self) -> list[NvmlGpu]:
        """NVML's GPUs; pasted ones without address have that of their place in PCI order, in which
        NVML numbers them, if as many are on the bus."""
        nvml = known(self.draft.facts.nvml)
        gpus = nvml.gpus if nvml else []
        addresses = self._gpu_addresses()
        whole = len(gpus) == len(addresses) and [g.index for g in gpus] == list(range(len(gpus)))
        if not whole or any(isinstance(gpu.pci, str) for gpu in gpus):
            return gpus
        return [msgspec.structs.replace(gpu, pci=address) for gpu, address in zip(gpus, addresses)]

    def _gpu_addresses(self) -> list[str]:
        return sorted((f.address for f in self.draft.functions.values() if f.is_gpu), key=sort_key)

    def _number_gpus(self) -> None:
        """GPU numbers: NVML's. Without NVML, PCI order, which is how NVML would count."""
        gpus = self._gpu_addresses()
        if isinstance(self.draft.facts.nvml, Missing):
            pci, smi = known(self.draft.facts.pci), known(self.draft.facts.nvidia_smi)
            columns = [d for d in smi.devices if d.startswith("GPU")] if smi else []
            counted = (pci is not None and pci.whole) or len(columns) == len(gpus)
            self.gpu_index = {a: i for i, a in enumerate(gpus)} if counted else {}
        else:
            self.gpu_index = {address: gpu.index for address, gpu in self.nvml_by_pci.items()}

    def _sort_devices(self) -> None:
        """GPUs by index and HCAs by name, in the places that GPUs and HCAs take in the order."""
        for kind, key in (
            (model.Gpu, lambda n: (n.index is None, n.index or 0, sort_key(n.pci or ""))),
            (model.Hca, lambda n: natural(n.id)),
        ):
            ids = [node.id for node in self.draft.nodes.values() if isinstance(node, kind)]
            ordered = iter(sorted((self.draft.nodes[i] for i in ids), key=key))
            self.draft.nodes = {
                node.id: node
                for node in (
                    next(ordered) if isinstance(old, kind) else old
                    for old in self.draft.nodes.values()
                )
            }

    def _parent(self, function: PciFunction) -> str:
        """The id of the bridge or root complex above, which is added when it is first met."""
        for address in reversed(function.parents):
            if address in self.draft.ids:
                return self.draft.ids[address]
        if function.root_complex is None:
            return "machine"
        bridge_id = f"pci{function.root_complex}"
        if bridge_id not in self.draft.nodes:
            self._add_host_bridge(bridge_id, function.root_complex)
        return bridge_id

    def _add_host_bridge(self, bridge_id: str, root_complex: str) -> None:
        """A root complex has no NUMA node of its own in sysfs: it is where all below it are."""
        below = [f for f in self.draft.functions.values() if f.root_complex == root_complex]
        # Its own bus first. A picture of the tree names no node for what stands there.
        places = self._places(f for f in below if not f.parents) or self._places(below)
        numa = next(iter(places)) if len(places) == 1 else None
        missing: dict[str, Missing] = {}
        if numa is None:
            why = f"functions below are on nodes {sorted(places)}" if places else "no node is named"
            missing["numa"] = Missing("unsupported", why)
        self.draft.add(
            model.HostBridge(
                id=bridge_id,
                name=bridge_id,
                parent=f"numa{numa}" if f"numa{numa}" in self.draft.nodes else "machine",
                numa=numa,
                cpus=self.draft.cpu_nodes.get(numa) if numa is not None else None,
                sources={"numa": places[numa]} if numa is not None else {},
                missing=missing,
            )
        )

    def _places(self, functions: Iterable[PciFunction]) -> dict[int, str]:
        """The NUMA nodes of functions, and where the first of each was read."""
        places: dict[int, str] = {}
        for function in functions:
            place = self.draft.locality.place(function, ABSENT, "")
            if place.numa is not None:
                places.setdefault(place.numa, place.source)
        return places

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
            self.draft.ids[address] = address
            self.draft.add(
                model.PciDevice(
                    id=address,
                    parent=self._parent(function),
                    pci=address,
                    numa=place.numa,
                    cpus=self._cpus(place),
                    class_code=function.class_code,
                    vendor=function.vendor,
                    device=function.device,
                    sources=sources_of(place),
                    missing=reasons_of(place),
                )
            )

    def _place(
        self, function: PciFunction | None, gpu: NvmlGpu | None = None, subject: str = ""
    ) -> Place:
        nodes: Fact[list[int]] = gpu.memory_nodes if gpu else ABSENT
        source = f"nvmlDeviceGetMemoryAffinity({gpu.index})" if gpu else ""
        if function is None:
            with_cpus = [n for n in known(nodes, []) or [] if n in self.draft.cpu_nodes]
            if len(with_cpus) == 1:
                return Place(with_cpus[0], source)
            return Place(None, source, Missing("absent", "no PCI function"))
        place = self.draft.locality.place(function, nodes, source)
        for other, other_source in place.others if subject else ():
            self.draft.disagreements.append(
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
        return self.draft.cpu_nodes.get(place.numa) if place.numa is not None else None

    def _add_bridge(self, function: PciFunction) -> None:
        place = self._place(function)
        parent = self._parent(function)
        found = Found(reasons_of(place))
        sources = sources_of(place)
        role = function.port_type if isinstance(function.port_type, str) else None
        if role is None or role.startswith("unknown"):
            role = self._role_in_tree(function)
            sources["role"] = "its place in the PCI tree"
        acs = found.get_or("acs", function.acs_control)
        self.draft.ids[function.address] = function.address
        self.draft.add(
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
        above = self.draft.nodes.get(self._parent(function))
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
            port = self.draft.functions.get(function.parents[-1]) if function.parents else None
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
        nvml = self.draft.facts.nvml
        address = function.address if function else known(gpu.pci) if gpu else None
        index = gpu.index if gpu else self.gpu_index.get(address or "")
        node_id = self.draft.unique(f"gpu{index}" if index is not None else f"gpu@{address}")
        found = Found()
        sources: dict[str, str] = {}
        place = self._place(function, gpu, node_id)
        found.update(reasons_of(place))
        sources.update(sources_of(place))
        if isinstance(nvml, Missing):
            found["nvml"] = nvml
            if index is None:
                found["index"] = Missing("absent", "not all GPUs of the machine are listed")
            else:
                sources["index"] = "PCI order (NVML is missing)"
        elif gpu is None:
            found["index"] = Missing("absent", "NVML does not list this GPU")
        pcie = self._pcie(function, "endpoint", found) if function else None
        if gpu is not None:
            pcie = with_nvml(pcie, gpu, found, sources)
        if address:
            self.draft.ids[address] = node_id

        def ask(field: str, fact: Fact[Any]) -> Any:
            return found.get_or(field, fact)

        absent: Missing = nvml if isinstance(nvml, Missing) else found.get("index", ABSENT)
        name: Fact[str] = gpu.name if gpu else absent
        if isinstance(name, Missing) and function and function.product:
            name = function.product
            sources["name"] = "lspci"
        lost = nvml.lost.get(gpu.index) if gpu and isinstance(nvml, NvmlFacts) else None
        memory_numa = gpu.numa_id if gpu else absent
        if isinstance(memory_numa, int) and memory_numa in self.draft.cpu_nodes:
            memory_numa = Missing("absent", "NVML names a node with CPUs")
        self.draft.add(
            model.Gpu(
                id=node_id,
                name=ask("name", name),
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
                nvlink=nvlinks_of(gpu, found) if gpu else None,
                fabric=fabric_of(gpu, found) if gpu else None,
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
        found = Found(reasons_of(place))
        number = sum(isinstance(node, model.NvSwitch) for node in self.draft.nodes.values())
        node_id = self.draft.unique(f"nvswitch{number}")
        self.draft.ids[function.address] = node_id
        self.draft.add(
            model.NvSwitch(
                id=node_id,
                parent=self._parent(function),
                pci=function.address,
                numa=place.numa,
                cpus=self._cpus(place),
                device=function.device,
                pcie=self._pcie(function, "endpoint", found),
                sources=sources_of(place),
                missing=dict(found),
            )
        )

    def _add_hca(
        self, function: PciFunction | None, device: RdmaDevice, interfaces: list[NetDevice]
    ) -> None:
        node_id = self.draft.unique(device.name)
        place = (
            self._place(function, None, node_id)
            if function
            else Place(None, "", device.pci if isinstance(device.pci, Missing) else ABSENT)
        )
        found = Found(reasons_of(place))
        if function is None:
            found["pci"] = (
                device.pci
                if isinstance(device.pci, Missing)
                else Missing("absent", f"{device.pci} is not among the PCI functions")
            )
        else:
            self.draft.ids.setdefault(function.address, node_id)
        self.draft.add(
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
                sources=sources_of(place),
                missing=dict(found),
            )
        )

    def _add_nic(self, function: PciFunction, interfaces: list[NetDevice]) -> None:
        node_id = self.draft.unique(interfaces[0].name if interfaces else function.address)
        place = self._place(function, None, node_id)
        found = Found(reasons_of(place))
        speed: Fact[int] = interfaces[0].speed_mbps if interfaces else ABSENT
        mbps = found.get_or("speed_gbps", speed)
        if isinstance(self.draft.facts.net, Missing):
            found["netdevs"] = self.draft.facts.net
        self.draft.ids[function.address] = node_id
        self.draft.add(
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
                sources=sources_of(place),
                missing=dict(found),
            )
        )

    def _add_nvme(self, function: PciFunction, drive: NvmeDrive | None) -> None:
        node_id = self.draft.unique(drive.name if drive else function.address)
        place = self._place(function, None, node_id)
        found = Found(reasons_of(place))
        self.draft.ids[function.address] = node_id
        self.draft.add(
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
                sources=sources_of(place),
                missing=dict(found),
            )
        )


def _least(values: Iterable[Any]) -> Any:
    """The smaller of both ends; None while one end is unknown."""
    found = list(values)
    return None if None in found else min(found)


def _flag(value: int | None) -> bool | None:
    return None if value is None else value == 1


def _count(values: list[Any] | None) -> int | None:
    return None if values is None else len(values)
