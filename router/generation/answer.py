"""One answer in the making: what replicas have said so far, for all prompts and choices.

Takes events in, gives numbered deltas out and keeps the totals. Choices are numbered through:
prompt `p` of a request with `n` answers each holds the choices `p*n .. p*n+n-1`. Pure; knows
nothing of HTTP or of where events come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from replicas.messages import Admitted, Delta, Event, Failed, Receipt, Refused, Source
from router.openai import ApiError, Choice, InvalidValue, ParsedRequest, TooManyRequests, Usage
from router.prompt import Prompt
from router.routing import ReplicaFailed, ReplicaLost

# What an answer says about its own use of the cache: the receipt in its body, the `x-cache` header.
#
# Several prompts of one request make one receipt: tokens are summed, times are those of the slowest.
# Pure; knows nothing of HTTP or of how the numbers came about (see `replicas.messages.Receipt`).

SOURCES: tuple[Source, ...] = get_args(Source)
CACHED: tuple[Source, ...] = tuple(source for source in SOURCES if source != "compute")


@dataclass(frozen=True, slots=True)
class AnswerReceipt:
    """The receipts of all prompts of a request as one. `tokens` has all sources; times in seconds."""

    tokens: Mapping[Source, int]
    decision: str = "none"
    load_s: float = 0.0
    saved_s: float = 0.0
    load_price_s: float = 0.0
    recompute_price_s: float = 0.0
    miss: str = ""
    replica_ids: Sequence[str] = field(default_factory=list)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed for this request."""
        return sum(self.tokens[source] for source in CACHED)

    @property
    def by_tier(self) -> dict[str, int]:
        """`cached_tokens` by where they came from."""
        return {source: self.tokens[source] for source in CACHED}

    def json(self) -> dict[str, Any]:
        """The top-level `receipt` of an answer; times in milliseconds."""
        return {
            "tokens": dict(self.tokens),
            "decision": self.decision,
            "load_ms": _ms(self.load_s),
            "recompute_ms_avoided": _ms(self.saved_s),
            "load_price_ms": _ms(self.load_price_s),
            "recompute_price_ms": _ms(self.recompute_price_s),
            "miss": self.miss or None,
            "replica": list(self.replica_ids),
        }

    def header(self) -> str:
        """The value of `x-cache`: `miss` or `hit; tokens=N`, then what else there is to say."""
        cached = self.cached_tokens
        parts = [f"hit; tokens={cached}" if cached > 0 else "miss"]
        parts += [f"{source}={count}" for source, count in self.by_tier.items() if count]
        if self.decision != "none":
            parts.append(f"decision={self.decision}")
        if self.load_s > 0:
            parts.append(f"load_ms={_ms(self.load_s)}")
        return "; ".join(parts)


def joined(receipts: Iterable[tuple[Receipt, int, int]], replica_ids: Sequence[str]) -> AnswerReceipt:
    """One receipt of many: (receipt, prompt tokens, cached tokens) of each prompt.

    A receipt without tokens is that of a replica without tiers: what is cached came from its pool.
    """
    tokens: dict[Source, int] = dict.fromkeys(SOURCES, 0)
    parts = []
    for receipt, prompt_tokens, cached_tokens in receipts:
        own = receipt.tokens or {"gpu": cached_tokens, "compute": prompt_tokens - cached_tokens}
        for source, count in own.items():
            tokens[source] += count
        parts.append(receipt)
    return AnswerReceipt(
        tokens=tokens,
        decision=_together((part.decision for part in parts), "none"),
        load_s=max((part.load_s for part in parts), default=0.0),
        saved_s=max((part.saved_s for part in parts), default=0.0),
        load_price_s=max((part.load_price_s for part in parts), default=0.0),
        recompute_price_s=max((part.recompute_price_s for part in parts), default=0.0),
        miss=_together((part.miss for part in parts), ""),
        replica_ids=replica_ids,
    )


