"""Calls while they are written: cut anywhere in every format, with marks in their texts, promised or not."""

from __future__ import annotations

import itertools
import json
import sys
from itertools import pairwise
from typing import Any

import pytest
from pydantic_core import from_json

from samovar.replicas.reply import FORMATS, Piece, Reply, ReplyReader, ReplyReading, format_named, read_reply
from samovar.replicas.reply.calls import JsonScan, typed
from samovar.router.anthropic.dialect import input_of
from samovar.router.openai import json_bytes
from tests.unit.replicas.reply.test_reader import calls_of, joined

NASTY = [
    "a </tool_call> b",
    "</tool_call>",
    "<tool_call> x",
    'see <tool_call>{"name": 1}</tool_call> end',
    "</think> t <think>",
    "}} </tool_call>",
    "[TOOL_CALLS]f[ARGS]{}",
    "\n```<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>",
    "<tool_call|>",
    "</function></tool_call>",
    "a </parameter> b\n",
    '<|"|>' + '{é𝄞\\ " \t\n/',
    "",
]
"""Texts that quote the marks of formats."""
GEMMA_QUOTE = '<|"|>'
TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "s": {"type": "string"},
                        "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                        "o": {"type": "object"},
                        "b": {"type": ["number", "boolean"]},
                        "r": {"type": "array"},
                    },
                },
            },
        }
    ]
)
REST = {"n": 12, "o": {"k": [1.5, None, True, {"x": "y"}], "e": {}}}


def written(name: str, arguments: dict[str, Any]) -> str:
    """The text of a call, as the models of a format write it."""
    form = format_named(name, None)
    if form.frame is not None and not form.frame.ends:
        frame = form.frame
        body = json.dumps(arguments, ensure_ascii=False)
        return frame.begin + frame.before.replace("{name}", "f") + body + frame.behind + frame.end
    if name == "gemma4":
        return f"<|tool_call>call:f{_gemma(arguments)}<tool_call|>"
    shown = {key: one if isinstance(one, str) else json.dumps(one) for key, one in arguments.items()}
    values = "".join(f"<parameter={key}>\n{one}\n</parameter>\n" for key, one in shown.items())
    return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"


def _gemma(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}" if isinstance(value, str) else json.dumps(value)


def reading(name: str, **fields: Any) -> ReplyReading:
    form = format_named(name, None)
    return ReplyReading(
        form, **{"tools": ("f", "g"), "parameters": TOOLS if form.needs_types else "", **fields}
    )


def streamed(asked: ReplyReading, text: str, step: int) -> tuple[Reply, list[list[Piece]]]:
    reader, told = ReplyReader(asked), []
    for at in range(0, len(text), step):
        told.append(reader.feed(text[at : at + step]))
    told.append(reader.finish())
    return reader.reply, told


