"""Simulates one tier, a budget of blocks evicted by the product's own queue, and the link from it.

A tier holds block ids and their sessions; bytes, prices and other tiers are left to the caller, which gets
evicted blocks through `on_evicted`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from samovar.cache_tiers.blocks import LoadSource
from samovar.cache_tiers.forecast import SessionKey
from samovar.cache_tiers.policy import (
    MOVES_MAX,
    IdleSessions,
    LazyHeap,
    Residence,
    ResidencyPolicy,
    ValueQueue,
    used_rate,
)
from samovar.cache_tiers.pricing import TierMeter, TierPrice
from samovar.configs.sections import PolicySettings, ProfileSettings

OWNERS_MAX = 4
"""Sessions remembered for a shared block: the latest ones. Its rate of use stands for the rest."""


class Block:
    """A block in a tier; see `eviction_queue.Thing`.

    `placed`: how long it is kept; None: as long as it is worth it. `pinned_s`: until then a running request
    needs it.
    """

    __slots__ = ("end_tokens", "number", "owners", "pinned_s", "placed", "rate_per_s", "saved_s", "used_s")

    is_clean = True

    def __init__(
        self,
        number: int,
        session: SessionKey,
        end_tokens: int,
        saved_s: float,
        placed: ProfileSettings | None = None,
    ) -> None:
        self.number = number
        self.owners: tuple[SessionKey, ...] = (session,)
        self.end_tokens = end_tokens
        self.saved_s = saved_s
        self.placed = placed
        self.used_s = 0.0
        self.pinned_s = 0.0
        self.rate_per_s = 0.0

    @property
    def min_ttl_s(self) -> float:
        return 0.0 if self.placed is None else self.placed.min_ttl_s

    @property
    def expires_s(self) -> float:
        return math.inf if self.placed is None else self.used_s + self.placed.ttl_s


Placed = Callable[[SessionKey], ProfileSettings]
"""The profile that a session's blocks are kept by."""


