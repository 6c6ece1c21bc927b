"""Every field that a known API has is obeyed, refused, or changes nothing: on each route."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from samovar.configs.settings import LimitsSettings
from samovar.router.anthropic import bounded_messages_body
from samovar.router.anthropic.request import MessagesParser
from samovar.router.openai import (
    ApiError,
    ParsedChat,
    ParsedCompletion,
    RequestParser,
    bounded_chat,
    bounded_completion,
)
from samovar.router.openai.fields import HARMLESS, UNBUILT
from samovar.router.responses import bounded_responses_body
from samovar.router.responses.request import ResponsesParser
from samovar.router.responses.store import ResponseStore

LIMITS = LimitsSettings()
PARSER = RequestParser(LIMITS, 8192)
RESPONSES = ResponsesParser(PARSER, LIMITS, ResponseStore(4, 1 << 20))
MESSAGES = MessagesParser(PARSER, LIMITS, frozenset({"enable_thinking"}))

# As in the API references and request models of each, 2026-11.
OPENAI_CHAT = """
audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
top_logprobs top_p user verbosity web_search_options"""
OPENAI_COMPLETIONS = """
best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop
stream stream_options suffix temperature top_p user"""
OPENAI_RESPONSES = """
background context_management conversation include input instructions max_output_tokens max_tool_calls
metadata model moderation parallel_tool_calls previous_response_id prompt prompt_cache_key
prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options temperature
text tool_choice tools top_logprobs top_p truncation user"""
VLLM = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
chat_template_kwargs continue_final_message documents echo guided_choice guided_grammar guided_json
guided_json_object guided_regex guided_whitespace_pattern ignore_eos include_reasoning
include_stop_str_in_output kv_transfer_params length_penalty logits_processors logprob_token_ids
media_io_kwargs min_p min_tokens mm_processor_kwargs priority prompt_logprobs repetition_detection
repetition_penalty request_id return_prompt_text return_token_ids return_token_offsets
return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens stop_token_ids
stream_interval structural_tag structured_outputs thinking_token_budget top_k truncate_prompt_tokens
truncation_side use_beam_search vllm_xargs"""
SGLANG = """
bootstrap_host bootstrap_port bootstrap_room custom_logit_processor custom_params data_parallel_rank
ebnf extra_key lora_path no_stop_trim regex return_cached_tokens_details return_hidden_states
return_routed_experts rid separate_reasoning session_params stop_regex stream_reasoning
logprob_start_len"""
LLAMA_CPP = """
cache_prompt chat_format dry_allowed_length dry_base dry_multiplier dry_penalty_last_n
dry_sequence_breakers dynatemp_exponent dynatemp_range enable_thinking grammar grammar_lazy
grammar_triggers id_slot input_extra input_prefix input_suffix json_schema lora min_keep mirostat
mirostat_eta mirostat_tau multimodal_data n_discard n_indent n_keep n_predict n_probs parse_tool_calls
post_sampling_probs preserved_tokens reasoning_budget reasoning_format repeat_last_n repeat_penalty
response_fields return_progress return_tokens samplers t_max_predict_ms thinking_forced_open
timings_per_token top_n_sigma typical_p xtc_probability xtc_threshold"""
ANTHROPIC = """
betas cache_control container context_management inference_geo max_tokens mcp_servers messages metadata
model output_config output_format service_tier speed stop_sequences stream system temperature thinking
tool_choice tools top_k top_p"""
OTHERS = """
compaction do_sample encoder_repetition_penalty epsilon_cutoff eta_cutoff format knowledge models
no_repeat_ngram_size num_beams num_predict options penalty_alpha plugins provider reasoning_split route
session_id smoothing_factor tfs tfs_z top_a transforms typical cache_profile"""
KNOWN = sorted(
    set(
        " ".join(
            (OPENAI_CHAT, OPENAI_COMPLETIONS, OPENAI_RESPONSES, VLLM, SGLANG, LLAMA_CPP, ANTHROPIC, OTHERS)
        ).split()
    )
)
# Names that are one API's own way to say a thing, and mean nothing on another's route.
OF_ONE_API = """
best_of cache_control container include input instructions max_output_tokens mcp_servers messages metadata
output_config output_format previous_response_id prompt reasoning stop_sequences system text thinking
tool_choice tools truncation"""

