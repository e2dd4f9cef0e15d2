"""Where the shared corpus of real machines lies, for tests that use it when it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

CORPUS = Path(__file__).resolve().parents[2] / "shared" / "corpus"

needs_corpus = pytest.mark.skipif(
    not CORPUS.is_dir(), reason="no ../shared/corpus beside this checkout"
)
