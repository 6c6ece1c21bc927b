"""The tokenizer as clients see it: token ids to text, names of tokens, and its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from samovar.router.openai import InvalidValue

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
        """Raise `InvalidValue` for the first id that the model does not have."""
        for token_id in ids:
            if token_id >= self._tokens:
                message = (
                    f"{param} holds the token id {token_id}; this model's ids end at {self._tokens - 1}."
                )
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
