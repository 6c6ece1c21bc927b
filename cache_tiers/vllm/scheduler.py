"""The scheduler's half: what of a request is loaded, and what is stored when it ends.

Nothing here waits: calls of the tiers run on threads, and vLLM asks again. No vLLM and no torch: requests are
what they look like.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from samovar.cache_tiers.blocks import (
    ROOT,
    TAG_BYTES,
    TIERS,
    Clear,
    LoadSource,
    Placement,
    marks_of,
)
from samovar.cache_tiers.forecast import Stop
from samovar.cache_tiers.messages import BlockRange, Cleared, Fetch, FetchFailed, TurnEnded
from samovar.cache_tiers.socket.client import Loaded
from samovar.cache_tiers.vllm.events import Announced, Chain
from samovar.cache_tiers.vllm.idle_wait import IdleWait
from samovar.cache_tiers.vllm.lookups import Extra, LookupCalls, Lookups, PromptLookup
from samovar.cache_tiers.vllm.messages import ConnectorOptions, Jobs, Load, Store, StoresTaken
from samovar.cache_tiers.vllm.names.chain import chain_keys, rank_name
from samovar.cache_tiers.vllm.replica_turn import PromptTold, ReplicaTurn, StoresTold, Told, TurnTold
from samovar.cache_tiers.vllm.spans import CommonRun, RecentStores, kept_front, segments, spans_behind
from samovar.cache_tiers.vllm.worth import Worth

logger = logging.getLogger(__name__)

FETCHES_AT_ONCE = 4
SAVING_SHARE = 0.75
"""Of the pool's pages, those that stores may keep from being freed at once; one alone may keep all."""


class SchedulerCalls(LookupCalls, Protocol):
    """See `SocketLink`."""

    def fetch(self, fetch: Fetch) -> Loaded | FetchFailed: ...
    def turn_over(self, over: TurnEnded) -> None: ...
    def clear(self, clear: Clear, timeout_s: float) -> Cleared: ...


class _Plan(NamedTuple):
    """A load: what every rank has from block `first` on, and the records of each."""

    first: int
    segments: tuple[CommonRun, ...] = ()
    ranks: tuple[tuple[BlockRange, ...], ...] = ()

    @property
    def blocks(self) -> int:
        return sum(one.blocks for one in self.segments)


@dataclass(slots=True)
class _Turn:
    """One request, from its arrival to its end.

    `fetched`: blocks of the prompt that were brought into main memory for it, None while that is under way.
    `replica`: what a replica says of it. `plan`: None until it was made. `is_asked`: it was begun; only once,
    since vLLM asks again for what failed. `is_told`: the replica was told where it came from. `is_loading`:
    its pages are being written, and mean nothing yet. `pages`: those of the load, `bad`: of these, what could
    not be loaded. `loaded`: tokens by tier, in `load_s`, from `load_began_s` on.
    """

    prompt: PromptLookup
    replica: ReplicaTurn | None = None
    fetched: int | None = 0
    fetches: int = 0
    fetch_began_s: float = 0.0
    plan: _Plan | None = None
    is_asked: bool = False
    is_loading: bool = False
    pages: tuple[int, ...] = ()
    bad: set[int] = field(default_factory=set)
    loaded: dict[LoadSource, int] = field(default_factory=dict)
    asked_tokens: int = 0
    load_began_s: float = 0.0
    load_s: float = 0.0
    is_told: bool = False

    @property
    def is_awaited(self) -> bool:
        """Whether the engine can do nothing for it before a lookup has been answered, or a fetch."""
        return not self.prompt.is_settled or self.fetched is None

    def tell_prompt(self, tell: Callable[[Told], None] | None) -> None:
        """Tell the replica where a prompt came from: once, when nothing of it is loaded any more."""
        if tell is not None and self.replica is not None and not (self.is_told or self.is_loading):
            self.is_told = True
            asked, loaded = self.asked_tokens, dict(self.loaded)
            tell(PromptTold(self.replica.key, asked, loaded, self.load_s, self.prompt.why))

    def count_loaded(self, end: int, block_tokens: int) -> None:
        """Note that what is planned is loaded up to block `end`."""
        self.loaded = {}
        for one in self.plan.segments if self.plan else ():
            tokens = max(0, min(one.first + one.blocks, end) - one.first) * block_tokens
            if tokens:
                self.loaded[one.tier] = self.loaded.get(one.tier, 0) + tokens


