"""No rule breaks for want of a fact, whichever it is; and what is unknown is never found."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from msgspec.structs import replace

from gputopo.facts import Missing, known
from gputopo.probes.facts import Facts
from gputopo.probes.nvml import NvmlGpu
from gputopo.rules import check
from gputopo.rules.registry import rules
from gputopo.scanning import scan_host
from gputopo.topology.build import build
from tests.rules.composed import composed
from tests.rules.twin import recorded, twin

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
