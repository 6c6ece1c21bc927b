"""Calls of the real model over the three APIs: streamed token by token, cut, stopped, with marks in texts.

What is forced by a schema or a regex is the same whatever the model: other servers' bug reports are tried so.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

import httpx
import openai
import pytest

from tests.support.services.service import MODEL, Service

LONG = " ".join(f"w{number} </tool_call>" for number in range(20))
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
NOTE = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def said(text: str) -> dict[str, Any]:
    """The schema of arguments that are one text."""
    only = {"type": "object", "properties": {"text": {"const": text}}, "required": ["text"]}
    return {**only, "additionalProperties": False}


def forcing(path: str, schema: dict[str, Any], tokens: int, **fields: Any) -> dict[str, Any]:
    """A request whose answer is a call of `note`."""
    user = [{"role": "user", "content": f"Go. {uuid.uuid4().hex}"}]
    if path == "/v1/messages":
        tools: Any = [{"name": "note", "input_schema": schema}]
        choice: Any = {"type": "tool", "name": "note"}
        made = {"messages": user, "max_tokens": tokens, "temperature": 0}
    elif path == "/v1/responses":
        tools = [{"type": "function", "name": "note", "parameters": schema}]
        choice = {"type": "function", "name": "note"}
        made = {"input": user, "max_output_tokens": tokens, "temperature": 0}
    else:
        tools = [{"type": "function", "function": {"name": "note", "parameters": schema}}]
        choice = {"type": "function", "function": {"name": "note"}}
        made = {"messages": user, "max_tokens": tokens, "temperature": 0}
    return {"model": MODEL, **made, "tools": tools, "tool_choice": choice, **fields}


def post(service: Service, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{service.url}{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(service: Service, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = httpx.post(f"{service.url}{path}", json={**body, "stream": True}, timeout=120)
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]


def part_of(event: dict[str, Any]) -> str:
    """The part of a call's arguments that an event says."""
    if "choices" in event:
        made = [one for choice in event["choices"] for one in choice["delta"].get("tool_calls", [])]
        return "".join(one["function"]["arguments"] for one in made)
    if event["type"] == "content_block_delta":
        return str(event["delta"].get("partial_json", ""))
    return str(event["delta"]) if event["type"] == "response.function_call_arguments.delta" else ""


def both(service: Service, **fields: Any) -> tuple[str, list[tuple[str, str]], str]:
    """Text, calls and finish reason of a chat's answer, which are the same streamed."""
    body = {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": "Go."}], **fields}
    (choice,) = post(service, PATHS[0], body)["choices"]
    named = [one["function"] for one in choice["message"].get("tool_calls", [])]
    calls = [(one["name"], one["arguments"]) for one in named]
    text, streamed, finish = "", list[list[str]](), ""
    for event in events(service, PATHS[0], body):
        (told,) = event["choices"]
        text += told["delta"].get("content") or ""
        for one in told["delta"].get("tool_calls", []):
            if "name" in one["function"]:
                streamed.append([one["function"]["name"], ""])
            streamed[-1][1] += one["function"]["arguments"]
        finish = told["finish_reason"] or finish
    whole = (choice["message"]["content"] or "", calls, choice["finish_reason"])
    assert (text, [(name, arguments) for name, arguments in streamed], finish) == whole
    return whole


def pattern(text: str) -> str:
    """A regex of one text."""
    return "".join(
        "\\n" if char == "\n" else f"\\{char}" if char in r"\.^$*+?{}[]()|/" else char for char in text
    )


def tool(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "note", "parameters": schema}}]


