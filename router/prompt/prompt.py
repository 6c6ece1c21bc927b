"""Renders and tokenises a conversation or a text into the token ids of a prompt.

The model's chat template and the tokenizer run in a few threads (`tokenizer_threads.py`), so that the event
loop never waits. A reply of ours that comes back unchanged gets the token ids that were sampled
(`reply_memory.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jinja2 import TemplateError

from configs.settings import LimitsSettings
from router.openai import ContextLengthExceeded, InvalidValue, ParsedChat, ParsedCompletion, ParsedRequest
from router.prompt.reply_memory import Owner, ReplyMemory
from router.prompt.tokenizer_threads import Result, TokenizerThreads
from router.prompt.vocabulary import ServedVocabulary

logger = logging.getLogger(__name__)

# Composing characters (NFC) shrinks text by less than this factor: three Hangul letters become one.
NFC_SHRINK = 4


class Encoding(Protocol):
    """The result of `tokenizers` for one text."""

    @property
    def ids(self) -> list[int]: ...


class BackendTokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    normalizer: Any
    model: Any

    def encode_batch_fast(
        self, input: list[str], is_pretokenized: bool = False, add_special_tokens: bool = True
    ) -> Sequence[Encoding]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, id: int) -> str | None: ...

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]: ...

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...


class ChatTokenizer(Protocol):
    """The part of a transformers fast tokenizer that is used here."""

    chat_template: Any
    backend_tokenizer: BackendTokenizer

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of one prompt; `rendered` is their text, None for one that was given as ids or cut.

    `echo`: the text that the answer begins with, if asked for.
    """

    token_ids: list[int]
    rendered: str | None
    echo: str = ""


def answer_tokens(
    prompt_tokens: int, max_tokens: int | None, min_tokens: int, context_tokens_max: int, param: str
) -> int:
    """Return how many tokens the answer may have: `max_tokens`, or the rest of the context.

    Raises `ContextLengthExceeded` if they do not fit, pointing at `param` if the prompt alone does not, and
    `InvalidValue` if `min_tokens` does not.
    """
    left = context_tokens_max - prompt_tokens
    if left < 1:
        raise ContextLengthExceeded(prompt_tokens, max_tokens, context_tokens_max, param)
    if max_tokens is not None and max_tokens > left:
        raise ContextLengthExceeded(prompt_tokens, max_tokens, context_tokens_max, "max_tokens")
    if min_tokens > left:
        message = f"min_tokens={min_tokens} is more than the {left} tokens that are left."
        raise InvalidValue("min_tokens", message)
    return left if max_tokens is None else max_tokens


