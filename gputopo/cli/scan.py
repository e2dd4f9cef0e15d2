"""``gputopo scan``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from gputopo.cli.options import (
    code_option,
    encode_text,
    exit_code,
    fail_on_option,
    output_option,
    source_option,
    timeout_option,
    write,
)

if TYPE_CHECKING:
    from gputopo.rules.finding import Waiver


@click.command("scan")
@source_option
@click.option("--format", "style", type=click.Choice(["text", "json", "nccl-xml"]), default="text")
@output_option
@timeout_option
@fail_on_option
@code_option("--only", "Ask only these rules, by code or family (PCI101,NIC).")
@code_option("--ignore", "Leave these rules out.")
@click.option("--waivers", metavar="FILE", help="Findings that this site lives with (TOML).")
@click.option("--nccl", is_flag=True, help="Also what NCCL will do: NICs, GPUDirect RDMA, P2P.")
@click.option(
    "-v", "--verbose", count=True, help="More: why values are unknown; -vv: all functions."
)
@click.option("-q", "--quiet", is_flag=True, help="Only what is wrong, and nothing if nothing is.")
@click.option("--list-fixtures", is_flag=True, help="List the bundled machines and exit.")
def command(
    source: str | None,
    style: str,
    output: str | None,
    timeout: float,
    fail_on: str,
    only: list[str],
    ignore: list[str],
    waivers: str | None,
    nccl: bool,
    verbose: int,
    quiet: bool,
    list_fixtures: bool,
) -> int:
    """Show a machine as one graph, and what is wrong with it.

    Without --from this machine is read: no root needed, nothing changed, no load put on a GPU.
    """
    if list_fixtures:
        return _list_fixtures()
    from gputopo import scan
    from gputopo.rules import check

    waived = _waivers(waivers) if waivers else []
    topology = scan(source, timeout=timeout)
    report = check(topology, only=only, ignore=ignore)
    if waived:
        from gputopo.rules.waivers import apply

        report = apply(report, waived)
    if style == "json":
        from gputopo.report.json import encode, scan_document

        write(encode(scan_document(topology, report)), output)
    elif style == "nccl-xml":
        from gputopo.nccl import xml
        from gputopo.nccl.build import machine_of

        write(xml.write(machine_of(topology).tree).encode(), output)
    else:
        from gputopo.report.text import render

        here = output in (None, "-")
        tty = here and sys.stdout.isatty()
        text = render(topology, report, tty=tty, verbose=verbose, quiet=quiet)
        if nccl:
            from gputopo.report.nccl import render_nccl

            text += ("\n" if text else "") + render_nccl(topology, tty=tty)
        write(encode_text(text, (sys.stdout.encoding if here else None) or "utf-8"), output)
    return exit_code(report, fail_on)


def _waivers(path: str) -> list[Waiver]:
    from gputopo.rules.waivers import load

    return load(path)


def _list_fixtures() -> int:
    from gputopo.host.source import list_fixtures

    for fixture in list_fixtures():
        click.echo(f"fixture:{fixture.name:<24} {fixture.origin:<9} {fixture.title}")
    return 0
