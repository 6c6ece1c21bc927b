"""What an answer says about its own use of the cache: the receipt in its body, the `x-cache` header.

Several prompts of one request make one receipt: tokens are summed, times are those of the slowest.
Pure; knows nothing of HTTP or of how the numbers came about (see `replicas.messages.Receipt`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from replicas.messages import Receipt, Source

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
