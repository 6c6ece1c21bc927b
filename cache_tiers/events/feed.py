"""What routers hear of a cache: which blocks it has, in vLLM's words and form. Pure.

`EventFeed` is told what happens, by the thread in which it happens; `Batches` makes messages of that, and
keeps the last ones for those that missed them. A block is named by the last 64 bits of its key, which commits
to the whole prefix. A feed begins with `CacheCleared`: of a process that has just started nothing is there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import msgpack

from samovar.cache_tiers.blocks import CPU, NVME, TierName

EVENTS_MAX = 100_000
"""Events that wait for the publisher. With one more all are dropped, and the cache is told as cleared."""
TAKEN_MAX = 4096
BATCH_BLOCKS_MAX = 4096
KEPT_BATCHES_MAX = 10_000
KEPT_BYTES_MAX = 32 * 1024 * 1024
FULL_ATTENTION = 0
"""The index of the only group of layers that blocks are made of."""


class BlockPlace(NamedTuple):
    """Where a block lies, in vLLM's words; `locality` None: in the engine itself."""

    medium: str
    locality: str | None


POOL = BlockPlace("GPU", None)
"""A replica's pool, whatever device it is on."""
STORAGE, REMOTE = BlockPlace("STORAGE", "LOCAL"), BlockPlace("STORAGE", "REMOTE")
PLACES = {CPU.name: BlockPlace("CPU", "LOCAL"), NVME.name: STORAGE}


def place_of(tier: TierName) -> BlockPlace:
    """Return where a tier's blocks lie; what is neither in main memory nor on a disk is remote."""
    return PLACES.get(tier, REMOTE)


def hash_of(key: bytes) -> int:
    """Return a block's name in events, as vLLM shortens its own: the last 64 bits of the key."""
    return int.from_bytes(key[-8:], "big")


class BlocksStored(NamedTuple):
    """Blocks of a chain, one behind the other, are at a place now.

    `parent`: of the first; None: it begins a prompt. `token_ids`: of all of them; empty: not known there.
    `salt`: what else the hash of a chain's first block is made of.
    """

    hashes: Sequence[int]
    parent: int | None
    token_ids: Sequence[int]
    block_tokens: int
    place: BlockPlace
    salt: str = ""


class BlocksRemoved(NamedTuple):
    """Blocks are no longer at a place. `is_erased`: their tokens are not replayed from now on."""

    hashes: Sequence[int]
    place: BlockPlace
    is_erased: bool = False


class CacheCleared(NamedTuple):
    """Nothing that was told before is there."""


Told = BlocksStored | BlocksRemoved | CacheCleared


class EventFeed:
    """Events on their way to a publisher, in order and bounded. Thread-safe; nothing here is waited for."""

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        self._lock = threading.Lock()
        self._events: deque[Told] = deque([CacheCleared()])
        self._events_max = events_max
        self._is_closed = False
        self.wake: Callable[[], object] = lambda: None
        """Called when there is something to take, by the thread that tells."""

    def __len__(self) -> int:
        """Return the number of events that wait."""
        return len(self._events)

    def tell(self, event: Told) -> None:
        """Queue an event."""
        with self._lock:
            if self._is_closed:
                return
            if len(self._events) >= self._events_max:
                self._events.clear()
                self._events.append(CacheCleared())
            self._events.append(event)
            is_news = len(self._events) == 1
        if is_news:
            self.wake()

    def take(self, events_max: int = TAKEN_MAX) -> list[Told]:
        """Return the oldest events, in order, and forget them."""
        with self._lock:
            return [self._events.popleft() for _ in range(min(events_max, len(self._events)))]

    def close(self) -> None:
        """Take no more events: none is published any more."""
        with self._lock:
            self._is_closed = True
            self._events.clear()


class _KeptMessage(NamedTuple):
    number: int
    payload: bytes
    stored: frozenset[int]  # hashes of blocks whose tokens it tells


