"""What a replica sees of vLLM, without vLLM: a prompt's tokens come back, one after the other."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from samovar.cache_tiers.pricing import PrefillMeter
from samovar.cache_tiers.vllm.replica_turn import FromConnector, ReplicaTurn, Told, ToReplica
from samovar.configs.sections import GrammarSettings
from samovar.replicas.answers import EngineLimits, OutputProcessor, TokenText
from samovar.replicas.grammar import GrammarCompiler
from samovar.replicas.messages import ReplicaInfo, Sampled
from samovar.replicas.turns import FairQueue
from samovar.replicas.vllm.answers import Telling
from samovar.replicas.vllm.engine import Asks, VllmEngine
from samovar.replicas.vllm.forgetting import PageSalts
from samovar.replicas.vllm.source import Ask, AskRefused, SourceLost, TokenPiece
from samovar.replicas.vllm.turns import SessionReturns, TurnCalls, TurnReports
from tests.support.engines.fake_engine import INFO, PRICE, STEP_S, VOCABULARY, WORDS

SEQUENCES_MAX = 8


class FakeSource:
    """`TokenSource`. Pages are kept by salt: `pages` has the longest prompt of each.

    `tells`: what the connector says of a turn before its first token.
    """

    def __init__(self, step_s: float = STEP_S, connector: Path | None = None) -> None:
        self.asked: list[Ask] = []
        self.aborted: list[str] = []
        self.is_ill = self.is_closed = False
        self.open = 0
        self.pages: dict[str, list[int]] = {}
        self.tells: Mapping[int, Told] = {}
        self.refuses = ""
        self.says: list[int] | None = None  # instead of the prompt
        self._step_s = step_s
        self._connector = None if connector is None else ToReplica(connector)

    async def generate(self, ask: Ask) -> AsyncGenerator[list[TokenPiece], None]:
        self.asked.append(ask)
        if self.refuses:
            raise AskRefused(self.refuses)
        if self.is_ill:
            raise SourceLost("it is ill")
        self.open += ask.sampling["n"]
        is_over = False
        try:
            ids, known = list(ask.token_ids), self.pages.get(ask.salt, [])
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, known, strict=False))
            cached = len(list(same))
            self.pages[ask.salt] = ids
            turn = _turn_of(ask)
            if turn is not None and self._connector is not None and turn.key in self.tells:
                self._connector.tell(self.tells[turn.key])
            said = ids if self.says is None else self.says
            for number in range(ask.sampling["max_tokens"]):
                await asyncio.sleep(self._step_s)
                if self.is_ill:
                    raise SourceLost("it is ill")
                ended = "length" if number + 1 == ask.sampling["max_tokens"] else ""
                scored = ask.sampling["logprobs"] is not None
                token = Sampled(said[number % len(said)], -0.5 if scored else None)
                yield [
                    TokenPiece(index, (token,), min(cached, len(ids) - 1), ended)
                    for index in range(ask.sampling["n"])
                ]
            is_over = True
        finally:
            self.open -= ask.sampling["n"]
            if not is_over:
                self.aborted.append(ask.name)

    @property
    def pool_share(self) -> float:
        return 0.5 if self.open else 0.0

    def check(self) -> None:
        if self.is_ill:
            raise SourceLost("it is ill")

    def close(self) -> None:
        self.is_closed = True


def _turn_of(ask: Ask) -> ReplicaTurn | None:
    return ReplicaTurn.of(SimpleNamespace(kv_transfer_params=ask.params))


def vllm_engine(
    source: FakeSource,
    *,
    info: ReplicaInfo = INFO,
    sequences_max: int = SEQUENCES_MAX,
    queue_max: int = 100,
    quantum_tokens: int = 16,
    connector: FromConnector | None = None,
    reports: TurnCalls | None = None,
    weights: Mapping[bytes, float] | None = None,
) -> VllmEngine:
    """Return the engine over it, with a pool of 1,000 blocks."""
    text = TokenText(VOCABULARY, frozenset())
    own = replace(info, pages=1001, drops_pages=False)
    output = OutputProcessor(VOCABULARY, (0,), text, own.context_tokens_max)
    grammars = GrammarCompiler(VOCABULARY.to_str, len(WORDS), (0,), GrammarSettings())
    return VllmEngine(
        source,
        Telling(own, output, PrefillMeter(PRICE), PRICE.step_tokens),
        Asks((0,), grammars, PageSalts(b"secret"), has_tiers=connector is not None),
        TurnReports(reports, SessionReturns(100, time.monotonic), own.block_tokens),
        FairQueue(quantum_tokens, weights or {}),
        EngineLimits(len(WORDS), own.context_tokens_max, queue_max, 1.0),
        sequences_max,
        connector,
    )
