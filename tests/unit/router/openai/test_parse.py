"""Bodies to requests: what fields mean, which error names what, and hypothesis at the gate."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.configs.settings import LimitsSettings
from samovar.router.openai.errors import ApiError
from samovar.router.openai.parse import ParsedChat, RequestParser
from samovar.router.openai.schema import ChatBody, CompletionBody

LIMITS = LimitsSettings()
PARSER = RequestParser(LIMITS, 2048)
USER = {"role": "user", "content": "x"}


def parse(**fields: Any) -> ParsedChat:
    return PARSER.chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def test_defaults_and_nulls() -> None:
    nulls = {
        name: None
        for name in ChatBody.model_fields
        if name not in ("model", "messages") and not name.startswith("_")
    }
    assert parse(**nulls) == parse()
    asked = parse().sampling
    assert (asked.temperature, asked.top_p, asked.max_tokens, asked.logprobs) == (1.0, 1.0, 0, None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, None),
        ({"temperature": 3}, "temperature must be at most 2."),
        ({"top_p": -1}, "top_p must be at least 0."),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number."),
        ({"messages": "x"}, "messages must be a list."),
        ({"model": 7}, "model must be a text."),
        ({"stream": "maybe"}, "stream must be true or false."),
    ],
)
def test_a_broken_rule_is_said_in_plain_words(fields: dict[str, Any], said: str | None) -> None:
    message = str(refused(**fields))
    assert "should" not in message
    assert said is None or message == said


def test_fields_reach_the_sampling() -> None:
    parsed = parse(
        max_tokens=5,
        max_completion_tokens=6,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        stop="end",
        stop_token_ids=[1, 2],
        ignore_eos=True,
        seed=-5,
        min_tokens=2,
        logprobs=True,
        n=3,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    asked = parsed.sampling
    assert (asked.max_tokens, asked.top_k, asked.stop, asked.stop_token_ids) == (6, 0, ("end",), (1, 2))
    assert (asked.seed, asked.logprobs, asked.ignore_eos, parsed.n) == (-5, 0, True, 3)
    assert parsed.stream
    assert parsed.include_usage
    assert parsed.continuous_usage


def test_messages_roles_parts_and_null_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    parsed = parse(
        messages=[
            {"role": "developer", "content": parts},
            {"role": "user", "content": "u", "name": "x"},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "user", "content": ""},
        ]
    )
    said = [(message.role, message.content) for message in parsed.messages]
    assert said == [("system", "ab"), ("user", "u"), ("assistant", ""), ("user", "")]


def test_cache_vocabulary() -> None:
    parsed = parse(
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        prompt_cache_options={"mode": "x", "ttl": "30m"},
        session_id="s",
        user="u",
        cache_salt="c",
        metadata={"a": "b"},
    )
    assert (parsed.cache.retention, parsed.cache.ttl_s) == ("24h", 1800.0)
    assert (parsed.ids.session_id, parsed.ids.cache_salt) == ("s", "c")
    assert parsed.metadata == {"a": "b"}
    assert parse(prompt_cache_options={"ttl": 60}).cache.ttl_s == 60.0
    assert refused(prompt_cache_options={"ttl": "soon"}).param == "prompt_cache_options.ttl"


MARK = {"type": "ephemeral"}


@pytest.mark.parametrize(
    ("marks", "marked_ttl_s"),
    [
        ([], None),
        ([MARK], 300.0),
        ([MARK, {**MARK, "ttl": "1h"}, {**MARK, "ttl": "5m"}], 3600.0),
        ([{**MARK, "ttl": 7}], 7.0),
        ([{"type": "persistent"}, {}, None], None),
        ([True, "ephemeral", [MARK], {"type": 5}, {**MARK, "ttl": -1}], None),  # as before: not refused
        ([{**MARK, "ttl": "soon"}], 300.0),
    ],
)
def test_marked_parts_ask_for_the_longest_of_their_times(
    marks: list[Any], marked_ttl_s: float | None
) -> None:
    parts = [{"type": "text", "text": "a", "cache_control": mark} for mark in marks]
    assert parse(messages=[USER, {"role": "user", "content": parts}]).cache.marked_ttl_s == marked_ttl_s
    whole = [{**USER, "cache_control": mark} for mark in marks]
    assert parse(messages=[USER, *whole]).cache.marked_ttl_s == marked_ttl_s


def test_a_message_is_the_same_as_text_and_as_parts_but_for_where_a_system_prompts_parts_met() -> None:
    def said(role: str, content: Any) -> Any:
        return parse(messages=[{"role": role, "content": content}]).messages[0]

    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    for role in ("system", "user"):
        assert said(role, "abc") == said(role, parts("abc"))
        assert said(role, "abc").content == said(role, parts("a", "", "bc")).content
    assert said("developer", parts("a", "", "bc")).cuts == (1, 1)
    assert said("user", parts("a", "", "bc")).cuts == ()


def test_unbuilt_features_are_refused_only_when_asked_for() -> None:
    parse(tools=[], functions=[], tool_choice="none", logit_bias={}, response_format={"type": "text"})
    parse(modalities=["text"], grammar=None, guided_json=None, guided_json_object=False)
    for name, value in {
        "functions": [{}],
        "structural_tag": "x",
        "function_call": {"name": "f"},
        "response_format": {"type": "regex"},
        "modalities": ["audio"],
        "audio": {"voice": "x"},
    }.items():
        error = refused(**{name: value})
        assert (error.code, error.param) == ("unsupported_parameter", name)
    of_completions = {"suffix": "x", "best_of": 2, "bad_words": ["x"], "response_format": {"type": "regex"}}
    for name, value in of_completions.items():
        with pytest.raises(ApiError) as caught:
            PARSER.completion(json.dumps({"model": "m", "prompt": "p", name: value}).encode())
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ({"messages": "hello"}, "messages"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"n": 9}, "n"),
        ({"n": "1"}, "n"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"a": []}}, "metadata.a"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"top_k": 40.5}, "top_k"),
        ({"stop": ["", 5]}, "stop[0]"),
        ({"stop": [None, 5]}, "stop[0]"),
        ({"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"prompt_cache_retention": "forever"}, "prompt_cache_retention"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
        ),
        ({"metadata": {"a": "x" * 5000}}, "metadata"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param.split("[")[0].split(".")[-1] in error.message


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ({"max_tokens": -1}, {}),
        ({"max_completion_tokens": -1, "max_tokens": 7}, {}),
        ({"max_tokens": 7.0}, {"max_tokens": 7}),
        ({"stop": ""}, {}),
        ({"stop": [""]}, {}),
        ({"stop": ["", "a", ""]}, {"stop": "a"}),
        ({"stop": [None]}, {}),
        ({"stop": [None, "a"]}, {"stop": "a"}),
        ({"top_k": 40.0}, {"top_k": 40}),
        ({"seed": 3.0, "n": 2.0, "min_tokens": 1.0}, {"seed": 3, "n": 2, "min_tokens": 1}),
        ({"prompt_cache_retention": "in-memory"}, {"prompt_cache_retention": "in_memory"}),
        ({"tool_choice": "auto", "function_call": "auto"}, {"tool_choice": "none"}),
        ({"top_logprobs": 0, "logprobs": False}, {}),
        ({"metadata": {"a": 1, "b": 2.5, "c": True}}, {"metadata": {"a": "1", "b": "2.5", "c": "true"}}),
        ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"add_generation_prompt": True, "continue_final_message": False}, {}),
    ],
    ids=str,
)
def test_values_that_can_mean_one_thing_only_are_taken(sent: dict[str, Any], meant: dict[str, Any]) -> None:
    assert parse(**sent) == parse(**meant)


def test_no_tokens_at_all_is_a_length_too() -> None:
    """`max_tokens: 0`, as evaluation sends it: a replica computes the prompt and samples one token."""
    parsed = parse(max_tokens=0)
    assert (parsed.generates, parsed.sampling.max_tokens) == (False, 1)
    assert parse(max_tokens=1).generates
    assert parse().generates


def test_completions_have_openais_length_by_default() -> None:
    def length(**fields: Any) -> tuple[int, bool]:
        asked = PARSER.completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode())
        return asked.sampling.max_tokens, asked.is_length_default

    assert length() == (16, True)
    assert length(min_tokens=20) == (20, True)
    assert length(max_tokens=16) == (16, False)
    assert length(max_tokens=-1) == (0, False), "the rest of the context"


def test_unknown_fields_are_listed_and_not_built() -> None:
    parsed = parse(store=True, verbosity="x", chat_template_kwargs={"x": 1, "enable_thinking": False})
    assert parsed.ignored_fields == ("store", "verbosity", "chat_template_kwargs.x")
    assert parsed.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, 0),
        ({"priority": 5}, 5),
        ({"priority": -3, "service_tier": "flex"}, -3),
        ({"service_tier": "priority"}, -10),
        ({"service_tier": "flex"}, 10),
        ({"service_tier": "auto"}, 0),
        ({"service_tier": "scale"}, 0),
    ],
)
def test_priority_and_service_tier(fields: dict[str, Any], priority: int) -> None:
    assert parse(**fields).priority == priority


def test_text_that_looks_like_structure_is_text() -> None:
    text = '{"a": [1, 2, "\\\\"]}, ' * 20_000
    assert parse(messages=[{"role": "user", "content": text}]).messages[0].content == text


def test_many_token_ids_are_not_too_much_structure() -> None:
    ids = [[7] * 2048] * LIMITS.prompts_max
    parsed = PARSER.completion(json.dumps({"model": "m", "prompt": ids}).encode())
    assert [len(prompt) for prompt in parsed.prompts] == [2048] * LIMITS.prompts_max


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KNOWN = sorted({*ChatBody.model_fields, *CompletionBody.model_fields})
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", 5]), "content": JSON}),
    max_size=3,
)
BODIES = st.dictionaries(st.sampled_from(KNOWN), JSON, max_size=6).flatmap(
    lambda fields: st.fixed_dictionaries(
        {"model": st.just("m"), "messages": MESSAGES | JSON, "prompt": JSON}
    ).map(lambda base: {**fields, **base})
)


@settings(max_examples=150, deadline=None)
@given(JSON | BODIES)
def test_any_json_is_parsed_or_refused(value: Any) -> None:
    body = json.dumps(value).encode()
    for parse_body in (PARSER.chat, PARSER.completion):
        outcome: object
        try:
            outcome = parse_body(body)
        except ApiError as error:
            outcome = error
        if isinstance(outcome, ApiError):
            assert outcome.status == 400
            assert json.loads(outcome.body_bytes())


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    for parse_body in (PARSER.chat, PARSER.completion):
        with pytest.raises(ApiError) as caught:
            parse_body(body)
        assert caught.value.status == 400
