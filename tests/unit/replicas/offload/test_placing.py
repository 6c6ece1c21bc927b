"""What a load takes until a step can use it: learned, and paid for by a tail of a few tokens."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.messages import LoadReport
from samovar.cache_tiers.pricing import LoadPiece, PrefillPrice, TierMeter, TierPrice, plan_load
from samovar.replicas.messages import Receipt
from samovar.replicas.offload.tier_client import TierLink, TierReporter
from samovar.replicas.scheduling.sequence import Restore, RestorePiece
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import MIB, InlineExecutor, Tiered, tiered
from tests.support.inside import guards_of

PREFILL = PrefillPrice(0.025, 2e-3, 1e-7)
TINY_RAM = (1e-3, 4e9)


def slow_road(engine: Tiered, prompt: list[int], seconds: float) -> Receipt:
    """Answer a prompt; what is loaded of it gets into its pages so much later."""
    fetches = engine.lanes.fetch
    assert isinstance(fetches, InlineExecutor)
    key = engine.submit(prompt)
    fetches.held = True
    while engine.has_work:
        engine.driver.step()
    if fetches.waiting:  # the engine has nothing else to do
        engine.clock.now_s += seconds
        fetches.release()
    fetches.held = False
    engine.drain()
    admitted = engine.driver.answers[key].admitted
    assert admitted is not None
    return admitted.receipt


def latency_s(engine: Tiered) -> float:
    price = guards_of(engine.node)["cpu"].price()
    return price.latency_s


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_the_last_block_of_a_warm_turn_is_loaded_only_where_that_is_sooner(
    tiny_llama: Path, tmp_path: Path, seconds: float
) -> None:
    engine = tiered(
        tiny_llama,
        tmp_path,
        tiers={"cpu": HeapTier(64 * MIB)},
        prefill=PREFILL,
        node={"prices": {"cpu": TINY_RAM}},
    )
    for number in range(14):
        prompt = prompt_of(60, seed=number)
        answer = engine.run(prompt)
        engine.forget_pool()
        receipt = slow_road(engine, [*prompt, *answer.ids, *prompt_of(9, seed=1)], seconds)
        assert (receipt.decision, receipt.tokens["cpu"]) == ("load", 67)
    assert (latency_s(engine) > 6e-3) == (seconds > 0)

    prompt = prompt_of(60, seed=100)
    longer = [
        *prompt,
        *engine.run(prompt).ids,
        *prompt_of(9, seed=1),
    ]  # 67 slots: four blocks and three tokens
    receipt = slow_road(engine, longer, seconds)
    assert receipt.tokens["gpu"] == 64
    assert sum(receipt.tokens.values()) == len(longer)
    if seconds:
        assert (receipt.decision, receipt.tokens["cpu"], receipt.load_bytes) == ("recompute", 0, 0)
        assert receipt.load_price_s > receipt.recompute_price_s > 3 * PREFILL.a_s
    else:
        assert (receipt.decision, receipt.tokens["cpu"]) == ("load", 3)
    bare = tiered(tiny_llama, tmp_path / "bare", tiers={}, prefix_reuse=False)
    assert engine.run(longer).ids == bare.run(longer).ids


def reported(*pieces: RestorePiece, parallel: int = 4) -> list[LoadReport]:
    """What is reported of a load that was planned at 10 s, `parallel` pieces at a time."""
    told: list[LoadReport] = []

    class Link:
        def report(self, bad: list[object], loads: list[LoadReport]) -> None:
            told.extend(loads)

    restore = Restore(list(pieces), 16, "load", waits=True, started_s=10.0, hedge_at_s=20.0)
    TierReporter(cast(TierLink, Link()), InlineExecutor()).loads(restore, parallel)
    return told


def test_a_load_ends_in_its_pages_and_one_that_never_got_there_when_it_had_come() -> None:
    placed = RestorePiece(0, 64, "cpu", 1000, state="placed", arrived_s=11.0, landed_s=13.0)
    overtaken = RestorePiece(64, 128, "nvme", 500, state="overtaken", arrived_s=12.0)
    never = RestorePiece(128, 192, "s3", 500, state="failed")
    told = reported(placed, overtaken, never)
    assert told == [LoadReport("cpu", 1000, 3.0), LoadReport("nvme", 500, 2.0)]


def test_a_tier_that_waits_for_threads_that_load_from_another_is_no_slower_for_it() -> None:
    slow = RestorePiece(0, 64, "nvme", 500, state="placed", begun_s=10.25, arrived_s=13.0, landed_s=14.25)
    quick = RestorePiece(64, 128, "cpu", 500, state="placed", begun_s=14.25, arrived_s=14.5, landed_s=14.75)
    last = RestorePiece(128, 192, "cpu", 500, state="placed", begun_s=14.5, arrived_s=15.0, landed_s=15.25)
    assert reported(slow, quick, last) == [LoadReport("cpu", 1000, 1.0), LoadReport("nvme", 500, 4.0)]
    assert reported(quick, last) == [LoadReport("cpu", 1000, 5.25)], "what it waits for itself is its price"


def test_a_load_of_several_rounds_is_priced_as_what_it_took() -> None:
    """Each round waits for the tier once: a plan says so, and what it took must not say so as well."""
    road, meter = TierPrice(2e-3, 1e9), TierMeter(TierPrice(1e-3, 5e8), clock=lambda: 0.0)
    for count, nbytes, rounds in [(1, 64_000, 1), (40, 1_000_000, 10)] * 200:
        landed_s = 10.0 + rounds * road.latency_s + count * nbytes / road.bytes_per_s
        pieces = [
            RestorePiece(64 * at, 64 * at + 64, "cpu", nbytes, arrived_s=landed_s, landed_s=landed_s)
            for at in range(count)
        ]
        for load in reported(*pieces, parallel=4):
            meter.observe(load.nbytes, load.seconds)
    plan = plan_load(
        prompt_tokens=40 * 64 + 1,
        resident_tokens=0,
        pieces=[LoadPiece(64 * at, 64, 1_000_000, "cpu") for at in range(40)],
        prices={"cpu": meter.price()},
        prefill=PREFILL,
        parallel=4,
        hedge_factor=1.5,
        hedge_slack_s=0.05,
    )
    assert (plan.decision, len(plan.pieces)) == ("load", 40)
    assert plan.load_s == pytest.approx(10 * 2e-3 + 40e-3, rel=0.1)
