"""No rule breaks for want of a fact, whichever it is; and what is unknown is never found."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from msgspec.structs import replace

from gputopo.facts import ABSENT, Missing, known
from gputopo.host.recording import NOT_RECORDED, RecordedHost, nvml_error
from gputopo.probes.facts import Facts
from gputopo.probes.nvml import NvmlGpu
from gputopo.rules import check
from gputopo.rules.registry import rules
from gputopo.scanning import scan_host
from gputopo.topology.build import build
from gputopo.topology.graph import Topology
from tests.rules.composed import composed
from tests.rules.twin import recorded, report, twin

MACHINES = ("hgx-h100", "dgx-1-v100", "gb200-tray", "azure-ndv5-vm", "l40s-8-pcie")
GONE = (
    Missing("absent"),
    Missing("denied"),
    Missing("timeout", "no answer"),
    Missing("failed", "NVML UNKNOWN"),
    Missing("unsupported", "NVML NOT_SUPPORTED"),
    Missing("unparsed", "garbage"),
)


def may_lack(hint: Any) -> bool:
    """Whether a field is a fact that may be missing."""
    return get_origin(hint) is Union and Missing in get_args(hint)


OPTIONAL = [field for field, hint in get_type_hints(NvmlGpu).items() if may_lack(hint)]


@lru_cache
def facts_of(machine: str) -> Facts:
    return twin(machine).facts


def broken(facts: Facts) -> list[str]:
    """Rules that raised instead of answering."""
    report = check(build(facts))
    return [
        f"{s.code}: {s.reason}" for s in report.skipped if s.reason.startswith("the rule broke")
    ]


def loud(facts: Facts) -> set[tuple[str, ...]]:
    """What is found at error or warning in the families that this file guards."""
    return {
        (finding.code, *finding.subjects)
        for finding in check(build(facts), only=["GPU", "NVL", "NIC"]).findings
        if finding.severity != "note"
        and finding.code != "GPU310"  # a driver that refuses is a finding of its own
    }


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("probe", [field.name for field in msgspec.structs.fields(Facts)])
def test_a_probe_that_got_nothing(machine: str, probe: str) -> None:
    facts = facts_of(machine)
    for missing in GONE:
        changed = replace(facts, **{probe: missing})
        assert broken(changed) == []
        assert loud(changed) == set()


@pytest.mark.parametrize("machine", MACHINES[:3])
@pytest.mark.parametrize("field", OPTIONAL)
def test_a_field_that_the_driver_does_not_tell(machine: str, field: str) -> None:
    facts = facts_of(machine)
    nvml = known(facts.nvml)
    assert nvml is not None
    for which, missing in ((slice(None), GONE[4]), (slice(1, 2), GONE[3])):
        gpus = list(nvml.gpus)
        gpus[which] = [replace(gpu, **{field: missing}) for gpu in gpus[which]]
        changed = replace(facts, nvml=replace(nvml, gpus=gpus))
        assert broken(changed) == []
        if field != "pci":  # without its address a GPU looks like two
            assert loud(changed) == set()


def eroded(value: Any, rng: random.Random, share: float) -> Any:
    """The same facts with some of those that may be missing taken away."""
    if isinstance(value, Missing):
        return value
    if isinstance(value, msgspec.Struct):
        hints = get_type_hints(type(value))
        changes = {}
        for field in value.__struct_fields__:
            if may_lack(hints[field]) and rng.random() < share:
                changes[field] = rng.choice(GONE)
            else:
                changes[field] = eroded(getattr(value, field), rng, share)
        return replace(value, **changes)
    if isinstance(value, list):
        kept = [eroded(item, rng, share) for item in value]
        return kept[: rng.randrange(len(kept) + 1)] if rng.random() < share / 4 else kept
    if isinstance(value, dict):
        return {key: eroded(item, rng, share) for key, item in value.items()}
    return value


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("share", [0.02, 0.1, 0.4])
def test_facts_missing_at_random(machine: str, share: float) -> None:
    facts = facts_of(machine)
    for seed in range(6):
        rng = random.Random(f"{machine} {share} {seed}")
        changed = Facts(
            **{
                field: eroded(getattr(facts, field), rng, share)
                for field in Facts.__struct_fields__
                if rng.random() > share / 4
            }
        )
        assert broken(changed) == [], seed


def test_entries_missing_at_random() -> None:
    """The same one level down: a recording that lacks files and answers."""
    for seed in range(10):
        rng = random.Random(seed)
        host = recorded("hgx-h100")
        for table in (host.answers.files, host.answers.nvml, host.answers.commands):
            for key in [key for key in table if rng.random() < 0.1]:
                del table[key]
        assert broken(scan_host(host).facts) == [], seed


def test_broken_twins_without_facts() -> None:
    """Rules that fire take other ways; these too must do without what is missing."""
    hurt = composed(
        "hgx-b200",
        machine={"services": {"nvidia-fabricmanager.service": "failed"}, "modules": {}},
        gpu0={"links_down": [1, 2], "remapped_rows": [0, 0, 1, 1], "ecc": False},
        gpu1={"error": "GPU_IS_LOST"},
        gpu2={"fabric_state": 2, "persistence": False, "recovery_action": 3},
        gpu3={"driver": "nouveau", "fabric_health_mask": 1},
        mlx5_3={"state": "DOWN"},
        mlx5_5={"rate": 200, "speed": 8.0},
    ).facts
    assert broken(hurt) == []
    for seed in range(10):
        rng = random.Random(seed)
        changed = Facts(
            **{field: eroded(getattr(hurt, field), rng, 0.05) for field in Facts.__struct_fields__}
        )
        assert broken(changed) == [], seed


def test_rules_name_probes_that_exist() -> None:
    for entry in rules().values():
        assert set(entry.needs) <= set(Facts.__struct_fields__), entry.code


def silent(topology: Topology, code: str) -> bool:
    """Whether a rule finds nothing loud and did not break."""
    found = report(topology, code)
    assert not any(skipped.reason.startswith("the rule broke") for skipped in found.skipped)
    return all(finding.severity == "note" for finding in found.findings)


@pytest.mark.parametrize("missing", [NOT_RECORDED, Missing("denied"), nvml_error("NOT_SUPPORTED")])
def test_a_handle_that_nobody_asked_for_is_no_lost_gpu(missing: Missing) -> None:
    topology = twin("hgx-h100", nvml={("nvmlDeviceGetHandleByIndex", 0): missing})
    nvml = known(topology.facts.nvml)
    assert nvml is not None and nvml.lost == {}
    assert any(problem.missing == missing for problem in nvml.problems)
    assert silent(topology, "GPU304")


def gpu_function(file: str) -> str:
    return f"/sys/bus/pci/devices/0000:19:00.0/{file}"


@pytest.mark.parametrize("missing", [NOT_RECORDED, Missing("denied"), Missing("timeout")])
def test_a_driver_link_that_was_not_read_is_unknown(missing: Missing) -> None:
    topology = twin("hgx-h100", files={gpu_function("driver"): missing})
    assert silent(topology, "GPU309")
    assert "gpu0: its driver cannot be read" in report(topology, "GPU309").skipped[0].reason
    assert not silent(twin("hgx-h100", files={gpu_function("driver"): ABSENT}), "GPU309")


@pytest.mark.parametrize("file", ["class", "vendor"])
def test_gpus_are_not_counted_when_a_function_is_unread(file: str) -> None:
    topology = twin("hgx-h100", files={gpu_function(file): Missing("denied")})
    assert silent(topology, "GPU302")
    assert "0000:19:00.0 cannot be read" in report(topology, "GPU302").skipped[0].reason


def test_a_link_whose_other_end_is_unread_is_not_missing() -> None:
    remote = {("nvmlDeviceGetNvLinkRemotePciInfo", 0, 0): NOT_RECORDED}
    topology = twin("dgx-1-v100", nvml=remote)
    assert silent(topology, "NVL402")
    assert "gpu0: where its NVLinks lead is unknown" in report(topology, "NVL402").skipped[0].reason


@pytest.mark.parametrize("mask", [{}, [1], "1", 1.5, True])
def test_a_fabric_health_of_the_wrong_type_is_unparsed(mask: Any) -> None:
    told = recorded("hgx-h100").nvml("nvmlDeviceGetGpuFabricInfoV", 0)
    assert isinstance(told, dict)
    call = ("nvmlDeviceGetGpuFabricInfoV", 0)
    topology = twin("hgx-h100", nvml={call: {**told, "healthMask": mask}})
    assert topology.gpus[0].missing["fabric"].reason == "unparsed"
    assert silent(topology, "NVL405")


def test_inactive_links_of_a_gpu_without_driver_facts() -> None:
    """Two GPUs of one address: only one of them is a node with NVML's number."""
    down = {("nvmlDeviceGetNvLinkState", 0, link): 0 for link in range(4)}
    topology = twin("hgx-h100", nvml={**down, ("nvmlDeviceGetName", 0): Missing("timeout", "hung")})
    assert broken(topology.facts) == []
    found = known(topology.facts.nvml)
    assert found is not None
    gone = replace(
        found,
        lost={0: Missing("timeout", "hung")},
        gpus=twin("hgx-h100", nvml=down).facts.nvml.gpus,
    )  # type: ignore[union-attr]
    changed = replace(topology.facts, nvml=gone)
    assert broken(changed) == []
    assert ("NVL401", "gpu0") not in loud(changed)


