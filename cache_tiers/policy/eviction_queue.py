"""Eviction candidates, least valuable first: pages of a pool, copies of a tier, blocks of a simulation.

Things used by the same sessions form one group (if also equally kept and clean). Within a group the
longest unused goes first, and of those the deepest: a block is useless without its parents. So a policy
ranks groups, thousands at once, and not things. All groups are re-ranked every `rerank_s`, because
probabilities change with time; a group touched since is re-ranked before the next thing is taken. Knows
nothing of bytes, pins or quotas.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from samovar.cache_tiers.forecast import Floats, SessionKey
from samovar.cache_tiers.policy.idle_sessions import NO_SESSION, IdleSessions, Slots
from samovar.cache_tiers.policy.policies import Candidates, ResidencyPolicy
from samovar.configs.sections import PolicySettings

Item = TypeVar("Item")
Place = tuple[float, int]

DEAD_MAX = 64
"""Dead entries always allowed in a heap; above that, they may be half of it."""


class LazyHeap(Generic[Item]):
    """A priority queue, smallest place first, of items whose place only grows; growth costs nothing.

    `place(item)` may grow while the item is in, never shrink. Items are told apart by hash and eq. An
    entry whose place grew is pushed back when it reaches the front, so using an item is O(1), and taking
    one out O(log n) for each use since it was last examined. heapdict and sortedcontainers pay O(log n) for
    every use.
    """

    def __init__(self, place: Callable[[Item], Place]) -> None:
        self._place = place
        self._entries: list[tuple[Place, int, Item]] = []
        self._serials: dict[Item, int] = {}  # serial of the item's live entry
        self._serial = 0
        self.moves = 0  # entries examined: the total cost of taking items out

    def __len__(self) -> int:
        return len(self._serials)

    def __iter__(self) -> Iterator[Item]:
        """Iterate in no particular order."""
        return iter(self._serials)

    def __contains__(self, item: Item) -> bool:
        return item in self._serials

    def add(self, item: Item) -> None:
        """Add an item, O(log n). Raises `ValueError` if it is in already."""
        if item in self._serials:
            raise ValueError("the item is in the heap already")
        self._serial += 1
        self._serials[item] = self._serial
        heapq.heappush(self._entries, (self._place(item), self._serial, item))

    def discard(self, *items: Item) -> None:
        """Remove items, O(1) each on average; no-op for one that is not in."""
        for item in items:
            self._serials.pop(item, None)
        self._sweep()

    def first(self, moves_max: int) -> Item | None:
        """Return the item with the smallest place, without removing it.

        None if the heap is empty, or if examining `moves_max` entries did not settle which it is: the
        next call continues from there.
        """
        for _ in range(moves_max):
            if not self._entries:
                return None
            if self._is_settled():
                return self._entries[0][2]
        return None

    def take(self, count: int, moves_max: int) -> list[Item]:
        """Take out the `count` items with the smallest places (or all), smallest first.

        After `moves_max` entries the front item is taken as it is: it was the smallest once.
        """
        taken: list[Item] = []
        moves_end = self.moves + moves_max
        while len(taken) < count and self._entries:
            _, serial, item = self._entries[0]
            is_late = self.moves >= moves_end and self._serials.get(item) == serial
            if is_late or self._is_settled():
                heapq.heappop(self._entries)
                del self._serials[item]
                taken.append(item)
        self._sweep()
        return taken

    def _is_settled(self) -> bool:
        """Return whether the front entry is live and in its place; if not, fix it: one step."""
        self.moves += 1
        place, serial, item = self._entries[0]
        if self._serials.get(item) != serial:
            heapq.heappop(self._entries)
            return False
        place_now = self._place(item)
        if place_now == place:
            return True
        heapq.heapreplace(self._entries, (place_now, serial, item))
        return False

    def _sweep(self) -> None:
        """Rebuild the heap when most of it is dead: O(n), once in n removals."""
        if len(self._entries) - len(self._serials) > max(DEAD_MAX, len(self._serials)):
            self._entries = [(self._place(item), serial, item) for item, serial in self._serials.items()]
            heapq.heapify(self._entries)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        living = {item: place for place, serial, item in self._entries if self._serials.get(item) == serial}
        assert living.keys() == self._serials.keys(), "an item of the heap has no entry"
        dead = len(self._entries) - len(self._serials)
        assert 0 <= dead <= max(DEAD_MAX, len(self._serials)), f"{dead} dead entries"
        for item, place in living.items():
            assert place <= self._place(item), "the place of an item has shrunk"


# Use frequency as a decaying count, for what many sessions share.

RATE_S = 600.0
"""Time constant: uses that long ago count for a third."""


def faded_rate(rate_per_s: float, idle_s: float) -> float:
    """Return the current rate, given `rate_per_s` at the last use, `idle_s` ago."""
    return rate_per_s * math.exp(-max(idle_s, 0.0) / RATE_S)


def used_rate(rate_per_s: float, idle_s: float) -> float:
    """Return the rate after one more use, `idle_s` after the last one."""
    return faded_rate(rate_per_s, idle_s) + 1.0 / RATE_S


MOVES_MAX = 1 << 20
"""Entries of a group examined per thing taken: no bound in practice, see `LazyHeap`."""


class Thing(Protocol):
    """An eviction candidate. `used_s` may grow, `saved_s` and `rate_per_s` change any time (see `requeue`).

    `owners`: sessions that use it. `used_s`: last use. `end_tokens`: where it ends in their chain.
    `saved_s`: seconds saved by having it, per byte. `min_ttl_s`: if used within this time, it is evicted
    after all others, unless it is expected never to be used again. `is_clean`: evicting it loses nothing.
    `rate_per_s`: use rate as of `used_s`.
    """

    @property
    def owners(self) -> Collection[SessionKey]: ...
    @property
    def used_s(self) -> float: ...
    @property
    def end_tokens(self) -> int: ...
    @property
    def saved_s(self) -> float: ...
    @property
    def min_ttl_s(self) -> float: ...
    @property
    def is_clean(self) -> bool: ...
    @property
    def rate_per_s(self) -> float: ...


T = TypeVar("T", bound=Thing)
Rank = tuple[int, float]
"""Class (the sum of the flags below), then worth."""

DIRTY = 1
"""Evicting it would lose it, and the policy considers that first."""
KEPT = 2
"""Its client or its profile asked to keep it, and nothing says that it will never be used again: neither its
session was closed, nor is it a one-shot, nor was its branch left."""
RUNNING = 4
"""A turn in progress uses it."""

RANKED_AT_ONCE = 256
"""Groups: 10 to 16 us each, under the lock of a node, on whose lookups first tokens wait."""

GroupKey = tuple[frozenset[SessionKey], float, bool]
Likeness = tuple[float, float, float]
"""What things of a group with the same worth have in common: last use, rate, what having it saves."""


ALIKE_SHARE = 1 / 16
"""Of what a thing saves, and how often it is used. Of a long chain each block saves a little less than the
one behind it. Ranking again for each took a third of a millisecond, in the midst of a step, and a prompt of
8k tokens evicts 500."""


class _Group(Generic[T]):
    """Things with the same key. `version`: its live entry in the ranking; `ranked`: whose rank that is."""

    __slots__ = ("heap", "key", "ranked", "version")

    def __init__(self, key: GroupKey) -> None:
        self.key = key
        self.heap: LazyHeap[T] = LazyHeap(_place)
        self.version = -1
        self.ranked: Likeness = (0.0, 0.0, 0.0)


class ValueQueue(Generic[T]):
    """Ranks things for eviction, told apart by hash and eq.

    Adding and taking are O(log n), ranking O(groups log groups). Up to `RANKED_AT_ONCE` groups are re-ranked
    together every `rerank_s`; of more, so many in that time, in turn, and who takes after a long time
    makes up for it first. `refresh` does it in small parts before. Of many that are new or have changed, as
    after a node's start, a taking ranks `RANKED_AT_ONCE` too, the longest so first, and takes from what is
    ranked.
    """

    def __init__(self, sessions: IdleSessions, policy: ResidencyPolicy, rerank_s: float) -> None:
        self._sessions = sessions
        self._policy = policy
        self._rerank_s = rerank_s
        self._groups: dict[GroupKey, _Group[T]] = {}  # of many, the longest not re-ranked first
        self._group_of: dict[T, _Group[T]] = {}
        self._of_session: dict[SessionKey, dict[_Group[T], None]] = {}
        self._dirty: dict[_Group[T], None] = {}
        # At equal worth the deeper goes first, so that a chain is evicted from its end, even if shared.
        self._ranking: list[tuple[Rank, int, int, _Group[T]]] = []
        self._ranked_s = -math.inf  # all of them; of many, the first
        self._versions = itertools.count()

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, thing: object) -> bool:
        return thing in self._group_of

    def __iter__(self) -> Iterator[T]:
        """Iterate in no particular order."""
        return iter(self._group_of)

    def add(self, *things: T) -> None:
        """Add things. Raises `ValueError` for one that is in already; those before it are in then."""
        for thing in things:
            if thing in self._group_of:
                raise ValueError("the thing is in the queue already")
            key = _key(thing)
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = _Group(key)
                for owner in key[0]:
                    self._of_session.setdefault(owner, {})[group] = None
            group.heap.add(thing)
            self._group_of[thing] = group
            self._dirty[group] = None

    def discard(self, *things: T) -> None:
        """Remove things; no-op for one that is not in."""
        gone: dict[_Group[T], list[T]] = {}
        for thing in things:
            group = self._group_of.pop(thing, None)
            if group is not None:
                gone.setdefault(group, []).append(thing)
        for group, of in gone.items():
            group.heap.discard(*of)
            self._shrunk(group)

    def requeue(self, thing: T) -> None:
        """Re-queue a thing whose `owners`, `min_ttl_s` or `is_clean` changed. No-op if it is not in."""
        group = self._group_of.get(thing)
        if group is not None and group.key != _key(thing):
            self.discard(thing)
            self.add(thing)

    def changed(self, session: SessionKey) -> None:
        """Mark a session's groups for re-ranking: it began or ended a turn, or has another curve."""
        for group in self._of_session.get(session, ()):
            self._dirty[group] = None

    def owned(self, session: SessionKey) -> list[T]:
        """Return all that a session uses, in no order. Scans all things of its groups."""
        return [thing for group in self._of_session.get(session, ()) for thing in group.heap]

    def take(self, now_s: float, horizon_s: float) -> T | None:
        """Take out the thing that should go first; None if there is none."""
        self._rank(now_s, horizon_s)
        while self._ranking:
            *_, version, group = self._ranking[0]
            if version != group.version:
                heapq.heappop(self._ranking)
                continue
            if group in self._dirty:  # so many have changed; it may have been used since it was ranked
                self._rank_these([group, *itertools.islice(self._dirty, RANKED_AT_ONCE)], now_s, horizon_s)
                continue
            (thing,) = group.heap.take(1, MOVES_MAX)
            del self._group_of[thing]
            self._shrunk(group)
            if len(group.heap) and self._is_alike(group):
                self._dirty.pop(group, None)  # the next has the same worth
            else:
                heapq.heappop(self._ranking)
                group.version = -1
            return thing
        return None

    def refresh(self, now_s: float, horizon_s: float) -> None:
        """Re-rank `RANKED_AT_ONCE` of what is due among many groups, so that the next `take` need not."""
        if len(self._groups) > RANKED_AT_ONCE:
            self._rank(now_s, horizon_s, RANKED_AT_ONCE)

    def order(self, things: Sequence[T], now_s: float, horizon_s: float) -> list[T]:
        """Return any things, in the queue or not, in eviction order."""
        ranks = self._ranks(things, now_s, horizon_s)
        places = sorted(range(len(things)), key=lambda at: (ranks[at], _place(things[at])))
        return [things[at] for at in places]

    def _is_alike(self, group: _Group[T]) -> bool:
        """Whether the next of a group has the rank that the group has, or nearly."""
        following = group.heap.first(MOVES_MAX)
        if following is None or self._policy.looks_at_depth:
            return False
        used_s, rate_per_s, saved_s = group.ranked
        return (
            following.used_s == used_s
            and math.isclose(following.rate_per_s, rate_per_s, rel_tol=ALIKE_SHARE)
            and math.isclose(following.saved_s, saved_s, rel_tol=ALIKE_SHARE)
        )

    def _shrunk(self, group: _Group[T]) -> None:
        if len(group.heap):
            self._dirty[group] = None
            return
        group.version = -1
        self._dirty.pop(group, None)
        del self._groups[group.key]
        for owner in group.key[0]:
            of = self._of_session[owner]
            del of[group]
            if not of:
                del self._of_session[owner]

    def _rank(self, now_s: float, horizon_s: float, groups_max: int | None = None) -> None:
        """Bring the ranking up to date, as far as is due."""
        due = self._due(now_s, groups_max)
        self._dirty.update(dict.fromkeys(due))
        if self._dirty:
            count = max(len(due), RANKED_AT_ONCE) if groups_max is None else groups_max
            self._rank_these(itertools.islice(self._dirty, count), now_s, horizon_s)

    def _rank_these(self, of: Iterable[_Group[T]], now_s: float, horizon_s: float) -> None:
        groups = list(dict.fromkeys(of))
        for group in groups:
            del self._dirty[group]
        if len(groups) == len(self._groups):
            self._ranking = []
        elif len(self._ranking) > 2 * len(self._groups) + 64:
            self._ranking = [entry for entry in self._ranking if entry[2] == entry[3].version]
            heapq.heapify(self._ranking)
        fronts = [front for group in groups if (front := group.heap.first(MOVES_MAX)) is not None]
        ranks = self._ranks(fronts, now_s, horizon_s)
        is_new = not self._ranking
        for group, front, rank in zip(groups, fronts, ranks, strict=True):
            group.version = next(self._versions)
            group.ranked = front.used_s, front.rate_per_s, front.saved_s
            entry = (rank, -front.end_tokens, group.version, group)
            if is_new:
                self._ranking.append(entry)
            else:
                heapq.heappush(self._ranking, entry)
        if is_new:
            heapq.heapify(self._ranking)

    def _due(self, now_s: float, groups_max: int | None) -> list[_Group[T]]:
        """Return the groups to re-rank now, at most `groups_max` of many, and count them as done."""
        count, waited_s = len(self._groups), now_s - self._ranked_s
        if waited_s < 0 or count <= RANKED_AT_ONCE:
            if 0 <= waited_s < self._rerank_s:
                return []
            self._ranked_s = now_s
            return list(self._groups.values())
        each_s = self._rerank_s / RANKED_AT_ONCE
        if len(self._dirty) >= RANKED_AT_ONCE:  # what is new or has changed goes first
            self._ranked_s = now_s
            return []
        due = count if waited_s >= count * each_s else int(waited_s / each_s)
        left = 0
        if groups_max is not None and due > groups_max:
            # Who refreshes, in turn, has ranked all when it has done as many as were due at first.
            left, due = max(0, due - 2 * groups_max), groups_max
        self._ranked_s = now_s - left * each_s - waited_s % each_s
        groups = list(itertools.islice(self._groups.values(), due))
        for group in groups:
            self._groups[group.key] = self._groups.pop(group.key)
        return groups

    def _ranks(self, fronts: Sequence[T], now_s: float, horizon_s: float) -> list[Rank]:
        """Return the rank of each: the best over its owners."""
        if not fronts:
            return []
        sessions, policy = self._sessions, self._policy
        slot = sessions.slot
        owners = [front.owners for front in fronts]
        counts = np.array([max(1, len(of)) for of in owners])
        slots: Slots = np.array(
            [place for of in owners for place in (map(slot, of) if of else (NO_SESSION,))], dtype=np.intp
        )
        used_s = np.array([front.used_s for front in fronts])
        saved_s = np.array([front.saved_s for front in fronts])
        each_used_s = np.repeat(used_s, counts)
        candidates = Candidates(
            slots,
            each_used_s,
            np.repeat(np.array([float(front.end_tokens) for front in fronts]), counts),
            np.repeat(saved_s, counts),
        )
        is_left = each_used_s < sessions.left_s[slots]
        worth = policy.worth(candidates, sessions, now_s, horizon_s)
        share = policy.superseded_share
        if share < 1.0 and sessions.left_share is not None:
            share = sessions.left_share
        worth = np.where(is_left, share * worth, worth)
        min_ttl_s = np.repeat(np.array([front.min_ttl_s for front in fronts]), counts)
        is_kept = np.maximum(now_s - each_used_s, 0.0) < min_ttl_s
        is_kept &= -np.expm1(sessions.curves[slots, -1]) >= PolicySettings.copied_probability_min
        classes = RUNNING * sessions.are_running(slots, now_s) + KEPT * is_kept
        classes[is_left] = 0
        starts = np.cumsum(counts) - counts
        best: Floats = np.maximum.reduceat(worth, starts)
        shared = np.flatnonzero(counts > 1).tolist()
        if shared:
            rates = np.array([faded_rate(fronts[at].rate_per_s, now_s - fronts[at].used_s) for at in shared])
            best[shared] = policy.shared_worth(
                rates, used_s[shared], saved_s[shared], best[shared], horizon_s
            )
        best_class = np.maximum.reduceat(classes, starts)
        if policy.clean_first:
            best_class = best_class + DIRTY * np.array([not front.is_clean for front in fronts])
        return list(zip(best_class.tolist(), best.tolist(), strict=True))

    def check_integrity(self, things: Collection[T] | None = None) -> None:
        """Raise `AssertionError` naming what is wrong. `things`: all that should be in, if known."""
        assert sum(len(group.heap) for group in self._groups.values()) == len(self._group_of), (
            "a thing is lost"
        )
        for thing, group in self._group_of.items():
            assert thing in group.heap, "a thing is not in its group"
            assert self._groups.get(group.key) is group, "a group is not known"
            assert group.key == _key(thing), "a thing is in another's group"
        of_session: dict[SessionKey, dict[_Group[T], None]] = {}
        for (owners, _, _), group in self._groups.items():
            assert len(group.heap), "an empty group is remembered"
            group.heap.check_integrity()
            for owner in owners:
                of_session.setdefault(owner, {})[group] = None
        assert self._of_session == of_session, "the groups of a session are wrong"
        living = {group for *_, version, group in self._ranking if version == group.version}
        assert living | set(self._dirty) >= set(self._groups.values()), "a group would never be taken from"
        if things is not None:
            assert self._group_of.keys() == set(things), "other things are queued than are there"


