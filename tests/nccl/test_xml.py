"""Topology files: what is read of them, what is refused, and that they come back as they went."""

from __future__ import annotations

import random
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gputopo.errors import GputopoError
from gputopo.nccl import xml
from gputopo.nccl.model import system_of
from gputopo.nccl.plan import Plan
from gputopo.nccl.tree import C2c, Cpu, Fill, Gpu, Net, Nic, NvLink, Pci, Tree, complete, fuse
from gputopo.nccl.xml import NcclXmlError

SMALL = """
<system version="1">
  <cpu numaid="-1" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="0x8f">
    <!-- a comment -->
    <pci busid="0000:C1:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pcilink target="0000:D1:00.0"/>
      <pci busid="0000:c3:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="x">
        <gpu dev="0" sm="90" rank="0" gdr="1">
          <nvlink target="FFFFFFFF:FF:FF.0" count="18" tclass="0x068000"/>
          <c2c bw="44712" count="10"/>
          <future_thing><pci/></future_thing>
        </gpu>
      </pci>
      <pci busid="0000:c4:00.0" class="0x020700" link_speed="" link_width="0">
        <nic>
          <net name="mlx5_0" dev="0" speed="400000" port="1" guid="0x1" maxconn="131072" gdr="1"/>
          <net name="unnumbered"/>
        </nic>
      </pci>
    </pci>
    <nic><net name="eth0" dev="1" speed="-1"/></nic>
  </cpu>
</system>
"""


def test_reads_what_is_there() -> None:
    (cpu,) = xml.read(SMALL).cpus
    assert (cpu.numa, cpu.family, cpu.model, cpu.affinity) == (-1, 6, 143, "ffff")
    (switch,) = cpu.children
    assert (switch.busid, switch.peers) == ("0000:c1:00.0", ("0000:d1:00.0",))
    first, second = switch.children
    assert first.link_width == 0
    assert first.gpu == Gpu(
        dev=0,
        sm=90,
        rank=0,
        gdr=True,
        nvlinks=(NvLink("ffffffff:ff:ff.0", 18, "0x068000"),),
        c2c=C2c(44_712, 10),
    )
    assert second.nic is not None
    (net,) = second.nic.nets
    assert (net.name, net.speed_mbps, net.port, net.gdr) == ("mlx5_0", 400_000, 1, True)
    assert [net.speed_mbps for nic in cpu.nics for net in nic.nets] == [-1]
    assert xml.read(xml.write(xml.read(SMALL))) == xml.read(SMALL)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12),
        (" 12 lanes", 12),
        ("0x1F", 31),
        ("-3", -3),
        ("", 0),
        ("x16", 0),
        ("9" * 30, 2**31 - 1),
        ("-99999999999", -(2**31 - 1)),
    ],
)
def test_numbers_as_in_c(text: str, number: int) -> None:
    attributes = f'<system version="1"><cpu numaid="{text}"/></system>'
    assert xml.read(attributes).cpus[0].numa == number


ENTITIES = '<!DOCTYPE s [<!ENTITY a "aaaaaaaaaa">]><system version="1">&a;</system>'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not XML"),
        ("<system", "not XML"),
        ("<graphs version='1'/>", "the root is <graphs>"),
        ("<system/>", "version none"),
        ("<system version='2'/>", "version 2"),
        (ENTITIES, "not XML: "),
        (b"<?xml version='1.0' encoding='nonsense'?><system version='1'/>", "not XML"),
        ("<system version='1'><cpu><pci class='0x03'/></cpu></system>", "a pci without busid"),
        ("<a>" * 100, "nested deeper"),
        ("<s>" + "<a/>" * 30_000 + "</s>", "more than 20000 elements"),
        ("<s>" + "<cpu/>" * 97 + "</s>", "more than 96 of <cpu>"),
        (b"\xff\xfe\x00", "not XML"),
        ("\ud800", "not XML"),
        ("<s>" + " " * (9 << 20) + "</s>", "larger than 8 MiB"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) and len(value) < 60 else "",
)
def test_refuses_the_rest_in_one_line(text: str | bytes, why: str) -> None:
    with pytest.raises(NcclXmlError, match=why) as refusal:
        xml.read(text)
    assert "\n" not in str(refusal.value)
    assert isinstance(refusal.value, GputopoError)


def test_writes_only_what_nccl_reads_as_it_stands() -> None:
    machine = Tree((Cpu(numa=0, nics=(Nic((Net(name='a"<&>\n\u202eb', dev=0),)),)),))
    assert 'name="a______b"' in xml.write(machine)


