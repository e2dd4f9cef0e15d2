"""Labelled cases of the corpus of real outputs: ``corpus.toml``, read as cases."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gputopo.errors import SourceError
from gputopo.host.source import open_source
from tests.accuracy.judge import Case, Must, Result, judge_host
from tests.corpus import CORPUS

PLACE = CORPUS
PRESENT = PLACE.is_dir()

TABLE = Path(__file__).with_name("corpus.toml")


class Label(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must and must not be said of a file; ``why`` where the file alone does not show it."""

    file: str
    must: dict[str, list[str]] = {}
    """Codes with the nodes that each must name (none: whichever)."""
    may: list[str] = []
    must_not: list[str] = []
    why: str = ""
    pending: bool = False
    """It waits for an importer, or for rules that judge what little such a text holds: what is
    said wrongly of it is shown in the accuracy table, and fails no test."""


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    case: list[Label]
    unused: dict[str, str]
    """Files, or beginnings of their paths, of which nothing is asserted here, and the reason."""


LABELS: Table = msgspec.toml.decode(TABLE.read_bytes(), type=Table)


def _case(label: Label) -> Case:
    return Case(
        name=label.file,
        source=label.file.partition("/")[0],
        must=[Must(code=code, subjects=subjects) for code, subjects in label.must.items()],
        may=label.may,
        must_not=label.must_not,
    )


CASES = [_case(label) for label in LABELS.case]
PENDING = {label.file for label in LABELS.case if label.pending}


def judge_case(case: Case) -> Result | None:
    """Scans a file of the corpus and judges what is said of it. None for a pending one that cannot
    be read; any other that cannot be read has missed everything."""
    try:
        host = open_source(str(PLACE / case.name))
    except SourceError as error:
        if case.name in PENDING:
            return None
        return Result(case=case, hits=[], misses=[str(error)], false_alarms=[], broken=[])
    return judge_host(case, host)
