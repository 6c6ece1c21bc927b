"""The lookups of an engine's prompts: how long each is waited for, and when the tiers are asked again.

By the rule of our own engine (`replicas/offload/lookups.py`), but that nothing is computed meanwhile: vLLM
loads nothing into a prompt that it has begun. What takes time is done on the lane's threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol

from samovar.cache_tiers.messages import Lookup, LookupResult
from samovar.cache_tiers.pricing import AGAIN_S, next_again_s
from samovar.cache_tiers.vllm.names.chain import chain_keys, rank_name
from samovar.cache_tiers.vllm.spans import kept_front
from samovar.cache_tiers.vllm.worth import Worth

logger = logging.getLogger(__name__)

HURRY_S = 2.0
HURRY_SHARE = 0.1
"""So long after a lookup was late, others are waited for a tenth of the time: the node may hang."""
ALONE_S = 0.003
"""So long the engine's loop waits for an answer where it has no other request: it would spin meanwhile."""
LOOKUP_RATE = 0.2  # weight of a new measurement in the usual time of a lookup
USUAL_S_MAX = 0.25  # most that one measurement counts for

Extra = Callable[[int], Sequence[bytes]]
"""The extra digests of a request's blocks up to a token: of images, adapter, salt."""


class LookupCalls(Protocol):
    """See `SocketLink`."""

    def lookup(self, lookup: Lookup) -> LookupResult | None: ...


@dataclass(slots=True)
class PromptLookup:
    """A prompt at the tiers. Threads write it before `is_answered`, the engine's loop while that is set.

    `extra`, `keys`: None and empty until they were made, or if the request has no name. `found`: of each
    rank, what the tiers have; empty: nothing was heard. `is_settled`: nothing more is waited for. `why`: in
    a word or two, why nothing is loaded, or not all.
    """

    namespace: bytes
    tenant: bytes
    session: bytes
    began_s: float
    tokens: int
    wait_s: float
    peers: tuple[str, ...] = ()
    extra: Extra | None = None
    keys: list[bytes] = field(default_factory=list)
    found: tuple[LookupResult, ...] = ()
    is_answered: bool = False
    is_settled: bool = False
    again_s: float = AGAIN_S
    again_at_s: float | None = None
    why: str = ""
    is_over: bool = False
    was_heard: threading.Event = field(default_factory=threading.Event)


