"""Anonymising: nothing that names a machine survives, and what describes it does."""

from __future__ import annotations

import re
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputopo.facts import Missing
from gputopo.host.anonymize import Anonymizer, anonymize
from gputopo.host.base import Output
from gputopo.host.recording import Answers, Header, RecordedHost, parse, render
from gputopo.host.tree import Directory, Entry, Link

KEY = b"the same in each run"

UUID = "0a1b2c3d-1111-2222-3333-0a1b2c3d4e5f"
GUID = "946d:ae03:00f2:3c1a"
MAC = "52:54:00:12:34:56"
SERIAL = "1654922003456"

IB = "/sys/class/infiniband/mlx5_0"
PCI = "/sys/bus/pci/devices/0000:1b:00.0"


def recording(
    files: dict[str, Entry] | None = None,
    commands: dict[tuple[str, ...], Any] | None = None,
    nvml: dict[tuple[Any, ...], Any] | None = None,
) -> Answers:
    return Answers(Header(format=1), files or {}, commands or {}, nvml or {})


def output(text: str, argv: tuple[str, ...] = ("tool",)) -> dict[tuple[str, ...], Any]:
    return {argv: Output(0, text, "")}


def anonymized_file(path: str, text: str, **others: Entry) -> str:
    """One file's text after anonymising it alone."""
    found = anonymize(recording({path: text, **others}), KEY).files[path]
    assert isinstance(found, str)
    return found


def anonymized_output(text: str, answers: Answers | None = None) -> str:
    """One command's output after anonymising it together with other answers."""
    whole = answers or recording()
    whole.commands.update(output(text))
    found = anonymize(whole, KEY).commands["tool",]
    assert isinstance(found, Output)
    return found.stdout


def shape(text: str) -> str:
    """What must be kept of a text: its length and all that is no hex digit."""
    return re.sub(r"[0-9a-fA-F]", "h", text)


