"""The table of `make test-clients`: a row for each client, with what works and what fails, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

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
    """Give the counts by verdict, the failures one by one, and what is listed as failing and works."""
    lines = []
    for verdict in get_args(Verdict):
        if found := [outcome for outcome in outcomes if outcome.verdict == verdict]:
            lines.append(f"{len(found)} {'calls' if len(found) > 1 else 'call'}: {verdict}")
            if verdict == "FAILS":
                lines += [f"  {outcome.client}, {outcome.call}: {outcome.detail}" for outcome in found]
    stale = Counter(outcome.expected for outcome in outcomes if outcome.is_ok and outcome.expected)
    lines += [
        f"tests/clients/clients.py says: {reason}; {count} of the calls it is about work"
        for reason, count in stale.items()
    ]
    return lines
