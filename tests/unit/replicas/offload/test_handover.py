"""What only a pool holds goes to the tiers when its replica does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.blocks.extent import TAG_BYTES, Clear, Placement
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.configs.sections import TierSettings
from samovar.replicas.offload.offload import Handover
from samovar.replicas.serving.served_engine import ReplicaLoad, load_of
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import MIB, Tiered, receipt_of, tiered
from tests.support.inside import records_in, settings_of

DEAR = PrefillPrice(0.0, 1.0, 0.0)  # loading always pays
CHEAP = PrefillPrice(0.0, 1e-12, 0.0)  # ... and never
TENANT = b"t" * TAG_BYTES


def tag(number: int) -> bytes:
    return number.to_bytes(TAG_BYTES, "little")


def engine_with(model: Path, folder: Path, **more: Any) -> Tiered:
    engine = tiered(model, folder, tiers={"cpu": HeapTier(64 * MIB)}, prefill=DEAR, **more)
    engine.placement = Placement("cpu", (), "cpu")
    return engine


def handover(engine: Tiered) -> Handover:
    assert engine.built.engine.offload is not None
    return engine.built.engine.offload.handover


def leave(engine: Tiered) -> Handover:
    """As `Replica.hand_over` does; the node's work is done in between."""
    going = handover(engine)
    left, rounds = going.begin(), 0
    while left:
        left = going.advance()
        engine.work()
        rounds += 1
        assert rounds < 1000, "it goes on for ever"
    assert engine.built.engine.is_settled
    return going


def unstored(engine: Tiered, prompt: list[int], number: int) -> list[int]:
    """A turn that only the pool keeps, as there was no room to stage its blocks; the prompt of the next."""
    turns = engine.built.engine.offload.turns  # type: ignore[union-attr]
    turns._settings = settings_of(turns).model_copy(update={"store_queue_max": 0})
    answer = engine.run(prompt, tenant=TENANT, session=tag(number))
    turns._settings = settings_of(turns).model_copy(update={"store_queue_max": 64})
    assert turns.results.outcomes["dropped:staged"] > 0
    return [*prompt, *answer.ids, *prompt_of(5, seed=number)]


