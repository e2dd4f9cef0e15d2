"""The text of a scan: the fault at once, at any width, whatever a device calls itself."""

from __future__ import annotations

import datetime
import functools
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len as cells_by_rich

from gputopo import scan
from gputopo.cpulist import parse
from gputopo.cpulist import render as render_list
from gputopo.facts import Missing, ProbeStatus
from gputopo.host.source import list_fixtures
from gputopo.report.devices import cpu_list, size
from gputopo.report.layout import NARROWEST, cell_len, cut, page_width, wants_colour
from gputopo.report.text import cpu_model, render
from gputopo.rules import check
from gputopo.rules.finding import (
    Cost,
    Evidence,
    Finding,
    Remedy,
    Report,
    Severity,
    Skipped,
    Waived,
    Waiver,
)
from gputopo.topology import model
from gputopo.topology.build import Facts
from gputopo.topology.graph import Topology
from tests.rules.twin import twin

FIXTURES = [fixture.name for fixture in list_fixtures()]
WIDTHS = (80, 100, 200)

DEVICES = "/sys/bus/pci/devices"
CLEAN = Report(findings=[], skipped=[], asked=3)
SGR = re.compile(r"\x1b\[[0-9;]*m")
UNSAFE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
HOSTILE = "\x1b]52;c;aGk=\x07\x1b[31m\x9b31m\u202e[/][red]\r\nERROR   forged\u2028x"


@functools.cache
def recorded(name: str) -> Topology:
    """A bundled machine, scanned once."""
    return scan(f"fixture:{name}")


def text(topology: Topology, report: Report | None = None, **options: Any) -> str:
    """The text as a pipe gets it, 100 columns wide unless said otherwise."""
    options = {"tty": False, "width": 100, **options}
    return render(topology, check(topology) if report is None else report, **options)


def row(output: str, name: str) -> str:
    """The one line of the tree that shows a device."""
    tree = output[output.index("\nTree") : output.index("\nMatrix")]
    (found,) = re.findall(rf"^[│├└ ]*{re.escape(name)} .*$", tree, re.M)
    assert isinstance(found, str)
    return found


# Machines put together by hand


