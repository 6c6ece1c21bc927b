"""The table of `make test-clients`: a row for each client, with what works and what fails, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from tests.clients.outcome import Outcome, Verdict

STYLES: Mapping[Verdict, str] = {
    "FAILS": "bold red",
    "fails as listed": "yellow",
    "works, listed as failing": "cyan",
}


def table(title: str, versions: Mapping[str, str], outcomes: Sequence[Outcome]) -> Table:
    """Build it; calls that failed for the same reason share a line."""
    result = Table(title=title, title_justify="left", show_lines=True)
    for column in ("client", "works (tokens from the cache)", "fails, and why"):
        result.add_column(column, overflow="fold")
    for client, version in versions.items():
        own = [outcome for outcome in outcomes if outcome.client == client]
        works = [outcome for outcome in own if outcome.is_ok]
        result.add_row(
            f"{client}\n{version}",
            f"{len(works)} of {len(own)}: " + " · ".join(map(_name, works)),
            "\n".join(_reasons(own)),
        )
    return result


def _name(outcome: Outcome) -> str:
    cached = f" ({outcome.cached_tokens})" if outcome.cached_tokens else ""
    style = STYLES.get(outcome.verdict)
    return f"[{style}]{escape(outcome.call)}[/]{cached}" if style else escape(outcome.call) + cached


def _reasons(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each verdict and reason, unexpected failures first."""
    groups: dict[tuple[Verdict, str], list[str]] = {}
    for verdict in ("FAILS", "fails as listed"):
        for outcome in outcomes:
            if outcome.verdict == verdict:
                groups.setdefault((verdict, outcome.detail), []).append(outcome.call)
    return [
        f"[{STYLES[verdict]}]{escape(' · '.join(calls))}[/]: {escape(detail)}"
        for (verdict, detail), calls in groups.items()
    ]


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Give the counts by verdict, and what is in the list of failures without need."""
    lines = []
    for verdict in ("works", "works, listed as failing", "fails as listed", "FAILS"):
        if found := [outcome for outcome in outcomes if outcome.verdict == verdict]:
            lines.append(f"{len(found)} {'calls' if len(found) > 1 else 'call'}: {verdict}")
            if verdict in ("works, listed as failing", "FAILS"):
                lines += [f"  {outcome.client}, {outcome.call}: {_why(outcome)}" for outcome in found]
    return lines


def _why(outcome: Outcome) -> str:
    if outcome.is_ok:
        return f"works, take it out of tests/clients/clients.py: {outcome.expected}"
    return outcome.detail
