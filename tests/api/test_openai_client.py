"""The real openai client against the real service: what it gets is what OpenAI would send."""

from __future__ import annotations

import math

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.support.services.service import MODEL, Service

BLOCK = 16
Messages = list[ChatCompletionMessageParam]


def ask(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def test_not_streamed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ask("What is the capital of France?"), temperature=0, max_tokens=40
    )
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert isinstance(answer.usage.prompt_tokens_details.cached_tokens, int)


def test_streamed_equals_not_streamed(client: openai.OpenAI) -> None:
    params = {"model": MODEL, "messages": ask("Name three colours."), "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(**params)
    chunks = list(
        client.chat.completions.create(**params, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert not any(reasons[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_stop_seed_and_length(client: openai.OpenAI) -> None:
    base = client.chat.completions.create(
        model=MODEL, messages=ask("Count from one to ten."), temperature=0, max_tokens=40
    )
    text = base.choices[0].message.content or ""
    stop = text[len(text) // 2 :][:4]
    stopped = client.chat.completions.create(
        model=MODEL, messages=ask("Count from one to ten."), temperature=0, max_tokens=40, stop=[stop]
    )
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    short = client.chat.completions.create(model=MODEL, messages=ask("Hello"), max_tokens=3, temperature=0)
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None
    assert short.usage.completion_tokens == 3
    drawn = [
        client.chat.completions.create(
            model=MODEL, messages=ask("Invent a name."), seed=seed, temperature=1.5, max_tokens=16
        )
        .choices[0]
        .message.content
        for seed in (5, 5, 6)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ask("Say yes."), temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert b"".join(bytes(item.bytes or []) for item in content).decode() == answer.choices[0].message.content
    for item in content:
        assert len(item.top_logprobs) == 3
        assert math.isclose(item.logprob, max(top.logprob for top in item.top_logprobs), abs_tol=1e-5)


def test_three_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ask("Write a short poem."), n=3, temperature=1.2, seed=1, max_tokens=20
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ask("Write a short poem."),
        n=3,
        temperature=1.2,
        seed=1,
        max_tokens=20,
        stream=True,
    )
    texts = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=2
    )
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens is not None
    assert len(answer.choices[0].logprobs.tokens) == 4
    prompts = ["One, two,", "A, B,"]
    several = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=3)
    assert [choice.index for choice in several.choices] == [0, 1]


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL]
    assert client.models.retrieve(MODEL).model_extra["max_model_len"] == 8192  # type: ignore[index]


class TestSecondTurn:
    def turns(self, client: openai.OpenAI, edit: bool) -> tuple[int, int, int]:
        """(prompt, answer) tokens of the first turn and cached tokens of the second."""
        messages = ask(f"Tell me about tea, in two sentences. {edit}")
        # Sampled, so that the answer is nothing a tokenizer would have produced by itself.
        first = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=1.3, seed=11, max_tokens=60
        )
        reply = first.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": "Well. " + reply if edit else reply})
        messages.append({"role": "user", "content": "Thank you. Why?"})
        second = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=4)
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        cached = second.usage.prompt_tokens_details.cached_tokens or 0
        return first.usage.prompt_tokens, first.usage.completion_tokens, cached

    def test_unchanged_reply_hits_what_was_computed_of_the_first(self, client: openai.OpenAI) -> None:
        prompt, answer, cached = self.turns(client, edit=False)
        computed = prompt + answer - 1  # the last sampled token's slot is never written
        # Full blocks are in the pool; the partial one behind them comes from a tier, if it is stored by then.
        assert cached in (computed // BLOCK * BLOCK, computed)

    def test_edited_reply_falls_back(self, client: openai.OpenAI) -> None:
        prompt, _, cached = self.turns(client, edit=True)
        assert 0 < cached <= prompt // BLOCK * BLOCK


def test_headers(service: Service) -> None:
    body = {
        "model": MODEL,
        "messages": ask("Say something unusual."),
        "max_tokens": 2,
        "no_such_field": 1,
        "cache_salt": "nobody has used this one before",
    }
    with service.http() as http:
        same = {"x-session-id": "s1"}
        answers = [http.post("/v1/chat/completions", json=body, headers=same) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].headers["x-replica"] == answers[1].headers["x-replica"], "a session stays"
    assert answers[0].headers["x-cache"].startswith("miss")
    assert answers[1].headers["x-cache"].startswith("hit")
    assert answers[0].headers["x-ignored-fields"] == "no_such_field"
    assert answers[0].headers["x-request-id"] != answers[1].headers["x-request-id"]


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"n": 100}, openai.BadRequestError, "n"),
        ({"max_tokens": 9000}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools[0].type"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "functions"),
    ],
)
def test_errors(
    client: openai.OpenAI, change: dict[str, object], error: type[openai.APIStatusError], param: str
) -> None:
    request: dict[str, object] = {"model": MODEL, "messages": ask("Hi"), **change}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**request)  # type: ignore[call-overload]
    assert caught.value.param == param
    assert caught.value.body is not None


def test_context_length_names_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ask("tea " * 9000))
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in caught.value.message
