"""What `make bench-router` makes of its records: rows, load spread, resumes, wrong texts. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench._router_load import PHASES, Phase

RESUME_S = 2.0
"""A session whose replica died is to go on within this time,"""

RECOMPUTED_SHARE = 0.1
"""and have less than this much of its history computed again: the last blocks were on their way to a tier."""

P95_OF_HASH, P95_OF_POW2 = 0.8, 0.5
"""Issue 4: our p95 TTFT is to be at most these parts of theirs."""


@dataclass(frozen=True, slots=True)
class Record:
    """One turn of one run. Times are of one monotonic clock; `first_s` is None when no answer came at all.

    `prompt`: a digest of all messages; two records that share it were asked the same. `tokens`: prompt
    tokens by where their KV came from. `errors`: what failed on the way, one for each try.
    """

    router: str
    round: int
    phase: Phase
    session: int
    number: int
    branch: int
    sent_s: float
    prompt: str
    first_s: float | None = None
    done_s: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    replica: str = ""
    errors: tuple[str, ...] = ()

    @property
    def ttft_s(self) -> float | None:
        """From the first try to the first text."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed for this turn."""
        return sum(count for source, count in self.tokens.items() if source != "compute")


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica killed at `at_s`, of the records' clock."""

    router: str
    round: int
    replica: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Grow:
    """One more replica asked for at `at_s`, beside those of `before`."""

    router: str
    round: int
    before: frozenset[str]
    at_s: float


def percentile(values: Iterable[float], share: float) -> float | None:
    """The `share` quantile, between neighbours where it falls there; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def wrong_texts(records: Sequence[Record]) -> list[Record]:
    """Answers that differ from what most said to the same messages. Greedy answers may not differ."""
    by_prompt: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.first_s is not None:
            by_prompt[record.prompt].append(record)
    wrong = []
    for same in by_prompt.values():
        ((usual, _),) = Counter(record.text for record in same).most_common(1)
        wrong += [record for record in same if record.text != usual]
    return wrong


def rows(records: Sequence[Record], routers: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each router and phase; a wrong text is an error."""
    wrong = {id(record) for record in wrong_texts(records)}
    found = []
    for router in routers:
        for phase in PHASES:
            own = [record for record in records if (record.router, record.phase) == (router, phase)]
            if not own:
                continue
            ttfts = [record.ttft_s for record in own if record.ttft_s is not None]
            found.append(
                {
                    "router": router,
                    "phase": phase,
                    "prompt_tokens": sum(record.prompt_tokens for record in own),
                    "hit_tokens": sum(record.hit_tokens for record in own),
                    "ttft_p50_s": percentile(ttfts, 0.5),
                    "ttft_p95_s": percentile(ttfts, 0.95),
                    "ttft_p99_s": percentile(ttfts, 0.99),
                    "errors": sum(len(record.errors) + (id(record) in wrong) for record in own),
                }
            )
    return found


def details(records: Sequence[Record], routers: Sequence[str], replicas: int) -> list[dict[str, Any]]:
    """What the rows have no place for, by router and phase: sources, load spread, what failed.

    `spread`: requests of the busiest replica over the mean of `replicas`; the median over rounds. `at_home`:
    share of the conversations' own turns that ran where the one before did. `main_ttft_p95_s`: of these.
    """
    found = []
    for router in routers:
        for phase in ("open", *PHASES):
            own = [record for record in records if (record.router, record.phase) == (router, phase)]
            if not own:
                continue
            tokens: Counter[str] = sum((Counter(record.tokens) for record in own), Counter())
            spreads = [_spread(some, replicas) for some in by_round(own).values()]
            found.append(
                {
                    "router": router,
                    "phase": phase,
                    "turns": len(own),
                    "spread": statistics.median(spreads),
                    "at_home": at_home(records, router, phase),
                    "main_ttft_p95_s": _p95([record for record in own if record.branch == 0]),
                    "tokens": dict(sorted(tokens.items())),
                    "errors": dict(Counter(error for record in own for error in record.errors)),
                }
            )
    return found


def at_home(records: Sequence[Record], router: str, phase: Phase) -> float | None:
    """Share of a phase's later turns served by the replica of the turn before; None without any.

    Of the conversations themselves: what was asked beside them does not count.
    """
    stayed: list[bool] = []
    last: dict[tuple[int, int], str] = {}
    own = [record for record in records if record.router == router and record.branch == 0 and record.replica]
    for record in sorted(own, key=lambda record: record.sent_s):
        before = last.get((record.round, record.session))
        if before is not None and record.phase == phase:
            stayed.append(record.replica == before)
        last[record.round, record.session] = record.replica
    return sum(stayed) / len(stayed) if stayed else None


