"""What evaluation harnesses ask for: echo, log-probabilities of prompts, token ids, tokenizer routes."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from samovar.replicas.messages import Admitted, Delta, GenerateRequest, TokenLogprob
from samovar.router.routing.replica_client import ReplicaLost
from tests.support.router.fake_replica import Script, say
from tests.support.router.router_harness import (
    CONTEXT,
    KEY,
    MODEL,
    TOKENIZER,
    House,
    chat,
    error_of,
    make_settings,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def name(token_id: int) -> str:
    return TOKENIZER.decode([token_id])


def logprob(token_id: int, value: float, rank: int = 0, top: int = 0) -> TokenLogprob:
    best = tuple(TokenLogprob(60 + n, name(60 + n), b"?", -0.1 * (n + 1)) for n in range(top))
    return TokenLogprob(token_id, name(token_id), name(token_id).encode(), value, best, rank)


def script(request: GenerateRequest) -> Script:
    """A replica whose tokens all have -1, in the prompt, and -2 behind it."""
    params, ids = request.sampling, request.prompt_token_ids
    scored: tuple[TokenLogprob, ...] = ()
    if params.prompt_logprobs is not None:
        first = max(1, params.prompt_logprobs_from)
        scored = tuple(
            logprob(token, -1.0, 4, params.prompt_logprobs) if place >= first else logprob(token, 0.0)
            for place, token in enumerate(ids)
        )
    said = () if params.logprobs is None else (logprob(70, -2.0, 0, params.logprobs),)
    events: Script = [Admitted("replica-1", 0, 0.0, prompt_logprobs=scored)]
    for choice in range(request.n):
        events.append(Delta(choice, "!", (70,), said, "length"))
    return events


async def completion(**fields: Any) -> dict[str, Any]:
    async with House(script).client() as client:
        response = await client.post(COMPLETIONS, json={"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["the hare", [40, 41, 42]], ids=["text", "ids"])
async def test_echo_with_logprobs_as_lm_eval_reads_it(prompt: Any, max_tokens: int) -> None:
    """Its `local-completions` sums `token_logprobs[context:-1]` and compares each with its `top_logprobs`."""
    body = await completion(prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0)
    (choice,) = body["choices"]
    ids = prompt if isinstance(prompt, list) else TOKENIZER.encode(prompt)
    text = "".join(map(name, ids))
    shown = choice["logprobs"]
    assert choice["text"] == text + "!" * max_tokens
    assert shown["tokens"] == [name(token) for token in [*ids, *[70] * max_tokens]]
    assert shown["token_logprobs"] == [None, *[-1.0] * (len(ids) - 1), *[-2.0] * max_tokens]
    assert shown["top_logprobs"][0] is None
    assert all(max(top.values()) == -0.1 for top in shown["top_logprobs"][1:])
    assert shown["text_offset"][1] == len(name(ids[0]))
    assert body["usage"]["completion_tokens"] == max_tokens
    assert body["usage"]["prompt_tokens"] == len(ids)
    assert "prompt_logprobs" not in choice


async def test_echo_of_several_prompts_and_answers_keeps_them_apart() -> None:
    body = await completion(prompt=[[40], [41, 42]], n=2, echo=True, logprobs=0, max_tokens=1)
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == [name(40) + "!"] * 2 + [name(41) + name(42) + "!"] * 2
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [2, 2, 3, 3]


async def test_echo_without_logprobs_computes_none() -> None:
    house = House(script)
    async with house.client() as client:
        body = {"model": MODEL, "prompt": "abc", "echo": True, "max_tokens": 1}
        answer = (await client.post(COMPLETIONS, json=body)).json()
    assert answer["choices"][0]["text"] == "abc!"
    assert answer["choices"][0]["logprobs"] is None
    assert house.replicas.calls[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_prompt_logprobs_and_token_ids_have_vllms_shape(path: str) -> None:
    asked: dict[str, Any] = {"prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 1}
    asked |= {"prompt": [40, 41, 42]} if path == COMPLETIONS else {"messages": chat()["messages"]}
    house = House(script)
    async with house.client() as client:
        body = (await client.post(path, json={"model": MODEL, **asked})).json()
    choice = body["choices"][0]
    ids = house.replicas.calls[0].prompt_token_ids
    place = choice if path == COMPLETIONS else body
    assert place["prompt_token_ids"] == ids
    assert choice["token_ids"] == [70]
    first, *others = place["prompt_logprobs"]
    assert first is None
    assert others == [
        {
            str(token): {"logprob": -1.0, "rank": 4, "decoded_token": name(token)},
            "60": {"logprob": -0.1, "rank": 1, "decoded_token": name(60)},
        }
        for token in ids[1:]
    ]


async def test_log_probabilities_may_begin_later() -> None:
    body = await completion(prompt=[40, 41, 42, 43], logprob_start_len=3, echo=True, logprobs=0, max_tokens=0)
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, None, None, -1.0]


async def test_tokens_may_be_named_by_their_ids() -> None:
    fields = {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True, "max_tokens": 1}
    shown = (await completion(prompt=[40, 41], **fields))["choices"][0]["logprobs"]
    assert shown["tokens"] == ["token_id:40", "token_id:41", "token_id:70"]
    assert set(shown["top_logprobs"][1]) == {"token_id:60", "token_id:41"}
    async with House(script).client() as client:
        asked = chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, max_tokens=1)
        (token,) = (await client.post(CHAT, json=asked)).json()["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["top_logprobs"][0]["token"]) == ("token_id:70", "token_id:60")


async def test_a_stream_shows_the_prompt_first_and_its_ids_once() -> None:
    fields = {"stream": True, "echo": True, "logprobs": 0, "return_token_ids": True, "max_tokens": 1}
    async with House(script).client() as client:
        text = (await client.post(COMPLETIONS, json={"model": MODEL, "prompt": [40, 41], **fields})).text
        talk = (await client.post(CHAT, json=chat(stream=True, return_token_ids=True, max_tokens=1))).text
    chunks = [json.loads(line[6:])["choices"][0] for line in text.split("\n\n") if line.startswith("data: {")]
    assert [chunk["text"] for chunk in chunks] == [name(40) + name(41), "!", ""]
    assert [chunk["token_ids"] for chunk in chunks] == [[], [70], []]
    assert chunks[0]["logprobs"]["token_logprobs"] == [None, -1.0]
    assert chunks[1]["logprobs"]["text_offset"] == [len(name(40) + name(41))]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[40, 41], None, None]
    events = [json.loads(line[6:]) for line in talk.split("\n\n") if line.startswith("data: {")]
    assert [bool(event.get("prompt_token_ids")) for event in events] == [True, False, False]
    assert [event["choices"][0].get("token_ids") for event in events] == [None, [70], []]


async def test_too_many_log_probabilities_are_a_400_that_names_the_field() -> None:
    house = House(script, settings=make_settings(limits={"prompt_logprobs_max": 100}))
    async with house.client() as client:
        for fields, param in (
            ({"prompt_logprobs": 4}, "prompt_logprobs"),
            ({"echo": True, "logprobs": 4}, "logprobs"),
        ):
            body = {"model": MODEL, "prompt": [5] * 21, "max_tokens": 1, **fields}
            refused = await client.post(COMPLETIONS, json=body)
            assert (refused.status_code, error_of(refused)["param"]) == (400, param)
            assert "limits.prompt_logprobs_max" in error_of(refused)["message"]
        body = {"model": MODEL, "prompt": [5] * 20, "max_tokens": 1, "prompt_logprobs": 4}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200


async def test_allowed_tokens_reach_the_replica_and_unknown_ones_do_not() -> None:
    house = House(script)
    async with house.client() as client:
        assert (await client.post(CHAT, json=chat(allowed_token_ids=[7, 9]))).status_code == 200
        assert house.replicas.calls[0].sampling.allowed_token_ids == (7, 9)
        refused = await client.post(CHAT, json=chat(allowed_token_ids=[7, 512]))
        assert (refused.status_code, error_of(refused)["param"]) == (400, "allowed_token_ids")


# The tokenizer's routes ----------------------------------------------------------------------


async def test_texts_to_tokens_and_back() -> None:
    text = "Samovar keeps tea hot: 茶"
    async with House().client() as client:
        told = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        assert told["tokens"] == TOKENIZER.encode(text)
        assert told["count"] == len(told["tokens"])
        assert told["max_model_len"] == CONTEXT
        assert told["token_strs"] == TOKENIZER.convert_ids_to_tokens(told["tokens"])
        back = (await client.post("/detokenize", json={"model": MODEL, "tokens": told["tokens"]})).json()
        assert back == {"prompt": text}
        long = (await client.post("/tokenize", json={"prompt": "long " * 9000, "model": MODEL})).json()
        assert long["count"] > CONTEXT
        assert long["token_strs"] is None


async def test_a_conversation_is_counted_as_it_would_be_prompted() -> None:
    house = House()
    async with house.client() as client:
        asked = {key: value for key, value in chat("hello there").items() if key == "messages"}
        told = (await client.post("/tokenize", json=asked)).json()
        await client.post(CHAT, json=chat("hello there"))
        assert told["tokens"] == house.replicas.calls[0].prompt_token_ids
        closed = (await client.post("/tokenize", json={**asked, "add_generation_prompt": False})).json()
        assert closed["count"] < told["count"]


async def test_the_tokenizer_is_described_without_its_paths() -> None:
    """lm-eval's remote tokenizer needs `eos_token` and `chat_template`."""
    async with House().client() as client:
        told = (await client.get("/tokenizer_info")).json()
    assert (told["eos_token"], told["bos_token"]) == ("<|im_end|>", "<|im_start|>")
    assert told["tokenizer_class"]
    assert "add_generation_prompt" in told["chat_template"]
    assert told["model_max_length"] == CONTEXT
    assert told["added_tokens_decoder"]["2"]["content"] == "<|im_end|>"
    assert not any("path" in key or "file" in key for key in told)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "alien", "content": "a"}]}, 400, "messages[0].role"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [512]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_bad_tokenizer_requests_name_the_field(
    path: str, body: dict[str, Any], status: int, param: str
) -> None:
    async with House().client() as client:
        response = await client.post(path, json=body)
    assert (response.status_code, error_of(response)["param"]) == (status, param)


