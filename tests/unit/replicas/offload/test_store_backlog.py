"""A turn that is longer than the staging memory is stored in portions, and no request lacks pages for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from samovar.cache_tiers.blocks.extent import TAG_BYTES, Clear, Placement
from samovar.cache_tiers.blocks.record import decode_header
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.configs.sections import TierSettings
from samovar.replicas.offload.store import TurnStore
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import MIB, InlineExecutor, Tiered, receipt_of, tiered
from tests.support.inside import records_in, settings_of, waiting_in

KIB = 1024
DEAR = PrefillPrice(0.0, 1.0, 0.0)  # loading always pays
TENANT, SESSION = b"t" * TAG_BYTES, b"s" * TAG_BYTES
LENGTH = 600


def small(model: Path, folder: Path, pool_tokens: int = 2048, **settings: int) -> Tiered:
    """Room for two of the five extents that a turn of 600 tokens adds."""
    tiers = TierSettings(audit_share=0.0, extent_bytes_max=64 * KIB, staged_bytes_max=MIB, **settings)
    tiers = tiers.model_copy(update={"staged_bytes_max": 150 * KIB})
    engine = tiered(
        model,
        folder,
        tiers={"cpu": HeapTier(64 * MIB)},
        prefill=DEAR,
        settings=tiers,
        pool_tokens=pool_tokens,
    )
    engine.placement = Placement("cpu", (), "cpu")
    return engine


def turns_of(engine: Tiered) -> TurnStore:
    assert engine.built.engine.offload is not None
    return engine.built.engine.offload.turns


def stored_tokens(engine: Tiered) -> int:
    tier = engine.tiers["cpu"]
    assert isinstance(tier, HeapTier)
    return sum(decode_header(data, record_bytes=data.nbytes).tokens for data in records_in(tier).values())


def until_idle(engine: Tiered) -> None:
    while engine.has_work or engine.built.engine.has_arrivals:
        engine.driver.step()


def halfway(engine: Tiered, seed: int = 4) -> list[int]:
    """A turn is over, and the node has fetched nothing of it yet; the prompt of the next."""
    prompt = prompt_of(LENGTH, seed=seed)
    key = engine.submit(prompt, tenant=TENANT, session=SESSION)
    until_idle(engine)
    assert waiting_in(turns_of(engine))
    assert not turns_of(engine).is_settled
    engine.built.engine.check_integrity()
    return [*prompt, *engine.driver.answers[key].ids, 7]


def answered(engine: Tiered, prompt: list[int], model: Path, folder: Path) -> Counter[str]:
    """The next turn, from the tiers only: its tokens by source; it says what an engine without cache says."""
    engine.forget_pool()
    answer = engine.run(prompt, tenant=TENANT, session=SESSION)
    assert answer.ids == tiered(model, folder, tiers={}, prefix_reuse=False).run(prompt).ids
    return Counter({str(source): count for source, count in receipt_of(answer).tokens.items()})


def test_a_turn_longer_than_the_staging_memory_is_stored_whole(tiny_llama: Path, tmp_path: Path) -> None:
    engine = small(tiny_llama, tmp_path)
    prompt = halfway(engine)
    engine.work()
    assert turns_of(engine).is_settled
    assert turns_of(engine).results.outcomes == {"taken": 5}
    assert (
        stored_tokens(engine) == LENGTH + 7
    )  # the last token is never computed; the rest is a partial block
    assert engine.built.engine.stats().pages_active == 0
    assert answered(engine, prompt, tiny_llama, tmp_path)["cpu"] == LENGTH + 7


def evict(engine: Tiered) -> None:
    engine.forget_pool()


def refuse(engine: Tiered) -> None:
    """The tiers are cleared meanwhile, so that they refuse what was looked up before."""
    engine.node.clear(Clear(TENANT))


def stop_threads(engine: Tiered) -> None:
    lane = engine.lanes.store

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    lane.submit = no_thread  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("happens", "reason"),
    [(evict, "dropped:evicted"), (refuse, "refused:tombstone"), (stop_threads, "dropped:error")],
)
def test_what_waits_is_given_up_without_a_gap(
    happens: Callable[[Tiered], None], reason: str, tiny_llama: Path, tmp_path: Path
) -> None:
    engine = small(tiny_llama, tmp_path)
    prompt = halfway(engine)
    happens(engine)
    engine.work()
    turns = turns_of(engine)
    assert turns.is_settled
    assert turns.results.outcomes[reason] >= 1, turns.results.outcomes
    assert engine.built.engine.stats().pages_active == 0
    assert answered(engine, prompt, tiny_llama, tmp_path)["cpu"] < LENGTH


def test_waiting_blocks_leave_their_pages_to_a_request_that_needs_them(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = small(tiny_llama, tmp_path)
    halfway(engine)
    pool = engine.built.engine.scheduler.pool
    copying = {page for pages in turns_of(engine)._storing.values() for page in pages}
    waiting = {page for rest in waiting_in(turns_of(engine)) for page in rest.held}
    assert not copying
    assert len(waiting) == 1  # of the partial block, which the pool does not know
    assert pool.available == pool.usable - 1


def test_the_next_turn_of_a_conversation_takes_its_place(tiny_llama: Path, tmp_path: Path) -> None:
    engine = small(tiny_llama, tmp_path)
    prompt = halfway(engine)
    engine.submit(prompt, tenant=TENANT, session=SESSION)
    until_idle(engine)
    (rest,) = waiting_in(turns_of(engine))
    assert len(rest.chain.keys) == (len(prompt) + 7) // engine.built.info.block_tokens
    engine.work()
    assert answered(engine, [*prompt, 8], tiny_llama, tmp_path)["cpu"] >= LENGTH


def test_no_more_stores_wait_than_may(tiny_llama: Path, tmp_path: Path) -> None:
    engine = small(tiny_llama, tmp_path, store_queue_max=2)
    for seed in range(4, 8):
        halfway(engine, seed)
    assert len(waiting_in(turns_of(engine))) == 2
    assert turns_of(engine).results.outcomes["dropped:staged"] > 0
    engine.work()
    assert turns_of(engine).is_settled


def test_a_block_that_never_fits_does_not_wait(tiny_llama: Path, tmp_path: Path) -> None:
    engine = small(tiny_llama, tmp_path)
    turns = turns_of(engine)
    turns._settings = settings_of(turns).model_copy(update={"staged_bytes_max": 10 * KIB})
    engine.run(prompt_of(LENGTH, seed=4))
    assert turns.is_settled
    assert set(turns.results.outcomes) == {"dropped:staged"}


def test_room_is_noticed_when_the_node_fetches_a_record(tiny_llama: Path, tmp_path: Path) -> None:
    engine = small(tiny_llama, tmp_path)
    halfway(engine)
    stores = engine.lanes.store
    assert isinstance(stores, InlineExecutor)
    waiting = len(waiting_in(turns_of(engine))[0].runs)
    engine.node.work()  # fetches from a thread of its own in the service
    assert engine.built.engine.has_arrivals
    engine.driver.step()
    assert sum(len(rest.runs) for rest in waiting_in(turns_of(engine))) < waiting


def test_choices_of_one_prompt_store_what_of_it_still_waits(tiny_llama: Path, tmp_path: Path) -> None:
    """They share what is known as offered: the second one takes the first one's place, not its word."""
    engine = small(tiny_llama, tmp_path)
    prompt = prompt_of(LENGTH, seed=4)
    engine.submit(prompt, n=2, tenant=TENANT, session=SESSION, temperature=1.0, seed=3)
    until_idle(engine)
    assert waiting_in(turns_of(engine))
    engine.work()
    assert turns_of(engine).is_settled
    assert answered(engine, [*prompt, 7], tiny_llama, tmp_path)["cpu"] >= LENGTH - 16


