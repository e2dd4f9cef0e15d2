"""Faults: each makes a broken twin of a healthy machine, and knows what must be said of it.

A fault is a function on a :class:`~composer.twin.Twin`. It breaks one thing and returns the ids of
what is broken, which the rule of its code must name; None where the machine has nothing that could
break so. ``also`` are the codes that may come with it at error or warning, as consequences: a GPU
without NVLinks is also a pair that falls back to PCIe.
"""

from __future__ import annotations

from composer.faults import gpu, nic, numa, nvlink, others, pci
from composer.faults.registry import FAULTS, Fault, Injured

__all__ = ["FAULTS", "Fault", "Injured", "gpu", "nic", "numa", "nvlink", "others", "pci"]
