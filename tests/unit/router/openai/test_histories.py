"""Histories of any provider are read: only the user's last message is refused for what it holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from samovar.configs.settings import LimitsSettings
from samovar.router.anthropic.request import MessagesParser
from samovar.router.openai import ApiError, ParsedChat, RequestParser, left_out, readable_arguments
from samovar.router.responses.request import ResponsesParser
from samovar.router.responses.store import ResponseStore

LIMITS = LimitsSettings()
PARSER = RequestParser(LIMITS, 8192)
RESPONSES = ResponsesParser(PARSER, LIMITS, ResponseStore(4, 1 << 20))
MESSAGES = MessagesParser(PARSER, LIMITS, frozenset())
Json = dict[str, Any]


def chat(*history: Json) -> ParsedChat:
    messages = [{"role": "user", "content": "Go."}, *history, {"role": "user", "content": "Again."}]
    return PARSER.chat(json.dumps({"model": "m", "messages": messages}).encode())


def responses(*history: Json) -> ParsedChat:
    items = [{"role": "user", "content": "Go."}, *history, {"role": "user", "content": "Again."}]
    return RESPONSES.response(json.dumps({"model": "m", "input": items}).encode(), "t")


def messages(*history: Json) -> ParsedChat:
    said = [{"role": "user", "content": "Go."}, *history, {"role": "user", "content": "Again."}]
    return MESSAGES.messages(json.dumps({"model": "m", "max_tokens": 5, "messages": said}).encode())


def call(arguments: str | None, **more: Any) -> Json:
    given = {"id": "c1", "type": "function", "function": {"name": "note", "arguments": arguments}} | more
    return {"role": "assistant", "content": None, "tool_calls": [given]}


RESULT: Json = {"role": "tool", "tool_call_id": "c1", "content": "failed"}

BROKEN = {
    "cut": '{"text": "abc',
    "bad escape": '{"text": "\\x"}',
    "a list": "[1]",
    "a string": '"x"',
    "a number": "3",
    "trailing": '{"text": "a"}}',
    "single quotes": "{'text': 'a'}",
    "half a character": '{"text": "\\ud83d"}',
    "a line end in a string": '{"text": "a\nb"}',
    "words": "call it with five",
    "deep": "[" * 5000,
    "deeper than templates follow": '{"a":' * 150 + "1" + "}" * 150,
}


@pytest.mark.parametrize("arguments", BROKEN.values(), ids=BROKEN)
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str) -> None:
    asked = [
        (chat(call(arguments), RESULT), "messages[1].tool_calls[0].function.arguments"),
        (
            responses(
                {"type": "function_call", "call_id": "c1", "name": "note", "arguments": arguments},
                {"type": "function_call_output", "call_id": "c1", "output": "failed"},
            ),
            "input[1].arguments",
        ),
        (
            messages(
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "note", "input": arguments}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "f"}]},
            ),
            "messages[1].content[0].input",
        ),
    ]
    for parsed, place in asked:
        said = parsed.messages[1].calls[0].arguments
        assert json.loads(said) == {"unparsed": arguments}, "what was said is shown"
        assert place in parsed.ignored_fields


@pytest.mark.parametrize("arguments", ["", "  ", "null", None])
def test_no_arguments_are_none(arguments: str | None) -> None:
    parsed = chat(call(arguments), RESULT)
    assert parsed.messages[1].calls[0].arguments == "{}"


def test_arguments_that_can_be_read_are_as_they_came() -> None:
    as_object = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert chat(as_object).messages[1].calls[0].arguments == '{"a": 1}'
    for text in ('{"a": 1}', '{ "a":1.10}', '{"a": "a", "a": "b"}'):
        assert readable_arguments(text) == text


PARTS = ["image_url", "input_audio", "file", "video_url", "search_result", "server_tool_use", "input_image"]


@pytest.mark.parametrize("kind", PARTS)
def test_what_the_model_cannot_see_is_a_line_except_in_the_last_user_message(kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:"}}
    text = {"type": "text", "text": "Look: "}
    for role in ("user", "assistant", "system"):
        parsed = chat({"role": role, "content": [text, part]})
        assert parsed.messages[1].content == "Look: " + left_out(kind)
        assert "messages[1].content[1]" in parsed.ignored_fields
    of_tool = chat(call("{}"), {**RESULT, "content": [part]})
    assert of_tool.messages[2].content == left_out(kind)
    with pytest.raises(ApiError) as refused:
        PARSER.chat(_chat_body([{"role": "user", "content": [text, part]}]))
    assert refused.value.param == "messages[0].content[1].type"
    # A picture that a tool has just returned is no fault of its user's.
    last = PARSER.chat(
        _chat_body([{"role": "user", "content": "x"}, call("{}"), {**RESULT, "content": [part]}])
    )
    assert last.messages[2].content == left_out(kind)


def _chat_body(messages: Sequence[Json]) -> bytes:
    return json.dumps({"model": "m", "messages": list(messages)}).encode()


def test_a_chats_history_of_other_times_and_providers() -> None:
    parsed = chat(
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": None, "refusal": "never"},
        {"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "old", "content": "result"},
        {"role": "user", "content": None},
        {
            "role": "assistant",
            "tool_calls": [{"type": "custom", "custom": {"name": "patch", "input": "*** x"}}],
        },
        {"role": "tool", "content": "patched"},
        {"role": "tool", "tool_call_id": "nobody", "content": "lost"},
        {"role": "assistant", "tool_calls": [{"id": "x", "type": "web"}, {"id": "x", "type": "web"}]},
        {"role": "assistant", "tool_calls": [{"id": "y", "function": {"name": "a b", "arguments": "{}"}}]},
    )
    thought, refusal, whole_refusal, old, result, nothing, custom, patched, lost, web, odd = parsed.messages[
        1:-1
    ]
    assert (thought.reasoning, thought.content) == ("hm", "a")
    assert (refusal.content, whole_refusal.content) == ("no", "never")
    assert (old.calls[0].name, result.tool, result.call_id) == ("old", "old", old.calls[0].call_id)
    assert nothing.content == ""
    assert (custom.calls[0].name, json.loads(custom.calls[0].arguments)) == ("patch", {"input": "*** x"})
    assert (patched.tool, patched.call_id) == ("patch", custom.calls[0].call_id)
    assert (lost.role, lost.tool, lost.content) == ("tool", "", "lost")
    assert len({one.call_id for one in web.calls}) == 2
    assert odd.calls[0].name == "a b"
    assert {"messages[9].tool_call_id", "messages[7].tool_calls[0]"} <= set(parsed.ignored_fields)


def test_a_responses_history_of_other_tools() -> None:
    parsed = responses(
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
        {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c2", "output": "a.py"},
        {"type": "computer_call", "call_id": "c3", "action": {"type": "click", "x": 1}},
        {"type": "computer_call_output", "call_id": "c3", "output": {"type": "computer_screenshot"}},
        {"type": "shell_call", "call_id": "c4", "action": {"commands": ["pwd"]}},
        {"type": "shell_call_output", "call_id": "c4", "output": [{"stdout": "/", "outcome": {}}]},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "compaction", "id": "k", "encrypted_content": "xx"},
        {"type": "mcp_list_tools", "id": "m", "tools": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "So."}, {"type": "chart"}]},
        {"type": "function_call", "name": "", "arguments": "{}"},
        {"type": "function_call_output", "output": [{"type": "input_image", "image_url": "x"}]},
        {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]},
    )
    calls = [one for message in parsed.messages for one in message.calls]
    assert [one.name for one in calls] == ["apply_patch", "local_shell", "computer", "shell", "function"]
    assert json.loads(calls[0].arguments) == {"input": "*** Begin"}
    assert json.loads(calls[1].arguments)["command"] == ["ls"]
    results = [one for one in parsed.messages if one.role == "tool"]
    assert [one.tool for one in results] == [one.name for one in calls]
    assert results[2].content == left_out("computer_screenshot")
    for place in ("input[9]", "input[10]", "input[11]", "input[12].content[1]", "input[14].output[0]"):
        assert place in parsed.ignored_fields, parsed.ignored_fields
    items = [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]
    with pytest.raises(ApiError) as refused:
        RESPONSES.response(json.dumps({"model": "m", "input": items}).encode(), "t")
    assert refused.value.param == "input[0].content[0].type"


def test_a_response_says_how_it_was_asked_as_it_was_served() -> None:
    parser = RequestParser(LIMITS, 4096, {"temperature": 0.6, "top_p": 0.95})
    of_model = ResponsesParser(parser, LIMITS, ResponseStore(4, 1 << 20))
    asked = {"model": "m", "input": "hi", "text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}}
    made = of_model.response(json.dumps(asked | {"truncation": "auto"}).encode(), "t")
    echo = made.echo
    assert (echo["temperature"], echo["top_p"], echo["truncation"]) == (0.6, 0.95, "disabled")
    assert echo["reasoning"] == {"effort": None, "summary": None}
    assert made.ignored_fields == ("truncation", "text.verbosity", "reasoning.summary")
    told = {"model": "m", "input": "hi", "truncation": "disabled", "temperature": 0.2, "top_p": 1}
    again = of_model.response(json.dumps(told).encode(), "t")
    assert (again.echo["temperature"], again.echo["top_p"], again.ignored_fields) == (0.2, 1.0, ())


def test_a_messages_history_of_other_blocks() -> None:
    kinds = ("image", "search_result", "container_upload", "tool_reference")
    parsed = messages(
        {"role": "user", "content": [{"type": "text", "text": "See "}, *({"type": one} for one in kinds)]},
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                {
                    "type": "web_search_tool_result",
                    "tool_use_id": "s",
                    "content": [{"type": "web_search_result"}],
                },
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "error"}},
                {"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "x", "input": {}},
                {"type": "tool_use", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "content": [{"type": "image", "source": {"type": "base64"}}]},
                {"type": "document", "source": {"type": "text", "data": "The contract."}},
                {"type": "document", "source": {"type": "base64", "data": "JVBE"}},
            ],
        },
    )
    seen, answer, result, documents = parsed.messages
    assert seen.content == "Go.\n\nSee " + "".join(left_out(one) for one in kinds)
    assert answer.content.startswith(left_out("server_tool_use web_search"))
    assert result.content == left_out("image")
    assert (result.call_id, result.tool) == (answer.calls[0].call_id, answer.calls[0].name)
    assert documents.content == "The contract." + left_out("document") + "\n\nAgain."
    for place in ("messages[1].content[1]", "messages[2].content[0]", "messages[3].content[0].content[0]"):
        assert place in parsed.ignored_fields, parsed.ignored_fields
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}
    with pytest.raises(ApiError) as refused:
        MESSAGES.messages(json.dumps(body).encode())
    assert refused.value.param == "messages[0].content[0].type"


def test_what_is_of_another_type_in_a_history_is_read() -> None:
    odd = {"id": 7, "function": {"name": None, "arguments": []}}
    parsed = chat(
        {"role": "assistant", "tool_calls": [odd]}, {"role": "tool", "tool_call_id": "7", "content": "r"}
    )
    assert (parsed.messages[1].calls[0].call_id, parsed.messages[1].calls[0].arguments) == ("7", "{}")
    items = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": 1}},
        {
            "type": "shell_call_output",
            "call_id": "c",
            "output": [{"stdout": "files", "outcome": {"exit": 0}}],
        },
    ]
    of_responses = responses(*items)
    assert json.loads(of_responses.messages[1].calls[0].arguments) == {"a": 1}
    assert json.loads(of_responses.messages[2].content)["stdout"] == "files"
    of_messages = messages(
        {"role": "user", "content": [{"type": "search_result", "source": "https://x", "title": "t"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1e400}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": "no such file"},
                {"type": "tool_result", "tool_use_id": "c", "content": {"rows": 3}},
            ],
        },
    )
    results = [one.content for one in of_messages.messages if one.role == "tool"]
    assert results == ["The tool failed: no such file", '{"rows": 3}']


@pytest.mark.parametrize("number", ["1e400", "-1e999"])
def test_a_tools_number_that_json_does_not_have_is_refused(number: str) -> None:
    schema, user = f'{{"type": "object", "default": {number}}}', '{"role": "user", "content": "u"}'
    function = f'{{"name": "f", "parameters": {schema}}}'
    of_responses = f'{{"type": "function", "name": "f", "parameters": {schema}}}'
    of_messages = f'{{"name": "f", "input_schema": {schema}}}'
    bodies = [
        (PARSER.chat, f'"messages": [{user}], "tools": [{{"type": "function", "function": {function}}}]'),
        (lambda body: RESPONSES.response(body, "t"), f'"input": "u", "tools": [{of_responses}]'),
        (MESSAGES.messages, f'"max_tokens": 5, "messages": [{user}], "tools": [{of_messages}]'),
    ]
    places = ["tools[0].function.parameters", "tools[0].parameters", "tools[0].input_schema"]
    for (parse, fields), place in zip(bodies, places, strict=True):
        with pytest.raises(ApiError) as refused:
            parse(f'{{"model": "m", {fields}}}'.encode())
        assert (refused.value.status, refused.value.param) == (400, place)