def machine() -> Answers:
    """A made-up machine that names itself in every way."""
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x148 << 20 | 1 << 16 | 0x0001)
    struct.pack_into("<I", config, 0x148, 0x200 << 20 | 1 << 16 | 0x0003)
    config[0x14C:0x154] = bytes.fromhex("1a3cf20003ae6d94")
    struct.pack_into("<I", config, 0x200, 1 << 16 | 0x000D)
    return recording(
        {
            "/proc/sys/kernel/hostname": "gpu-01.dc1.example.com\n",
            "/proc/cmdline": (
                "BOOT_IMAGE=/boot/vmlinuz-5.15.0-91-generic root=/dev/mapper/gpu--01--vg-root "
                "ip=10.1.2.3::10.1.2.254:255.255.255.0:gpu-01:eth0:off nfsroot=[2001:db8::12:1]:/x "
                f"BOOTIF=01-52-54-00-12-34-56 rd.luks.uuid=luks-{UUID} resume=UUID=ABCD-1234 "
                "iommu=pt isolcpus=0-23,48-71\n"
            ),
            "/proc/self/cgroup": (
                f"0::/kubepods.slice/kubepods-pod{UUID.replace('-', '_')}.slice/"
                f"cri-containerd-{'0123abcd' * 8}.scope\n"
            ),
            "/proc/net/route": (
                "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\n"
                "enx525400123456\t00000000\tFE02010A\t0003\t0\t0\t0\t00000000\n"
                "enx525400123456\t0002010A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n"
            ),
            "/sys/class/dmi/id/product_serial": "J30XK42\n",
            "/sys/class/dmi/id/product_uuid": UUID + "\n",
            "/sys/class/dmi/id/bios_version": "2.19.1\n",
            "/sys/class/infiniband": Directory(["mlx5_0"]),
            f"{IB}/node_guid": GUID + "\n",
            f"{IB}/sys_image_guid": GUID + "\n",
            f"{IB}/fw_ver": "20.36.1010\n",
            f"{IB}/ports": Directory(["1"]),
            f"{IB}/ports/1/state": "4: ACTIVE\n",
            f"{IB}/ports/1/gids/0": f"fe80:0000:0000:0000:{GUID}\n",
            f"{IB}/ports/1/gids/1": "0000:0000:0000:0000:0000:ffff:0a01:0203\n",
            f"{IB}/ports/1/gids/2": "0000:0000:0000:0000:0000:0000:0000:0000\n",
            "/sys/class/infiniband/bnxt_re0/fw_ver": "229.1.123.0\n",
            "/sys/class/net": Directory(["enx525400123456", "ib0", "lo"]),
            "/sys/class/net/enx525400123456": Link(
                "../../devices/pci0000:1a/0000:1a:01.0/net/enx525400123456"
            ),
            "/sys/class/net/enx525400123456/address": MAC + "\n",
            "/sys/class/net/lo/address": "00:00:00:00:00:00\n",
            "/sys/class/net/ib0/address": (
                "00:00:10:86:fe:80:00:00:00:00:00:00:94:6d:ae:03:00:f2:3c:1a\n"
            ),
            "/sys/class/nvme": Directory(["nvme0"]),
            "/sys/class/nvme/nvme0/serial": "S64GNE0R123456      \n",
            "/sys/class/nvme/nvme0/subsysnqn": "nqn.2014.08.org.nvmexpress:144d144dS64GNE0R1\n",
            "/sys/class/nvme/nvme0/wwid": "eui.0025388b91d0f8a1\n",
            f"{PCI}/config": bytes(config),
            f"{PCI}/resource": "0x00000000fb000000 0x000380000fffffff 0x0000000000040200\n",
            f"{PCI}/local_cpulist": "0-23,48-71\n",
            f"{PCI}/vendor": "0x10de\n",
            "/dev": Directory(["gpu-01-vg", "null", "nvidia0"]),
            "/etc/secret": Missing("failed", f"no route to 10.1.2.3 from gpu-01 ({UUID})"),
        },
        {
            ("ibstat",): Output(
                0,
                f"Node GUID: 0x946dae0300f23c1a\nbare: 946dae0300f23c1a\nGID fe80::{GUID}\n"
                "Firmware version: 20.36.1010\nfw version 12.1.2.3\naddress 10.1.2.3\n"
                "mapped ::ffff:10.1.2.3 [fe80::946d:ae03:f2:3c1a%ib0]\nmask 0x0000000000000001\n",
                "gpu-01: no such port\n",
            ),
            ("nvidia-smi", "-q"): Output(
                0,
                f"Driver Version : 550.54.15\nBus Id : 00000000:1B:00.0\nSerial : {SERIAL}\n"
                f"GPU UUID : GPU-{UUID}\nVBIOS : 96.00.61.00.01\nClusterUUID : {UUID.upper()}\n",
                "",
            ),
            ("numactl",): Missing("failed", "10.1.2.3"),
        },
        {
            ("nvmlDeviceGetSerial", 0): SERIAL,
            ("nvmlDeviceGetUUID", 0): f"GPU-{UUID}",
            ("nvmlDeviceGetName", 0): "NVIDIA H100 80GB HBM3",
            ("nvmlDeviceGetMigDeviceHandleByIndex", 0, 0): {"uuid": f"MIG-{UUID}", "name": "x"},
            ("nvmlDeviceGetGpuFabricInfoV", 0): {
                "clusterUuid": UUID.replace("-", ""),
                "cliqueId": 7,
            },
            ("nvmlDeviceGetPlatformInfo", 0): {
                "ibGuid": "946dae0300f23c1a0000000000000000",
                "chassisSerialNumber": "1820224000042",
                "slotNumber": 3,
            },
            ("nvmlSystemGetNVMLVersion",): "12.550.54.15",
            ("nvmlSystemGetOtherVersion",): "12.55.54.15",
            ("nvmlDeviceGetSerial", 1): Missing("unsupported", "NVML NOT_SUPPORTED"),
        },
    )


SECRETS = (
    *("gpu-01", "gpu--01", "dc1.example.com"),
    *(UUID, UUID.replace("-", ""), UUID.replace("-", "_"), "ABCD-1234"),
    *(GUID, GUID.replace(":", ""), "94:6d:ae:03", "946d:ae03:f2:3c1a"),
    *(MAC, MAC.replace(":", "-"), MAC.replace(":", "")),
    *(SERIAL, "J30XK42", "S64GNE0R", "0025388b91d0f8a1", "1820224000042"),
    *("10.1.2.", "02010A", "0a01:0203", "2001:db8", "0123abcd"),
)


