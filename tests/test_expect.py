"""Promises, differences and waivers."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from gputopo import scan
from gputopo.errors import GputopoError
from gputopo.expect.promise import Promise, check, learn, load, render
from gputopo.expect.shape import differences, shape
from gputopo.facts import Missing
from gputopo.host.recording import nvml_error
from gputopo.host.source import list_fixtures
from gputopo.rules import waivers
from gputopo.rules.finding import Evidence, Finding, Remedy, Report, Waiver
from tests.rules.twin import recorded, twin

FIXTURES = [fixture.name for fixture in list_fixtures()]
GPU0 = "/sys/bus/pci/devices/0000:19:00.0"


def run(*arguments: str) -> tuple[int, str]:
    from gputopo.cli.main import cli

    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    if isinstance(result.exception, GputopoError):
        return result.exception.exit_code, str(result.exception)
    code = result.return_value if isinstance(result.return_value, int) else result.exit_code
    return code, result.output


@pytest.mark.parametrize("name", FIXTURES)
def test_a_machine_keeps_what_was_learned_from_it(name: str) -> None:
    topology = scan(f"fixture:{name}")
    promise = load(render(learn(topology)).encode(), "learned")
    assert [line for line in check(promise, topology) if line.kept is not True] == []


def test_what_is_learned_is_worth_having() -> None:
    promise = learn(scan("fixture:hgx-h100"))
    assert (promise.gpus, promise.gpu_paths, promise.nvlinks) == (8, "NV18", 18)
    assert (promise.gpu_pcie, promise.gpu_pcie_width) == ("Gen5 x16", 16)
    assert (promise.hca_distance, promise.own_hca, promise.hca_rate_gbps) == ("PIX", True, 400.0)


@pytest.mark.parametrize(
    "profile", ["dgx-1-v100", "dgx-a100", "hgx-h100", "hgx-b200", "gb200-tray"]
)
def test_profiles_fit_their_machines(profile: str) -> None:
    code, text = run("check", "--from", f"fixture:{profile}", "--expect", f"profile:{profile}")
    assert code == 0, text


def test_a_narrow_link_and_a_dead_nvlink_break_the_profile() -> None:
    broken = twin(
        "hgx-h100",
        files={f"{GPU0}/current_link_width": "8\n"},
        nvml={("nvmlDeviceGetNvLinkState", 3, 7): 0},
    )
    promise = load(Path("gputopo/expect/profiles/hgx-h100.toml").read_bytes(), "profile")
    lines = [
        (line.promise, line.subject, line.seen) for line in check(promise, broken) if not line.kept
    ]
    assert ("gpu_pcie_width", "gpu0", "8") in lines
    assert ("nvlinks", "gpu3", "17") in lines
    assert ("gpu_paths", "gpu0 to gpu3", "NV17") in lines


def test_what_cannot_be_told_is_not_kept() -> None:
    blind = twin("hgx-h100", nvml={("nvmlInit",): nvml_error("DRIVER_NOT_LOADED")})
    lines = check(Promise(nvlinks=18, gpu_model="NVIDIA*"), blind)
    assert {line.kept for line in lines} == {None}


def test_a_down_port_is_not_the_nearest_hca() -> None:
    down = twin("hgx-h100", files={"/sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"})
    lines = check(Promise(hca_distance="PIX", own_hca=True, hca_rate_gbps=400), down)
    assert any(not line.kept for line in lines if "gpu0" in line.subject)


@pytest.mark.parametrize(
    "text",
    ["gpus = 'eight'", "gpu = 8", "gpus = [", "hca_link_layer = 'Token Ring'", "\x00"],
)
def test_a_wrong_promise_is_one_line(text: str) -> None:
    with pytest.raises(GputopoError) as error:
        load(text.encode(), "promise.toml")
    assert str(error.value).startswith("promise.toml: ") and "\n" not in str(error.value)


def test_commands_refuse_nonsense(tmp_path: Path) -> None:
    assert run("check", "--expect", str(tmp_path))[0] == 2
    assert run("check", "--expect", str(tmp_path / "none"))[0] == 2
    assert run("check", "--expect", "profile:../hgx-h100")[0] == 2


def test_renumbered_buses_are_no_difference() -> None:
    host = recorded("no-gpu")
    moved = {
        path.replace("0000:", "0001:"): type(entry)(entry.replace("0000:", "0001:"))
        if type(entry).__name__ == "Link"
        else entry
        for path, entry in host.answers.files.items()
    }
    for path, entry in moved.items():
        if type(entry).__name__ == "Directory":
            moved[path] = type(entry)(n.replace("0000:", "0001:") for n in entry)  # type: ignore[arg-type]
    before = shape(scan("fixture:no-gpu"))
    host.answers.files.clear()
    host.answers.files.update(moved)
    assert differences(before, shape(scan(host))) == []


@pytest.mark.parametrize("name", FIXTURES)
def test_a_machine_does_not_differ_from_itself(name: str) -> None:
    assert run("diff", f"fixture:{name}", f"fixture:{name}")[0] == 0


def test_differences_name_subject_and_both_sides() -> None:
    broken = twin(
        "hgx-h100",
        files={
            f"{GPU0}/current_link_width": "8\n",
            "/sys/class/infiniband/mlx5_3/fw_ver": "28.39.1002\n",
        },
    )
    found = differences(shape(scan("fixture:hgx-h100")), shape(broken))
    assert [(d.subject, d.field, d.a, d.b) for d in found] == [
        ("gpu0", "PCIe width", "x16", "x8"),
        ("hca3", "firmware", "28.41.1000", "28.39.1002"),
    ]


def finding(code: str, *subjects: str) -> Finding:
    return Finding(
        code=code,
        name="name",
        severity="warning",
        confidence="reported",
        subjects=list(subjects),
        summary="summary",
        evidence=[Evidence(source="s", seen="a", expected="b")],
        cost=None,
        remedy=Remedy(text="mend it"),
    )


def report(*findings: Finding) -> Report:
    return Report(findings=list(findings), skipped=[], asked=1)


DAY = datetime.date(2026, 12, 1)


def test_a_waiver_sets_its_finding_aside_until_its_last_day() -> None:
    before = report(finding("NIC505", "gpu4"), finding("NIC505", "gpu5"), finding("PCI101", "gpu4"))
    waiver = Waiver(code="NIC505", subject="gpu4", reason="by purchase", expires=DAY)
    after = waivers.apply(before, [waiver], DAY)
    assert [(f.code, f.subjects) for f in after.findings] == [
        ("NIC505", ["gpu5"]),
        ("PCI101", ["gpu4"]),
    ]
    assert after.waived[0].waiver.reason == "by purchase"
    late = waivers.apply(before, [waiver], DAY + datetime.timedelta(days=1))
    assert (late.findings, late.waived, late.expired) == (before.findings, [], [waiver])


def test_a_folded_finding_is_waived_only_as_a_whole() -> None:
    folded = report(finding("NIC505", "gpu4", "gpu5"))
    one = waivers.apply(folded, [Waiver(code="NIC505", subject="gpu4", reason="r")], DAY)
    both = waivers.apply(folded, [Waiver(code="NIC505", subject="gpu?", reason="r")], DAY)
    assert (len(one.findings), len(both.findings)) == (1, 0)


@pytest.mark.parametrize(
    "text",
    [
        "[[waiver]]\ncode = 'NIC505'",
        "[[waiver]]\ncode = 'NIC505'\nreason = ' '",
        "[[waiver]]\ncode = 1\nreason = 'r'",
        "[[waivers]]",
        "\xff",
    ],
)
def test_a_wrong_waiver_file_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "waivers.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(GputopoError) as error:
        waivers.load(str(path))
    assert "\n" not in str(error.value)


def test_missing_is_never_a_value_in_a_shape() -> None:
    blind = twin("hgx-h100", nvml={("nvmlInit",): Missing("timeout", "no answer")})
    assert shape(blind)["gpu0", "active NVLinks"] == "unknown"