class Batches:
    """Numbered messages, of which the last are kept: `KEPT_BATCHES_MAX` and `KEPT_BYTES_MAX` at most.

    `wall_clock`: Unix seconds.
    """

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._kept: deque[_KeptMessage] = deque()
        self._kept_bytes = 0
        self.next_number = 0

    def add(self, events: Sequence[Told]) -> None:
        """Make messages of events. What is erased or cleared leaves the messages before it, too."""
        at = 0
        while at < len(events):
            if isinstance(events[at], CacheCleared):
                self._kept.clear()
                self._kept_bytes = 0
            if erased := _erased(events, at):
                self._erase(frozenset().union(*erased))
            end, blocks = at, 0
            while end < len(events) and blocks < BATCH_BLOCKS_MAX:
                if end >= at + max(1, len(erased)) and _cleans(events[end]):
                    break
                blocks += _size(events[end])
                end += 1
            self._keep(events[at:end])
            at = end

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield number and payload of what is kept of `number` and later ones, oldest first."""
        skipped = max(0, number - self._kept[0].number) if self._kept else 0
        return ((batch.number, batch.payload) for batch in islice(self._kept, skipped, None))

    def _keep(self, events: Sequence[Told]) -> None:
        wires = [_wire(event) for event in _joined(events)]
        stored = (one.hashes for one in events if isinstance(one, BlocksStored) and one.token_ids)
        payload = _packed(self._wall_clock(), wires)
        self._kept.append(_KeptMessage(self.next_number, payload, frozenset().union(*stored)))
        self._kept_bytes += len(payload)
        self.next_number += 1
        while len(self._kept) > KEPT_BATCHES_MAX or (
            self._kept_bytes > KEPT_BYTES_MAX and len(self._kept) > 1
        ):
            self._kept_bytes -= len(self._kept.popleft().payload)

    def _erase(self, gone: frozenset[int]) -> None:
        self._kept = deque(
            batch if batch.stored.isdisjoint(gone) else _without(batch, gone) for batch in self._kept
        )
        self._kept_bytes = sum(len(batch.payload) for batch in self._kept)


def _size(event: Told) -> int:
    return 1 if isinstance(event, CacheCleared) else len(event.hashes)


def _erased(events: Sequence[Told], at: int) -> list[Sequence[int]]:
    """Return the hashes of the erasures that are next, one behind the other."""
    found = []
    for event in islice(events, at, None):
        if not isinstance(event, BlocksRemoved) or not event.is_erased:
            break
        found.append(event.hashes)
    return found


def _cleans(event: Told) -> bool:
    return isinstance(event, CacheCleared) or (isinstance(event, BlocksRemoved) and event.is_erased)


def _joined(events: Sequence[Told]) -> Iterator[Told]:
    """Join what follows one another: blocks of one chain, and removals from one place. O(blocks)."""
    run: list[Told] = []
    for event in events:
        if run and not _follows(event, run[-1]):
            yield _whole(run)
            run = []
        run.append(event)
    if run:
        yield _whole(run)


def _whole(run: Sequence[Told]) -> Told:
    first = run[0]
    if isinstance(first, CacheCleared):
        return first
    hashes = [one for event in run if not isinstance(event, CacheCleared) for one in event.hashes]
    if isinstance(first, BlocksRemoved):
        return first._replace(hashes=hashes)
    token_ids = [one for event in run if isinstance(event, BlocksStored) for one in event.token_ids]
    return first._replace(hashes=hashes, token_ids=token_ids)


def _follows(event: Told, last: Told) -> bool:
    if isinstance(event, BlocksRemoved):
        return isinstance(last, BlocksRemoved) and event.place == last.place
    return (
        isinstance(event, BlocksStored)
        and isinstance(last, BlocksStored)
        and event.parent == last.hashes[-1]
        and (event.place, event.block_tokens) == (last.place, last.block_tokens)
        and bool(event.token_ids) == bool(last.token_ids)
    )


def _packed(unix_s: float, wires: Sequence[dict[str, Any]]) -> bytes:
    packed: bytes = msgpack.packb([unix_s, wires, 0])  # the 0: vLLM's rank of data parallelism
    return packed


def _wire(event: Told) -> dict[str, Any]:
    """Return an event as vLLM's consumers read it: fields at their default are left out, as vLLM does."""
    if isinstance(event, CacheCleared):
        return {"type": "AllBlocksCleared"}
    of_place = {"medium": event.place.medium, "group_idx": FULL_ATTENTION}
    if event.place.locality is not None:
        of_place |= {"locality": event.place.locality, "ownership": "samovar"}
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": list(event.hashes), **of_place}
    wire = {
        "type": "BlockStored",
        "block_hashes": list(event.hashes),
        "parent_block_hash": event.parent,
        "token_ids": list(event.token_ids),
        "block_size": event.block_tokens,
        "lora_id": None,
        "lora_name": None,
        **of_place,
    }
    if event.salt and event.parent is None:
        wire["extra_keys"] = [[event.salt], *[None] * (len(event.hashes) - 1)]
    return wire


def _without(batch: _KeptMessage, gone: frozenset[int]) -> _KeptMessage:
    """Return a message without what it tells of these blocks."""
    unix_s, wires, _ = msgpack.unpackb(batch.payload)
    left: list[dict[str, Any]] = []
    for wire in wires:
        left += _pieces(wire, gone) if wire.get("token_ids") else [wire]
    return batch._replace(payload=_packed(unix_s, left), stored=batch.stored - gone)


def _pieces(wire: dict[str, Any], gone: frozenset[int]) -> Iterator[dict[str, Any]]:
    hashes, tokens, size = wire["block_hashes"], wire["token_ids"], wire["block_size"]
    for is_gone, run in groupby(range(len(hashes)), lambda at: hashes[at] in gone):
        numbers = list(run)
        first, end = numbers[0], numbers[-1] + 1
        if is_gone:
            continue
        piece = {
            **wire,
            "block_hashes": hashes[first:end],
            "parent_block_hash": hashes[first - 1] if first else wire["parent_block_hash"],
            "token_ids": tokens[first * size : end * size],
        }
        if "extra_keys" in wire:
            piece["extra_keys"] = wire["extra_keys"][first:end]
        yield piece