class Lookups:
    """Looks prompts up on the threads of `lane`. Called by the engine's loop alone.

    `ranks`: of the engine; each has records of its own. `s_max`: the longest wait. `heard`: is called on a
    thread whenever a prompt is answered.
    """

    def __init__(
        self,
        calls: LookupCalls,
        lane: Executor,
        worth: Worth,
        *,
        block_tokens: int,
        s_max: float,
        heard: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ranks = 1
        self._calls = calls
        self._lane = lane
        self._worth = worth
        self._block_tokens = block_tokens
        self._s_max = s_max
        self._heard = heard
        self._clock = clock
        self._usual_s = 0.0
        self._hurry_until_s = float("-inf")

    def open(
        self,
        namespace: bytes,
        owner: tuple[bytes, bytes],
        token_ids: Sequence[int],
        extra_of: Callable[[], Extra],
        peers: tuple[str, ...] = (),
    ) -> PromptLookup:
        """Begin a prompt's lookup. `owner`: tenant and session; `peers`: nodes that may have its blocks.

        `extra_of`: may take long, as it reads an adapter's files; raises `ValueError` if what the blocks
        depend on has no name: then the tiers are not used for it.
        """
        tokens = len(token_ids)
        wait_s = self._worth.wait_s(tokens - 1, 0, self._usual_s, self._s_max)
        prompt = PromptLookup(namespace, *owner, self._clock(), tokens, wait_s, peers)
        self._submit(prompt, self._begin, tuple(token_ids), extra_of)
        return prompt

    def is_over(self, prompt: PromptLookup, resident_tokens: int, *, is_alone: bool = False) -> bool:
        """Return whether nothing more is waited for; ask the tiers again if it is time.

        `resident_tokens`: of the prompt, in the engine's own pool. Called again and again until it is over.
        `is_alone`: the engine has no other request; then it blocks for `ALONE_S` at most, the first time.
        """
        if prompt.is_settled:
            return True
        if is_alone and not prompt.was_heard.is_set():
            self._wait_alone(prompt, resident_tokens)
        now_s, is_answered = self._clock(), prompt.is_answered
        if is_answered and not any(one.unlisted for one in prompt.found):
            prompt.is_settled = True
            if not prompt.found:
                prompt.why = prompt.why or "no answer"
            return True
        wait_s = self._wait_s(prompt, resident_tokens, now_s)
        if now_s - prompt.began_s >= wait_s:
            prompt.is_settled = True
            if not prompt.found:
                prompt.why = "lookup late" if wait_s > 0 else "too short to wait"
                if wait_s > 0 and now_s >= self._hurry_until_s:
                    self._hurry_until_s = now_s + HURRY_S
            return True
        if is_answered:
            if prompt.again_at_s is None:
                prompt.again_at_s = now_s + prompt.again_s
                prompt.again_s = next_again_s(prompt.again_s)
            if now_s >= prompt.again_at_s:
                prompt.again_at_s, prompt.is_answered = None, False
                self._submit(prompt, self._again)
        return False

    def _wait_s(self, prompt: PromptLookup, resident_tokens: int, now_s: float) -> float:
        """Return how long after its arrival a prompt is waited for: what is still missing says."""
        if prompt.found:
            known = max(resident_tokens, kept_front(prompt.found) * self._block_tokens)
            return min(prompt.wait_s, self._worth.wait_s(prompt.tokens - 1 - known, known, 0.0, self._s_max))
        missing = prompt.tokens - 1 - resident_tokens
        wait_s = self._worth.wait_s(missing, resident_tokens, self._usual_s, self._s_max)
        return (HURRY_SHARE if now_s < self._hurry_until_s else 1.0) * min(prompt.wait_s, wait_s)

    def _wait_alone(self, prompt: PromptLookup, resident_tokens: int) -> None:
        wait_s = min(ALONE_S, self._wait_s(prompt, resident_tokens, self._clock()))
        if wait_s > 0:
            prompt.was_heard.wait(wait_s)
        prompt.was_heard.set()  # once is enough

    def _submit(self, prompt: PromptLookup, work: Callable[..., None], *args: object) -> None:
        try:
            self._lane.submit(self._guarded, prompt, work, *args)
        except RuntimeError:  # it ends, or no thread can be started
            prompt.is_answered = True

    def _guarded(self, prompt: PromptLookup, work: Callable[..., None], *args: object) -> None:
        """Run on a thread of the lane: a lookup that fails has found nothing, and is over."""
        try:
            if not prompt.is_over:
                work(prompt, *args)
        except Exception:
            logger.exception("a lookup failed")
        prompt.is_answered = True
        prompt.was_heard.set()
        self._heard()

    def _begin(self, prompt: PromptLookup, token_ids: tuple[int, ...], extra_of: Callable[[], Extra]) -> None:
        try:
            extra = extra_of()
            keys = chain_keys(prompt.namespace, token_ids, extra(prompt.tokens), self._block_tokens)
        except ValueError as error:
            prompt.why = "has no name"
            logger.info("the tiers are not used for a request: %s", error)
            return
        prompt.extra, prompt.keys = extra, keys
        self._ask(prompt, starts_turn=True)

    def _again(self, prompt: PromptLookup) -> None:
        self._ask(prompt, starts_turn=False)

    def _ask(self, prompt: PromptLookup, *, starts_turn: bool) -> None:
        """Ask for each rank's records. If one is not answered the prompt has none."""
        keys = prompt.keys[: (prompt.tokens - 1) // self._block_tokens]  # the last token is always computed
        began_s, found, others_s = self._clock(), [], 0.0
        for rank in range(self.ranks):
            one = self._calls.lookup(
                Lookup(
                    rank_name(prompt.namespace, rank),
                    b"".join(rank_name(key, rank) for key in keys),
                    prompt.tenant,
                    prompt.session,
                    prompt.peers,
                    starts_turn=starts_turn and not rank,
                    wait_s=prompt.wait_s,
                )
            )
            if one is None:
                return  # what was found before, if this is not the first time
            found.append(one)
            others_s += sum(one.seconds.values())
        own_s = max(0.0, self._clock() - began_s - others_s)  # the rest is waited for on purpose
        self._usual_s += LOOKUP_RATE * (min(own_s, USUAL_S_MAX) - self._usual_s)
        self._worth.heard(found)
        prompt.found = tuple(found)
