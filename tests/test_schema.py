"""The shipped JSON Schemas, against what gputopo writes and against the structures it writes from.

``python -m tests.test_schema`` writes the shipped files anew.
"""

from __future__ import annotations

import copy
import datetime
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator, ValidationError

from gputopo import scan
from gputopo.expect.document import (
    CHECK_SCHEMA,
    DIFF_SCHEMA,
    CheckDocument,
    DiffDocument,
    check_document,
    diff_document,
)
from gputopo.expect.promise import check as check_promise
from gputopo.expect.promise import learn
from gputopo.expect.shape import differences, shape
from gputopo.facts import Missing
from gputopo.host.source import list_fixtures
from gputopo.host.tree import Link
from gputopo.report.json import SCAN_SCHEMA, ScanDocument, encode, scan_document
from gputopo.report.schema import UNITS, encode_schema, schema_of
from gputopo.rules import check
from gputopo.rules.finding import Report, Waived, Waiver
from gputopo.topology.graph import Topology
from tests.rules.twin import twin

SHIPPED = Path(str(files("gputopo"))) / "schemas" / "scan.json"
DOCUMENTS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "scan": (ScanDocument, SCAN_SCHEMA),
    "diff": (DiffDocument, DIFF_SCHEMA),
    "check": (CheckDocument, CHECK_SCHEMA),
}
FIXTURES = [fixture.name for fixture in list_fixtures()]


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with no room for fields that it does not name: today's output has no others."""
    schema = copy.deepcopy(schema)
    for definition in schema["$defs"].values():
        if "properties" in definition:
            definition["additionalProperties"] = False
    return schema


SCHEMA: dict[str, Any] = json.loads(SHIPPED.read_bytes())
OPEN = Draft202012Validator(SCHEMA)
CLOSED = Draft202012Validator(closed(SCHEMA))


def written(topology: Topology, report: Report | None = None) -> Any:
    """What a program that reads the JSON gets."""
    return json.loads(encode(scan_document(topology, report or check(topology))))


def faulty() -> Topology:
    """A machine with findings, skipped rules, unknown values and disagreements."""
    return twin(
        "hgx-h100",
        files={
            "/sys/bus/pci/devices/0000:3b:00.0/current_link_width": b"8\n",
            "/sys/class/infiniband": None,
        },
        nvml={
            ("nvmlDeviceGetNvLinkState", 6, 4): 0,
            ("nvmlDeviceGetUUID", 1): Missing("denied", "no right"),
        },
    )


def test_the_shipped_schema_is_what_the_structures_say() -> None:
    assert json.loads(encode_schema(schema_of(ScanDocument, SCAN_SCHEMA))) == SCHEMA, (
        "run: python -m tests.test_schema"
    )


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["title"] == SCAN_SCHEMA
    assert '"discriminator"' not in SHIPPED.read_text()


@pytest.mark.parametrize("name", FIXTURES)
def test_a_scan_is_valid(name: str) -> None:
    CLOSED.validate(written(scan(f"fixture:{name}")))


def test_a_scan_with_everything_in_it_is_valid() -> None:
    topology = faulty()
    report = check(topology)
    waiver = Waiver(code="PCI101", reason="r", expires=datetime.date(2026, 1, 31))
    waived = [Waived(finding=report.findings[0], waiver=waiver)]
    document = written(topology, msgspec.structs.replace(report, waived=waived, expired=[waiver]))
    CLOSED.validate(document)
    for part in ("findings", "skipped", "disagreements", "waived", "expired", "probes", "links"):
        assert document[part], part


