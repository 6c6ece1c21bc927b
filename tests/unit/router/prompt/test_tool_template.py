"""Tools in prompts: what templates can do, what is written for those that cannot, and the law of prefixes."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, get_args

import pytest

from samovar.configs.sections import PrefixSettings
from samovar.configs.settings import LimitsSettings, ModelSettings, RouterSettings, Settings
from samovar.replicas.reply import FORMATS, read_reply
from samovar.router.openai.errors import ApiError
from samovar.router.openai.messages import ChatMessage, ToolCall
from samovar.router.openai.parse import ParsedChat, RequestParser
from samovar.router.prompt.prompt import Prompt, PromptBuilder
from samovar.router.prompt.reply_memory import Owner
from samovar.router.prompt.tool_template import inspect_template
from tests.support.engines.tiny_models import EOS_ID
from tests.support.router.chat_templates import (
    DEEPSEEK,
    HARMONY,
    HARMONY_TOKENS,
    LLAMA3,
    MISTRAL,
    QWEN3,
    TEMPLATES,
    tokenizer_with,
)

CONTEXT = 32_768
OWNER = Owner("tenant", b"session")
PARSER = RequestParser(LimitsSettings(), CONTEXT)
BAR = "\uff5c"
GET = {"type": "function", "function": {"name": "get", "description": "d", "parameters": {"type": "object"}}}
PUT = {"type": "function", "function": {"name": "put", "parameters": {"type": "object", "properties": {}}}}

# How a model of each family writes a call of get: not as its template would.
CALLS: dict[str, Callable[[str], str]] = {
    "none": lambda k: f'<tool_call>{{"arguments":{{"k":"{k}"}},"name":"get"}}</tool_call>',
    "hermes": lambda k: f'<tool_call>{{"name":"get","arguments":{{"k":"{k}"}}}}</tool_call>',
    "qwen3": lambda k: f'<tool_call>\n{{"name": "get",  "arguments": {{"k": "{k}"}}}}</tool_call>',
    "llama3": lambda k: f'{{"name":"get","parameters":{{"k":"{k}"}}}}',
    "mistral": lambda k: f'[TOOL_CALLS]get[ARGS]{{"k":"{k}"}}',
    "deepseek": lambda k: (
        f"hm</think><{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>get"
        f'\n```json\n{{"k":"{k}"}}\n```<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>'
    ),
}


def builder_of(template: str | None, **prefix: Any) -> PromptBuilder:
    return PromptBuilder(
        tokenizer_with(template),
        vocab_tokens=512,
        context_tokens_max=CONTEXT,
        eos_token_ids=[EOS_ID],
        settings=Settings(router=RouterSettings(prefix=PrefixSettings(**prefix))),
    )


def parsed(messages: list[dict[str, Any]], **fields: Any) -> ParsedChat:
    return PARSER.chat(json.dumps({"model": "m", "messages": messages, **fields}).encode())


async def built(builder: PromptBuilder, request: ParsedChat, owner: Owner = OWNER) -> Prompt:
    return await builder.chat("salt", request, "tenant", owner=owner, forgets=builder.forgotten.count)


@pytest.fixture
async def made() -> AsyncIterator[Callable[..., PromptBuilder]]:
    builders: list[PromptBuilder] = []

    def make(template: str | None, **prefix: Any) -> PromptBuilder:
        builders.append(builder_of(template, **prefix))
        return builders[-1]

    yield make
    for builder in builders:
        builder.check_integrity()
        builder.close()


def spoken(prompt: Prompt, text: str, number: int) -> tuple[ChatMessage, dict[str, Any]]:
    """The answer `text` as it is sent, and as a client sends it back: JSON written in its own way."""
    assert prompt.reading is not None
    reply = read_reply(prompt.reading, text)
    calls = tuple(
        ToolCall(f"call_{number}_{at}", one.name, one.arguments) for at, one in enumerate(reply.calls)
    )
    message = ChatMessage("assistant", reply.content, reasoning=reply.reasoning, calls=calls)
    back: dict[str, Any] = {"role": "assistant", "content": reply.content or None}
    if calls:
        back["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(json.loads(call.arguments), separators=(",", ":")),
                },
            }
            for call in calls
        ]
    if reply.reasoning:
        back["reasoning_content"] = reply.reasoning
    return message, back


async def said(
    builder: PromptBuilder, prompt: Prompt, text: str, number: int
) -> tuple[bool, list[int], dict[str, Any]]:
    """Let the model say `text`; return whether it is remembered, its ids, and what the client sends back."""
    ids = [*builder.tokens_of_text(text, add_special_tokens=False), EOS_ID]
    message, back = spoken(prompt, text, number)
    plain = message.content == text
    kept = await builder.remember(
        "salt", prompt, text, ids, owner=OWNER, forgets=0, reply=None if plain else message
    )
    return kept, ids, back


@pytest.mark.parametrize(
    ("template", "name", "is_native", "has_reasoning"),
    [
        (None, "hermes", False, False),
        (TEMPLATES["hermes"], "hermes", True, False),
        (QWEN3, "hermes", True, True),
        (LLAMA3, "llama3_json", True, False),
        (MISTRAL, "mistral", True, False),
        (DEEPSEEK, "deepseek_v3", True, True),
        (HARMONY, "harmony", True, True),
        ("{{ messages[0].content }}", "hermes", False, False),
        ("{{ raise_exception('no') }}", "hermes", False, False),
        ("{{ tools | tojson }}{{ messages | tojson }}", "hermes", False, False),
    ],
)
def test_what_a_template_can_do_is_found_by_rendering(
    template: str | None, name: str, is_native: bool, has_reasoning: bool
) -> None:
    found = inspect_template(tokenizer_with(template), ModelSettings())
    assert (found.form.name, found.is_native, bool(found.form.reasoning)) == (name, is_native, has_reasoning)
    assert found.wants_short_ids == (template == MISTRAL)
    assert found.wants_text == (template == DEEPSEEK)
    assert found.is_single == (template in (LLAMA3, HARMONY))


def test_settings_and_declarations_come_before_what_is_found() -> None:
    named = inspect_template(tokenizer_with(QWEN3), ModelSettings(tool_parser="qwen3_xml"))
    assert (named.form.name, named.is_native) == ("qwen3_xml", True)
    off = inspect_template(tokenizer_with(QWEN3), ModelSettings(tool_parser="none", reasoning_parser="none"))
    assert (off.reads_tools, off.form.reasoning) == (False, "")
    on = inspect_template(tokenizer_with(None), ModelSettings(reasoning_parser="think"))
    assert "<think>" in on.form.reasoning
    tokenizer = tokenizer_with(QWEN3)
    fields = {"content": {}, "tool_calls": {"open": "<<", "close": ">>", "content": "json", "repeats": True}}
    tokenizer.response_template = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    assert inspect_template(tokenizer, ModelSettings()).form.name == "declared"
    tokenizer.response_template = {"fields": 1}
    assert inspect_template(tokenizer, ModelSettings()).form.name == "hermes", "not valid: not used"


def test_the_settings_name_the_formats_there_are() -> None:
    named = get_args(ModelSettings.model_fields["tool_parser"].annotation)
    assert set(named) == {"auto", "none", *FORMATS}


async def test_for_a_template_without_tools_they_are_a_section_in_front_of_the_system_prompt(
    made: Callable[..., PromptBuilder],
) -> None:
    builder = made(None)
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"k": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Today is Monday."},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "Hm.", "tool_calls": [call, {**call, "id": "d"}]},
        {"role": "tool", "tool_call_id": "c", "content": "one"},
        {"role": "tool", "tool_call_id": "d", "content": [{"type": "text", "text": "two"}]},
    ]
    text = (await built(builder, parsed(messages, tools=[GET, PUT]))).rendered or ""
    assert text.index(json.dumps(GET)) < text.index(json.dumps(PUT)) < text.index("Today is Monday.")
    block = '<tool_call>\n{"name": "get", "arguments": {"k": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\nHm.\n{block}\n{block}<|im_end|>" in text
    results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in text
    alone = (await built(builder, parsed(messages[1:2], tools=[GET]))).rendered or ""
    assert alone.startswith("<|im_start|>system\n# Tools")
    bare = (await built(builder, parsed(messages))).rendered or ""
    assert "# Tools" not in bare
    assert block in bare


STRICT = (  # Gemma 2's and Mistral 0.1's
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


async def test_tools_go_into_a_template_without_a_system_role_whose_roles_alternate(
    made: Callable[..., PromptBuilder],
) -> None:
    builder = made(STRICT)
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"k": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "d"}]},
        {"role": "tool", "tool_call_id": "c", "content": "one"},
        {"role": "tool", "tool_call_id": "d", "content": "two"},
        {"role": "user", "content": "and now?"},
    ]
    text = (await built(builder, parsed(messages, tools=[GET]))).rendered or ""
    assert text.startswith("<|im_start|>user\n# Tools")
    assert f"{json.dumps(GET)}\n</tools>" in text
    assert "</tool_call>\n\nu<|im_end|>" in text
    results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert f"<|im_start|>user\n{results}\nand now?<|im_end|>" in text
    with pytest.raises(ApiError, match="System role not supported"):
        await built(builder, parsed([{"role": "system", "content": "s"}, *messages], tools=[GET]))


@pytest.mark.parametrize("family", CALLS)
async def test_each_turn_of_a_tool_loop_begins_with_the_tokens_of_the_turn_before(
    family: str, made: Callable[..., PromptBuilder]
) -> None:
    builder = made(TEMPLATES.get(family))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be."}, {"role": "user", "content": "go"}]
    before: list[int] = []
    for turn in range(10):
        prompt = await built(builder, parsed(messages, tools=[GET, PUT]))
        if family == "deepseek":  # the thought that an answer opens with is not in a history
            assert prompt.left is None or prompt.left.why == "the template leaves out its reasoning"
            before = before[: before.index(EOS_ID)] if before else before
        else:
            assert prompt.left is None, str(prompt.left)
        assert prompt.token_ids[: len(before)] == before, f"turn {turn}"
        text = CALLS[family](f"v{turn}")
        kept, ids, back = await said(builder, prompt, text, turn)
        assert back["tool_calls"][0]["function"]["name"] == "get"
        assert kept == (family != "deepseek")
        before = [*prompt.token_ids, *ids]
        result = {"role": "tool", "tool_call_id": back["tool_calls"][0]["id"], "content": f"r{turn}"}
        messages += [back, result]


async def test_reasoning_stays_in_a_tool_loop_and_where_a_template_drops_it_the_miss_says_so(
    made: Callable[..., PromptBuilder],
) -> None:
    builder = made(QWEN3)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go " * 20}]
    before: list[int] = []
    for turn in range(3):
        prompt = await built(builder, parsed(messages, tools=[GET]))
        assert prompt.token_ids[: len(before)] == before
        assert prompt.left is None
        text = f"<think>\nlet me see {turn}\n</think>\n\n{CALLS['qwen3']('v')}"
        kept, ids, back = await said(builder, prompt, text, turn)
        assert kept
        before = [*prompt.token_ids, *ids]
        result = {"role": "tool", "tool_call_id": back["tool_calls"][0]["id"], "content": "the result"}
        messages += [back, result]
    messages.append({"role": "user", "content": "thanks"})
    left = (await built(builder, parsed(messages, tools=[GET]))).left
    assert left is not None
    assert str(left).endswith("in messages[1]: the template leaves out its reasoning")


@pytest.mark.parametrize(
    ("sends_it", "why"),
    [(True, "the template leaves out its reasoning"), (False, "the client does not send its reasoning")],
)
async def test_an_answer_whose_reasoning_does_not_come_back_is_told_of(
    sends_it: bool, why: str, made: Callable[..., PromptBuilder]
) -> None:
    builder = made(QWEN3)
    first = await built(builder, parsed([{"role": "user", "content": "hi"}]))
    kept, _, back = await said(builder, first, "<think>\nhm\n</think>\n\nHello.", 0)
    assert not kept
    assert (back["content"], back["reasoning_content"]) == ("Hello.", "hm")
    if not sends_it:
        del back["reasoning_content"]
    messages = [{"role": "user", "content": "hi"}, back, {"role": "user", "content": "and?"}]
    second = await built(builder, parsed(messages))
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert second.left is not None
    assert str(second.left) == f"prompt changed at token {len(first.token_ids)} in messages[1]: {why}"
    third = [*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    assert (await built(builder, parsed(third))).left is None, "told once"


async def test_tools_in_another_order_are_put_back_into_the_one_before(
    made: Callable[..., PromptBuilder],
) -> None:
    messages = [{"role": "user", "content": "u"}]
    builder = made(None)
    first = await built(builder, parsed(messages, tools=[GET, PUT]))
    again = await built(builder, parsed(messages, tools=[PUT, GET]))
    assert again.token_ids == first.token_ids
    assert (first.kept_by, again.kept_by) == ((), ("ordered tools",))
    other = await built(builder, parsed(messages, tools=[PUT, GET]), Owner("tenant", b"other"))
    assert other.kept_by == (), "another session has its own order"
    less = await built(builder, parsed(messages, tools=[PUT]))
    assert less.left is not None
    assert (less.left.part, less.left.kind) == ("tools", "tools")
    as_sent = made(None, tools="as_sent")
    await built(as_sent, parsed(messages, tools=[GET, PUT]))
    changed = await built(as_sent, parsed(messages, tools=[PUT, GET]))
    assert changed.left is not None
    assert changed.left.part == "tools"


@pytest.mark.parametrize(
    ("template", "fields", "kwargs"),
    [
        (QWEN3, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (QWEN3, {"reasoning_effort": "low"}, {}),
        (QWEN3, {"chat_template_kwargs": {"thinking": False}}, {"enable_thinking": False}),
        (None, {"reasoning_effort": "none"}, {}),
        (None, {"chat_template_kwargs": {"enable_thinking": False}}, {}),
        ("{{ reasoning_effort }}", {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (None, {"reasoning_effort": "high"}, {}),
        (None, {"chat_template_kwargs": {"enable_thinking": True}}, "enable_thinking"),
        (DEEPSEEK, {"chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
    ],
    ids=str,
)
def test_a_wish_about_reasoning_is_served_by_the_template_or_refused(
    template: str | None, fields: dict[str, Any], kwargs: dict[str, Any] | str
) -> None:
    found = inspect_template(tokenizer_with(template), ModelSettings())
    asked = parsed([{"role": "user", "content": "u"}], **fields).template_kwargs
    if isinstance(kwargs, dict):
        assert found.kwargs(asked) == kwargs
        return
    with pytest.raises(ApiError) as caught:
        found.kwargs(asked)
    assert (caught.value.status, caught.value.param) == (400, kwargs)


async def test_an_answer_that_begins_in_a_thought_is_read_from_there(
    made: Callable[..., PromptBuilder],
) -> None:
    messages = [{"role": "user", "content": "u"}]
    deepseek = await built(made(DEEPSEEK), parsed(messages))
    assert deepseek.reading is not None
    assert deepseek.reading.opening == "<think>\n"
    cut = await built(made(DEEPSEEK), parsed(messages, truncate_prompt_tokens=5))
    assert cut.reading == deepseek.reading
    qwen = made(QWEN3)
    off = await built(qwen, parsed(messages, reasoning_effort="none"))
    assert off.reading is not None
    assert off.reading.opening == "<think>\n\n</think>\n\n"
    assert read_reply(off.reading, "Hi").content == "Hi"
    assert (await built(made(None), parsed(messages))).reading is None
    none = await built(made(None), parsed(messages, tools=[GET], tool_choice="none"))
    assert none.reading is None
    assert "# Tools" in (none.rendered or ""), "the prefix is that of the other turns"


@pytest.mark.parametrize("head", ["<assistant>", ""])
async def test_a_thought_is_read_whether_a_template_begins_it_or_leaves_it_out_by_itself(
    head: str, made: Callable[..., PromptBuilder]
) -> None:
    """As DeepSeek V3.1's: an answer opens with the end of a thought, or the begin of one that is asked."""
    switch = "{{ '<think>' if thinking else '</think>' }}"
    turns = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '<|im_end|>' }}{% endfor %}"
    builder = made(f"{turns}{{% if add_generation_prompt %}}{{{{ '{head}' }}}}{switch}{{% endif %}}")
    messages = [{"role": "user", "content": "u"}]
    off = await built(builder, parsed(messages))
    assert off.reading is not None
    assert (off.rendered or "").endswith(f"{head}</think>")
    assert read_reply(off.reading, "Hi.").content == "Hi."
    on = await built(builder, parsed(messages, chat_template_kwargs={"thinking": True}))
    assert on.reading is not None
    reply = read_reply(on.reading, "hm</think>Hi.")
    assert (reply.reasoning, reply.content) == ("hm", "Hi.")
    ends = len(builder.tokens_of_text(f"{head}<think>", add_special_tokens=False))
    assert on.begin_tokens == len(on.token_ids) - (ends if head else 0), "no later prompt has the thought"