def test_a_store_that_fails_leaves_its_room_to_another(tiny_llama: Path, tmp_path: Path) -> None:
    engine = small(tiny_llama, tmp_path)
    turns, stores = turns_of(engine), engine.lanes.store
    assert isinstance(stores, InlineExecutor)
    stores.held = True
    for seed in (4, 5):  # the first one is to be copied, the second one waits
        engine.submit(prompt_of(LENGTH, seed=seed), tenant=TENANT, session=bytes([seed]) * TAG_BYTES)
    until_idle(engine)
    assert len(waiting_in(turns)) == 2
    stores.held = False
    with mock.patch.object(turns._io, "begin_out", side_effect=MemoryError("no memory for the record")):
        stores.release()
    engine.work()
    assert turns.results.outcomes["dropped:error"]
    assert turns.results.outcomes["taken"] == 5
    assert turns.is_settled
    assert engine.built.engine.stats().pages_active == 0


def test_records_that_nobody_fetches_expire_and_what_waits_goes_on(tiny_llama: Path, tmp_path: Path) -> None:
    engine = small(tiny_llama, tmp_path)
    halfway(engine)
    for _ in range(5):
        engine.clock.now_s += 601
        engine.built.engine.stats()
        until_idle(engine)
    assert turns_of(engine).is_settled
    assert engine.built.engine.stats().pages_active == 0


def test_a_request_for_all_pages_does_not_wait_for_what_waits(tiny_llama: Path, tmp_path: Path) -> None:
    engine = small(tiny_llama, tmp_path, pool_tokens=640)
    halfway(engine)
    assert len(engine.run(prompt_of(640 - 8, seed=9)).ids) == 8  # the node fetches nothing meanwhile
    assert turns_of(engine).results.outcomes["dropped:evicted"]