# A whole machine


def test_nothing_that_names_the_machine_survives() -> None:
    before = machine()
    text = render(anonymize(before)).decode().lower()
    for secret in SECRETS:
        assert secret.lower() in render(before).decode().lower(), secret
        assert secret.lower() not in text, secret


def test_what_describes_the_machine_survives() -> None:
    before, after = machine(), anonymize(machine())
    for path in (
        *(f"{IB}/fw_ver", f"{IB}/ports/1/state", f"{IB}/ports/1/gids/2", "/sys/class/nvme"),
        *("/sys/class/infiniband/bnxt_re0/fw_ver", "/sys/class/dmi/id/bios_version"),
        *("/sys/class/net/lo/address", f"{PCI}/resource", f"{PCI}/local_cpulist", f"{PCI}/vendor"),
    ):
        assert after.files[path] == before.files[path], path
    for call in ("nvmlDeviceGetName", "nvmlDeviceGetSerial"):
        key = (call, 0 if call == "nvmlDeviceGetName" else 1)
        assert after.nvml[key] == before.nvml[key]
    nvml: Any = after.nvml
    assert nvml["nvmlSystemGetOtherVersion",] == "12.55.54.15"
    assert nvml["nvmlDeviceGetGpuFabricInfoV", 0]["cliqueId"] == 7
    smi = after.commands["nvidia-smi", "-q"]
    assert isinstance(smi, Output)
    for kept in ("550.54.15", "00000000:1B:00.0", "96.00.61.00.01", "GPU-"):
        assert kept in smi.stdout
    ibstat = after.commands["ibstat",]
    assert isinstance(ibstat, Output)
    for kept in ("20.36.1010", "fw version 12.1.2.3", "0x0000000000000001", "fe80::", "::ffff:"):
        assert kept in ibstat.stdout
    line = after.files["/proc/cmdline"]
    assert isinstance(line, str)
    for kept in ("5.15.0-91-generic", ":255.255.255.0:", "isolcpus=0-23,48-71", "BOOTIF=01-"):
        assert kept in line


def test_links_survive() -> None:
    after = anonymize(machine())
    nvml: Any = after.nvml
    files = {path: what.strip() for path, what in after.files.items() if isinstance(what, str)}
    guid = files[f"{IB}/node_guid"]
    bare = guid.replace(":", "")
    assert guid == files[f"{IB}/sys_image_guid"]
    assert files[f"{IB}/ports/1/gids/0"] == f"fe80:0000:0000:0000:{guid}"
    assert files["/sys/class/net/ib0/address"].replace(":", "").endswith(bare)
    ibstat = after.commands["ibstat",]
    assert isinstance(ibstat, Output)
    assert f"Node GUID: 0x{bare}\nbare: {bare}\nGID fe80::{guid}\n" in ibstat.stdout
    assert nvml["nvmlDeviceGetPlatformInfo", 0]["ibGuid"] == bare + "0" * 16

    uuid = nvml["nvmlDeviceGetUUID", 0].removeprefix("GPU-")
    assert nvml["nvmlDeviceGetMigDeviceHandleByIndex", 0, 0]["uuid"] == f"MIG-{uuid}"
    assert nvml["nvmlDeviceGetGpuFabricInfoV", 0]["clusterUuid"] == uuid.replace("-", "")
    assert uuid.replace("-", "_") in files["/proc/self/cgroup"]
    smi = after.commands["nvidia-smi", "-q"]
    assert isinstance(smi, Output)
    assert f"GPU-{uuid}" in smi.stdout
    assert f"ClusterUUID : {uuid.upper()}" in smi.stdout
    assert f"Serial : {nvml['nvmlDeviceGetSerial', 0]}\n" in smi.stdout

    mac = files.get(next(p for p in files if re.fullmatch(r"/sys/class/net/enx\w+/address", p)))
    assert mac is not None
    name = "enx" + mac.replace(":", "")
    assert after.files["/sys/class/net"] == Directory(sorted([name, "ib0", "lo"]))
    assert str(after.files[f"/sys/class/net/{name}"]).endswith(f"/net/{name}")
    assert f"{name}\t00000000" in files["/proc/net/route"]
    assert "BOOTIF=01-" + mac.replace(":", "-") in files["/proc/cmdline"]

    address = files["/proc/cmdline"].partition("ip=")[2].partition(":")[0]
    octets = bytes(map(int, address.split(".")))
    assert f"address {address}\n" in ibstat.stdout
    assert f"mapped ::ffff:{address} " in ibstat.stdout
    assert files[f"{IB}/ports/1/gids/1"].replace(":", "").endswith("ffff" + octets.hex())

    host = files["/proc/sys/kernel/hostname"].partition(".")[0]
    assert ibstat.stderr == f"{host}: no such port\n"
    assert after.files["/dev"] == Directory(sorted([f"{host}-vg", "null", "nvidia0"]))
    assert f"/dev/mapper/{host.replace('-', '--')}--vg-root" in files["/proc/cmdline"]


