"""CPUs: packages, cores, threads, L3 groups, what is online and what this process may use."""

from __future__ import annotations

import msgspec

from gputopo.cpulist import is_index, parse, render
from gputopo.facts import ABSENT, Fact, Missing, Problem
from gputopo.host.base import Host
from gputopo.probes.read import cpus, integer

CPUS = "/sys/devices/system/cpu"


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """One CPU package. ``index`` is the kernel's physical_package_id, which need not be unique."""

    index: Fact[int]
    cpus: str


class CpuModel(msgspec.Struct, frozen=True, kw_only=True):
    """What /proc/cpuinfo says of the first CPU. ``family`` and ``model`` are x86's numbers."""

    architecture: str
    name: Fact[str]
    vendor: Fact[str]
    family: Fact[int]
    model: Fact[int]
    hypervisor: bool


class CpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    online: str
    offline: str
    allowed: Fact[str]
    """CPUs that this process may run on (cpuset and affinity together)."""
    allowed_nodes: Fact[str]
    packages: list[Package]
    cores: list[str]
    """The hardware threads of each core, where the kernel tells."""
    l3_groups: list[str]
    governor: Fact[str]
    """The frequency governor of the first online CPU; ``mixed`` where CPUs differ."""
    model: Fact[CpuModel]
    frequency_driver: Fact[str] = ABSENT
    """What steers the clock of the first online CPU: ``intel_pstate``, ``acpi-cpufreq``."""
    problems: list[Problem]


def probe(host: Host) -> Fact[CpuFacts]:
    """The CPUs that the kernel knows; Missing when neither sysfs nor procfs tells of any."""
    cpuinfo = host.read_text("/proc/cpuinfo")
    names = host.list_dir(CPUS)
    present = {
        int(name[3:])
        for name in (names if isinstance(names, list) else [])
        if name.startswith("cpu") and is_index(name[3:])
    }
    online = _online(host, present)
    problems: list[Problem] = []
    if not online:
        if isinstance(cpuinfo, Missing):
            return names if isinstance(names, Missing) else cpuinfo
        online = _from_cpuinfo(cpuinfo)
        if not online:
            return Missing("unparsed", "no CPU in sysfs and none in /proc/cpuinfo")
        missing = names if isinstance(names, Missing) else Missing("absent")
        problems.append(Problem(CPUS, missing))
    status = host.read_text("/proc/self/status")
    return CpuFacts(
        online=render(online),
        offline=render(present - online),
        allowed=_status(status, "Cpus_allowed_list"),
        allowed_nodes=_status(status, "Mems_allowed_list"),
        packages=_packages(host, online),
        cores=_cores(host, online),
        l3_groups=_l3_groups(host, online),
        governor=_governor(host, online),
        model=_model(cpuinfo),
        frequency_driver=_frequency_driver(host, online),
        problems=problems,
    )


def _online(host: Host, present: set[int]) -> set[int]:
    listed = host.read_text(f"{CPUS}/online")
    if isinstance(listed, str):
        try:
            return set(parse(listed))
        except ValueError:
            pass
    # Kernels before 2.6.26 have no list; cpu0 cannot be taken offline and has no file.
    return {cpu for cpu in present if host.read_text(f"{CPUS}/cpu{cpu}/online") != "0"}


def _from_cpuinfo(text: str) -> set[int]:
    found: set[int] = set()
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == "processor" and is_index(value.strip()):
            found.add(int(value))
    return found


def _packages(host: Host, online: set[int]) -> list[Package]:
    """Packages by their sets of CPUs: ids repeat on some machines (one per cell on Itanium)."""
    packages: list[Package] = []
    placed: set[int] = set()
    for cpu in sorted(online):
        if cpu in placed:
            continue
        place = f"{CPUS}/cpu{cpu}/topology"
        index = integer(host.read_text(f"{place}/physical_package_id"))
        members = cpus(host, f"{place}/package_cpus_list", f"{place}/package_cpus")
        if isinstance(members, Missing):
            members = cpus(host, f"{place}/core_siblings_list", f"{place}/core_siblings")
        if isinstance(members, Missing):
            continue
        found = set(parse(members)) & online | {cpu}
        placed |= found
        packages.append(Package(index=index, cpus=render(found)))
    return packages


def _cores(host: Host, online: set[int]) -> list[str]:
    cores: list[str] = []
    placed: set[int] = set()
    for cpu in sorted(online):
        if cpu in placed:
            continue
        place = f"{CPUS}/cpu{cpu}/topology"
        threads = cpus(host, f"{place}/core_cpus_list", f"{place}/core_cpus")
        if isinstance(threads, Missing):
            threads = cpus(host, f"{place}/thread_siblings_list", f"{place}/thread_siblings")
        if isinstance(threads, Missing):
            continue
        members = set(parse(threads)) & online | {cpu}
        if len(members) > 1:
            # Two cores of an AMD Bulldozer module call each other siblings; their core ids differ.
            own = host.read_text(f"{place}/core_id")
            members = {
                other
                for other in members
                if other == cpu or host.read_text(f"{CPUS}/cpu{other}/topology/core_id") == own
            }
        placed |= members
        cores.append(render(members))
    return cores