HELLO = [{"role": "user", "content": "hi"}]
Parse = Callable[[Mapping[str, Any]], ParsedChat | ParsedCompletion]
ROUTES: dict[str, tuple[type[BaseModel], Parse]] = {
    "chat": (
        bounded_chat(LIMITS),
        lambda more: PARSER.chat(_body({"messages": HELLO} | more)),
    ),
    "completions": (
        bounded_completion(LIMITS),
        lambda more: PARSER.completion(_body({"prompt": "hi"} | more)),
    ),
    "responses": (
        bounded_responses_body(LIMITS),
        lambda more: RESPONSES.response(_body({"input": "hi"} | more), "t"),
    ),
    "messages": (
        bounded_messages_body(LIMITS),
        lambda more: MESSAGES.messages(_body({"messages": HELLO, "max_tokens": 9} | more)),
    ),
}


def _body(fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"model": "m"} | fields).encode()


@pytest.mark.parametrize("route", ROUTES)
def test_each_known_field_is_obeyed_refused_or_harmless(route: str) -> None:
    model, parse = ROUTES[route]
    lost = []
    for name in KNOWN:
        if name in UNBUILT and model.model_fields.get(name) and name not in _own_names(route):
            for value in ("some wish", 12345.5, {"a": 1}):
                with pytest.raises(ApiError) as refused:
                    parse({name: value})
                error = refused.value
                assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)
            for neutral in (None, "", [], {}, *UNBUILT[name]):
                parse({name: neutral})
        elif name in model.model_fields:
            continue  # obeyed: the next test
        elif name in HARMLESS or name in OF_ONE_API.split():
            assert name in parse({name: "some wish"}).ignored_fields
        else:
            lost.append(name)
    assert not lost, f"{route}: these fields are neither obeyed nor in router/openai/fields.py: {lost}"


def _own_names(route: str) -> set[str]:
    """Return the fields that a route's own model builds."""
    return {name for base in ROUTES[route][0].__mro__[1:2] for name in base.model_fields}


def test_no_field_is_both_refused_and_harmless() -> None:
    assert not UNBUILT.keys() & HARMLESS
    of_none = (UNBUILT.keys() | HARMLESS) - set(KNOWN)
    assert not of_none, f"no known API has these: {of_none}"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# Of each field two values that mean different things; and what it needs beside it.