def test_form_survives() -> None:
    anonymizer = Anonymizer(machine())
    anonymizer.replace(machine())
    assert len(anonymizer.originals) > 20
    for original, stand_in in anonymizer.originals.items():
        assert len(original) == len(stand_in)
        assert re.sub(r"[0-9A-Za-z]", "", original) == re.sub(r"[0-9A-Za-z]", "", stand_in)
        if original == original.lower():
            assert stand_in == stand_in.lower()
        assert original != stand_in


def test_header_says_what_was_replaced() -> None:
    after = anonymize(machine())
    assert after.header.anonymized == ["guid", "hostname", "ip", "mac", "serial", "uuid"]
    assert anonymize(recording({"/sys/a": "1"})).header.anonymized == []
    once = anonymize(recording({"/proc/sys/kernel/hostname": "gpu01\n"}))
    assert once.header.anonymized == ["hostname"]
    once.files["/sys/class/net/eth0/address"] = MAC
    assert anonymize(once).header.anonymized == ["hostname", "mac"]


def test_anonymizing_leaves_its_input_alone() -> None:
    before = machine()
    anonymize(before)
    assert render(before) == render(machine())


def test_key_decides() -> None:
    assert render(anonymize(machine(), KEY)) == render(anonymize(machine(), KEY))
    assert render(anonymize(machine())) != render(anonymize(machine()))


def test_anonymizing_twice_keeps_the_forms() -> None:
    once = anonymize(machine(), KEY)
    twice = anonymize(once, b"another key")
    a, b = (Anonymizer(answers, KEY) for answers in (machine(), once))
    a.replace(machine())
    b.replace(once)
    assert sorted(map(shape, a.originals.values())) == sorted(map(shape, b.originals))
    assert len(render(once)) == len(render(twice))


def test_recording_is_read_back() -> None:
    after = anonymize(machine(), KEY)
    data = render(after)
    header = msgspec.json.decode(data.split(b"\n")[0], type=Header)
    assert msgspec.structs.replace(header, entries=None) == after.header
    host = parse(data, "x")
    assert host.read_text("/proc/cmdline") == str(after.files["/proc/cmdline"]).rstrip("\n")
    # Read back, config space is text where it happens to be UTF-8: it stays zeroed all the same.
    assert host.read_bytes(f"{PCI}/config") == after.files[f"{PCI}/config"]


@pytest.mark.parametrize("name", ["rdma", "net", "system", "nvml", "pci"])
def test_probes_see_the_same_machine_under_other_names(name: str) -> None:
    import importlib

    probe = importlib.import_module(f"gputopo.probes.{name}").probe
    answers = machine()
    answers.nvml["nvmlInit",] = True
    answers.nvml["nvmlDeviceGetCount",] = 1
    answers.nvml["nvmlDeviceGetHandleByIndex", 0] = True
    anonymizer = Anonymizer(answers, KEY)
    after = anonymizer.replace(answers)
    raw, hidden = (
        msgspec.json.encode(probe(RecordedHost("x", a))).decode() for a in (answers, after)
    )
    assert anonymizer.text(raw) == hidden


