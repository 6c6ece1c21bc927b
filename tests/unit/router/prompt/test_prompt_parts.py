"""Parts of a prompt: their names, and their places in tokens."""

from __future__ import annotations

from typing import Any

import pytest

from samovar.router.openai.messages import ChatMessage
from samovar.router.prompt.prefix import PromptPart, TokenSizes, ids_of, parts_of
from tests.support.engines.tiny_models import make_tiny_tokenizer

TOKENIZER: Any = make_tiny_tokenizer()
SIZES = TokenSizes(TOKENIZER.get_vocab(), 512)
KEY = bytes(16)


def said(*messages: tuple[str, str]) -> list[ChatMessage]:
    return [ChatMessage(role, text) for role, text in messages]  # type: ignore[arg-type]


def parts(messages: list[ChatMessage], template: str | None = None) -> tuple[list[PromptPart], list[int]]:
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    rendered = TOKENIZER.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True, chat_template=template
    )
    ids = TOKENIZER.encode(rendered)
    return parts_of(messages, rendered, ids_of(ids), SIZES, KEY), ids


@pytest.mark.parametrize("system", ["Be brief.", "Ünïcödé 日本 👩‍👩‍👧 \n"])
def test_parts_have_the_names_of_the_request_and_hold_their_text(system: str) -> None:
    texts = [system, "And kind.", "hi", "hello there", "", "日本"]
    roles = ["system", "system", "user", "assistant", "user", "user"]
    made, ids = parts(said(*zip(roles, texts, strict=True)))
    assert [part.name for part in made] == ["system", *(f"messages[{number}]" for number in range(2, 6))]
    held = [TOKENIZER.decode(ids[part.start : part.end]) for part in made]
    assert held[1:] == texts[2:]
    assert held[0].startswith(texts[0])
    assert held[0].endswith(texts[1])


def test_without_a_system_message_the_part_is_what_the_template_says() -> None:
    template = (
        "You are Tiny.{% for message in messages %}<|im_start|>{{ message.content | trim }}{% endfor %}"
    )
    made, ids = parts(said(("user", " hi "), ("assistant", "ho")), template)
    assert [part.name for part in made] == ["system", "messages[0]", "messages[1]"]
    assert [TOKENIZER.decode(ids[part.start : part.end]) for part in made] == [
        "You are Tiny.<|im_start|>",
        "hi",
        "ho",
    ]


def test_digests_are_of_role_and_text_wherever_the_message_is() -> None:
    first, _ = parts(said(("system", "a"), ("user", "x"), ("assistant", "y")))
    second, _ = parts(said(("user", "y"), ("user", "x")))
    assert first[1].digest == second[2].digest
    assert len({part.digest for part in (*first, *second)}) == 5


def test_what_a_template_rewrote_is_searched_once() -> None:
    template = "{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    made, _ = parts(said(*[("user", f"text {number}") for number in range(50)]), template)
    assert {(part.start, part.end) for part in made} == {(0, 0)}


def test_sizes_of_a_sentencepiece_vocabulary() -> None:
    vocab = {"\u2581the": 0, "<0xE4>": 1, "<s>": 2, "日": 3}
    sizes = TokenSizes(vocab, 6)  # ids 4 and 5 are no tokens
    assert sizes.places(ids_of([2, 0, 1, 3, 4]), [0, 3, 4, 7, 8, 11]) == [0, 1, 1, 2, 3, 5]
