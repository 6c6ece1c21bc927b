"""The engine's side of the tiers under faults: late, wrong, full, dead, cancelled, preempted, cleared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import TAG_BYTES, Bytes, Clear, ExtentHeader, Placement
from samovar.cache_tiers.blocks.record import decode_header, header_bytes
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.media.faults import FaultyTier
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.tier import Tier
from samovar.cache_tiers.messages import Fetch, Fetched, FetchFailed, Lookup, LookupResult
from samovar.cache_tiers.pricing.meters import PrefillMeter, PrefillPrice
from samovar.configs.sections import FaultSettings, TierSettings
from samovar.replicas.offload.load import Expected, PageMoves, PieceLoad
from samovar.replicas.offload.offload import Offload
from samovar.replicas.offload.tier_client import TierLink
from samovar.replicas.scheduling.queues import Preemption
from samovar.replicas.scheduling.step import StepPlan
from tests.support.clock import Clock
from tests.support.constants import tuned
from tests.support.engines.engines import Answer, prompt_of
from tests.support.engines.tier_engines import MIB, InlineExecutor, Tiered, nvme, tiered
from tests.support.inside import records_in

DEAR = PrefillPrice(0.0, 1.0, 0.0)  # loading always pays
CHEAP = PrefillPrice(0.0, 1e-9, 0.0)  # ... and never, though a lookup is waited for
TENANT, SESSION = b"t" * TAG_BYTES, b"s" * TAG_BYTES


@cache
def bare(model: Path, kv_dtype: str = "auto") -> Tiered:
    """An engine without any cache: the truth. Made once, it keeps nothing between requests."""
    return tiered(model, model, tiers={}, prefix_reuse=False, kv_dtype=kv_dtype)


def uncached(model: Path, _: Path, prompt: list[int], kv_dtype: str = "auto", **params: object) -> Answer:
    return bare(model, kv_dtype).run(prompt, **params)


def cpu_only(model: Path, folder: Path, **more: object) -> Tiered:
    engine = tiered(model, folder, tiers={"cpu": HeapTier(64 * MIB)}, prefill=DEAR, **more)
    engine.placement = Placement("cpu", (), "cpu")
    return engine


def two_turns(engine: Tiered, length: int = 60, **params: object) -> list[int]:
    """A turn, stored, and its pages overrun; the prompt of the next."""
    prompt = prompt_of(length, seed=length)
    answer = engine.run(prompt, **params)
    engine.forget_pool()
    return [*prompt, *answer.ids, *prompt_of(9, seed=1)]


def held(engine: Tiered) -> list[ExtentHeader]:
    """What lies in the tiers, read from there."""
    headers = []
    for tier in engine.tiers.values():
        if isinstance(tier, HeapTier):
            headers += [decode_header(data, record_bytes=data.nbytes) for data in records_in(tier).values()]
        else:
            headers += [scanned.header for scanned in tier.scan()]
    return headers


def tokens(answer: Answer) -> dict[str, int]:
    assert answer.admitted is not None
    return {str(source): count for source, count in answer.admitted.receipt.tokens.items()}


# -- late ----------------------------------------------------------------------------------


def test_f08_a_late_load_is_hedged_and_whichever_comes_first_is_kept(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = cpu_only(tiny_llama, tmp_path, step_tokens_max=16)
    prompt = two_turns(engine)
    fetches = engine.lanes.fetch
    assert isinstance(fetches, InlineExecutor)
    fetches.held = True
    key = engine.submit(prompt)
    for _ in range(2):  # looked up, then admitted
        engine.driver.step()
    assert fetches.waiting == 1
    assert not engine.built.engine.has_work  # it waits for the load, and nothing spins meanwhile
    wait_s = engine.built.engine.wake_in_s
    assert wait_s is not None
    assert 0 < wait_s < 1
    engine.clock.now_s += wait_s
    assert engine.built.engine.has_work
    engine.driver.step()  # hedged: the first 16 tokens are computed
    fetches.release()  # ... and now the load comes
    engine.drain()
    answer = engine.driver.answers[key]
    assert answer.admitted is not None
    assert answer.admitted.receipt.decision == "hedge"
    assert answer.admitted.receipt.miss == "late"
    assert 0 < tokens(answer)["cpu"] < 67
    assert answer.ids == uncached(tiny_llama, tmp_path, prompt).ids


def test_f08_a_load_that_never_comes_costs_a_recompute(tiny_llama: Path, tmp_path: Path) -> None:
    engine = cpu_only(tiny_llama, tmp_path)
    prompt = two_turns(engine)
    fetches = engine.lanes.fetch
    assert isinstance(fetches, InlineExecutor)
    fetches.held = True
    key = engine.submit(prompt)
    for _ in range(2):
        engine.driver.step()
    engine.clock.now_s += 10.0
    while engine.built.engine.has_work:
        engine.driver.step()
    answer = engine.driver.answers[key]
    assert answer.finish == {0: "length"}
    assert tokens(answer)["compute"] == len(prompt)
    assert answer.ids == uncached(tiny_llama, tmp_path, prompt).ids
    fetches.release()  # long after the end: ignored
    engine.drain()


def test_f08_a_lookup_that_hangs_is_a_miss_and_holds_up_nobody(tiny_llama: Path, tmp_path: Path) -> None:
    engine = cpu_only(tiny_llama, tmp_path)
    prompt = two_turns(engine)
    lookups = engine.lanes.lookup
    assert isinstance(lookups, InlineExecutor)
    lookups.held = True
    key = engine.submit(prompt)
    engine.driver.step()
    assert not engine.built.engine.has_work
    lookups.held = False
    other = engine.submit(prompt_of(20, seed=7))
    while engine.built.engine.has_work:
        engine.driver.step()
    assert engine.driver.answers[other].finish == {0: "length"}  # came later, was not held up
    assert not engine.driver.answers[key].finish
    engine.clock.now_s += 1.0
    while engine.built.engine.has_work:
        engine.driver.step()
    answer = engine.driver.answers[key]
    assert answer.admitted is not None
    assert answer.admitted.receipt.miss == "slow lookup"
    assert answer.ids == uncached(tiny_llama, tmp_path, prompt).ids
    lookups.release()
    engine.drain()


def test_a_step_is_put_off_for_a_lookup_that_has_just_begun(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a tenth of what the last step took, from when the request came; not for one that is late."""
    engine = cpu_only(tiny_llama, tmp_path)
    inner = engine.built.engine
    run = inner.runner.run

    def takes_a_second(*args: object) -> object:
        engine.clock.now_s += 1.0
        return run(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(inner.requests, "clock", engine.clock)
    monkeypatch.setattr(inner.runner, "run", takes_a_second)
    engine.submit(prompt_of(20, seed=2), max_tokens=40)
    for _ in range(3):
        engine.driver.step()
    assert inner.hold_s == 0.0, "nobody waits"
    lookups = engine.lanes.lookup
    assert isinstance(lookups, InlineExecutor)
    lookups.held = True
    engine.submit(prompt_of(20, seed=3))
    assert inner.hold_s == pytest.approx(0.1)
    engine.clock.now_s += 0.04
    assert inner.hold_s == pytest.approx(0.06)
    engine.clock.now_s += 0.1
    assert inner.hold_s == 0.0
    lookups.release()
    engine.drain()


def test_meet_computes_from_the_front_while_loading_from_the_back(tiny_llama: Path, tmp_path: Path) -> None:
    """A tier half as fast as computing: both work at once, and the answer is the same."""
    settings = TierSettings(audit_share=0.0, extent_bytes_max=64 * 1024)
    slow = {"cpu": (0.001, 3e5)}
    engine = tiered(
        tiny_llama,
        tmp_path,
        tiers={"cpu": HeapTier(64 * MIB)},
        settings=settings,
        prefill=PrefillPrice(0.0, 0.002, 0.0),
        node={"prices": slow},
        step_tokens_max=32,
    )
    engine.placement = Placement("cpu", (), "cpu")
    prompt = two_turns(engine, 700)
    fetches = engine.lanes.fetch
    assert isinstance(fetches, InlineExecutor)
    fetches.held = True
    key = engine.submit(prompt)
    while engine.built.engine.has_work:
        engine.driver.step()
        fetches.release(1)  # the last piece first
    engine.drain()
    answer = engine.driver.answers[key]
    assert answer.admitted is not None
    assert answer.admitted.receipt.decision == "meet"
    assert tokens(answer)["cpu"] >= 100
    assert tokens(answer)["compute"] >= 100
    assert answer.ids == uncached(tiny_llama, tmp_path, prompt).ids


@pytest.mark.parametrize(("price", "decision"), [(DEAR, "load"), (CHEAP, "recompute")])
def test_where_computing_is_cheaper_nothing_is_loaded_and_the_receipt_says_so(
    tiny_llama: Path, tmp_path: Path, price: PrefillPrice, decision: str
) -> None:
    """What is decided hangs on the price alone; that it is found is shown by the dear one."""
    engine = cpu_only(tiny_llama, tmp_path)
    prompt = two_turns(engine)
    fetches: list[Fetch] = []
    offload = engine.built.engine.offload
    assert offload is not None

    def noted(fetch: Fetch, reply: Fetched | FetchFailed) -> Fetched | FetchFailed:
        fetches.append(fetch)
        return reply

    offload.restores.loads.fetch_now = Overlay(offload.link, fetch=noted).fetch
    engine.built.engine.meter = offload.restores.meter = PrefillMeter(price)
    answer = engine.run(prompt)
    assert answer.admitted is not None
    assert answer.admitted.receipt.decision == decision
    assert engine.built.engine.stats().decisions == {decision: 1}
    assert (tokens(answer)["compute"] == len(prompt)) == (not fetches) == (decision == "recompute")


# -- wrong ---------------------------------------------------------------------------------


class Overlay:
    """A link with something done to what comes through it."""

    def __init__(
        self,
        inner: TierLink,
        *,
        lookup: Callable[[LookupResult | None], LookupResult | None] = lambda found: found,
        fetch: Callable[[Fetch, Fetched | FetchFailed], Fetched | FetchFailed] = lambda _, reply: reply,
    ) -> None:
        self.inner, self._lookup, self._fetch = inner, lookup, fetch

    def lookup(self, lookup: Lookup) -> LookupResult | None:
        return self._lookup(self.inner.lookup(lookup))

    def fetch(self, fetch: Fetch) -> Fetched | FetchFailed:
        return self._fetch(fetch, self.inner.fetch(fetch))

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def spoiled(change: Callable[[Bytes], Bytes]) -> Callable[[TierLink], TierLink]:
    def fetch(_: Fetch, reply: Fetched | FetchFailed) -> Fetched | FetchFailed:
        if isinstance(reply, Fetched):
            assert reply.data is not None
            return replace(reply, data=change(reply.data.copy()))
        return reply

    return lambda link: Overlay(link, fetch=fetch)  # type: ignore[return-value]


def flip(at: int) -> Callable[[Bytes], Bytes]:
    def change(data: Bytes) -> Bytes:
        data[at] ^= 4
        return data

    return change


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (flip(3), "magic"),
        (flip(100), "header"),
        (flip(4096 + 77), "checksum"),
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: data[:50], "truncated"),
        (lambda data: data * 0, "magic"),
    ],
)
def test_f01_what_comes_wrong_is_a_miss_is_counted_and_is_quarantined(
    tiny_llama: Path, tmp_path: Path, change: Callable[[Bytes], Bytes], kind: str
) -> None:
    engine = cpu_only(tiny_llama, tmp_path, link=spoiled(change))
    prompt = two_turns(engine)
    answer = engine.run(prompt)
    assert answer.ids == uncached(tiny_llama, tmp_path, prompt).ids
    assert tokens(answer)["cpu"] == 0
    assert answer.admitted is not None
    assert answer.admitted.receipt.miss == "bad"
    assert engine.built.engine.stats().verify_failures == {f"cpu:{kind}": 1}
    (row,) = [row for row in engine.node.stats().tiers if row.name == "cpu"]
    assert row.quarantined == 1


