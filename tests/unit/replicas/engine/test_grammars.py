"""Answers that follow a grammar: alone, in a batch, preempted, forked, and resumed on another replica."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from samovar.configs.sections import GrammarSettings
from samovar.replicas.grammar import GrammarCompiler
from samovar.replicas.messages import GenerateRequest, Grammar, Resume, SamplingParams
from samovar.replicas.reply import ReplyReading, format_named, read_reply
from samovar.router.openai.messages import offer_of
from samovar.router.openai.schema import OfferedFunction, OfferedTool
from samovar.router.prompt.tool_template import AnswerForm
from tests.support.engines.engines import Answer, Driver, prompt_of, small_engine
from tests.support.engines.exactness import assert_same_deltas
from tests.support.engines.tiny_models import EOS_ID, make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
PROMPT = prompt_of(37, seed=5)
COLOURS = ["red", "green", "blue"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "colour": {"enum": COLOURS},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "colour", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # random weights are fond of blanks
}
JSON = Grammar("json_schema", json.dumps(SCHEMA), "guided_json")
CODE = Grammar("regex", "[a-c]{2,6}", "guided_regex")
DRAWN: dict[str, Any] = {"temperature": 1.0, "ignore_eos": False}
TOKENS = 160

VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": False},
    "drawn": {**DRAWN, "top_p": 0.95, "top_k": 200, "min_p": 0.001},
    "logprobs": {**DRAWN, "logprobs": 2},
    "penalties": {**DRAWN, "presence_penalty": 0.8, "repetition_penalty": 1.4},
    "biased": {**DRAWN, "logit_bias": ((40, 3.5), (41, -100.0))},
    "long": {**DRAWN, "ignore_eos": True, "min_tokens": 12},
}


def assert_valid(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "colour", "sizes"]
    assert len(value["name"]) <= 6
    assert value["colour"] in COLOURS
    assert len(value["sizes"]) <= 2
    assert all(0 <= size <= 99 for size in value["sizes"])


def submit(
    driver: Driver, grammar: Grammar | None, resume: Resume | None = None, n: int = 1, **params: Any
) -> Answer:
    sampling = SamplingParams(**{"max_tokens": TOKENS, **DRAWN, **params, "grammar": grammar})
    key = driver.next_key()
    answer = driver.answers[key] = Answer()
    answer.refused = driver.engine.requests.add(
        key, GenerateRequest(f"r{key}", PROMPT, sampling, n, resume=resume)
    )
    return answer


@pytest.fixture(scope="module")
def driver(tiny_llama: Path) -> Driver:
    return Driver(small_engine(tiny_llama).engine)


@pytest.fixture(scope="module")
def other(tiny_llama: Path) -> Driver:
    """Another replica: it has computed and compiled nothing of what the first one has."""
    return Driver(small_engine(tiny_llama, pool_tokens=8192, prefix_reuse=False).engine)


def alone(driver: Driver, grammar: Grammar | None = JSON, **params: Any) -> Answer:
    answer = submit(driver, grammar, **params)
    driver.drain()
    assert answer.refused is None
    assert answer.failed is None
    return answer


@pytest.fixture(scope="module")
def drawn(driver: Driver) -> dict[int, Answer]:
    """Answers by their seed."""
    return {seed: alone(driver, seed=seed) for seed in range(6)}


def test_every_answer_is_valid_and_ends_by_itself(drawn: dict[int, Answer]) -> None:
    for answer in drawn.values():
        assert_valid(answer.text)
        assert answer.finish == {0: "stop"}
    assert len({answer.text for answer in drawn.values()}) == len(drawn)


def test_a_batch_changes_no_answer_with_a_grammar_or_without(
    driver: Driver, drawn: dict[int, Answer]
) -> None:
    plain = {seed: alone(driver, None, seed=seed, max_tokens=24) for seed in range(2)}
    ours = {seed: submit(driver, JSON, seed=seed) for seed in drawn}
    theirs = {seed: submit(driver, None, seed=seed, max_tokens=24) for seed in plain}
    driver.drain()
    assert {seed: answer.ids for seed, answer in ours.items()} == {s: a.ids for s, a in drawn.items()}
    assert {seed: answer.ids for seed, answer in theirs.items()} == {s: a.ids for s, a in plain.items()}


def assert_goes_on(
    driver: Driver, grammar: Grammar, whole: Answer, cuts: range, is_exact: bool, **params: Any
) -> None:
    """From each of `cuts` the rest is the same. They go on beside each other, which is quicker."""
    rests = [submit(driver, grammar, Resume(0, tuple(whole.ids[:cut])), **params) for cut in cuts]
    driver.drain()
    for cut, rest in zip(cuts, rests, strict=True):
        assert rest.refused is None, rest.refused
        assert_same_deltas(rest.deltas, whole.deltas[cut:], torch.float32, is_exact)


@pytest.mark.guarantee("F20")
@pytest.mark.parametrize("name", VARIANTS)
def test_f20_json_goes_on_the_same_from_every_token(
    driver: Driver, other: Driver, tiny_is_exact: bool, name: str
) -> None:
    params = {**VARIANTS[name], "seed": 11}
    whole = alone(driver, **params)
    assert_valid(whole.text)
    assert len(whole.deltas) > 12
    cuts = range(len(whole.deltas))
    assert_goes_on(other, JSON, whole, cuts, tiny_is_exact, **params)


def tool_calls(
    tokenizer: Any, vocab: int, name: str, is_parallel: bool = True
) -> tuple[ReplyReading, Grammar]:
    """How forced calls of one tool with `SCHEMA` are read, and their grammar, as the ingress makes it."""
    form = format_named(name, None)
    tool = OfferedTool(type="function", function=OfferedFunction(name="paint", parameters=SCHEMA))
    offered = offer_of([tool], "required", is_parallel)
    grammars = GrammarCompiler(tokenizer.to_str, vocab, (EOS_ID,), GrammarSettings())
    made = AnswerForm(offered, form).grammar(None, grammars)
    assert made is not None
    return ReplyReading(form, tools=("paint",)), made


def assert_calls(reading: ReplyReading, text: str) -> None:
    reply = read_reply(reading, text)
    assert (reply.content, bool(reply.calls)) == ("", True)
    for call in reply.calls:
        assert_valid(call.arguments)


@pytest.mark.guarantee("F20")
@pytest.mark.parametrize("template", ["hermes", "llama3_json"])
def test_f20_a_forced_call_goes_on_the_same_from_every_token(
    driver: Driver, other: Driver, tiny_is_exact: bool, template: str
) -> None:
    reading, grammar = tool_calls(TOKENIZER.backend_tokenizer, 512, template)
    params = {**DRAWN, "seed": 3, "max_tokens": 1000}
    whole = alone(driver, grammar, **params)
    assert whole.finish == {0: "stop"}
    assert_calls(reading, whole.text)
    cuts = range(0, len(whole.deltas), 7)
    assert_goes_on(other, grammar, whole, cuts, tiny_is_exact, **params)


def test_a_resume_that_leaves_the_grammar_is_refused(other: Driver) -> None:
    answer = submit(other, JSON, Resume(0, tuple(TOKENIZER("[1")["input_ids"])))
    assert answer.refused is not None
    assert (answer.refused.reason, answer.refused.param) == ("invalid", "guided_json")
    assert not other.engine.has_work


def test_preempted_answers_stay_valid(tiny_llama: Path, drawn: dict[int, Answer]) -> None:
    narrow = Driver(small_engine(tiny_llama, pool_tokens=128, prefix_reuse=False).engine)
    answers = {seed: submit(narrow, JSON, seed=seed, max_tokens=64) for seed in drawn}
    narrow.drain()
    assert narrow.engine.stats().preemptions > 0
    assert {seed: answer.ids for seed, answer in answers.items()} == {s: a.ids for s, a in drawn.items()}


def test_every_choice_follows_its_own_way(driver: Driver) -> None:
    answer = submit(driver, JSON, n=3, seed=4)
    driver.drain()
    assert answer.finish == dict.fromkeys(range(3), "stop")
    assert len(set(answer.texts.values())) == 3
    for text in answer.texts.values():
        assert_valid(text)


def test_the_answers_length_is_its_clients(driver: Driver) -> None:
    whole = alone(driver, seed=2)
    short = alone(driver, seed=2, max_tokens=5)
    assert (short.finish, short.ids) == ({0: "length"}, whole.ids[:5])
    exact = alone(driver, seed=2, max_tokens=len(whole.ids))
    assert (exact.finish, exact.text) == ({0: "stop"}, whole.text)
    place = whole.text.index('"', 3)
    assert alone(driver, seed=2, stop=(whole.text[:place],)).finish == {0: "stop"}


def test_the_end_comes_where_the_grammar_and_the_client_allow_it(driver: Driver) -> None:
    def lengths(**params: Any) -> set[int]:
        answers = [alone(driver, CODE, seed=seed, **params) for seed in range(12)]
        for answer in answers:
            assert answer.finish == {0: "stop"}
            assert re.fullmatch("[a-c]{2,6}", answer.text)
        return {len(answer.text) for answer in answers}

    end_now = ((EOS_ID, 100.0),)
    assert lengths(logit_bias=end_now) <= {2, 3}  # a token of two letters may come second
    assert min(lengths(logit_bias=end_now, min_tokens=4)) >= 4
    assert lengths(logit_bias=end_now, min_tokens=100) == {
        6
    }  # nothing may follow: the grammar's word is last
    assert lengths(logit_bias=end_now, ignore_eos=True) == {6}


def test_what_a_grammar_and_the_client_both_allow_is_sampled(driver: Driver) -> None:
    a, b, d = (TOKENIZER(letter)["input_ids"][0] for letter in "abd")
    for seed in range(4):
        answer = alone(driver, CODE, seed=seed, allowed_token_ids=(a, b, d, EOS_ID))
        assert re.fullmatch("[ab]{2,6}", answer.text)
    nothing = submit(driver, CODE, allowed_token_ids=(d,))
    driver.drain()
    assert nothing.refused is not None
    assert (nothing.refused.param, nothing.refused.reason) == ("allowed_token_ids", "invalid")
    assert "guided_regex" in nothing.refused.message


def test_logit_bias_is_added_to_the_logits(driver: Driver) -> None:
    plain = alone(driver, None, temperature=0.0, max_tokens=6, ignore_eos=True)
    banned = alone(
        driver, None, temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias=((plain.ids[0], -100.0),)
    )
    assert banned.ids[0] != plain.ids[0]
    forced = alone(driver, None, max_tokens=6, ignore_eos=True, seed=1, logit_bias=((77, 100.0),))
    assert forced.ids == [77] * 6
    unknown = submit(driver, None, logit_bias=((512, 1.0),))
    assert unknown.refused is not None
    assert "logit_bias" in unknown.refused.message


def test_a_grammar_that_cannot_be_served_is_refused_with_its_field(driver: Driver) -> None:
    refused = submit(driver, Grammar("json_schema", '{"not": {}}', "structured_outputs.json")).refused
    assert refused is not None
    assert (refused.reason, refused.param) == ("invalid", "structured_outputs.json")
    assert '"not"' in refused.message
    assert not driver.engine.has_work


def test_a_grammar_that_grows_too_complex_ends_its_request_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "check", False)  # some hundred steps
    limits = GrammarSettings(lexer_states_max=1000)
    to_str = TOKENIZER.backend_tokenizer.to_str
    monkeypatch.setattr(driver.engine.sampler, "grammars", GrammarCompiler(to_str, 512, (EOS_ID,), limits))
    endless = Grammar("regex", "(a|b)*a(a|b){30}x", "guided_regex")
    never = ((TOKENIZER("x")["input_ids"][0], -100.0),)
    bad = submit(driver, endless, max_tokens=1000, seed=1, logit_bias=never)
    good = submit(driver, CODE, seed=1)
    driver.drain()
    assert bad.refused is not None
    assert (bad.refused.param, bad.finish) == ("guided_regex", {})
    assert re.fullmatch("[a-c]{2,6}", good.text)
    assert driver.engine.stats().pages_active == 0


def test_the_default_model_answers_in_json(smollm2: Path) -> None:
    """Its tokenizer is a byte-level BPE with 49,152 ids; `python -m bench.structured` draws hundreds."""
    driver = Driver(
        small_engine(smollm2, pool_tokens=2048, dtype="bfloat16", exact=False).engine, check=False
    )
    prompt = driver.engine.requests.output.tokenizer.encode("Describe a cup of tea as JSON:").ids
    answers = [
        driver.submit(prompt, max_tokens=200, grammar=JSON, temperature=1.0, seed=seed, ignore_eos=False)
        for seed in range(6)
    ]
    driver.drain()
    for key in answers:
        assert driver.answers[key].finish == {0: "stop"}
        assert_valid(driver.answers[key].text)


def test_the_default_model_calls_the_tool_that_it_must_call(smollm2: Path) -> None:
    driver = Driver(
        small_engine(smollm2, pool_tokens=4096, dtype="bfloat16", exact=False).engine, check=False
    )
    tokenizer = driver.engine.requests.output.tokenizer
    reading, grammar = tool_calls(tokenizer, 49_152, "hermes", is_parallel=False)
    prompt = tokenizer.encode("Paint a cup of tea:").ids
    answers = [
        driver.submit(prompt, max_tokens=400, grammar=grammar, temperature=1.0, seed=seed, ignore_eos=False)
        for seed in range(3)
    ]
    driver.drain()
    for key in answers:
        assert driver.answers[key].finish == {0: "stop"}
        assert_calls(reading, driver.answers[key].text)
