"""Replies: every format of calls and reasoning, what only looks like one, and any way to cut the text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from samovar.replicas.reply import (
    FORMATS,
    Call,
    Piece,
    Reply,
    ReplyReader,
    ReplyReading,
    called_tools,
    declared_format,
    format_named,
    read_reply,
    sniffed_format,
)
from tests.support.router.chat_templates import HARMONY

BAR = "\uff5c"
CALLS_BEGIN, CALL_BEGIN, SEP, CALL_END, CALLS_END = (
    f"<{BAR}tool▁{name}{BAR}>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
PARAMETERS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "s": {"type": "string"}},
                },
            },
        }
    ]
)
REASONING = {"mistral": "mistral", "gemma4": "gemma4"}
F1, F2 = Call("f", '{"a": 1}'), Call("f", '{"a": 2}')


def reading(name: str, **fields: Any) -> ReplyReading:
    form = format_named(name, REASONING.get(name, "think"))
    return ReplyReading(form, **{"tools": ("f", "g"), "parameters": PARAMETERS, **fields})


@pytest.mark.parametrize(
    ("name", "text", "reply"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', Reply(calls=[F1])),
        ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}', Reply(calls=[F1])),
        (
            "hermes",
            '<think>\nhm\n</think>\n\nSee:\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
            '<tool_call>{"name": "f", "arguments": {"a": 2}}</tool_call>\n',
            Reply("See:", "hm", [F1, F2]),
        ),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', Reply(calls=[Call("f", "{}")])),
        (
            "hermes",
            '<tool_call>{"arguments": {"a": [1e999, -1e999]}, "name": "f"}</tool_call>',
            Reply(calls=[Call("f", '{"a": [1.7976931348623157e+308, -1.7976931348623157e+308]}')]),
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a":  1.10, "b": 1E+2}}</tool_call>',
            Reply(calls=[Call("f", '{"a":  1.10, "b": 1E+2}')]),
        ),
        ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>', Reply(calls=[F1])),
        ("hermes", '<tool_call>{"function": {"name": "f", "arguments": {"a": 1}}}', Reply(calls=[F1])),
        ("hermes", '<tool_call>{"id": 7, "name": "f", "parameters": {"a": 1}, "x": []}', Reply(calls=[F1])),
        # A bracket too few, or too many, as models write them.
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', Reply(calls=[F1])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', Reply(calls=[F1])),
        ("hermes", 'so: <tool_call>{"name": "f", "arguments": {"a": 1}', Reply("so:", "", [F1])),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1}}; {"x": 1}',
            Reply('; {"x": 1}', "", [F1]),
        ),
        # What is no JSON behind a name is its call's, up to the mark.
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call> b',
            Reply("b", "", [Call("f", '{"a": NaN}}')]),
        ),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", Reply(calls=[Call("f", "{", is_whole=False)])),
        (
            "deepseek_v3",
            f"{CALLS_BEGIN}{CALL_BEGIN}f{SEP}{{}}{CALL_END}?{CALLS_END}",
            Reply(f"?{CALLS_END}", "", [Call("f", "{}")]),
        ),
        ("gemma4", "<|tool_call>call:f{a:}<tool_call|>", Reply(calls=[Call("f", '{"a":}')])),
        (
            "gemma4",
            '<|tool_call>call:f{a:{b_1:[true,<|"|>"<tool_call|>"<|"|>],c:"}"},d:-1.5e3}<tool_call|>x',
            Reply("x", "", [Call("f", '{"a":{"b_1":[true,"\\"<tool_call|>\\""],"c":"}"},"d":-1.5e3}')]),
        ),
        ("hermes", '<tool_call>{"name": "new"}</tool_call> b', Reply("b", "", [Call("new", "{}")])),
        (
            "hermes",
            'a <tool_call>{"name": "f"}</tool_call> b \n',
            Reply("a  b", "", [Call("f", "{}")]),
        ),
        ("hermes", "<think>no end", Reply(reasoning="no end")),
        ("hermes", "<think>\n\n</think>\n\nhi \n", Reply("hi \n")),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', Reply(calls=[F1])),
        (
            "llama3_json",
            '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 2}}',
            Reply(calls=[F1, F2]),
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "x"}]', Reply(calls=[F1])),
        (
            "mistral",
            '[THINK]hm[/THINK]ok[TOOL_CALLS]f[CALL_ID]123[ARGS]{"a": 1}[TOOL_CALLS]f{"a": 2}',
            Reply("ok", "hm", [F1, F2]),
        ),
        (
            "qwen3_xml",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
            "\n<tool_call>\n<function=f>\n<parameter=s>\n7\n</parameter>\n</function>\n</tool_call>",
            Reply(calls=[F1, Call("f", '{"s": "7"}')]),
        ),
        (
            "deepseek_v3",
            f'hi{CALLS_BEGIN}{CALL_BEGIN}function{SEP}f\n```json\n{{"a": 1}}\n```{CALL_END}\n'
            f'{CALL_BEGIN}function{SEP}f\n```json\n{{"a": 2}}\n```{CALL_END}{CALLS_END}',
            Reply("hi", "", [F1, F2]),
        ),
        ("deepseek_v3", f'{CALLS_BEGIN}{CALL_BEGIN}f{SEP}{{"a": 1}}{CALL_END}{CALLS_END}', Reply(calls=[F1])),
        (
            "gemma4",
            '<|channel>thought\nhm<channel|>hi<|tool_call>call:f{s:<|"|>x<|"|>,a:2}<tool_call|>',
            Reply("hi", "hm", [Call("f", '{"s":"x","a":2}')]),
        ),
    ],
)
def test_each_format_is_read(name: str, text: str, reply: Reply) -> None:
    assert read_reply(reading(name), text) == reply
    names = [call.name for call in reply.calls if reply.calls[-1].is_whole]
    assert called_tools(reading(name), text) == names


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", " plain \n"),
        ("hermes", "<tool_call>oops</tool_call> and more \n"),
        ("hermes", 'so: <tool_call>{"name": "f", "arg'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "no name"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 5000),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", '</tool_call>{"name": "f"}'),
        ("llama3_json", '{"x": 1}'),
        ("llama3_json", '{"name": "not offered", "parameters": {}}'),
        ("llama3_json", 'Sure: {"name": "f", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("qwen3_xml", "<tool_call><function=f>lost?</function></tool_call>"),
        ("qwen3_xml", "<tool_call>{}</tool_call>"),
        ("deepseek_v3", f"{CALLS_BEGIN}{CALL_BEGIN}f{SEP}no{CALL_END}{CALLS_END}"),
        ("gemma4", "<|tool_call>call:f(a:1)<tool_call|>"),
    ],
)
def test_what_is_no_call_stays_in_the_text(name: str, text: str) -> None:
    assert read_reply(reading(name), text) == Reply(text)


def test_without_tools_calls_are_text_and_reasoning_is_read() -> None:
    text = '<think>x</think><tool_call>{"name": "f"}</tool_call>'
    assert read_reply(reading("hermes", tools=()), text) == Reply('<tool_call>{"name": "f"}</tool_call>', "x")
    form = format_named("hermes", None)
    assert read_reply(ReplyReading(form), text) == Reply(text)


@pytest.mark.parametrize(
    ("opening", "text", "reply"),
    [
        ("<think>\n", "hm\n</think>\n\nhi", Reply("hi", "hm")),
        ("<think>\n\n</think>\n\n", "hi", Reply("hi")),
        ("<think>\n\n</think>\n\n", "\n<think>x</think>hi", Reply("hi", "x")),
        ("Once upon", " a time ", Reply(" a time ")),
    ],
)
def test_the_prompt_may_have_begun_the_answer(opening: str, text: str, reply: Reply) -> None:
    assert read_reply(reading("hermes", opening=opening), text) == reply


def test_of_calls_that_may_not_be_parallel_the_first_is_told() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    reply = read_reply(reading("hermes", is_parallel=False), text)
    assert (reply.calls, reply.is_cut) == ([Call("f", "{}")], True)


def test_arguments_are_json_that_can_be_sent() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"s": "\\ud83d", "u": "é"}}</tool_call>'
    (call,) = read_reply(reading("hermes"), text).calls
    assert call.arguments.encode()
    assert json.loads(call.arguments) == {"s": "\ud83d", "u": "é"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_written_into_its_frame_is_read(name: str) -> None:
    form = format_named(name, None)
    if form.frame is None or form.frame.ends:
        assert name in ("qwen3_xml", "gemma4"), "their arguments are no JSON"
        return
    frame, calls = form.frame, [F1, F2] if form.frame.between is not None else [F1]
    each = [frame.before.replace("{name}", "f") + call.arguments + frame.behind for call in calls]
    text = frame.begin + (frame.between or "").join(each) + frame.end
    assert text.startswith(frame.mark)
    assert read_reply(ReplyReading(form, tools=("f",)), text) == Reply(calls=calls)


THOUGHT = "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("<|channel|>final<|message|>Paris.", Reply("Paris.")),
        (f"{THOUGHT}<|channel|>final<|message|>Paris.", Reply("Paris.", "hm")),
        (
            f'{THOUGHT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}<|call|>',
            Reply("", "hm", [F1]),
        ),
        (f'{THOUGHT} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}', Reply("", "hm", [F1])),
        (
            '<|channel|>analysis to=functions.f code<|message|>{"a": "<|call|>',
            Reply(calls=[Call("f", '{"a": "<|call|>', is_whole=False)]),
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>',
            Reply("I look.", calls=[F1]),
        ),
        ("<|channel|>commentary to=browser.open<|message|>{}", Reply("{}")),
        (THOUGHT, Reply(reasoning="hm")),
        (f"{THOUGHT}<|channel|>final", Reply(reasoning="hm")),
        ("plain < text", Reply("plain < text")),
    ],
)
def test_channels_of_harmony_are_told_apart(text: str, reply: Reply) -> None:
    form = sniffed_format(HARMONY, "to=functions.f", "f")
    for step in (1, 3, len(text)):
        reader = ReplyReader(ReplyReading(form, tools=("f", "g")))
        for at in range(0, len(text), step):
            reader.feed(text[at : at + step])
        reader.finish()
        assert reader.reply == reply


def test_a_declared_template_is_used_as_it_is() -> None:
    form = declared_format(
        {
            "start_anchor": "<|im_start|>assistant\n",
            "fields": {
                "thinking": {"open": "<hm>", "close": "</hm>"},
                "content": {},
                "tool_calls": {
                    "open_pattern": r"\[(?P<name>\w+)\(",
                    "close": ")]",
                    "repeats": True,
                    "content": "json",
                    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
                },
            },
        }
    )
    assert read_reply(ReplyReading(form, tools=("f",)), '<hm>x</hm>y[f({"a": 1})]') == Reply("y", "x", [F1])
    assert read_reply(ReplyReading(form, tools=("f",)), "y[f(1)]") == Reply("y[f(1)]")
    with pytest.raises(ValueError, match="response_template"):
        declared_format({"fields": {}})


ONE_CALL = '<call>{"name": "f", "arguments": {"s": "a </call> b"}}</call>'


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (ONE_CALL, {"transform": {"type": "function", "function": "{content}"}}),
        (
            ONE_CALL,
            {"transform": {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}}},
        ),
        (
            '<call>[{"name": "f", "parameters": {"s": "a </call> b"}}]</call>',
            {"transform": {"name": "{name}", "arguments": "{parameters}"}, "transform_each": True},
        ),
        (
            '<call f>{"s": "a </call> b"}</call>',
            {
                "open_pattern": r"<call (?P<name>\w+)>",
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
        ),
    ],
)
def test_calls_of_a_declared_template_in_a_known_shape_come_as_they_are_written(
    text: str, field: dict[str, Any]
) -> None:
    opens = {} if "open_pattern" in field else {"open": "<call>"}
    calls = {**opens, "close": "</call>", "repeats": True, "content": "json", **field}
    form = declared_format({"start_anchor": "<a>", "fields": {"content": {}, "tool_calls": calls}})
    asked = ReplyReading(form, tools=("f",))
    assert read_reply(asked, text) == Reply(calls=[Call("f", '{"s": "a </call> b"}')])
    cut = read_reply(asked, text[: text.index(' b"')]).calls[0]
    assert (cut.arguments, cut.is_whole) == ('{"s": "a </call>', False)


MARKS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    *("<function=f>", "</function>", "<parameter=a>", "</parameter>", "<|python_tag|>", " " * 300),
    *("<|channel>thought\n", "<channel|>", "<|tool_call>call:f", "<tool_call|>", CALLS_BEGIN, CALL_BEGIN),
    *(SEP, CALL_END, CALLS_END, "\n```json\n", "\n```", '{"a": 1}', '{"name": "f", "parameters": {}}'),
    *("f", "1", " ", "\n", "  \n", "<", "[", "{", "}", "\\", '"', "\x00", "\x01", "é", "𝄞", "word"),
]
WHOLE = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": 1}',
    "qwen3_xml": "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
    "deepseek_v3": f'{CALLS_BEGIN}{CALL_BEGIN}f{SEP}{{"a": 1}}{CALL_END}{CALLS_END}',
    "gemma4": "<|tool_call>call:f{a:1}<tool_call|>",
}


def random_text(rng: random.Random, name: str) -> str:
    parts = []
    for _ in range(rng.randrange(12)):
        mark = rng.choice(MARKS) if rng.random() < 0.8 else WHOLE[name]
        if rng.random() < 0.15:
            mark = mark[: rng.randrange(len(mark) + 1)]
        parts.append(mark if rng.random() < 0.9 else chr(rng.choice([rng.randrange(32, 0xD800), 10, 9])))
    return "".join(parts)


def joined(pieces: list[Piece]) -> Reply:
    told = {
        kind: "".join(one.text for one in pieces if one.kind == kind) for kind in ("content", "reasoning")
    }
    return Reply(told["content"], told["reasoning"], calls_of(pieces))


def calls_of(pieces: list[Piece]) -> list[Call]:
    """The calls that a client puts together."""
    calls: list[Call] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append(Call(piece.text, "", is_whole=False))
        elif piece.kind == "arguments":
            calls[-1].arguments += piece.text
        elif piece.kind == "called":
            calls[-1].is_whole = True
    return calls


@pytest.mark.parametrize("name", FORMATS)
def test_any_text_in_any_pieces_is_the_same_message(name: str) -> None:
    rng = random.Random(name)
    found = 0
    for _ in range(400):
        text = random_text(rng, name)
        asked = reading(name, opening=rng.choice(["", "", "<think>\n", "<think>x</think>"]))
        whole = read_reply(asked, text)
        found += len(whole.calls)
        for step in (1, rng.randrange(1, 9)):
            reader, pieces = ReplyReader(asked), []
            for at in range(0, len(text), step):
                pieces += reader.feed(text[at : at + step])
            pieces += reader.finish()
            assert reader.reply == whole, repr(text)
            assert joined(pieces) == whole, repr(text)
        if not whole.calls and not whole.reasoning and not asked.opening and "think" not in text.lower():
            assert whole.content == text or name == "gemma4", repr(text)
        for call in whole.calls:
            assert call.arguments.encode()
    assert found, "the texts hold calls"