def test_g7_the_good_blocks_before_a_bad_one_are_used(tiny_llama: Path, tmp_path: Path) -> None:
    """One bit in the third block: two blocks come from the tier, the rest is computed."""
    engine = cpu_only(tiny_llama, tmp_path)
    prompt = two_turns(engine)
    block_bytes = engine.built.engine.runner.pool.geometry.block_bytes
    offload = engine.built.engine.offload
    assert offload is not None
    offload.restores.loads.fetch_now = spoiled(flip(4096 + 2 * block_bytes + 5))(offload.link).fetch
    answer = engine.run(prompt)
    assert tokens(answer)["cpu"] == 32
    assert answer.ids == uncached(tiny_llama, tmp_path, prompt).ids


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("block", [0, 1, 2, 3, 4])
def test_g7_a_bad_block_on_disk_costs_only_what_lies_behind_it(
    tiny_llama: Path, tmp_path: Path, block: int, at_end: bool
) -> None:
    """A byte of each block, flipped in the file of a service that has started again."""
    before = tiered(tiny_llama, tmp_path, prefill=DEAR)
    before.placement = Placement("cpu", ("nvme",), "nvme")
    prompt = two_turns(before)
    (file,) = tmp_path.rglob("v1/**/*.kv")
    header = decode_header(np.frombuffer(file.read_bytes(), np.uint8))
    assert header.blocks == 5
    block_bytes = before.built.engine.runner.pool.geometry.block_bytes
    at = header_bytes(header.blocks, header.shape.layers) + (block + at_end) * block_bytes - at_end
    data = bytearray(file.read_bytes())
    data[at] ^= 16
    file.write_bytes(data)

    tiers: dict[TierName, Tier] = {"cpu": HeapTier(64 * MIB), "nvme": before.tiers["nvme"]}
    engine = tiered(tiny_llama, tmp_path, tiers=tiers, prefill=DEAR)
    answer = engine.run(prompt)
    truth = uncached(tiny_llama, tmp_path, prompt)
    assert tokens(answer)["nvme"] == sum(header.token_counts[:block])
    assert answer.ids == truth.ids
    (row,) = [row for row in engine.node.stats().tiers if row.name == "nvme"]
    assert row.quarantined == 1
    assert not file.exists()
    engine.run(prompt)  # stored again, whole
    engine.forget_pool()
    again = engine.run(prompt)
    assert again.ids == truth.ids
    assert tokens(again)["cpu"] == 64


