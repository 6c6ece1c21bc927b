"""Renders and tokenises a conversation or a text into the token ids of a prompt.

The model's chat template and the tokenizer run in a few threads (`tokenizer.py`), so that the event
loop never waits long. A reply of ours that comes back unchanged gets the token ids that were sampled
(`reply_memory.py`). What varies in front of a system prompt is put out of the way, and where a conversation
leaves the prefix of its previous prompt all the same, the prompt says so (`prefix.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from jinja2 import TemplateError

from samovar.configs.settings import Settings
from samovar.replicas.grammar import GrammarCompiler, GrammarRefused
from samovar.replicas.messages import TAIL_TOKENS, Grammar
from samovar.replicas.reply import ReplyReading
from samovar.replicas.templates import TEMPLATE_FAULTS, TemplateLimit, refused_model, rendered
from samovar.router.openai import (
    ApiError,
    ChatMessage,
    ContextLengthExceeded,
    InvalidValue,
    ParsedChat,
    ParsedCompletion,
    ParsedRequest,
    UnsupportedParameter,
    led,
)
from samovar.router.prompt.prefix import (
    KEY_BYTES,
    JsonSpellings,
    PrefixLeft,
    PrefixMemory,
    TokenSizes,
    as_before,
    blamed,
    digest_of,
    digest_of_texts,
    ids_of,
    in_order,
    parts_of,
    reasoning_lost,
    tool_digest,
    without_volatile,
)
from samovar.router.prompt.reply_memory import Owner, ReplyMemory, SharedReplies, key_of, turns_of
from samovar.router.prompt.tokenizer import Result, ServedVocabulary, TokenizerThreads
from samovar.router.prompt.tool_template import BRACKETED, AnswerForm, inspect_template

logger = logging.getLogger(__name__)

# Composing characters (NFC) shrinks text by less than this factor: three Hangul letters become one.
NFC_SHRINK = 4
SHORT_CHARS, SHORT_MESSAGES = 1024, 16
"""A conversation without tools up to this size is tokenised on the event loop, if no other one is being
tokenised: it is half a millisecond, and nearly as much to have a thread do it."""


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

    def to_str(self) -> str: ...

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...


class ChatTokenizer(Protocol):
    """The part of a transformers fast tokenizer that is used here."""

    chat_template: Any
    backend_tokenizer: BackendTokenizer

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of one prompt; `rendered` is their text, None for one that was given as ids or cut.

    `begin_tokens`: how many of them the conversation's later prompts repeat, if this is its first. `echo`:
    the text that the answer begins with, if asked for. `kept_by`: what was done to keep its prefix equal, in
    words. `left`: where it left the prefix of the conversation's previous prompt all the same. `asked`: the
    conversation as it was rendered. `reading`: how its answers are read; None: they are text.
    `shown_ids`: special tokens whose text is part of an answer. `grammar`: what its answers must look like,
    where calls or reasoning make that another than the request's own.
    """

    token_ids: list[int]
    rendered: str | None
    begin_tokens: int = 0
    echo: str = ""
    kept_by: tuple[str, ...] = ()
    left: PrefixLeft | None = None
    asked: ParsedChat | None = None
    reading: ReplyReading | None = None
    shown_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


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

    `vocab_tokens`: ids must be below it. `eos_token_ids`: ids that may end a turn.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        vocab_tokens: int,
        context_tokens_max: int,
        eos_token_ids: Sequence[int],
        settings: Settings,
    ) -> None:
        limits = settings.limits
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
        self.template = inspect_template(tokenizer, settings.model)
        self._eos_texts = [text for one in eos_token_ids if (text := self._backend.id_to_token(one))]
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {one: str(token) for one, token in added.items() if getattr(token, "special", False)}
        self._marks = {str(token): one for one, token in added.items() if BRACKETED.fullmatch(str(token))}
        self._answer_opening = self._opening()
        # Without a thought that it may begin with, or the end of one that is left out.
        self._answer_header = self.template.form.before_thought(self._answer_opening)
        self._memory = ReplyMemory(limits.reply_memory_bytes_max)
        self._prefix = settings.router.prefix
        self._prefixes = PrefixMemory(self._prefix.prompts_max, self._prefix.memory_bytes_max)
        self._spellings = JsonSpellings(self._prefix.memory_bytes_max)
        self._prefix_key = secrets.token_bytes(KEY_BYTES)
        self._sizes = TokenSizes(self._backend.get_vocab(), vocab_tokens)
        self._memory_lock = threading.Lock()  # of both memories
        self.forgotten = self._memory.forgotten
        self.replies = SharedReplies(self._memory, self._memory_lock, vocab_tokens)
        self._threads = TokenizerThreads(limits, settings.share_of_tenant(limits.tenant_share))
        self._grammars = GrammarCompiler(self._backend.to_str, vocab_tokens, eos_token_ids, settings.grammar)

    async def chat(
        self,
        salt: str,
        request: ParsedChat,
        tenant: str = "",
        *,
        owner: Owner | None = None,
        forgets: int = 0,
    ) -> Prompt:
        """Render and tokenise a conversation up to where the assistant speaks next.

        With an `owner` it is compared with the last prompts of that session; `forgets`: see `remember`.
        Raises `ApiError`: 400 if the template or the context refuses it, 429 if too many prompts wait.
        """
        work, chars = partial(self._followed, salt, request, owner, forgets), chars_of(request)
        is_short = chars <= SHORT_CHARS and len(request.messages) <= SHORT_MESSAGES
        is_short = is_short and request.offer is None and request.sampling.grammar is None  # it is compiled
        if is_short and self._threads.is_idle:
            return work()
        return await self.work(work, chars, tenant)

    async def completion(self, request: ParsedCompletion, tenant: str = "") -> list[Prompt]:
        """Tokenise the prompts of `request`, in order. Raises as `chat` does."""
        works = [(partial(self._plain, prompt, request), len(prompt)) for prompt in request.prompts]
        return await self._threads.run(tenant, works)

    async def work(
        self, work: Callable[[], Result], nbytes: int, tenant: str = "", must_run: bool = False
    ) -> Result:
        """Run `work` on `nbytes` of text in a tokenizer thread, in its tenant's turn.

        Raises 429 if too many wait, unless it `must_run`.
        """
        return await self._threads.one(tenant, work, nbytes, must_run=must_run)

    async def check_grammar(self, grammar: Grammar, tenant: str = "") -> None:
        """Raise `InvalidValue`, with field and reason, if a grammar cannot be served.

        It is compiled in a tokenizer thread, in its tenant's turn: 429 as `work`.
        """
        try:
            check = partial(self._grammars.check, grammar)
            await self._threads.one(tenant, check, len(grammar.text), is_long=True)
        except GrammarRefused as refused:
            raise InvalidValue(refused.field, f"{refused}.", code="invalid_grammar") from None

    def tokens_of_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenise a text of any length, on the calling thread."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def tokens_of_chat(self, request: ParsedChat, *, add_special_tokens: bool) -> list[int]:
        """Render and tokenise a conversation of any length, on the calling thread."""
        request, _ = without_volatile(_led(request), self._prefix)
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
        reply: ChatMessage | None = None,
    ) -> bool:
        """Store `token_ids` as the answer to `prompt` with `text`; False if they do not decode to it.

        They do not after a stop string or inside a character; the text is then tokenised again. `forgets`:
        `forgotten.count` when the request came; nothing is stored if the owner was forgotten since.
        `reply`: the message that the client will send back, where that is not just the text.
        """

        def note() -> bool:
            begun = prompt.asked.messages[-1] if prompt.asked and prompt.asked.continues else None
            behind = [] if begun is None else prompt.token_ids[-TAIL_TOKENS:]
            is_ended = bool(token_ids) and token_ids[-1] in self._eos_token_ids
            ids = list(token_ids[:-1] if is_ended else token_ids)  # the template adds the end itself
            if prompt.rendered is None or not text or not _spell(self._backend, ids, text, behind):
                return False
            key = None if reply is None else key_of(reply)
            if reply is None and begun is not None:  # it comes back as one message with what it continues
                key = key_of(replace(begun, content=begun.content + text))
            again = text if reply is None else self._again(prompt, text, reply)
            # Without its reasoning it comes back as another text: known by the prompt that it answers.
            held = [] if again is None else [(again, ids, key)]
            if reply is not None and reply.reasoning:
                held.append(("", [], key))
            if reply is None and text.strip() != text:  # as some clients send it back
                trimmed = ChatMessage("assistant", text.strip())
                if (words := self._again(prompt, text, trimmed)) is not None:
                    held.append((words, ids, key_of(trimmed)))
            with self._memory_lock:
                for words, its_ids, key in held:
                    self._memory.remember(
                        salt,
                        prompt.rendered,
                        prompt.token_ids,
                        words,
                        its_ids,
                        owner=owner,
                        forgets=forgets,
                        key=key,
                        turns=turns_of(prompt.asked),
                    )
            return again is not None

        return await self.work(note, len(text), owner.tenant)

    async def forget(self, tenant: str | None, sessions: Collection[bytes] | None = None) -> int:
        """Forget the replies of `tenant`, of these sessions of it, or (None) of all; return how many.

        The digests of their prompts are forgotten with them.
        """

        def drop() -> int:
            with self._memory_lock:
                self._prefixes.forget(tenant, sessions)
                self._spellings.forget(tenant, sessions)
                return self._memory.forget(tenant, sessions)

        return await asyncio.to_thread(drop)  # never 429: must not queue behind prompts

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        with self._memory_lock:
            self._memory.check_integrity()
            self._prefixes.check_integrity()
            self._spellings.check_integrity()
        self._threads.check_integrity()

    @property
    def salts_changed(self) -> int:
        """Prompts that continued their conversation under another `cache_salt`, since the start."""
        return self._prefixes.salts_changed

    def close(self) -> None:
        """Stop the threads. Work that has not started is dropped."""
        self._threads.close()

    def _followed(self, salt: str, request: ParsedChat, owner: Owner | None, forgets: int) -> Prompt:
        """Build the prompt, and compare it with the last ones of its session."""
        if request.offer is not None and not self.template.reads_tools:
            raise UnsupportedParameter("tools", "tools is not supported: model.tool_parser is 'none'.")
        request, kept_by = without_volatile(_led(request), self._prefix)
        tools = [tool_digest(tool, self._prefix_key) for tool in request.tools]
        if owner is not None and self._prefix.tools == "ordered":
            request, tools, words = self._as_before(salt, request, tools, owner, forgets)
            kept_by += words
        prompt, is_cut = self._chat(salt, request), request.truncate_tokens is not None
        left: PrefixLeft | None = None
        try:
            if owner is not None and self._prefixes.is_on:
                left = self._left(salt, request, prompt, tools, owner, forgets)
        except Exception:  # a missing reason costs no answer
            logger.exception("a prompt could not be compared with those before it")
        reading = self._reading(request, self._render(request) if is_cut else prompt.rendered or "")
        form = AnswerForm(request.offer, self.template.form, reading.opening if reading else "", self._marks)
        return replace(
            prompt,
            kept_by=kept_by,
            left=left or prompt.left,
            asked=request,
            reading=reading,
            shown_ids=self._shown(request),
            grammar=form.grammar(request.sampling.grammar, self._grammars),
        )

    def _as_before(
        self, salt: str, request: ParsedChat, tools: list[bytes], owner: Owner, forgets: int
    ) -> tuple[ParsedChat, list[bytes], tuple[str, ...]]:
        """Return the request with tools and calls as the turns before had them, and its tools' digests."""

        def spell(texts: Sequence[tuple[bytes, str]]) -> list[str]:
            with self._memory_lock:
                if self._memory.has_forgotten(owner, forgets):  # cleared since: nothing of it is kept
                    return [text for _, text in texts]
                return self._spellings.spell(salt, owner, texts)

        request, is_other = as_before(request, tools, spell, self._prefix_key)
        with self._memory_lock:
            before = self._prefixes.tools_like(salt, owner, tools) if tools else None
        if before is None or before == tools:
            return request, tools, ("ordered JSON",) if is_other else ()
        return in_order(request, tools, before), before, ("ordered tools",)

    def _reading(self, request: ParsedChat, rendered: str) -> ReplyReading | None:
        """Return how the answers are read; None if all of them is text."""
        form, offer = self.template.form, request.offer
        can_call = offer is not None and offer.may_call and bool(form.calls)
        if not can_call and not form.reasoning:
            return None
        at = rendered.rfind(self._answer_header) if self._answer_header else -1
        if not (request.begins_turn or request.continues):
            opening = ""
        elif at < 0:  # nothing stands in front of a thought: its mark does, at the end
            opening = form.thought_at_end(rendered)
        else:
            opening = rendered[at + len(self._answer_header) :]
        tools = offer.tools if offer is not None and can_call else ()
        names = (tool.name for tool in tools if offer is not None and offer.only in (None, tool.name))
        return ReplyReading(
            form,
            opening,
            tuple(names),
            f"[{','.join(tool.text for tool in tools)}]" if tools and form.needs_types else "",
            offer is None or offer.is_parallel,
            is_promised=offer is not None and offer.must_call,
        )

    def _shown(self, request: ParsedChat) -> tuple[int, ...]:
        """Return the ids of special tokens by which the answer's parts are told apart."""
        can_call = request.offer is not None and request.offer.may_call
        return tuple(
            token_id
            for token_id, text in self._special.items()
            if self.template.form.marks(text, calls=can_call)
        )

    def _left(
        self,
        salt: str,
        request: ParsedChat,
        prompt: Prompt,
        tools: list[bytes],
        owner: Owner,
        forgets: int,
    ) -> PrefixLeft | None:
        ids = ids_of(prompt.token_ids)
        parts = parts_of(request.messages, prompt.rendered or "", ids, self._sizes, self._prefix_key)
        written = digest_of_texts([tool.text for tool in request.tools], self._prefix_key)
        digest = replace(digest_of(ids, parts, self._prefix_key), tools=tuple(tools), tools_text=written)
        with self._memory_lock:
            if self._memory.has_forgotten(owner, forgets):
                return None  # a clear came after the request: nothing of it may be kept
            left = self._prefixes.follow(salt, owner, digest)
        return None if left is None else blamed(left, request.messages, prompt.rendered or "")

    def _chat(self, salt: str, request: ParsedChat) -> Prompt:
        rendered = self._render(request)
        if request.truncate_tokens is not None:
            return Prompt(_cut(self._encode(rendered, add_special_tokens=False), request), None)
        self._refuse_hopeless(rendered, "messages")
        own = {index: one for index, one in enumerate(request.messages) if one.role == "assistant"}
        keys = {key_of(message): index for index, message in own.items()}
        with self._memory_lock:
            known = self._memory.match(salt, rendered, [one.content for one in own.values()], keys)
        if known is not None:
            rest = rendered[known.chars :]
            rest_ids = self._encode(rest, add_special_tokens=False)
            # Some tokenizers put a space before any text; the rest would then not continue the known ids.
            if self._backend.decode(rest_ids, skip_special_tokens=False) == rest:
                begun = self._begun(known.token_ids + rest_ids, rendered)
                if known.lost is None or (index := keys[known.lost]) != max(own):
                    return begun
                return replace(begun, left=reasoning_lost(len(known.token_ids), index, own[index]))
        return self._begun(self._encode(rendered, add_special_tokens=False), rendered)

    def _begun(self, token_ids: list[int], rendered: str) -> Prompt:
        """Return the prompt with what its next turns repeat: all before the template opens the answer.

        After that some templates put what no later prompt has: an empty thought, or the start of one.
        """
        at = rendered.rfind(self._answer_header or self._answer_opening)
        own = 0 if at < 0 else len(self._encode(rendered[at:], add_special_tokens=False))
        return Prompt(token_ids, rendered, max(1, len(token_ids) - own))

    def _opening(self) -> str:
        """Return what the template writes where the assistant speaks next; empty if that cannot be told."""
        if not self._tokenizer.chat_template:
            return ""
        hello = [{"role": "user", "content": "Hello"}]
        try:
            closed, opened = (
                rendered(self._tokenizer, hello, add_generation_prompt=is_open) for is_open in (False, True)
            )
        except TemplateLimit as limit:
            raise refused_model(limit) from None
        except TEMPLATE_FAULTS:
            logger.info("the chat template does not say where an answer begins", exc_info=True)
            return ""
        return opened.removeprefix(closed) if opened.startswith(closed) else ""

    def _render(self, request: ParsedChat) -> str:
        if not self._tokenizer.chat_template:
            message = "This model has no chat template. Use /v1/completions with a prompt."
            raise InvalidValue("messages", message, code="no_chat_template")
        conversation, tools = self.template.conversation(request)
        kwargs = {**self.template.kwargs(request.template_kwargs), **tools}
        if request.continues:
            kwargs["continue_final_message"] = True
        try:
            begins = request.begins_turn
            return rendered(self._tokenizer, conversation, add_generation_prompt=begins, **kwargs)
        except TemplateError as refused:
            message = f"The model's chat template refuses these messages: {refused}"
            raise InvalidValue("messages", message, code="chat_template_error") from None
        except TEMPLATE_FAULTS as failed:
            logger.warning("the model's chat template failed on a request's messages", exc_info=True)
            message = f"The model's chat template fails on these messages ({type(failed).__name__})."
            raise InvalidValue("messages", message, code="chat_template_error") from None

    def _plain(self, prompt: str | tuple[int, ...], request: ParsedCompletion) -> Prompt:
        is_cut = request.truncate_tokens is not None
        if isinstance(prompt, str):
            if not is_cut:
                self._refuse_hopeless(prompt, "prompt")
            ids = self._encode(prompt, add_special_tokens=request.add_special_tokens)
            if not ids:
                raise InvalidValue("prompt", "prompt is empty: there is nothing to continue.")
        else:
            self.vocabulary.refuse_unknown(prompt, "prompt")
            ids = list(prompt)
        kept = _cut(ids, request)
        rendered = prompt if isinstance(prompt, str) and len(kept) == len(ids) else None
        # What follows a text may merge with its last token.
        begin_tokens = max(1, len(kept) - 1) if isinstance(prompt, str) else len(kept)
        if not request.extras.echo:
            return Prompt(kept, rendered, begin_tokens)
        return Prompt(
            kept, rendered, begin_tokens, self.vocabulary.text(kept) if rendered is None else rendered
        )

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

    def _again(self, prompt: Prompt, text: str, reply: ChatMessage) -> str | None:
        """Return how the next prompt will hold `reply`; None if not all of it, or not behind this prompt.

        Found by rendering that prompt: what follows a reply may change how a template writes it.
        """
        asked, rendered = prompt.asked, prompt.rendered
        if (
            asked is None
            or rendered is None
            or asked.continues
            or (self.template.is_single and len(reply.calls) > 1)  # a result comes between
            or any(one in text for one in self._eos_texts)
        ):
            return None
        follow = [ChatMessage("tool", "-", call_id=call.call_id, tool=call.name) for call in reply.calls]
        messages = (*asked.messages, reply, *(follow or [ChatMessage("user", "-")]))
        try:
            later = self._render(replace(asked, messages=messages, begins_turn=False))
        except ApiError:
            return None
        ends = [end for text in self._eos_texts if (end := later.find(text, len(rendered))) >= 0]
        if not later.startswith(rendered) or not ends:
            return None
        held = later[len(rendered) : min(ends)]
        if re.search("[\ud800-\udfff]", held):  # half a character that a call's JSON has: no prompt can
            return None
        words = [reply.reasoning, reply.content, *(call.name for call in reply.calls)]
        return held if all(word.strip() in held for word in words) else None


def _spell(backend: BackendTokenizer, ids: list[int], text: str, behind: list[int]) -> bool:
    """Return whether ids are a text; `behind`: the last ids of one that it goes on from: see `TextOut`."""
    before = backend.decode(behind, skip_special_tokens=False) if behind else ""
    return backend.decode([*behind, *ids], skip_special_tokens=False) == before + text


def _led(request: ParsedChat) -> ParsedChat:
    """Return the request with its lead in a message."""
    if not request.lead:
        return request
    return replace(request, messages=led(request.messages, request.lead), lead="")


def chars_of(request: ParsedChat) -> int:
    """Return the characters of a conversation and its tools."""
    beside = len(request.lead) + sum(len(tool.text) for tool in request.tools)
    return beside + sum(
        len(one.content) + len(one.reasoning) + sum(len(call.arguments) for call in one.calls)
        for one in request.messages
    )


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