TWO: dict[str, tuple[Any, Any]] = {
    "add_generation_prompt": (True, False),
    "add_special_tokens": (True, False),
    "allowed_token_ids": ([1], [2]),
    "cache_profile": ("chat", "agent"),
    "cache_salt": ("a", "b"),
    "chat_template_kwargs": ({"thinking": True}, {"thinking": False}),
    "compaction": ({"mode": "off"}, {"mode": "retrieve"}),
    "continue_final_message": (True, False),
    "documents": (["a"], ["b"]),
    "ebnf": ("root ::= 'a'", "root ::= 'b'"),
    "echo": (True, False),
    "enable_thinking": (True, False),
    "frequency_penalty": (0.5, 1.0),
    "grammar": ("start: 'a'", "start: 'b'"),
    "guided_choice": (["a"], ["b"]),
    "guided_grammar": ("start: 'a'", "start: 'b'"),
    "guided_json": ({"type": "object"}, {"type": "array"}),
    "guided_json_object": (True, False),
    "guided_regex": ("a", "b"),
    "guided_whitespace_pattern": (" ", "a"),
    "ignore_eos": (True, False),
    "json_schema": ({"type": "object"}, {"type": "array"}),
    "knowledge": ({"retrieve": True}, {"retrieve": False}),
    "logit_bias": ({"5": 1.0}, {"5": 2.0}),
    "logprob_start_len": (1, 2),
    "max_completion_tokens": (3, 4),
    "max_tokens": (3, 4),
    "metadata": ({"user_id": "b"}, {"user_id": "c"}),
    "min_p": (0.1, 0.2),
    "min_tokens": (1, 2),
    "model": ("a", "b"),
    "n": (1, 2),
    "n_predict": (9, 10),
    "nvext": ({"agent_hints": {"iat": 500}}, {"agent_hints": {"iat": 9000}}),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0.5, 1.0),
    "priority": (1, 2),
    "prompt_cache_key": ("a", "b"),
    "prompt_cache_options": ({"ttl": "1h"}, {"ttl": "2h"}),
    "prompt_cache_retention": ("24h", "in_memory"),
    "prompt_logprobs": (1, 2),
    "reasoning_effort": ("low", "high"),
    "regex": ("a", "b"),
    "repeat_penalty": (1.1, 1.2),
    "repetition_penalty": (1.1, 1.2),
    "response_format": ({"type": "json_object"}, {"type": "text"}),
    "return_token_ids": (True, False),
    "return_tokens_as_token_ids": (True, False),
    "seed": (1, 2),
    "service_tier": ("priority", "flex"),
    "session_id": ("a", "b"),
    "stop": (["a"], ["b"]),
    "stop_token_ids": ([1], [2]),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {"include_usage": False}),
    "structured_outputs": ({"regex": "a"}, {"regex": "b"}),
    "temperature": (0.1, 0.2),
    "tool_choice": ("none", "auto"),
    "tools": ([TOOL], []),
    "top_k": (1, 2),
    "top_logprobs": (1, 2),
    "top_p": (0.1, 0.2),
    "truncate_prompt_tokens": (5, 6),
    "user": ("a", "b"),
}
TWO_OF = {
    "chat": {
        "messages": (HELLO, [{"role": "user", "content": "ho"}]),
        "logprobs": (True, False),
        "repeat_last_n": (-1, None),
    },
    "completions": {
        "prompt": ("a", "b"),
        "logprobs": (1, 2),
        "best_of": (2, None),
        "repeat_last_n": (-1, None),
    },
    "responses": {
        "input": ("a", "b"),
        "instructions": ("a", "b"),
        "max_output_tokens": (3, 4),
        "previous_response_id": ("resp_a", None),
        "reasoning": ({"effort": "low"}, {"effort": "high"}),
        "store": (True, False),
        "include": (["reasoning.encrypted_content"], []),
        "text": ({"format": {"type": "json_object"}}, {"format": {"type": "text"}}),
        "tool_choice": ("none", "auto"),
        "tools": ([{"type": "function", "name": "f", "parameters": {}}], []),
        "truncation": ("auto", "disabled"),
        "prompt": ({"id": "p"}, None),
        "top_logprobs": (1, None),
        "repeat_last_n": (-1, None),
    },
    "messages": {
        "messages": (HELLO, [{"role": "user", "content": "ho"}]),
        "system": ("a", "b"),
        "stop_sequences": (["a"], ["b"]),
        "tool_choice": ({"type": "none"}, {"type": "auto"}),
        "tools": ([{"name": "f", "input_schema": {"type": "object"}}], []),
        "thinking": ({"type": "enabled"}, {"type": "disabled"}),
        "cache_control": ({"type": "ephemeral"}, None),
        "mcp_servers": ([{"type": "url"}], []),
        "container": ("c", None),
        "output_config": ({"effort": "low"}, {"effort": "high"}),
        "output_format": ({"type": "json_schema", "schema": {"type": "object"}}, None),
        "repeat_last_n": (-1, None),
    },
}
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL]},
    "guided_whitespace_pattern": {"guided_json": {"type": "object"}},
    "continue_final_message": {"messages": [*HELLO, {"role": "assistant", "content": "a"}]},
}
NO_MATTER = frozenset({"repeat_last_n"})  # served with one value only, or needs another field