def test_the_machine_without_anything_is_valid(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    document = written(scan(str(tmp_path)))
    CLOSED.validate(document)
    assert document["matrix"] == {"labels": [], "ids": [], "classes": []}


def test_every_kind_of_node_is_among_the_examples() -> None:
    seen = {node["kind"] for name in FIXTURES for node in written(scan(f"fixture:{name}"))["nodes"]}
    kinds = {
        definition["properties"]["kind"]["enum"][0]
        for name, definition in SCHEMA["$defs"].items()
        if "id" in definition.get("properties", {})
    }
    assert seen == kinds


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d["nodes"][0].update(memory_byte=d["nodes"][0].pop("memory_bytes")),
        lambda d: next(n for n in d["nodes"] if n["kind"] == "gpu").pop("uuid"),
        lambda d: next(n for n in d["nodes"] if n["kind"] == "gpu").update(numa="0"),
        lambda d: next(n for n in d["nodes"] if n["kind"] == "gpu")["pcie"].update(width=8.5),
        lambda d: d["nodes"][0].update(kind="toaster"),
        lambda d: d["probes"][0].update(status="fine"),
        lambda d: d["findings"][0].update(severity="fatal"),
        lambda d: d["host"].pop("kernel"),
        lambda d: d.update(schema="gputopo.scan/2"),
        lambda d: d["matrix"].update(classes=None),
        lambda d: d.update(extra=1),
    ],
)
def test_the_closed_schema_catches_a_slip(spoil: Any) -> None:
    document = written(faulty())
    CLOSED.validate(document)
    spoil(document)
    with pytest.raises(ValidationError):
        CLOSED.validate(document)


def test_the_shipped_schema_lets_fields_be_added() -> None:
    document = written(faulty())
    document["added"] = 1
    document["nodes"][0]["added"] = {"in": "a later version"}
    OPEN.validate(document)
    document["nodes"][0].pop("memory_bytes")
    with pytest.raises(ValidationError):
        OPEN.validate(document)


def test_units_and_words_are_told() -> None:
    definitions = SCHEMA["$defs"]
    assert definitions["Gpu"]["properties"]["memory_bytes"]["description"] == "Bytes."
    assert definitions["Pcie"]["properties"]["max_speed_gts"]["description"] == "GT/s a lane."
    assert definitions["Gpu"]["description"].startswith("A GPU. `index` is NVML's")
    told = definitions["ScanDocument"]["properties"]["asked"]["description"]
    assert told == "Rules that gave an answer, findings or none."
    for definition in definitions.values():
        for field, value in definition.get("properties", {}).items():
            if field.endswith(tuple(UNITS)):
                assert value.get("description"), field


def test_a_name_that_is_no_text_does_not_stop_the_output() -> None:
    """The kernel lets interfaces have names of any bytes; Python keeps them by lone surrogates."""
    document = written(
        twin(
            "no-gpu",
            files={
                "/proc/sys/kernel/hostname": "n\udcffme".encode("utf-8", "surrogateescape"),
                "/sys/class/infiniband/ml\udcff0": Link("../../devices/virtual/infiniband/x"),
            },
        )
    )
    CLOSED.validate(document)
    assert "ml\ufffd0" in {node["id"] for node in document["nodes"]}


def test_each_shipped_schema_is_what_its_structures_say() -> None:
    shipped = {entry.name: json.loads(entry.read_bytes()) for entry in SHIPPED.parent.iterdir()}
    made = {
        f"{name}.json": json.loads(encode_schema(schema_of(document, title)))
        for name, (document, title) in DOCUMENTS.items()
    }
    assert shipped == made, "run: python -m tests.test_schema"


def test_diff_and_check_write_what_their_schemas_say() -> None:
    good, bad = scan("fixture:hgx-h100"), faulty()
    found = differences(shape(good), shape(bad))
    promise = learn(good)
    lines = check_promise(promise, bad)
    assert found
    assert {line.kept for line in lines} >= {True, False}
    for name, document in (
        ("diff", diff_document(good, bad, found)),
        ("check", check_document(bad, promise, lines)),
    ):
        schema = json.loads((SHIPPED.parent / f"{name}.json").read_bytes())
        Draft202012Validator(closed(schema)).validate(json.loads(encode(document)))


if __name__ == "__main__":
    place = Path(__file__).resolve().parents[1] / "gputopo" / "schemas"
    for name, (document, title) in DOCUMENTS.items():
        (place / f"{name}.json").write_bytes(encode_schema(schema_of(document, title)))