def machine(
    *, gpus: int = 0, hcas: int = 0, per_node: int = 0, host: dict[str, Any] | None = None
) -> Topology:
    """Two NUMA nodes with a host bridge and a switch each; devices go to the nodes in halves."""
    info: dict[str, Any] = dict.fromkeys(model.HostInfo.__struct_fields__)
    info |= {"hostname": "h", "vendor": "V", "product": "P", "kernel": "6.1", "missing": {}}
    nodes: list[model.AnyNode] = [model.Machine(id="machine")]
    for numa in (0, 1):
        bridge, port, switch = f"pci0000:{numa}0", f"0000:{numa}0:01.0", f"0000:{numa}1:00.0"
        common: dict[str, Any] = {"numa": numa, "cpus": f"{numa * 8}-{numa * 8 + 7}"}
        nodes += [
            model.Numa(
                id=f"numa{numa}", parent="machine", index=numa, role="cpu", cpus=common["cpus"],
                memory_bytes=1 << 36, distances={},
            ),
            model.HostBridge(id=bridge, name=bridge, parent=f"numa{numa}", **common),
            model.PciBridge(
                id=port, pci=port, parent=bridge, role="root-port", vendor=1, device=1, **common
            ),
            model.PciBridge(
                id=switch, pci=switch, parent=port, role="upstream-port", vendor=0x1000,
                device=0xC030, **common,
            ),
        ]  # fmt: skip
        for number in range(numa * (gpus // 2), (numa + 1) * (gpus // 2)):
            nodes.append(
                model.Gpu(
                    id=f"gpu{number}", index=number, name="NVIDIA H100", parent=switch,
                    pci=f"0000:{numa}2:{number:02x}.0", driver="nvidia", **common,
                )
            )  # fmt: skip
        for number in range(numa * (hcas // 2), (numa + 1) * (hcas // 2)):
            nodes.append(hca(f"mlx5_{number}", switch, f"0000:{numa}3:{number:02x}.0", **common))
    return topology(nodes, host=info | (host or {}))


def hca(name: str, parent: str, pci: str | None, **fields: Any) -> model.Hca:
    port = model.Port(
        port=1, state="ACTIVE", physical_state="LinkUp", link_layer="InfiniBand", rate_gbps=400.0
    )
    base: dict[str, Any] = {"ports": [port], "netdevs": [], "vendor": 0x15B3, "device": 0x1021}
    return model.Hca(id=name, name=name, parent=parent, pci=pci, **(base | fields))


def topology(nodes: list[model.AnyNode], *, host: dict[str, Any], **parts: Any) -> Topology:
    usual: dict[str, Any] = {"probes": [], "links": [], "disagreements": [], "facts": Facts()}
    return Topology(
        source_kind="live",
        source_name="this machine",
        captured_at=None,
        host=model.HostInfo(**host),
        nodes=nodes,
        **(usual | parts),
    )


def with_nodes(base: Topology, *nodes: model.AnyNode) -> Topology:
    """The same machine with nodes added, or others in the place of those of the same id."""
    return topology(
        list((base.nodes | {node.id: node for node in nodes}).values()),
        host=msgspec.structs.asdict(base.host),
        links=base.links,
        facts=base.facts,
    )


def finding(severity: Severity = "error", code: str = "PCI101", **fields: Any) -> Finding:
    base: dict[str, Any] = {
        "name": "link-width-reduced",
        "confidence": "reported",
        "subjects": ["gpu0"],
        "summary": "gpu0 runs at x8",
        "evidence": [Evidence(source="/sys/width", seen="8", expected="16")],
        "cost": Cost(text="31.5 GB/s", derivation="theoretical", gbytes_per_s=31.5),
        "remedy": Remedy(text="Reseat it.", commands=["lspci -vv"], needs="hands", undo="none"),
    }
    return Finding(code=code, severity=severity, **(base | fields))


# Every bundled machine


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FIXTURES)
def test_fits_the_page(name: str, width: int) -> None:
    output = text(recorded(name), width=width)
    assert output.endswith("\n")
    assert not output.endswith("\n\n")
    assert "\n\n\n" not in output
    for line in output.splitlines():
        # Commands and paths stay in one piece, to be copied; nothing else may stand out.
        if len(line.split()) > 1 and not line.strip().startswith(("$ ", "/sys/", "/proc/")):
            assert cells_by_rich(line) <= width, line
        assert line == line.rstrip(), "blanks at the end"


@pytest.mark.parametrize("name", FIXTURES)
def test_shows_every_device_once(name: str) -> None:
    found = recorded(name)
    output = text(found)
    tree = output[output.index("\nTree") :].partition("\nNVLink")[0].partition("\nMatrix")[0]
    wanted = [
        node
        for node in found.of(model.Device)
        if isinstance(node, (model.Gpu, model.Nvme, model.NvSwitch)) and node.pci
    ] + found.physical_hcas
    for node in wanted:
        assert tree.count(f" {node.pci} ") == 1, node.id
    assert len(re.findall(r"^NUMA \d+ ", tree, re.M)) >= len(found.cpu_nodes)


def printed_matrix(output: str) -> tuple[dict[tuple[str, str], str], dict[str, dict[str, str]]]:
    """The cells and the affinity columns, read back from the text by the place of each header."""
    section = output[output.index("\nMatrix") :]
    names = dict(re.findall(r"\b(N\d+) (\S+)", section))
    if "G# GPU#" in section:
        names |= {f"G{number}": f"GPU{number}" for number in range(64)}
    cells: dict[tuple[str, str], str] = {}
    affinity: dict[str, dict[str, str]] = {}
    columns: list[tuple[int, str]] = []
    for line in section.splitlines()[2:]:
        if line.startswith(" ") and re.match(r" +(G|N|GPU|mlx5_\w*)\d| +CPU Affinity", line):
            titles = re.finditer(r"(?:CPU|NUMA) Affinity|GPU NUMA ID|\S+", line)
            columns = [(title.start(), title[0]) for title in titles]
        elif columns and re.match(r"(G|N|GPU|mlx5_\w*)\d", line):
            label = line.split()[0]
            ends = [start for start, _ in columns[1:]] + [None]
            for (start, title), end in zip(columns, ends, strict=True):
                cell = line[start:end].strip()
                if title in ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID"):
                    if cell:
                        affinity.setdefault(names.get(label, label), {})[title] = cell
                else:
                    cells[names.get(label, label), names.get(title, title)] = cell
        else:
            columns = []
    return cells, affinity


def same_matrix(found: Topology, width: int) -> None:
    """The text says of every pair what the topology says; the legend names each class once."""
    output = text(found, CLEAN, width=width)
    cells, affinity = printed_matrix(output)
    matrix = found.matrix
    for i, a in enumerate(matrix.labels):
        for j, b in enumerate(matrix.labels):
            # In blocks a pair of GPU and HCA stands once, in the column of the HCA.
            cell = cells.get((a, b)) or cells[b, a]
            assert cell == matrix.classes[i][j], (a, b)
    for gpu in found.gpus:
        assert gpu.index is not None
        told = affinity[f"GPU{gpu.index}"]
        if len(found.cpu_nodes) > 1:
            assert told["NUMA Affinity"] == ("?" if gpu.numa is None else str(gpu.numa))
            assert told["CPU Affinity"] == cpu_list(gpu.cpus)
    legend = output[output.rindex("\n  X  ") :].splitlines()
    classes = {re.sub(r"NV\d+", "NV#", cell) for row in matrix.classes for cell in row}
    assert {line.split()[0] for line in legend if re.match(r"  [A-Z?]\S* {2,}\S", line)} == classes


@pytest.mark.parametrize("width", [60, *WIDTHS, 400])
@pytest.mark.parametrize("name", [n for n in FIXTURES if n not in ("no-gpu", "firecracker-vm")])
def test_matrix_can_be_read_back(name: str, width: int) -> None:
    same_matrix(recorded(name), width)


@pytest.mark.parametrize("width", WIDTHS)
def test_sixteen_gpus_and_eighteen_hcas(width: int) -> None:
    found = machine(gpus=16, hcas=18)
    same_matrix(found, width)
    output = text(found, CLEAN, width=width)
    assert max(map(cell_len, output.splitlines())) <= width
    assert len(output.splitlines()) < (170 if width < 200 else 100)


# The verdict comes first


def test_the_fault_is_seen_before_the_tree() -> None:
    found = twin("hgx-h100", files={f"{DEVICES}/0000:3b:00.0/current_link_width": b"8\n"})
    output = text(found, check(found, only=["PCI101"]))
    lines = output.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("ERROR   PCI101 "))
    assert first < 12
    assert first < lines.index("Tree  PCIe links as trained now")
    assert "verdict  1 error, " in output
    assert "gpu1 runs at x8" in output
    assert re.search(
        r"seen +8 +expected 16 +/sys/bus/pci/devices/0000:3b:00.0/current_link_width", output
    )
    assert re.search(r"^ +cost +31\.5 GB/s", output, re.M)
    assert re.search(r"^ +\$ lspci -vv -s 0000:3b:00.0 \| grep", output, re.M)
    assert "Gen5 x8 of Gen5 x16" in row(output, "GPU1")
    assert " of " not in row(output, "GPU0")


@pytest.mark.parametrize("name", ["hgx-h100", "gb200-tray", "no-gpu"])
def test_a_healthy_machine_says_so_in_one_line(name: str) -> None:
    found = recorded(name)
    output = text(found, Report(findings=[], skipped=[], asked=71))
    assert re.search(r"^verdict  nothing found, 71 rules asked\n\nTree", output, re.M)


def test_what_could_not_be_asked_is_said_by_reason() -> None:
    skipped = [
        Skipped(code=f"NVL40{n}", name="n", severity="error", reason="nvml: denied", broken=False)
        for n in range(1, 6)
    ] + [Skipped(code="PCI104", name="n", severity="error", reason="pci: timeout", broken=True)]
    report = Report(findings=[], skipped=skipped, asked=60)
    lines = text(machine(), report).splitlines()
    assert "verdict  nothing found, 60 rules asked, 6 could not be asked" in lines
    unknown = [line for line in lines if line.startswith("UNKNOWN")]
    assert unknown == [
        "UNKNOWN pci: timeout (PCI104)",
        "UNKNOWN nvml: denied (NVL401, NVL402, NVL403, NVL404, NVL405)",
    ]
    # A probe that broke is no green light.
    assert "\x1b[32mnothing found" not in render(machine(), report, tty=True)


def test_quiet_is_silent_only_if_all_is_well_and_known() -> None:
    assert text(machine(gpus=2), CLEAN, quiet=True) == ""
    broken = Skipped(code="NVL401", name="n", severity="error", reason="nvml: timeout", broken=True)
    absent = msgspec.structs.replace(broken, reason="nvml: absent", broken=False)
    report = Report(findings=[], skipped=[broken, absent], asked=1)
    assert text(machine(gpus=2), report, quiet=True) == "UNKNOWN nvml: timeout (NVL401)\n"
    loud = text(machine(gpus=2), Report(findings=[finding()], skipped=[], asked=1), quiet=True)
    assert loud.startswith("ERROR   PCI101 link-width-reduced: gpu0 runs at x8\n")
    assert "Tree" not in loud


def test_many_findings_of_one_rule_do_not_bury_the_next() -> None:
    findings = [finding(summary=f"gpu{n} runs at x8") for n in range(8)]
    findings.append(finding(code="PCI105", name="other", summary="something else"))
    report = Report(findings=findings, skipped=[], asked=2)
    output = text(machine(), report)
    assert output.count("ERROR   PCI101") == 8
    assert output.count("seen    8") == 3 + 1
    assert text(machine(), report, verbose=1).count("seen    8") == 9


@pytest.mark.parametrize(
    ("number", "lines", "more"), [(5, 5, ""), (6, 6, ""), (7, 5, "2 more (-v)")]
)
def test_notes_are_folded(number: int, lines: int, more: str) -> None:
    notes = [finding("note", "PRB003", summary=f"conflict {n}") for n in range(number)]
    report = Report(findings=notes, skipped=[], asked=1)
    output = text(machine(), report)
    assert output.count("NOTE    PRB003: conflict") == lines
    assert "expected" not in output
    assert ("more (-v)" in output) == bool(more)
    assert more in output
    assert text(machine(), report, verbose=1).count("NOTE    PRB003 ") == number


def test_inferred_findings_are_marked() -> None:
    report = Report(findings=[finding(confidence="inferred")], skipped=[], asked=1)
    assert "PCI101 link-width-reduced (inferred): gpu0" in text(machine(), report)


def test_waived_and_expired_are_told() -> None:
    waiver = Waiver(code="PCI101", reason="by purchase", expires=datetime.date(2026, 1, 31))
    report = Report(
        findings=[],
        skipped=[],
        asked=1,
        waived=[Waived(finding=finding(), waiver=waiver)],
        expired=[waiver],
    )
    output = text(machine(), report)
    assert "verdict  nothing found, 1 rule asked, 1 waived" in output
    assert "EXPIRED waiver of PCI101 on * ended 2026-01-31: by purchase" in output
    assert "WAIVED" not in output
    assert "WAIVED  PCI101: gpu0 runs at x8 (by purchase)" in text(machine(), report, verbose=1)


# Links and states


def test_low_speed_at_idle_is_a_question_not_a_fault() -> None:
    slow = {f"{DEVICES}/0000:9b:00.0/current_link_speed": b"2.5 GT/s PCIe\n"}
    asleep = twin("hgx-h100", files=slow, nvml={("nvmlDeviceGetPerformanceState", 4): 8})
    assert "Gen1 x16 of Gen5 x16, idle?" in row(text(asleep), "GPU4")
    gpu = asleep.nodes["gpu4"]
    assert isinstance(gpu, model.Gpu)
    at_work = msgspec.structs.replace(gpu, performance_state=0, processes=1)
    awake = text(with_nodes(asleep, at_work), CLEAN)
    assert "Gen1 x16 of Gen5 x16 " in row(awake, "GPU4")
    assert "idle?" not in awake


def test_an_unknown_link_is_a_question_mark() -> None:
    found = machine(gpus=2)
    gpu = found.nodes["gpu0"]
    assert isinstance(gpu, model.Gpu)
    denied = msgspec.structs.replace(gpu, missing={"pcie": Missing("denied", "no right")})
    half = msgspec.structs.replace(found.nodes["gpu1"], pcie=model.Pcie(speed_gts=32.0))
    output = text(with_nodes(found, denied, half), CLEAN, verbose=1)
    assert re.search(r"GPU0 +0000:02:00.0 +\? +NVIDIA H100", output)
    assert re.search(r"GPU1 +0000:12:01.0 +Gen5 x\? +NVIDIA H100", output)
    assert "denied: no right\n  pcie of gpu0\n" in output


def test_a_lost_gpu_is_loud() -> None:
    lost = Missing("failed", "NVML GPU_IS_LOST")
    found = twin("hgx-h100", nvml={("nvmlDeviceGetName", 7): lost})
    output = text(found)
    assert "1 LOST" in output[: output.index("\nTree")]
    assert "LOST (failed: NVML GPU_IS_LOST)  NVIDIA 10de:2330" in row(output, "GPU7")
    assert "probe      nvml partial" in output


def test_a_port_that_is_down_shows_no_rate() -> None:
    down = twin(
        "hgx-h100",
        files={
            "/sys/class/infiniband/mlx5_4/ports/1/state": b"1: DOWN\n",
            "/sys/class/infiniband/mlx5_4/ports/1/phys_state": b"3: Disabled\n",
        },
    )
    output = text(down)
    assert "DOWN (Disabled) Ethernet  ConnectX-7  enp77s0np0" in row(output, "mlx5_4")
    assert "1 x ConnectX-7 Ethernet DOWN (Disabled)" in output
    assert "7 x ConnectX-7 400 Gb/s Ethernet ACTIVE" in output


def test_inactive_nvlinks_part_a_gpu_from_its_siblings() -> None:
    off = {("nvmlDeviceGetNvLinkState", 6, link): 0 for link in (4, 5)}
    output = text(twin("hgx-h100", nvml=off))
    assert re.search(r"^GPU0-5,7 +18 of 18 links +NVLink 4.0 +450 GB/s +through 4 NV", output, re.M)
    assert re.search(r"^GPU6 +16 of 18 links .* 400 GB/s +inactive: 4-5 ", output, re.M)


def test_direct_nvlinks_name_their_peers() -> None:
    output = text(recorded("dgx-1-v100"))
    assert re.search(r"^GPU0 +6 of 6 links +NVLink 2.0 +150 GB/s +GPU1 x1 +GPU2 x1 +", output, re.M)


def test_nvlinks_that_cannot_be_told_are_not_left_out() -> None:
    found = machine(gpus=2)
    late = {"nvlink": Missing("timeout", "no answer")}
    gpus = [msgspec.structs.replace(found.nodes[f"gpu{n}"], missing=late) for n in (0, 1)]
    assert "GPU0-1    NVLink ? (timeout: no answer)" in text(with_nodes(found, *gpus), CLEAN)


# What is folded


def test_virtual_functions_are_one_line() -> None:
    base = machine(gpus=2)
    vfs = [
        hca(f"mlx5_{n}", "0000:01:00.0", f"0000:03:{n // 8:02x}.{n % 8}", numa=0,
            physical_function="0000:03:00.0" if n else None)
        for n in range(127)
    ]  # fmt: skip
    output = text(with_nodes(base, *vfs), CLEAN)
    assert "+126 VFs" in row(output, "mlx5_0")
    assert "1 x ConnectX-7 400 Gb/s InfiniBand ACTIVE, 126 VFs" in output
    assert not re.search(r"mlx5_[1-9]", output)
    orphans = text(with_nodes(base, *vfs[1:]), CLEAN)
    assert "+125 VFs" in row(orphans, "mlx5_1")
    assert not re.search(r"mlx5_[2-9]", orphans)


def test_empty_and_gpu_memory_nodes() -> None:
    output = text(recorded("gb200-tray"))
    assert "NUMA 3-9,11-17,19-25,27-33  empty (kept for MIG instances)" in output
    assert "NUMA 10  memory of GPU1  184 GiB" in output
    assert "memory on NUMA 10" in row(output, "GPU1")
    assert "2 NUMA nodes + 32 without CPUs" in output
    assert re.search(r"^GPU2-3 +C2C to NUMA 1 +5 links +[\d.]+ GB/s +up$", output, re.M)


def test_functions_of_no_interest_come_with_v() -> None:
    found = recorded("hgx-h100")
    assert "other function" not in text(found)
    assert "root port" not in text(found)
    assert "other function" in text(found, verbose=1)
    assert "root port" in text(found, verbose=1)
    every = text(found, verbose=2)
    assert all(f" {node.pci} " in every for node in found.of(model.PciDevice))


def test_a_device_whose_node_is_unknown_stands_apart() -> None:
    found = machine(gpus=2, hcas=2)
    why = {"numa": Missing("unsupported", "the firmware names no node (numa_node is -1)")}
    nodes = [
        msgspec.structs.replace(node, numa=None, cpus=None, missing=why)
        for node in found.nodes.values()
        if isinstance(node, model.Device) and node.numa == 1
    ]
    nodes = [
        msgspec.structs.replace(node, parent="machine") if node.id == "pci0000:10" else node
        for node in nodes
    ]
    output = text(with_nodes(found, *nodes), CLEAN)
    head = "NUMA node unknown  (the firmware names no node (numa_node is -1))"
    assert output.index("NUMA 1 ") < output.index(head) < output.index("GPU1")
    assert re.search(r"^GPU1 .* \? +\?$", output, re.M), "no affinity is made up"


def test_a_machine_with_one_node_needs_no_numbers() -> None:
    output = text(recorded("t4-vm"))
    assert "NUMA node unknown" not in output
    assert re.search(r"^GPU0 +X +0-3 +N/A$", output, re.M), "as nvidia-smi says it"


def test_a_device_on_another_node_than_its_bridge_says_so() -> None:
    found = machine(gpus=2)
    moved = msgspec.structs.replace(found.nodes["gpu0"], numa=1)
    assert "NUMA 1  NVIDIA H100" in row(text(with_nodes(found, moved), CLEAN), "GPU0")


# The headline


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"virtualization": "none"}, "V P, bare metal, Linux 6.1"),
        ({"virtualization": "kvm"}, "V P, virtual machine (kvm), Linux 6.1"),
        ({}, "V P, bare metal or virtual: unknown, Linux 6.1"),
        ({"virtualization": "none", "container": "docker"}, "V P, bare metal, inside docker"),
        (
            {"virtualization": "none", "vendor": None, "product": None},
            "product unknown, bare metal",
        ),
        ({"virtualization": "none", "vendor": "V", "product": "V 12"}, "h: V 12, bare metal"),
    ],
)
def test_machine_line(fields: dict[str, Any], line: str) -> None:
    assert line in text(machine(host=fields), CLEAN)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cpu_model": "AMD EPYC 7742 64-Core Processor", "packages": 1}, "(NPS2)"),
        ({"cpu_model": "Intel(R) Xeon(R) Gold 6230", "packages": 1}, "(SNC2)"),
        (
            {"cpu_model": "Intel(R) Xeon(R)", "packages": 1, "virtualization": "kvm"},
            "(2 a package)",
        ),
        ({"cpu_model": "AMD EPYC 9534", "packages": 2}, "2 NUMA nodes,"),
        ({"allowed_cpus": "0-3", "pus": 16}, "only CPUs 0-3 allowed here"),
        ({}, "? x ?, ? cores, ? threads"),
    ],
)
def test_cpu_line(fields: dict[str, Any], words: str) -> None:
    output = text(machine(host={"virtualization": "none"} | fields), CLEAN)
    assert words in " ".join(output[: output.index("verdict")].split())