def test_g7_a_whole_copy_goes_before_what_is_left_of_a_bad_one(tiny_llama: Path, tmp_path: Path) -> None:
    below = nvme(tmp_path / "below")  # stands for S3
    below.name = "s3"  # type: ignore[assignment]
    lower: dict[TierName, Tier] = {"nvme": nvme(tmp_path / "disk"), "s3": below}
    before = tiered(tiny_llama, tmp_path, tiers={"cpu": HeapTier(64 * MIB), **lower}, prefill=DEAR)
    before.placement = Placement("cpu", ("nvme", "s3"), "s3")
    prompt = two_turns(before)
    (file,) = (tmp_path / "disk").rglob("v1/**/*.kv")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    engine = tiered(tiny_llama, tmp_path, tiers={"cpu": HeapTier(64 * MIB), **lower}, prefill=DEAR)
    answer = engine.run(prompt)
    assert tokens(answer)["s3"] >= 64
    assert answer.ids == uncached(tiny_llama, tmp_path, prompt).ids
    assert engine.built.engine.stats().verify_failures == {}


def test_f03_another_extent_in_its_place_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """The record of one conversation under the name of another: right checksums, wrong keys."""
    engine = cpu_only(tiny_llama, tmp_path)
    prompt, other = two_turns(engine, 60), two_turns(engine, 61)
    records = records_in(engine.tiers["cpu"])
    (one, two) = records
    records[one], records[two] = records[two], records[one]
    for asked in (prompt, other):
        answer = engine.run(asked)
        assert tokens(answer)["cpu"] == 0
        assert answer.ids == uncached(tiny_llama, tmp_path, asked).ids
    assert engine.built.engine.stats().verify_failures == {"cpu:key": 2}