def _together(words: Iterable[str], nothing: str) -> str:
    """The different words in their order, without those that say nothing."""
    return "+".join(dict.fromkeys(word for word in words if word != nothing)) or nothing


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class Answer:
    """State of one request: `n` choices for each of `prompts`."""

    def __init__(self, prompts: Sequence[Prompt], n: int, retry_after_s: float) -> None:
        self.prompts = prompts
        self._n = n
        self._retry_after_s = retry_after_s
        self._admitted: dict[int, Admitted] = {}
        self._replica_ids: set[str] = set()
        self.home = ""
        """The replica that was the last to take it on: the session's blocks are there."""
        self.choices = [Choice(index) for index in range(n * len(prompts))]

    @property
    def is_admitted(self) -> bool:
        """Whether every prompt is computed, so that the receipt is final."""
        return len(self._admitted) == len(self.prompts)

    @property
    def is_over(self) -> bool:
        """Whether every choice has its finish reason."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def queue_s(self) -> float:
        """The longest wait of a prompt for its first pages."""
        return max((admitted.queue_s for admitted in self._admitted.values()), default=0.0)

    @property
    def receipt(self) -> AnswerReceipt:
        """Where the prompts' KV came from, as far as they are computed."""
        of_prompts = [
            (admitted.receipt, len(self.prompts[index].token_ids), admitted.cached_tokens)
            for index, admitted in sorted(self._admitted.items())
        ]
        return joined(of_prompts, self.replica_ids)

    @property
    def replica_ids(self) -> list[str]:
        """The replicas that serve it or did until they were lost, each once."""
        return sorted(self._replica_ids)

    @property
    def chain_tokens(self) -> int:
        """Length of the first prompt with its first answer: what the next turn begins with."""
        if not self.prompts:
            return 0
        return len(self.prompts[0].token_ids) + len(self.choices[0].token_ids)

    def usage(self) -> Usage:
        """Totals so far."""
        completion_tokens = sum(len(choice.token_ids) for choice in self.choices)
        return Usage(self.prompt_tokens, completion_tokens, self.receipt.by_tier)

    def prompt_of(self, choice: Choice) -> Prompt:
        """The prompt that `choice` answers."""
        return self.prompts[choice.index // self._n]

    def apply(self, prompt_index: int, events: Sequence[Event]) -> list[tuple[int, Delta]]:
        """Take in events of one prompt; (choice index, delta) of those that carry tokens or an end.

        An answer that went on elsewhere is admitted again; what its receipt says is how it began.
        Raises `ApiError` for a refusal, `ReplicaLost` when the replica goes away, and `ReplicaFailed`
        when it gave this request up or broke the protocol of `messages.py`.
        """
        deltas = []
        for event in events:
            if isinstance(event, Refused):
                raise refusal(event, self._retry_after_s)
            if isinstance(event, Failed):
                raise ReplicaLost(event.message) if event.replica_lost else ReplicaFailed(event.message)
            if isinstance(event, Admitted):
                self._admitted.setdefault(prompt_index, event)
                self._replica_ids.add(event.replica_id)
                self.home = event.replica_id
                continue
            if prompt_index not in self._admitted or not 0 <= event.index < self._n:
                raise ReplicaFailed(f"a delta of choice {event.index} of {self._n}, or before its admission")
            choice = self.choices[prompt_index * self._n + event.index]
            if choice.finish_reason is not None:
                raise ReplicaFailed(f"a delta of choice {choice.index} after its end")
            choice.add(event)
            deltas.append((choice.index, event))
        return deltas


def refusal(refused: Refused, retry_after_s: float) -> ApiError:
    """The HTTP error of a replica's refusal."""
    wait_s = retry_after_s if refused.retry_after_s is None else refused.retry_after_s
    if refused.reason == "queue_full":
        return TooManyRequests(refused.message, wait_s, code="queue_full")
    if refused.reason == "invalid":
        return InvalidValue("prompt", refused.message)
    return ApiError(400, refused.message, code="context_length_exceeded")


# Headers of an answer that is under way: who serves it, what the cache gave, what nobody read. Pure.

IGNORED_SHOWN_MAX = 32
HEADER_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


def answer_headers(answer: Answer, request: ParsedRequest) -> dict[str, str]:
    """What is known now: nothing about replicas and cache before every prompt is computed."""
    headers = {}
    if answer.is_admitted:
        headers = {"x-replica": ",".join(answer.replica_ids), "x-cache": answer.receipt.header()}
    names = [_safe(name) for name in request.ignored_fields[:IGNORED_SHOWN_MAX]]
    if names:
        headers["x-ignored-fields"] = ", ".join(names)
    return headers


def _safe(name: str) -> str:
    """A field's name made safe for a header: clients chose it."""
    return "".join(char if char in HEADER_SAFE else "?" for char in name[:64])
