"""State of one answer: everything the replicas have sent so far, for all prompts and choices.

Takes events, returns numbered deltas and keeps the totals. Choices are numbered consecutively: prompt `p`
of a request with `n` answers each has the choices `p*n .. p*n+n-1`. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from samovar.cache_tiers.blocks import sources
from samovar.configs.telemetry import Value
from samovar.replicas.messages import Admitted, Delta, Event, Failed, Receipt, Refused, Source
from samovar.router.generation.stages import Context
from samovar.router.openai import (
    ApiError,
    Choice,
    InvalidValue,
    ParsedRequest,
    ShownPrompt,
    TooManyRequests,
    Usage,
)
from samovar.router.prompt import PrefixLeft, Prompt
from samovar.router.routing import ReplicaFailed, ReplicaLost


@dataclass(frozen=True, slots=True)
class AnswerReceipt:
    """The receipts of all prompts of a request as one: the answer's `receipt` and its `x-cache` header.

    `tokens` has all sources, summed over the prompts; times are those of the slowest prompt, in seconds.
    `missed`: tokens that an earlier turn had computed and that were computed again, by reason.
    `kept_by`: what was done to keep the prompts' prefixes equal. `contexts`: what the stages of a chat's
    prompt did to it, by their names.
    """

    tokens: Mapping[Source, int]
    decision: str = "none"
    load_s: float = 0.0
    saved_s: float = 0.0
    load_price_s: float = 0.0
    recompute_price_s: float = 0.0
    miss: str = ""
    missed: Mapping[str, int] = field(default_factory=dict)
    replica_ids: Sequence[str] = field(default_factory=list)
    kept_by: Sequence[str] = ()
    request_id: str = ""
    contexts: Mapping[str, Context] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed for this request."""
        return sum(self.by_tier.values())

    @property
    def by_tier(self) -> dict[str, int]:
        """`cached_tokens` by source."""
        return {source: count for source, count in self.tokens.items() if source != "compute"}

    def json(self) -> dict[str, Any]:
        """Return the top-level `receipt` of an answer; times in milliseconds."""
        return {
            "tokens": dict(self.tokens),
            "decision": self.decision,
            "load_ms": _ms(self.load_s),
            "recompute_ms_avoided": _ms(self.saved_s),
            "load_price_ms": _ms(self.load_price_s),
            "recompute_price_ms": _ms(self.recompute_price_s),
            "miss": self.miss or None,
            "missed": dict(self.missed) or None,
            "prefix": list(self.kept_by) or None,
            "replica": list(self.replica_ids),
            "request_id": self.request_id or None,
            **{name: context.told(self.cached_tokens) for name, context in self.contexts.items()},
        }

    def header(self) -> str:
        """Return the value of `x-cache`: `miss` or `hit; tokens=N`, then tiers, decision and load time."""
        cached = self.cached_tokens
        parts = [f"hit; tokens={cached}" if cached > 0 else "miss"]
        parts += [f"{source}={count}" for source, count in self.by_tier.items() if count]
        if self.decision != "none":
            parts.append(f"decision={self.decision}")
        if self.load_s > 0:
            parts.append(f"load_ms={_ms(self.load_s)}")
        return "; ".join(parts)


def joined(receipts: Iterable[tuple[Receipt, int, int]], replica_ids: Sequence[str]) -> AnswerReceipt:
    """Join receipts into one, given (receipt, prompt tokens, cached tokens) of each prompt.

    A receipt without tokens is from a replica without tiers: its cached tokens came from the pool.
    """
    tokens: dict[Source, int] = dict.fromkeys(sources(), 0)
    missed: Counter[str] = Counter()
    parts = []
    for receipt, prompt_tokens, cached_tokens in receipts:
        own = receipt.tokens or {"gpu": cached_tokens, "compute": prompt_tokens - cached_tokens}
        for source, count in own.items():
            tokens[source] = tokens.get(source, 0) + count  # of a replica with a tier not known here, too
        missed.update(receipt.missed)
        parts.append(receipt)
    return AnswerReceipt(
        tokens=tokens,
        decision=_together((part.decision for part in parts), "none"),
        load_s=max((part.load_s for part in parts), default=0.0),
        saved_s=max((part.saved_s for part in parts), default=0.0),
        load_price_s=max((part.load_price_s for part in parts), default=0.0),
        recompute_price_s=max((part.recompute_price_s for part in parts), default=0.0),
        miss=_together((part.miss for part in parts), ""),
        missed=missed,
        replica_ids=replica_ids,
    )


