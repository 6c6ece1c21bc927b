"""Whatever an earlier turn had computed and is computed again has a reason in the receipt.

Random histories hold that there is one (`tests/faults/test_engine_histories.py`); these, that it is the right
one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from samovar.cache_tiers.blocks.extent import TAG_BYTES, Clear, Placement
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.messages import Lookup, LookupResult
from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.configs.sections import PolicySettings, TierSettings
from samovar.replicas.messages import GenerateRequest, Receipt, Route, SamplingParams
from samovar.replicas.offload.tier_client import TierLink
from tests.support.clock import Clock
from tests.support.engines.engines import Answer, Driver, prompt_of, small_engine
from tests.support.engines.tier_engines import MIB, InlineExecutor, Tiered, receipt_of, tiered
from tests.support.inside import guards_of, records_in, registry_of, state_of
from tests.support.nodes.node_faults import FAILING, faulty

pytestmark = pytest.mark.guarantee("G13")

DEAR = PrefillPrice(0.0, 1.0, 0.0)  # loading always pays
CHEAP = PrefillPrice(0.0, 1e-9, 0.0)  # ... and never
TENANT, SESSION, OTHER = b"t" * TAG_BYTES, b"s" * TAG_BYTES, b"o" * TAG_BYTES
FIRST = prompt_of(100, seed=1)
KNOWN = 96
"""Tokens in full blocks of the first turn."""


def engine_of(model: Path, folder: Path, cpu: object = None, **more: object) -> Tiered:
    engine = tiered(model, folder, tiers={"cpu": cpu or HeapTier(64 * MIB)}, prefill=DEAR, **more)  # type: ignore[dict-item, arg-type]
    engine.placement = Placement("cpu", (), "cpu", ttl_s=600.0, min_ttl_s=0.0)
    return engine


def ask(engine: Tiered, prompt: list[int] | None = None, session: bytes = SESSION) -> Receipt:
    return receipt_of(engine.run(prompt or FIRST, tenant=TENANT, session=session, max_tokens=1))


def again(engine: Tiered) -> Receipt:
    """The next turn, when others have taken the pool."""
    engine.forget_pool()
    return ask(engine, [*FIRST, *prompt_of(9, seed=2)])


def price_of(engine: Tiered, price: PrefillPrice) -> None:
    engine.built.engine.meter._price = price


def test_a_first_turn_has_no_reason_nor_has_one_that_finds_all(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_of(tiny_llama, tmp_path)
    assert (ask(engine).miss, ask(engine).miss) == ("", "")
    assert again(engine).missed == {}


def test_what_was_dearer_to_load_says_both_prices(tiny_llama: Path, tmp_path: Path) -> None:
    """As on a GPU on 2026-11-26: nothing was stored, all returns were computed, and `miss` was empty."""
    engine = engine_of(tiny_llama, tmp_path)
    price_of(engine, CHEAP)
    ask(engine)
    price_of(engine, CHEAP)
    receipt = again(engine)
    assert receipt.missed == {"not stored: price": KNOWN}
    assert receipt.miss.startswith("not stored: computing 0.001 us a token, loading ")
    stats = engine.built.engine.stats()
    assert stats.store_tokens["skipped:price"] >= KNOWN
    assert stats.missed_tokens == receipt.missed


def test_what_is_stored_and_now_dearer_to_load_says_both_prices(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_of(tiny_llama, tmp_path)
    ask(engine)
    price_of(engine, CHEAP)
    receipt = again(engine)
    assert receipt.decision == "recompute"
    assert sum(receipt.missed.values()) == KNOWN
    assert "dearer to load" in receipt.missed or receipt.miss == "slow lookup"


class Case(NamedTuple):
    """Something that happens between two turns, and the reason that the second one gives."""

    happens: Callable[[Tiered], object]
    reason: str
    says: str


def evict(engine: Tiered) -> None:
    for number in range(40):
        engine.forget_pool()
        engine.clock.now_s += 1.0
        ask(engine, prompt_of(100, seed=100 + number), OTHER)


def expire(engine: Tiered) -> None:
    engine.clock.now_s += 3600.0
    engine.node.tick()


def clear(engine: Tiered) -> None:
    engine.built.engine.requests.forget({TENANT + SESSION})
    engine.node.clear(Clear(TENANT, SESSION))


def break_tier(engine: Tiered) -> None:
    engine.tiers["cpu"].settings = FAILING  # type: ignore[attr-defined]
    guard = guards_of(engine.node)["cpu"]
    while guard.is_up:
        guard._breaker.failed()


def lose(engine: Tiered) -> None:
    """The medium loses its records, and a load finds that out."""
    records_in(engine.tiers["cpu"].inner).clear()  # type: ignore[attr-defined]
    for extent in list(registry_of(state_of(engine.node).catalog)):
        state_of(engine.node).lost(extent.address, "cpu")


CASES = {
    "evicted": Case(evict, "evicted", "evicted from all tiers"),
    "expired": Case(expire, "expired", "unused for too long, expired"),
    "cleared": Case(clear, "cleared", "cleared"),
    "tier down": Case(break_tier, "down", "its tier is down"),
    "lost": Case(lose, "lost", "lost by its tier"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_stored_and_is_gone_says_why(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    settings = TierSettings(audit_share=0.0, policy=PolicySettings(name="lru"))
    few = {"bytes_max": 400_000}
    engine = engine_of(tiny_llama, tmp_path, faulty(HeapTier(64 * MIB)), settings=settings, node=few)
    ask(engine)
    case.happens(engine)
    receipt = again(engine)
    assert (receipt.missed, receipt.miss) == ({case.reason: KNOWN}, case.says)


def test_an_answer_that_ended_early_says_so(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_of(tiny_llama, tmp_path)
    key = engine.submit(FIRST, tenant=TENANT, session=SESSION, max_tokens=20)
    while engine.driver.answers[key].admitted is None:
        engine.driver.step()
    engine.built.engine.requests.abort(key)
    assert again(engine).missed == {"not stored: ended early": KNOWN}


def test_a_turn_with_no_room_to_wait_for_the_tiers_says_so(tiny_llama: Path, tmp_path: Path) -> None:
    settings = TierSettings(audit_share=0.0, store_queue_max=1)
    engine = engine_of(tiny_llama, tmp_path, settings=settings)
    stores = engine.lanes.store
    assert isinstance(stores, InlineExecutor)
    stores.held = True
    ask(engine, prompt_of(100, seed=3), OTHER)
    ask(engine)
    stores.held = False
    stores.release()
    assert again(engine).missed == {"not stored: staged": KNOWN}


def test_what_is_on_its_way_to_a_tier_says_so(tiny_llama: Path, tmp_path: Path) -> None:
    engine = engine_of(tiny_llama, tmp_path)
    offers = engine.lanes.offer
    assert isinstance(offers, InlineExecutor)
    offers.held = True
    ask(engine)
    assert again(engine).missed == {"being stored": KNOWN}
    offers.release()


class Silent:
    """Tiers of which a peer does not answer, or that do not answer at all."""

    def __init__(self, link: TierLink, *, answers: bool) -> None:
        self._link = link
        self._answers = answers

    def lookup(self, lookup: Lookup) -> LookupResult | None:
        found = self._link.lookup(lookup)
        return replace(found, has_silent_peer=True) if self._answers and found is not None else None

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)


def moved(engine: Tiered, left_tokens: int) -> Receipt:
    """A turn of a session whose last turn was on another replica, as its ingress says."""
    real = engine.driver.engine.requests.add

    def add(key: int, request: GenerateRequest) -> object:
        return real(key, replace(request, route=Route(home="another", cached_tokens=left_tokens)))

    engine.driver.engine.requests.add = add  # type: ignore[method-assign, assignment]
    return ask(engine)


@pytest.mark.parametrize(
    ("answers", "reason", "says"),
    [
        (None, "no record", "the tiers have no record of it"),
        (True, "silent peer", "another node does not answer"),
        (False, "down", "its tier is down"),
    ],
)
def test_a_session_that_comes_from_another_replica_has_a_reason_too(
    tiny_llama: Path, tmp_path: Path, answers: bool | None, reason: str, says: str
) -> None:
    def link(node: TierLink) -> TierLink:
        return node if answers is None else Silent(node, answers=answers)  # type: ignore[return-value]

    engine = engine_of(tiny_llama, tmp_path, link=link)
    receipt = moved(engine, len(FIRST))
    # All but the last block, which is often tokenized otherwise in the next prompt.
    assert receipt.missed == {reason: KNOWN - 16}
    assert receipt.miss in (says, reason)


def test_without_tiers_the_ingress_is_believed(tiny_llama: Path) -> None:
    driver = Driver(small_engine(tiny_llama).engine)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    request = GenerateRequest("r", FIRST, sampling, route=Route(home="another", cached_tokens=len(FIRST)))
    driver.answers[0] = Answer()
    assert driver.engine.requests.add(0, request) is None
    driver.drain()
    assert receipt_of(driver.answers[0]).missed == {"tiers not used": KNOWN - 16}


def test_a_replica_remembers_no_more_than_it_may(tiny_llama: Path, tmp_path: Path) -> None:
    settings = TierSettings(audit_share=0.0, policy=PolicySettings(remembered_blocks_max=4))
    engine = engine_of(tiny_llama, tmp_path, settings=settings, clock=Clock())
    price_of(engine, CHEAP)
    ask(engine)
    price_of(engine, CHEAP)
    receipt = again(engine)
    assert 0 < sum(receipt.missed.values()) < KNOWN
    assert set(receipt.missed) == {"not stored: price"}
