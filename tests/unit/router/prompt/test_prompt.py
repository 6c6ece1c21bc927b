"""Prompts: templates, token ids, our own replies, and work that is refused before it is done."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from samovar.configs.settings import LimitsSettings, Settings
from samovar.replicas.grammar import GrammarCompiler
from samovar.replicas.messages import Grammar, SamplingParams
from samovar.router.openai.errors import ApiError
from samovar.router.openai.messages import ChatMessage
from samovar.router.openai.parse import ParsedChat, ParsedCompletion
from samovar.router.prompt.prompt import (
    SHORT_CHARS,
    SHORT_MESSAGES,
    PromptBuilder,
    answer_tokens,
    longest_token_bytes,
)
from samovar.router.prompt.reply_memory import Owner
from tests.support.engines.tiny_models import EOS_ID, byte_fallback, make_tiny_tokenizer

TOKENIZER: Any = make_tiny_tokenizer()
BY: dict[str, Any] = {"owner": Owner("tenant", b"session"), "forgets": 0}


def builder_of(tokenizer: Any = TOKENIZER, **limits: Any) -> PromptBuilder:
    return PromptBuilder(
        tokenizer,
        vocab_tokens=512,
        context_tokens_max=256,
        eos_token_ids=[EOS_ID],
        settings=Settings(limits=LimitsSettings(**limits)),
    )


@pytest.fixture
def builder() -> Iterator[PromptBuilder]:
    made = builder_of()
    yield made
    made.check_integrity()
    made.close()


def chat(*texts: str) -> ParsedChat:
    roles = ("user", "assistant")
    messages = tuple(ChatMessage(roles[place % 2], text) for place, text in enumerate(texts))  # type: ignore[arg-type]
    return ParsedChat(model="m", sampling=SamplingParams(), messages=messages)


def plain(*prompts: str | tuple[int, ...]) -> ParsedCompletion:
    return ParsedCompletion(model="m", sampling=SamplingParams(), prompts=prompts)


async def test_a_grammar_behind_a_thought_is_compiled_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = (
        TOKENIZER.chat_template + "{# </think> #}{{ '<think>\n' if add_generation_prompt }}"
    )
    builder, ran = builder_of(tokenizer), set[str]()
    check = GrammarCompiler.check

    def noted(self: GrammarCompiler, grammar: Grammar) -> None:
        ran.add(threading.current_thread().name)
        check(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "check", noted)
    sampling = SamplingParams(grammar=Grammar("choice", '["a", "b"]', "guided_choice"))
    made = await builder.chat("s", replace(chat("hi"), sampling=sampling), **BY)
    assert made.grammar is not None
    (name,) = ran
    assert name.startswith("tokenizer"), "the event loop waits for no grammar"
    builder.close()


@pytest.mark.parametrize(
    ("texts", "is_busy", "threads"),
    [
        (("tell me",), False, 0),
        (("tell me",), True, 1),
        (("x" * (SHORT_CHARS + 1),), False, 1),
        (("x",) * (SHORT_MESSAGES + 1), False, 1),
    ],
)
async def test_a_short_chat_needs_no_thread_and_waits_for_its_turn_with_the_others(
    monkeypatch: pytest.MonkeyPatch, texts: tuple[str, ...], is_busy: bool, threads: int
) -> None:
    builder = builder_of(tokenizer_threads=1)
    monkeypatch.setattr(builder, "_context_tokens_max", 100_000)
    gate, ran = threading.Event(), set[str]()
    rendered = builder._render

    def noting(request: ParsedChat) -> str:
        ran.add(threading.current_thread().name)
        return rendered(request)

    monkeypatch.setattr(builder, "_render", noting)
    busy = asyncio.create_task(builder.work(gate.wait, 1)) if is_busy else None
    await asyncio.sleep(0)  # it is queued
    asking = asyncio.create_task(builder.chat("t", chat(*texts)))
    await asyncio.sleep(0)
    gate.set()
    prompt = await asyncio.wait_for(asking, 30)
    assert prompt.token_ids
    assert len([name for name in ran if name.startswith("tokenizer")]) == threads
    assert len(ran) == 1
    if busy is not None:
        await busy
    builder.check_integrity()
    builder.close()


async def test_chat_is_what_transformers_makes_of_it(builder: PromptBuilder) -> None:
    prompt = await builder.chat("t", chat("tell me"))
    conversation = [{"role": "user", "content": "tell me"}]
    expected = TOKENIZER.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert prompt.token_ids == expected


async def test_completion_texts_and_ids(builder: PromptBuilder) -> None:
    prompts = await builder.completion(plain("abc", (5, 6)))
    assert prompts[0].token_ids == TOKENIZER.encode("abc")
    assert (prompts[1].token_ids, prompts[1].rendered) == ([5, 6], None)


async def test_replies_are_remembered_only_when_their_ids_spell_them(builder: PromptBuilder) -> None:
    vocab = TOKENIZER.get_vocab()
    letters = [vocab[letter] for letter in "the"]
    first = await builder.chat("t", chat("u"))
    assert not await builder.remember("t", first, "th", letters, **BY)  # cut by a stop string
    assert not await builder.remember("t", first, "", [EOS_ID], **BY)
    assert not await builder.remember("t", first, "the", [*letters, EOS_ID, EOS_ID], **BY)
    assert await builder.remember("t", first, "the", [*letters, EOS_ID], **BY)
    second = await builder.chat("t", chat("u", "the", "more"))
    assert second.token_ids[: len(first.token_ids) + 4] == [*first.token_ids, *letters, EOS_ID]
    other = await builder.chat("v", chat("u", "the", "more"))
    assert other.token_ids != second.token_ids
    assert TOKENIZER.decode(other.token_ids) == TOKENIZER.decode(second.token_ids)


async def test_what_an_answer_goes_on_from_comes_back_with_it_as_the_tokens_that_were_sampled() -> None:
    """Of a tokenizer that leaves out a text's first blank, which is the answer's own here."""
    backend, vocab = byte_fallback()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = TOKENIZER.chat_template
    builder, salt, ends = builder_of(tokenizer), b"salt".hex(), EOS_ID
    first = await builder.chat(salt, replace(chat("u", "ab"), begins_turn=False, continues=True))
    sampled = [vocab["▁a"], vocab["b"]]
    assert not await builder.remember(salt, first, "ab", [*sampled, ends], **BY), "another text"
    assert await builder.remember(salt, first, " ab", [*sampled, ends], **BY)
    request = chat("u", "ab ab", "more")
    second = await builder.chat(salt, request)
    assert second.token_ids[: len(first.token_ids) + 2] == [*first.token_ids, *sampled]
    assert second.rendered == backend.decode(second.token_ids, skip_special_tokens=False)
    assert builder.replies.knows_last(b"salt", BY["owner"], request)
    builder.close()


async def test_a_template_that_refuses_is_a_400() -> None:
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    builder = builder_of(tokenizer)
    with pytest.raises(ApiError, match="roles must alternate") as caught:
        await builder.chat("t", chat("u"))
    assert (caught.value.status, caught.value.param) == (400, "messages")
    tokenizer.chat_template = None
    with pytest.raises(ApiError, match="/v1/completions") as caught:
        await builder.chat("t", chat("u"))
    assert caught.value.code == "no_chat_template"
    builder.close()


@pytest.mark.guarantee("F32")
async def test_hopeless_prompts_are_refused_before_they_are_tokenised(
    builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "_encode", lambda *_, **__: pytest.fail("was tokenised"))
    for text in ("a" * (1 << 20), "👩‍👩‍👧‍👦" * 30_000, " " * (1 << 20), "é" * 100_000):
        for ask in (builder.chat("t", chat(text)), builder.completion(plain(text))):
            with pytest.raises(ApiError) as caught:
                await ask
            assert caught.value.code == "context_length_exceeded"
            assert "at least" in caught.value.message


@pytest.mark.parametrize("prompt", ["", (600,)])
async def test_prompts_that_no_model_can_go_on_from(builder: PromptBuilder, prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        await builder.completion(plain(prompt))
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.guarantee("F32")
async def test_the_queue_is_bounded_and_given_up_places_come_back() -> None:
    builder = builder_of(tokenizer_threads=1, tokenizer_queue_max=1)
    busy, go_on = threading.Event(), threading.Event()

    def block() -> None:
        busy.set()
        go_on.wait(10)

    running = asyncio.create_task(builder._threads.run("t", [(block, 1)]))
    await asyncio.to_thread(busy.wait, 10)
    queued = asyncio.create_task(builder.chat("t", chat("u")))
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await builder.chat("t", chat("u"))
    assert (caught.value.status, caught.value.code) == (429, "tokenizer_queue_full")
    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    later = asyncio.create_task(builder.chat("t", chat("u")))
    await asyncio.sleep(0)
    go_on.set()
    await running
    assert (await later).token_ids
    builder.close()


def test_answer_tokens_at_the_limit() -> None:
    assert answer_tokens(10, None, 0, 16, "messages") == 6
    assert answer_tokens(10, 6, 6, 16, "messages") == 6
    for prompt_tokens, max_tokens, min_tokens in ((16, None, 0), (10, 7, 0), (10, None, 7)):
        with pytest.raises(ApiError):
            answer_tokens(prompt_tokens, max_tokens, min_tokens, 16, "messages")


def test_longest_token_is_a_bound_or_none() -> None:
    class Model:
        unk_token = None

    class Backend:
        normalizer: Any = None
        model: Any = Model()

        def get_vocab(self) -> dict[str, int]:
            return {"abc": 0, "é": 1}

    backend: Any = Backend()
    assert longest_token_bytes(backend) == 3
    backend.normalizer = type("NFC", (), {})()
    assert longest_token_bytes(backend) == 12
    backend.normalizer = object()
    assert longest_token_bytes(backend) is None
    backend.normalizer, backend.model.unk_token = None, "<unk>"
    assert longest_token_bytes(backend) is None


async def test_a_tokenizer_that_would_cut_or_pad_does_neither() -> None:
    for change in (
        lambda backend: backend.enable_truncation(max_length=4),
        lambda backend: backend.enable_padding(pad_to_multiple_of=64, pad_token="<|endoftext|>"),
    ):
        tokenizer: Any = make_tiny_tokenizer()
        change(tokenizer.backend_tokenizer)  # type: ignore[no-untyped-call]
        builder = builder_of(tokenizer)
        text = "one two three four five six"
        assert (await builder.completion(plain(text)))[0].token_ids == TOKENIZER.encode(text)
        prompt = await builder.chat("t", chat(text))
        assert TOKENIZER.decode(prompt.token_ids) == prompt.rendered
        builder.close()


@pytest.mark.parametrize("template", ["{{ 1 + messages[0]['content'] }}", "{{ 'abc'.index('z') }}"])
async def test_a_template_whose_python_fails_is_a_400_and_logged(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = template
    builder = builder_of(tokenizer)
    with pytest.raises(ApiError) as caught:
        await builder.chat("t", chat("u"))
    assert (caught.value.status, caught.value.code) == (400, "chat_template_error")
    assert any(record.exc_info for record in caplog.records)
    builder.close()
