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
    CPU,
    ROOT,
    SESSION_BYTES,
    TAG_BYTES,
    Clear,
    LoadSource,
    marks_of,
    tenant_tag,
)
from samovar.cache_tiers.forecast import Stop
from samovar.cache_tiers.messages import (
    BlockRange,
    Cleared,
    Fetch,
    FetchFailed,
    Lookup,
    LookupResult,
    TurnEnded,
)
from samovar.cache_tiers.socket.client import Loaded
from samovar.cache_tiers.vllm.chain import chain_keys
from samovar.cache_tiers.vllm.messages import ConnectorOptions, Jobs, Load, Store
from samovar.cache_tiers.vllm.recent import RecentStores
from samovar.cache_tiers.vllm.worth import Worth

logger = logging.getLogger(__name__)

FETCHES_AT_ONCE = 4
HURRY_S = 2.0
HURRY_SHARE = 0.1
"""So long after a lookup was late, others are waited for a tenth of the time: the node may hang."""
SAVING_SHARE = 0.75
"""Of the pool's pages, those that stores may keep from being freed at once."""


class SchedulerCalls(Protocol):
    """See `SocketLink`."""

    def lookup(self, lookup: Lookup) -> LookupResult | None: ...
    def fetch(self, fetch: Fetch) -> Loaded | FetchFailed: ...
    def turn_over(self, over: TurnEnded) -> None: ...
    def clear(self, clear: Clear, timeout_s: float) -> Cleared: ...


@dataclass(slots=True)
class _Turn:
    """One request, from its arrival to its end.

    `found`: what the tiers have; None until they answered, or if they did not (`is_answered`). `fetched`:
    blocks of the prompt that were brought into main memory for it, None while that is under way. `plan`: the
    first block and the spans of the load, None until it was made. `is_asked`: it was begun; only once, since
    vLLM asks again for what failed. `is_loading`: its pages are being written, and mean nothing yet. `pages`:
    those of the load. `loaded`: tokens by tier.
    """

    namespace: bytes
    tenant: bytes
    session: bytes
    began_s: float
    tokens: int
    extra: tuple[bytes, ...]
    keys: list[bytes] = field(default_factory=list)
    found: LookupResult | None = None
    is_answered: bool = False
    fetched: int | None = 0
    fetches: int = 0
    fetch_began_s: float = 0.0
    plan: tuple[int, tuple[BlockRange, ...]] | None = None
    is_asked: bool = False
    is_loading: bool = False
    pages: tuple[int, ...] = ()
    loaded: dict[LoadSource, int] = field(default_factory=dict)
    why: str = ""
    is_over: bool = False


class Threads(NamedTuple):
    """What blocks runs there. Apart: fetches of a slow disk do not hold lookups up."""

    lookups: Executor
    fetches: Executor


