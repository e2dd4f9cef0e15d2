"""PRB: the probes themselves."""

from __future__ import annotations

from collections.abc import Iterator

from gputopo.rules.finding import Evidence, Remedy, Verdict
from gputopo.rules.registry import rule
from gputopo.topology.graph import Topology


@rule(
    code="PRB001",
    name="probe-timeout",
    severity="error",
    needs=(),
    rationale="""
        A question to the driver or to a device got no answer in time. A GPU that fell off the bus or
        hangs can hold whoever asks it in an uninterruptible sleep, so the asking process is killed or
        left behind and no further driver call is made in the run: what the report lacks is unknown,
        not fine.
    """,
    verify="timeout 10 nvidia-smi; ps -eo pid,stat,wchan:32,args | awk '$2 ~ /D/'",
    mend="""
        Look for Xid errors in the kernel log. If the same call hangs again after a minute, drain the
        node and reset or reboot it.
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
    code="PRB003",
    name="sources-conflict",
    severity="note",
    needs=(),
    rationale="""
        Two sources tell the same fact differently: the PCI tree, NVML, nvidia-smi, numactl. One is
        believed (sysfs before NVML before nvidia-smi), and both are kept, since firmware and drivers
        have been wrong either way.
    """,
    verify="compare the two sources that the finding names",
    mend="""
        If the believed source is wrong, the firmware's tables (SRAT, _PXM) need a fix: update the
        BIOS. In a virtual machine the definition of the machine is at fault.
    """,
    sources=("NVIDIA/nccl issue 820: switch firmware swaps NIC order",),
)
def sources_conflict(topology: Topology) -> Iterator[Verdict]:
    for other in topology.disagreements:
        yield Verdict(
            subjects=other.subjects,
            summary=(
                f"{' and '.join(other.subjects)}: {other.fact} is {other.kept} by "
                f"{other.kept_source}, {other.other} by {other.other_source}"
            ),
            evidence=[
                Evidence(source=other.kept_source, seen=other.kept, expected=other.other),
                Evidence(source=other.other_source, seen=other.other, expected=other.kept),
            ],
            confidence="reported",
            remedy=Remedy(text="Find out which is right; update the firmware if it is the wrong one."),
        )
