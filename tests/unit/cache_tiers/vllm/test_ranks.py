"""Several ranks of one engine: what is loaded is there on all of them, or on none."""

from __future__ import annotations

import random

import pytest

from samovar.cache_tiers.blocks import CPU, KEY_BYTES, NVME, ROOT
from samovar.cache_tiers.messages import BlockRange, LookupResult
from samovar.cache_tiers.pricing import TierPrice
from samovar.cache_tiers.vllm.names.chain import rank_name
from samovar.cache_tiers.vllm.spans import kept_front, segments
from tests.support.fake_vllm import BLOCK_TOKENS, FakeVllm, prompt
from tests.unit.cache_tiers.vllm.test_connector_laws import Node, engines, node, until_held

__all__ = ["engines", "node"]
PRICES = {CPU.name: TierPrice(0.0, 1e9, True), NVME.name: TierPrice(0.0, 1e6, True)}


def records(node: Node) -> list[tuple[str, int]]:
    """Namespaces on disk, and how many records of each."""
    found: dict[str, int] = {}
    for path in (node.folder / "kv").rglob("*.kv"):
        found[path.parent.name] = found.get(path.parent.name, 0) + 1
    return sorted(found.items())


def test_ranks_store_and_load_their_own(node: Node, engines: object) -> None:
    engine: FakeVllm = engines(ranks=2)  # type: ignore[operator]
    ids = prompt(1, 10)
    assert until_held(engine, ids) == 10 * BLOCK_TOKENS  # each byte was checked
    engine.settle()
    node.stop()
    node.start()
    assert engine.run(engine.request(ids)) == 10 * BLOCK_TOKENS


def test_engines_with_other_ranks_share_nothing(engines: object) -> None:
    one, two = engines(), engines(ranks=2)  # type: ignore[operator]
    ids = prompt(1, 6)
    until_held(one, ids)
    assert two.run(two.request(ids)) == 0
    until_held(two, ids)
    assert one.run(one.request(ids)) == 6 * BLOCK_TOKENS


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_record_that_one_rank_lacks_is_loaded_by_none(node: Node, engines: object, lacks: int) -> None:
    engine: FakeVllm = engines(ranks=2)  # type: ignore[operator]
    ids = prompt(1, 10)
    until_held(engine, ids)
    engine.settle()
    node.stop()
    mine = rank_name(engine.scheduler.namespace or b"", lacks).hex()
    gone = [path for path in (node.folder / "kv").rglob("*.kv") if mine in str(path)]
    assert gone
    assert len(gone) < sum(count for _, count in records(node))
    for path in gone:
        path.unlink()
    node.start()
    assert engine.run(engine.request(ids)) == 0  # each byte of what is loaded is checked, on each rank
    assert until_held(engine, ids) == 10 * BLOCK_TOKENS  # the rank that lacked it stores it again


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_bad_block_of_one_rank_is_computed_by_all(node: Node, engines: object, damaged: int) -> None:
    engine: FakeVllm = engines(ranks=2)  # type: ignore[operator]
    ids = prompt(1, 10)
    until_held(engine, ids)
    engine.settle()
    node.stop()
    mine = rank_name(engine.scheduler.namespace or b"", damaged).hex()
    for path in (node.folder / "kv").rglob("*.kv"):
        if mine in str(path):
            data = bytearray(path.read_bytes())
            data[-3 * 1536] ^= 1
            path.write_bytes(data)
    node.start()
    loaded = engine.run(engine.request(ids))
    assert loaded < 10 * BLOCK_TOKENS
    assert sum(engine.receipts[-1]["tokens_by_tier"].values()) == loaded


def test_a_rank_that_finds_nothing_of_its_own_says_so(engines: object) -> None:
    """After the lookup one rank cannot load: its pages are bad, and told before the end."""
    engine: FakeVllm = engines(ranks=2)  # type: ignore[operator]
    ids = prompt(1, 6)
    until_held(engine, ids)
    engine.settle()
    engine.links[2].close()
    assert engine.run(engine.request(ids)) == 0
    assert engine.receipts[-1] == engine.receipts[-1] | {"tokens_by_tier": {}, "missed": "a block was bad"}


@pytest.mark.parametrize("last", [0, 1])
def test_bad_pages_count_whichever_step_tells_them(engines: object, last: int) -> None:
    """A rank's bad pages come with its own end, a step before the other's."""
    engine: FakeVllm = engines(ranks=2)  # type: ignore[operator]
    ids = prompt(1, 6)
    until_held(engine, ids)
    engine.settle()
    request = engine.request(ids)
    engine.scheduler.begin(request)
    tokens = engine.matched(request)
    pages = engine.free[:7]
    engine.scheduler.allocated(request, pages, tokens)
    engine.scheduler.step(0, 0)
    engine.scheduler.stepped((), (), [pages[2], pages[5]], {})
    engine.scheduler.stepped((), (), [pages[4]] if last else (), {})
    engine.scheduler.stepped([request.request_id], (), (), {})
    assert engine.scheduler.loaded_from(request) == {CPU.name: 2 * BLOCK_TOKENS}
    engine.scheduler.ended(request, [], "abort")


def test_names_of_ranks_are_all_others() -> None:
    keys = [rank_name(bytes([key]) * KEY_BYTES, rank) for key in range(1, 5) for rank in range(8)]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert rank_name(ROOT, 3) == ROOT  # of every rank the first block has no parent


def cut(rng: random.Random, blocks: int) -> LookupResult:
    """Records of a chain cut at random, some missing."""
    spans, first = [], 0
    while first < blocks:
        size = min(rng.randint(1, 4), blocks - first)
        if rng.random() < 0.8:
            tier = rng.choice([CPU.name, NVME.name])
            spans.append(BlockRange(bytes([first]) * 32, b"t" * 16, first, 0, size, tier, size * 100))
        first += size
    return LookupResult("life", 0, tuple(spans), prices=PRICES)


@pytest.mark.parametrize("seed", range(40))
def test_segments_are_what_every_rank_has(seed: int) -> None:
    rng = random.Random(seed)
    found = [cut(rng, 12) for _ in range(rng.randint(1, 3))]
    first, end = rng.randrange(6), rng.randrange(6, 14)
    has = [
        {block: span for span in one.spans for block in range(span.first, span.first + span.blocks)}
        for one in found
    ]
    want = first
    while want < end and all(want in one for one in has):
        want += 1
    made = segments(found, first, end, PRICES)
    assert [block for one in made for block in range(one.first, one.first + one.blocks)] == [
        *range(first, want)
    ]
    assert sum(one.nbytes for one in made) == 100 * (want - first) * len(found)
    for one in made:
        tiers = {rank[block].tier for rank in has for block in range(one.first, one.first + one.blocks)}
        assert one.tier == (NVME.name if NVME.name in tiers else CPU.name)
    front = 0
    while all(front in one for one in has):
        front += 1
    assert kept_front(found) == front