class SchedulerHalf:
    """Decides for one engine. Called by its loop alone.

    `namespace`: of the model; None until the worker has told the layout of its pages. `extra_of`: the extra
    digests of a request's blocks up to a token, raises `ValueError` if there is no way to name one (then the
    tiers are not used for it). `pages`: of the engine's pool.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        calls: SchedulerCalls,
        threads: Threads,
        *,
        block_tokens: int,
        pages: int,
        extra_of: Callable[[Any, int], Sequence[bytes]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.namespace: bytes | None = None
        self._options = options
        self._calls = calls
        self._threads = threads
        self._block_tokens = block_tokens
        self._pages = pages
        self._extra_of = extra_of
        self._clock = clock
        self._turns: dict[str, _Turn] = {}
        self._saving: dict[str, int] = {}  # request -> pages
        self._recent = RecentStores()
        self._jobs = Jobs()
        self.worth = Worth(block_tokens, FETCHES_AT_ONCE, clock)
        self._hurry_until_s = float("-inf")
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def begin(self, request: Any) -> None:
        """Look a new request up."""
        ids = request.prompt_token_ids
        if self.namespace is None or ids is None or getattr(request, "prompt_embeds", None) is not None:
            return
        blocks = (len(ids) - 1) // self._block_tokens  # the last token is always computed
        try:
            extra = tuple(self._extra_of(request, len(ids)))
        except ValueError as error:
            self.counts["unnamed"] += 1
            logger.info("request %s: the tiers are not used: %s", request.request_id, error)
            return
        tenant, session = self._owner(request)
        turn = _Turn(self.namespace, tenant, session, self._clock(), len(ids), extra)
        self._turns[request.request_id] = turn
        self._threads.lookups.submit(self._look, turn, tuple(ids), blocks)

    def _look(self, turn: _Turn, ids: tuple[int, ...], blocks: int) -> None:
        try:
            turn.keys = chain_keys(turn.namespace, ids, turn.extra, self._block_tokens)
            keys = b"".join(turn.keys[:blocks])
            turn.found = self._calls.lookup(
                Lookup(
                    turn.namespace,
                    keys,
                    turn.tenant,
                    turn.session,
                    starts_turn=True,
                    wait_s=self._options.lookup_s_max,
                )
            )
        except Exception:  # a lookup that fails has found nothing
            logger.exception("a lookup failed")
        turn.is_answered = True

    def matched(self, request: Any, computed: int) -> int | None:
        """Return how many tokens behind `computed` are to be loaded; None: ask again."""
        turn = self._turns.get(request.request_id)
        if turn is None or turn.is_asked or computed % self._block_tokens:
            return 0
        if not turn.is_answered:
            now_s = self._clock()
            share = HURRY_SHARE if now_s < self._hurry_until_s else 1.0
            if now_s - turn.began_s < share * self._options.lookup_s_max:
                return None
            if now_s >= self._hurry_until_s:
                self._hurry_until_s = now_s + HURRY_S
            turn.why = turn.why or "lookup late"
            return 0
        if turn.found is None:
            turn.why = turn.why or "no answer"
            return 0
        first = computed // self._block_tokens
        if turn.plan is None or turn.plan[0] != first:  # it is asked again and again while blocks are fetched
            spans = spans_behind(turn.found.spans, first, (turn.tokens - 1) // self._block_tokens)
            turn.plan = (first, self._worth(turn, first, spans))
        wanted = turn.plan[1]
        if wanted and not self._is_here(turn, first, wanted):
            return None
        return sum(span.blocks for span in turn.plan[1]) * self._block_tokens

    def _worth(self, turn: _Turn, first: int, spans: Sequence[BlockRange]) -> tuple[BlockRange, ...]:
        """Return the leading spans that are cheaper to load than to compute."""
        assert turn.found is not None
        if not spans:
            turn.why = turn.why or "nothing there"
            return ()
        chosen = self.worth.leading(turn.tokens, first, spans, turn.found.prices)
        if not chosen:
            turn.why = turn.why or "cheaper to compute"
        return tuple(spans[:chosen])

    def _is_here(self, turn: _Turn, first: int, wanted: Sequence[BlockRange]) -> bool:
        """Return whether the load may begin: what is below main memory is brought there meanwhile."""
        below = [span for span in wanted if span.tier != CPU.name]
        end = wanted[-1].first + wanted[-1].blocks
        if not below or (turn.fetched is not None and turn.fetched >= end):
            return True
        if turn.fetched is None:  # under way
            if self._clock() - turn.fetch_began_s < self._options.load_s_max:
                return False
            turn.why, turn.plan, turn.is_asked = "load late", (first, ()), True
            return True
        turn.fetched, turn.fetch_began_s, turn.fetches = None, self._clock(), len(below)
        for span in below:
            self._threads.fetches.submit(self._bring, turn, span, end)
        return False

    def _bring(self, turn: _Turn, span: BlockRange, end: int) -> None:
        try:
            if not turn.is_over:
                self._calls.fetch(fetch_of(turn.namespace, span, self._options.load_s_max))
        except Exception:  # the worker finds out, and the rest is computed
            logger.exception("a fetch failed")
        with self._lock:
            turn.fetches -= 1
            if not turn.fetches:
                turn.fetched = end

    def allocated(self, request: Any, page_ids: Sequence[int], tokens: int) -> None:
        """Begin the load of `tokens`, for which there are pages now. `page_ids`: all of the request.

        What is not as it was planned is a load of nothing: its pages are told as bad, and computed.
        """
        if not tokens:
            return
        turn = self._turns.get(request.request_id)
        first, spans = (turn.plan if turn else None) or (0, ())
        blocks = tokens // self._block_tokens
        pages = tuple(page_ids[first : first + blocks])
        if turn is None or len(pages) != blocks or sum(span.blocks for span in spans) != blocks:
            logger.error("request %s: %d blocks were not planned to be loaded", request.request_id, blocks)
            load = Load(request.request_id, b"", (), 0, (), tuple(page_ids[-blocks:]))
        else:
            keys = tuple(turn.keys[first : first + blocks])
            load = Load(request.request_id, turn.namespace, spans, first, keys, pages)
        if turn is not None:
            turn.is_asked, turn.is_loading, turn.pages = True, True, load.pages
            self._count_loaded(turn, load.spans, first + blocks)
        self._jobs.loads.append(load)

    def _count_loaded(self, turn: _Turn, spans: Sequence[BlockRange], end: int) -> None:
        turn.loaded = {}
        for span in spans:
            tokens = max(0, min(span.first + span.blocks, end) - span.first) * self._block_tokens
            if tokens:
                turn.loaded[span.tier] = turn.loaded.get(span.tier, 0) + tokens

    def loaded_from(self, request: Any) -> Mapping[LoadSource, int]:
        """Return the tokens that are loaded for a request, by tier."""
        turn = self._turns.get(request.request_id)
        return {} if turn is None else dict(turn.loaded)

    def step(self, new_tokens: int, context_tokens: int) -> Jobs:
        """Return the jobs of a step that computes `new_tokens` behind `context_tokens` each on average."""
        self.worth.step(new_tokens, context_tokens)
        jobs, self._jobs = self._jobs, Jobs()
        return jobs

    def stepped(self, received: Iterable[str], sent: Iterable[str], bad_pages: Iterable[int]) -> None:
        """Take in what a step has ended: loads, stores, and the pages that could not be loaded."""
        bad = set(bad_pages)
        for request_id in received:
            turn = self._turns.get(request_id)
            if turn is not None:
                turn.is_loading = False
                good = next((at for at, page in enumerate(turn.pages) if page in bad), None)
                if good is not None and turn.plan is not None:
                    turn.why = turn.why or "a block was bad"
                    self._count_loaded(turn, turn.plan[1], turn.plan[0] + good)
        for request_id in sent:
            self._saving.pop(request_id, None)

    def ended(self, request: Any, page_ids: Sequence[int], stop: Stop) -> tuple[bool, dict[str, Any] | None]:
        """End a request. Return whether its pages are kept until they are stored, and the receipt."""
        turn = self._turns.pop(request.request_id, None)
        if turn is None:
            return False, None
        turn.is_over = True
        receipt = {"tokens_by_tier": dict(turn.loaded), "missed": turn.why}
        if turn.is_loading or turn.found is None or self.namespace is None:
            return False, {"samovar": receipt}
        # vLLM counts tokens of steps that are still under way as computed (asynchronous scheduling).
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        sure = min(request.num_computed_tokens - in_flight, request.num_tokens - 1)
        blocks = min(sure // self._block_tokens, len(page_ids))
        self._threads.lookups.submit(self._tell, turn, request.num_tokens - turn.tokens, stop)
        ids = request.all_token_ids
        try:
            extra = tuple(self._extra_of(request, blocks * self._block_tokens))
        except ValueError:
            return False, {"samovar": receipt}
        asked = turn.keys[:blocks]
        answered = tuple(ids[len(asked) * self._block_tokens : blocks * self._block_tokens])
        parent = asked[-1] if asked else ROOT
        keys = asked + chain_keys(turn.namespace, answered, extra[len(asked) :], self._block_tokens, parent)
        held = self._recent.held(keys, kept_front(turn.found.spans), turn.began_s)
        pages = tuple(page_ids[held:blocks])
        if not pages or 0 in pages:  # 0: vLLM's null block, of a window that has passed
            return False, {"samovar": receipt}
        if sum(self._saving.values()) + len(pages) > SAVING_SHARE * self._pages:
            self.counts["stores refused: pages"] += 1
            return False, {"samovar": receipt}
        self._recent.add(keys[held:], self._clock())
        self._jobs.stores.append(
            Store(
                request.request_id,
                turn.namespace,
                turn.tenant,
                turn.session,
                keys[held - 1] if held else ROOT,
                held,
                tuple(ids[held * self._block_tokens : blocks * self._block_tokens]),
                extra[held:blocks],
                pages,
                turn.found.incarnation,
                turn.found.clear_seq,
                self.worth.compute_s(len(pages) * self._block_tokens, held),
            )
        )
        self._saving[request.request_id] = len(pages)
        return True, {"samovar": receipt | {"stored_blocks": len(pages)}}

    def _tell(self, turn: _Turn, output_tokens: int, stop: Stop) -> None:
        over = TurnEnded(
            turn.tenant,
            turn.session,
            self._clock() - turn.began_s,
            turn.tokens,
            max(output_tokens, 0),
            marks_of(turn.keys),
            self._block_tokens,
            stop=stop,
        )
        try:
            self._calls.turn_over(over)
        except Exception:
            logger.exception("a turn's end was not told")

    def clear(self, timeout_s: float) -> bool:
        """Clear what the connector's own tenant has stored; False: the tiers did not answer.

        Nothing that was stored before is found any more, whosoever it was and whether they answered: weights
        may have been changed in place, and then the namespace that was made of their files means nothing.
        """
        if self.namespace is not None:
            self.namespace = hashlib.sha256(self.namespace + os.urandom(TAG_BYTES)).digest()
        try:
            self._calls.clear(Clear(self._tenant(self._options.tenant)), timeout_s)
        except TimeoutError:
            return False
        return True

    @property
    def is_saving(self) -> bool:
        """Whether stores keep pages that will be free soon."""
        return bool(self._saving)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        loading = {load.request_id for load in self._jobs.loads}
        for request_id in loading & self._turns.keys():
            assert self._turns[request_id].is_loading, f"{request_id} is to be loaded, and is not loading"
        assert all(pages > 0 for pages in self._saving.values()), "a store without pages"

    def _owner(self, request: Any) -> tuple[bytes, bytes]:
        """Return the tags of tenant and session. What a client says of itself counts only where it may."""
        said = getattr(request, "kv_transfer_params", None) or {}
        trusts = self._options.trusts_clients and isinstance(said, dict)
        tenant = said.get("tenant") if trusts else None
        session = (said.get("session") if trusts else None) or getattr(request, "session_id", None)
        tag = self._tenant(tenant if isinstance(tenant, str) and tenant else self._options.tenant)
        if not isinstance(session, str) or not session:
            session = request.request_id
        return tag, tenant_tag(tag, session)[:SESSION_BYTES].ljust(TAG_BYTES, b"\0")

    def _tenant(self, tenant: str) -> bytes:
        return tenant_tag(self._options.secret.encode() or b"samovar vllm", tenant)


def spans_behind(spans: Sequence[BlockRange], first: int, end: int) -> list[BlockRange]:
    """Return what there is of blocks `[first, end)` from the first on, without a gap, cut to it."""
    found: list[BlockRange] = []
    for span in sorted(spans, key=lambda one: one.first):
        last = min(span.first + span.blocks, end)
        if last <= first:
            continue
        if span.first > first:
            break
        found.append(
            BlockRange(
                span.extent_id,
                span.tenant,
                first,
                span.offset + first - span.first,
                last - first,
                span.tier,
                span.nbytes * (last - first) // span.blocks,
                span.node,
            )
        )
        first = last
    return found


def kept_front(spans: Sequence[BlockRange]) -> int:
    """Return how many blocks from the chain's beginning the tiers had, without a gap."""
    return sum(span.blocks for span in spans_behind(spans, 0, 1 << 62))


def fetch_of(namespace: bytes, span: BlockRange, deadline_s: float) -> Fetch:
    """Return the request for a span's blocks."""
    return Fetch(
        namespace, span.tenant, span.extent_id, span.offset, span.blocks, span.tier, deadline_s, span.node
    )