class SimTier:
    """A tier of at most `blocks_max` blocks.

    `sessions`: which are running or idle, updated by the caller. `bypassed`: blocks not admitted for lack of
    room. `saved_s(end_tokens)`: seconds per byte saved by holding a block that ends there; only ratios
    matter. `placed`: None: a GPU's pool, where profiles do not count. `pins`: running requests keep their
    blocks; without it the simulation shows what no engine can do.
    """

    def __init__(
        self,
        blocks_max: int,
        block_tokens: int,
        policy: ResidencyPolicy,
        settings: PolicySettings,
        sessions: IdleSessions,
        *,
        saved_s: Callable[[int], float] = lambda end_tokens: 1.0,
        on_evicted: Callable[[list[Block], float], None] = lambda blocks, now_s: None,
        pins: bool = True,
        placed: Placed | None = None,
    ) -> None:
        self.blocks_max = blocks_max
        self.bypassed = 0
        self._block_tokens = block_tokens
        self._sessions = sessions
        self._saved_s = saved_s
        self._on_evicted = on_evicted
        self._pins = pins
        self._placed = placed
        self._blocks: dict[int, Block] = {}
        self._expiring: LazyHeap[Block] = LazyHeap(lambda block: (block.expires_s, 0))
        self._queue: ValueQueue[Block] = ValueQueue(sessions, policy, settings.rerank_s)
        self._residence = Residence(settings.horizon_s_min, settings.residence_s_max)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, number: object) -> bool:
        return number in self._blocks

    def prefix(self, numbers: Sequence[int]) -> int:
        """Return how many of a prompt's blocks are here, from its first on without a gap."""
        blocks = self._blocks
        for count, number in enumerate(numbers):
            if number not in blocks:
                return count
        return len(numbers)

    def use(self, numbers: Sequence[int], session: SessionKey, now_s: float, until_s: float) -> int:
        """Run a request from `now_s` to `until_s` with its prompt's blocks, from the first on.

        Missing blocks are admitted as far as others can be evicted. Returns how many were here before, from
        the first on without a gap.
        """
        self._expire(now_s)
        blocks = self._blocks
        hits = self.prefix(numbers)
        missing = []
        for at, number in enumerate(numbers):
            block = blocks.get(number)
            if block is None:
                missing.append(at)
            else:
                self._touch(block, session, until_s)
        self._queue.changed(session)
        if missing:
            self._insert(numbers, missing, session, now_s, until_s)
        return hits

    def touch(self, numbers: Sequence[int], session: SessionKey, now_s: float) -> None:
        """Mark those of a prompt's blocks that are here as used."""
        self._expire(now_s)
        for number in numbers:
            block = self._blocks.get(number)
            if block is not None:
                self._touch(block, session, now_s, is_pinned=False)
        self._queue.changed(session)

    def put(
        self, numbers: Sequence[int], session: SessionKey, now_s: float, only: Container[int] | None = None
    ) -> int:
        """Admit a copy of a prompt's blocks, from its first on; blocks already here are unchanged.

        `only`: restricts it to these. Returns how many were admitted.
        """
        self._expire(now_s)
        missing = [
            at
            for at, number in enumerate(numbers)
            if number not in self._blocks and (only is None or number in only)
        ]
        return self._insert(numbers, missing, session, now_s, now_s, is_pinned=False) if missing else 0

    def take_in(self, blocks: Sequence[Block], now_s: float) -> int:
        """Admit blocks that another tier has evicted, as far as there is room, and return how many."""
        self._expire(now_s)
        missing = [block for block in blocks if block.number not in self._blocks]
        room = self.blocks_max - len(self._blocks)
        if room < len(missing):
            room += self._evict(len(missing) - room, now_s)
        for block in missing[:room]:
            copy = Block(block.number, block.owners[0], block.end_tokens, block.saved_s, block.placed)
            copy.owners, copy.used_s, copy.rate_per_s = block.owners, block.used_s, block.rate_per_s
            self._add(copy)
        return min(room, len(missing))

    def changed(self, session: SessionKey) -> None:
        """Rerank the session's blocks after its entry in `sessions` has changed."""
        self._queue.changed(session)

    def horizon_s(self, now_s: float) -> float:
        """Return the tier's current horizon in seconds."""
        return self._residence.horizon_s(len(self._blocks), now_s)

    def _touch(self, block: Block, session: SessionKey, until_s: float, *, is_pinned: bool = True) -> None:
        if block.owners[0] != session or len(block.owners) > 1:
            idle_s = until_s - block.used_s
            block.rate_per_s = used_rate(block.rate_per_s, idle_s)
            if session not in block.owners:
                block.owners = (session, *block.owners)[:OWNERS_MAX]
                self._queue.requeue(block)
        if until_s > block.used_s:
            block.used_s = until_s
        if is_pinned and self._pins and until_s > block.pinned_s:
            block.pinned_s = until_s

    def _insert(
        self,
        numbers: Sequence[int],
        missing: Sequence[int],
        session: SessionKey,
        now_s: float,
        used_s: float,
        *,
        is_pinned: bool = True,
    ) -> int:
        room = self.blocks_max - len(self._blocks)
        if room < len(missing):
            room += self._evict(len(missing) - room, now_s)
        placed = None if self._placed is None else self._placed(session)
        for at in missing[:room]:
            end_tokens = (at + 1) * self._block_tokens
            block = Block(numbers[at], session, end_tokens, self._saved_s(end_tokens), placed)
            block.used_s = used_s
            if is_pinned and self._pins:
                block.pinned_s = used_s
            self._add(block)
        came = min(room, len(missing))
        self.bypassed += len(missing) - came
        return came

    def _add(self, block: Block) -> None:
        self._blocks[block.number] = block
        self._queue.add(block)
        if block.placed is not None:
            self._expiring.add(block)

    def _expire(self, now_s: float) -> None:
        """Drop what was not used for its profile's `ttl_s`."""
        while (block := self._expiring.first(MOVES_MAX)) is not None and block.expires_s <= now_s:
            self._expiring.discard(block)
            self._queue.discard(block)
            del self._blocks[block.number]

    def _evict(self, count: int, now_s: float) -> int:
        """Evict `count` blocks, or fewer if only running ones are left, and return how many."""
        horizon_s = self.horizon_s(now_s)
        stuck: list[Block] = []  # taken, but pinned
        gone: list[Block] = []
        while len(gone) < count and (block := self._queue.take(now_s, horizon_s)) is not None:
            if block.pinned_s > now_s:
                stuck.append(block)
                slots = [self._sessions.slot(owner) for owner in block.owners]
                if (self._sessions.running[slots] > 0).any():
                    break  # running blocks rank last, so all that follow are running, too
                continue
            del self._blocks[block.number]
            self._expiring.discard(block)
            gone.append(block)
        for block in stuck:
            self._queue.add(block)
        self._residence.went(len(gone), now_s)
        if gone:
            self._on_evicted(gone, now_s)
        return len(gone)

    def check_integrity(self) -> None:
        """Raise `AssertionError`, naming the violated invariant."""
        assert len(self._blocks) <= max(self.blocks_max, 0), "more blocks than fit"
        assert all(block.number == number for number, block in self._blocks.items()), "a block is misfiled"
        self._queue.check_integrity(list(self._blocks.values()))


