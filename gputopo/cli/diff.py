"""``gputopo diff``."""

from __future__ import annotations

import click

from gputopo.cli.options import output_option, timeout_option, write


@click.command("diff")
@click.argument("a")
@click.argument("b", required=False)
@click.option("--format", "style", type=click.Choice(["text", "json"]), default="text")
@output_option
@timeout_option
def command(a: str, b: str | None, style: str, output: str | None, timeout: float) -> int:
    """Show in what two machines differ in shape; without B, A is compared with this machine.

    A and B are what `scan --from` takes. Bus numbers, names and serials do not count: models,
    NUMA nodes, links, switches, NVLinks, ports and versions do. Exits with 1 if they differ.
    """
    from gputopo import scan
    from gputopo.expect.shape import differences, shape

    first, second = scan(a, timeout=timeout), scan(b, timeout=timeout)
    found = differences(shape(first), shape(second))
    if style == "json":
        from gputopo.expect.document import diff_document
        from gputopo.report.json import encode

        write(encode(diff_document(first, second, found)), output)
    else:
        from gputopo.text import clean

        lines = [f"a: {clean(first.source_name)}", f"b: {clean(second.source_name)}"]
        lines += [
            f"{clean(line.subject)}: {line.field} is {clean(line.a)} in a, {clean(line.b)} in b"
            for line in found
        ]
        if not found:
            lines.append("no difference in shape")
        write(("\n".join(lines) + "\n").encode(), output)
    return 1 if found else 0