def test_g3_a_stale_namespace_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """A tier that hands out records of another model's namespace under our keys: the header tells."""
    engine = cpu_only(tiny_llama, tmp_path)
    prompt = two_turns(engine)
    offload = engine.built.engine.offload
    assert offload is not None
    inner = offload.restores.loads.fetch

    def load_as_another(of: PieceLoad, fetch: Fetch, expected: Expected) -> None:
        inner(of, fetch, replace(expected, namespace=bytes(32)))

    offload.restores.loads.fetch = load_as_another  # type: ignore[method-assign]
    answer = engine.run(prompt)
    assert tokens(answer)["cpu"] == 0
    assert engine.built.engine.stats().verify_failures == {"cpu:namespace": 1}


@pytest.mark.parametrize(
    "faults", [{"error_rate": 1.0}, {"flip_rate": 1.0}, {"truncate_rate": 1.0}, {"full_rate": 1.0}]
)
def test_g9_a_tier_that_always_fails_is_a_tier_that_is_not_there(
    tiny_llama: Path, tmp_path: Path, faults: dict[str, float]
) -> None:
    tier = FaultyTier(HeapTier(64 * MIB), FaultSettings(**faults))
    engine = tiered(tiny_llama, tmp_path, tiers={"cpu": tier}, prefill=DEAR)
    prompt = two_turns(engine)
    for _ in range(3):
        answer = engine.run(prompt)
        assert answer.ids == uncached(tiny_llama, tmp_path, prompt).ids
        engine.forget_pool()


# -- cancelled, preempted, forked ----------------------------------------------------------