# One kind at a time


def test_device_serial_number_of_config_space_is_zeroed() -> None:
    before, after = machine().files[f"{PCI}/config"], anonymize(machine()).files[f"{PCI}/config"]
    assert isinstance(before, bytes)
    assert isinstance(after, bytes)
    assert after == before[:0x14C] + bytes(8) + before[0x154:]


def test_config_space_of_any_kind() -> None:
    loop = bytearray(4096)
    struct.pack_into("<I", loop, 0x100, 0x100 << 20 | 0x0001)
    serial_at_the_end = bytearray(0x10A)
    struct.pack_into("<I", serial_at_the_end, 0x100, 0x0003)
    ascii_config = b"\0" * 0x100 + struct.pack("<I", 1 << 16 | 3) + b"ABCDEFGH" + b"\0" * 100
    for data in (b"", bytes(64), bytes(loop), bytes(serial_at_the_end), b"\xff" * 4096):
        after = anonymize(recording({f"{PCI}/config": data}))
        assert after.files[f"{PCI}/config"] == data
        assert after.header.anonymized == []
    for given_as in (ascii_config, ascii_config.decode()):
        answers = anonymize(recording({f"{PCI}/config": given_as}))
        assert b"ABCDEFGH" not in render(answers)
        assert answers.header.anonymized == ["serial"]


@pytest.mark.parametrize("name", ["localhost", "localhost.localdomain", "(none)", "", "None"])
def test_hosts_without_a_name(name: str) -> None:
    assert anonymized_file("/proc/sys/kernel/hostname", f"{name}\n") == f"{name}\n"


@pytest.mark.parametrize("name", ["node0", "nvidia", "mlx5_0", "cpu", "gpu", "42"])
def test_host_called_as_the_kernel_calls_things(name: str) -> None:
    """Its name goes where it is the name, and the kernel's names stay."""
    answers = recording(
        {
            "/proc/sys/kernel/hostname": f"{name}\n",
            "/sys/devices/system/node/node0/cpulist": "0-3",
            "/sys/module": Directory(["nvidia"]),
            f"{IB}/node_type": "1: CA",
            f"{PCI}/driver": Link("../../../bus/pci/drivers/nvidia"),
            "/sys/devices/system/cpu/online": "42",
        },
        output("node 0 cpus: 42\nnvidia mlx5_0 0000:1b:00.0 gpu"),
    )
    after = anonymize(answers, KEY)
    assert after.files.pop("/proc/sys/kernel/hostname") != f"{name}\n"
    del answers.files["/proc/sys/kernel/hostname"]
    assert after.files == answers.files
    assert after.commands == answers.commands


def test_host_names_only_as_words() -> None:
    answers = recording({"/proc/sys/kernel/hostname": "train7\n"})
    text = anonymized_output("train7 train77 xtrain7 train7.x /dev/train7-vg Train7", answers)
    words = text.split()
    new = words[0]
    assert new != "train7"
    assert words[1:] == ["train77", "xtrain7", f"{new}.x", f"/dev/{new}-vg", "Train7"]


@pytest.mark.parametrize(
    "serial",
    [
        "",
        "0",
        "0000:00:1a.7",
        "00000000",
        "N/A",
        "[N/A]",
        "Not Specified",
        "To Be Filled By O.E.M.",
    ],
)
def test_placeholders_of_serial_numbers_stay(serial: str) -> None:
    assert anonymized_file("/sys/class/dmi/id/board_serial", serial) == serial
    after = anonymize(recording(nvml={("nvmlDeviceGetSerial", 0): serial}))
    assert after.nvml["nvmlDeviceGetSerial", 0] == serial


def test_short_serial_number_goes_where_it_stands_and_only_there() -> None:
    answers = recording({"/sys/class/dmi/id/board_serial": "123\n"}, output("123 files"))
    after = anonymize(answers, KEY)
    assert after.files["/sys/class/dmi/id/board_serial"] != "123\n"
    assert after.commands["tool",] == Output(0, "123 files", "")


