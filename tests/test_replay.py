"""A recording replays to the very output of the run that made it: on this machine and others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gputopo.host.anonymize import Anonymizer
from gputopo.host.base import Host
from gputopo.host.live import LiveHost
from gputopo.host.recording import parse, render
from gputopo.host.source import list_fixtures, open_source
from gputopo.recording import record_scan
from gputopo.report.json import encode, scan_document
from gputopo.report.text import render as render_text
from gputopo.rules import check
from gputopo.scanning import scan_host
from gputopo.topology.graph import Topology
from tests.corpus import CORPUS, needs_corpus


def document(topology: Topology) -> bytes:
    """``scan --format json`` less what differs by nature: times, and where it was read from."""
    found: dict[str, Any] = msgspec.json.decode(encode(scan_document(topology, check(topology))))
    del found["source"], found["captured_at"]
    for probe in found["probes"]:
        del probe["seconds"]
    return encode(found)


def replayed(host: Host) -> tuple[Topology, Topology]:
    """What the recording run saw, and what its recording replays to."""
    seen, answers = record_scan(host)
    return seen, scan_host(parse(render(answers), "recording"))


def test_this_machine_replays_byte_for_byte() -> None:
    host = LiveHost()
    try:
        seen, again = replayed(host)
    finally:
        host.close()
    assert document(again) == document(seen)
    # The text names its source, and says nothing of times unless asked.
    text = render_text(seen, check(seen), tty=False, width=100)
    replay = render_text(again, check(again), tty=False, width=100)
    body = text.split("\n\n", 1)[1], replay.split("\n\n", 1)[1]
    assert body[0] == body[1]


@pytest.mark.parametrize("name", [fixture.name for fixture in list_fixtures()])
def test_recording_a_replay_changes_nothing(name: str) -> None:
    seen, again = replayed(open_source(f"fixture:{name}"))
    assert document(again) == document(seen)


@needs_corpus
def test_an_archive_replays_byte_for_byte() -> None:
    seen, again = replayed(open_source(str(CORPUS / "hwloc" / "nvidia-dgx-gb10.tar.bz2")))
    assert document(again) == document(seen)


@pytest.mark.parametrize("name", ["hgx-h100", "gb200-tray"])
def test_anonymized_replay_differs_by_the_stand_ins_alone(name: str) -> None:
    seen, answers = record_scan(open_source(f"fixture:{name}"))
    anonymizer = Anonymizer(answers)
    again = scan_host(parse(render(anonymizer.replace(answers)), "recording"))
    assert document(again).decode() == anonymizer.text(document(seen).decode())


def test_names_that_are_no_text_can_be_recorded(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    net = tmp_path / "sys" / "class" / "net"
    net.mkdir(parents=True)
    (net / os.fsdecode(b"eth\xff")).touch()
    (net / "link").symlink_to(os.fsdecode(b"nowhere\xfe"))
    seen, again = replayed(open_source(str(tmp_path)))
    assert document(again) == document(seen)
