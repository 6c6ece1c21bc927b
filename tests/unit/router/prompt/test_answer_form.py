"""Answers that must be calls, or may be: any tokens that their grammar allows are valid calls."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken

from samovar.configs.settings import GrammarSettings
from samovar.replicas.grammar import GrammarCompiler, GrammarRefused
from samovar.replicas.messages import Grammar
from samovar.replicas.reply import (
    FORMATS,
    Call,
    Reply,
    ReplyFormat,
    ReplyReading,
    declared_format,
    format_named,
    read_reply,
    sniffed_format,
)
from samovar.router.openai import ApiError, ToolOffer
from samovar.router.openai.messages import offer_of
from samovar.router.openai.schema import NamedTool, OfferedTool
from samovar.router.prompt.tool_template import BRACKETED, AnswerForm
from tests.support.engines.tiny_models import EOS_ID, make_tiny_tokenizer
from tests.support.router.chat_templates import HARMONY, HARMONY_TOKENS

DISHES = ["tea", 'a "b" // #\n\u2028\x7f']
SCHEMAS: dict[str, dict[str, Any]] = {
    "get": {
        "type": "object",
        "properties": {"id": {"$ref": "#/$defs/Id"}, "note": {"type": "string", "maxLength": 6}},
        "required": ["id"],
        "additionalProperties": False,
        "$defs": {"Id": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
    "gets": {
        "properties": {"dish": {"enum": DISHES}},
        "required": ["dish"],
        "additionalProperties": False,
    },
}
TOOLS = [
    OfferedTool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}})
    for name, schema in SCHEMAS.items()
]
NOW = OfferedTool.model_validate({"type": "function", "function": {"name": "now"}})
FRAMED = [name for name in FORMATS if (frame := format_named(name, None).frame) and not frame.ends]
MARKED = [name for name in FRAMED if not format_named(name, None).is_bare]
JSON = Grammar("json_schema", json.dumps(SCHEMAS["get"]), "response_format.json_schema.schema")


def named(name: str) -> NamedTool:
    return NamedTool.model_validate({"type": "function", "function": {"name": name}})


def offer(choice: str | NamedTool = "required", is_parallel: bool = True, strict: str = "") -> ToolOffer:
    made = offer_of([*(_strict(tool, strict) for tool in TOOLS), NOW], choice, is_parallel)
    assert made is not None
    return made


def _strict(tool: OfferedTool, name: str) -> OfferedTool:
    assert tool.function is not None
    function = tool.function.model_copy(update={"strict": tool.function.name == name})
    return tool.model_copy(update={"function": function})


def form_of(name: str, reasoning: str | None = None) -> ReplyFormat:
    return format_named(name, reasoning)


@cache
def backend(has_marks: bool) -> Any:
    """The tiny tokenizer; `has_marks`: with one token for each mark, some of them special."""
    made = make_tiny_tokenizer().backend_tokenizer
    if has_marks:
        texts = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<b>"]
        for parts in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"):
            texts.append(f"<\uff5ctool▁{parts}\uff5c>")
        made.add_special_tokens([f"<|{name}|>" for name in HARMONY_TOKENS])
        made.add_special_tokens(["<|tool_call>", "<tool_call|>", '<|"|>'])
        for number, text in enumerate(texts):
            made.add_tokens([AddedToken(text, special=number % 2 == 0, normalized=False)])
    return made


@cache
def compiler(has_marks: bool) -> GrammarCompiler:
    made = backend(has_marks)
    return GrammarCompiler(made.to_str, made.get_vocab_size(), (EOS_ID,), GrammarSettings())


def marks_of(has_marks: bool) -> dict[str, int]:
    added = backend(has_marks).get_added_tokens_decoder()
    return {token.content: one for one, token in added.items() if BRACKETED.fullmatch(token.content)}


def grammar_of(
    form: ReplyFormat,
    asked: ToolOffer | None,
    content: Grammar | None = None,
    opening: str = "",
    has_marks: bool = False,
) -> Grammar:
    made = AnswerForm(asked, form, opening, marks_of(has_marks)).grammar(content, compiler(has_marks))
    assert made is not None
    return made


def walk(grammar: Grammar, rng: random.Random, begins: str = "", has_marks: bool = False) -> str:
    """Any tokens that are allowed, behind `begins`, until the answer may end and a coin says so."""
    state, tokenizer = compiler(has_marks).open(grammar), backend(has_marks)
    answer = []
    for token_id in tokenizer.encode(begins, add_special_tokens=False).ids:
        assert state.mask()[token_id], begins
        state.accept(token_id)
        answer.append(token_id)
    while not state.is_complete and len(answer) < 3000:
        allowed = state.mask().nonzero()[0].tolist()
        token_id = EOS_ID if EOS_ID in allowed and rng.random() < 0.5 else rng.choice(allowed)
        if token_id == EOS_ID:
            break
        state.accept(token_id)
        answer.append(token_id)
    else:
        assert state.is_complete, "no end"
    return str(tokenizer.decode(answer, skip_special_tokens=False))


def follows(grammar: Grammar, text: str, has_marks: bool = False) -> bool:
    """Whether the whole answer may be `text`."""
    state = compiler(has_marks).open(grammar)
    try:
        for token_id in backend(has_marks).encode(text, add_special_tokens=False).ids:
            if not state.mask()[token_id]:
                return False
            state.accept(token_id)
    except GrammarRefused:
        return False
    return state.is_complete or bool(state.mask()[EOS_ID])


def assert_valid(call: Call) -> None:
    value = json.loads(call.arguments)
    if call.name == "get":
        assert 0 <= value["id"] <= 99
        assert value.keys() <= {"id", "note"}
        assert len(value.get("note", "")) <= 6
    elif call.name == "gets":
        assert (list(value), value["dish"] in DISHES) == (["dish"], True)
    else:
        assert (call.name, value) == ("now", {})


def read(form: ReplyFormat, text: str, opening: str = "") -> Reply:
    return read_reply(ReplyReading(form, opening, (*SCHEMAS, "now")), text)


def call_of(form: ReplyFormat, *calls: tuple[str, str]) -> str:
    """Calls as the format's frame has them."""
    frame = form.frame
    assert frame is not None
    each = [f"{frame.before.replace('{name}', name)}{arguments}{frame.behind}" for name, arguments in calls]
    return f"{frame.begin}{(frame.between or '').join(each)}{frame.end}"


