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

    schema = files("gputopo") / "schemas" / f"{name}.json"
    if not name.isidentifier() or not schema.is_file():
        raise GputopoError(f"no schema is called {name!r}; there is: scan")
    write(schema.read_bytes(), None)
    return 0