class Threads(NamedTuple):
    """What blocks runs there. Apart: fetches of a slow disk do not hold lookups up."""

    lookups: Executor
    fetches: Executor


class Hearers(NamedTuple):
    """Who is told: `routers`, what the tiers have; `replica`, of its turns, which then are all there are.

    `resend`: sends the replica again what found no room, and says whether something of it is left.
    """

    routers: bool = False
    replica: Callable[[Told], None] | None = None
    resend: Callable[[], bool] = lambda: False


NO_HEARERS = Hearers()


def _room(saving: Mapping[str, int], pages: int) -> int:
    """Return how many of the pool's `pages` one more store may keep: a later turn stores what is left."""
    return max(0, int(SAVING_SHARE * pages) - sum(saving.values())) if saving else pages


class FetchAhead:
    """Brings what other machines have into main memory before its load: no page waits for a network.

    What a file of this node has is read by the load itself. Called by the engine's loop alone.
    """

    def __init__(
        self,
        calls: SchedulerCalls,
        lane: Executor,
        load_s_max: float,
        idle: IdleWait,
        clock: Callable[[], float],
    ) -> None:
        self._calls = calls
        self._lane = lane
        self._load_s_max = load_s_max
        self._idle = idle
        self._clock = clock
        self._lock = threading.Lock()

    def is_here(self, turn: _Turn, plan: _Plan) -> bool:
        """Return whether the load may begin; begin to bring what it needs."""
        far = [
            (rank, span)
            for rank, spans in enumerate(plan.ranks)
            for span in spans
            if span.tier not in TIERS.local
        ]
        end = plan.first + plan.blocks
        if not far or (turn.fetched is not None and turn.fetched >= end):
            return True
        if turn.fetched is None:  # under way
            if self._clock() - turn.fetch_began_s < self._load_s_max:
                return False
            turn.prompt.why, turn.plan, turn.is_asked = "load late", _Plan(plan.first), True
            return True
        turn.fetched, turn.fetch_began_s, turn.fetches = None, self._clock(), len(far)
        for rank, span in far:
            self._lane.submit(self._bring, turn, rank_name(turn.prompt.namespace, rank), span, end)
        return False

    def _bring(self, turn: _Turn, namespace: bytes, span: BlockRange, end: int) -> None:
        try:
            if not turn.prompt.is_over:
                self._calls.fetch(fetch_of(namespace, span, self._load_s_max))
        except Exception:  # the worker finds out, and the rest is computed
            logger.exception("a fetch failed")
        with self._lock:
            turn.fetches -= 1
            if not turn.fetches:
                turn.fetched = end
        self._idle.ended()


