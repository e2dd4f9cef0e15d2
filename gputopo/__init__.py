"""gputopo: what this GPU server is made of, what is wrong with it, and how to mend it."""

from __future__ import annotations

__version__ = "0.1.0"