def test_cpu_models_lose_their_noise() -> None:
    assert cpu_model("Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz") == "Intel Xeon E5-2698 v4"
    assert cpu_model("AMD EPYC 7742 64-Core Processor") == "AMD EPYC 7742"


def test_a_machine_without_gpu_says_why() -> None:
    output = text(recorded("no-gpu"))
    head = " ".join(output[: output.index("verdict")].split())
    assert "GPUs none: no NVIDIA GPU among " in head
    assert "no NVIDIA driver seen, NVML absent: NVML LIBRARY_NOT_FOUND" in head
    assert "Matrix" not in output


def test_gpus_without_driver_are_not_called_none() -> None:
    found = twin("t4-vm", nvml={("nvmlInit",): Missing("absent", "no library")})
    output = text(found)
    assert "GPUs     1 x NVIDIA 10de:1eb8" in output
    assert "NVML absent: no library" in output


def test_probes_in_one_line_when_all_is_well() -> None:
    found = recorded("hgx-h100")
    names = " ".join(probe.name for probe in found.probes if probe.status == "ok")
    assert f"\nprobes ok  {names}\n" in text(found)
    assert names == "pci numa cpu rdma net system kernel_log nvml nvidia_smi"
    assert re.search(r"probes ok  pci \d+ ms numa", text(found, verbose=1))
    probe = ProbeStatus(name="nvml", status="timeout", seconds=9.5, detail="nvmlInit() hung")
    late = topology(
        list(found.nodes.values()), host=msgspec.structs.asdict(found.host), probes=[probe]
    )
    assert text(late, CLEAN).endswith("\nprobe      nvml timeout: nvmlInit() hung\n")