Move = tuple[int, LoadSource]
"""The session whose blocks move, and the tier they come from."""


LEARNED_SHARE = 0.01
"""A load that took what it should, but for this share, teaches nothing: the simulator saves its time."""


class SimLink:
    """The link from a tier: bytes per second that demand loads take first; prefetches get the rest.

    A fluid model: demand loads run one after the other at the link's full rate, and a prefetch in flight
    yields to the next demand at once. Pure; the clock is passed in. `price`: what a load takes; `meter`: what
    the node has learned of that, by which it decides. `demand_bytes`, `guess_bytes`: moved so far.
    """

    def __init__(self, price: TierPrice, meter: TierMeter) -> None:
        self.price = price
        self.meter = meter
        self.demand_bytes = 0
        self.guess_bytes = 0
        self._demand_until_s = 0.0
        self._at_s = 0.0
        self._guesses: OrderedDict[Move, float] = OrderedDict()  # bytes left to move, in order

    @property
    def demand_until_s(self) -> float:
        return self._demand_until_s

    def price_now(self, now_s: float) -> TierPrice:
        """Return what a load that starts now seems to take, with the wait for the demand loads before it."""
        wait_s, known = max(0.0, self._demand_until_s - now_s), self.meter.price()
        return replace(known, latency_s=known.latency_s + wait_s) if wait_s else known

    def demand(self, nbytes: int, now_s: float) -> float:
        """Start a demand load now and return when it completes."""
        self._advance(now_s)
        self._demand_until_s = max(now_s, self._demand_until_s) + nbytes / self.price.bytes_per_s
        self.demand_bytes += nbytes
        known, took_s = self.meter.price(), self.price.seconds(nbytes)
        if not known.is_proved or abs(known.seconds(nbytes) - took_s) > LEARNED_SHARE * took_s:
            self.meter.observe(nbytes, took_s)
        return self._demand_until_s + self.price.latency_s

    def guess(self, what: Move, nbytes: int, now_s: float) -> None:
        """Queue a prefetch, which moves while no demand load uses the link."""
        self._advance(now_s)
        self._guesses[what] = self._guesses.get(what, 0.0) + nbytes

    def cancel(self, what: Move, now_s: float) -> int:
        """Cancel a prefetch and return its bytes not yet moved; 0 if it is not in flight."""
        self._advance(now_s)
        return round(self._guesses.pop(what, 0.0))

    def arrived(self, now_s: float) -> list[Move]:
        """Return the prefetches that have completed by now."""
        self._advance(now_s)
        through = []
        while self._guesses:
            what, left = next(iter(self._guesses.items()))
            if left > 0.5:
                break
            del self._guesses[what]
            through.append(what)
        return through

    def next_s(self, now_s: float) -> float:
        """Return when the first prefetch completes if no demand load starts; infinity without one."""
        self._advance(now_s)
        for left in self._guesses.values():
            return max(self._at_s, self._demand_until_s) + left / self.price.bytes_per_s
        return math.inf

    def _advance(self, now_s: float) -> None:
        """Move what the time since the last call allows."""
        free_s = now_s - max(self._at_s, self._demand_until_s)
        self._at_s = max(self._at_s, now_s)
        can = free_s * self.price.bytes_per_s
        for what, left in self._guesses.items():
            if can <= 0:
                break
            moved = min(left, can)
            self._guesses[what] = left - moved
            self.guess_bytes += round(moved)
            can -= moved

    def check_integrity(self) -> None:
        """Raise `AssertionError`, naming the violated invariant."""
        assert all(left >= 0 for left in self._guesses.values()), "less than nothing is left to move"
