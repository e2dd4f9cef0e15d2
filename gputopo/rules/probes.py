"""PRB: the probes themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gputopo.facts import Missing
from gputopo.rules.finding import Evidence, Remedy, Verdict
from gputopo.rules.registry import rule
from gputopo.topology.graph import Topology
from gputopo.topology.model import Disagreement

NAMED = 3
"""Unreadable answers that the summary names."""

SHOWN = 16
"""Answers and conflicts that a folded finding shows one by one."""


@rule(
    code="PRB001",
    name="probe-timeout",
    severity="error",
    needs=(),
    rationale="""
        A question to the driver or to a device got no answer in time. A GPU that fell off the bus
        or hangs can hold whoever asks it in an uninterruptible sleep, so the asking process is
        killed or left behind and no further driver call is made in the run: what the report lacks
        is unknown, not fine.
    """,
    verify="timeout 10 nvidia-smi; ps -eo pid,stat,wchan:32,args | awk '$2 ~ /D/'",
    mend="""
        Look for Xid errors in the kernel log. If the same call hangs again after a minute, drain
        the node and reset or reboot it.
    """,
    sources=(
        "NVIDIA/gpu-monitoring-tools issue 46: nvidia-smi hangs its caller",
        "NVIDIA/NVSentinel issue 1576: a blocking driver call freezes the poll loop",
    ),
)
def probe_timeout(topology: Topology) -> Iterator[Verdict]:
    for probe in topology.probes:
        if probe.status != "timeout":
            continue
        yield Verdict(
            subjects=["machine"],
            summary=f"the {probe.name} probe got no answer in time: what it would tell is unknown",
            evidence=[
                Evidence(
                    source=f"probe {probe.name}",
                    seen=probe.detail or "timeout",
                    expected="an answer",
                )
            ],
            confidence="reported",
            remedy=Remedy(
                text="Look for Xid errors; scan again with a longer budget; reboot if it persists.",
                commands=["dmesg | grep -iE 'xid|nvrm'", "gputopo scan --timeout 120"],
                needs="root for dmesg on most systems",
            ),
        )


@rule(
    code="PRB002",
    name="probe-unparsed",
    severity="warning",
    needs=(),
    rationale="""
        Something answered in a form that this tool does not know: a new driver's dialect, a wrapped
        or cut table, garbage from a failing device. What it would have told is unknown, and rules
        that need it say so. The raw answer is in a recording.
    """,
    verify="gputopo record -o machine.jsonl.gz, and look for the source that the finding names",
    mend="""
        Run the command by hand. If its output is sound, report it with the recording, which holds
        no names or serial numbers; if it is garbage, look at the device or driver that it came
        from.
    """,
    sources=(
        "NVIDIA/NVSentinel: a reader of topo -m that met unknown headers",
        "wookayin/gpustat issue 170: garbage bytes for a name",
    ),
)
def probe_unparsed(topology: Topology) -> Iterator[Verdict]:
    found = dict.fromkeys(_unparsed(topology))
    if not found:
        return
    sources = list(dict.fromkeys(source for source, _ in found))
    more = f" and {len(sources) - NAMED} more" if len(sources) > NAMED else ""
    yield Verdict(
        subjects=["machine"],
        summary=f"answers that could not be read: {', '.join(sources[:NAMED])}{more}",
        evidence=[
            Evidence(source=source, seen=detail, expected="a form that is known")
            for source, detail in list(found)[:SHOWN]
        ],
        confidence="reported",
        remedy=Remedy(
            text="Look at the answer by hand; if it is sound, report it with a recording.",
            commands=["gputopo record -o machine.jsonl.gz"],
        ),
    )


def _unparsed(topology: Topology) -> Iterator[tuple[str, str]]:
    """Sources whose answers could not be read, and what was wrong with them."""
    for name in topology.facts.__struct_fields__:
        fact = getattr(topology.facts, name)
        if isinstance(fact, Missing):
            if fact.reason == "unparsed":
                yield f"probe {name}", fact.detail
            continue
        for problem in getattr(fact, "problems", []):
            if problem.missing.reason == "unparsed":
                yield problem.source, problem.missing.detail
    for node in topology.nodes.values():
        for field, missing in node.missing.items():
            # A node number that leads nowhere was read well: that is the locality rules' matter.
            if missing.reason == "unparsed" and field != "numa":
                yield f"{node.id}, {field}", missing.detail
    for field, missing in topology.host.missing.items():
        if missing.reason == "unparsed":
            yield field, missing.detail


@rule(
    code="PRB003",
    name="sources-conflict",
    severity="note",
    needs=(),
    rationale="""
        Two sources tell the same fact differently: the PCI tree, NVML, nvidia-smi, numactl. One is
        believed (sysfs before NVML before nvidia-smi), and both are kept, since firmware and
        drivers have been wrong either way. Where it is the NUMA node of a device, NUM202 tells it.
    """,
    verify="compare the two sources that the finding names",
    mend="""
        If the believed source is wrong, the firmware's tables (SRAT, _PXM) need a fix: update the
        BIOS. In a virtual machine the definition of the machine is at fault.
    """,
    sources=("NVIDIA/nccl issue 820: switch firmware swaps NIC order",),
)
def sources_conflict(topology: Topology) -> Iterator[Verdict]:
    kinds: dict[tuple[str, str, str], list[Disagreement]] = {}
    for other in topology.disagreements:
        if other.fact != "numa":
            key = (other.fact, _kind(other.kept_source), _kind(other.other_source))
            kinds.setdefault(key, []).append(other)
    for same in kinds.values():
        yield _conflict(same)


def _kind(source: str) -> str:
    """A source without the numbers of the thing that it was asked about."""
    return re.sub(r"\d+", "#", source)


def _conflict(same: list[Disagreement]) -> Verdict:
    first = same[0]
    more = f", and {len(same) - 1} more like this" if len(same) > 1 else ""
    return Verdict(
        subjects=list(dict.fromkeys(subject for other in same for subject in other.subjects)),
        summary=(
            f"{' and '.join(first.subjects)}: {first.fact} is {first.kept} by {first.kept_source}, "
            f"{first.other} by {first.other_source}{more}"
        ),
        evidence=[
            Evidence(
                source=f"{' and '.join(other.subjects)}: {other.other_source}",
                seen=other.other,
                expected=f"{other.kept}, as {other.kept_source} has it",
            )
            for other in same[:SHOWN]
        ],
        confidence="reported",
        remedy=Remedy(text="Find out which is right; update the firmware if it is the wrong one."),
    )