def texts(name: str) -> list[str]:
    return [one for one in NASTY if not (name == "gemma4" and GEMMA_QUOTE in one)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_read_whole_whatever_its_texts_quote(name: str) -> None:
    for text in texts(name):
        arguments = {"s": text, **REST}
        call = written(name, arguments)
        for step in (1, 3, len(call)):
            reply, told = streamed(reading(name), call, step)
            assert [(one.name, one.value, one.is_whole) for one in reply.calls] == [("f", arguments, True)], (
                text
            )
            assert reply.content == ""
            assert joined([piece for pieces in told for piece in pieces]) == reply


DIGITS, DEEP = "1" * 5000, "[" * 600 + "]" * 600
ODD = [
    *("NaN", "Infinity", "-Infinity", "1e999", DIGITS, f"-{DIGITS}", DEEP, "[" * 3000, '{"a":' * 600),
    *('"\\ud83d"', '"\\ude00\\ud83d"', "1,", ",", "}", "{}", "[NaN]", "", "\x00", "true", "None", '"', "'a'"),
]
"""What models write in place of values, and JSON or Python does not have."""
ODD_CALLS = [
    *('{"arguments": {"a": %s}, "name": "f",}', '{"name": "f",}', '{"arguments": {"a": %s}, "name": "f"}'),
    *('{"name": "f", "arguments": {"a": %s}}', '{"name": "f", "arguments": {"a": %s},}', '[{"name": "f"},]'),
    *('{"name": "f", "arguments": %s}', '{"name": %s}', '{"a": %s, "name": "f"}', '{"name": "f", "id": %s}'),
    *('{"function": %s, "name": "f"}', '{"parameters": "%s", "name": "f"}', "{%s: 1}", "%s"),
]


def odd_texts(name: str) -> list[str]:
    """Answers of a format with calls that are none, or only nearly."""
    form = format_named(name, None)
    made: list[str] = []
    for odd in ODD:
        if form.style in ("xml", "gemma"):
            keys = "".join(f"<parameter={key}>{odd}</parameter>" for key in "snobr")
            xml, gemma = (
                f"<tool_call><function=f>{keys}</function></tool_call>",
                f"<|tool_call>call:f{{n:{odd}",
            )
            made += [xml] if form.style == "xml" else [f"{gemma}}}<tool_call|>", gemma]
            continue
        assert form.frame is not None
        before = form.frame.before.replace("{name}", "f")
        made.append(f'{form.frame.begin}{before}{{"n": {odd}}}{form.frame.behind}{form.frame.end}')
        made += [
            made[-1].replace("}", "", 1),
            made[-1].replace(form.frame.end, "") if form.frame.end else odd,
        ]
        calls = [one.replace("%s", odd) for one in ODD_CALLS]
        mark = {"mistral": "[TOOL_CALLS]", "hermes": "<tool_call>"}.get(name, "")
        made += [f"{mark}{call}" for call in calls]
        made += [f"<tool_call>{call}</tool_call>" for call in calls if name == "hermes"]
    return made


@pytest.mark.parametrize("name", FORMATS)
def test_no_text_of_a_model_makes_its_reader_fail(name: str) -> None:
    """Trailing commas, NaN and numbers of thousands of digits ended whole answers with a 500."""
    asked = reading(name)
    for text in odd_texts(name):
        whole = read_reply(asked, text)
        for step in (1, 7) if len(text) < 2000 else (97,):
            reply, told = streamed(asked, text, step)
            assert reply == whole == joined([piece for pieces in told for piece in pieces]), text[:80]
        for call in whole.calls:
            assert call.arguments.encode()
            json_bytes(input_of(call))


def test_a_value_that_json_does_not_have_is_a_text() -> None:
    types = [
        (),
        ("number",),
        ("integer", "null"),
        ("array",),
        ("object",),
        ("boolean",),
        ("string", "number"),
    ]
    for text, kinds in itertools.product(ODD, types):
        from_json(typed(text, kinds), allow_inf_nan=False)
    assert json.loads(typed("NaN", ("number",))) == "NaN"
    assert json.loads(typed(DEEP, ("array",))) == DEEP
    assert json.loads(typed("1e999", ("number",))) == sys.float_info.max


def test_an_object_with_a_comma_too_many_is_no_call() -> None:
    text = '<tool_call>{"name": "f",}</tool_call>'
    assert read_reply(reading("hermes"), text) == Reply(text)


CALL = '{"name": "f", "arguments": {"a": 1}'
CLOSED = "</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f'<tool_call>{CALL},"x":oops}}{CLOSED}', "", 1),
        ("hermes", f'<tool_call>{CALL},"x":oops}}{CLOSED} Done.', "Done.", 1),
        ("hermes", f'<tool_call>{CALL},"x":"{CLOSED}" oops}}{CLOSED} Done.', "Done.", 1),
        ("hermes", f'<tool_call>{CALL},"x":"oops}}{CLOSED} Done.', "Done.", 1),
        ("hermes", f"<tool_call>{CALL},}}{CLOSED} Done.", "Done.", 1),
        ("hermes", f'<tool_call>{CALL},"x":oops}}</tool_c', "", 1),
        ("hermes", f'<tool_call>{CALL},"x":oops}} and more', ',"x":oops} and more', 1),
        ("hermes", f'<tool_call>{CALL},"x":[1', "", 1),
        ("hermes", f"<tool_call>{CALL}, {CALL}}}{CLOSED}", "", 2),
        ("hermes", f"<tool_call>{CALL}\n{CALL}}}{CLOSED}", "", 2),
        ("llama3_json", f'{CALL}, "x": oops}}', ', "x": oops}', 1),
        ("llama3_json", f'{CALL}, "x": "cut', "", 1),
    ],
)
def test_what_breaks_behind_a_calls_arguments_is_lost_nowhere_and_leaks_no_mark(
    name: str, text: str, content: str, calls: int
) -> None:
    """A part of it was lost, and the rest was an answer's text, with the close mark."""
    whole = read_reply(reading(name), text)
    assert (whole.content.strip(), [one.value for one in whole.calls]) == (content, [{"a": 1}] * calls)
    for step in (1, 3):
        assert streamed(reading(name), text, step)[0] == whole