# Colour, width, and text from elsewhere


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    found = twin("hgx-h100", files={f"{DEVICES}/0000:3b:00.0/current_link_width": b"8\n"})
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    plain, coloured = text(found), text(found, tty=True)
    assert "\x1b" not in plain
    assert SGR.sub("", coloured) == plain
    assert "\x1b[1;31mERROR   \x1b[0m" in coloured
    assert "\x1b[1;31mGen5 x8 of Gen5 x16\x1b[0m" in coloured
    assert not wants_colour(False)
    monkeypatch.setenv("NO_COLOR", "")
    assert wants_colour(True), "set and empty does not count (no-color.org)"
    monkeypatch.setenv("NO_COLOR", "1")
    assert text(found, tty=True) == plain
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert text(found, tty=True) == plain


@pytest.mark.parametrize(
    ("columns", "width"),
    [("132", 132), ("", 100), ("0", 100), ("-5", 100), ("wide", 100), ("٣", 100), (None, 100)],
)
def test_page_width(monkeypatch: pytest.MonkeyPatch, columns: str | None, width: int) -> None:
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    assert page_width(False) == width


def test_a_very_narrow_page_is_laid_out_all_the_same() -> None:
    found = recorded("hgx-h100")
    assert text(found, width=1) == text(found, width=NARROWEST)