@pytest.mark.parametrize(
    "text",
    [
        *("550.54.15", "550.163.01", "20.36.1010", "96.00.61.00.01", "6.1.0-18-amd64"),
        *(
            "vmlinuz-4.18.0.5-generic",
            "Version: 1.2.3.4",
            "FW rev 1.2.3.4",
            "v1.2.3.4",
            "1.2.3.4.5",
        ),
        *("0.0.0.0", "127.0.0.1", "255.255.255.0", "224.0.0.1", "::", "::1", "ff02::1", "fe80::"),
        *("0000:1b:00.0", "00000000:1B:00.0", "0000:17:00.0-0000:18:00.0", "pci0000:15"),
        *("0-23,48-71", "0-31:2/4", "ff,00000000", "12:34:56", "2026-01-02T03:04:05Z"),
        "00:ff:ff:ff:ff:12:40:1b:ff:ff:00:00:00:00:00:00:ff:ff:ff:ff",
        *("00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff", "0" * 32, "f" * 32, "0x" + "0" * 16),
        *("00000000-0000-0000-0000-000000000000", "0xffffffffffffffff", "0x0000000000000001"),
        *("0000:0000:0000:0000", "fe80:0000:0000:0000:0000:0000:0000:0000", "1234567890123456"),
        *("NVIDIA H100 80GB HBM3", "NV18", "mlx5_0", "a::b::c", "std::string", "deadbeef"),
    ],
)
def test_what_looks_like_an_identifier_and_is_none(text: str) -> None:
    assert anonymized_output(f"a {text} b\n{text}\t({text})") == f"a {text} b\n{text}\t({text})"


def test_versions_in_files_are_no_addresses() -> None:
    assert anonymized_file("/sys/module/x/version", "10.1.2.3\n") == "10.1.2.3\n"


@pytest.mark.parametrize(
    "text",
    ["10.1.2.3", "192.168.100.200", "2001:db8:1:22:333:4444:5:6", "2001:db8::1", "fd00::a:1"],
)
def test_addresses_in_free_text(text: str) -> None:
    for frame in ("{}", "ip={}", "[{}]", "{}/24", "@{}/eth0", "({}).", "{}%eth0", "a\n{}\n"):
        whole = frame.format(text)
        new = anonymized_output(whole)
        assert new != whole
        assert shape(new) == shape(whole)
        assert new.count(".") == whole.count(".")


def test_hardware_addresses_of_all_lengths() -> None:
    for text in (
        *(MAC, MAC.upper().replace("12", "AB"), "01-52-54-00-12-34-56"),
        *("94:6d:ae:03:00:f2:3c:1a", "94-6d-ae-03-00-f2-3c-1a"),
        "80:00:02:08:fe:80:00:00:00:00:00:00:94:6d:ae:03:00:f2:3c:1a",
        "80:00:02:08:20:01:0d:b8:00:00:00:00:94:6d:ae:03:00:f2:3c:1a",
    ):
        new = anonymized_output(text)
        assert shape(new) == shape(text)
        assert new != text
    mac = anonymized_output(MAC)
    assert int(mac[:2], 16) & 3 == int(MAC[:2], 16) & 3  # locally administered, not a group


def test_undecodable_bytes_survive() -> None:
    data = b"\xff\xfe " + MAC.encode() + b" \x80"
    after = anonymize(recording({"/sys/x": data})).files["/sys/x"]
    assert isinstance(after, bytes)
    assert after[:3] + after[-2:] == data[:3] + data[-2:]
    assert MAC.encode() not in after


# Anything at all

uuids = st.uuids().map(str)
guids = st.integers(1 << 40, (1 << 64) - 2).map(lambda n: ":".join(re.findall("....", f"{n:016x}")))
macs = st.integers(1 << 40, (1 << 48) - 2).map(lambda n: ":".join(re.findall("..", f"{n:012x}")))
hosts = st.from_regex(r"[b-z]{5}[0-9]{2}(\.[b-z]{5}[0-9]\.[b-z]{6})?", fullmatch=True)
serials = st.from_regex(r"[1-9]{2}[0-9]{11}|[A-Z]{2}[0-9A-Z]{8}", fullmatch=True)
ips = (
    st.ip_addresses(v=4).map(str).filter(lambda ip: not re.match(r"(0|127|22[4-9]|2[3-5]\d)\.", ip))
)


