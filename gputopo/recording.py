"""Recording a machine: a scan whose questions and answers are written down."""

from __future__ import annotations

from gputopo import __version__
from gputopo.host.base import Host
from gputopo.host.recorder import Recorder
from gputopo.host.recording import FORMAT, Answers, Header, render
from gputopo.scanning import scan_host
from gputopo.topology.graph import Topology


def record_scan(host: Host) -> tuple[Topology, Answers]:
    """Scans a host; returns what the scan saw and the answers it was built from."""
    recorder = Recorder(host)
    topology = scan_host(recorder)
    answers = recorder.answers
    answers.header = Header(
        format=FORMAT,
        tool=__version__,
        captured_at=host.captured_at,
        kernel=topology.host.kernel or "",
        text=host.kind == "text",
    )
    return topology, answers


def record(host: Host, *, anonymized: bool = True) -> bytes:
    """The recording of one scan of a host, as text."""
    _, answers = record_scan(host)
    if anonymized:
        from gputopo.host.anonymize import anonymize

        answers = anonymize(answers)
    return render(answers)