@pytest.mark.parametrize("name", ["mistral", "deepseek_v3"])
def test_a_head_that_is_too_long_is_none_however_it_comes(name: str) -> None:
    before = {"mistral": "[TOOL_CALLS]f", "deepseek_v3": written("deepseek_v3", {}).split("{")[0]}[name]
    for length in (0, 300, 380, 395, 399, 400, 401, 500, 30_000):
        text = f"{before}{' ' * length}{{}}"
        assert streamed(reading(name), text, 1)[0] == streamed(reading(name), text, len(text))[0]
    assert not read_reply(reading(name), text).calls


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_cut_anywhere_is_the_call_so_far(name: str) -> None:
    cuts = 0
    for text in texts(name):
        call = written(name, {"s": text, **REST})
        (full,) = read_reply(reading(name), call).calls
        asked = reading(name, is_promised=True, tools=("f",))
        before = 0
        for at in range(len(call) + 1):
            whole = read_reply(asked, call[:at])
            reply, told = streamed(asked, call[:at], 1)
            assert reply == whole == joined([piece for pieces in told for piece in pieces])
            assert whole.content == "", "a promised call is never text"
            (one,) = whole.calls
            assert (one.name, full.arguments[: len(one.arguments)]) == ("f", one.arguments)
            assert len(one.arguments) >= before, "what was told stays"
            before = len(one.arguments)
            free = read_reply(reading(name), call[:at])
            assert not free.calls or not free.content.strip(), "half a mark is no text"
            assert free.calls == whole.calls if free.calls else free.content.strip() == call[:at].strip()
            cuts += 1
    assert cuts > 500


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_come_as_they_are_written(name: str) -> None:
    """No token of a long text waits for the ones behind it."""
    long = "word <b> {x} " * 100
    call = written(name, {"s": long})
    _, told = streamed(reading(name), call, 4)
    counts = [sum(len(piece.text) for piece in pieces if piece.kind == "arguments") for pieces in told]
    begun = next(number for number, pieces in enumerate(told) if any(one.kind == "call" for one in pieces))
    ends = [number for number, pieces in enumerate(told) if any(one.kind == "called" for one in pieces)]
    spoken = [number for number, count in enumerate(counts) if count]
    assert spoken[0] - begun <= 3
    said = [
        number for number in spoken if number * 4 < len(call) - 60
    ]  # the marks behind are not of the text
    assert max(later - one for one, later in pairwise(said)) <= 3
    assert len(ends) == 1
    assert begun * 4 < len(call) - len(long)


@pytest.mark.parametrize("name", FORMATS)
def test_a_stop_string_within_a_call_is_the_same_streamed_and_whole(name: str) -> None:
    call = "Sure. " * (not format_named(name, None).is_bare) + written(name, {"s": "São Paulo", **REST})
    for stop in ("</", "}}", "Paulo", "São", "<", "f", '"n', "n", "}", "[", "\n", "call"):
        text = call[: call.find(stop)] if stop in call else call
        whole = read_reply(reading(name), text)
        for step in (1, 2, 5):
            assert streamed(reading(name), text, step)[0] == whole, (stop, step)


def test_a_call_in_another_order_is_told_at_once() -> None:
    text = '<tool_call>{"arguments": {"s": "</tool_call>"}, "name": "f"}</tool_call>'
    reply, told = streamed(reading("hermes"), text, 1)
    assert [(one.name, one.value) for one in reply.calls] == [("f", {"s": "</tool_call>"})]
    assert sum(1 for pieces in told if pieces) == 1


@pytest.mark.parametrize(
    "text", ["The tag is <tool_call>", "The tag is <tool_call> and it closes later", "x <tool_ca", "if a <t"]
)
def test_a_mark_without_a_call_is_text(text: str) -> None:
    for step in (1, 2, len(text)):
        assert streamed(reading("hermes"), text, step)[0] == Reply(text)
    assert read_reply(reading("hermes"), f"{text} {written('hermes', {'s': ''})}").calls


