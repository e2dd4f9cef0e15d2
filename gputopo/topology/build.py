"""From facts to the graph: joins what the probes read on PCI addresses, CPUs and NUMA nodes."""

from __future__ import annotations

import msgspec

from gputopo.cpulist import parse
from gputopo.facts import ABSENT, Fact, Missing, ProbeStatus, known
from gputopo.probes.cpu import CpuModel
from gputopo.probes.facts import Facts
from gputopo.probes.system import SystemFacts
from gputopo.topology import model
from gputopo.topology.compare import compare_ancestors, compare_matrix, compare_numactl
from gputopo.topology.devices import Devices
from gputopo.topology.draft import Draft, Found
from gputopo.topology.from_matrix import add_matrix
from gputopo.topology.graph import Topology
from gputopo.topology.links import add_links
from gputopo.topology.paths import rank
from gputopo.topology.processors import add_machine, add_processors

__all__ = ["Facts", "build", "virtualization"]


def build(
    facts: Facts,
    *,
    source_kind: str = "live",
    source_name: str = "this machine",
    captured_at: str | None = None,
    probes: list[ProbeStatus] | None = None,
) -> Topology:
    """The topology that the facts describe. Never raises for what a machine may say."""
    draft = Draft(facts)
    add_machine(draft)
    add_processors(draft)
    Devices(draft).add_all()
    add_links(draft)
    add_matrix(draft)
    topology = Topology(
        source_kind=source_kind,
        source_name=source_name,
        captured_at=captured_at,
        host=_host_info(facts),
        probes=probes or [],
        nodes=draft.nodes.values(),
        links=draft.links,
        disagreements=draft.disagreements,
        facts=facts,
        printed=draft.printed,
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


def _with_nearest(topology: Topology) -> Topology:
    """Fills each GPU's nearest HCAs, and notes where the driver's classes differ from ours."""
    for gpu in topology.gpus:
        classes = {
            hca.id: topology.path_class(gpu.id, hca.id)
            for hca in topology.physical_hcas
            if hca.pci is not None or (gpu.id, hca.id) in topology.printed.classes
        }
        if not classes:
            continue
        best = min(classes.values(), key=rank)
        topology.nodes[gpu.id] = msgspec.structs.replace(
            gpu,
            nearest_hcas=[hca for hca, found in classes.items() if found == best],
            nearest_hca_class=best,
        )
    topology.__dict__.pop("gpus", None)
    for compare in (compare_numactl, compare_matrix, compare_ancestors):
        topology.disagreements.extend(compare(topology))
    return topology
