"""The hgx-h100 fixture against the real machine that it was made from: a whole ``lspci -vvv``."""

from __future__ import annotations

import lzma
import re

import pytest

from gputopo import scan
from gputopo.facts import known
from gputopo.probes.pci import PciFunction
from gputopo.topology.graph import Topology
from tests.corpus import CORPUS, needs_corpus

LSPCI = CORPUS / "lspci" / "dell-8xh100-lspci-vvv.txt.xz"

PAIRS = {
    "0000:19:00.0": ("0000:1a:00.0", 0),
    "0000:3b:00.0": ("0000:3c:00.0", 0),
    "0000:4c:00.0": ("0000:4d:00.0", 0),
    "0000:5d:00.0": ("0000:5e:00.0", 0),
    "0000:9b:00.0": ("0000:9c:00.0", 1),
    "0000:bb:00.0": ("0000:bc:00.0", 1),
    "0000:cb:00.0": ("0000:cc:00.0", 1),
    "0000:db:00.0": ("0000:dc:00.0", 1),
}
"""GPU to its own ConnectX-7 and their NUMA node, as the corpus index says."""


class Listed:
    """One function of ``lspci -vvv``."""

    def __init__(self, address: str, title: str, block: str) -> None:
        self.address = f"0000:{address}"
        self.bus = int(address[:2], 16)
        self.is_bridge = title.startswith("PCI bridge")
        self.is_gpu = title.startswith("3D controller: NVIDIA")
        self.is_nvswitch = title.startswith("Bridge: NVIDIA")
        self.is_nic = title.startswith("Ethernet controller: Mellanox")
        self.is_nvme = title.startswith("Non-Volatile memory controller")
        numa = re.search(r"NUMA node: (\d+)", block)
        self.numa = int(numa[1]) if numa else None
        below = re.search(r"secondary=([0-9a-f]+)", block)
        self.secondary = int(below[1], 16) if below else None
        cap = re.search(r"LnkCap:.*Speed ([\d.]+)GT/s, Width x(\d+)", block)
        sta = re.search(r"LnkSta:\s*Speed ([\d.]+)GT/s[^,]*, Width x(\d+)", block)
        self.most = (float(cap[1]), int(cap[2])) if cap else None
        self.now = (float(sta[1]), int(sta[2])) if sta else None
        acs = re.search(r"ACSCtl:\s*(.*)", block)
        self.acs = {w.rstrip("+") for w in acs[1].split() if w.endswith("+")} if acs else None

    @property
    def matters(self) -> bool:
        return self.is_bridge or self.is_gpu or self.is_nvswitch or self.is_nic or self.is_nvme


def listed() -> dict[str, Listed]:
    text = lzma.decompress(LSPCI.read_bytes()).decode("utf-8", "replace")
    found = (
        Listed(match[1], match[2], block)
        for block in re.split(r"\n(?=[0-9a-f]{2}:)", text)
        if (match := re.match(r"([0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (.*)", block))
    )
    return {function.address: function for function in found}


@pytest.fixture(scope="module")
def machine() -> Topology:
    return scan("fixture:hgx-h100")


def functions(machine: Topology) -> dict[str, PciFunction]:
    pci = known(machine.facts.pci)
    assert pci is not None
    return {function.address: function for function in pci.functions}


@needs_corpus
def test_same_functions_at_the_same_places(machine: Topology) -> None:
    ours, theirs = functions(machine), listed()
    above = {f.secondary: f.address for f in theirs.values() if f.secondary}
    missing = sorted(f.address for f in theirs.values() if f.matters and f.address not in ours)
    assert missing == []
    for function in (f for f in theirs.values() if f.matters):
        chain: list[str] = []
        bus = function.bus
        while bus in above and above[bus] not in chain:
            chain.insert(0, above[bus])
            bus = theirs[above[bus]].bus
        own = ours[function.address]
        assert (function.address, list(own.parents)) == (function.address, chain)
        assert (function.address, own.numa_node) == (function.address, function.numa)


@needs_corpus
def test_same_links(machine: Topology) -> None:
    ours = functions(machine)
    for function in listed().values():
        if function.matters and function.most and function.now:
            link = ours[function.address].link
            assert link is not None
            assert (function.address, link.max_speed, link.max_width) == (
                function.address,
                *function.most,
            )
            if function.now[1]:
                assert (function.address, link.speed, link.width) == (
                    function.address,
                    *function.now,
                )


@needs_corpus
def test_acs_redirects_where_the_machine_has_them(machine: Topology) -> None:
    redirect = {"ReqRedir", "CmpltRedir", "UpstreamFwd"}
    theirs = {f.address for f in listed().values() if f.acs and f.acs & redirect}
    ours = {
        node.id
        for node in machine.nodes.values()
        if set(getattr(node, "acs", None) or ()) & redirect
    }
    assert ours == theirs


def test_each_gpu_has_its_own_hca_under_its_switch(machine: Topology) -> None:
    for gpu in machine.gpus:
        assert gpu.pci is not None
        hca, numa = PAIRS[gpu.pci]
        node = machine.by_pci[hca]
        assert machine.path_class(gpu.id, node.id) == "PIX"
        assert (gpu.numa, getattr(node, "numa", None)) == (numa, numa)
        assert gpu.pcie is not None
        assert (gpu.pcie.speed_gts, gpu.pcie.width) == (32.0, 16)
