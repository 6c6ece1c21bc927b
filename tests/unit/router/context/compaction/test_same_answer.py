"""Prompts that were cut say the same whether what they begin with was computed before or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engines.engines import Answer, Driver, small_engine
from tests.support.engines.exactness import assert_same_deltas
from tests.support.engines.tiny_models import make_tiny_model
from tests.support.router.router_harness import CONTEXT
from tests.unit.router.context.compaction.test_compaction_api import Guest, house

TURNS = 24
SHOWN = 7
"""The last turns, among them a cut."""


async def prompts_of(folder: Path, mode: str) -> list[tuple[bool, list[int]]]:
    """All prompts of a conversation's last turns, in the order they came; whether somebody waits for them."""
    made, wish = house(folder), {"mode": mode, "budget_tokens": 200}
    async with made.client() as client:
        guest = Guest(client, made)
        await guest.talks(TURNS - SHOWN, rests=True, compaction=wish)
        before = len(made.replicas.calls)
        await guest.talks(
            SHOWN, first=TURNS - SHOWN, rests=True, compaction={"mode": mode, "budget_tokens": 200}
        )
        asked = made.replicas.calls[before - 1 :]
        return [(not one.request_id.startswith("idle-"), one.prompt_token_ids) for one in asked]


@pytest.mark.parametrize("mode", ["retrieve", "summarise"])
async def test_cached_is_uncached_for_prompts_that_were_cut(tmp_path: Path, mode: str) -> None:
    prompts = await prompts_of(tmp_path / "house", mode)
    path = make_tiny_model(tmp_path / "model", context=CONTEXT + 64)
    warm = small_engine(path, pool_tokens=4 * CONTEXT, step_tokens_max=512)
    info, engine = warm.info, Driver(warm.engine, check=False)

    def computed(prompt: list[int]) -> Answer:
        """The answer of an engine that has computed nothing before."""
        cold = small_engine(path, pool_tokens=2 * CONTEXT, step_tokens_max=512)
        return Driver(cold.engine, check=False).run(prompt, max_tokens=4, logprobs=3)

    def same(one: Answer, other: Answer) -> None:
        assert_same_deltas(one.deltas, other.deltas, torch.float32, info.exact)

    told, shares = [], []
    for is_awaited, prompt in prompts:
        cached, uncached = engine.run(prompt, max_tokens=4, logprobs=3), computed(prompt)
        assert cached.admitted is not None
        assert uncached.admitted is not None
        assert uncached.admitted.cached_tokens == 0
        same(cached, uncached)
        told.append(cached)
        if is_awaited:
            shares.append(cached.admitted.cached_tokens / len(prompt))
    assert not all(is_awaited for is_awaited, _ in prompts[1:]), "there was a cut"
    assert min(shares[1:]) > 0.5, "what turns begin with was computed before they came"
    last = prompts[-1][1]
    wrong = [*last[:300], 77, *last[301:]]
    with pytest.raises(AssertionError):
        same(computed(wrong), told[-1])