def test_f23_a_client_that_leaves_while_blocks_come_leaves_nothing_behind(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = cpu_only(tiny_llama, tmp_path)
    prompt = two_turns(engine)
    fetches, lookups = engine.lanes.fetch, engine.lanes.lookup
    assert isinstance(fetches, InlineExecutor)
    assert isinstance(lookups, InlineExecutor)
    free = engine.built.engine.stats().pages_free
    for steps, held in ((0, lookups), (1, fetches), (2, fetches)):
        held.held = True
        key = engine.submit(prompt)
        for _ in range(steps):
            engine.driver.step()
        assert engine.built.engine.requests.abort(key)
        held.held = False
        held.release()
        engine.drain()
        stats = engine.built.engine.stats()
        assert (stats.pages_free, stats.pages_active, stats.loading) == (free, 0, 0)
    assert engine.built.engine.stats().stores == {"taken": 1}


@pytest.mark.parametrize("how", ["abort", "preempt"])
@pytest.mark.parametrize("fault", [None, "pages are not kept", "nothing is stopped"])
def test_f23_pages_that_blocks_are_copied_into_are_nobody_elses_until_that_is_over(
    tiny_llama: Path, tmp_path: Path, how: str, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy was begun on a worker thread: the sequence goes, the copy goes on."""
    engine = cpu_only(tiny_llama, tmp_path, copies=random.Random(1))
    prompt = two_turns(engine)
    inner, fetches = engine.built.engine, engine.lanes.fetch
    assert isinstance(fetches, InlineExecutor)
    assert engine.device is not None
    if fault == "pages are not kept":
        monkeypatch.setattr(PageMoves, "keep", lambda *_: None)
    elif fault is not None:
        monkeypatch.setattr(Offload, "stop_restore", lambda *_: None)
    fetches.held = True
    key = engine.submit(prompt)
    engine.driver.step()
    (sequence,) = inner.scheduler.running
    assert sequence.restore is not None
    (piece,) = sequence.restore.pieces
    if fault != "nothing is stopped":
        fetches.release()
        assert piece.state == "moving"
    pages = set(sequence.pages[: -(-piece.end // 16)])
    if how == "abort":
        inner.requests.abort(key)
    else:
        inner.scheduler.queues.preempt(Preemption(sequence, "drop"), StepPlan())
        assert inner.offload is not None
        inner.offload.close(sequence)
    fetches.held = False
    fetches.release()
    given = {inner.scheduler.pool.allocate() for _ in range(inner.scheduler.pool.available)}
    is_written = engine.device.is_busy
    while engine.device.run_one():
        pass
    assert bool(given & pages) == (fault is not None or not is_written)
    assert is_written or fault is None
    inner.scheduler.pool.release(given)
    engine.drain()
    if fault is None:
        inner.check_integrity()


def test_f24_only_written_slots_are_stored_at_every_length(tiny_llama: Path, tmp_path: Path) -> None:
    """vLLM #54193: a turn that ends on a block's boundary; max_tokens=1; a stop in the middle."""
    engine = cpu_only(tiny_llama, tmp_path)
    turns = [(length, n) for length in range(1, 49) for n in sorted({1, 16 - length % 16, 5})]
    for number, (length, max_tokens) in enumerate(turns):
        salt = number.to_bytes(4, "little")  # its own namespace: nothing is shared between the turns
        prompt = prompt_of(length, seed=length)
        first = engine.run(prompt, max_tokens=max_tokens, salt=salt)
        header = held(engine)[-1]
        assert header.tokens == length + max_tokens - 1  # the last sampled token was never computed
        engine.forget_pool()
        again = [*prompt, *first.ids, 5, 6, 7]
        answer = engine.run(again, salt=salt)
        assert tokens(answer)["cpu"] == length + max_tokens - 1
        assert answer.ids == uncached(tiny_llama, tmp_path, again).ids


def test_f24_fires_when_the_last_sampled_slot_is_stored(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The early store, planted: one slot more than was computed gives another KV, or the law is blind."""
    import samovar.replicas.offload.store as turn_store

    def early(sequence, block_tokens):  # type: ignore[no-untyped-def]
        sequence.computed += 1
        try:
            return real(sequence, block_tokens)
        finally:
            sequence.computed -= 1

    real = turn_store.chain_of
    monkeypatch.setattr(turn_store, "chain_of", early)
    engine = cpu_only(tiny_llama, tmp_path)
    prompt = prompt_of(28, seed=3)
    first = engine.run(prompt, max_tokens=4)  # 32 tokens known, 31 computed
    engine.forget_pool()
    again = [*prompt, *first.ids, 5, 6, 7]
    returned = engine.prefill(again)
    expected = tiered(tiny_llama, tmp_path, tiers={}, prefix_reuse=False).prefill(again)
    assert not (returned[1] == expected[1]).all()


def test_g6_slots_behind_the_last_computed_one_leave_as_zeros(tiny_llama: Path, tmp_path: Path) -> None:
    """A page's old content is somebody else's."""
    engine = cpu_only(tiny_llama, tmp_path)
    engine.built.engine.runner.pool.data.fill_(7.0)
    engine.run(prompt_of(20, seed=2), max_tokens=3)
    ((_, record),) = records_in(engine.tiers["cpu"]).items()
    geometry = engine.built.engine.runner.pool.geometry
    tail = record[-geometry.block_bytes :].reshape(geometry.layers * 2, 16, -1)
    assert tail[:, :6].any()
    assert not tail[:, 6:].any()


ORDERS = pytest.mark.parametrize("order", [None, 1, 2, 3], ids=["at once", "any 1", "any 2", "any 3"])
"""Copies at once, or in any order, in parts, beside the steps."""


def copies_of(order: int | None) -> random.Random | None:
    return None if order is None else random.Random(order)


@ORDERS
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_f25_preempted_by_swap_while_blocks_are_stored_and_loaded(
    tiny_llama: Path, tmp_path: Path, kv_dtype: str, order: int | None
) -> None:
    """Too few pages for three: the newest are swapped out and in, forks and stores going on."""
    engine = cpu_only(
        tiny_llama,
        tmp_path,
        pool_tokens=256,
        preemption="swap",
        kv_dtype=kv_dtype,
        copies=copies_of(order),
    )
    engine.lanes.store.held = True  # type: ignore[attr-defined]
    prompts = [prompt_of(50 + i, seed=i) for i in range(4)]
    keys = [engine.submit(p, max_tokens=40, n=2 if i == 1 else 1) for i, p in enumerate(prompts)]
    while engine.has_work:
        engine.driver.step()
    engine.lanes.store.held = False  # type: ignore[attr-defined]
    engine.lanes.store.release()  # type: ignore[attr-defined]
    engine.drain()
    assert engine.built.engine.stats().swaps > 0
    for key, prompt in zip(keys, prompts, strict=True):
        expected = uncached(tiny_llama, tmp_path, prompt, kv_dtype, max_tokens=40)
        answer = engine.driver.answers[key]
        assert all(ids == expected.ids for ids in answer.token_ids.values())
    assert engine.built.engine.stats().pages_active == 0
    assert engine.built.engine.offload.swap.nbytes == 0  # type: ignore[union-attr]


@ORDERS
@pytest.mark.parametrize("preemption", ["swap", "drop", "price"])
def test_f25_a_full_pool_with_loads_under_way_comes_to_an_end(
    tiny_llama: Path, tmp_path: Path, preemption: str, order: int | None
) -> None:
    engine = cpu_only(tiny_llama, tmp_path, pool_tokens=320, preemption=preemption, copies=copies_of(order))
    prompts = [two_turns(engine, 60 + i) for i in range(6)]
    keys = [engine.submit(prompt, max_tokens=30) for prompt in prompts]
    engine.drain()
    for key, prompt in zip(keys, prompts, strict=True):
        assert engine.driver.answers[key].ids == uncached(tiny_llama, tmp_path, prompt, max_tokens=30).ids


@pytest.mark.parametrize("preemption", ["swap", "drop"])
def test_what_a_preempted_request_computed_itself_does_not_count_as_cached(
    tiny_llama: Path, tmp_path: Path, preemption: str
) -> None:
    """It finds its own blocks in the pool when it is admitted again; the receipt is not about those."""
    engine = cpu_only(tiny_llama, tmp_path, pool_tokens=224, step_tokens_max=16, preemption=preemption)
    older = engine.submit(prompt_of(60, seed=1), max_tokens=30)
    for _ in range(6):
        engine.driver.step()
    newer = engine.submit(prompt_of(150, seed=2), max_tokens=4)
    engine.drain()
    assert engine.built.engine.stats().preemptions > 0
    for key, length in ((older, 60), (newer, 150)):
        answer = engine.driver.answers[key]
        assert answer.admitted is not None
        assert answer.admitted.cached_tokens == 0
        assert tokens(answer)["compute"] == length
        seed, most = (1, 30) if key == older else (2, 4)
        assert answer.ids == uncached(tiny_llama, tmp_path, prompt_of(length, seed=seed), max_tokens=most).ids


# -- forgotten -----------------------------------------------------------------------------


def test_f36_what_is_cleared_is_gone_from_the_pool_and_the_tiers(tiny_llama: Path, tmp_path: Path) -> None:
    engine = tiered(tiny_llama, tmp_path, prefill=DEAR)
    mine = {"tenant": TENANT, "session": SESSION}
    prompt = prompt_of(60, seed=5)
    answer = engine.run(prompt, **mine)
    others = engine.run(prompt_of(40, seed=6), tenant=TENANT, session=b"o" * TAG_BYTES)
    assert engine.built.engine.requests.forget({TENANT + SESSION}) == 4
    assert engine.node.clear(Clear(TENANT, SESSION)).extents == 1
    again = engine.run([*prompt, *answer.ids, 9], **mine)
    assert tokens(again)["compute"] == 69
    kept = engine.run([*prompt_of(40, seed=6), *others.ids, 9], tenant=TENANT, session=b"o" * TAG_BYTES)
    assert tokens(kept)["gpu"] > 0


def test_f36_a_turn_that_runs_while_its_session_is_cleared_leaves_nothing(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = tiered(tiny_llama, tmp_path, prefill=DEAR)
    mine = {"tenant": TENANT, "session": SESSION}
    prompt = prompt_of(60, seed=5)
    engine.submit(prompt, max_tokens=30, **mine)
    for _ in range(6):
        engine.driver.step()
    engine.built.engine.requests.forget({TENANT + SESSION})
    engine.node.clear(Clear(TENANT, SESSION))
    engine.drain()
    assert engine.built.engine.stats().pages_cached == 0
    assert held(engine) == []
    assert tokens(engine.run(prompt, **mine))["compute"] == 60


def test_f36_a_store_under_way_while_its_session_is_cleared_is_not_taken(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = tiered(tiny_llama, tmp_path, prefill=DEAR)
    mine = {"tenant": TENANT, "session": SESSION}
    stores = engine.lanes.store
    assert isinstance(stores, InlineExecutor)
    stores.held = True
    engine.submit(prompt_of(60, seed=5), **mine)
    while engine.built.engine.has_work:
        engine.driver.step()
    assert stores.waiting == 1
    engine.node.clear(Clear(TENANT, SESSION))
    stores.release()
    engine.drain()
    assert held(engine) == []
    assert engine.built.engine.stats().stores == {"refused:tombstone": 1}


# -- audit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_g14_the_audit_finds_what_the_checksums_cannot(
    tiny_llama: Path, tmp_path: Path, kv_dtype: str
) -> None:
    """A record that was wrong when it was sealed: checksums hold, computing disagrees."""
    settings = TierSettings(audit_share=1.0)
    engine = cpu_only(tiny_llama, tmp_path, settings=settings, kv_dtype=kv_dtype)
    pool = engine.built.engine.runner.pool
    prompt = two_turns(engine)
    engine.run(prompt)
    assert engine.built.engine.stats().audits == {"equal": 1}
    engine.forget_pool()
    # A wrong store: the pages are spoiled before they are copied out.
    stores = engine.lanes.store
    assert isinstance(stores, InlineExecutor)
    stores.held = True
    other = prompt_of(64, seed=77)
    answer = Answer()
    key = engine.submit(other)
    while engine.built.engine.has_work:
        engine.driver.step()
    answer = engine.driver.answers[key]
    (pool.data if pool.scales is None else pool.scales).mul_(1.5)
    stores.held = False
    stores.release()
    engine.drain()
    engine.forget_pool()
    engine.run([*other, *answer.ids, 3])
    assert engine.built.engine.stats().audits == {"equal": 1, "mismatch": 1}
    assert engine.built.engine.stats().verify_failures == {"cpu:audit": 1}
    # Quarantined, and with it all that its tenant had: what was computed behind it is wrong, too.
    assert held(engine) == []
    assert engine.built.engine.stats().pages_cached == 0
    again = engine.run([*other, *answer.ids, 3])
    assert again.ids == uncached(tiny_llama, tmp_path, [*other, *answer.ids, 3], kv_dtype).ids


def test_g9_an_audit_that_fails_takes_nobody_along(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = cpu_only(tiny_llama, tmp_path, settings=TierSettings(audit_share=1.0))
    prompt = two_turns(engine)

    def no_memory(*_: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(engine.built.engine.runner.pool, "gather_layer", no_memory)
    engine.run(prompt)
    assert engine.built.engine.stats().audits == {"error": 1}
    assert engine.built.engine.stats().pages_active == 0


def test_a_request_whose_cached_blocks_hold_nan_fails_once_and_not_for_ever(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = cpu_only(tiny_llama, tmp_path)
    prompt = prompt_of(60, seed=5)
    engine.run(prompt)
    engine.built.engine.runner.pool.data[1:5] = float("nan")
    failed = engine.run(prompt)
    assert failed.failed is not None
    assert "NaN" in failed.failed.message
    assert engine.run(prompt).ids == uncached(tiny_llama, tmp_path, prompt).ids


def test_blocks_that_hold_nan_are_found_by_no_other_session(tiny_llama: Path, tmp_path: Path) -> None:
    """Whoever owns them: one that is idle would keep them for all that begin as it did."""
    engine = cpu_only(tiny_llama, tmp_path)
    prompt = prompt_of(60, seed=5)
    engine.run(prompt)
    engine.built.engine.runner.pool.data[1:5] = float("nan")
    other = b"another!" * 2
    assert engine.run(prompt, session=other).failed is not None
    assert engine.run(prompt, session=other).ids == uncached(tiny_llama, tmp_path, prompt).ids


def test_the_audit_waits_until_nobody_wants_anything(tiny_llama: Path, tmp_path: Path) -> None:
    engine = cpu_only(
        tiny_llama, tmp_path, settings=tuned(TierSettings(audit_share=1.0), audit_step_tokens=16)
    )
    prompt = two_turns(engine)
    engine.submit(prompt, max_tokens=5)
    engine.submit(prompt_of(30, seed=9), max_tokens=12)
    auditor = engine.built.engine.auditor
    while engine.built.engine.scheduler.has_work:
        steps = auditor.outcomes.total()
        engine.driver.step()
        assert auditor.outcomes.total() == steps
    assert auditor.has_work
    engine.drain()
    assert engine.built.engine.stats().audits == {"equal": 1}


def test_f26_a_clock_that_jumps_forward_or_back_costs_a_recompute_at_most(
    tiny_llama: Path, tmp_path: Path
) -> None:
    clock = Clock()
    engine = cpu_only(tiny_llama, tmp_path, clock=clock)
    prompt = two_turns(engine)
    for jump_s in (600.0, -3600.0, 86400.0 * 3650, -86400.0 * 3650):
        clock.now_s += jump_s
        answer = engine.run(prompt)
        assert answer.ids == uncached(tiny_llama, tmp_path, prompt).ids
        engine.forget_pool()


def test_nothing_is_stored_for_a_request_without_a_placement(tiny_llama: Path, tmp_path: Path) -> None:
    engine = cpu_only(tiny_llama, tmp_path)
    engine.placement = None  # type: ignore[assignment]
    engine.run(prompt_of(60, seed=5))
    assert held(engine) == []


def test_f08_a_slow_tier_is_remembered_as_slow_after_its_request_is_over(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = cpu_only(tiny_llama, tmp_path)
    prompt = two_turns(engine)
    fetches = engine.lanes.fetch
    assert isinstance(fetches, InlineExecutor)
    before = engine.node.lookup(Lookup(bytes(32), b"", TENANT, SESSION)).prices["cpu"]
    offload = engine.built.engine.offload
    assert offload is not None

    def slow(_: Fetch, reply: Fetched | FetchFailed) -> Fetched | FetchFailed:
        engine.clock.now_s += 9.0
        return reply

    offload.restores.loads.fetch_now = Overlay(offload.link, fetch=slow).fetch
    for _ in range(3):
        engine.run(prompt)
        engine.forget_pool()
    after = engine.node.lookup(Lookup(bytes(32), b"", TENANT, SESSION)).prices["cpu"]
    assert after.seconds(30_000) > 2 * before.seconds(30_000)


@pytest.mark.parametrize("fetch_max", [1, 3])
def test_a_conversation_of_more_extents_than_may_be_fetched_at_once_is_loaded_whole(
    tiny_llama: Path, tmp_path: Path, fetch_max: int
) -> None:
    """An 8 B model's 32k tokens are 256 extents of the default size; 64 fetches are the default."""
    settings = TierSettings(audit_share=0.0, extent_bytes_max=64 * 1024, fetch_max=fetch_max)
    engine = cpu_only(tiny_llama, tmp_path, settings=settings, copies=random.Random(5))
    prompt = two_turns(engine, 900)
    assert len(held(engine)) > 2 * fetch_max
    fetches, most = engine.lanes.fetch, 0
    assert isinstance(fetches, InlineExecutor)
    fetches.held = True
    key = engine.submit(prompt)
    while engine.has_work or fetches.waiting:
        engine.driver.step()
        most = max(most, fetches.waiting)
        fetches.release(1)
    engine.drain()
    answer = engine.driver.answers[key]
    assert most == fetch_max
    assert tokens(answer)["cpu"] >= 900
    assert answer.ids == uncached(tiny_llama, tmp_path, prompt).ids


def test_f23_what_waits_to_be_fetched_is_forgotten_with_its_request(tiny_llama: Path, tmp_path: Path) -> None:
    settings = TierSettings(audit_share=0.0, extent_bytes_max=64 * 1024, fetch_max=1)
    engine = cpu_only(tiny_llama, tmp_path, settings=settings)
    prompt = two_turns(engine, 900)
    fetches, inner = engine.lanes.fetch, engine.built.engine
    assert isinstance(fetches, InlineExecutor)
    fetches.held = True
    key = engine.submit(prompt)
    for _ in range(3):
        engine.driver.step()
    assert inner.requests.abort(key)
    assert fetches.waiting == 1
    fetches.held = False
    fetches.release()
    engine.drain()
    assert (inner.stats().loading, inner.stats().pages_active) == (0, 0)
    assert tokens(engine.run(prompt))["cpu"] >= 900


def test_a_staging_area_that_is_full_drops_the_store_and_not_the_request(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = cpu_only(tiny_llama, tmp_path, settings=TierSettings(audit_share=0.0, staged_bytes_max=MIB))
    engine.built.engine.offload.turns._settings = TierSettings(staged_bytes_max=MIB, store_queue_max=1)  # type: ignore[union-attr]
    stores = engine.lanes.store
    assert isinstance(stores, InlineExecutor)
    stores.held = True
    for seed in range(3):
        engine.submit(prompt_of(30, seed=seed))
        while engine.built.engine.has_work:
            engine.driver.step()
    stores.release()
    engine.drain()
    assert engine.built.engine.stats().stores == {"taken": 1, "dropped:staged": 2}


def test_the_last_block_of_a_warm_turn_rides_along_beside_a_stream(tiny_llama: Path, tmp_path: Path) -> None:
    """It is in a tier, and computing it takes less than the step that runs anyway; alone, it is loaded."""
    decisions = {}
    for streams in (0, 1):
        engine = tiered(tiny_llama, tmp_path / str(streams), prefill=PrefillPrice(0.04, 1.1e-3, 0.0))
        prompt = prompt_of(60, seed=60)
        first = engine.run(prompt)  # 67 slots: four blocks and three tokens in a fifth
        for _ in range(streams):
            engine.submit(prompt_of(20, seed=2), max_tokens=40, session=bytes(15) + b"s")
            for _ in range(3):
                engine.driver.step()
            assert engine.built.engine.scheduler.running[0].is_decode
        key = engine.submit([*prompt, *first.ids, *prompt_of(9, seed=1)])
        engine.drain()
        answer = engine.driver.answers[key]
        assert answer.admitted is not None
        decisions[streams] = answer.admitted.receipt.decision
        assert tokens(answer)["gpu"] == 64
        assert answer.ids == uncached(tiny_llama, tmp_path, [*prompt, *first.ids, *prompt_of(9, seed=1)]).ids
    assert decisions == {0: "load", 1: "recompute"}