@pytest.mark.parametrize("has_marks", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", FRAMED)
def test_answers_that_must_call_are_valid_calls_whatever_is_drawn(name: str, has_marks: bool) -> None:
    form, rng, most = form_of(name), random.Random(name), 0
    for asked in (offer(), offer(is_parallel=False), offer(named("get"))):
        grammar, called = grammar_of(form, asked, has_marks=has_marks), set()
        for _ in range(20):
            reply = read(form, walk(grammar, rng, has_marks=has_marks))
            assert (reply.content, bool(reply.calls)) == ("", True)
            for call in reply.calls:
                assert_valid(call)
                called.add(call.name)
            assert len(reply.calls) == 1 or (asked.is_parallel and not asked.only)
            most = max(most, len(reply.calls))
        assert called == {"get"} if asked.only else len(called) > 1
    assert (most > 1) == (not form.is_bare)


@pytest.mark.parametrize("name", FRAMED)
def test_a_promised_calls_number_of_nineteen_digits_is_exact(name: str) -> None:
    ids = [7000000000000000001, 7000000000000000003]
    schema = {
        "type": "object",
        "properties": {"id": {"enum": ids}, "b": {"type": "boolean"}},
        "required": ["id"],
    }
    tool = OfferedTool.model_validate({"type": "function", "function": {"name": "get", "parameters": schema}})
    form, rng, seen = form_of(name), random.Random(name), set()
    grammar = grammar_of(form, offer_of([tool], "required", False))
    for _ in range(12):
        (call,) = read(form, walk(grammar, rng)).calls
        assert call.value is not None
        assert call.value.keys() <= {"id", "b"}
        seen.add(call.value["id"])
    assert seen == set(ids)


@pytest.mark.parametrize("has_marks", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", MARKED)
def test_with_strict_tools_text_is_free_and_calls_are_valid(name: str, has_marks: bool) -> None:
    form, rng = form_of(name), random.Random(name)
    asked = offer("auto", strict="get")
    grammar = grammar_of(form, asked, has_marks=has_marks)
    assert form.frame is not None
    for begins in ("", f"Let me see. {form.frame.mark}", call_of(form, ("get", '{"id": 7}'))):
        for _ in range(10):
            reply = read(form, walk(grammar, rng, begins, has_marks))
            if begins:
                assert reply.content in ("", "Let me see.")
                assert reply.calls
            for call in reply.calls:
                if call.name == "get":
                    assert_valid(call)
    good, bad, loose = ("get", '{"id": 7}'), ("get", '{"id": -1}'), ("gets", '{"any": [1]}')
    for calls, is_allowed in {(good,): True, (bad,): False, (loose, good): True, (loose, bad): False}.items():
        text = f"ok {call_of(form, *calls)}"
        assert follows(grammar, text, has_marks) is is_allowed, text
    once = grammar_of(form, offer("auto", is_parallel=False, strict="get"), has_marks=has_marks)
    assert follows(once, call_of(form, good), has_marks)
    assert not follows(once, call_of(form, good, good), has_marks)


@pytest.mark.parametrize("name", MARKED)
def test_a_spelled_mark_is_a_mark_too(name: str) -> None:
    """The reader reads text: a mark in other tokens than its own must not be a way around a schema."""
    form, tokenizer = form_of(name), backend(True)
    assert form.frame is not None
    state = compiler(True).open(grammar_of(form, offer("auto", strict="get"), has_marks=True))
    for char in form.frame.mark:
        for token_id in backend(False).encode(char, add_special_tokens=False).ids:
            state.accept(token_id)
    (behind, *_) = call_of(form, ("get", "")).removeprefix(form.frame.mark).partition("get")
    (allowed,) = {
        tokenizer.decode([one], skip_special_tokens=False) for one in state.mask().nonzero()[0].tolist()
    }
    assert behind.startswith(allowed), "the call goes on, and nothing else"


@pytest.mark.parametrize("has_marks", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", MARKED)
def test_a_thought_may_come_first_and_goes_on_where_the_prompt_began_it(name: str, has_marks: bool) -> None:
    form, closed = form_of(name, "think"), "<think>\n\n</think>\n\n"
    call = call_of(form, ("get", '{"id": 7}'))
    for asked in (offer(), offer("auto", strict="get")):
        for opening, text in (
            ("", f"<think>\nhm\n</think>\n\n{call}"),
            ("", call),
            ("<think>\n", f"hm\n</think>\n\n{call}"),
            (closed, call),
        ):
            grammar = grammar_of(form, asked, opening=opening, has_marks=has_marks)
            assert follows(grammar, text, has_marks), (opening, text)
            assert read(form, text, opening).calls == [Call("get", '{"id": 7}')]
    for opening, text in (
        ("", f"<think>hm{call}"),
        ("<think>\n", call),
        (closed, f"<think>hm</think>{call}"),
    ):
        assert not follows(grammar_of(form, offer(), None, opening, has_marks), text, has_marks), text


@pytest.mark.parametrize("name", MARKED)
def test_beside_a_response_format_an_answer_is_of_that_form_or_calls(name: str) -> None:
    form = form_of(name, "think")
    good = call_of(form, ("get", '{"id": 7}'))
    both = grammar_of(form, offer("auto"), JSON)
    assert both.field == JSON.field
    for text in ('{"id": 1}', good, f"<think>hm</think>{good}", '<think>hm</think>\n{"id": 1}'):
        assert follows(both, text), text
    for text in ("hi", '{"id": -1}', f"hi {good}"):
        assert not follows(both, text), text
    assert follows(both, call_of(form, ("get", '{"id": -1}'))), "only strict tools promise their schema"
    strict = grammar_of(form, offer("auto", strict="get"), JSON)
    assert not follows(strict, call_of(form, ("get", '{"id": -1}')))
    forced = grammar_of(form, offer(), JSON)
    assert follows(forced, good)
    assert not follows(forced, '{"id": 1}')


@pytest.mark.parametrize("has_marks", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize(
    ("name", "call", "broken"),
    [
        (
            "qwen3_xml",
            "<tool_call>\n<function=get>\n<parameter=id>\n7\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=other>\n<parameter=id>\n7\n</parameter>\n</function>\n</tool_call>",
        ),
        *(
            (
                "gemma4",
                f'<|tool_call>call:get{{note:<|"|>{note}<|"|>}}<tool_call|>',
                "<|tool_call>call:other{}<tool_call|>",
            )
            for note in ("a", "", '}"<c>')
        ),
        ("gemma4", "<|tool_call>call:now{}<tool_call|>" * 2, "<|tool_call>call:now{}<|tool_call>"),
        ("llama3_json", '{"name": "get", "parameters": {"id": 7}}', '{"name": "other", "parameters": {}}'),
    ],
)
def test_beside_a_response_format_calls_that_are_no_json_or_have_no_mark_may_be_made(
    name: str, call: str, broken: str, has_marks: bool
) -> None:
    form = form_of(name, "think")
    both = grammar_of(form, offer("auto"), JSON, has_marks=has_marks)
    for text, is_allowed in {'{"id": 1}': True, call: True, broken: False, f"hi {call}": False}.items():
        assert follows(both, text, has_marks) is is_allowed, text
    assert {one.name for one in read(form, call).calls} <= {"get", "now"}
    assert read(form, call).calls
    if form.is_bare:  # behind a thought it is text
        with pytest.raises(ApiError, match="no mark tells this model's calls") as refused:
            grammar_of(form, offer("auto"), JSON, "<think>\n", has_marks)
        assert refused.value.param == "response_format"
        assert grammar_of(form, offer("none"), JSON, "<think>\n", has_marks), "no call is read"
        return
    thought = grammar_of(form, offer("auto"), JSON, "<think>\n", has_marks)
    for text in ('{"id": 1}', call):
        assert follows(thought, f"hm</think>{text}", has_marks)


def test_a_call_of_a_declared_format_has_the_tokens_of_its_template() -> None:
    args = {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}
    calls = {"open": "<|tool_call>", "close": "<tool_call|>", "content": "json", "content_args": args}
    form = declared_format({"start_anchor": "a", "fields": {"content": {}, "tool_calls": calls}})
    both = grammar_of(form, offer("auto"), JSON, has_marks=True)
    call = '<|tool_call>{name:<|"|>get<|"|>,arguments:{note:<|"|><|"|>}}<tool_call|>'
    for text, is_allowed in {call: True, call.replace('<|"|>', "<|end|>"): False}.items():
        assert follows(both, text, has_marks=True) is is_allowed, text


def test_beside_a_response_format_calls_of_a_declared_format_go_by_its_marks() -> None:
    calls: dict[str, Any] = {"open": "<<", "close": ">>", "content": "json", "repeats": True}
    declared = {"start_anchor": "a", "fields": {"content": {}, "tool_calls": calls}}
    both = grammar_of(declared_format(declared), offer("auto"), JSON)
    for text, is_allowed in {'{"id": 1}': True, '<<{"name": 1}>>': True, "hi": False}.items():
        assert follows(both, text) is is_allowed, text
    del calls["open"]
    patterned = declared_format(declared | {"fields": {"tool_calls": calls | {"open_pattern": "<<|\\["}}})
    with pytest.raises(ApiError) as refused:
        AnswerForm(offer("auto"), patterned).grammar(JSON, compiler(False))
    assert refused.value.param == "response_format"
    assert AnswerForm(offer("none"), patterned).grammar(JSON, compiler(False)) is None


@pytest.mark.parametrize(
    ("content", "good", "bad"),
    [
        (JSON, '{"id": 1}', '{"id": -1}'),
        (Grammar("choice", '["yes", "n\\"o"]', "guided_choice"), 'n"o', "maybe"),
        (Grammar("regex", "a{2,3}|}", "guided_regex"), "aaa", "a"),
        (Grammar("grammar", 'root ::= "yes" tail\ntail ::= "}" | "!"', "grammar"), "yes}", "yes"),
        (Grammar("grammar", 'start: a\na: "{" TEXT\nTEXT: /[0-9]+/', "grammar"), "{12", "12"),
    ],
    ids=lambda given: given.kind if isinstance(given, Grammar) else "",
)
def test_whatever_form_content_has_it_waits_for_the_end_of_a_thought_that_the_prompt_began(
    content: Grammar, good: str, bad: str
) -> None:
    for name in ("hermes", "llama3_json"):
        grammar = grammar_of(form_of(name, "think"), None, content, "<think>\n")
        assert follows(grammar, f"hm</think>\n\n{good}")
        assert follows(grammar, f"{bad}</think>{good}")
        assert not follows(grammar, good)
        assert not follows(grammar, f"hm</think>\n\n{bad}")


@pytest.mark.parametrize("has_marks", [False, True], ids=["spelled", "tokens"])
def test_the_parts_of_harmony_have_their_channels_and_the_form_is_of_one(has_marks: bool) -> None:
    form = sniffed_format(HARMONY, "to=functions.get", "get")
    thought, final = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
        "<|channel|>final<|message|>",
    )

    def call(arguments: str) -> str:
        return f"<|channel|>commentary to=functions.get <|constrain|>json<|message|>{arguments}"

    good, bad = '{"id": 1}', '{"id": -1}'
    choice = Grammar("choice", '["yes", "no"]', "guided_choice")
    for asked, content, allowed, refused in (
        (None, JSON, [f"{final}{good}"], [good, f"{final}{bad}", f"{final}hi"]),
        (None, choice, [f"{final}yes"], ["yes", f"{final}maybe"]),
        (offer("auto"), JSON, [f"{final}{good}", call(bad)], ["hi", f"{final}hi"]),
        (offer(), None, [call(good)], [call(bad), f"{final}{good}"]),
        (offer("auto", strict="get"), None, [f"{final}hi", call(good)], [call(bad), "hi"]),
    ):
        grammar = grammar_of(form, asked, content, has_marks=has_marks)
        for text, is_allowed in {**dict.fromkeys(allowed, True), **dict.fromkeys(refused, False)}.items():
            for front in ("", thought):
                assert follows(grammar, f"{front}{text}", has_marks) is is_allowed, (front, text)
    rest = grammar_of(form, None, JSON, "<|channel|>analysis<|message|>I ", has_marks)
    assert follows(rest, f"see<|end|><|start|>assistant{final}{good}", has_marks)
    begun = AnswerForm(None, form, f'{final}{{"id":', marks_of(has_marks))
    assert begun.grammar(JSON, compiler(has_marks)) is None, "what is new has the form"


def test_without_a_promise_there_is_nothing_to_add() -> None:
    plain = Grammar("regex", "a", "guided_regex")
    whole = Grammar("json_schema", JSON.text, "guided_json")
    for name in FORMATS:
        form = format_named(name, "think")
        for asked in (None, offer("auto"), offer("none", strict="get")):
            for content in (None, plain, whole):
                assert AnswerForm(asked, form).grammar(content, compiler(False)) is None


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_that_cannot_be_forced_is_refused_with_its_name(name: str) -> None:
    for asked, param in (
        (offer(), "tool_choice"),
        (offer("auto", strict="gets"), "tools[1].function.strict"),
    ):
        if name in (FRAMED if asked.must_call else MARKED):
            continue
        with pytest.raises(ApiError) as refused:
            AnswerForm(asked, format_named(name, None)).grammar(None, compiler(False))
        assert refused.value.param == param
        assert f"model.tool_parser '{name}'" in refused.value.message
        if form_of(name).is_bare:  # behind a thought it is text
            opened = AnswerForm(offer(), form_of(name, "think"), "<think>\n")
            with pytest.raises(ApiError, match="nothing tells a call from text"):
                opened.grammar(None, compiler(False))


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, '"not"'),
        ({"type": "object", "properties": {"a": {"unevaluatedItems": False}}}, "unevaluatedItems"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "array"}, "'object'"),
        (
            {"type": "object", "properties": {"a": {"allOf": [{"const": 9007199254740993}]}}},
            "9007199254740993",
        ),
        ({"type": "object", "description": "x" * 70_000}, "grammar.spec_bytes_max"),
    ],
)
def test_a_schema_that_cannot_be_served_is_refused_with_its_place(
    parameters: dict[str, Any], says: str
) -> None:
    tool = OfferedTool.model_validate(
        {"type": "function", "function": {"name": "odd", "parameters": parameters}}
    )
    asked = offer_of([*TOOLS, tool], "required", None)
    with pytest.raises(ApiError) as refused:
        AnswerForm(asked, form_of("hermes")).grammar(None, compiler(False))
    assert refused.value.param == "tools[2].function.parameters"
    assert says in refused.value.message
    assert AnswerForm(offer_of([*TOOLS, tool], named("get"), None), form_of("hermes")).grammar(
        None, compiler(False)
    ), "another tool than the one that is called"


def test_tools_that_are_too_much_together_are_refused_together() -> None:
    tools = [
        OfferedTool.model_validate(
            {
                "type": "function",
                "function": {"name": f"f{number}", "parameters": {"description": "x" * 30_000}},
            }
        )
        for number in range(3)
    ]
    with pytest.raises(ApiError, match=r"grammar\.spec_bytes_max") as refused:
        AnswerForm(offer_of(tools, "required", None), form_of("hermes")).grammar(None, compiler(False))
    assert refused.value.param == "tools"
