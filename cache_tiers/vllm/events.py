"""What routers hear about the tiers: which blocks there are, and where. Pure.

Told is what the engine learns by the way: a lookup says what there is and what is gone, a store what was
taken. What the tiers forget meanwhile is told as removed when the next prompt asks for it, what this table
forgets at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from samovar.cache_tiers.blocks import CPU
from samovar.cache_tiers.events.feed import BlockPlace, place_of
from samovar.cache_tiers.vllm.lookups import PromptLookup
from samovar.cache_tiers.vllm.messages import StoresTaken
from samovar.cache_tiers.vllm.spans import kept_front, segments

KEYS_MAX = 100_000
EVENTS_MAX = 10_000
TOLD_S = 5.0
"""So long after a request ended its store is waited for; one that is not told until then is not told."""


class Chain(NamedTuple):
    """What an event says of a request's blocks. `hashes`: vLLM's own, which routers know."""

    hashes: tuple[Any, ...]
    token_ids: Sequence[int]
    block_tokens: int
    request: Any

    @staticmethod
    def of(request: Any, block_tokens: int) -> Chain:
        """Return the chain of a request, as it is now."""
        return Chain(tuple(request.block_hashes), request.all_token_ids, block_tokens, request)


class Stored(NamedTuple):
    """Blocks `[first, end)` of a chain are in the tiers."""

    chain: Chain
    first: int
    end: int
    place: BlockPlace


class Removed(NamedTuple):
    hashes: tuple[Any, ...]
    place: BlockPlace


class _Believed(NamedTuple):
    hash: Any
    place: BlockPlace
    since_s: float


class _Storing(NamedTuple):
    chain: Chain
    keys: list[bytes]
    first: int
    began_s: float
    taken: dict[int, int]  # rank -> blocks


class Announced:
    """What routers believe is in the tiers, and what they are to be told. Called by the engine's loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._believed: dict[bytes, _Believed] = {}
        self._storing: dict[str, _Storing] = {}
        self._events: deque[Stored | Removed] = deque()
        self._life = ""

    @property
    def is_waiting(self) -> bool:
        """Whether a store is about to be told."""
        over_s = self._clock() - TOLD_S
        for request_id in [name for name, one in self._storing.items() if one.began_s < over_s]:
            del self._storing[request_id]
        return bool(self._storing)

    def looked_up(self, chain: Chain, prompt: PromptLookup) -> None:
        """Learn from a lookup which of the prompt's blocks the tiers have, up to the first that they lack."""
        found = prompt.found
        if self._life not in ("", found[0].incarnation):  # its main memory is empty
            self._remove([key for key, one in self._believed.items() if one.place == place_of(CPU.name)])
        self._life = found[0].incarnation
        blocks = min((prompt.tokens - 1) // chain.block_tokens, len(chain.hashes))
        there = segments(found, 0, min(kept_front(found), blocks), found[0].prices)
        for one in there:
            place = place_of(one.tier)
            self._add(chain, prompt.keys, one.first, one.first + one.blocks, place)
        end = there[-1].first + there[-1].blocks if there else 0
        lacking = [key for key in prompt.keys[end:blocks] if key in self._believed]
        self._remove([key for key in lacking if self._believed[key].since_s < prompt.began_s])

    def storing(self, request_id: str, chain: Chain, keys: list[bytes], first: int) -> None:
        """Remember a store that has begun, of the blocks from `first` on."""
        self._storing[request_id] = _Storing(chain, keys, first, self._clock(), {})

    def taken(self, taken: StoresTaken, ranks: int) -> None:
        """Learn how many blocks of a store the tiers have now, of each rank."""
        for request_id, by_rank in taken.items():
            one = self._storing.get(request_id)
            if one is not None:
                one.taken.update(by_rank)
                if len(one.taken) == ranks:
                    del self._storing[request_id]
                    end = min(one.first + min(one.taken.values()), len(one.chain.hashes))
                    self._add(one.chain, one.keys, one.first, end, place_of(CPU.name))

    def gone(self) -> None:
        """Tell that nothing is there any more."""
        self._storing.clear()
        self._remove(list(self._believed))

    def take(self) -> list[Stored | Removed]:
        """Return what is to be told, in order, and forget it."""
        events, self._events = list(self._events), deque()
        return events

    def _add(self, chain: Chain, keys: Sequence[bytes], first: int, end: int, place: BlockPlace) -> None:
        def is_news(number: int) -> bool:
            known = self._believed.get(keys[number])
            return known is None or known.place != place

        now_s = self._clock()
        for news, run in groupby(range(first, end), is_news):
            numbers = list(run)
            if news:
                self._tell(Stored(chain, numbers[0], numbers[-1] + 1, place))
                self._remove([keys[number] for number in numbers])  # from where it was
            for number in numbers:
                self._believed.pop(keys[number], None)  # it becomes the youngest
                self._believed[keys[number]] = _Believed(chain.hashes[number], place, now_s)
        self._remove(list(self._believed)[: max(0, len(self._believed) - KEYS_MAX)])

    def _remove(self, keys: Sequence[bytes]) -> None:
        gone = [known for key in keys if (known := self._believed.pop(key, None)) is not None]
        for place, run in groupby(sorted(gone, key=lambda one: one.place), lambda one: one.place):
            self._tell(Removed(tuple(one.hash for one in run), place))

    def _tell(self, event: Stored | Removed) -> None:
        """Queue an event. Of an engine that does not step none is kept without end."""
        self._events.append(event)
        if len(self._events) > EVENTS_MAX:
            self._events.popleft()
