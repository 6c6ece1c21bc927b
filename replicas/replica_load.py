"""How much work a replica has and expects, as numbers that Ray Serve carries to whoever scales.

Light: that is decided in a process that has no model. Knows nothing of the decision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicas.engine import Engine
    from replicas.sequence import Sequence

PREFIX = "samovar_"
"""Of the names under which Serve carries them: others may have metrics of their own."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica's load; none of it is negative.

    `running`, `waiting`: sequences; `sequences_max`: as many run at once. `prompts`: sequences whose prompt
    is not computed yet; `prefill_s`: what computing those is expected to take. `pool_share`: of the pool's
    pages, those in use; `pool_share_waiting`: what sequences that wait will need. `returns`: idle sessions
    that are expected back within the horizon; `returns_pool_share`: what those will need of the pool.
    """

    running: float
    waiting: float
    sequences_max: float
    prompts: float
    prefill_s: float
    pool_share: float
    pool_share_waiting: float
    returns: float
    returns_pool_share: float

    def metrics(self) -> dict[str, float]:
        """As `of_metrics` reads it."""
        return {PREFIX + name: float(value) for name, value in asdict(self).items()}

    @staticmethod
    def of_metrics(metrics: Mapping[str, float]) -> ReplicaLoad | None:
        """None where one is missing or is no number that a load could be."""
        try:
            load = ReplicaLoad(**{name: float(metrics[PREFIX + name]) for name in FIELDS})
        except (KeyError, TypeError, ValueError):
            return None
        return load if load.is_sane else None

    @property
    def is_sane(self) -> bool:
        """Whether it can be true."""
        values = [getattr(self, name) for name in FIELDS]
        return all(math.isfinite(value) and value >= 0 for value in values) and self.sequences_max >= 1


FIELDS = tuple(field.name for field in fields(ReplicaLoad))


def load_of(engine: Engine, horizon_s: float) -> ReplicaLoad:
    """The load of an engine, on its thread. `horizon_s`: real seconds."""
    scheduler, price = engine.scheduler, engine.meter.price
    pool = scheduler.pool
    prompts, prefill_s = 0, 0.0
    for sequence in scheduler.sequences():
        new_tokens, after_tokens = _uncomputed(engine, sequence)
        if new_tokens > 0:
            prompts += 1
            prefill_s += price.seconds(new_tokens, after_tokens)
    news = None if engine.offload is None else engine.offload.news
    expected = pool.returns_within(horizon_s * (1.0 if news is None else news.rate))
    waiting_pages = sum(pool.pages_for(len(sequence.tokens)) for sequence in scheduler.waiting)
    return ReplicaLoad(
        running=sum(sequence.forks for sequence in scheduler.running),
        waiting=sum(sequence.forks for sequence in scheduler.waiting),
        sequences_max=scheduler.sequences_max,
        prompts=prompts,
        prefill_s=prefill_s,
        pool_share=pool.active / pool.usable,
        pool_share_waiting=waiting_pages / pool.usable,
        returns=expected.sessions,
        returns_pool_share=min(expected.tokens / (pool.usable * pool.block_tokens), expected.sessions),
    )


def _uncomputed(engine: Engine, sequence: Sequence) -> tuple[int, int]:
    """Tokens of its prompt that are still to be computed, and how many are there before them.

    What the pool or the tiers have is not computed, as a rule.
    """
    if sequence.holds:
        return 0, sequence.computed
    if sequence.pages:
        return max(0, sequence.prompt_tokens - sequence.computed), sequence.computed
    pool = engine.scheduler.pool
    known = sequence.prompt_tokens - 1
    found_blocks = 0
    if engine.scheduler.prefix_reuse:
        keys = sequence.keys_of(known // pool.block_tokens, pool.block_tokens)
        found_blocks = len(pool.match(keys, sequence.tokens))
    visit = sequence.visit
    if visit is not None and visit.found is not None:
        found_blocks = max([found_blocks, *(span.first + span.blocks for span in visit.found.spans)])
    have = min(known, found_blocks * pool.block_tokens)
    return sequence.prompt_tokens - have, have
