"""What a fault is, and all of them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from composer.twin import Twin

Subjects = list[str]
"""Node ids."""

Hurt = Callable[[Twin], "Subjects | None"]


class Injured(msgspec.Struct, frozen=True, kw_only=True):
    """A broken twin and what is broken in it, by node id."""

    twin: Twin
    subjects: Subjects


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault: the code that it must raise, and the codes that may follow from it. ``quiet``: a
    note is enough."""

    name: str
    code: str
    also: tuple[str, ...]
    quiet: bool
    text: str
    hurt: Hurt

    def inject(self, description: dict[str, Any]) -> Injured | None:
        """The broken twin of a machine; None where the fault does not apply."""
        twin = Twin(description)
        subjects = self.hurt(twin)
        return None if subjects is None else Injured(twin=twin, subjects=subjects)


FAULTS: dict[str, Fault] = {}


def fault(code: str, *, also: tuple[str, ...] = (), quiet: bool = False) -> Callable[[Hurt], Hurt]:
    """Registers a fault under the function's name, with dashes."""

    def register(hurt: Hurt) -> Hurt:
        name = hurt.__name__.replace("_", "-")
        if name in FAULTS:
            raise ValueError(f"there is a fault {name} already")
        text = " ".join((hurt.__doc__ or "").split())
        FAULTS[name] = Fault(name=name, code=code, also=also, quiet=quiet, text=text, hurt=hurt)
        return hurt

    return register
