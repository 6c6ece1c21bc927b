"""The spans of a replica: its calls of the tiers, and the parts of an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from samovar.cache_tiers.messages import (
    Fetch,
    Fetched,
    FetchFailed,
    Lookup,
    LookupResult,
    StoreReply,
    StoreRequest,
)
from samovar.configs.telemetry import Tracer, Value
from samovar.replicas.messages import Admitted, Event, Failed, Refused

if TYPE_CHECKING:
    from samovar.replicas.offload import TierLink


class TracedLink:
    """A `TierLink` whose lookups, loads and stores for traced requests are spans.

    The tiers get the context of that span, so that what they do for it stands below it.
    """

    def __init__(self, link: TierLink, tracer: Tracer) -> None:
        self._link = link
        self._tracer = tracer
        # What has no span goes straight to the link.
        self.report, self.clear, self.turn_over = link.report, link.clear, link.turn_over
        self.stats, self.ping, self.sample, self.measured = link.stats, link.ping, link.sample, link.measured

    def lookup(self, lookup: Lookup) -> LookupResult | None:
        if not lookup.trace:
            return self._link.lookup(lookup)
        with self._tracer.begin("lookup", lookup.trace) as span:
            found = self._link.lookup(replace(lookup, trace=span.trace))
            if found is None:
                span.fail("no answer")
            else:
                span.set({"samovar.blocks": sum(one.blocks for one in found.spans)})
            return found

    def fetch(self, fetch: Fetch) -> Fetched | FetchFailed:
        if not fetch.trace:
            return self._link.fetch(fetch)
        with self._tracer.begin("load", fetch.trace) as span:
            span.set({"samovar.tier": fetch.tier, "samovar.blocks": fetch.blocks})
            fetched = self._link.fetch(replace(fetch, trace=span.trace))
            if isinstance(fetched, FetchFailed):
                span.fail(fetched.reason)
            return fetched

    def offer(self, offers: Sequence[StoreRequest]) -> StoreReply:
        trace = offers[0].trace if offers else ""  # all are of one turn
        if not trace:
            return self._link.offer(offers)
        with self._tracer.begin("store", trace) as span:
            told = [replace(offer, trace=span.trace) for offer in offers]
            span.set({"samovar.extents": len(told), "samovar.bytes": sum(offer.nbytes for offer in told)})
            reply = self._link.offer(told)
            span.set({"samovar.taken": sum(outcome == "taken" for outcome in reply.outcomes)})
            return reply


class AnswerSpans:
    """Records the parts of one answer in a replica: queue, prefill, decode. Per answer, not per token.

    `trace`: context of the request's span; `clock`: the tracer's.
    """

    def __init__(self, tracer: Tracer, trace: str, replica_id: str, clock: Callable[[], float]) -> None:
        self._tracer = tracer
        self._trace = trace
        self._replica: dict[str, Value] = {"samovar.replica": replica_id}
        self._clock = clock
        self._since_s = clock()
        self._part = "queue"
        self.is_waiting = True  # for the prompt, or for a refusal

    def saw(self, events: Sequence[Event]) -> None:
        """Take in events while `is_waiting`; the first of a request says what became of its prompt."""
        for event in events:
            if isinstance(event, Refused):
                self._over(self._clock(), error=event.reason)
            elif isinstance(event, Failed):
                self._over(self._clock(), error="replica lost" if event.replica_lost else "failed")
            elif isinstance(event, Admitted):
                now_s = self._clock()
                self._over(min(now_s, self._since_s + max(0.0, event.queue_s)))
                self._part = "prefill"
                tokens: dict[str, Value] = {
                    f"samovar.tokens.{source}": count for source, count in event.receipt.tokens.items()
                }
                self._over(now_s, tokens)
                self._part = "decode"
            else:
                continue
            self.is_waiting = False
            return

    def end(self, *, is_complete: bool) -> None:
        """Record the last part. Not `is_complete`: the client went away, or the replica failed."""
        if not self.is_waiting and self._part != "decode":
            return
        self._over(self._clock(), error="" if is_complete else "not complete")

    def _over(self, end_s: float, attributes: dict[str, Value] | None = None, error: str = "") -> None:
        of = self._replica | (attributes or {})
        self._tracer.record(self._part, self._trace, self._since_s, end_s, of, error)
        self._since_s = end_s
