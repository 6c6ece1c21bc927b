"""The tokenizer: its threads, in which tenants take turns by bytes of text, and what clients see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from samovar.configs.settings import LimitsSettings
from samovar.replicas.turns import PlacesTaken, TenantThreads
from samovar.router.openai import InvalidValue, TooManyRequests

CONFIG_FLAGS = (
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "clean_up_tokenization_spaces",
    "legacy",
)
"""What else of a tokenizer's configuration is shown: never paths."""


class TokenTable(Protocol):
    """The part of `tokenizers.Tokenizer` that names and joins tokens."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, id: int) -> str | None: ...


class ServedVocabulary:
    """Token ids of one model, to text and back to what they are called. Thread-safe.

    `tokens`: ids must be below it. `tokenizer`: a transformers fast tokenizer, for `config` only.
    """

    def __init__(self, table: TokenTable, tokenizer: Any, tokens: int, context_tokens_max: int) -> None:
        self._table = table
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._context_tokens_max = context_tokens_max

    def refuse_unknown(self, ids: Iterable[int], param: str) -> None:
        """Raise `InvalidValue` if the model does not have one of these ids."""
        largest = max(ids, default=0)  # at C's speed: a prompt may have a hundred thousand
        if largest >= self._tokens:
            message = f"{param} holds the token id {largest}; this model's ids end at {self._tokens - 1}."
            raise InvalidValue(param, message)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._table.decode(ids, skip_special_tokens=False)

    def names(self, ids: Sequence[int]) -> list[str]:
        """Return what the vocabulary calls each token; empty for an unused id."""
        return [self._table.id_to_token(token_id) or "" for token_id in ids]

    def marks(self) -> tuple[str, ...]:
        """Return the texts that the tokenizer takes for one token wherever they stand: `<|im_end|>`."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        texts = {str(token): getattr(token, "special", False) for token in added.values()}
        # Not runs of blanks, which some vocabularies add.
        return tuple(
            text for text, is_special in texts.items() if text.strip() and (is_special or "<" in text)
        )

    def config(self) -> dict[str, Any]:
        """Return the tokenizer's configuration as its `tokenizer_config.json` has it, without paths."""
        tokenizer = self._tokenizer
        special: Mapping[str, Any] = getattr(tokenizer, "special_tokens_map", {})
        names = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")) | {
            name: _plain(value) for name, value in special.items()
        }
        given: Mapping[str, Any] = getattr(tokenizer, "init_kwargs", {})
        flags = {name: given[name] for name in CONFIG_FLAGS if isinstance(given.get(name), bool)}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        return {
            "tokenizer_class": type(tokenizer).__name__,
            **names,
            **flags,
            "added_tokens_decoder": {str(token_id): _shown(token) for token_id, token in added.items()},
            "model_max_length": self._context_tokens_max,
            "chat_template": tokenizer.chat_template or None,
        }


def _plain(value: Any) -> Any:
    return [str(one) for one in value] if isinstance(value, list | tuple) else str(value)


def _shown(token: Any) -> dict[str, Any]:
    flags = {
        name: bool(getattr(token, name, False)) for name in ("lstrip", "rstrip", "single_word", "special")
    }
    return {"content": str(token), **flags, "normalized": bool(getattr(token, "normalized", False))}


Result = TypeVar("Result")


class TokenizerThreads:
    """Bounded tokenizer work for one event loop.

    `tenant_share`: share of the waiting places that one tenant may have.
    """

    def __init__(self, limits: LimitsSettings, tenant_share: float = 1.0) -> None:
        self._limits = limits
        self._turns = TenantThreads(
            "tokenizer",
            limits.tokenizer_threads,
            places=limits.tokenizer_threads + limits.tokenizer_queue_max,
            tenant_share=tenant_share,
            quantum=limits.tokenizer_quantum_bytes,
            weights=limits.tenant_weights,
        )

    async def run(self, tenant: str, works: Sequence[tuple[Callable[[], Result], int]]) -> list[Result]:
        """Run `works` (each with the bytes of its text) one after the other; return their results.

        Raises `TooManyRequests` before the first of them if too many wait.
        """
        results: list[Result] = []
        for number, (work, nbytes) in enumerate(works):
            # Queued one by one: a request of many long prompts holds a thread for one prompt at a time.
            results.append(await self.one(tenant, work, nbytes, must_run=number > 0))
        return results

    async def one(
        self,
        tenant: str,
        work: Callable[[], Result],
        nbytes: int,
        *,
        is_long: bool = False,
        must_run: bool = False,
    ) -> Result:
        """Return what `work` returns. `is_long`, `must_run`: see `TenantThreads`."""
        try:
            return await self._turns.run(tenant, work, cost=nbytes, is_long=is_long, must_run=must_run)
        except PlacesTaken as taken:
            raise self._refusal(taken) from None

    def _refusal(self, taken: PlacesTaken) -> TooManyRequests:
        why = "Too many prompts wait for the tokenizer (limits.tokenizer_queue_max)."
        if taken.is_of_tenant:
            why = "Too many prompts of this API key wait for the tokenizer (limits.tenant_share)."
        message = f"{why} Try again later."
        return TooManyRequests(message, self._limits.retry_after_s, code="tokenizer_queue_full")

    @property
    def is_idle(self) -> bool:
        """Whether no work waits or runs."""
        return self._turns.is_idle

    def close(self) -> None:
        """Stop the threads. Work that has not started is dropped."""
        self._turns.close()

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        self._turns.check_integrity()
