"""Grammars: what may follow, where an answer may end, and what is refused, within which limits."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, grammar_from

from samovar.configs.sections import GrammarSettings
from samovar.replicas.grammar import GrammarCompiler, GrammarRefused, GrammarState
from samovar.replicas.messages import Grammar, GrammarKind
from tests.house import ROOT
from tests.support.engines.tiny_models import EOS_ID, make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
VOCAB = 512
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def compiler(**settings: object) -> GrammarCompiler:
    limits = GrammarSettings(**settings)  # type: ignore[arg-type]
    return GrammarCompiler(TOKENIZER.backend_tokenizer.to_str, VOCAB, (EOS_ID,), limits)


COMPILER = compiler()

TEA = {"type": "object", "properties": {"tea": {"type": "string"}}, "required": ["tea"]}
CUPS = {"type": "object", "properties": {"cups": {"type": "integer"}}, "required": ["cups"]}
OPEN = {"additionalProperties": True}


def grammar(kind: GrammarKind, text: str, field: str = "guided") -> Grammar:
    return Grammar(kind, text, field)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def text_of(token_ids: list[int]) -> str:
    return str(TOKENIZER.decode(token_ids))


def random_answer(state: GrammarState, rng: random.Random, tokens_max: int = 400) -> tuple[list[int], bool]:
    """Any tokens that are allowed, and whether the grammar has ended them."""
    answer: list[int] = []
    while len(answer) < tokens_max:
        allowed = state.mask().nonzero()[0].tolist()
        assert allowed, "nothing may follow, not even the end"
        token_id = rng.choice(allowed)
        if token_id == EOS_ID:
            return answer, True
        state.accept(token_id)
        answer.append(token_id)
        if state.is_complete:
            return answer, True
    return answer, False


def follows(state: GrammarState, text: str) -> bool:
    """Whether the whole answer may be `text`."""
    try:
        for token_id in ids_of(text):
            if not state.mask()[token_id]:
                return False
            state.accept(token_id)
    except GrammarRefused:
        return False
    return state.is_complete or bool(state.mask()[EOS_ID])


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (grammar("regex", r"\d{3}-[a-z]+"), "123-abc", ["", "12-a", "123-", "x"]),
        (grammar("regex", r"[\d.]+a/\"#" + "\n"), '1.2a/"#\n', ['\u0661a/"#\n']),
        (grammar("regex", "^(yes|no)$"), "no", ["maybe", "yesno"]),
        (grammar("choice", '["tea", "té", "\U0001fad6 \\n\\"/", ""]'), '\U0001fad6 \n"/', ["coffee"]),
        (grammar("choice", '["tea", "té", ""]'), "", ["t"]),
        (grammar("grammar", 'root ::= "a" b\nb ::= [0-9]+'), "a12", ["a", "12"]),
        (grammar("grammar", 'start: "a" B\nB: /[0-9]+/'), "a12", ["a", "12"]),
        (grammar("lark", 'start: "::=" %json {"type": "integer"}'), "::=-7", ["7"]),
        (grammar("json_schema", json.dumps(PERSON)), '{"name": "Bo", "age": 3}', ['{"age": 3}', "{}", "3"]),
        (grammar("json_schema", "{}"), "[1, null]", ["[1,"]),
        (grammar("json_schema", '{"x-guidance": {"whitespace_flexible": false}}'), "[1,null]", ["[1, null]"]),
        (grammar("json_schema", '{"x-guidance": {"whitespace_pattern": " {2}"}}'), "[1,  2]", ["[1, 2]"]),
        *(
            (grammar("json_schema", json.dumps({**TEA, **more})), '{"tea": "oolong"}', bad)
            for more, bad in (
                ({}, ['{"tea": "oolong", "cups": 2}']),
                ({"additionalProperties": {"type": "integer"}}, ['{"tea": "oolong", "cups": "2"}']),
            )
        ),
        (grammar("json_schema", json.dumps(TEA | OPEN)), '{"tea": "oolong", "cups": 2}', []),
        (grammar("json_schema", json.dumps({"allOf": [TEA, CUPS]})), '{"tea": "oolong", "cups": 2}', []),
        (grammar("json_schema", json.dumps({"anyOf": [TEA, CUPS]})), '{"cups": 2}', ['{"cups": 2, "x": 1}']),
        (
            grammar("json_schema", json.dumps({"type": "array", "items": TEA})),
            "[]",
            ['[{"tea": "", "x": 1}]'],
        ),
        (grammar("json_schema", '{"type": "object"}'), '{ "a": 1 }', ['{"a":  1}', '{\n"a": 1}', "[1]"]),
        (grammar("regex", r"[]a\[\-]+"), "]a[-", ["b"]),
    ],
)
def test_a_grammar_allows_what_it_describes_and_nothing_else(
    asked: Grammar, good: str, bad: list[str]
) -> None:
    assert follows(COMPILER.open(asked), good)
    for text in bad:
        assert not follows(COMPILER.open(asked), text), text


def test_the_end_is_allowed_only_where_the_answer_may_end() -> None:
    state = COMPILER.open(grammar("regex", "ab?"))
    assert state.mask().nonzero()[0].tolist() == [
        *ids_of("a"),
        *[i for i in range(VOCAB) if text_of([i]) == "ab"],
    ]
    state.accept(ids_of("a")[0])
    assert not state.is_complete
    assert set(state.mask().nonzero()[0].tolist()) == {EOS_ID, *ids_of("b")}
    state.accept(ids_of("b")[0])
    assert state.is_complete
    assert state.mask().nonzero()[0].tolist() == [EOS_ID]
    with pytest.raises(GrammarRefused):
        state.accept(ids_of("b")[0])


@given(
    st.sampled_from([r"[a-c]{2,5}", r"(\+|-)?\d+(\.\d{1,2})?", r"é+[^x]x", r"(?i)yes|no"]),
    st.integers(0, 999),
)
def test_no_answer_ever_leaves_its_regex(pattern: str, seed: int) -> None:
    answer, is_over = random_answer(COMPILER.open(grammar("regex", pattern)), random.Random(seed), 60)
    if is_over:
        assert re.fullmatch(pattern, text_of(answer)), (pattern, text_of(answer))


@given(st.lists(st.text(max_size=6), min_size=1, max_size=5), st.integers(0, 999))
def test_no_answer_is_another_than_the_choices(choices: list[str], seed: int) -> None:
    state = COMPILER.open(grammar("choice", json.dumps(choices)))
    answer, is_over = random_answer(state, random.Random(seed))
    assert is_over
    assert TOKENIZER.backend_tokenizer.decode(answer, skip_special_tokens=False) in choices


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_under_a_schema_are_valid_json(seed: int) -> None:
    answer, is_over = random_answer(
        COMPILER.open(grammar("json_schema", json.dumps(PERSON))), random.Random(seed)
    )
    if is_over:
        person = json.loads(text_of(answer))
        assert list(person) == ["name", "age"]
        assert len(person["name"]) <= 8
        assert person["age"] >= 0


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (grammar("json_schema", '{"not": {}}', "response_format.json_schema.schema"), '"not"'),
        (grammar("json_schema", '{"$ref": "http://127.0.0.1/x"}'), "http://127.0.0.1/x"),
        (grammar("json_schema", '{"type": "strong"}'), "strong"),
        (grammar("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}'), "incompatible"),
        (grammar("json_schema", "[" * 5000), "nested too deeply"),
        (grammar("json_schema", "5"), "object"),
        (grammar("regex", "(?=a)b"), "look-ahead"),
        (grammar("regex", "(a"), "unclosed group"),
        (grammar("regex", r"[^\x00-\U0010FFFF]"), "no answer can satisfy it"),
        (grammar("regex", "[[:alpha:]]{2}"), r"write \["),
        (grammar("regex", "x[^a-z&&[^b]]"), r"write \&&"),
        (grammar("regex", "[a--b]"), r"write \--"),
        (grammar("choice", "[]"), "nothing to choose from"),
        (grammar("grammar", "root ::= foo"), "foo"),
        (grammar("grammar", "root ::= " + "(" * 4000), "recursion"),
        (grammar("lark", "start: <nope>"), "<nope>"),
        (grammar("lark", "start: " + "(" * 30_000), "too deeply nested"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_its_field_and_reason(asked: Grammar, names: str) -> None:
    with pytest.raises(GrammarRefused) as caught:
        COMPILER.check(asked)
    assert caught.value.field == asked.field
    assert names in caught.value.reason
    assert len(caught.value.reason) <= 300
    assert "\n" not in caught.value.reason
    assert caught.value.event.param == asked.field


@pytest.mark.parametrize(
    "asked",
    [
        grammar("regex", r"a<\|im_end\|>b"),
        grammar("regex", r"<\|im_start\|>"),
        grammar("json_schema", '{"const": "<|im_end|>"}'),
        grammar("choice", '["<|endoftext|>x"]'),
    ],
)
def test_a_special_tokens_text_is_refused_clearly_and_ends_no_answer(asked: Grammar) -> None:
    state = COMPILER.open(asked)

    def answer() -> None:
        for _ in range(20):
            state.accept(int(state.mask().nonzero()[0][-1]))

    with pytest.raises(GrammarRefused) as caught:
        answer()
    assert re.search(r"the text of a special token \(id \d+\)", caught.value.reason)


def chain(links: int, link: Callable[[dict[str, str]], object]) -> str:
    """A schema whose `$ref`s lead through `links` definitions."""
    parts = {str(i): link({"$ref": f"#/$defs/{i + 1}"}) for i in range(links)}
    return json.dumps({"$defs": {**parts, str(links): {}}, "$ref": "#/$defs/0"}, separators=(",", ":"))


def deep_grammars() -> list[Grammar]:
    """With llguidance 1.9.1 on a stack of 8 MiB, each of these ends the whole process."""
    return [
        grammar("json_schema", chain(1100, lambda ref: {"type": "array", "items": ref})),
        grammar("json_schema", chain(1200, lambda ref: {"properties": {"a": ref}})),
        grammar("lark", "".join(f'r{i}: "x" r{i + 1}\n' for i in range(3000)) + 'r3000: "x"\nstart: r0'),
    ]


def test_a_deep_grammar_does_not_overflow_the_stack() -> None:
    code = """
