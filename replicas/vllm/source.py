"""What the engine asks of vLLM, and what comes back: plain data, of which `async_llm.py` makes vLLM's.

Ids go in and ids come out: text, stop strings and what an answer may look like are Samovar's for both
engines (`replicas/answers`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from samovar.replicas.messages import Sampled, SamplingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt for vLLM. `sampling`: arguments of vLLM's `SamplingParams`, `params` its `kv_transfer_params`.

    `salt`: pages are shared with prompts of the same salt alone. `grammar`: in llguidance's form; empty: any.
    `adapter`: its name; empty: none.
    """

    name: str
    token_ids: Sequence[int]
    sampling: dict[str, Any]
    salt: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    grammar: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of choice `index`. `cached_tokens`: of the prompt, found in pages or meant to be loaded.

    `ended`: vLLM's reason, once it computes no more of this choice. `prompt_scores`: of the prompt's tokens
    behind the first, with the first piece, where they are asked for.
    """

    index: int
    sampled: tuple[Sampled, ...]
    cached_tokens: int = 0
    ended: str = ""
    prompt_scores: tuple[Sampled, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """What vLLM's pool is made of. `pages`: one of them is vLLM's own; `bytes_per_token`: on all ranks."""

    dtype: str
    kv_dtype: str
    block_tokens: int
    bytes_per_token: int
    pages: int
    context_tokens_max: int
    device: str


class AskRefused(ValueError):
    """vLLM does not take a request, and says why."""


class SourceLost(RuntimeError):
    """vLLM's engine has ended."""


class TokenSource(Protocol):
    """vLLM. For one event loop."""

    def generate(self, ask: Ask) -> AsyncGenerator[list[Piece], None]:
        """Yield what is computed. Closing it aborts. Raises `AskRefused`, `SourceLost`."""

    @property
    def pool_share(self) -> float:
        """Return the share of the pool's pages in use."""

    def check(self) -> None:
        """Raise `SourceLost` if it computes nothing any more."""

    def close(self) -> None:
        """End it, and its processes. May take seconds."""


def vllm_sampling(
    params: SamplingParams, n: int, ends: Sequence[int], *, spent: int = 0, choice: int = 0
) -> dict[str, Any]:
    """Return arguments of vLLM's `SamplingParams`.

    `ends`: ids that end a turn. `spent`: tokens of answer `choice` that exist already. What ends an answer is
    given as stop tokens, as vLLM knows other ids than the model's template; stop strings are not vLLM's
    matter. vLLM draws choice c of a seed by that seed plus c.
    """
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else ends)}
    given: dict[str, Any] = {
        "n": n,
        "max_tokens": params.max_tokens - spent,
        "min_tokens": max(0, params.min_tokens - spent),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "seed": None if params.seed is None else (params.seed + choice) % 2**63,
        "ignore_eos": True,
        "stop_token_ids": sorted(stops),
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "allowed_token_ids": list(params.allowed_token_ids) or None,
        "logit_bias": dict(params.logit_bias) or None,
        "detokenize": False,
    }
    return given


def is_replayed(params: SamplingParams) -> bool:
    """Whether an answer that was begun elsewhere is computed again from its start, and compared.

    A grammar of vLLM's begins at the end of a prompt, and penalties count what was answered: both would be
    wrong behind tokens that are given as a prompt.
    """
    return params.grammar is not None or params.presence_penalty != 0 or params.frequency_penalty != 0