@settings(max_examples=100, deadline=None)
@given(
    host=hosts,
    serial=serials,
    uuid=uuids,
    guid=guids,
    mac=macs,
    ip=ips,
    upper=st.booleans(),
    filler=st.text(st.characters(codec="ascii"), max_size=40),
)
def test_no_identifier_survives_anywhere(
    host: str, serial: str, uuid: str, guid: str, mac: str, ip: str, upper: bool, filler: str
) -> None:
    bare = guid.replace(":", "")
    octets = bytes(map(int, ip.split(".")))
    gid = f"0000:0000:0000:0000:0000:ffff:{octets[:2].hex()}:{octets[2:].hex()}"
    anywhere = [host, host.partition(".")[0], uuid, f"GPU-{uuid}", guid, mac]
    anywhere += [
        f"fe80:0000:0000:0000:{guid}",
        gid,
        serial,
        uuid.replace("-", ""),
        mac.replace(":", "-"),
    ]
    if upper:
        anywhere += [uuid.upper(), guid.upper(), mac.upper()]
    text = f"{filler}\n" + " | ".join(anywhere)
    free = f"{text}\n0x{bare} {ip} [{ip}] ip={ip}:{ip} ::ffff:{ip} fe80::{guid} {filler}"
    before = recording(
        {
            "/proc/sys/kernel/hostname": host,
            "/proc/cmdline": free,
            "/proc/net/route": f"eth0\t{octets[::-1].hex().upper()}\t00000000\t1\n",
            "/sys/x": text,
            "/sys/bytes": text.encode() + b"\xff",
            f"/sys/{uuid}/y": "1",
            "/sys/l": Link(f"../{uuid}"),
            "/sys/d": Directory([uuid, f"enx{mac.replace(':', '')}", f"rocex{bare}"]),
            "/sys/m": Missing("failed", free),
        },
        {("a", "b"): Output(1, free, free), ("c",): Missing("failed", free)},
        {
            ("nvmlDeviceGetSerial", 0): serial,
            ("nvmlDeviceGetUUID", 0): f"GPU-{uuid}",
            ("nvmlX", 0): {"a": [{"b": text}]},
            ("nvmlDeviceGetPlatformInfo", 0): {
                "ibGuid": bare + "0" * 16,
                "chassisSerialNumber": serial,
            },
        },
    )
    anonymizer = Anonymizer(before)
    after = anonymizer.replace(before)
    stand_ins = set(anonymizer.originals.values())
    # Base64 is undone, so that nothing hides in it.
    rendered = render(after).decode() + repr(after.files["/sys/bytes"])
    for secret in {*anywhere, bare, ip, octets[::-1].hex().upper()} - stand_ins:
        found = re.search(rf"(?<![0-9A-Za-z.]){re.escape(secret)}(?![0-9A-Za-z]|\.\d)", rendered)
        assert found is None, (secret, rendered)
    assert len(render(after)) - len(msgspec.json.encode(after.header)) == (
        len(render(before)) - len(msgspec.json.encode(before.header))
    )
    originals = list(anonymizer.originals)
    assert len({anonymizer.originals[key].lower() for key in originals}) == (
        len({key.lower() for key in originals})
    )


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200), st.text(max_size=30), st.binary(max_size=300))
def test_any_recording_can_be_anonymized(text: str, name: str, data: bytes) -> None:
    answers = recording(
        {
            "/proc/sys/kernel/hostname": name,
            "/sys/class/dmi/id/product_serial": name,
            "/proc/cmdline": text,
            "/proc/net/route": text,
            f"/sys/{name}": data,
            f"{PCI}/config": bytes(256) + data,
        },
        output(text),
        {("nvmlDeviceGetSerial", 0): name, ("nvmlDeviceGetPlatformInfo", 0): {"ibGuid": text}},
    )
    after = anonymize(answers)
    parse(render(after), "x")
    assert len(after.commands["tool",].stdout) == len(text)  # type: ignore[union-attr]