import threading
from tests.unit.replicas.grammar.test_grammar import compiler, deep_grammars
threads = [threading.Thread(target=compiler().check, args=(deep,)) for deep in deep_grammars()]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(threading.stack_size())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "0", "")


def test_limits_are_kept_and_named() -> None:
    def reason(asked: Grammar, **settings: object) -> str:
        with pytest.raises(GrammarRefused) as caught:
            compiler(**settings).check(asked)
        return caught.value.reason

    assert "grammar.spec_bytes_max" in reason(grammar("regex", "x" * 2000), spec_bytes_max=1024)
    assert "grammar.gbnf_bytes_max" in reason(
        grammar("grammar", "root ::= " + "x" * 2000), gbnf_bytes_max=1024
    )
    assert "grammar.compile_s_max" in reason(grammar("regex", "a+"), compile_s_max=1e-9)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}
    assert "too big" in reason(grammar("json_schema", json.dumps(wide)), symbols_max=1000)


def test_only_so_many_compiled_grammars_are_kept() -> None:
    small = compiler(kept_max=3)
    for number in range(10):
        small.check(grammar("regex", f"a{{{number}}}b"))
    assert small.kept == 3
    small.check(grammar("regex", "a{9}b", "another field"))
    assert small.kept == 3


def test_answers_that_share_an_automaton_do_not_end_one_another() -> None:
    """It grows to its limit by what all have met; an answer that alone stays within it goes on the same."""
    asked = grammar("regex", "(a|b)*a(a|b){14}")
    small = compiler(lexer_states_max=1000)

    def states(seed: int, shared: GrammarCompiler) -> list[bytes]:
        rng, state, masks = random.Random(seed), shared.open(asked), []
        for _ in range(40):
            mask = state.mask()
            masks.append(mask.tobytes())
            state.accept(rng.choice([i for i in mask.nonzero()[0].tolist() if i != EOS_ID]))
        return masks

    alone = [states(seed, compiler(lexer_states_max=1000)) for seed in range(30)]
    assert [states(seed, small) for seed in range(30)] == alone