def test_wide_characters_keep_the_columns() -> None:
    found = machine(gpus=2, host={"product": "高性能计算服务器" * 6, "vendor": "浪潮"})
    named = msgspec.structs.replace(found.nodes["gpu0"], name="显卡 e\u0301 型号一")
    output = text(with_nodes(found, named), CLEAN, width=80)
    assert max(map(cells_by_rich, output.splitlines())) <= 80
    assert "显卡 e\u0301 型号一" in output


@given(st.text(alphabet=st.characters(blacklist_categories=["Cc", "Cf", "Cs", "Co", "Cn", "Mn"])))
def test_cut_never_takes_more_cells_than_it_may(word: str) -> None:
    for cells in (1, 5, 40):
        assert cell_len(cut(word, cells)) <= cells
    assert cut(word, cell_len(word)) == word


NAMES = st.one_of(st.text(max_size=60), st.just(HOSTILE), st.just("A" * 10_000), st.just(" "))


@settings(max_examples=60, deadline=None)
@given(
    name=NAMES, width=st.sampled_from([20, 80, 200]), tty=st.booleans(), verbose=st.integers(0, 2)
)
def test_no_name_steers_the_terminal(name: str, width: int, tty: bool, verbose: int) -> None:
    base = machine(gpus=2, hcas=2, host={"hostname": name, "product": name, "cpu_model": name})
    why = {name: Missing("denied", name), "pcie": Missing("failed", name)}
    port = model.Port(port=1, state=name, physical_state=name, link_layer=name, rate_gbps=None)
    netdevs = [name, name]
    nodes: list[model.AnyNode] = [
        msgspec.structs.replace(base.nodes["gpu0"], name=name, driver=name, lost=name, missing=why),
        hca(f"{name}~", "0000:01:00.0", "0000:03:1e.0", numa=0, ports=[port], netdevs=netdevs),
        hca(f"{name}~s", "machine", None, software=True, model=name, vendor=None),
        model.Nic(
            id=f"{name}~n", name=name, parent="0000:01:00.0", pci="0000:03:1f.0", numa=0,
            netdevs=netdevs, vendor=1, device=2, state=name,
        ),
        model.Nvme(
            id=f"{name}~d", name=name, parent="0000:01:00.0", pci="0000:03:1f.1", numa=0, model=name
        ),
    ]  # fmt: skip
    found = with_nodes(base, *nodes)
    found.source_kind, found.source_name, found.captured_at = "recording", name, name
    found.probes = [ProbeStatus(name="nvml", status="failed", seconds=1.0, detail=name)]
    remedy = Remedy(text=name, commands=[name], needs=name, undo=name)
    evidence = [Evidence(source=name, seen=name, expected=name)]
    fault = finding(
        name=name, subjects=[name], summary=name, evidence=evidence, remedy=remedy,
        cost=Cost(text=name, derivation=name),
    )  # fmt: skip
    waiver = Waiver(code=name, subject=name, reason=name)
    report = Report(
        findings=[fault, msgspec.structs.replace(fault, severity="note")],
        skipped=[Skipped(code="X", name=name, severity="error", reason=name, broken=True)],
        asked=1,
        waived=[Waived(finding=fault, waiver=waiver)],
        expired=[waiver],
    )
    output = render(found, report, tty=tty, width=width, verbose=verbose)
    output.encode()
    assert not UNSAFE.search(SGR.sub("", output) if tty else output)
    assert not any(line.startswith("ERROR   forged") for line in output.splitlines())
    assert len(output) < 100_000


# Small words


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 4))
def test_cpu_lists_say_the_same_in_short(cpus: set[int], step: int) -> None:
    listed = render_list(cpu * step for cpu in cpus)
    short = cpu_list(listed)
    span = re.fullmatch(r"(\d+)-(\d+):(\d+)", short)
    told = set(range(int(span[1]), int(span[2]) + 1, int(span[3]))) if span else set(parse(short))
    assert told == set(parse(listed))
    assert len(short) <= len(listed)


@pytest.mark.parametrize(
    ("count", "words"),
    [(None, "?"), (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1 << 30, "1 GiB"),
     (188416 << 20, "184 GiB"), (2164663517184, "1.97 TiB"), (1 << 60, "1048576 TiB")],
)  # fmt: skip
def test_sizes(count: int | None, words: str) -> None:
    assert size(count) == words
