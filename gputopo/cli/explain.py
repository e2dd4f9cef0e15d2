"""``gputopo explain``."""

from __future__ import annotations

import click

from gputopo.errors import GputopoError


@click.command("explain")
@click.argument("code", required=False)
@click.option("--all", "everything", is_flag=True, help="Explain every rule.")
def command(code: str | None, everything: bool) -> int:
    """Explain a finding by its code (PCI101) or name (link-width-reduced).

    Without CODE the rules are listed.
    """
    from gputopo.rules.registry import rules

    known = rules()
    if everything:
        click.echo("\n\n".join(page(rule) for rule in known.values()))
        return 0
    if code is None:
        for rule in known.values():
            click.echo(f"{rule.code}  {rule.severity:<8} {rule.name}")
        return 0
    for rule in known.values():
        if code.upper() == rule.code or code.lower() == rule.name:
            click.echo(page(rule))
            return 0
    raise GputopoError(f"no rule is called {code!r}; `gputopo explain` lists them")


def page(rule: object) -> str:
    """The page of one rule as text."""
    import textwrap

    from gputopo.rules.registry import FAMILIES, Rule

    assert isinstance(rule, Rule)

    def block(title: str, text: str) -> str:
        return f"{title}\n" + textwrap.fill(
            text, 78, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )

    return "\n\n".join(
        [
            f"{rule.code} {rule.name} ({rule.severity}; {FAMILIES[rule.code[:3]]})",
            block("Why", rule.rationale),
            block("Verify by hand", rule.verify),
            block("Mend", rule.mend),
            "Sources\n" + "\n".join(f"  {source}" for source in rule.sources),
        ]
    )