def by_round(records: Iterable[Record]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        found[record.round].append(record)
    return found


def _spread(records: Sequence[Record], replicas: int) -> float:
    served = Counter(record.replica for record in records if record.replica)
    return max(served.values(), default=0) * replicas / max(1, served.total())


def resumes(records: Sequence[Record], kill: Kill) -> dict[str, Any]:
    """How the sessions went on that lived on the killed replica: each one's first answer after the kill.

    `waits_s`: from the kill or, when that came later, the question. `first_answer_s`: from the kill to the
    first of them all. `recomputed_tokens`: of what the conversation had before the question.
    """
    own = [r for r in records if (r.router, r.round) == (kill.router, kill.round) and r.branch == 0]
    before: dict[int, Record] = {}
    after: dict[int, Record] = {}
    for record in sorted(own, key=lambda record: record.done_s):
        if record.first_s is None:
            continue
        if record.done_s < kill.at_s:
            before[record.session] = record
        else:
            after.setdefault(record.session, record)
    lived = {session for session, record in before.items() if record.replica == kill.replica}
    pairs = [(before[session], after[session]) for session in sorted(lived & after.keys())]
    waits_s = [max(0.0, (now.first_s or 0.0) - max(now.sent_s, kill.at_s)) for _, now in pairs]
    recomputed = (max(0, was.prompt_tokens + was.answer_tokens - now.hit_tokens) for was, now in pairs)
    return {
        "router": kill.router,
        "round": kill.round,
        "sessions": len(lived),
        "resumed": len(pairs),
        "within_2s": sum(wait_s <= RESUME_S for wait_s in waits_s),
        "first_answer_s": min(((now.first_s or 0.0) - kill.at_s for _, now in pairs), default=None),
        "wait_p50_s": percentile(waits_s, 0.5),
        "wait_max_s": max(waits_s, default=None),
        "cached_tokens": sum(now.hit_tokens for _, now in pairs),
        "recomputed_tokens": sum(recomputed),
        "waits_s": waits_s,
    }


def newcomer(records: Sequence[Record], grow: Grow) -> dict[str, Any]:
    """What the added replica did: when its first answer began, how many turns it served and knew."""
    late = [r for r in records if (r.router, r.round, r.phase) == (grow.router, grow.round, "grow")]
    own = [record for record in late if record.replica and record.replica not in grow.before]
    return {
        "router": grow.router,
        "round": grow.round,
        "first_answer_s": min(((record.first_s or 0.0) - grow.at_s for record in own), default=None),
        "turns": len(own),
        "prompt_tokens": sum(record.prompt_tokens for record in own),
        "hit_tokens": sum(record.hit_tokens for record in own),
    }


def expectations(records: Sequence[Record], resumed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What issue 4 expects of our router, beside what this run measured: medians of the rounds' ratios."""
    found = []

    def expect(what: str, limit: str, value: float | None, ok: bool) -> None:
        found.append({"what": what, "expected": limit, "measured": value, "holds": ok})

    steady = [record for record in records if record.phase == "steady"]
    hits = _ratio(steady, "consistent_hash", lambda own: sum(record.hit_tokens for record in own))
    if hits is not None:
        expect("hit tokens of consistent_hash", ">= 1", hits, hits >= 1)
    for other, part in (("consistent_hash", P95_OF_HASH), ("pow2", P95_OF_POW2)):
        ratio = _ratio(steady, other, _p95)
        if ratio is not None:
            expect(f"p95 TTFT of {other}", f"<= {part}", ratio, ratio <= part)
    ours = [one for one in resumed if one["router"] == "samovar" and one["sessions"]]
    if ours:
        worst = max((one["wait_max_s"] for one in ours if one["wait_max_s"] is not None), default=None)
        within = worst is not None and all(one["within_2s"] == one["resumed"] for one in ours)
        expect("s until a killed replica's session goes on", f"<= {RESUME_S}", worst, within)
        recomputed = sum(one["recomputed_tokens"] for one in ours)
        known = recomputed + sum(one["cached_tokens"] for one in ours)
        share = recomputed / known if known else None
        limit = f"< {RECOMPUTED_SHARE}"
        expect("... and share recomputed", limit, share, share is not None and share < RECOMPUTED_SHARE)
    return found


def _p95(records: Sequence[Record]) -> float | None:
    return percentile((record.ttft_s for record in records if record.ttft_s is not None), 0.95)


def _ratio(
    records: Sequence[Record], other: str, measure: Callable[[Sequence[Record]], float | None]
) -> float | None:
    """Ours over theirs in the same round; None where one of them did not run."""
    ratios = []
    for own in by_round(records).values():
        ours, theirs = (measure([r for r in own if r.router == name]) for name in ("samovar", other))
        if ours is not None and theirs:
            ratios.append(ours / theirs)
    return statistics.median(ratios) if ratios else None
