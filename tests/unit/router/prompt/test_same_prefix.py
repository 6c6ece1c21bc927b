"""Equal JSON gives equal prompts: tools and calls are written as the session wrote them first."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from samovar.configs.json_text import parse_json
from samovar.router.openai.messages import Tool
from samovar.router.prompt.prefix import JsonSpellings, canonical_json, canonical_schema, tool_digest
from samovar.router.prompt.prompt import PromptBuilder
from samovar.router.prompt.reply_memory import Owner
from tests.unit.router.prompt.test_tool_template import QWEN3, built, made, parsed

__all__ = ["made"]
KEY = b"k" * 16
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": ["string", "null"], "description": "caf\u00e9"},
        "mode": {"enum": ["r", "w", 1], "default": 1},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1},
    },
    "required": ["path", "mode"],
    "$defs": {"line": {"type": "object", "properties": {"n": {"type": "integer"}, "t": {"type": "string"}}}},
}


def respelled(value: Any, rng: random.Random) -> Any:
    """The same schema: other key order, sets in another order, 1.0 for 1."""
    if isinstance(value, dict):
        keys = rng.sample(sorted(value), len(value))
        made = {key: respelled(value[key], rng) for key in keys}
        for name in ("required", "enum", "type"):
            if isinstance(made.get(name), list):
                rng.shuffle(made[name])
        return made
    if isinstance(value, list):
        return [respelled(one, rng) for one in value]
    return (
        float(value)
        if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5
        else value
    )


def offered(schema: Any, name: str = "read") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def test_spellings_of_one_value_have_one_text_and_other_values_another() -> None:
    rng = random.Random(1)
    texts = {canonical_schema(respelled(SCHEMA, rng)) for _ in range(50)}
    assert len(texts) == 1
    for one, other in [
        ({"required": ["a", "b"]}, {"required": ["a"]}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": "1"}),
        ({"a": 1.5}, {"a": 1}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"prefixItems": ["a", "b"]}, {"prefixItems": ["b", "a"]}),
        ({"a": 9007199254740993}, {"a": 9007199254740992}),
        ({"a": 9007199254740993}, {"a": 9007199254740992.0}),
        ({"const": {"type": ["x", "y"]}}, {"const": {"type": ["y", "x"]}}),
        ({"default": {"required": ["x", "y"]}}, {"default": {"required": ["y", "x"]}}),
        ({"examples": [{"enum": [1, 2]}]}, {"examples": [{"enum": [2, 1]}]}),
        ({"enum": [["a", "b"]]}, {"enum": [["b", "a"]]}),
        ({"properties": {"enum": {"const": ["a", "b"]}}}, {"properties": {"enum": {"const": ["b", "a"]}}}),
    ]:
        assert canonical_schema(one) != canonical_schema(other), (one, other)
    assert canonical_json(parse_json('"\\u00e9"')) == canonical_json("\u00e9")
    assert canonical_json({"required": ["a", "b"]}) != canonical_json({"required": ["b", "a"]}), "data"


async def test_tools_in_any_spelling_give_the_prompt_of_the_turn_before(
    made: Callable[..., PromptBuilder],
) -> None:
    rng = random.Random(7)
    for template in (None, QWEN3):
        builder = made(template)
        messages = [{"role": "user", "content": "u"}]
        first = await built(builder, parsed(messages, tools=[offered(SCHEMA), offered(SCHEMA, "write")]))
        for _ in range(20):
            tools = [offered(respelled(SCHEMA, rng)), offered(respelled(SCHEMA, rng), "write")]
            rng.shuffle(tools)
            again = await built(builder, parsed(messages, tools=tools))
            assert again.token_ids == first.token_ids
            assert again.left is None
            assert set(again.kept_by) <= {"ordered tools", "ordered JSON"}
        other = await built(builder, parsed(messages, tools=[offered(SCHEMA | {"title": "x"})]))
        assert other.token_ids != first.token_ids
        assert "title" in (other.rendered or "")


async def test_calls_in_any_spelling_give_the_prompt_of_the_turn_before(
    made: Callable[..., PromptBuilder],
) -> None:
    def turn(arguments: str, *more: str) -> list[dict[str, Any]]:
        call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": arguments}}
        return [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "r"},
            *({"role": "user", "content": one} for one in more),
        ]

    builder = made(QWEN3)
    first = await built(builder, parsed(turn('{"path": "caf\u00e9", "n": 1, "list": ["b", "a"]}')))
    again = await built(builder, parsed(turn('{"list":["b","a"], "n":1.0,"path":"caf\\u00e9"}', "more")))
    assert again.left is None
    begin = (first.rendered or "")[:-20]
    assert (again.rendered or "").startswith(begin)
    assert again.kept_by == ("ordered JSON",)
    edited = await built(builder, parsed(turn('{"path": "caf\u00e9", "n": 1, "list": ["a", "b"]}', "more")))
    assert '["a", "b"]' in (edited.rendered or ""), "a list of data is no set"


async def test_a_change_of_spelling_that_is_left_is_told_of_the_tools(
    made: Callable[..., PromptBuilder],
) -> None:
    builder = made(None, tools="as_sent")
    messages = [{"role": "user", "content": "u"}]
    await built(builder, parsed(messages, tools=[offered(SCHEMA)]))
    changed = await built(builder, parsed(messages, tools=[offered(dict(reversed(SCHEMA.items())))]))
    assert changed.left is not None
    assert changed.left.part == "tools"


async def test_how_a_session_wrote_is_its_own_and_forgotten_with_it(
    made: Callable[..., PromptBuilder],
) -> None:
    builder = made(None)
    messages = [{"role": "user", "content": "u"}]
    backwards = dict(reversed(SCHEMA.items()))
    first = await built(builder, parsed(messages, tools=[offered(SCHEMA)]))
    other = await built(builder, parsed(messages, tools=[offered(backwards)]), Owner("tenant", b"other"))
    assert other.token_ids != first.token_ids, "another session has its own way"
    await builder.forget("tenant", [b"session"])
    after = await built(builder, parsed(messages, tools=[offered(backwards)]))
    assert after.token_ids == other.token_ids


async def test_an_answer_that_comes_back_trimmed_is_found_again(made: Callable[..., PromptBuilder]) -> None:
    builder = made(QWEN3)
    first = await built(builder, parsed([{"role": "user", "content": "hi"}]))
    text = " Hello there. \n"
    ids = builder.tokens_of_text(text, add_special_tokens=False)
    await builder.remember("salt", first, text, ids, owner=Owner("tenant", b"session"), forgets=0)
    for content in (text.strip(), text):
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": content},
            {"role": "user", "content": "and?"},
        ]
        second = await built(builder, parsed(messages))
        assert second.token_ids[: len(first.token_ids) + len(ids)] == first.token_ids + ids


def test_the_memory_is_bounded_and_keeps_its_books() -> None:
    memory, rng = JsonSpellings(20_000), random.Random(3)
    for number in range(300):
        owner = Owner(f"t{number % 3}", b"%d" % rng.randrange(20))
        texts = [(rng.randbytes(8), rng.randbytes(200).hex()) for _ in range(rng.randrange(4))]
        assert memory.spell("salt", owner, texts) == [text for _, text in texts]
        if not number % 50:
            memory.forget("t1", [owner.session])
        memory.check_integrity()
    memory.forget()
    assert len(memory) == 0
    memory.check_integrity()
    assert JsonSpellings(0).spell("s", Owner("t", b"s"), [(b"d", "text")]) == ["text"]


@pytest.mark.parametrize("depth", [500, 3000])
async def test_arguments_deeper_than_python_follows_are_as_they_came(
    made: Callable[..., PromptBuilder], depth: int
) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]
    assert (await built(made(None), parsed(messages))).token_ids


def test_a_digest_is_keyed() -> None:
    tool = Tool("read", offered(SCHEMA), json.dumps(offered(SCHEMA)), "tools[0]")
    assert tool_digest(tool, KEY) != tool_digest(tool, b"l" * 16)


async def test_the_order_of_a_promised_tools_properties_is_its_requests(
    made: Callable[..., PromptBuilder],
) -> None:
    def properties(*names: str) -> dict[str, Any]:
        return {"type": "object", "properties": {name: {"type": "string"} for name in names}}

    messages = [{"role": "user", "content": "u"}]
    for promised in ({"strict": True}, {}):
        builder = made(None)
        choice = {} if promised else {"tool_choice": "required"}
        texts = []
        for names in (("answer", "why"), ("why", "answer")):
            function = {"name": "f", "parameters": properties(*names), **promised}
            request = parsed(messages, tools=[{"type": "function", "function": function}], **choice)
            texts.append((await built(builder, request)).rendered or "")
        assert texts[1].index('"why"') < texts[1].index('"answer"')
        assert texts[0] != texts[1]


async def test_nothing_is_kept_of_a_request_that_came_before_a_clear(
    made: Callable[..., PromptBuilder],
) -> None:
    builder = made(None)
    request = parsed([{"role": "user", "content": "u"}], tools=[offered(SCHEMA)])
    owner, forgets = Owner("tenant", b"session"), builder.forgotten.count
    await builder.forget("tenant", [b"session"])
    await builder.chat("salt", request, "tenant", owner=owner, forgets=forgets)
    backwards = parsed([{"role": "user", "content": "u"}], tools=[offered(dict(reversed(SCHEMA.items())))])
    later = await builder.chat("salt", backwards, "tenant", owner=owner, forgets=builder.forgotten.count)
    assert later.kept_by == (), "how the cleared request wrote its tools is forgotten"