async def test_special_tokens_that_mark_calls_are_shown() -> None:
    tokenizer = tokenizer_with(MISTRAL)
    tokenizer.add_special_tokens({"extra_special_tokens": ["[TOOL_CALLS]", "[OTHER]"]})
    builder = PromptBuilder(
        tokenizer,
        vocab_tokens=600,
        context_tokens_max=CONTEXT,
        eos_token_ids=[EOS_ID],
        settings=Settings(),
    )
    messages = [{"role": "user", "content": "u"}]
    mark = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    assert (await built(builder, parsed(messages, tools=[GET]))).shown_ids == (mark,)
    assert (await built(builder, parsed(messages))).shown_ids == ()
    builder.close()


async def test_a_harmony_model_is_read_by_its_channels_and_its_calls_come_back() -> None:
    tokenizer = copy.deepcopy(tokenizer_with(HARMONY))
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<|{one}|>" for one in HARMONY_TOKENS]})
    ends = [tokenizer.convert_tokens_to_ids(f"<|{one}|>") for one in ("return", "call")]
    builder = PromptBuilder(
        tokenizer, vocab_tokens=600, context_tokens_max=CONTEXT, eos_token_ids=ends, settings=Settings()
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": "u"}]
    first = await built(builder, parsed(messages, tools=[GET]))
    shown = {tokenizer.convert_ids_to_tokens(one) for one in first.shown_ids}
    assert shown == {f"<|{one}|>" for one in HARMONY_TOKENS if one != "return"}
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"k":1}'
    )
    message, back = spoken(first, text, 0)
    assert (message.content, message.reasoning, message.calls[0].arguments) == ("", "hm", '{"k":1}')
    ids = [*builder.tokens_of_text(text, add_special_tokens=False), ends[1]]
    assert await builder.remember("salt", first, text, ids, owner=OWNER, forgets=0, reply=message)
    messages += [back, {"role": "tool", "tool_call_id": back["tool_calls"][0]["id"], "content": "r"}]
    second = await built(builder, parsed(messages, tools=[GET]))
    assert second.token_ids[: len(first.token_ids) + len(ids)] == [*first.token_ids, *ids]
    assert "analysis<|message|>hm<|end|>" in (second.rendered or ""), "a tool loop keeps its thought"
    assert builder.template.variables == {"reasoning_effort"}, "a message's thinking is no switch"
    said = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "It is"}]
    goes_on = await built(builder, parsed(said, continue_final_message=True, add_generation_prompt=False))
    assert goes_on.reading is not None
    assert goes_on.reading.opening == "<|channel|>final<|message|>It is"
    assert read_reply(goes_on.reading, " Paris.").content == " Paris."
    builder.close()


