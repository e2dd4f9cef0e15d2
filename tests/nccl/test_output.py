"""``scan --nccl``, ``--format nccl-xml`` and the ``nccl`` list of ``--format json``."""

from __future__ import annotations

import json

import pytest

from gputopo import scan
from gputopo.cli.main import main
from gputopo.nccl import predict, xml
from gputopo.nccl.build import machine_of
from gputopo.report.nccl import render_nccl
from tests.rules.twin import twin


def run(capsysbinary: pytest.CaptureFixture[bytes], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["scan", "--fail-on", "never", *arguments])
    assert not left.value.code
    return capsysbinary.readouterr().out.decode()


def test_section_comes_last(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    text = run(capsysbinary, "--from", "fixture:l40s-8-pcie", "--nccl")
    assert text.endswith(render_nccl(scan("fixture:l40s-8-pcie")))
    assert "GPU0  NUMA 0  mlx5_0  PIX  24 GB/s  GPUDirect RDMA\n" in text
    assert "GPU0  P2P PIX 24 GB/s GPU1, SHM PHB 24 GB/s GPU2-3, NET 24 GB/s GPU4-7\n" in text


def test_section_is_not_there_unasked(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert "as NCCL" not in run(capsysbinary, "--from", "fixture:t4-vm")


def test_json_has_each_gpu(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    document = json.loads(run(capsysbinary, "--from", "fixture:dgx-a100", "--format", "json"))
    assert [choice["gpu"] for choice in document["nccl"]] == [f"gpu{n}" for n in range(8)]
    assert document["nccl"][0]["nics"] == ["mlx5_0"]
    assert {remark["kind"] for remark in document["nccl_remarks"]} == {"nics-not-taken", "pxn"}


def test_topology_file_is_that_of_the_machine(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    text = run(capsysbinary, "--from", "fixture:hgx-b200", "--format", "nccl-xml")
    assert xml.read(text) == machine_of(scan("fixture:hgx-b200")).tree


def test_without_gpu_there_is_one_line() -> None:
    text = render_nccl(scan("fixture:no-gpu"), width=80)
    assert text.splitlines()[1:] == ["no GPU"]
    assert predict(scan("fixture:no-gpu")) == []


def test_names_cannot_steer_the_terminal() -> None:
    name = "GeForce \x1b]52;c;aGk=\x07\u202e"
    text = render_nccl(twin("hgx-h100", nvml={("nvmlDeviceGetName", 0): name}), tty=False)
    assert "GPUDirect RDMA GPU0: GeForce" in text
    assert all(line.isprintable() for line in text.splitlines())
