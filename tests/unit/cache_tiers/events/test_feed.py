"""What routers are told: messages, their order and bounds, and what an erasure leaves of earlier ones."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgpack
import pytest

from samovar.cache_tiers.events import feed as of_feed
from samovar.cache_tiers.events.feed import (
    POOL,
    REMOTE,
    STORAGE,
    Batches,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EventFeed,
    Told,
    hash_of,
    place_of,
)
from tests.support.heard_cache import Believed, HeardCache


def stored(one: int, parent: int | None = None, salt: str = "") -> BlocksStored:
    return BlocksStored((one,), parent, (one, one + 1), 2, POOL, salt)


def batches(*told: Sequence[Told]) -> Batches:
    made = Batches(lambda: 5.0)
    for events in told:
        made.add(events)
    return made


def events_of(made: Batches, since: int = 0) -> list[list[dict[str, object]]]:
    return [msgpack.unpackb(payload)[1] for _, payload in made.since(since)]


def test_a_chain_of_blocks_is_one_event_as_vllm_tells_a_prompt() -> None:
    made = batches([CacheCleared(), stored(10), stored(20, 10), stored(30, 20), stored(99)])
    ((number, payload),) = made.since(0)
    assert number == 0
    assert msgpack.unpackb(payload) == [
        5.0,
        [
            {"type": "AllBlocksCleared"},
            {
                "type": "BlockStored",
                "block_hashes": [10, 20, 30],
                "parent_block_hash": None,
                "token_ids": [10, 11, 20, 21, 30, 31],
                "block_size": 2,
                "lora_id": None,
                "lora_name": None,
                "medium": "GPU",
                "group_idx": 0,
            },
            {
                "type": "BlockStored",
                "block_hashes": [99],
                "parent_block_hash": None,
                "token_ids": [99, 100],
                "block_size": 2,
                "lora_id": None,
                "lora_name": None,
                "medium": "GPU",
                "group_idx": 0,
            },
        ],
        0,
    ]


def test_the_order_of_what_happened_stays() -> None:
    removed = BlocksRemoved((10,), POOL)
    ((first, second, third),) = events_of(batches([stored(10), removed, stored(10)]))
    assert [one["type"] for one in (first, second, third)] == ["BlockStored", "BlockRemoved", "BlockStored"]
    both = [BlocksRemoved((1,), STORAGE), BlocksRemoved((2, 3), STORAGE), BlocksRemoved((4,), REMOTE)]
    ((local, remote),) = events_of(batches(both))
    assert (local["block_hashes"], local["locality"], local["medium"]) == ([1, 2, 3], "LOCAL", "STORAGE")
    assert (remote["block_hashes"], remote["locality"]) == ([4], "REMOTE")


def test_a_tenants_mark_is_the_extra_key_of_a_first_block_alone() -> None:
    heard = HeardCache()
    heard.hear_all(batches([stored(1, salt="ab"), stored(2, 1, "ab")]).since(0))
    assert heard.blocks["GPU", None] == {1: Believed(None, (1, 2), "ab"), 2: Believed(1, (2, 3), None)}


@pytest.mark.parametrize(("tier", "place"), [("cpu", ("CPU", "LOCAL")), ("s3", REMOTE), ("own", REMOTE)])
def test_places_are_in_vllms_words(tier: str, place: object) -> None:
    assert place_of(tier) == place
    assert hash_of(bytes(24) + b"\1" + bytes(7)) == 2**56


@pytest.mark.guarantee("G12")
def test_what_is_erased_is_not_replayed() -> None:
    """Removals alone leave the tokens in what is kept; an erasure takes them out, and nothing else."""
    made = batches([stored(1, salt="ab"), stored(2, 1, "ab"), stored(3, 2, "ab")], [stored(7)])
    made.add([BlocksRemoved((7,), POOL)])
    assert "[7, 8]" in str(events_of(made))
    made.add([BlocksRemoved((2,), POOL, is_erased=True), stored(9)])
    first, second, *_ = events_of(made)
    assert [(one["block_hashes"], one["parent_block_hash"], one["token_ids"]) for one in first] == [
        ([1], None, [1, 2]),
        ([3], 2, [3, 4]),
    ]
    assert [one.get("extra_keys") for one in first] == [[["ab"]], [None]]
    assert second[0]["token_ids"] == [7, 8]
    numbers = [number for number, _ in made.since(0)]
    assert numbers == [0, 1, 2, 3]
    made.add([BlocksRemoved((one,), POOL, is_erased=True) for one in (1, 9)])
    assert [one["block_hashes"] for one in events_of(made)[-1]] == [[1, 9]], "one message, not one for each"
    assert "[9, 10]" not in str(events_of(made))
    one_breath: list[Told] = [stored(5), BlocksRemoved((5,), POOL, is_erased=True), stored(6)]
    assert "[5, 6]" not in str(events_of(batches(one_breath))), "told, though it was erased before"


def test_what_is_kept_is_bounded_and_has_no_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_feed, "KEPT_BATCHES_MAX", 3)
    made = batches(*([stored(one)] for one in range(1, 6)))
    assert [number for number, _ in made.since(0)] == [2, 3, 4]
    assert [number for number, _ in made.since(4)] == [4]
    assert list(made.since(9)) == []
    monkeypatch.setattr(of_feed, "KEPT_BYTES_MAX", 1)
    made.add([stored(6)])
    assert [number for number, _ in made.since(0)] == [5]


def test_messages_are_of_some_blocks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_feed, "BATCH_BLOCKS_MAX", 2)
    assert [len(events) for events in events_of(batches([stored(9 * one) for one in range(1, 6)]))] == [
        2,
        2,
        1,
    ]


def test_a_feed_that_is_not_read_is_bounded_and_what_is_lost_is_told_as_cleared() -> None:
    feed, woken = EventFeed(events_max=3), []
    feed.wake = lambda: woken.append(1)
    for one in range(1, 6):
        feed.tell(stored(one))
    events = feed.take()
    assert [type(one) for one in events] == [CacheCleared, BlocksStored, BlocksStored, BlocksStored][
        : len(events)
    ]
    assert events[-1] == stored(5)
    assert len(events) <= 3
    heard = HeardCache()
    heard.hear_all(batches(events).since(0))
    assert heard.at("GPU", None) <= {1, 2, 3, 4, 5}
    feed.tell(stored(8))
    assert feed.take() == [stored(8)]
    assert woken == [1], "the publisher is woken once for all that waits"
    feed.close()
    feed.tell(stored(9))
    assert feed.take() == []


def test_a_feed_is_taken_while_it_is_told() -> None:
    feed, told = EventFeed(), 20_000
    assert feed.take() == [CacheCleared()]
    thread = threading.Thread(target=lambda: list(map(feed.tell, map(stored, range(told)))))
    thread.start()
    taken: list[Told] = []
    while thread.is_alive() or (len(taken) < told):
        taken += feed.take(100)
    thread.join()
    assert taken == [stored(one) for one in range(told)]
