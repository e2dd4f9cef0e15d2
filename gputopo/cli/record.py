"""``gputopo record``."""

from __future__ import annotations

import click

from gputopo.cli.options import source_option, timeout_option, write


@click.command("record")
@source_option
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(),
    metavar="FILE",
    help="The recording; gzip when it ends in .gz; - for standard output.",
)
@click.option(
    "--anonymize/--no-anonymize",
    default=True,
    show_default=True,
    help="Replace host names, serials, UUIDs, GUIDs, MAC and IP addresses by stand-ins.",
)
@timeout_option
def command(source: str | None, output: str, anonymize: bool, timeout: float) -> int:
    """Write all that a scan reads into one file of JSON lines, which `scan --from` replays.

    It can be read in an editor and attached to a bug report. Nothing is recorded that a scan does
    not read.
    """
    from gputopo.host.source import open_source
    from gputopo.recording import record
    from gputopo.text import clean

    host = open_source(source, budget=timeout)
    try:
        data = record(host, anonymized=anonymize)
    finally:
        host.close()
    if output.endswith(".gz"):
        import gzip

        data = gzip.compress(data, mtime=0)
    write(data, None if output == "-" else output)
    if output != "-":
        replay = f"replay it with: gputopo scan --from {clean(output)}"
        click.echo(f"{clean(output)}: {len(data)} bytes; {replay}", err=True)
    return 0