def test_a_partial_file_is_completed() -> None:
    partial = Tree(
        (
            Cpu(
                numa=0,
                children=(
                    Pci(busid="0001:00:00.0", class_code="0x030200"),
                    Pci(busid="0101:00:00.0", class_code="0x020700"),
                    Pci(busid="0002:00:00.0", class_code="0x030200"),
                ),
            ),
        )
    )
    whole = complete(partial, Fill(sm=90, nvlinks=18, speed_mbps=400_000))
    plan = Plan(system_of(whole))
    assert [gpu.gpu.dev for gpu in plan.system.gpus if gpu.gpu] == [0, 1]
    assert plan.path(*plan.system.gpus).kind.name == "NVL"
    assert complete(whole, Fill(sm=0)) == whole


# Any text at all

BUSES = [f"0000:{bus:02x}:00.0" for bus in range(8)]
CLASSES = ["0x060400", "0x030200", "0x020000", "0x068000", "0x068001", "", "0x"]
BROADCOM = ["0x1000", "0xc010", "0xc030", "0xa001", "0x0001", "0x1001", "zz"]
NUMBERS = ["0", "1", "2", "3", "18", "-1", "0x10", "", "99999999999999999999", "1e9", "nan"]
VALUES = {
    "busid": BUSES,
    "target": BUSES,
    "class": CLASSES,
    "tclass": CLASSES,
    "vendor": ["GenuineIntel", "AuthenticAMD", *BROADCOM],
    "device": BROADCOM,
    "subsystem_vendor": BROADCOM,
    "subsystem_device": BROADCOM,
    "arch": ["x86_64", "arm64", "ppc64", "sparc"],
    "link_speed": ["", "8 GT/s", "16.0 GT/s PCIe", "32.0 GT/s PCIe"],
    "name": ["", "mlx5_0", "a+b"],
    **dict.fromkeys(["numaid", "familyid", "modelid", "link_width", "affinity"], NUMBERS),
    **dict.fromkeys(["dev", "sm", "rank", "gdr", "count", "bw"], NUMBERS),
    **dict.fromkeys(["speed", "port", "guid", "maxconn"], NUMBERS),
}
INSIDE = {
    "system": ["cpu"],
    "cpu": ["pci", "pci", "nic", "other"],
    "pci": ["pci", "pci", "gpu", "nic", "pcilink"],
    "gpu": ["nvlink", "c2c"],
    "nic": ["net"],
}


def element(choose: random.Random, name: str, depth: int = 0) -> str:
    """An element with some of all attributes, and others in it as NCCL nests them, mostly."""
    attributes = {"busid", "target", *choose.sample(sorted(VALUES), choose.randrange(len(VALUES)))}
    listed = "".join(f' {key}="{choose.choice(VALUES[key])}"' for key in sorted(attributes))
    within = INSIDE.get(name, []) if choose.random() < 0.95 else sorted(INSIDE)
    number = choose.randrange(5) if within and depth < 7 else 0
    inner = "".join(element(choose, choose.choice(within), depth + 1) for _ in range(number))
    return f"<{name}{listed}>{inner}</{name}>"


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.binary(), st.text(alphabet='<>/="? !&;abc1' + string.whitespace)))
@example("\x00")
@example("<?xml version='1.0' encoding='utf-16'?><system/>")
def test_no_text_raises_anything_else(text: str | bytes) -> None:
    try:
        xml.read(text)
    except NcclXmlError:
        pass


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**64))
def test_no_topology_breaks_the_plan(seed: int) -> None:
    """Whatever can be read comes back equal, and NCCL's rules come to an end on it."""
    choose = random.Random(seed)
    cpus = "".join(element(choose, "cpu") for _ in range(choose.randrange(4)))
    text = f'<system version="1">{cpus}</system>'
    try:
        machine = xml.read(text)
    except NcclXmlError:
        return
    assert xml.read(xml.write(machine)) == machine
    plan = Plan(system_of(fuse(complete(machine, Fill(sm=80, nvlinks=2)))))
    for gpu in plan.system.gpus:
        for net in plan.nets(gpu):
            assert plan.path(gpu, net).gbytes_per_s > 0
            plan.gdr(gpu, net, send=True)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(0, 3))
def test_a_mangled_file_is_read_or_refused(data: st.DataObject, cuts: int) -> None:
    text = SMALL
    for _ in range(cuts + 1):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 200)))
        text = text[:start] + data.draw(st.sampled_from(["", text[start:end] * 2, "\x00", "<"]))
        text += SMALL[end:]
    try:
        xml.read(text)
    except NcclXmlError:
        pass
