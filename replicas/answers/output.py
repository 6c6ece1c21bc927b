"""Decodes tokens to text and decides when an answer ends, whichever engine sampled them.

The same rules apply to a token that was just sampled and to tokens that another replica sampled before it was
lost: a resumed answer continues in exactly the same state. Pure except for the tokenizer.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from samovar.cache_tiers.forecast import tool_tags
from samovar.replicas.grammar import GrammarRefused, GrammarState
from samovar.replicas.messages import (
    TAIL_TOKENS,
    FinishReason,
    GenerateRequest,
    Refused,
    Sampled,
    SamplingParams,
    TokenLogprob,
)
from samovar.replicas.reply import called_tools

logger = logging.getLogger(__name__)


class TextOut:
    """Decodes one answer to text and watches for stop strings. `push` each token, `flush` once at the end.

    Text that may be the start of a stop string is held back until that is decided, so a client never sees a
    part of one. Bytes of an unfinished UTF-8 character are held back too. `shown_ids`: special tokens whose
    text is part of the answer; others are left out. `behind`: the last tokens of a text that the answer
    continues: some decoders leave out a text's first blank, which is then not the answer's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        shown_ids: tuple[int, ...] = (),
        behind: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._shown_ids = shown_ids
        self._stream = DecodeStream(skip_special_tokens=True)
        if behind and self._stream.step(tokenizer, list(behind)) is None:
            self._stream = DecodeStream(skip_special_tokens=True)  # within a character, or no text at all
        self._held = ""

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, bool]:
        """Decode one token; return (text to send, whether a stop string was completed).

        The stop string itself and what follows it are never sent. `may_stop=False` ignores stop strings
        (below `min_tokens`).
        """
        self._held += self._decode(token_id)
        if may_stop:
            found = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
            if found:
                text, self._held = self._held[: min(found)], ""
                return text, True
        keep = self._undecided_chars() if may_stop else 0
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return text, False

    def _decode(self, token_id: int) -> str:
        if token_id in self._shown_ids:
            return self._tokenizer.id_to_token(token_id) or ""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:
            # Byte-fallback vocabularies: a byte that cannot follow a finished character. tokenizers raises a
            # bare Exception and its stream is unusable afterwards.
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token_id) or ""

    def flush(self) -> str:
        """Return the text that was held back and is not a stop string."""
        text, self._held = self._held, ""
        return text

    def _undecided_chars(self) -> int:
        """Return the length of the longest tail that is the start of a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class AnswerTokens(Protocol):
    """One of a request's answers so far. `grammar`: what it must look like; has accepted its tokens."""

    request_id: str
    tokens: array[int]  # u32: prompt, then sampled tokens
    sampling: SamplingParams
    index: int
    grammar: GrammarState | None

    @property
    def output_tokens(self) -> int: ...


@dataclass(slots=True, eq=False)
class OpenAnswers:
    """What has been said of a request with unfinished choices."""

    request: GenerateRequest
    texts: dict[int, TextOut] = field(default_factory=dict)  # by choice
    words: dict[int, list[str]] = field(default_factory=dict)  # by choice, to read tool calls from

    def called_tools(self, choice: int) -> str:
        """Return tags of the tools that a choice calls (`tool_tags`); empty if it calls none."""
        if self.request.reading is None:
            return ""
        try:
            return tool_tags(called_tools(self.request.reading, "".join(self.words.get(choice, ()))))
        except Exception:  # only the forecast is the poorer for it
            logger.exception("request %s: its answer cannot be read for tool calls", self.request.request_id)
            return ""


class TokenOutput(NamedTuple):
    """What one token adds: `text` to send, and why the answer ends with it, if it does."""

    text: str
    reason: FinishReason | None