@pytest.mark.parametrize("path", PATHS)
def test_a_call_of_hundreds_of_tokens_comes_token_by_token(service: Service, path: str) -> None:
    """Of a text that the model makes up: one that the prompt holds is drafted, several tokens a step.

    Tokens that came while a reader was busy are one delta: a machine with other work gives 111 of 340, or
    fewer; `tests/unit` counts each. A call that is held until it ends is two or three.
    """
    wish = {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 4000}},
        "required": ["text"],
    }
    told = events(service, path, forcing(path, wish, 340) | {"temperature": 1.0})
    parts = [part for event in told if (part := part_of(event))]
    assert len(parts) > 340 / 20
    assert "".join(parts).lstrip("{ ").startswith('"text"')


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tokens", [4, 24])
def test_a_promised_call_that_is_cut_is_a_call(service: Service, path: str, tokens: int) -> None:
    answer = post(service, path, forcing(path, said(LONG), tokens))
    if path == PATHS[0]:
        (choice,) = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "note"
        arguments = call["function"]["arguments"]
    elif path == "/v1/messages":
        (block,) = answer["content"]
        assert (block["type"], block["name"], answer["stop_reason"]) == ("tool_use", "note", "max_tokens")
        arguments = "".join(part_of(one) for one in events(service, path, forcing(path, said(LONG), tokens)))
    else:
        (item,) = answer["output"]
        assert (item["type"], item["name"], item["status"]) == ("function_call", "note", "incomplete")
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        arguments = item["arguments"]
    assert json.dumps({"text": LONG}).replace(" ", "").startswith(arguments.replace(" ", ""))
    assert bool(arguments) == (tokens > 20)


MARKS = [
    "a </tool_call> b",
    "</tool_call>",
    "<tool_call> x",
    'see <tool_call>{"name": 1}</tool_call>',
    "}} </tool_call>",
]


@pytest.mark.parametrize("text", MARKS)
def test_a_mark_within_an_argument_is_text(service: Service, text: str) -> None:
    """gLLM 286, Rapid-MLX 1511 and 1730."""
    call = f'<tool_call>\n{{"name": "note", "arguments": {json.dumps({"text": text})}}}\n</tool_call>'
    form = {"structured_outputs": {"regex": pattern(call)}}
    wanted = ("", [("note", json.dumps({"text": text}))], "tool_calls")
    assert both(service, tools=tool(NOTE), max_tokens=120, **form) == wanted
    content, ((_, arguments),), finish = both(
        service, tools=tool(said(text)), tool_choice="required", parallel_tool_calls=False, max_tokens=120
    )
    assert (content, json.loads(arguments), finish) == ("", {"text": text}, "tool_calls")


@pytest.mark.parametrize(
    "fields", [{}, {"tools": tool(NOTE), "tool_choice": "none"}], ids=["without", "none"]
)
def test_markup_is_text_where_nothing_may_be_called(service: Service, fields: dict[str, Any]) -> None:
    """Rapid-MLX 1766."""
    text = (
        'Write <tool_call>\n{"name": "note", "arguments": {}}\n</tool_call>. <think>no</think> [TOOL_CALLS]'
    )
    form = {"structured_outputs": {"regex": pattern(text)}}
    assert both(service, max_tokens=120, **form, **fields) == (text, [], "stop")


@pytest.mark.parametrize("stop", ["</", "}}\n", "<tool", '"arg', "Paulo", "> o", "ok", " <"])
def test_a_stop_string_cuts_a_stream_as_it_cuts_the_whole(service: Service, stop: str) -> None:
    """vLLM 42210."""
    text = 'Sure. <tool_call>\n{"name": "note", "arguments": {"text": "São Paulo"}}\n</tool_call> ok'
    form = {"structured_outputs": {"regex": pattern(text)}, "stop": [stop], "max_tokens": 120}
    content, calls, finish = both(service, tools=tool(NOTE), **form)
    assert content.startswith("S")
    assert "</tool" not in content
    for _, arguments in calls:
        assert '{"text": "São Paulo"}'.startswith(arguments)
    assert finish == ("tool_calls" if calls and calls[0][1].endswith("}") else "stop")


def test_a_cut_call_goes_on_from_the_message_that_holds_it(service: Service) -> None:
    """halogen-flash-server 96."""
    begun = '<tool_call>\n{"name": "note", "arguments": {"text": "abc'
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": begun}]
    form = {"structured_outputs": {"regex": pattern('def"}}\n</tool_call>')}}
    fields = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 60}
    made = both(service, messages=messages, tools=tool(NOTE), **form, **fields)
    assert made == ("", [("note", '{"text": "abcdef"}')], "tool_calls")


