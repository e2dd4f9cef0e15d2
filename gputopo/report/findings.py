"""Findings as text: the verdict in a line, then each with its evidence, cost and remedy."""

from __future__ import annotations

from collections import Counter

from gputopo.report.devices import count
from gputopo.report.layout import Page, Span, cut
from gputopo.rules.finding import SEVERITIES, Finding, Report, Skipped

IN_FULL = 3
"""Findings of one rule that are printed with evidence and remedy; the others in a line each."""

NOTES = 5
"""Notes of one rule that have a line each; of more, their number is told."""

CODES = 8
"""Codes that are listed behind one reason."""

INDENT = " " * 8
DETAIL = " " * 16
"""What the lines of a finding begin with, and those of its details."""


def write_verdict(page: Page, report: Report) -> None:
    """How many findings of each severity, from how many rules, and how many could not answer."""
    numbers = Counter(finding.severity for finding in report.findings)
    items = [Span(count(numbers[s], s), s) for s in SEVERITIES if numbers[s]]
    if not items:
        broken = any(skip.broken for skip in report.skipped)
        mostly = len(report.skipped) > report.asked
        word = "mostly unknown: nothing found" if mostly else "nothing found"
        items = [Span(word, "warning" if broken or mostly else "good")]
    items.append(Span(f"{count(report.asked, 'rule')} asked"))
    if report.skipped:
        items.append(Span(f"{len(report.skipped)} could not be asked"))
    if report.waived:
        items.append(Span(f"{len(report.waived)} waived"))
    page.flow([Span("verdict".ljust(9), "dim")], items, separator=", ")


def write_findings(page: Page, report: Report, verbose: int) -> None:
    """All findings, worst first. Many of one rule are cut short, unless ``verbose``."""
    totals = Counter(finding.code for finding in report.findings)
    seen: Counter[str] = Counter()
    for finding in report.findings:
        seen[finding.code] += 1
        turn, total = seen[finding.code], totals[finding.code]
        if finding.severity == "note" and not verbose:
            _part(page)
            if turn <= NOTES or total == turn == NOTES + 1:
                _write_summary(page, finding, named=False)
            elif turn == NOTES + 1:
                page.line(INDENT, Span(f"{finding.code}: {total - NOTES} more (-v)", "dim"))
        elif verbose or turn <= IN_FULL:
            if page.lines and page.lines[-1]:
                page.line()
            _write_summary(page, finding)
            _write_details(page, finding)
        else:
            _part(page)
            _write_summary(page, finding)
    for waiver in report.expired:
        text = f"waiver of {waiver.code} on {waiver.subject} ended {waiver.expires}"
        page.prose([Span("EXPIRED ", "warning")], f"{cut(text, 200)}: {cut(waiver.reason, 200)}")
    for waived in report.waived if verbose else ():
        text = f"{waived.finding.code}: {cut(waived.finding.summary, 300)}"
        page.prose([Span("WAIVED  ", "dim")], f"{text} ({cut(waived.waiver.reason, 200)})")


def _part(page: Page) -> None:
    """A blank line between the details of a finding and what follows."""
    if page.lines and page.lines[-1] and page.lines[-1][0].text.startswith(DETAIL):
        page.line()


def _write_summary(page: Page, finding: Finding, *, named: bool = True) -> None:
    name = f" {finding.name}" if named else ""
    inferred = " (inferred)" if finding.confidence == "inferred" else ""
    lead = [
        Span(f"{finding.severity.upper():<7} ", finding.severity),
        Span(f"{finding.code}{name}{inferred}: ", "bold"),
    ]
    words = (Span(word) for word in cut(finding.summary, 600).split(" "))
    page.flow(lead, words, separator=" ", hang=[Span(INDENT)])


def _write_details(page: Page, finding: Finding) -> None:
    def lead(title: str) -> list[Span]:
        return [Span(f"{INDENT}{title:<8}", "dim")]

    for evidence in finding.evidence:
        seen = Span(cut(evidence.seen, 200), "bold")
        expected = Span(f"expected {cut(evidence.expected, 200)}")
        page.fields(lead("seen"), [seen, expected, Span(cut(evidence.source, 300), "dim")])
    if finding.cost is not None:
        cost, derivation = cut(finding.cost.text, 300), cut(finding.cost.derivation, 300)
        page.prose(lead("cost"), f"{cost} ({derivation})" if derivation else cost)
    remedy = finding.remedy
    needs = f" Needs {cut(remedy.needs, 200)}." if remedy.needs else ""
    page.prose(lead("remedy"), f"{cut(remedy.text, 600)}{needs}")
    for command in remedy.commands:
        page.line(DETAIL, Span(f"$ {cut(command, 500)}", "note"))
    if remedy.undo:
        page.line(*lead("undo"), Span(f"$ {cut(remedy.undo, 500)}", "note"))


def write_skipped(page: Page, skipped: list[Skipped], verbose: int) -> None:
    """Rules that could not be asked, by reason, broken probes first: unknown is not fine."""
    reasons: dict[tuple[bool, str], list[str]] = {}
    for skip in skipped:
        reasons.setdefault((not skip.broken, skip.reason), []).append(skip.code)
    if reasons:
        _part(page)
    for (whole, reason), codes in sorted(reasons.items()):
        style = "" if whole else "warning"
        if not verbose and len(codes) > CODES:
            codes = [*codes[: CODES - 1], f"{len(codes) - CODES + 1} more (-v)"]
        why, which = Span(cut(reason, 200), style), Span(f"({', '.join(codes)})", "dim")
        page.flow([Span("UNKNOWN ", style)], [why, which], separator=" ")
