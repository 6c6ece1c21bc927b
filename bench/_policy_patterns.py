"""What conversations lose by what is sent beside them, at several cache sizes.

A trace is replayed plain, and with a pattern added (`bench/_trace_patterns.py`): once as a server does
that keeps one row for a whole session (before), once with a row for each lineage (after). Counted are hit
tokens of the conversations' own turns, which are the same in all of them. What is sent beside needs room
of its own while it runs: what an oracle loses by that, which knows when each lineage resumes, none can keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Literal

from tqdm import tqdm

from bench._single_tier import hits_with
from bench._trace_generator import GeneratorOptions, Shape, generate
from bench._trace_patterns import mixed, parse_patterns
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.policy.policies import ResidencyPolicy, TimeOracle, make_policy
from samovar.cluster.plan.traces.replay import by_session, forecasts, next_starts_s
from samovar.cluster.plan.traces.trace import Trace, TraceTurn
from samovar.configs.sections import PolicyName, PolicySettings, PredictorSettings, ProfilesSettings

MARGIN = 0.002
"""So much of all prompt tokens may be lost against LRU, to noise."""
KEPT_SHARE_MIN = 0.98
"""So much of a conversation's hits must be left with side requests: the bar of issue 21."""
PLAIN = ""
COMPACTION = "compaction"
COMPACT_TOKENS: Mapping[Shape, int] = {"chat": 12_000, "agentic": 60_000, "fooling": 12_000}
PATTERNS = ("side", "title", "subagents", "regenerate", "edit", "side+title+subagents")

Way = Literal["before", "after", "lru", "oracle"]
"""One row a session; one a lineage, learned, with LRU, and with the time oracle."""
WAYS: tuple[Way, ...] = ("before", "after", "lru", "oracle")


@dataclass(frozen=True, slots=True)
class Conversations:
    """A trace, and which of its turns count. `turns`: as many as were read."""

    label: str
    turns: Sequence[TraceTurn]
    block_tokens: int
    count_from_s: float

    def trace(self) -> Trace:
        return Trace(self.label, "generated", self.block_tokens, lambda _: iter(self.turns))


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay at all sizes; `pattern`: see `parse_patterns`, or `PLAIN`."""

    pattern: str
    way: Way
    seed: int


@dataclass(frozen=True, slots=True)
class PatternRow:
    """Hit tokens of the conversations' own turns, of `prompt_tokens`. `plain`: without the pattern."""

    trace: str
    pattern: str
    seed: int
    cache_tokens: int
    prompt_tokens: int
    plain: int
    before: int
    after: int
    lru: int
    plain_lru: int
    oracle: int
    plain_oracle: int

    @property
    def before_share(self) -> float:
        return self.before / max(1, self.plain)

    @property
    def after_share(self) -> float:
        return self.after / max(1, self.plain)

    @property
    def oracle_share(self) -> float:
        return self.oracle / max(1, self.plain_oracle)