def _key(thing: Thing) -> GroupKey:
    return frozenset(thing.owners), thing.min_ttl_s, thing.is_clean


def _place(thing: Thing) -> Place:
    return thing.used_s, -thing.end_tokens


FORGET_S = 120.0
"""Time constant of the rate: what was evicted that long ago counts for a third."""


class Residence:
    """Measures a tier's residence time, and from it how far ahead its policy looks. Pure.

    A tier in which a copy survives for a minute need not consider who returns within the hour. By
    Little's law the mean residence is what is held divided by the eviction rate. `horizon_s_min`,
    `horizon_s_max`: bounds of the result.
    """

    def __init__(self, horizon_s_min: float, horizon_s_max: float) -> None:
        self._min_s = horizon_s_min
        self._max_s = max(horizon_s_min, horizon_s_max)
        self._went = 0.0  # decayed sum of bytes (or pages) evicted
        self._since_s = -math.inf
        self._began_s: float | None = None

    def went(self, amount: float, now_s: float) -> None:
        """Record that `amount` was evicted."""
        self._decay(now_s)
        self._went += amount

    def horizon_s(self, held: float, now_s: float) -> float:
        """Return the mean residence of what is `held` now, bounded; the upper bound without evictions."""
        self._decay(now_s)
        if self._went <= 0 or self._began_s is None:
            return self._max_s
        # For a tier that has only begun to evict, the decayed sum covers only the time since then.
        seen_s = FORGET_S * -math.expm1(-max(now_s - self._began_s, 1.0) / FORGET_S)
        return min(max(held * seen_s / self._went, self._min_s), self._max_s)

    def _decay(self, now_s: float) -> None:
        if self._began_s is None:
            self._began_s = self._since_s = now_s
        idle_s = max(0.0, now_s - self._since_s)
        self._went *= math.exp(-idle_s / FORGET_S)
        if self._went < 1e-9:
            self._went = 0.0
        self._since_s = max(self._since_s, now_s)
