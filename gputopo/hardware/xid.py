"""Xid and SXid events of the kernel log: what the common codes mean and what they ask for.

Told in this project's words from NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors, for
Ampere and later) and its GPU debug guidelines. ``concern`` says how far an event reaches:

* ``application``: a program did something wrong or was ended; the GPU is fine
* ``watch``: corrected or contained; worth a look and a reset when convenient
* ``device``: the GPU, its memory, firmware or links need a reset, service or a reboot
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Concern = Literal["application", "watch", "device"]


class Meaning(NamedTuple):
    concern: Concern
    what: str
    action: str


FELL_OFF = 79

_LOOK_AT_PROGRAM = "look at the program: compute-sanitizer names the faulting line"
_RESET = "reset the GPU; if it comes back, have it serviced"
_NVLINK = "look at `nvidia-smi nvlink -e` and at both ends of the link; reset the GPUs together"

XIDS: dict[int, Meaning] = {
    8: Meaning("application", "a program's channel stopped making progress", _LOOK_AT_PROGRAM),
    13: Meaning("application", "a kernel raised an exception (often an access out of bounds)",
                _LOOK_AT_PROGRAM),
    31: Meaning("application", "a program touched GPU memory that is not mapped", _LOOK_AT_PROGRAM),
    32: Meaning("watch", "a corrupted command stream, often for a poor PCIe connection",
                "check the GPU's PCIe link and its correctable errors"),
    38: Meaning("watch", "the driver's firmware missed its watchdog", "update the driver"),
    43: Meaning("application", "a program ran into a fault and was stopped", _LOOK_AT_PROGRAM),
    44: Meaning("application", "a fault while switching between programs", _LOOK_AT_PROGRAM),
    45: Meaning("application", "a program was ended and its work cleaned up (also after Ctrl-C)",
                "nothing by itself; look for another Xid just before it"),
    46: Meaning("device", "the GPU stopped processing", _RESET),
    48: Meaning("device", "an ECC error that could not be corrected",
                "reset the GPU; if it repeats, run the field diagnostics"),
    54: Meaning("device", "the board's auxiliary power is not connected",
                "check the power cables of the board"),
    61: Meaning("device", "the GPU's power controller stopped", _RESET),
    62: Meaning("device", "the GPU's power controller halted", _RESET),
    63: Meaning("watch", "a faulty memory row or page was recorded to be taken out of use",
                "reset the GPU when no job runs, so that the repair takes effect"),
    64: Meaning("device", "a faulty memory row or page could not be taken out of use",
                "reset the GPU; if it repeats, replace it"),
    68: Meaning("application", "the video decoder raised an exception", _LOOK_AT_PROGRAM),
    69: Meaning("application", "a program gave the graphics engine a wrong command",
                _LOOK_AT_PROGRAM),
    74: Meaning("device", "an NVLink failed at this end or the other", _NVLINK),
    FELL_OFF: Meaning("device", "the GPU no longer answers on PCIe",
                      "reboot; then check seating, power and the PCIe link"),
    92: Meaning("watch", "many corrected ECC errors", "watch it; have it serviced if it goes on"),
    94: Meaning("watch", "a memory error that cost one program and stayed with it",
                "restart that program; reset the GPU when no job runs"),
    95: Meaning("device", "a memory error that was not contained: other programs may be hit",
                "drain and reset the GPU before the next job"),
    109: Meaning("device", "switching between programs timed out", _RESET),
    110: Meaning("device", "a security fault, rare unless hardware fails",
                 "power the machine off and on; have it serviced if it comes back"),
    119: Meaning("device", "the GPU's system processor (GSP) did not answer in time",
                 "reset the GPU; power-cycle the machine if that fails; update the driver"),
    120: Meaning("device", "the GPU's system processor (GSP) failed",
                 "reset the GPU; power-cycle the machine if that fails; update the driver"),
    121: Meaning("watch", "corrected errors on the C2C link to the Grace CPU",
                 "reset the GPU at the next service window, so that the link trains anew"),
    136: Meaning("device", "an NVLink did not train", _NVLINK),
    137: Meaning("application", "a program touched a peer's memory over NVLink without right",
                 _LOOK_AT_PROGRAM),
    140: Meaning("device", "ECC errors that neither were corrected nor led to a repair", _RESET),
    143: Meaning("device", "the GPU did not come up", _RESET),
    **{code: Meaning("device", "an NVLink 5 failure", _NVLINK) for code in range(144, 151)},
    155: Meaning("watch", "an NVLink was taken down by software", _NVLINK),
    156: Meaning("watch", "a faulty part of the GPU was taken out of use",
                 "reset the GPU when no job runs, so that the repair takes effect"),
    157: Meaning("device", "a faulty part of the GPU could not be taken out of use",
                 "have the GPU serviced"),
    158: Meaning("device", "the GPU ran into a fatal time-out", _RESET),
    167: Meaning("device", "a fatal time-out on PCIe", _RESET),
    171: Meaning("device", "an error of the GPU's DRAM that could not be corrected", _RESET),
    172: Meaning("device", "an error of the GPU's SRAM that could not be corrected", _RESET),
}  # fmt: skip

UNLISTED = Meaning("watch", "not in this tool's list", "look it up in NVIDIA's Xid catalogue")

RECOVERY_CHANGED = 154
"""Says in words what recovery the driver now wants; the cause is another Xid just before it."""


def meaning(code: int) -> Meaning:
    return XIDS.get(code, UNLISTED)