@pytest.mark.parametrize("route", ROUTES)
def test_each_field_of_a_body_is_read(route: str) -> None:
    """Two values of a field give two requests, or an error: none is taken and then passed over."""
    model, parse = ROUTES[route]
    own, two = _own_names(route), TWO | TWO_OF[route]
    for name, field in model.model_fields.items():
        if name in NO_MATTER or (name in UNBUILT and name not in own and _is_unbuilt(field)):
            continue
        assert name in two, f"{route}: give two values of {name}, to see that it is obeyed"
        beside = dict(BESIDE.get(name, {}))
        if route in ("responses", "messages") and "tools" in beside:
            beside["tools"] = TWO_OF[route]["tools"][0]
        if (route, name) == ("chat", "top_logprobs"):
            beside["logprobs"] = True
        told = [_told(parse, beside | ({} if value is None else {name: value})) for value in two[name]]
        assert told[0] != told[1], f"{route}: {name} is taken and not read"


def _is_unbuilt(field: Any) -> bool:
    return any(type(mark).__name__ == "_Unbuilt" for mark in field.metadata)


def _told(parse: Parse, fields: Mapping[str, Any]) -> str:
    try:
        return repr(parse(fields))
    except ApiError as error:
        return f"{error.status} {error.message}"


def test_fields_of_a_chat_are_obeyed_on_the_other_routes_and_errors_have_the_clients_names() -> None:
    for route in ("responses", "messages"):
        _, parse = ROUTES[route]
        parsed = parse({"stop": ["END"], "min_p": 0.2, "logit_bias": {"7": -5}, "guided_regex": "a+"})
        sampling = parsed.sampling
        assert (sampling.stop, sampling.min_p, sampling.logit_bias) == (("END",), 0.2, ((7, -5.0),))
        assert sampling.grammar is not None
        assert sampling.grammar.field == "guided_regex"
        with pytest.raises(ApiError) as refused:
            parse({"stop": ["a", 5], "min_p": 0.2})
        assert refused.value.param == "stop[1]"
    with pytest.raises(ApiError) as refused:
        ROUTES["messages"][1]({"stop": ["a"], "stop_sequences": ["b"]})
    assert refused.value.param == "stop"
    with pytest.raises(ApiError) as refused:
        ROUTES["responses"][1]({"max_tokens": 5, "max_output_tokens": 6})
    assert refused.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": 5, "max_tokens": 6}, "n_predict"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        ROUTES["chat"][1](fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_llama_cpps_names_are_obeyed() -> None:
    off = ROUTES["chat"][1]({"repeat_penalty": 1.5, "repeat_last_n": 0})
    assert off.sampling.repetition_penalty == 1.0, "a penalty of no tokens"
    parsed = ROUTES["chat"][1]({"n_predict": 5, "repeat_penalty": 1.5, "repeat_last_n": -1})
    assert (parsed.sampling.max_tokens, parsed.sampling.repetition_penalty) == (5, 1.5)


HELLO_TEXT = '"messages": [{"role": "user", "content": "a"}]'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"messages": [{"role": "user", "content": "aHALF"}]', "messages[0].content"),
        (f'{HELLO_TEXT}, "x": {{"HALF": 1}}', "x"),
        (f'{HELLO_TEXT}, "tools": [{{"type": "HALF"}}]', "tools[0].type"),
        (f'{HELLO_TEXT}, "stop": ["a", "HALF"]', "stop[1]"),
    ],
)
def test_half_a_character_is_named_by_its_place(fields: str, param: str) -> None:
    body = '{"model": "m", ' + fields.replace("HALF", "\\ud83d") + "}"
    with pytest.raises(ApiError) as refused:
        PARSER.chat(body.encode())
    assert (refused.value.status, refused.value.param) == (400, param)