def _together(words: Iterable[str], nothing: str) -> str:
    """Join the distinct words in their order, without those equal to `nothing`."""
    return "+".join(dict.fromkeys(word for word in words if word != nothing)) or nothing


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class Answer:
    """State of one request: `n` choices for each of `prompts`.

    `generates`: False: what the replicas sample is dropped, only the prompts were to be computed.
    `contexts`: what stages did to the first prompt, by their names.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        n: int,
        retry_after_s: float,
        *,
        generates: bool = True,
        request_id: str = "",
        contexts: Mapping[str, Context] | None = None,
    ) -> None:
        self.prompts = prompts
        self._n = n
        self._generates = generates
        self._request_id = request_id
        self._contexts = contexts or {}
        self._retry_after_s = retry_after_s
        self._admitted: dict[int, Admitted] = {}
        self._replica_ids: set[str] = set()
        self._homes: dict[int, str] = {}
        self._receipt: AnswerReceipt | None = None  # until another prompt is computed
        self.choices = [Choice(index, prompts[index // n].reading) for index in range(n * len(prompts))]
        self._open = len(self.choices)

    @property
    def is_admitted(self) -> bool:
        """Whether every prompt is computed, so that the receipt is final."""
        return len(self._admitted) == len(self.prompts)

    @property
    def admissions(self) -> list[tuple[int, Admitted]]:
        """Tokens and admission of each prompt that is computed, in order."""
        return [(len(self.prompts[index].token_ids), one) for index, one in sorted(self._admitted.items())]

    @property
    def computed_prompts(self) -> list[int]:
        """The prompts that are computed, by number."""
        return sorted(self._admitted)

    @property
    def prompt_parts(self) -> list[ShownPrompt]:
        """What the answer may show of its prompts, as far as they are computed."""
        shown = []
        for index, prompt in enumerate(self.prompts):
            admitted = self._admitted.get(index)
            if admitted is None:
                shown.append(ShownPrompt(prompt.token_ids, prompt.echo))
                continue
            whole = joined([(admitted.receipt, len(prompt.token_ids), admitted.cached_tokens)], ())
            shown.append(ShownPrompt(prompt.token_ids, prompt.echo, admitted.prompt_logprobs, whole.by_tier))
        return shown

    def choices_of(self, prompt_index: int) -> range:
        """Return the numbers of a prompt's choices."""
        return range(prompt_index * self._n, (prompt_index + 1) * self._n)

    @property
    def is_over(self) -> bool:
        """Whether every choice has its finish reason."""
        return not self._open

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
        """Sources of the prompts' KV, for the prompts computed so far."""
        if self._receipt is None:  # every delta asks for it
            self._receipt = self._joined()
        return self._receipt

    def _joined(self) -> AnswerReceipt:
        of_prompts = [
            (admitted.receipt, len(self.prompts[index].token_ids), admitted.cached_tokens)
            for index, admitted in sorted(self._admitted.items())
        ]
        whole = joined(of_prompts, self.replica_ids)
        misses = (whole.miss, *map(str, self.prefixes_left))
        kept_by = dict.fromkeys(word for prompt in self.prompts for word in prompt.kept_by)
        return replace(
            whole,
            miss=_together(misses, ""),
            kept_by=list(kept_by),
            request_id=self._request_id,
            contexts=self._contexts,
        )

    def attributes(self, tenant: str, *, stream: bool) -> dict[str, Value]:
        """Return what the request's span says of it: its receipt and its numbers, never its text."""
        usage, receipt = self.usage(), self.receipt.json()
        tokens: dict[str, int] = receipt.pop("tokens")
        del receipt["request_id"]  # its span has it
        lists = {name: ",".join(found) for name, found in receipt.items() if isinstance(found, list)}
        plain = {name: value for name, value in receipt.items() if isinstance(value, str | int | float)}
        found: dict[str, Value] = {
            f"samovar.receipt.{name}": value
            for name, value in (
                plain | lists | {f"tokens.{source}": n for source, n in tokens.items()}
            ).items()
        }
        return found | {
            "samovar.tenant": tenant,
            "samovar.stream": stream,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
        }

    @property
    def prefixes_left(self) -> list[PrefixLeft]:
        """Where prompts left the prefix of the ones before, if that is why no more of them was cached."""
        return [
            left
            for index, admitted in sorted(self._admitted.items())
            if (left := self.prompts[index].left) is not None and admitted.cached_tokens <= left.until
        ]

    @property
    def replica_ids(self) -> list[str]:
        """The replicas that serve it, or served it until they were lost, each once."""
        return sorted(self._replica_ids)

    def home(self, prompt_index: int = 0) -> str:
        """Return the last replica that admitted a prompt: its blocks are there. Empty: none has."""
        return self._homes.get(prompt_index, "")

    def chain_tokens(self, prompt_index: int = 0) -> int:
        """Return the tokens of a prompt and its first answer: the prefix of the next turn."""
        return len(self.prompts[prompt_index].token_ids) + len(self.choices[prompt_index * self._n].token_ids)

    def calls_tool(self, prompt_index: int = 0) -> bool:
        """Whether a prompt's first answer ended with a tool call, so that the tool's result will follow."""
        choice = self.choices[prompt_index * self._n]
        return choice.finish_reason == "stop" and choice.reply.ends_in_calls

    def usage(self) -> Usage:
        """Return the totals so far."""
        completion_tokens = sum(len(choice.token_ids) for choice in self.choices)
        return Usage(self.prompt_tokens, completion_tokens, self.receipt.by_tier)

    def prompt_of(self, choice: Choice) -> Prompt:
        """Return the prompt that `choice` answers."""
        return self.prompts[choice.index // self._n]

    def resumes_apart(self, events: Sequence[Event]) -> bool:
        """Return whether these events begin the rest of one choice of several, on a replica of its own."""
        is_resumed = self._n > 1 and any(isinstance(event, Admitted) for event in events)
        return is_resumed and any(choice.token_ids for choice in self.choices)

    def apply(self, prompt_index: int, events: Sequence[Event]) -> list[tuple[int, Delta]]:
        """Apply events of one prompt; return (choice index, delta) of those that carry tokens or an end.

        An answer that is resumed on another replica is admitted again; the receipt of the first admission
        is kept. Raises `ApiError` for a refusal, `ReplicaLost` if the replica is lost, and `ReplicaFailed`
        if it gave up the request or broke the protocol of `messages.py`.
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
                self._homes[prompt_index] = event.replica_id
                self._receipt = None
                continue
            if prompt_index not in self._admitted or not 0 <= event.index < self._n:
                raise ReplicaFailed(f"a delta of choice {event.index} of {self._n}, or before its admission")
            choice = self.choices[prompt_index * self._n + event.index]
            if choice.finish_reason is not None:
                raise ReplicaFailed(f"a delta of choice {choice.index} after its end")
            if not self._generates:
                event = Delta(event.index, "", (), finish_reason=event.finish_reason and "length")
            choice.add(event)
            self._open -= event.finish_reason is not None
            deltas.append((choice.index, event))
        return deltas


def refusal(refused: Refused, retry_after_s: float) -> ApiError:
    """Return the HTTP error for a replica's refusal."""
    wait_s = retry_after_s if refused.retry_after_s is None else refused.retry_after_s
    if refused.reason == "queue_full":
        return TooManyRequests(refused.message, wait_s, code="queue_full")
    if refused.reason == "invalid":
        return InvalidValue(refused.param or "prompt", refused.message)
    return ApiError(400, refused.message, code="context_length_exceeded")


IGNORED_SHOWN_MAX = 32
HEADER_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-$[]")


def answer_headers(answer: Answer, request: ParsedRequest) -> dict[str, str]:
    """Return the headers known now: replicas, cache result and ignored request fields.

    Replicas and cache result are left out until every prompt is computed.
    """
    headers = {}
    if answer.is_admitted:
        headers = {"x-replica": ",".join(answer.replica_ids), "x-cache": answer.receipt.header()}
    names = [_safe(name) for name in request.ignored_fields[:IGNORED_SHOWN_MAX]]
    if names:
        headers["x-ignored-fields"] = ", ".join(names)
    return headers


def _safe(name: str) -> str:
    """Make a field name chosen by the client safe for a header."""
    return "".join(char if char in HEADER_SAFE else "?" for char in name[:64])
