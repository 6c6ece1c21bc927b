"""A loop of tool calls on a real engine: a turn reuses all tokens of the one before, and ends as a call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.forecast import tool_tags
from samovar.cache_tiers.messages import TurnEnded
from samovar.configs.settings import LimitsSettings, Settings
from samovar.replicas.messages import GenerateRequest, Resume, SamplingParams
from samovar.replicas.reply import read_reply
from samovar.router.openai.messages import ChatMessage, ToolCall
from samovar.router.openai.parse import RequestParser
from samovar.router.prompt.prompt import Prompt, PromptBuilder
from samovar.router.prompt.reply_memory import Owner
from tests.support.engines.engines import Answer
from tests.support.engines.tier_engines import Tiered, tiered
from tests.support.engines.tiny_models import EOS_ID
from tests.support.router.chat_templates import TEMPLATES, tokenizer_with

CONTEXT = 4096
BLOCK = 16
TURNS = 10
OWNER = Owner("tenant", b"session")
GET = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
PARSER = RequestParser(LimitsSettings(), CONTEXT)


def generate(engine: Tiered, prompt: Prompt, text_ids: list[int]) -> Answer:
    """The answer of a model that says `text_ids`: as if another replica had begun it, then its end."""
    key = engine.driver.next_key()
    sampling = SamplingParams(max_tokens=len(text_ids) + 1, temperature=0.0, allowed_token_ids=(EOS_ID,))
    answer = engine.driver.answers[key] = Answer()
    request = GenerateRequest(
        f"r{key}",
        prompt.token_ids,
        sampling,
        placement=engine.placement,
        resume=Resume(0, tuple(text_ids)),
        reading=prompt.reading,
    )
    answer.refused = engine.built.engine.requests.add(key, request)
    engine.drain()
    assert answer.refused is None
    assert (answer.ids, answer.finish) == ([EOS_ID], {0: "stop"})
    return answer


@pytest.mark.parametrize("family", ["none", "hermes", "qwen3", "llama3", "mistral"])
async def test_a_loop_of_ten_calls_computes_only_what_is_new(
    family: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiered(tiny_llama, tmp_path, pool_tokens=8192)
    ends: list[TurnEnded] = []
    turn_over = engine.node.turn_over

    def told(over: TurnEnded) -> Any:
        ends.append(over)
        return turn_over(over)

    monkeypatch.setattr(engine.node, "turn_over", told)
    builder = PromptBuilder(
        tokenizer_with(TEMPLATES.get(family)),
        vocab_tokens=512,
        context_tokens_max=CONTEXT,
        eos_token_ids=[EOS_ID],
        settings=Settings(),
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    chain: list[int] = []
    for turn in range(TURNS):
        body = {"model": "m", "messages": messages, "tools": [GET]}
        prompt = await builder.chat(
            "salt", PARSER.chat(json.dumps(body).encode()), "tenant", owner=OWNER, forgets=0
        )
        assert prompt.left is None
        assert prompt.token_ids[: len(chain)] == chain
        said = f'{{"name":"get",  "arguments":{{"k":{turn}}}}}'
        text = {"llama3": said, "mistral": f"[TOOL_CALLS]{said}"}.get(
            family, f"<tool_call>{said}</tool_call>"
        )
        ids = builder.tokens_of_text(text, add_special_tokens=False)
        answer = generate(engine, prompt, ids)
        assert answer.admitted is not None
        whole_blocks = BLOCK * ((len(chain) - 1) // BLOCK) if chain else 0
        assert answer.admitted.cached_tokens >= whole_blocks, f"turn {turn}"
        assert prompt.reading is not None
        (call,) = read_reply(prompt.reading, text).calls
        call_id = f"call_{turn}"
        await builder.remember(
            "salt",
            prompt,
            text,
            [*ids, EOS_ID],
            owner=OWNER,
            forgets=0,
            reply=ChatMessage("assistant", "", calls=(ToolCall(call_id, call.name, call.arguments),)),
        )
        chain = [*prompt.token_ids, *ids]
        function = {"name": call.name, "arguments": call.arguments}
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": f"result {turn}"},
        ]
    builder.close()
    assert [(end.stop, end.tool) for end in ends] == [("tool_calls", tool_tags(["get"]))] * TURNS
