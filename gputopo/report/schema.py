"""JSON Schemas of the JSON documents, made from the structures that are encoded.

A schema is thus never behind the output; what is shipped under ``gputopo/schemas`` is compared with
what this makes by a test. Descriptions are the docstrings of structures and fields.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

DIALECT = "https://json-schema.org/draft/2020-12/schema"

UNITS = {
    "_bytes": "Bytes.",
    "gbytes_per_s": "GB/s: 10^9 bytes per second, in one direction.",
    "_gbps": "Gb/s: 10^9 bits per second.",
    "_gts": "GT/s a lane.",
    "seconds": "Seconds.",
}
"""What a field's name says of its unit, by how the name ends."""


def schema_of(document: type[msgspec.Struct], title: str) -> dict[str, Any]:
    """The schema of one kind of document.

    It is open: within the number of a schema fields may be added, and a reader of an older one must
    take what a newer gputopo writes. All fields of today are required, save those of structures
    that leave out what they do not know.
    """
    (reference,), definitions = msgspec.json.schema_components(
        [document], ref_template="#/$defs/{name}"
    )
    for struct in _structs(document):
        definition = definitions[struct.__name__]
        if not struct.__struct_config__.omit_defaults:
            definition["required"] = list(definition["properties"])
        definition.pop("additionalProperties", None)
        for field, text in _descriptions(struct):
            definition["properties"][field]["description"] = text
    return {
        "$schema": DIALECT,
        "title": title,
        **reference,
        "$defs": {name: _tidy(definition) for name, definition in definitions.items()},
    }


def encode_schema(schema: dict[str, Any]) -> bytes:
    """The bytes of a schema file."""
    return msgspec.json.format(msgspec.json.encode(schema), indent=2) + b"\n"


def _structs(document: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """All structures that a document is made of."""
    found: list[type[msgspec.Struct]] = []

    def visit(info: Any) -> None:
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls in found:
                return
            found.append(info.cls)
            for field in info.fields:
                visit(field.type)
        elif isinstance(info, msgspec.inspect.UnionType):
            for each in info.types:
                visit(each)
        elif isinstance(info, (msgspec.inspect.ListType, msgspec.inspect.SetType)):
            visit(info.item_type)
        elif isinstance(info, msgspec.inspect.DictType):
            visit(info.value_type)

    visit(msgspec.inspect.type_info(document))
    return found


def _descriptions(struct: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    """The text of each field that has one: its docstring, else the unit that its name tells."""
    told: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        if cls is msgspec.Struct or not issubclass(cls, msgspec.Struct):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(node, ast.ClassDef)
        for line, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                told[line.target.id] = _prose(str(after.value.value))
    for field in struct.__struct_fields__:
        unit = next((text for ending, text in UNITS.items() if field.endswith(ending)), "")
        if field in told or unit:
            yield field, told.get(field, unit)


def _prose(docstring: str) -> str:
    """A docstring as running text."""
    return " ".join(docstring.replace("``", "`").split())


def _tidy(value: Any) -> Any:
    """Shorter, and in the words of JSON Schema only: no defaults, no OpenAPI discriminators."""
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    if not isinstance(value, dict):
        return value
    tidy = {k: _tidy(v) for k, v in value.items() if k not in ("default", "discriminator")}
    if isinstance(tidy.get("description"), str):
        tidy["description"] = _prose(tidy["description"])
    kinds = tidy.get("anyOf")
    if kinds and all(set(kind) == {"type"} for kind in kinds):
        del tidy["anyOf"]
        tidy["type"] = [kind["type"] for kind in kinds]
    return tidy