class SchedulerHalf:
    """Decides for one engine. Called by its loop alone.

    `namespace`: of the model; None until the workers have told the layouts of their pages (`named`).
    `extra_of`: what else a request's blocks depend on, see `Lookups.open`. `pages`: of the engine's pool.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        calls: SchedulerCalls,
        threads: Threads,
        *,
        block_tokens: int,
        pages: int,
        extra_of: Callable[[Any], Extra],
        hearers: Hearers = NO_HEARERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.namespace: bytes | None = None
        self._options = options
        self._calls = calls
        self._threads = threads
        self._block_tokens = block_tokens
        self._pages = pages
        self._extra_of = extra_of
        self._tell_replica = hearers.replica
        self._resend = hearers.resend
        self._told_saving = 0
        self._clock = clock
        self._turns: dict[str, _Turn] = {}
        self._saving: dict[str, int] = {}  # request -> pages
        self._recent = RecentStores()
        self._jobs = Jobs()
        self._idle = IdleWait()
        self._ahead = FetchAhead(calls, threads.fetches, options.load_s_max, self._idle, clock)
        self.worth = Worth(block_tokens, FETCHES_AT_ONCE, clock)
        self._lookups = Lookups(
            calls,
            threads.lookups,
            self.worth,
            block_tokens=block_tokens,
            s_max=options.lookup_s_max,
            heard=self._idle.ended,
            clock=clock,
        )
        self.announced = Announced(clock) if hearers.routers else None
        self.counts: Counter[tuple[str, str]] = Counter()

    def named(self, namespace: bytes, ranks: int) -> None:
        """Take the name of the model's KV: from now on requests are looked up."""
        self.namespace, self._lookups.ranks = namespace, ranks

    def begin(self, request: Any) -> None:
        """Look a new request up."""
        ids = request.prompt_token_ids
        if self.namespace is None or ids is None or getattr(request, "prompt_embeds", None) is not None:
            return
        # Without a replica a client could say it, and choose a tenant or a salt.
        replica = None if self._tell_replica is None else _replica_turn(request)
        if self._tell_replica is not None and (replica is None or replica.placement is None):
            return
        owner = self._options.owner_of(request) if replica is None else (replica.tenant, replica.session)
        peers = () if replica is None else replica.peers
        named = request if replica is None else replica.salted(request)
        prompt = self._lookups.open(self.namespace, owner, ids, lambda: self._extra_of(named), peers)
        self._turns[request.request_id] = _Turn(prompt, replica)

    def matched(self, request: Any, computed: int) -> int | None:
        """Return how many tokens behind `computed` are to be loaded; None: ask again."""
        turn = self._turns.get(request.request_id)
        tokens = self._matched(request, turn, computed)
        if tokens == 0 and turn is not None:
            turn.tell_prompt(self._tell_replica)
        return tokens

    def _matched(self, request: Any, turn: _Turn | None, computed: int) -> int | None:
        if turn is None or turn.is_asked or computed % self._block_tokens:
            return 0
        if not self._lookups.is_over(turn.prompt, computed, is_alone=len(self._turns) == 1):
            return None
        if not turn.prompt.found or turn.prompt.namespace != self.namespace:  # cleared meanwhile
            return 0
        first = computed // self._block_tokens
        if turn.plan is None or turn.plan.first != first:  # it is asked again while blocks are fetched
            if turn.plan is None and self.announced is not None:
                self.announced.looked_up(Chain.of(request, self._block_tokens), turn.prompt)
            turn.plan = self._planned(turn.prompt, first)
        if turn.plan.segments and not self._ahead.is_here(turn, turn.plan):
            return None
        return turn.plan.blocks * self._block_tokens

    def _planned(self, prompt: PromptLookup, first: int) -> _Plan:
        """Return the load of the leading segments that are cheaper to load than to compute."""
        found = prompt.found
        prices, end = found[0].prices, (prompt.tokens - 1) // self._block_tokens
        there = segments(found, first, end, prices)
        if not there:
            prompt.why = prompt.why or ("nothing there" if first < end else "")  # vLLM may have all of it
            return _Plan(first)
        chosen = there[: self.worth.leading(prompt.tokens, first, there, prices)]
        if not chosen:
            prompt.why = prompt.why or "cheaper to compute"
            return _Plan(first)
        end = chosen[-1].first + chosen[-1].blocks
        ranks = (tuple(spans_behind(one.spans, first, end)) for one in found)
        return _Plan(first, tuple(chosen), tuple(ranks))

    def allocated(self, request: Any, page_ids: Sequence[int], tokens: int) -> None:
        """Begin the load of `tokens`, for which there are pages now. `page_ids`: all of the request.

        What is not as it was planned is a load of nothing: its pages are told as bad, and computed.
        """
        if not tokens:
            return
        turn = self._turns.get(request.request_id)
        plan = (turn.plan if turn else None) or _Plan(0)
        blocks = tokens // self._block_tokens
        pages = tuple(page_ids[plan.first : plan.first + blocks])
        if turn is None or len(pages) != blocks or plan.blocks != blocks:
            logger.error("request %s: %d blocks were not planned to be loaded", request.request_id, blocks)
            load = Load(request.request_id, b"", (), 0, (), tuple(page_ids[-blocks:]))
        else:
            keys = tuple(turn.prompt.keys[plan.first : plan.first + blocks])
            load = Load(request.request_id, turn.prompt.namespace, plan.ranks, plan.first, keys, pages)
        if turn is not None:
            turn.is_asked, turn.is_loading, turn.pages = True, True, load.pages
            turn.load_began_s, turn.asked_tokens = self._clock(), tokens
            turn.count_loaded(plan.first + blocks if load.ranks else 0, self._block_tokens)
        self._jobs.loads.append(load)

    def loaded_from(self, request: Any) -> Mapping[LoadSource, int]:
        """Return the tokens that are loaded for a request, by tier."""
        turn = self._turns.get(request.request_id)
        return {} if turn is None else dict(turn.loaded)

    def step(self, new_tokens: int, context_tokens: int, *, is_idle: bool = False) -> Jobs:
        """Return the jobs of a step that computes `new_tokens` behind `context_tokens` each on average.

        `is_idle`: it computes nothing at all; then a lookup or a fetch that is under way is waited for.
        """
        self.worth.step(new_tokens, context_tokens)
        self._tell_stores()
        is_awaited = self._resend() or any(turn.is_awaited for turn in self._turns.values())
        jobs, self._jobs = self._jobs, Jobs()
        jobs.may_wait = is_idle
        if is_idle and not jobs.loads and is_awaited:
            self._idle.wait()
            jobs.may_wait = False
        return jobs

    def stepped(
        self, received: Iterable[str], sent: Iterable[str], bad_pages: Iterable[int], taken: StoresTaken
    ) -> None:
        """Take in what a step has ended: loads, stores, and the pages that could not be loaded.

        `received`, `sent`: by every rank; a page is bad if it is on one of them, and is told in the step of
        that rank. `taken`: stores that the tiers have, by request and rank.
        """
        bad = set(bad_pages)
        if bad:
            for turn in self._turns.values():
                if turn.is_loading:
                    turn.bad |= bad.intersection(turn.pages)
        for request_id in received:
            loaded = self._turns.get(request_id)
            if loaded is not None:
                loaded.is_loading = False
                good = next((at for at, page in enumerate(loaded.pages) if page in loaded.bad), None)
                if good is not None and loaded.plan is not None:
                    loaded.prompt.why = loaded.prompt.why or "a block was bad"
                    loaded.count_loaded(loaded.plan.first + good, self._block_tokens)
                loaded.load_s = self._clock() - loaded.load_began_s
                loaded.tell_prompt(self._tell_replica)
        for request_id in sent:
            self._saving.pop(request_id, None)
        self._tell_stores()  # it may be the last step for a while
        if self.announced is not None:
            self.announced.taken(taken, self._lookups.ranks)

    def ended(self, request: Any, page_ids: Sequence[int], stop: Stop) -> tuple[bool, dict[str, Any] | None]:
        """End a request. Return whether its pages are kept until they are stored, and the receipt."""
        turn = self._turns.pop(request.request_id, None)
        if turn is None:
            return False, None
        prompt = turn.prompt
        prompt.is_over = True
        receipt = {"tokens_by_tier": dict(turn.loaded), "missed": prompt.why}
        self._count(turn)
        # After a clear, KV of before may be of other weights.
        if turn.is_loading or not prompt.found or prompt.extra is None or prompt.namespace != self.namespace:
            return False, {"samovar": receipt}
        # vLLM counts tokens of steps that are still under way as computed (asynchronous scheduling).
        in_flight = request.num_in_flight_tokens
        sure = min(request.num_computed_tokens - in_flight, request.num_tokens - 1)
        blocks = min(sure // self._block_tokens, len(page_ids))
        if turn.replica is not None and self._tell_replica is not None:
            self._tell_replica(TurnTold(turn.replica.key, marks_of(prompt.keys)))
        else:
            self._threads.lookups.submit(self._tell, prompt, request.num_tokens - prompt.tokens, stop)
        placement = Placement() if turn.replica is None else turn.replica.placement
        assert placement is not None, "a turn without a placement is not looked up"
        store = self._store(request, prompt, tuple(page_ids[:blocks]), placement)
        if store is None:
            return False, {"samovar": receipt}
        self._jobs.stores.append(store)
        self._saving[request.request_id] = len(store.pages)
        if not self._told_saving:  # at once: the replica must not take its last turn for stored
            self._tell_stores()
        return True, {"samovar": receipt | {"stored_blocks": len(store.pages)}}

    def _tell_stores(self) -> None:
        """Tell how many turns are being stored, if it was told otherwise."""
        if self._tell_replica is not None and self._told_saving != len(self._saving):
            self._told_saving = len(self._saving)
            self._tell_replica(StoresTold(self._told_saving))

    def _count(self, turn: _Turn) -> None:
        for tier, tokens in turn.loaded.items():
            self.counts["hit_tokens", tier] += tokens
        if turn.prompt.why:
            self.counts["missed", turn.prompt.why] += 1

    def _store(
        self, request: Any, prompt: PromptLookup, page_ids: tuple[int, ...], placement: Placement
    ) -> Store | None:
        """Return the store of what the tiers lack of the blocks in `page_ids`, the request's first."""
        assert prompt.extra is not None
        blocks, ids = len(page_ids), request.all_token_ids
        extra = tuple(prompt.extra(blocks * self._block_tokens))
        asked = prompt.keys[:blocks]
        answered = tuple(ids[len(asked) * self._block_tokens : blocks * self._block_tokens])
        parent = asked[-1] if asked else ROOT
        keys = asked + chain_keys(prompt.namespace, answered, extra[len(asked) :], self._block_tokens, parent)
        life = prompt.found[0].incarnation  # of rank 0: it was asked first
        held = self._recent.held(keys, kept_front(prompt.found), prompt.began_s, life)
        pages = page_ids[held : held + _room(self._saving, self._pages)]
        if len(pages) < blocks - held:
            self.counts["stores", "cut: pages"] += 1
        blocks = held + len(pages)
        if not pages or 0 in pages:  # 0: vLLM's null block, of a window that has passed
            return None
        self._recent.add(keys[held:blocks], self._clock(), life)
        if self.announced is not None:
            self.announced.storing(request.request_id, Chain.of(request, self._block_tokens), keys, held)
        return Store(
            request.request_id,
            prompt.namespace,
            prompt.tenant,
            prompt.session,
            keys[held - 1] if held else ROOT,
            held,
            tuple(ids[held * self._block_tokens : blocks * self._block_tokens]),
            extra[held:blocks],
            pages,
            life,
            prompt.found[0].clear_seq,
            self.worth.compute_s(len(pages) * self._block_tokens, held),
            placement,
        )

    def _tell(self, prompt: PromptLookup, output_tokens: int, stop: Stop) -> None:
        took_s = self._clock() - prompt.began_s
        try:
            self._calls.turn_over(_turn_ended(prompt, took_s, output_tokens, self._block_tokens, stop))
        except Exception:
            logger.exception("a turn's end was not told")

    def clear(self, timeout_s: float) -> bool:
        """Clear what the connector's own tenant has stored; return whether all of it is gone for sure.

        Nothing that was stored before is found any more, whosoever it was and whether they answered: weights
        may have been changed in place, and then the namespace that was made of their files means nothing.
        """
        if self.namespace is not None:
            self.namespace = hashlib.sha256(self.namespace + os.urandom(TAG_BYTES)).digest()
        if self.announced is not None:
            self.announced.gone()
        try:
            cleared = self._calls.clear(Clear(self._options.tag_of(self._options.tenant)), timeout_s)
        except TimeoutError:
            return False
        return cleared.is_noted and not cleared.unreachable

    @property
    def is_saving(self) -> bool:
        """Whether stores keep pages that will be free soon."""
        return bool(self._saving)

    @property
    def is_waiting(self) -> bool:
        """Whether stores are under way, or are over and not announced yet, or not told to the replica."""
        return self.is_saving or bool(self.announced and self.announced.is_waiting) or self._resend()

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        loading = {load.request_id for load in self._jobs.loads}
        for request_id in loading & self._turns.keys():
            assert self._turns[request_id].is_loading, f"{request_id} is to be loaded, and is not loading"
        assert all(pages > 0 for pages in self._saving.values()), "a store without pages"


def _replica_turn(request: Any) -> ReplicaTurn | None:
    try:
        return ReplicaTurn.of(request)
    except ValueError as error:
        logger.info("the tiers are not used for a request: %s", error)
        return None


def _turn_ended(
    prompt: PromptLookup, service_s: float, output_tokens: int, block_tokens: int, stop: Stop
) -> TurnEnded:
    return TurnEnded(
        prompt.tenant,
        prompt.session,
        service_s,
        prompt.tokens,
        max(output_tokens, 0),
        marks_of(prompt.keys),
        block_tokens,
        stop=stop,
    )


def fetch_of(namespace: bytes, span: BlockRange, deadline_s: float) -> Fetch:
    """Return the request for a span's blocks."""
    return Fetch(
        namespace, span.tenant, span.extent_id, span.offset, span.blocks, span.tier, deadline_s, span.node
    )