@pytest.mark.parametrize(
    "begun", ["The colour is ", "The colour is\n", "\n\n", " ", '{"a": ', "  a\n    ", "café 🚀"]
)
def test_an_answer_goes_on_from_the_letters_of_its_beginning(service: Service, begun: str) -> None:
    """llama.cpp 23089, transformers 46326."""
    messages = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": begun}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    tokens = post(service, "/tokenize", {"messages": messages, **fields})["tokens"]
    prompt = post(service, "/detokenize", {"tokens": tokens})["prompt"]
    assert prompt.endswith(f"<|im_start|>assistant\n{begun}")
    common = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    whole = post(service, "/v1/completions", {**common, "prompt": prompt})["choices"][0]["text"]
    chat = post(service, PATHS[0], {**common, "messages": messages, **fields})
    assert chat["choices"][0]["message"]["content"] == whole
    blocks = post(service, "/v1/messages", {**common, "messages": messages})["content"]
    assert "".join(block["text"] for block in blocks) == whole


def test_several_answers_end_once_each_and_are_the_same_streamed(
    client: openai.OpenAI, service: Service
) -> None:
    """vLLM 11898 and 10980, SGLang 5525."""
    user = f"{uuid.uuid4().hex}: count: 1 2 3 4 5 6 7 8 9 and tell a story"
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": user}], "max_tokens": 30}
    body |= {"temperature": 1.3, "seed": 11, "n": 4, "stop": [" 5", "ee", "th"], "logprobs": True}
    told = events(service, PATHS[0], body)
    whole = post(service, PATHS[0], body)
    texts, ends = dict.fromkeys(range(4), ""), dict[int, list[str]]()
    for event in told:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                ends.setdefault(choice["index"], []).append(choice["finish_reason"])
    made = {one["index"]: (one["message"]["content"], one["finish_reason"]) for one in whole["choices"]}
    assert made == {index: (text, ends[index][0]) for index, text in texts.items()}
    assert [len(reasons) for reasons in ends.values()] == [1] * 4
    assert len(set(texts.values())) > 1
    for one in whole["choices"]:
        scored = b"".join(bytes(token["bytes"]) for token in one["logprobs"]["content"])
        assert scored.decode(errors="replace").startswith(one["message"]["content"])
    usage = whole["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    greedy = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], n=3, temperature=0, max_tokens=6
    )
    assert len({choice.message.content for choice in greedy.choices}) == 1


@pytest.mark.parametrize("is_text_first", [True, False])
def test_a_messages_request_counts_what_it_uses(service: Service, is_text_first: bool) -> None:
    """vLLM 38738, Zoo-Code 1705."""
    called = [{"type": "tool_use", "id": f"t{number}", "name": "note", "input": {}} for number in (1, 2)]
    results = [{"type": "tool_result", "tool_use_id": f"t{number}", "content": "ok"} for number in (1, 2)]
    text = [{"type": "text", "text": "Now?"}]
    body = {
        "model": MODEL,
        "tools": [{"name": "note", "input_schema": NOTE}],
        "messages": [
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": called},
            {"role": "user", "content": [*text, *results] if is_text_first else [*results, *text]},
        ],
    }
    counted = post(service, "/v1/messages/count_tokens", body)["input_tokens"]
    usage = post(service, "/v1/messages", {**body, "max_tokens": 4})["usage"]
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(usage[part] or 0 for part in parts) == counted


def test_an_answer_that_is_a_call_has_no_empty_text_block(service: Service) -> None:
    """vLLM 22627."""
    body = forcing("/v1/messages", said("x </tool_call> y"), 80)
    whole = post(service, "/v1/messages", body)
    assert [block["type"] for block in whole["content"]] == ["tool_use"]
    assert whole["content"][0]["input"] == {"text": "x </tool_call> y"}
    told = events(service, "/v1/messages", body)
    begun = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
    assert begun == ["tool_use"]
    assert json.loads("".join(part_of(event) for event in told)) == whole["content"][0]["input"]