def test_what_only_the_pool_holds_is_there_for_the_next_replica(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_with(tiny_llama, tmp_path)
    again = unstored(engine, prompt_of(70, seed=1), 1)
    truth = tiered(tiny_llama, tmp_path, tiers={}, prefix_reuse=False).run(again)
    assert leave(engine).skipped == 0
    engine.forget_pool()
    answer = engine.run(again, tenant=TENANT, session=tag(1))
    assert answer.ids == truth.ids
    block_tokens = engine.built.info.block_tokens
    assert receipt_of(answer).tokens["cpu"] == (70 + 7) // block_tokens * block_tokens


def test_what_the_tiers_hold_already_is_not_moved_again(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_with(tiny_llama, tmp_path)
    engine.run(prompt_of(70, seed=1), tenant=TENANT, session=tag(1))
    stores = dict(engine.built.engine.offload.turns.results.outcomes)  # type: ignore[union-attr]
    leave(engine)
    assert dict(engine.built.engine.offload.turns.results.outcomes) == stores  # type: ignore[union-attr]


def test_a_shared_beginning_is_handed_over_once(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_with(tiny_llama, tmp_path)
    common = prompt_of(64, seed=9)
    unstored(engine, [*common, *prompt_of(32, seed=1)], 1)
    unstored(engine, [*common, *prompt_of(32, seed=2)], 2)
    leave(engine)
    block_tokens = engine.built.info.block_tokens
    blocks = (64 + 2 * (32 + 7)) // block_tokens
    nbytes = sum(record.nbytes for record in records_in(engine.tiers["cpu"]).values())
    block_bytes = engine.built.info.bytes_per_token * block_tokens
    assert blocks * block_bytes <= nbytes < (blocks + 2) * block_bytes


def test_a_pool_larger_than_the_staging_area_goes_in_portions(tiny_llama: Path, tmp_path: Path) -> None:
    settings = TierSettings(audit_share=0.0, staged_bytes_max=MIB)
    engine = engine_with(tiny_llama, tmp_path, settings=settings, pool_tokens=4096)
    prompts = {number: unstored(engine, prompt_of(200, seed=number), number) for number in range(1, 9)}
    leave(engine)
    engine.forget_pool()
    for number, prompt in prompts.items():
        answer = engine.run(prompt, tenant=TENANT, session=tag(number))
        assert receipt_of(answer).tokens["cpu"] >= 192


def test_the_likeliest_to_come_back_go_first(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_with(tiny_llama, tmp_path)
    for number in (1, 2, 3):
        unstored(engine, prompt_of(70, seed=number), number)
        engine.clock.now_s += 600.0
    engine.built.engine.scheduler.pool.returns.hint(TENANT + tag(2), None, 1.0)
    going = handover(engine)
    assert going.begin() == 3
    order = [chain.provenance.owner[TAG_BYTES:] for chain in going._chains]
    assert order == [tag(2), tag(3), tag(1)]


def test_f36_what_was_cleared_elsewhere_meanwhile_does_not_come_back(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """A replica that goes hears of no clear any more; its node's tiers do."""
    engine = engine_with(tiny_llama, tmp_path)
    unstored(engine, prompt_of(70, seed=1), 1)
    unstored(engine, prompt_of(70, seed=2), 2)
    engine.node.clear(Clear(TENANT, tag(1)))
    leave(engine)
    (kept,) = engine.node.sessions.sessions(9)
    assert kept.session == tag(2)
    outcomes = engine.built.engine.offload.turns.results.outcomes  # type: ignore[union-attr]
    assert any(outcome.startswith("refused:") for outcome in outcomes)


def test_what_nobody_would_load_stays(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_with(tiny_llama, tmp_path)
    unstored(engine, prompt_of(70, seed=1), 1)
    engine.built.engine.meter._price = CHEAP
    leave(engine)
    assert not records_in(engine.tiers["cpu"])


def test_pages_that_have_been_taken_meanwhile_are_left_out(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_with(tiny_llama, tmp_path)
    unstored(engine, prompt_of(70, seed=1), 1)
    going = handover(engine)
    assert going.begin() == 1
    engine.forget_pool()
    assert going.advance() == 1
    engine.work()
    assert going.advance() == 0
    assert going.skipped == 1


def test_tiers_that_do_not_answer_cost_what_they_would_have_kept(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_with(tiny_llama, tmp_path)
    unstored(engine, prompt_of(70, seed=1), 1)
    going = handover(engine)

    def fails(_: object) -> None:
        raise OSError("the actor is gone")

    going._link.lookup = fails  # type: ignore[method-assign,assignment]
    assert leave(engine).skipped == 1


# -- the load that a replica reports ---------------------------------------------------------


def test_the_load_of_an_engine(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_with(tiny_llama, tmp_path, sequences_max=2, n_max=1)
    idle = load_of(engine.built.engine, 60.0)
    assert idle == ReplicaLoad(0, 0, 2, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for number in range(3):
        engine.submit(prompt_of(64, seed=number), tenant=TENANT, session=tag(number), max_tokens=4)
    load = load_of(engine.built.engine, 60.0)
    assert (load.running, load.waiting, load.prompts) == (0, 3, 3)
    assert load.prefill_s == pytest.approx(3 * 64, abs=4)
    assert load.pool_share_waiting > 0
    while engine.built.engine.scheduler.waiting == [] or len(engine.built.engine.scheduler.running) < 2:
        engine.driver.step()
    load = load_of(engine.built.engine, 60.0)
    assert (load.running, load.waiting) == (2, 1)
    assert load.pool_share > 0
    engine.drain()
    load = load_of(engine.built.engine, 60.0)
    assert (load.running, load.waiting, load.prefill_s, load.pool_share) == (0, 0, 0, 0)
    assert 0 < load.returns <= 3
    assert 0 < load.returns_pool_share <= load.returns
    assert load.is_valid
    engine.clock.now_s += 86_400.0
    assert load_of(engine.built.engine, 60.0).returns < load.returns / 100


def test_what_is_cached_is_not_waited_for(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_with(tiny_llama, tmp_path)
    answer = engine.run(prompt_of(64), tenant=TENANT, session=tag(1))
    again = [*prompt_of(64), *answer.ids, *prompt_of(9, seed=3)]
    engine.submit(again, tenant=TENANT, session=tag(1))
    in_pool = load_of(engine.built.engine, 60.0)
    assert in_pool.prefill_s < 30
    engine.drain()
    engine.forget_pool()
    engine.submit([*again, *prompt_of(2, seed=4)], tenant=TENANT, session=tag(1))
    engine.built.engine.offload.arrivals.take_in()  # type: ignore[union-attr]
    in_tiers = load_of(engine.built.engine, 60.0)
    assert in_tiers.prefill_s < 30
    engine.drain()
