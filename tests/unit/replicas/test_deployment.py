"""The Serve deployment's own lines, without Ray: what a clear does twice, and whom a replica refuses."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from samovar.cache_tiers.blocks.extent import TAG_BYTES, Clear
from samovar.cache_tiers.messages import Cleared
from samovar.configs.optional_sections import AnswerSettings
from samovar.configs.sections import GrammarSettings
from samovar.configs.settings import Settings
from samovar.replicas.answers import AnswerLogs
from samovar.replicas.grammar import GrammarCompiler
from samovar.replicas.messages import (
    Failed,
    Forgotten,
    GenerateRequest,
    Grammar,
    Refused,
    ReplyTo,
    SamplingParams,
)
from samovar.replicas.sampling import Sampler
from samovar.replicas.serving.deployment import Replica
from samovar.replicas.serving.served import Places
from samovar.replicas.turns import TenantThreads
from tests.support.clock import Clock
from tests.support.engines.tiny_models import EOS_ID, make_tiny_tokenizer

TO = ReplyTo("127.0.0.1", 1, "0" * 64)
TENANT, SESSION = b"t" * TAG_BYTES, b"s" * TAG_BYTES


class BareReplica(Replica):
    """Nothing was started, so nothing is to be stopped."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@dataclass
class Fakes:
    """An engine and its node's tiers, which tell in what order they were asked."""

    told: list[object] = field(default_factory=list)
    pages: list[int] = field(default_factory=lambda: [3, 2])
    tiers_fail: bool = False

    def forget(self, tags: set[bytes]) -> int:
        self.told.append(("pool", tags))
        return self.pages.pop(0)

    def call(self, action: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(action(SimpleNamespace(requests=SimpleNamespace(forget=self.forget))))
        return done

    def clear(self, clear: Clear) -> Cleared:
        self.told.append(("tiers", clear))
        if self.tiers_fail:
            raise TimeoutError
        return Cleared(extents=1, nbytes=10)

    def replica(self) -> Replica:
        made = BareReplica.__new__(BareReplica)
        made._thread = self  # type: ignore[assignment]
        made._kept = AnswerLogs(AnswerSettings(), lambda key: None, Clock())
        made._tiers = SimpleNamespace(link=SimpleNamespace(clear=self.clear))  # type: ignore[assignment]
        made._places = Places(8, 8)
        made._settings = Settings()
        made._compiles = TenantThreads("compile", 1, places=8)
        made._info = SimpleNamespace(model="ours", replica_id="r1")  # type: ignore[assignment]
        return made


@pytest.mark.parametrize(
    ("sessions", "tags", "clear"),
    [(None, {TENANT}, Clear(TENANT)), ((SESSION,), {TENANT + SESSION}, Clear(TENANT, SESSION))],
)
async def test_g12_a_clear_forgets_before_the_tiers_do_and_again_afterwards(
    sessions: tuple[bytes, ...] | None, tags: set[bytes], clear: Clear
) -> None:
    """Before: what runs stores nothing any more. After: what a request has loaded meanwhile goes, too."""
    fakes = Fakes()
    assert await fakes.replica().clear(TENANT, sessions) == Forgotten(5, 1, 10)
    assert fakes.told == [("pool", tags), ("tiers", clear), ("pool", tags)]


async def test_g12_the_pool_forgets_again_also_when_the_tiers_do_not_answer() -> None:
    fakes = Fakes(tiers_fail=True)
    with pytest.raises(TimeoutError):
        await fakes.replica().clear(TENANT, None)
    assert [place for place, _ in fakes.told] == ["pool", "tiers", "pool"]  # type: ignore[misc, has-type]


@pytest.mark.guarantee("F27")
async def test_g3_a_replica_refuses_what_was_made_for_another_model() -> None:
    request = GenerateRequest("q", [1, 2], SamplingParams(max_tokens=1), 1, b"", model="theirs")
    events = [event async for batch in Fakes().replica().generate(request) for event in batch]
    (failed,) = events
    assert isinstance(failed, Failed)
    assert (failed.replica_lost, failed.replica_id) == (True, "r1")


async def test_a_grammar_is_compiled_before_the_engines_thread_hears_of_it() -> None:
    """What takes long, or cannot be served, delays no other answer: the thread is not even asked."""
    tokenizer = make_tiny_tokenizer().backend_tokenizer.to_str
    replica = Fakes().replica()
    replica._sampler = Sampler((EOS_ID,), GrammarCompiler(tokenizer, 512, (EOS_ID,), GrammarSettings()))
    params = SamplingParams(max_tokens=1, grammar=Grammar("regex", "(?=a)", "guided_regex"))
    request = GenerateRequest("q", [1, 2], params, 1, b"", model="ours")
    (refused,) = [event async for batch in replica.generate(request) for event in batch]
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.param) == ("invalid", "guided_regex")
