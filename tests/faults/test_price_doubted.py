"""A first price that is wrong is found out by an engine's own loads, and by no more of them than it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar.cache_tiers.blocks.extent import Address, Bytes
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.tier import Deadline
from samovar.cache_tiers.pricing.load_plan import BURST_EXTENTS, DOUBT_SHARE, Doubt
from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.configs.sections import KIB, TierSettings
from tests.support.clock import Clock
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import MIB, Tiered, receipt_of, tiered
from tests.support.inside import guards_of

TOKEN_BYTES = 512  # of the tiny model
PREFILL = PrefillPrice(0.0, 1e-4, 0.0)
EXTENT_BYTES = 64 * KIB
SESSIONS, TOKENS, LEARNED, TURNS = 4, 640, 20, 32


class Timed(HeapTier):
    """Main memory whose loads take `token_s` a token, by the engine's clock."""

    def __init__(self, clock: Clock, token_s: float) -> None:
        super().__init__(64 * MIB)
        self.clock = clock
        self.token_s = token_s
        self.read_bytes = 0

    def read(self, address: Address, start: int, nbytes: int, *, deadline: Deadline) -> Bytes:
        self.read_bytes += nbytes
        self.clock.now_s += self.token_s * nbytes / TOKEN_BYTES
        return super().read(address, start, nbytes, deadline=deadline)


def engine_of(model: Path, folder: Path, token_s: float, believed_s: float) -> tuple[Tiered, Timed]:
    """An engine whose start has found that a token's load takes `believed_s`; it takes `token_s`."""
    clock = Clock()
    tier = Timed(clock, token_s)
    engine = tiered(
        model,
        folder,
        tiers={"cpu": tier},
        clock=clock,
        prefill=PREFILL,
        settings=TierSettings(audit_share=0.0, extent_bytes_max=EXTENT_BYTES),
        node={"prices": {"cpu": (1e-6, TOKEN_BYTES / believed_s)}, "is_proved": False},
        pool_tokens=2048,
    )
    return engine, tier


def loaded_tokens(engine: Tiered, turns: int = TURNS) -> list[int]:
    """Serve sessions in turns, each after its pages are gone; return what each turn has loaded."""
    found = []
    for number in range(turns):
        session = number % SESSIONS
        prompt = prompt_of(TOKENS, seed=session)
        answer = engine.run([*prompt, *prompt_of(8, seed=100 + number)], session=bytes([session]) * 16)
        found.append(receipt_of(answer).tokens.get("cpu", 0))
        engine.forget_pool()
        engine.clock.now_s += 2.0
    return found


@pytest.mark.parametrize("wrong", [10.0, 0.1], ids=["too dear", "too cheap"])
def test_where_loads_pay_all_is_stored_and_loaded_within_20_turns(
    tiny_llama: Path, tmp_path: Path, wrong: float
) -> None:
    token_s = PREFILL.a_s / 4
    engine, _ = engine_of(tiny_llama, tmp_path, token_s, wrong * token_s)
    found = loaded_tokens(engine)
    assert found[LEARNED:] == [TOKENS] * (TURNS - LEARNED)
    price = guards_of(engine.node)["cpu"].price()
    assert price.is_proved
    assert price.seconds(TOKENS * TOKEN_BYTES) == pytest.approx(token_s * TOKENS, rel=0.3)
    truth = tiered(tiny_llama, tmp_path / "bare", tiers={}, prefix_reuse=False)
    question = [*prompt_of(TOKENS, seed=0), *prompt_of(8, seed=500)]
    assert engine.run(question).ids == truth.run(question).ids


@pytest.mark.parametrize("wrong", [10.0, 1.0], ids=["too dear", "right"])
def test_where_loads_never_pay_a_share_is_moved_and_no_more(
    tiny_llama: Path, tmp_path: Path, wrong: float
) -> None:
    token_s = 20 * PREFILL.a_s
    engine, tier = engine_of(tiny_llama, tmp_path, token_s, wrong * token_s)
    loaded_tokens(engine)
    most = BURST_EXTENTS * EXTENT_BYTES + DOUBT_SHARE * TURNS * (TOKENS + 16) * TOKEN_BYTES
    assert 0 < tier.bytes_held() <= 1.1 * most  # headers
    assert 0 < tier.read_bytes <= 1.1 * most
    assert engine.built.engine.stats().stores["skipped:price"] > 0


def test_planted_without_doubt_a_price_that_is_too_dear_stands_for_ever(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Doubt, "tries", lambda *_: False)
    engine, tier = engine_of(tiny_llama, tmp_path, PREFILL.a_s / 4, 2.5 * PREFILL.a_s)
    assert set(loaded_tokens(engine)) == {0}
    assert tier.bytes_held() == 0
