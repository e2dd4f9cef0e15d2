"""The diagnosis table: what must and must not be said, and what is."""

from __future__ import annotations

import sys
from pathlib import Path

# The composer and its faults are developer tools beside the package.
sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
