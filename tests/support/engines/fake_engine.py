"""An engine that computes nothing, behind the real `Replica`, without Ray, torch or a model.

It says a prompt's words back, one after the other. Where another engine is to be served, this is the least.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from samovar.cache_tiers.forecast import HintEvent
from samovar.cache_tiers.pricing import PrefillPrice
from samovar.configs.settings import Settings
from samovar.replicas.answers import OpenAnswers, OutputProcessor, TokenText
from samovar.replicas.grammar import GrammarState
from samovar.replicas.links import Inlet
from samovar.replicas.messages import (
    Admitted,
    Delta,
    EngineStats,
    Failed,
    GenerateRequest,
    Grammar,
    Receipt,
    Refused,
    ReplicaGlance,
    ReplicaInfo,
    SamplingParams,
)
from samovar.replicas.serving.deployment import Replica
from samovar.replicas.serving.served_engine import Deliver, ReplicaLoad, ServedEngine

WORDS = ("<end>", "tea", "is", "an", "infusion", "of", "leaves", "?")
VOCABULARY = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?"))
TEXT = {
    "device": "none",
    "dtype": "none",
    "exactness": "",
    "attention": "none",
    "step": "none",
    "kv_dtype": "none",
}
NUMBERS = {"threads": 1, "block_tokens": 4, "bytes_per_token": 2, "pages": 1, "pool_bytes": 1, "load_s": 0.0}
INFO = ReplicaInfo("fake", "echo", 4096, exact=True, dtype_sentence="", **TEXT, **NUMBERS)  # type: ignore[arg-type]
STEP_S = 0.005
PRICE = PrefillPrice(0.001, 0.0, 0.0, 64)


@dataclass
class Echo:
    """An answer so far."""

    request_id: str
    tokens: array[int]
    prompt_tokens: int
    sampling: SamplingParams
    index: int = 0
    grammar: GrammarState | None = None

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens


class FakeEngine:
    """`ServedEngine`, on the replica's event loop."""

    def __init__(self) -> None:
        self.info, self.is_ill, self.told = INFO, False, list[object]()
        self._output = OutputProcessor(VOCABULARY, (0,), TokenText(VOCABULARY, frozenset()), 4096)
        self._open, self._blocks = dict[int, asyncio.Task[None]](), Counter[bytes]()

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def answer(self, key: int, request: GenerateRequest) -> None:
        if len(request.prompt_token_ids) > INFO.context_tokens_max:
            self._deliver([(key, Refused("too_long", "The prompt is too long."))])
        else:
            self._open[key] = asyncio.create_task(self._say(key, request))

    async def _say(self, key: int, request: GenerateRequest) -> None:
        ids, opened, reason = request.prompt_token_ids, OpenAnswers(request), None
        echo = Echo(request.request_id, array("I", ids), len(ids), request.sampling)
        self._blocks[request.tenant + request.session] += len(ids) // INFO.block_tokens
        self._deliver([(key, Admitted(INFO.replica_id, 0, 0.0, Receipt()))])
        while reason is None:
            await asyncio.sleep(STEP_S)
            text, reason = self._output.append(opened, echo, ids[echo.output_tokens % len(ids)])
            self._deliver([(key, Delta(0, text, (echo.tokens[-1],), (), reason))])
        del self._open[key]

    def abort(self, key: int) -> None:
        if (task := self._open.pop(key, None)) is not None:
            task.cancel()

    def refusal_of(self, grammar: Grammar) -> Refused | None:
        return Refused("invalid", "It has no grammars.", param=grammar.field)

    async def stats(self) -> EngineStats:
        return EngineStats(INFO.replica_id, running=len(self._open))

    async def load(self, horizon_s: float) -> ReplicaLoad:
        return ReplicaLoad(len(self._open), 0, 8, 0, 0.0, 0.0, 0.0, 0.0, 0.0)

    async def prices(self) -> PrefillPrice:
        return PRICE

    async def glance(self, owners: tuple[bytes, ...]) -> ReplicaGlance:
        return ReplicaGlance(await self.stats(), {one: held for one in owners if (held := self._blocks[one])})

    async def pool_bytes(self, owner: bytes) -> int:
        return self._blocks[owner] * INFO.block_tokens * INFO.bytes_per_token

    async def cool(self, owner: bytes) -> int:
        return self._blocks[owner]

    async def hint(self, owner: bytes, event: HintEvent | None, expected_return_s: float | None) -> None:
        self.told.append(("hint", owner, event, expected_return_s))

    async def forget(self, tags: Collection[bytes]) -> int:
        gone = [owner for owner in self._blocks if any(owner.startswith(tag) for tag in tags)]
        self.told.append(("forget", tags))
        return sum(self._blocks.pop(owner) for owner in gone)

    async def settle(self, timeout_s: float) -> bool:
        return True

    async def hand_over(self, timeout_s: float) -> bool:
        self.told.append("hand over")
        return True

    async def check_integrity(self) -> None:
        assert all(self._blocks.values())

    def check_health(self) -> None:
        if self.is_ill:
            raise RuntimeError("it is ill")

    async def close(self) -> None:
        self.told.append("close")
        for key in list(self._open):
            self._deliver([(key, Failed("it ends", replica_lost=True))])
            self.abort(key)


class EngineReplica(Replica):
    """The deployment of any engine, without Ray: what its constructor asks Ray for is given."""

    def __init__(self, engine: ServedEngine, *, tiers: Any = None, inlet: Inlet | None = None) -> None:
        self._tiers = tiers
        self._begin(Settings(), engine, replace(engine.info, model="ours"), inlet)

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing: `end` does it."""

    async def end(self) -> None:
        """Do what Serve has a replica do at its end."""
        await Replica.__del__(self)
