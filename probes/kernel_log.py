"""The kernel log of this boot: Xid and SXid events of the NVIDIA driver, fatal PCIe errors.

``dmesg`` prints the kernel's ring buffer and ends; /dev/kmsg would wait for more. Only the kernel's
own messages from warning up are asked for: a recording keeps what was printed, and lower levels
hold serial numbers of plugged-in devices. Many systems let only root read it
(kernel.dmesg_restrict).
"""

from __future__ import annotations

import re

import msgspec

from gputopo.facts import Fact, Missing
from gputopo.host.base import Host
from gputopo.pciaddr import normalise

COMMAND = ["dmesg", "--kernel", "--level=emerg,alert,crit,err,warn"]
TIMEOUT = 5.0

MAX_EVENTS = 500
"""Distinct events that are kept; a log that holds more is not told apart any further."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{5,16})\): (\d{1,4}), ?(.*)")
_SXID = re.compile(
    r"nvidia-nvswitch\d{1,3}: SXid \(PCI:([0-9a-fA-F:.]{5,16})\): (\d{1,6}), "
    r"(Non-fatal|Fatal), ?(.*)"
)
_AER = re.compile(
    r"(\S{7,16}): (?:AER: )?PCIe Bus Error: severity=Uncorrected \((Fatal|Non-Fatal)\)(.*)"
)
_FELL_OFF = re.compile(r"NVRM: GPU (\S{5,16}): .*has fallen off the bus")
_NAMED = re.compile(r"NVRM: The NVIDIA GPU (\S{5,16})")
"""At start-up the driver names the GPU in one line and tells of its fall two lines on."""

_TIME = re.compile(r"\[\s*(\d{1,12})\.\d+\]")
_PROGRAM = re.compile(r"^pid='?<?[\w?]{1,10}>?'?, (?:name=[^,]{0,40}, ?)?")


class LogEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of event on one device. ``kind`` is ``xid``, ``sxid``, ``pcie`` or ``fell-off``.

    ``text`` is the driver's own text of the last one, without the program's name and process id.
    ``first`` and ``last`` are seconds since boot, where the log has them.
    """

    kind: str
    device: str
    code: int
    fatal: bool
    text: str
    count: int
    first: int | None
    last: int | None


class KernelLog(msgspec.Struct, frozen=True, kw_only=True):
    events: list[LogEvent]


def probe(host: Host) -> Fact[KernelLog]:
    """The events since boot, as far back as the ring buffer reaches."""
    if isinstance(host.read_text("/proc/driver/nvidia/version"), Missing):
        return Missing("absent", "/proc/driver/nvidia/version tells of no driver that could log")
    output = host.run(COMMAND, TIMEOUT)
    if isinstance(output, Missing):
        return output
    if output.exit != 0:
        return _refused(output.exit, output.stderr.strip() or output.stdout.strip())
    return parse(output.stdout)


def _refused(exit_code: int, said: str) -> Missing:
    last = said.splitlines()[-1][:120] if said else "no text"
    if re.search(r"not permitted|[Pp]ermission denied", said):
        return Missing("denied", "the kernel log needs root here (kernel.dmesg_restrict)")
    if re.search(r"(?:unrecognized|unknown|invalid|illegal) option", said):
        return Missing("unsupported", f"this dmesg has no levels: {last}")
    return Missing("failed", f"exit code {exit_code}: {last}")


def parse(text: str) -> KernelLog:
    """The events in the order in which they first came. The same event is counted, not repeated."""
    found: dict[tuple[str, str, int], LogEvent] = {}
    named = ""
    for line in text.splitlines():
        line = line[:1000]
        gpu = _NAMED.search(line)
        named = gpu[1] if gpu else named
        event = _event(line, named)
        if event is None:
            continue
        key = (event.kind, event.device, event.code)
        before = found.get(key)
        if before is not None:
            event = msgspec.structs.replace(
                event,
                count=before.count + 1,
                first=before.first,
                fatal=before.fatal or event.fatal,
            )
        elif len(found) >= MAX_EVENTS:
            continue
        found[key] = event
    return KernelLog(events=list(found.values()))


def _event(line: str, named: str) -> LogEvent | None:
    if "NVRM:" not in line and "SXid" not in line and "PCIe Bus Error" not in line:
        return None
    match = _XID.search(line)
    if match is not None:
        return _made("xid", match[1], int(match[2]), False, match[3], line)
    match = _SXID.search(line)
    if match is not None:
        return _made("sxid", match[1], int(match[2]), match[3] == "Fatal", match[4], line)
    match = _AER.search(line)
    if match is not None:
        return _made("pcie", match[1], 0, match[2] == "Fatal", match[3].lstrip(", "), line)
    match = _FELL_OFF.search(line)
    if match is not None:
        return _made("fell-off", match[1], 0, True, "has fallen off the bus", line)
    if named and "NVRM: fallen off the bus" in line:
        return _made("fell-off", named, 0, True, "fell off the bus before it came up", line)
    return None


def _made(kind: str, device: str, code: int, fatal: bool, text: str, line: str) -> LogEvent | None:
    """None where what stands in the place of a device is none."""
    address = normalise(device) or normalise(f"{device}.0")
    if address is None:
        return None
    time = _TIME.search(line)
    seconds = int(time[1]) if time else None
    return LogEvent(
        kind=kind,
        device=address,
        code=code,
        fatal=fatal,
        text=_PROGRAM.sub("", text.strip())[:160],
        count=1,
        first=seconds,
        last=seconds,
    )