def _l3_groups(host: Host, online: set[int]) -> list[str]:
    """The sets of CPUs that share one level-3 cache."""
    groups: list[str] = []
    placed: set[int] = set()
    index = ""
    for cpu in sorted(online):
        if cpu in placed:
            continue
        place = f"{CPUS}/cpu{cpu}/cache"
        if not index or host.read_text(f"{place}/{index}/level") != "3":
            index = _l3_index(host, place)
            if not index:
                if not groups:
                    return []  # no L3 on the first CPU: none on this machine
                continue
        shared = cpus(host, f"{place}/{index}/shared_cpu_list", f"{place}/{index}/shared_cpu_map")
        if isinstance(shared, str) and cpu in parse(shared):
            members = set(parse(shared)) & online
            placed |= members
            groups.append(render(members))
    return groups


def _l3_index(host: Host, place: str) -> str:
    names = host.list_dir(place)
    for name in names if isinstance(names, list) else []:
        if name.startswith("index") and host.read_text(f"{place}/{name}/level") == "3":
            return name
    return ""


def _governor(host: Host, online: set[int]) -> Fact[str]:
    seen: set[str] = set()
    for cpu in sorted(online):
        governor = host.read_text(f"{CPUS}/cpu{cpu}/cpufreq/scaling_governor")
        if isinstance(governor, Missing):
            return governor
        seen.add(governor.strip())
    return seen.pop() if len(seen) == 1 else "mixed: " + ", ".join(sorted(seen))


def _frequency_driver(host: Host, online: set[int]) -> Fact[str]:
    text = host.read_text(f"{CPUS}/cpu{min(online)}/cpufreq/scaling_driver")
    return text if isinstance(text, Missing) else text.strip()


def _status(text: Fact[str], key: str) -> Fact[str]:
    """A list of /proc/self/status, in canonical form."""
    if isinstance(text, Missing):
        return text
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == key:
            try:
                return render(parse(value.strip()))
            except ValueError as error:
                return Missing("unparsed", str(error))
    return Missing("unparsed", f"no {key} in /proc/self/status")


ARM_IMPLEMENTERS = {0x41: "Arm", 0x4E: "NVIDIA", 0x48: "HiSilicon", 0xC0: "Ampere", 0x50: "APM"}
"""MIDR_EL1 implementer codes (Arm architecture reference manual)."""

ARM_PARTS = {
    (0x41, 0xD4F): "Arm Neoverse V2",
    (0x41, 0xD40): "Arm Neoverse V1",
    (0x41, 0xD0C): "Arm Neoverse N1",
    (0x41, 0xD49): "Arm Neoverse N2",
    (0x41, 0xD85): "Arm Cortex-X925",
    (0x41, 0xD87): "Arm Cortex-A725",
}
"""MIDR_EL1 part numbers of Arm's own cores in GPU hosts (Grace is Neoverse V2; GB10 is X925)."""


def _model(text: Fact[str]) -> Fact[CpuModel]:
    if isinstance(text, Missing):
        return text
    # The first CPU's block, and the last one, where POWER names the platform.
    first, _, rest = text.partition("\n\n")
    fields: dict[str, str] = {}
    for line in [*first.splitlines(), *rest.rstrip().rpartition("\n\n")[2].splitlines()]:
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    absent = Missing("absent", "not in /proc/cpuinfo")
    name: Fact[str] = fields.get("model name") or fields.get("cpu") or absent
    vendor: Fact[str] = fields.get("vendor_id") or fields.get("vendor") or absent
    architecture = "unknown"
    if "CPU implementer" in fields:
        architecture = "aarch64"
        implementer = _number(fields["CPU implementer"])
        vendor = ARM_IMPLEMENTERS.get(implementer, fields["CPU implementer"])
        if isinstance(name, Missing):
            part = (implementer, _number(fields.get("CPU part", "")))
            name = ARM_PARTS.get(part, f"{vendor} part {fields.get('CPU part', '?')}")
    elif "IBM/S390" in fields.get("vendor_id", ""):
        architecture = "s390x"
    elif fields.get("family", "").startswith("IA-64") or "IA-64" in fields.get("arch", ""):
        architecture = "ia64"
    elif "flags" in fields:
        architecture = "x86_64" if " lm " in f" {fields['flags']} " else "i386"
    elif "POWER" in fields.get("cpu", "") or "PowerNV" in fields.get("platform", ""):
        architecture = "ppc64"
        vendor = "IBM"
    return CpuModel(
        architecture=architecture,
        name=" ".join(name.split()) if isinstance(name, str) else name,
        vendor=vendor,
        family=integer(fields.get("cpu family", absent)),
        model=integer(fields.get("model", absent)),
        hypervisor="hypervisor" in fields.get("flags", "").split(),
    )


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return -1