def traffic_of(label: str, trace: Trace) -> Conversations:
    """Read a trace; the later half of its turns counts."""
    turns = list(trace.turns())
    return Conversations(label, turns, trace.block_tokens, turns[len(turns) // 2].started_s)


def compacting(shape: Shape, turns: int, block_tokens: int, seed: int) -> Conversations:
    """Generated conversations that are compacted now and then: there is no published trace of them."""
    options = GeneratorOptions(
        shape=shape, turns=turns, seed=seed, block_tokens=block_tokens, compact_tokens=COMPACT_TOKENS[shape]
    )
    return traffic_of(f"generated {shape}", generate(options))


def hits_of(traffic: Conversations, case: Replay, sizes: Sequence[int]) -> dict[int, int]:
    """Hit tokens of the conversations' own turns, by size in blocks."""
    turns: Sequence[TraceTurn] = traffic.turns
    if case.pattern not in (PLAIN, COMPACTION):
        turns = list(mixed(traffic.trace(), parse_patterns(case.pattern), seed=case.seed).turns())
    if case.way == "before":
        turns = list(by_session(turns))
    name: PolicyName = "lru" if case.way == "lru" else "learned"
    settings = PolicySettings(name=name)
    learns = case.way in ("before", "after")
    curves = forecasts(turns, Predictor(PredictorSettings(), seed=case.seed)) if learns else None
    next_s = next_starts_s(turns) if case.way == "oracle" else None
    found: dict[int, int] = {}
    for blocks in sizes:
        policy: ResidencyPolicy = TimeOracle() if case.way == "oracle" else make_policy(settings)
        hits = hits_with(
            turns,
            blocks,
            policy,
            settings,
            curves=curves,
            next_s=next_s,
            count_from_s=traffic.count_from_s,
            profiles=ProfilesSettings(),
        )
        found[blocks] = hits.main_hit_tokens
    return found


def compare(
    traffic: Conversations, patterns: Sequence[str], sizes: Sequence[int], seed: int, jobs: int = 1
) -> list[PatternRow]:
    """Replay the traffic plain and with each pattern, `jobs` at a time in forked processes.

    Of `COMPACTION` the turns are the conversations' own: the way before stands for the plain trace.
    """
    cases = [Replay(pattern, way, seed) for pattern in patterns for way in WAYS]
    if patterns != [COMPACTION]:
        cases += [Replay(PLAIN, way, seed) for way in WAYS if way != "before"]
    found: dict[Replay, Mapping[int, int]] = {}
    if jobs == 1:
        found = {case: hits_of(traffic, case, sizes) for case in cases}
    else:
        # Forked, so that the trace is neither read again nor pickled.
        with ProcessPoolExecutor(jobs, get_context("fork"), _inherit, (traffic,)) as pool:
            futures = {pool.submit(_run_one, case, sizes): case for case in cases}
            for future in tqdm(as_completed(futures), total=len(futures), desc=traffic.label):
                found[futures[future]] = future.result()
    rows = []
    prompt_tokens = sum(turn.input_tokens for turn in traffic.turns if turn.started_s >= traffic.count_from_s)
    for pattern in patterns:
        before, after, lru, oracle = (found[Replay(pattern, way, seed)] for way in WAYS)
        if pattern == COMPACTION:
            plain, plain_lru, plain_oracle = before, lru, oracle
        else:
            plain, plain_lru, plain_oracle = (
                found[Replay(PLAIN, way, seed)] for way in WAYS if way != "before"
            )
        rows += [
            PatternRow(
                trace=traffic.label,
                pattern=pattern,
                seed=seed,
                cache_tokens=blocks * traffic.block_tokens,
                prompt_tokens=prompt_tokens,
                plain=plain[blocks],
                before=before[blocks],
                after=after[blocks],
                lru=lru[blocks],
                plain_lru=plain_lru[blocks],
                oracle=oracle[blocks],
                plain_oracle=plain_oracle[blocks],
            )
            for blocks in sizes
        ]
    return rows


_inherited: list[Conversations] = []  # in a forked process


def _inherit(traffic: Conversations) -> None:
    _inherited[:] = [traffic]


def _run_one(case: Replay, sizes: Sequence[int]) -> dict[int, int]:
    return hits_of(_inherited[0], case, sizes)


def table_of(rows: Sequence[PatternRow]) -> list[dict[str, Any]]:
    """The rows as they are printed and written."""
    return [
        {
            "trace": row.trace,
            "pattern": row.pattern,
            "seed": str(row.seed),
            "cache_tokens": str(row.cache_tokens),
            "plain": str(row.plain),
            "before": f"{row.before_share:.3f}",
            "after": f"{row.after_share:.3f}",
            "lru": f"{row.lru / max(1, row.plain):.3f}",
            "oracle": f"{row.oracle_share:.3f}",
        }
        for row in rows
    ]


def broken_bars(rows: Sequence[PatternRow]) -> Iterator[str]:
    """What issue 21 expects of these hits and they do not show, in words."""
    for row in rows:
        where = f"{row.trace}, {row.pattern}, seed {row.seed}, {row.cache_tokens} tokens: "
        if row.after < KEPT_SHARE_MIN * row.plain:
            yield f"{where}{row.after_share:.3f} of the hits without it (oracle {row.oracle_share:.3f})"
        if row.after < row.lru - MARGIN * row.prompt_tokens:
            yield f"{where}{row.after} < LRU {row.lru}"


def checked(names: str) -> list[str]:
    """Return the patterns of a list with commas, `all` standing for all. Raises `ValueError`."""
    found: list[str] = []
    for name in names.split(","):
        if name not in ("all", COMPACTION):
            parse_patterns(name)
        found += [*PATTERNS, COMPACTION] if name == "all" else [name]
    return list(dict.fromkeys(found))
