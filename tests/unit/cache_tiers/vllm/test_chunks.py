"""Chunks behind vLLM's own main memory come back as they were, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samovar.cache_tiers.blocks import header_bytes
from samovar.cache_tiers.messages import Cleared
from samovar.cache_tiers.socket.client import Loaded, SocketLink
from samovar.cache_tiers.vllm.messages import ConnectorOptions
from samovar.cache_tiers.vllm.offloading import chunks as chunks_module
from samovar.cache_tiers.vllm.offloading.chunks import ChunkStore, HostChunk
from tests.support.nodes.socket_world import World, settles

SLOTS, CHUNK_BYTES, TOKENS = 24, 4096, 16
NAMESPACE = bytes(range(32))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.node.check_integrity()
    made.close()


def rows_of(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (SLOTS, CHUNK_BYTES), dtype=np.uint8)


def engine(
    world: World, rows: np.ndarray[Any, Any], namespace: bytes = NAMESPACE, tenant: str = "vllm"
) -> ChunkStore:
    options = ConnectorOptions(world.socket.path, tenant)
    return ChunkStore(world.link, world.link, rows, namespace, options)


def chain(name: str, count: int, group: int = 0) -> list[HostChunk]:
    """Keys as vLLM's: of 36 bytes, the group in the last four."""
    return [
        HostChunk(f"{name} {place}".encode().ljust(32) + group.to_bytes(4, "big"), group, place, TOKENS)
        for place in range(count)
    ]


def at(chunks: list[HostChunk], first_slot: int) -> dict[HostChunk, int]:
    return {chunk: first_slot + number for number, chunk in enumerate(chunks)}


def stored(world: World, store: ChunkStore, slots: dict[HostChunk, int]) -> None:
    assert store.store(slots)
    settles(lambda: all(store.held(list(slots))))


def test_chunks_come_back_into_other_slots_after_a_restart_of_the_engine(world: World) -> None:
    rows, one = rows_of(1), chain("a", 6)
    stored(world, engine(world, rows), at(one, 3))
    again = np.zeros_like(rows)
    other = engine(world, again)
    slots = dict(zip(one, (20, 4, 11, 0, 7, 2), strict=True))
    assert other.load(slots) == one
    for chunk, slot in slots.items():
        assert np.array_equal(again[slot], rows[3 + chunk.place])
    assert sorted(slots.values()) == sorted(np.flatnonzero(again.any(axis=1)))


def test_any_part_of_a_chain_is_found_and_loaded(world: World) -> None:
    """A sliding window asks from the end, and main memory may have the beginning."""
    rows, one = rows_of(2), chain("a", 6)
    stored(world, engine(world, rows), at(one, 0))
    again = np.zeros_like(rows)
    other = engine(world, again)
    absent = chain("b", 9)[8]
    assert other.held([one[5], absent, one[4], one[1]]) == [True, False, True, True]
    assert set(other.load(at([one[4], one[2], absent], 10))) == {one[4], one[2]}
    assert np.array_equal(again[10], rows[4])
    assert np.array_equal(again[11], rows[2])
    assert not again[12].any()


def test_only_what_is_missing_is_stored(world: World) -> None:
    rows, one = rows_of(3), chain("a", 6)
    store = engine(world, rows)
    stored(world, store, at(one[:3], 0))
    before = world.node.stats().tiers[0].blocks
    stored(world, store, at(one, 0))
    assert (before, world.node.stats().tiers[0].blocks) == (3, 6)
    assert store.store(at(one, 0))
    assert world.node.stats().tiers[0].blocks == 6


def test_a_large_store_is_cut_into_extents(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "EXTENT_BYTES_MAX", 2 * CHUNK_BYTES)
    rows, one = rows_of(4), chain("a", 5)
    store = engine(world, rows)
    stored(world, store, at(one, 0))
    assert world.node.stats().tiers[0].extents == 3
    again = np.zeros_like(rows)
    assert engine(world, again).load(at(one, 0)) == one
    assert np.array_equal(again[:5], rows[:5])


def test_groups_namespaces_and_tenants_are_apart(world: World) -> None:
    rows, one = rows_of(5), chain("a", 3)
    stored(world, engine(world, rows), at(one, 0))
    as_other_group = [HostChunk(chunk.key, 1, chunk.place, TOKENS) for chunk in one]
    assert engine(world, rows).held(as_other_group) == [False] * 3
    assert engine(world, rows, bytes(32)).held(one) == [False] * 3
    assert engine(world, rows, tenant="other").held(one) == [False] * 3
    moved = [HostChunk(chunk.key, 0, chunk.place + 1, TOKENS) for chunk in one]
    assert engine(world, rows).held(moved) == [False] * 3


def test_a_block_of_another_size_is_never_taken(world: World) -> None:
    """Two layouts of one name: the record's shape tells."""
    stored(world, engine(world, rows_of(6)), at(chain("a", 3), 0))
    small = np.zeros((SLOTS, CHUNK_BYTES // 2), np.uint8)
    assert engine(world, small).load(at(chain("a", 3), 0)) == []
    assert not small.any()


def test_a_flipped_bit_is_not_loaded_and_the_good_ones_before_it_are(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, one = rows_of(7), chain("a", 5)
    stored(world, engine(world, rows), at(one, 0))
    real = SocketLink.fetch

    def flipped(link: SocketLink, fetch: Any) -> Any:
        loaded = real(link, fetch)
        assert isinstance(loaded, Loaded)
        data = loaded.data.copy()
        data[header_bytes(5, 1) + 3 * CHUNK_BYTES + 17] ^= 4
        return Loaded(0, loaded.found, data)

    monkeypatch.setattr(SocketLink, "fetch", flipped)
    again = np.zeros_like(rows)
    other = engine(world, again)
    assert other.load(at(one, 0)) == one[:3]
    assert np.array_equal(again[:3], rows[:3])
    assert not again[3:].any()
    settles(lambda: other.held(one) == [False] * 5)  # put aside


def test_without_tiers_there_is_nothing_and_nothing_is_kept(world: World) -> None:
    store = engine(world, rows_of(8))
    world.socket.close()
    world.link.close()
    one = chain("a", 2)
    assert store.held(one) == [False, False]
    assert not store.store(at(one, 0))
    assert store.load(at(one, 0)) == []
    assert not store.clear(1.0)


@pytest.mark.parametrize("left", [{"unreachable": ("s3",)}, {"is_noted": False}])
def test_a_clear_that_leaves_something_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch, left: dict[str, Any]
) -> None:
    monkeypatch.setattr(world.link, "clear", lambda clear, within_s: Cleared(1, 1, **left))
    assert not engine(world, rows_of(10)).clear(5.0)


def test_a_clear_forgets_the_tenant_and_no_other(world: World) -> None:
    rows, one = rows_of(9), chain("a", 2)
    mine, others = engine(world, rows), engine(world, rows, tenant="other")
    stored(world, mine, at(one, 0))
    stored(world, others, at(one, 0))
    assert mine.clear(5.0)
    assert mine.held(one) == [False, False]
    assert others.held(one) == [True, True]
