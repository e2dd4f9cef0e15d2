"""Bundled machines as the tests of several families change them."""

from __future__ import annotations

from pathlib import Path

from gputopo.facts import Fact
from gputopo.host.recording import RecordedHost
from gputopo.host.tree import Entry
from gputopo.probes.pci import DEVICES
from gputopo.rules.finding import Finding
from gputopo.topology.graph import Topology
from tests.rules.twin import recorded, report

FIXTURES = sorted(
    path.name.removesuffix(".jsonl.gz")
    for path in (Path(__file__).parents[2] / "fixtures").glob("*.jsonl.gz")
    if not path.name.startswith("qemu-8gpu-vm")  # recorded, and broken on purpose
)


def file(address: str | None, name: str) -> str:
    """A file of a PCI function."""
    return f"{DEVICES}/{address}/{name}"


def found(topology: Topology, code: str) -> list[Finding]:
    """What one rule finds."""
    return report(topology, code).findings


def only(topology: Topology, code: str) -> Finding:
    """The one thing that a rule finds."""
    (finding,) = found(topology, code)
    return finding


def skipped(topology: Topology, code: str) -> str:
    """Why a rule could not be asked, or not of all devices; empty if it could."""
    return "; ".join(skip.reason for skip in report(topology, code).skipped)


def read(fixture: str, path: str) -> str:
    """A text of a bundled machine."""
    text = recorded(fixture).read_text(path)
    assert isinstance(text, str)
    return text


def config_with_acs(fixture: str, address: str | None, bits: int) -> bytes:
    """The config space of a port with other bits in its ACS control register."""
    data = recorded(fixture).read_bytes(file(address, "config"))
    assert isinstance(data, bytes)
    changed = bytearray(data)
    pointer = 0x100
    while int.from_bytes(changed[pointer : pointer + 2], "little") != 0x000D:
        pointer = int.from_bytes(changed[pointer : pointer + 4], "little") >> 20 & 0xFFC
        assert pointer
    changed[pointer + 6 : pointer + 8] = bits.to_bytes(2, "little")
    return bytes(changed)


def guest(fixture: str) -> dict[str, Entry | None]:
    """What makes a bundled machine a virtual one: the CPU's hypervisor flag."""
    text = read(fixture, "/proc/cpuinfo")
    return {"/proc/cpuinfo": text.replace("flags\t\t:", "flags\t\t: hypervisor")}


def groups(fixture: str, kind: str) -> dict[str, Entry | None]:
    """All IOMMU groups of a bundled machine, with another type."""
    host: RecordedHost = recorded(fixture)
    names: Fact[list[str]] = host.list_dir("/sys/kernel/iommu_groups")
    assert isinstance(names, list)
    return {f"/sys/kernel/iommu_groups/{name}/type": f"{kind}\n" for name in names}
