"""A scripted `ReplicaClient`: real async generators that say what a test wrote down.

A script is a list of steps: an `Event` is yielded, an exception is raised, an `asyncio.Event` is
waited for, a number of seconds is a pause. Knows nothing of Ray or of models.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from samovar.cache_tiers.messages import NodeStats
from samovar.replicas.messages import (
    Admitted,
    Delta,
    EngineStats,
    Event,
    FinishReason,
    Forgotten,
    GenerateRequest,
    LoggedAnswer,
    Receipt,
    ReplicaGlance,
    ReplicaInfo,
)
from samovar.router.routing.replica_client import ClearCounts, choices_ended, clear_counts

Step = Event | Exception | asyncio.Event | float
Script = list[Step]

INFO = ReplicaInfo(
    replica_id="replica-1",
    model_name="tiny",
    context_tokens_max=2048,
    device="cpu",
    dtype="float32",
    threads=1,
    exact=True,
    exactness="",
    attention="sdpa",
    step="lean",
    dtype_sentence="float32 (model.dtype)",
    block_tokens=16,
    kv_dtype="float32",
    bytes_per_token=1,
    pages=64,
    pool_bytes=64,
    load_s=0.1,
)


def say(
    words: list[str],
    *,
    cached: int = 0,
    ids: list[int] | None = None,
    finish: FinishReason = "stop",
    receipt: Receipt | None = None,
) -> Script:
    """Admitted, a delta for each word, and the end in the last."""
    steps: Script = [Admitted("replica-1", cached, 0.001, receipt or Receipt())]
    for place, word in enumerate(words):
        token_ids = (ids[place],) if ids else (10 + place,)
        steps.append(Delta(0, word, token_ids, finish_reason=finish if place == len(words) - 1 else None))
    return steps


class FakeReplicas:
    """`script` is asked for every request; `calls`: the requests that came; `pooled_blocks`: of a lineage."""

    def __init__(self, script: Callable[[GenerateRequest], Script]) -> None:
        self.script = script
        self.calls: list[GenerateRequest] = []
        self.session_keys: list[str] = []
        self.infos = [INFO]
        self.open = 0
        self.cancelled = asyncio.Event()
        self.began = asyncio.Event()
        self.nodes: list[NodeStats] = []
        self.tiers_up_now: dict[str, bool] = {}
        self.stats_now = [EngineStats("replica-1", running=1, pages_free=7, steps=42, finished={"stop": 3})]
        self.kept_now: dict[tuple[bytes, bytes], LoggedAnswer] = {}
        self.all_asked = True
        self.cooled: list[bytes] = []
        self.pooled_blocks = 0
        self.glances: list[tuple[bytes, ...]] = []
        self.hinted: list[tuple[bytes, str | None, float | None]] = []
        self.clears: list[tuple[bytes, tuple[bytes, ...] | None]] = []
        self.clear_answers: list[Forgotten | Exception] = [Forgotten(pages=3, extents=2, nbytes=100)]

    async def generate(self, request: GenerateRequest, session_key: str) -> AsyncGenerator[list[Event], None]:
        self.calls.append(request)
        self.session_keys.append(session_key)
        self.open += 1
        choices_open = request.n
        try:
            self.began.set()
            for step in self.script(request):
                if isinstance(step, Exception):
                    choices_open = 0
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    choices_open -= choices_ended([step], choices_open)
                    yield [step]
            choices_open = 0
        finally:
            self.open -= 1
            if choices_open > 0:
                self.cancelled.set()

    async def describe(self) -> list[ReplicaInfo]:
        return list(self.infos)

    async def stats(self) -> list[EngineStats]:
        return list(self.stats_now)

    async def cache_stats(self) -> list[NodeStats]:
        return list(self.nodes)

    async def tiers_up(self) -> dict[str, bool]:
        return dict(self.tiers_up_now)

    async def kept(self, tenant: bytes, ref: bytes) -> tuple[LoggedAnswer | None, bool]:
        return self.kept_now.get((tenant, ref)), self.all_asked

    async def pool_bytes(self, tenant: bytes, session: bytes) -> int:
        return 4096 if (tenant, session) else 0

    async def glance(self, owners: tuple[bytes, ...]) -> list[ReplicaGlance]:
        self.glances.append(owners)
        blocks = dict.fromkeys(owners, self.pooled_blocks)
        return [ReplicaGlance(stats, blocks) for stats in self.stats_now]

    async def hint(
        self, tenant: bytes, session: bytes, event: str | None, expected_return_s: float | None
    ) -> None:
        self.hinted.append((tenant + session, event, expected_return_s))

    async def cool(self, tenant: bytes, session: bytes) -> None:
        self.cooled.append(tenant + session)

    async def clear(self, tenant: bytes, sessions: tuple[bytes, ...] | None) -> ClearCounts:
        self.clears.append((tenant, sessions))
        return clear_counts(self.clear_answers)
