"""``gputopo schema``."""

from __future__ import annotations

import click

from gputopo.errors import GputopoError


@click.command("schema")
@click.argument("name", default="scan")
def command(name: str) -> int:
    """Print the JSON Schema of a command's JSON output (default: scan)."""
    from importlib.resources import files

    from gputopo.cli.options import write

    shipped = {
        entry.name.removesuffix(".json"): entry
        for entry in (files("gputopo") / "schemas").iterdir()
        if entry.name.endswith(".json")
    }
    if name not in shipped:
        raise GputopoError(f"no schema is called {name!r}; there is: {', '.join(sorted(shipped))}")
    write(shipped[name].read_bytes(), None)
    return 0
