"""A field that is there and empty, zero or false says what it says, or is known to say nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from samovar.configs.settings import LimitsSettings
from samovar.router.openai import ApiError
from samovar.router.openai.parse import ParsedRequest, RequestParser
from samovar.router.openai.schema import ChatBody, CompletionBody, StructuredOutputs

PARSER = RequestParser(
    LimitsSettings(), 2048, {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_tokens": 64}
)
FALSY: tuple[Any, ...] = ("", [], {}, 0, False)
NOT_ASKED: tuple[Any, ...] = ("", [], {})
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "u"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "p"}

SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    # Zero of what counts from zero.
    **dict.fromkeys(("min_tokens", "min_p", "presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("logprob_start_len", "top_logprobs", "priority"), (0,)),
    "repeat_last_n": (0,),  # without a penalty
    # No to a wish.
    **dict.fromkeys(
        ("ignore_eos", "stream", "return_token_ids", "return_tokens_as_token_ids", "echo", "logprobs"),
        (False,),
    ),
    **dict.fromkeys(("guided_json_object", "continue_final_message", "parallel_tool_calls"), (False,)),
    # None of what there may be several, and no options.
    "stop": ("", []),
    **dict.fromkeys(("stop_token_ids", "modalities", "tools", "documents"), ([],)),
    **dict.fromkeys(
        ("stream_options", "prompt_cache_options", "metadata", "logit_bias", "chat_template_kwargs"), ({},)
    ),
    **dict.fromkeys(("suffix", "service_tier"), ("",)),
    "guided_whitespace_pattern": ("",),  # of no form
    "nvext": (0, False, "", [], {}, 0.0),  # hints of another server: what is not of their form says nothing
    # What is not served, and not asked for.
    **dict.fromkeys(
        ("structural_tag", "bad_words", "logits_processors", "skip_special_tokens", "functions"), NOT_ASKED
    ),
    **dict.fromkeys(("audio", "web_search_options", "chat_template", "format", "echo"), NOT_ASKED),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "echo"), (*NOT_ASKED, 0, False)),
}
"""Values that mean the same as none."""


def parsed(body: dict[str, Any]) -> ParsedRequest | None:
    """What a body says; None: it is refused."""
    parse = PARSER.completion if "prompt" in body else PARSER.chat
    try:
        return parse(json.dumps(body).encode())
    except ApiError:
        return None


def names(model: Any) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


@pytest.mark.parametrize(("base", "model"), [(CHAT, ChatBody), (COMPLETION, CompletionBody)])
def test_what_is_falsy_is_not_taken_for_absent(base: dict[str, Any], model: Any) -> None:
    absent = parsed(base)
    assert absent is not None
    for name in names(model):
        for value in FALSY:
            is_known = any(value == one and type(value) is type(one) for one in SAYS_NOTHING.get(name, ()))
            made = parsed({**base, name: value})
            assert made is None or made != absent or is_known, (name, value)


@pytest.mark.parametrize("name", names(StructuredOutputs))
def test_a_form_that_is_falsy_is_refused_or_a_form(name: str) -> None:
    for value in FALSY:
        made = parsed({**CHAT, "structured_outputs": {name: value}})
        assert made is None or made.sampling.grammar is not None, (name, value)
