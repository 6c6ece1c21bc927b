"""The Serve deployment's own lines, without Ray: what a clear does twice, and whom a replica refuses."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import pytest

from samovar.cache_tiers.blocks.extent import TAG_BYTES, Clear
from samovar.cache_tiers.messages import Cleared
from samovar.configs.sections import GrammarSettings
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
from tests.support.engines.fake_engine import EngineReplica, FakeEngine
from tests.support.engines.tiny_models import EOS_ID, make_tiny_tokenizer

TO = ReplyTo("127.0.0.1", 1, "0" * 64)
TENANT, SESSION = b"t" * TAG_BYTES, b"s" * TAG_BYTES


class Fakes(FakeEngine):
    """An engine and its node's tiers, which tell in what order they were asked."""

    def __init__(self, *, tiers_fail: bool = False) -> None:
        super().__init__()
        self.pages = [3, 2]
        self.tiers_fail = tiers_fail

    async def forget(self, tags: Collection[bytes]) -> int:
        self.told.append(("pool", tags))
        return self.pages.pop(0)

    def clear(self, clear: Clear) -> Cleared:
        self.told.append(("tiers", clear))
        if self.tiers_fail:
            raise TimeoutError
        return Cleared(extents=1, nbytes=10)

    def replica(self) -> Replica:
        return EngineReplica(self, tiers=SimpleNamespace(link=SimpleNamespace(clear=self.clear)))


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
    assert (failed.replica_lost, failed.replica_id) == (True, "fake")


async def test_a_grammar_is_compiled_before_the_engines_thread_hears_of_it() -> None:
    """What takes long, or cannot be served, delays no other answer: the thread is not even asked."""
    tokenizer = make_tiny_tokenizer().backend_tokenizer.to_str
    engine = Fakes()
    sampler = Sampler((EOS_ID,), GrammarCompiler(tokenizer, 512, (EOS_ID,), GrammarSettings()))
    engine.refusal_of = sampler.refusal_of  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=1, grammar=Grammar("regex", "(?=a)", "guided_regex"))
    request = GenerateRequest("q", [1, 2], params, 1, b"", model="ours")
    (refused,) = [event async for batch in engine.replica().generate(request) for event in batch]
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.param) == ("invalid", "guided_regex")
