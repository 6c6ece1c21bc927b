"""What the price law keeps out of the tiers, and what is stored all the same: a prefill that asks for it."""

from __future__ import annotations

from pathlib import Path

from samovar.cache_tiers.blocks.extent import TAG_BYTES, BlockShape, Clear, Placement
from samovar.cache_tiers.blocks.record import record_bytes
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.pricing.load_plan import BURST_EXTENTS, Doubt
from samovar.cache_tiers.pricing.meters import PrefillPrice, TierPrice
from samovar.configs.sections import TierSettings
from samovar.replicas.offload.store import largest_extent_bytes
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import MIB, Tiered, receipt_of, tiered
from tests.support.inside import records_in

DEAR = PrefillPrice(0.0, 1.0, 0.0)  # loading always pays
CHEAP = PrefillPrice(0.0, 1e-12, 0.0)  # ... and never
TENANT, SESSION = b"t" * TAG_BYTES, b"s" * 8 + bytes(8)
PREFIX, STEP = prompt_of(128, seed=3), 64


def engine_with(model: Path, folder: Path) -> Tiered:
    engine = tiered(model, folder, tiers={"cpu": HeapTier(64 * MIB)}, prefill=CHEAP)
    engine.placement = Placement("cpu", (), "cpu")
    return engine


def prefilled(engine: Tiered, *, stores_all: bool) -> None:
    """A prefix in steps, as a document's prefill sends it."""
    engine.built.engine.meter._price = CHEAP
    for end in range(STEP, len(PREFIX) + 1, STEP):
        engine.run(PREFIX[:end], tenant=TENANT, session=SESSION, max_tokens=1, stores_all=stores_all)
        engine.built.engine.meter._price = CHEAP  # its own steps have measured another


def stored(engine: Tiered) -> int:
    return len(records_in(engine.tiers["cpu"]))


def test_a_prefill_is_stored_by_the_price_law_or_in_any_case(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_with(tiny_llama, tmp_path)
    prefilled(engine, stores_all=False)
    assert stored(engine) == 0
    assert engine.built.engine.stats().stores["skipped:price"] > 0
    engine.forget_pool()
    prefilled(engine, stores_all=True)
    assert stored(engine) > 0


def test_a_question_behind_a_prefilled_text_is_answered_as_without_a_cache(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = engine_with(tiny_llama, tmp_path)
    prefilled(engine, stores_all=True)
    engine.forget_pool()
    engine.built.engine.meter._price = DEAR
    question = [*PREFIX, *prompt_of(21, seed=4)]
    answer = engine.run(question, tenant=TENANT, session=b"another" + bytes(9))
    truth = tiered(tiny_llama, tmp_path, tiers={}, prefix_reuse=False).run(question)
    assert receipt_of(answer).tokens["cpu"] == len(PREFIX)
    assert answer.ids == truth.ids


def test_another_tenants_question_finds_nothing_of_it(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_with(tiny_llama, tmp_path)
    prefilled(engine, stores_all=True)
    engine.built.engine.meter._price = DEAR
    answer = engine.run([*PREFIX, 5], tenant=b"u" * TAG_BYTES, salt=b"another")
    assert receipt_of(answer).tokens.get("cpu", 0) == receipt_of(answer).tokens.get("gpu", 0) == 0


def test_a_clear_of_its_session_leaves_nothing_of_it(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_with(tiny_llama, tmp_path)
    prefilled(engine, stores_all=True)
    engine.node.clear(Clear(TENANT, SESSION))
    engine.work()
    assert stored(engine) == 0


def test_other_bytes_in_the_tier_are_seen(tiny_llama: Path, tmp_path: Path) -> None:
    """The planted fault: one bit is another. It is computed then, and the answer is the same."""
    engine = engine_with(tiny_llama, tmp_path)
    prefilled(engine, stores_all=True)
    engine.forget_pool()
    records = records_in(engine.tiers["cpu"])
    for address, record in list(records.items()):
        spoilt = record.copy()
        spoilt[len(spoilt) // 2] ^= 1
        records[address] = spoilt
    engine.built.engine.meter._price = DEAR
    question = [*PREFIX, *prompt_of(21, seed=4)]
    answer = engine.run(question, tenant=TENANT, session=SESSION)
    truth = tiered(tiny_llama, tmp_path, tiers={}, prefix_reuse=False).run(question)
    assert receipt_of(answer).tokens["cpu"] < len(PREFIX)
    assert sum(engine.built.engine.stats().verify_failures.values()) > 0
    assert answer.ids == truth.ids


def test_a_block_larger_than_an_extent_is_tried_against_the_price_as_well() -> None:
    """Else a price that is too high is never corrected there: a 70B model's blocks of 256 tokens are such."""
    settings, shape = TierSettings(), BlockShape(layers=80, layer_bytes=1 << 20, block_tokens=256)
    one = record_bytes(1, shape)
    assert one > BURST_EXTENTS * settings.extent_bytes_max
    assert Doubt(largest_extent_bytes(settings, shape)).tries(one, TierPrice(0.0, 1e3, is_proved=False))