def test_an_automaton_at_its_limit_is_an_error_and_no_end() -> None:
    """llguidance's mask of a grammar that has failed is the end of the answer: it would look complete."""
    state = compiler(lexer_states_max=1000).open(grammar("regex", "(a|b)*a(a|b){30}x"))
    rng = random.Random(3)

    def go_on() -> None:
        for _ in range(5000):
            allowed = state.mask().nonzero()[0].tolist()
            assert allowed != [EOS_ID]
            state.accept(rng.choice([i for i in allowed if "x" not in text_of([i])]))

    with pytest.raises(GrammarRefused, match="too many states"):
        go_on()


@given(st.integers(0, 999), st.integers(0, 20))
def test_a_state_is_what_its_tokens_make_of_it(seed: int, cut: int) -> None:
    asked, rng = grammar("json_schema", json.dumps(PERSON)), random.Random(seed)
    state = COMPILER.open(asked)
    answer, _ = random_answer(state, rng, cut)
    again = compiler().open(asked)
    for token_id in answer:
        again.accept(token_id)
    assert np.array_equal(again.mask(), state.mask())
    copied = state.copy()
    assert np.array_equal(copied.mask(), state.mask())
    assert copied.is_complete == state.is_complete


class SlowMatcher:
    """Allows all; its masks come once `goes_on` is set. `begun`: one for each that was asked for.

    As the library's it may be used by one thread at a time.
    """

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.begun = threading.Semaphore(0)
        self.masks = 0

    def compute_bitmask(self) -> bytes:
        self.masks += 1
        if self.masks > 1 and not self.goes_on.is_set():
            raise RuntimeError("Already borrowed")
        self.begun.release()
        self.goes_on.wait()
        return b"\xff" * (VOCAB // 8)

    def is_error(self) -> bool:
        return False

    def consume_token(self, token_id: int) -> bool:
        return True


def test_a_mask_that_is_too_late_stays_so_while_a_thread_is_at_it() -> None:
    matcher: Any = SlowMatcher()
    with ThreadPoolExecutor(1) as masks:
        state = GrammarState(grammar("regex", "x"), lambda _: matcher, masks, vocab=VOCAB, mask_s_max=0.01)
        try:
            state.begin_mask()
            matcher.begun.acquire()
            for _ in range(2):
                with pytest.raises(GrammarRefused, match=r"grammar\.mask_s_max"):
                    state.mask()
        finally:
            matcher.goes_on.set()
    assert matcher.masks == 1


def test_a_mask_is_computed_once_a_token() -> None:
    matcher: Any = SlowMatcher()
    matcher.goes_on.set()
    with ThreadPoolExecutor(1) as masks:
        state = GrammarState(grammar("regex", "x"), lambda _: matcher, masks, vocab=VOCAB, mask_s_max=1.0)
        assert (state.mask() == state.mask()).all()
        state.begin_mask()
        assert state.mask().all()
        assert matcher.masks == 1
        state.accept(7)
        assert state.mask().all()
    assert matcher.masks == 2


def test_a_mask_computed_beside_is_the_same() -> None:
    asked = grammar("json_schema", json.dumps(PERSON))
    beside, plain = COMPILER.open(asked), COMPILER.open(asked)
    for token_id in ids_of('{"name": "Bo", "age": 3}'):
        beside.begin_mask()
        beside.begin_mask()
        assert np.array_equal(beside.mask(), plain.mask())
        beside.begin_mask()  # and a token that comes without asking for it
        beside.accept(token_id)
        plain.accept(token_id)


@pytest.mark.parametrize(
    "asked",
    [
        grammar("json_schema", json.dumps(PERSON)),
        grammar("json_schema", json.dumps(TEA | {"properties": {"tea": {"enum": [2**61 + 1]}}})),
        grammar("json_schema", json.dumps({"type": "object", "x-guidance": {"whitespace_flexible": False}})),
        grammar("regex", "(black|green) tea[0-9]"),
        grammar("choice", json.dumps(["black tea", 'green "tea"'])),
        grammar("lark", 'start: "tea" /[a-z]+/'),
        grammar("grammar", 'root ::= "tea" [a-z]'),
    ],
    ids=lambda asked: f"{asked.kind} {asked.text[:20]}",
)
def test_as_lark_a_grammar_means_the_same_to_who_compiles_it_as_vllm_does(asked: Grammar) -> None:
    lark = COMPILER.lark(asked)
    assert grammar_from("grammar", lark) == LLMatcher.grammar_from_lark(lark), "it is taken for another form"
    rng = random.Random(3)
    for _ in range(5):
        ours, theirs = COMPILER.open(asked), COMPILER.open(grammar("lark", lark))
        for _ in range(60):
            mask = ours.mask()
            assert np.array_equal(mask, theirs.mask())
            token_id = rng.choice(mask.nonzero()[0].tolist())
            if token_id == EOS_ID:
                break
            ours.accept(token_id)
            theirs.accept(token_id)
            assert ours.is_complete == theirs.is_complete
            if ours.is_complete:
                break


def test_the_library_is_loaded_for_the_first_grammar() -> None:
    code = """
import sys
import samovar.replicas.start.build, samovar.replicas.offload, samovar.router.ingress.app
from samovar.configs.sections import GrammarSettings
from samovar.replicas.grammar import GrammarCompiler
GrammarCompiler(str, 512, (2,), GrammarSettings())
print([name for name in sys.modules if "llguidance" in name])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_tokenizer_that_cannot_be_constrained_is_named() -> None:
    odd = GrammarCompiler(lambda: "{}", VOCAB, (EOS_ID,), GrammarSettings())
    with pytest.raises(GrammarRefused, match="tokenizer is not supported"):
        odd.check(grammar("regex", "a"))