class OutputProcessor:
    """Applies tokens to the answers of open requests.

    `eos_token_ids` end an answer that may end. `text`: of single tokens, for log-probabilities.
    `context_tokens_max`: prompt and answer of one sequence together.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], text: TokenText, context_tokens_max: int
    ) -> None:
        self.tokenizer = tokenizer
        self.text = text
        self._eos_token_ids = eos_token_ids
        self._context_tokens_max = context_tokens_max

    def append(self, opened: OpenAnswers, choice: AnswerTokens, token_id: int) -> TokenOutput:
        """Add a token to one answer of a request. Raises `GrammarRefused` if its grammar has none such."""
        params, grammar = choice.sampling, choice.grammar
        if choice.index not in opened.texts:
            behind = opened.request.prompt_token_ids[-TAIL_TOKENS:] if params.continues_text else ()
            opened.texts[choice.index] = TextOut(self.tokenizer, params.stop, params.shown_token_ids, behind)
        text_out = opened.texts[choice.index]
        choice.tokens.append(token_id)
        if grammar is not None:
            grammar.accept(token_id)
        tokens = choice.output_tokens
        reason: FinishReason | None = None
        text, is_over = "", self._ends_turn(token_id, choice, tokens)
        if not is_over:
            text, is_over = text_out.push(token_id, may_stop=tokens >= params.min_tokens)
        if is_over or (grammar is not None and grammar.is_complete):
            reason = "stop"
        elif tokens >= params.max_tokens or len(choice.tokens) >= self._context_tokens_max:
            reason = "length"
        if reason is not None:
            text += text_out.flush()
        if opened.request.reading is not None:
            opened.words.setdefault(choice.index, []).append(text)
        return TokenOutput(text, reason)

    def _ends_turn(self, token_id: int, choice: AnswerTokens, output_tokens: int) -> bool:
        """Return whether this token, just sampled, ends the answer."""
        params = choice.sampling
        if choice.grammar is not None:  # after what ends it, it allows nothing
            return token_id in self._eos_token_ids or token_id in params.stop_token_ids
        if output_tokens < params.min_tokens:
            return False
        if token_id in params.stop_token_ids:
            return True
        return token_id in self._eos_token_ids and not params.ignore_eos

    def resume(self, opened: OpenAnswers, choice: AnswerTokens, token_ids: Sequence[int]) -> Refused | None:
        """Restore the state in which another replica left an answer; refuse if not possible."""
        try:
            is_over = any(self.append(opened, choice, token).reason for token in token_ids)
        except GrammarRefused as refused:
            return refused.event
        except Exception:  # else the request would crash one replica after the other
            logger.exception("request %s cannot be resumed", choice.request_id)
            return Refused("invalid", "the tokens to resume from cannot be read")
        return Refused("invalid", "the answer to resume is complete") if is_over else None


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _printable_stand_ins() -> dict[str, int]:
    """Return the byte of each character that byte-level BPE writes for one: GPT-2's table.

    Printable bytes stand for themselves, the others for the characters from 256 on.
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _printable_stand_ins()


class TokenNames(Protocol):
    def id_to_token(self, token_id: int) -> str | None: ...
    def to_str(self) -> str: ...


class TokenText:
    """The string and the exact bytes of a single token id, for log-probabilities.

    Bytes come from the vocabulary, not from decoding: a token may hold a part of a character. Understands
    byte-level BPE (GPT-2's printable stand-ins for bytes) and SentencePiece's `▁` and `<0xNN>`.

    `vocabulary`: the `tokenizers.Tokenizer` in use; `special_ids` are shown literally.
    """

    def __init__(self, vocabulary: TokenNames, special_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._special_ids = special_ids
        self._byte_level = '"ByteLevel"' in vocabulary.to_str()
        self.of = lru_cache(maxsize=65536)(self._of)

    def _of(self, token_id: int) -> tuple[str, bytes]:
        """Return (text with U+FFFD for broken characters, exact bytes); ("", b"") for an unused id."""
        raw = self._bytes(token_id)
        return raw.decode("utf-8", errors="replace"), raw

    def _bytes(self, token_id: int) -> bytes:
        piece = self._vocabulary.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._special_ids:
            return piece.encode()
        if self._byte_level and all(char in _BYTE_OF for char in piece):
            return bytes(_BYTE_OF[char] for char in piece)
        byte_token = _BYTE_TOKEN.fullmatch(piece)
        if byte_token:
            return bytes([int(byte_token.group(1), 16)])
        return piece.replace("▁", " ").encode()

    def unscored(self, token_id: int) -> TokenLogprob:
        """Return a token of a prompt whose log-probability is not known."""
        return TokenLogprob(token_id, *self.of(token_id), 0.0)

    def logprobs(self, sampled: Sampled) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of a sampled token and its rivals, which were requested."""
        assert sampled.logprob is not None, "no log-probability was computed"
        top = tuple(TokenLogprob(i, *self.of(i), logprob) for i, logprob in sampled.top)
        name, raw = self.of(sampled.token_id)
        return (TokenLogprob(sampled.token_id, name, raw, sampled.logprob, top, sampled.rank),)
