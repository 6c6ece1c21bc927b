"""Which blocks to load and which to store: runs without gaps, tails that really fit."""

from __future__ import annotations

from samovar.cache_tiers.blocks.extent import ROOT, block_key
from samovar.cache_tiers.messages import BlockRange, LookupResult, PartialBlock
from samovar.replicas.offload.lookups import LoadCut, load_cuts
from samovar.replicas.offload.store import StoreRun, store_runs

BT = 4
NAMESPACE = bytes(range(32))
IDS = list(range(100, 123))  # five full blocks and three tokens


def chain(ids: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    for start in range(0, len(ids) - BT + 1, BT):
        keys.append(block_key(NAMESPACE, keys[-1] if keys else ROOT, ids[start : start + BT]))
    return keys


KEYS = chain(IDS)


def span(first: int, blocks: int, extent: bytes = b"e", offset: int = 0, tier: str = "cpu") -> BlockRange:
    return BlockRange(extent, b"t", first, offset, blocks, tier, 0)  # type: ignore[arg-type]


def tail(
    block: int, tokens: int, extent: bytes = b"e", offset: int = 0, ids: list[int] = IDS
) -> PartialBlock:
    parent = KEYS[block - 1] if block else ROOT
    key = block_key(NAMESPACE, parent, ids[block * BT : block * BT + tokens])
    return PartialBlock(key, tokens, span(block, 1, extent, offset))


def cuts(*spans: BlockRange, tails: tuple[PartialBlock, ...] = (), resident: int = 0) -> list[LoadCut]:
    return load_cuts(
        LookupResult("i", 0, spans, tails),
        namespace=NAMESPACE,
        keys=KEYS,
        token_ids=IDS,
        block_tokens=BT,
        resident_blocks=resident,
    )


def shape(found: list[LoadCut]) -> list[tuple[int, int, int]]:
    return [(cut.first, cut.offset, len(cut.keys)) for cut in found]


def test_spans_are_cut_to_what_the_pool_does_not_have() -> None:
    found = cuts(span(0, 3, b"a"), span(3, 2, b"b"), resident=1)
    assert shape(found) == [(1, 1, 2), (3, 0, 2)]
    assert found[0].keys == tuple(KEYS[1:3])
    assert found[0].tokens == 2 * BT


def test_a_gap_ends_it() -> None:
    assert shape(cuts(span(0, 2), span(3, 2))) == [(0, 0, 2)]
    assert cuts(span(1, 4)) == []
    assert shape(cuts(span(3, 2), resident=3)) == [(3, 0, 2)]


def test_overlapping_spans_are_used_once() -> None:
    assert shape(cuts(span(0, 3, b"a"), span(1, 4, b"b"))) == [(0, 0, 3), (3, 2, 2)]


def test_a_tail_in_the_same_extent_comes_with_the_same_fetch() -> None:
    (found,) = cuts(span(0, 5), tails=(tail(5, 2, offset=5),))
    assert found.token_counts == (4, 4, 4, 4, 4, 2)
    assert found.keys[-1] == tail(5, 2).key


def test_a_tail_elsewhere_is_a_fetch_of_its_own() -> None:
    found = cuts(span(0, 5), tails=(tail(5, 2, b"other", 7),))
    assert shape(found) == [(0, 0, 5), (5, 7, 1)]
    assert shape(cuts(tails=(tail(5, 2, b"other", 7),), resident=5)) == [(5, 7, 1)]


def test_only_a_tail_that_this_prompt_goes_on_with_counts_and_of_those_the_longest() -> None:
    other = [*IDS[:20], 7, 8, 9]
    assert shape(cuts(span(0, 5), tails=(tail(5, 2, ids=other),))) == [(0, 0, 5)]
    found = cuts(span(0, 5), tails=(tail(5, 1, b"x"), tail(5, 3, b"y"), tail(5, 2, b"z")))
    assert found[-1].extent_id == b"y"
    # A tail of tokens that are not there yet, or behind a block that nobody has.
    assert shape(cuts(span(0, 3), tails=(tail(5, 2),))) == [(0, 0, 3)]


def test_a_tail_longer_than_the_prompt_is_not_used() -> None:
    found = load_cuts(
        LookupResult("i", 0, (), (tail(5, 3),)),
        namespace=NAMESPACE,
        keys=KEYS,
        token_ids=IDS[:22],
        block_tokens=BT,
        resident_blocks=5,
    )
    assert found == []


def test_what_is_held_is_not_stored_again() -> None:
    held = {KEYS[0], KEYS[1], KEYS[3]}
    runs = store_runs(KEYS, (b"tail", 2), block_tokens=BT, blocks_max=100, is_held=held.__contains__)
    assert runs == [
        StoreRun(2, (KEYS[2],), (4,)),
        StoreRun(4, (KEYS[4], b"tail"), (4, 2)),
    ]
    assert runs[1].tokens == 6


def test_long_turns_become_several_extents() -> None:
    runs = store_runs(KEYS, (b"tail", 2), block_tokens=BT, blocks_max=2, is_held=lambda _: False)
    assert [(run.first, len(run.keys)) for run in runs] == [(0, 2), (2, 2), (4, 2)]


def test_nothing_new_is_no_run() -> None:
    assert store_runs(KEYS, None, block_tokens=BT, blocks_max=9, is_held=lambda _: True) == []
    assert store_runs([], (b"tail", 3), block_tokens=BT, blocks_max=9, is_held=lambda _: False) == [
        StoreRun(0, (b"tail",), (3,))
    ]