def test_a_numa_node_that_was_not_read_is_not_blamed_on_the_firmware() -> None:
    topology = twin("hgx-h100", files={gpu_function("numa_node"): NOT_RECORDED})
    assert "gpu0: its NUMA node cannot be read" in report(topology, "NUM201").skipped[0].reason
    assert report(topology, "NUM201").findings == []


def test_modules_that_were_not_listed_may_be_loaded() -> None:
    host = recorded("a100-nps4")
    host.answers.files["/sys/module"] = Missing("denied")
    assert silent(scan_host(host), "NIC507")


def test_nics_are_not_far_when_a_place_is_unread() -> None:
    """The HCA beside gpu0 cannot be placed: the fabric is not far, its way is unknown."""
    topology = twin("hgx-h100", files={"/sys/bus/pci/devices/0000:19:00.0": NOT_RECORDED})
    assert silent(topology, "NIC505") and silent(topology, "NIC506")


def test_nodes_without_their_cpus_or_packages_are_not_suspect() -> None:
    for gone in ("/sys/devices/system/node/node1/cpulist", "/sys/devices/system/node/node1/cpumap"):
        host = recorded("a100-nps4")
        host.answers.files[gone] = Missing("denied")
        assert silent(scan_host(host), "NUM205")


@pytest.mark.parametrize("machine", ["hgx-h100", "l40s-8-pcie", "a100-nps4", "dgx-1-v100"])
def test_taking_answers_away_finds_nothing_more(machine: str) -> None:
    whole, rules_broken = heard(recorded(machine))
    assert not rules_broken
    for seed in range(20):
        rng = random.Random(f"{machine} {seed}")
        host = recorded(machine)
        share = rng.uniform(0.002, 0.2)
        tables: tuple[dict[Any, Any], ...]
        tables = (host.answers.files, host.answers.nvml, host.answers.commands)
        for table in tables:
            for key in [key for key in table if rng.random() < share]:
                other = rng.choice((None, Missing("denied"), Missing("timeout", "no answer")))
                if other is None:
                    del table[key]
                else:
                    table[key] = other
        found, rules_broken = heard(host)
        assert not rules_broken, seed
        assert found - whole == set(), seed


def heard(host: RecordedHost) -> tuple[set[tuple[str, ...]], list[str]]:
    """What is found at error or warning, but that probes broke; and rules that raised."""
    told = check(scan_host(host))
    return {
        (finding.code, *finding.subjects)
        for finding in told.findings
        if finding.severity != "note" and finding.code not in ("PRB001", "PRB002")
    }, [s.code for s in told.skipped if s.reason.startswith("the rule broke")]