async def test_the_tokenizers_routes_need_a_key() -> None:
    async with House(settings=make_settings(keys={"alpha": KEY})).client() as client:
        for method, path in (("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/tokenizer_info")):
            assert (await client.request(method, path)).status_code == 401
        told = await client.get("/tokenizer_info", headers={"x-api-key": KEY})
        assert told.status_code == 200


# A thousand requests -------------------------------------------------------------------------

ODD: list[Any] = [
    None, True, False, 0, 1, -1, -2, 3, 16, 40.0, 40.5, 1e300, -1e300, 2**31, 2**63, "", "x", "none", "auto",
    "in-memory", [], [None], [""], [0], [1, 2], [-1], [511], [512], ["a", None], {}, {"a": 1}, {"a": None},
    {"type": "text"}, {"type": "json_object"}, {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": False, "continuous_usage_stats": True}, {"enable_thinking": True}, [[1], [2]],
    "a" * 300,
]  # fmt: skip
NEW_FIELDS = (
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "chat_template_kwargs",
    "continue_final_message", "echo", "grammar", "guided_choice", "guided_json", "json_schema",
    "logprob_start_len", "logprobs", "max_completion_tokens", "max_tokens", "metadata", "min_tokens", "n",
    "prompt", "prompt_cache_retention", "prompt_logprobs", "reasoning_effort", "response_format",
    "return_token_ids", "return_token_strs", "return_tokens_as_token_ids", "seed", "stop", "stream",
    "stream_options", "structured_outputs", "tokens", "tool_choice", "top_k", "top_logprobs",
    "truncate_prompt_tokens",
)  # fmt: skip


async def test_f31_a_thousand_odd_requests_get_no_5xx() -> None:
    """Each is served or refused with a 4xx of OpenAI's shape; none is answered with a broken stream."""
    rng = random.Random(21)
    statuses: dict[int, int] = {}
    house = House(script)
    async with house.client() as client:
        for _ in range(1000):
            path = rng.choice([CHAT, CHAT, COMPLETIONS, COMPLETIONS, COMPLETIONS, "/tokenize", "/detokenize"])
            body: dict[str, Any] = {"model": MODEL}
            if path == CHAT:
                body["messages"] = chat("hi there")["messages"]
            elif path == "/detokenize":
                body["tokens"] = [5, 6]
            else:
                body["prompt"] = rng.choice(["the hare", [5, 6, 7], [[5], [6, 7]], ["a", "b"]])
            for field in rng.sample(NEW_FIELDS, rng.randint(0, 4)):
                body[field] = rng.choice(ODD)
            response = await client.post(path, json=body)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            assert response.status_code in (200, 400), (path, body, response.text[:300])
            if response.status_code == 400:
                error_of(response)
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert response.text.endswith("data: [DONE]\n\n"), (path, body)
                assert '"error"' not in response.text, (path, body, response.text[:300])
            else:
                response.json()
    assert statuses[200] > 200, "the fuzz refuses everything"
    assert statuses[400] > 200, "the fuzz finds nothing to refuse"


async def test_a_failover_asks_nobody_for_the_prompts_log_probabilities_again() -> None:
    """They came with the admission, before the first token."""
    lost: list[GenerateRequest] = []

    def once(request: GenerateRequest) -> Script:
        if request.resume is None:
            lost.append(request)
            ids = request.prompt_token_ids
            scored = tuple(logprob(token, -1.0, 4 if place else 0) for place, token in enumerate(ids))
            admitted = Admitted("replica-1", 0, 0.0, prompt_logprobs=scored)
            return [admitted, Delta(0, "a", (70,), (logprob(70, -2.0),)), ReplicaLost("gone")]
        assert request.sampling.prompt_logprobs is None
        return say(["b"])

    house = House(once)
    async with house.client() as client:
        asked = {"model": MODEL, "prompt": [40, 41, 42], "max_tokens": 4, "echo": True, "logprobs": 0}
        body = (await client.post(COMPLETIONS, json=asked)).json()
    assert len(lost) == 1
    assert body["choices"][0]["text"].endswith("ab")
    assert body["choices"][0]["logprobs"]["token_logprobs"][:3] == [None, -1.0, -1.0]
