"""The corpus of real outputs: each labelled case is judged rightly, and no file is forgotten."""

from __future__ import annotations

import pytest

from gputopo.rules.registry import rules
from tests.accuracy.corpus import CASES, LABELS, PENDING, judge_case
from tests.accuracy.judge import Case
from tests.corpus import CORPUS, needs_corpus


@needs_corpus
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_case_is_judged_rightly(case: Case) -> None:
    result = judge_case(case)
    if result is None:
        pytest.skip("no importer reads it yet")
    if case.name in PENDING and result.faults:
        pytest.xfail("; ".join(result.faults))
    assert result.faults == []


@needs_corpus
def test_every_file_has_a_label_or_a_reason_for_having_none() -> None:
    labelled = {label.file for label in LABELS.case}
    files = {str(path.relative_to(CORPUS)) for path in CORPUS.rglob("*") if path.is_file()}
    assert sorted(labelled - files) == []
    assert sorted(f for f in files - labelled if not f.startswith(tuple(LABELS.unused))) == []


def test_labels_name_rules() -> None:
    named = {
        code
        for label in LABELS.case
        for words in (*label.must, *label.may, *label.must_not)
        for code in words.split("|")
    }
    assert sorted(named - set(rules())) == []
    assert len(LABELS.case) == len({label.file for label in LABELS.case})