@pytest.mark.parametrize("template", [HARMONY, LLAMA3], ids=["harmony", "llama3"])
async def test_where_a_message_has_one_call_parallel_calls_stand_one_by_one_with_their_results(
    template: str, made: Callable[..., PromptBuilder]
) -> None:
    """Of several, gpt-oss's template writes the first, whose name all results get; Llama 3's refuses them."""

    def call(call_id: str, name: str) -> dict[str, Any]:
        function = {"name": name, "arguments": json.dumps({"k": f"of {call_id}"})}
        return {"id": call_id, "type": "function", "function": function}

    def result(call_id: str, content: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call_id, "content": content}

    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call("c0", "get")]},
        result("c0", "r0"),
        {"role": "assistant", "content": None, "tool_calls": [call("c1", "get"), call("c2", "put")]},
        *(result("c2", "r2"), result("c0", "late"), result("c1", "r1")),
        {"role": "user", "content": "and now?"},
    ]
    text = (await built(made(template), parsed(messages, tools=[GET, PUT]))).rendered or ""
    words = ["of c0", '"r0"', "of c1", '"r1"', "of c2", '"r2"', '"late"', "and now?"]
    assert [text.count(word) for word in words] == [1] * len(words)
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    if template == HARMONY:
        assert 'functions.put to=assistant<|channel|>commentary<|message|>"r2"' in text
        assert 'functions.get to=assistant<|channel|>commentary<|message|>"r1"' in text


