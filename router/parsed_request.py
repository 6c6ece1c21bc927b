"""What a client asked for, after every check: plain frozen data.

Knows nothing of HTTP, JSON or OpenAI's field names beyond their meaning; made by
`parse_request.py`, used by the prompt builder, the session key and the answer shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from configs.tier_settings import ProfileName
from replicas.messages import SamplingParams

Role = Literal["system", "user", "assistant"]
Retention = Literal["in_memory", "24h"]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message; `developer` has become `system`, text parts have been joined."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class SamplingAsk:
    """`SamplingParams` before the length of the prompt is known: `max_tokens=None` = what is left."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def params(self, max_tokens: int) -> SamplingParams:
        """The engine's parameters, for an answer of at most `max_tokens` tokens."""
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            logprobs=self.logprobs,
        )


@dataclass(frozen=True, slots=True)
class BodyIds:
    """Names in the body that say whose conversation this is. Not yet checked for odd characters."""

    session_id: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class CacheWish:
    """How long, and how low in the tiers, the client lets its blocks live (`ttl_s`: at least).

    `profile`: the use case, as the body names it.
    """

    profile: ProfileName | None = None
    retention: Retention | None = None
    mode: str | None = None
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """What chat and completions have in common. `ignored_fields` are those nobody read."""

    model: str
    sampling: SamplingAsk
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    ids: BodyIds = field(default_factory=BodyIds)
    cache: CacheWish = field(default_factory=CacheWish)
    metadata: Mapping[str, str] = field(default_factory=dict)
    ignored_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedChat(ParsedRequest):
    """A conversation that waits for its next turn."""

    messages: tuple[ChatMessage, ...]
    template_kwargs: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion(ParsedRequest):
    """Texts, or token ids, to go on from: `n` answers to each."""

    prompts: tuple[str | tuple[int, ...], ...]