class PromptBuilder:
    """Builds the prompts of one model. Use it from one event loop; `close` it at the end.

    `vocab_tokens`: ids must be below it. `eos_token_ids`: ids that may end a turn. `tenant_share`: share of
    the waiting places that one tenant may have.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        vocab_tokens: int,
        context_tokens_max: int,
        eos_token_ids: Sequence[int],
        limits: LimitsSettings,
        tenant_share: float = 1.0,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer.json may contain training settings that would silently cut or pad prompts.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocabulary = ServedVocabulary(self._backend, tokenizer, vocab_tokens, context_tokens_max)
        self._context_tokens_max = context_tokens_max
        self._eos_token_ids = frozenset(eos_token_ids)
        self._limits = limits
        self._token_bytes_max = longest_token_bytes(self._backend)
        self._memory = ReplyMemory(limits.reply_memory_bytes_max)
        self._memory_lock = threading.Lock()
        self._threads = TokenizerThreads(limits, tenant_share)

    async def chat(self, salt: str, request: ParsedChat, tenant: str = "") -> Prompt:
        """Render and tokenise a conversation up to where the assistant speaks next.

        Raises `ApiError`: 400 if the template or the context refuses it, 429 if too many prompts wait.
        """
        return await self.work(partial(self._chat, salt, request), chars_of(request), tenant)

    async def completion(self, request: ParsedCompletion, tenant: str = "") -> list[Prompt]:
        """Tokenise the prompts of `request`, in order. Raises as `chat` does."""
        works = [(partial(self._plain, prompt, request), len(prompt)) for prompt in request.prompts]
        return await self._threads.run(tenant, works)

    async def work(self, work: Callable[[], Result], nbytes: int, tenant: str = "") -> Result:
        """Run `work` on `nbytes` of text in a tokenizer thread, in its tenant's turn.

        Raises 429 if too many wait.
        """
        (result,) = await self._threads.run(tenant, [(work, nbytes)])
        return result

    def tokens_of_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenise a text of any length, on the calling thread."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def tokens_of_chat(self, request: ParsedChat, *, add_special_tokens: bool) -> list[int]:
        """Render and tokenise a conversation of any length, on the calling thread."""
        return self._encode(self._render(request), add_special_tokens=add_special_tokens)

    async def remember(
        self,
        salt: str,
        prompt: Prompt,
        text: str,
        token_ids: Sequence[int],
        *,
        owner: Owner,
        forgets: int,
    ) -> bool:
        """Store `token_ids` as the answer to `prompt` with `text`; False if they do not decode to it.

        They do not after a stop string or inside a character; the text is then tokenised again. `forgets`:
        value of `forgets()` at the request's arrival; nothing is stored if it has changed since.
        """

        def note() -> bool:
            ids = self._ids_that_spell(text, token_ids) if text else None
            if ids is None or prompt.rendered is None:
                return False
            with self._memory_lock:
                self._memory.remember(
                    salt, prompt.rendered, prompt.token_ids, text, ids, owner=owner, forgets=forgets
                )
            return True

        return await self.work(note, len(text), owner.tenant)

    def forgets(self, tenant: str) -> int:
        """Return a counter that changes whenever replies of `tenant` are forgotten on purpose."""
        return self._memory.forgets(tenant)

    async def forget(self, tenant: str | None, sessions: Collection[bytes] | None = None) -> int:
        """Forget the replies of `tenant`, of these sessions of it, or (None) of all; return how many."""

        def drop() -> int:
            with self._memory_lock:
                return self._memory.forget(tenant, sessions)

        return await asyncio.to_thread(drop)  # never 429: must not queue behind prompts

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        with self._memory_lock:
            self._memory.check_integrity()
        self._threads.check_integrity()

    def close(self) -> None:
        """Stop the threads. Work that has not started is dropped."""
        self._threads.close()

    def _chat(self, salt: str, request: ParsedChat) -> Prompt:
        rendered = self._render(request)
        if request.truncate_tokens is not None:
            return Prompt(_cut(self._encode(rendered, add_special_tokens=False), request), None)
        self._refuse_hopeless(rendered, "messages")
        replies = [message.content for message in request.messages if message.role == "assistant"]
        with self._memory_lock:
            known = self._memory.match(salt, rendered, replies)
        if known is not None:
            rest = rendered[known.chars :]
            rest_ids = self._encode(rest, add_special_tokens=False)
            # Some tokenizers put a space before any text; the rest would then not continue the known ids.
            if self._backend.decode(rest_ids, skip_special_tokens=False) == rest:
                return Prompt(known.token_ids + rest_ids, rendered)
        return Prompt(self._encode(rendered, add_special_tokens=False), rendered)

    def _render(self, request: ParsedChat) -> str:
        if not self._tokenizer.chat_template:
            message = "This model has no chat template. Use /v1/completions with a prompt."
            raise InvalidValue("messages", message, code="no_chat_template")
        conversation = [{"role": message.role, "content": message.content} for message in request.messages]
        kwargs = dict(request.template_kwargs)
        if request.continues:
            kwargs["continue_final_message"] = True
        try:
            rendered = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=request.begins_turn, **kwargs
            )
        except TemplateError as refused:
            message = f"The model's chat template refuses these messages: {refused}"
            raise InvalidValue("messages", message, code="chat_template_error") from None
        except (TypeError, ValueError) as failed:  # the template's Python code failed
            logger.warning("the model's chat template failed on a request's messages", exc_info=True)
            message = f"The model's chat template fails on these messages ({type(failed).__name__})."
            raise InvalidValue("messages", message, code="chat_template_error") from None
        return str(rendered)

    def _plain(self, prompt: str | tuple[int, ...], request: ParsedCompletion) -> Prompt:
        is_cut = request.truncate_tokens is not None
        if isinstance(prompt, str):
            if not is_cut:
                self._refuse_hopeless(prompt, "prompt")
            ids = self._encode(prompt, add_special_tokens=True)
            if not ids:
                raise InvalidValue("prompt", "prompt is empty: there is nothing to continue.")
        else:
            self.vocabulary.refuse_unknown(prompt, "prompt")
            ids = list(prompt)
        kept = _cut(ids, request)
        rendered = prompt if isinstance(prompt, str) and len(kept) == len(ids) else None
        if not request.extras.echo:
            return Prompt(kept, rendered)
        return Prompt(kept, rendered, self.vocabulary.text(kept) if rendered is None else rendered)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Not `encode`, which holds the GIL throughout (measured: 0.7 s for 1 MiB).
        encoded = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded[0].ids

    def _refuse_hopeless(self, text: str, param: str) -> None:
        """Refuse, before tokenising, text that cannot fit even if all its tokens were the longest."""
        if self._token_bytes_max is None:
            return
        tokens_min = math.ceil(len(text.encode()) / self._token_bytes_max)
        if tokens_min >= self._context_tokens_max:
            raise ContextLengthExceeded(tokens_min, None, self._context_tokens_max, param, at_least=True)

    def _ids_that_spell(self, text: str, token_ids: Sequence[int]) -> list[int] | None:
        ids = list(token_ids)
        if ids and ids[-1] in self._eos_token_ids:
            ids.pop()  # the template adds the end of a turn itself
        return ids if self._backend.decode(ids, skip_special_tokens=False) == text else None


def chars_of(request: ParsedChat) -> int:
    """Return the characters of a conversation."""
    return sum(len(message.content) for message in request.messages)


def _cut(ids: list[int], request: ParsedRequest) -> list[int]:
    """Return the last ids, as many as `truncate_tokens` allows."""
    return ids if request.truncate_tokens is None else ids[-request.truncate_tokens :]


def longest_token_bytes(backend: BackendTokenizer) -> int | None:
    """Return an upper bound of the text bytes one token stands for; None if no bound is known."""
    model = backend.model
    if getattr(model, "unk_token", None) is not None and not getattr(model, "byte_fallback", False):
        return None  # one unknown token may stand for a text of any length
    shrink = 1
    if backend.normalizer is not None:
        if type(backend.normalizer).__name__ != "NFC":
            return None
        shrink = NFC_SHRINK
    return shrink * max(len(token.encode()) for token in backend.get_vocab())