async def test_an_answer_of_several_calls_is_not_found_where_results_come_between(
    made: Callable[..., PromptBuilder],
) -> None:
    builder = made(LLAMA3)
    first = await built(builder, parsed([{"role": "user", "content": "u"}], tools=[GET]))
    kept, _, back = await said(builder, first, "; ".join(map(CALLS["llama3"], ("a", "b"))), 0)
    assert (kept, len(back["tool_calls"])) == (False, 2)
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "r"} for one in back["tool_calls"]]
    again = await built(builder, parsed([{"role": "user", "content": "u"}, back, *results], tools=[GET]))
    assert builder.vocabulary.text(again.token_ids) == again.rendered


@pytest.mark.parametrize("field", ["description", "parameters"])
async def test_a_tool_goes_without_what_it_may_where_its_template_cannot(
    field: str, made: Callable[..., PromptBuilder]
) -> None:
    """As gpt-oss's, which adds a tool's description to a text."""
    at = "tool.function.description"
    strict = HARMONY if field == "description" else HARMONY.replace(at, "tool.function.parameters.type")
    bare = {"type": "function", "function": {"name": "now"}}
    messages = [{"role": "user", "content": "u"}]
    text = (await built(made(strict), parsed(messages, tools=[GET, bare]))).rendered or ""
    said = ("d", "") if field == "description" else ("object", "object")
    assert f"// {said[0]}\ntype get = () => any;\n// {said[1]}\ntype now = () => any;" in text
    plain = (await built(made(QWEN3), parsed(messages, tools=[bare]))).rendered or ""
    assert json.dumps(bare) in plain, "nothing is added that the client has not sent"


async def test_tools_are_refused_where_no_parser_is_wanted() -> None:
    builder = PromptBuilder(
        tokenizer_with(None),
        vocab_tokens=512,
        context_tokens_max=CONTEXT,
        eos_token_ids=[EOS_ID],
        settings=Settings(model=ModelSettings(tool_parser="none")),
    )
    with pytest.raises(ApiError, match=r"model\.tool_parser") as caught:
        await built(builder, parsed([{"role": "user", "content": "u"}], tools=[GET]))
    assert (caught.value.status, caught.value.param) == (400, "tools")
    builder.close()