def test_a_promise_of_several_tools_that_is_cut_before_the_name_says_nothing() -> None:
    asked = reading("hermes", is_promised=True)
    assert read_reply(asked, '<tool_call>\n{"na') == Reply()
    assert read_reply(asked, "<tool_") == Reply()


def test_a_cut_call_that_the_prompt_holds_goes_on_as_one_call() -> None:
    asked = reading("hermes", opening='<tool_call>\n{"name": "f", "arguments": {"s": "abc')
    reply, told = streamed(asked, 'def"}}\n</tool_call>', 1)
    assert [(one.name, one.value) for one in reply.calls] == [("f", {"s": "abcdef"})]
    assert calls_of([piece for pieces in told for piece in pieces]) == reply.calls
    headless = reading("hermes", opening='<tool_call>\n{"na')
    assert read_reply(headless, 'me": "f"}').calls[0].name == "f"
    assert read_reply(headless, " no") == Reply(" no"), "not what the client has"


VALUES = ['{"a": [1, -0.5e+3, true, null, "\\u00e9\\n"], "b": {}}', "[]", '"x"', "{}", '{"a":[{"b":[[]]}]}']


@pytest.mark.parametrize("text", VALUES)
def test_a_value_ends_where_it_ends(text: str) -> None:
    for behind in ("", "}", " x", '"', "</tool_call>", ","):
        for step in (1, 2, len(text)):
            scan, at = JsonScan(), 0
            whole = text + behind
            for end in range(step, len(whole) + step, step):
                at = scan.feed(whole[:end], at)
            assert (scan.is_over, scan.is_broken, at) == (True, False, len(text))


BROKEN = r'''{a | {1 | {"a" 1 | {"a":, | {"a":1,} | [1,] | [01,
| [1.] | [-] | [1e] | [tru, | [NaN | ["\x | ["\u12g | ] | [} | {"a":1 "b"'''


@pytest.mark.parametrize("text", [*(one.strip() for one in BROKEN.split("|")), '["\n', "[" * 300])
def test_what_is_no_json_is_seen_at_once(text: str) -> None:
    scan = JsonScan()
    scan.feed(text)
    assert scan.is_broken, text


NESTED = {
    "type": "object",
    "$defs": {
        "Place": {"type": "object", "properties": {"near": {"$ref": "#/$defs/Place"}}},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/a~1b"}]},
        "a/b": {"type": "integer"},
    },
    "properties": {
        "place": {"$ref": "#/$defs/Place"},
        "all": {"allOf": [{"$ref": "#/$defs/Place"}], "description": "pydantic 1"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}], "default": None},
        "level": {"enum": [1, 2.5, None]},
        "flag": {"const": True},
        "word": {"enum": ["1", "2"]},
        "loop": {"$ref": "#/$defs/Loop"},
        "same": {"$ref": "#"},
        "gone": {"$ref": "#/$defs/none"},
        "far": {"$ref": "https://example.com/x.json"},
        "odd": {"$ref": 5, "allOf": [7], "enum": 1},
    },
}
"""As pydantic and MCP servers describe parameters."""


def test_values_are_of_the_types_that_a_reference_a_part_or_a_list_says() -> None:
    """Nested models came as strings of JSON."""
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": NESTED}}])
    asked = reading("qwen3_xml", parameters=tools)
    place = {"near": {"near": None}, "n": [1, "x"]}
    for maybe in (None, place):
        arguments = {
            **{"place": place, "all": place, "maybe": maybe, "level": 1, "flag": True, "word": "1"},
            **{"loop": 3, "same": {}, "gone": "{}", "far": "1", "odd": "2"},
        }
        call = written("qwen3_xml", arguments)
        assert [one.value for one in read_reply(asked, call).calls] == [arguments]
        (full,) = read_reply(asked, call).calls
        for at in range(len(call) + 1):
            whole = read_reply(asked, call[:at])
            assert streamed(asked, call[:at], 1)[0] == whole
            for one in whole.calls:
                assert full.arguments.startswith(one.arguments)
    other = written("qwen3_xml", {"level": None, "maybe": "near"})
    assert read_reply(asked, other).calls[0].value == {"level": None, "maybe": "near"}


def test_a_text_between_quotes_keeps_them() -> None:
    assert json.loads(typed('"x"', ("string", "null"))) == '"x"'
