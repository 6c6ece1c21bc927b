"""Drawing tokens, and turning them into text."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from samovar.replicas.answers import OpenAnswers, OutputProcessor, TextOut, TokenText
from samovar.replicas.messages import GenerateRequest, Sampled, SamplingParams
from samovar.replicas.sampling.sampler import Sampler, uniform
from samovar.replicas.scheduling.sequence import Sequence
from tests.support.engines.tiny_models import byte_fallback, make_tiny_tokenizer


def sequence(output: list[int] | None = None, seed: int = 0, index: int = 0, **params: object) -> Sequence:
    tokens = [5, 6, 7, *(output or [])]
    return Sequence(
        request_id="r",
        arrival=0,
        namespace=bytes(32),
        tokens=array("I", tokens),
        prompt_tokens=3,
        sampling=SamplingParams(max_tokens=10, **params),  # type: ignore[arg-type]
        seed=seed,
        index=index,
    )


def sample(sampler: Sampler, logits: list[float], one: Sequence) -> int:
    (sampled,) = sampler.sample(torch.tensor([logits]), [(0, one)])
    assert isinstance(sampled, Sampled)
    return sampled.token_id


def draws(logits: list[float], count: int, **params: object) -> Counter[int]:
    sampler = Sampler((9,))
    return Counter(sample(sampler, logits, sequence(seed=i, **params)) for i in range(count))


def test_greedy_is_the_maximum() -> None:
    assert draws([0.0, 3.0, 1.0], 3, temperature=0.0) == {1: 3}


def test_frequencies_follow_the_softmax() -> None:
    logits = [0.0, 1.0, 2.0]
    expected = torch.tensor(logits).softmax(-1)
    counts = draws(logits, 3000)
    for token, probability in enumerate(expected.tolist()):
        assert counts[token] / 3000 == pytest.approx(probability, abs=0.03)


def test_top_k_top_p_min_p_cut_the_tail() -> None:
    logits = [4.0, 3.0, 2.0, 1.0, 0.0]
    assert set(draws(logits, 300, top_k=2)) == {0, 1}
    assert set(draws(logits, 300, top_p=0.8)) == {0, 1}  # .636, .234: the two pass .8 together
    assert set(draws(logits, 300, min_p=0.3)) == {0, 1}
    assert set(draws(logits, 50, top_p=1e-9)) == {0}
    assert set(draws(logits, 50, temperature=2.0, top_p=5e-324, min_p=1.0)) == {0}


def test_penalties() -> None:
    row = [0.0] * 5 + [2.0, -2.0] + [0.0] * 3
    sampler = Sampler(())

    def best(**params: object) -> int:
        return sample(sampler, row, sequence(temperature=0.0, **params))  # type: ignore[arg-type]

    assert best() == 5
    assert best(repetition_penalty=1.5) == 5  # 2 / 1.5 still wins
    assert best(output=[5], presence_penalty=3.0) == 0
    assert best(output=[5, 5, 5], frequency_penalty=0.8) == 0
    assert best(output=[5, 5], frequency_penalty=0.8) == 5


def test_min_tokens_bans_eos_and_stop_ids() -> None:
    row = [0.0] * 9 + [9.0]
    assert sample(Sampler((9,)), row, sequence(temperature=0.0, min_tokens=1)) != 9


@given(st.integers(0, 2**63 - 1), st.integers(0, 7), st.integers(0, 10_000))
def test_uniform_is_a_pure_function(seed: int, choice: int, position: int) -> None:
    value = uniform(seed, choice, position)
    assert 0 <= value < 1
    assert value == uniform(seed, choice, position)
    assert value != uniform(seed, choice, position + 1)
    assert value != uniform(seed, choice + 1, position)


def test_negative_and_huge_seeds() -> None:
    assert 0 <= uniform(-1, 0, 0) < 1
    assert 0 <= uniform(2**70, 0, 0) < 1


# -- text --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend() -> Tokenizer:
    return make_tiny_tokenizer().backend_tokenizer


def stream(backend: Tokenizer, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    out = TextOut(backend, stop)
    pieces = []
    for token_id in backend.encode(text, add_special_tokens=False).ids:
        piece, stopped = out.push(token_id)
        pieces.append(piece)
        if stopped:
            return pieces, True
    pieces.append(out.flush())
    return pieces, False


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=60))
def test_streamed_text_is_the_text(backend: Tokenizer, text: str) -> None:
    if "<|" in text:
        return
    pieces, _ = stream(backend, text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces), "half a character went out"


@given(
    text=st.text("abc \n", max_size=40),
    stop=st.lists(st.text("abc \n", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_against_find(backend: Tokenizer, text: str, stop: list[str]) -> None:
    """No part of a stop string is ever sent, and everything before the first one is."""
    pieces, stopped = stream(backend, text, tuple(stop))
    sent = "".join(pieces)
    places = [place for place in (text.find(s) for s in stop) if place >= 0]
    assert stopped == bool(places)
    if not places:
        assert sent == text
    else:
        assert text.startswith(sent)
        # Tokens hold several characters, so two stops may complete in one token: the first place counts.
        assert len(sent) == min(places) or not any(s in sent for s in stop)


def test_text_is_not_held_back_without_need(backend: Tokenizer) -> None:
    pieces, _ = stream(backend, "hello there", ("xyz",))
    assert "".join(pieces[:-1]) == "hello there"


def test_broken_bytes_of_a_byte_fallback_vocabulary() -> None:
    """A byte no character can have, after a finished character, must not end the engine."""
    backend, ids = byte_fallback()
    out = TextOut(backend, ())
    finished = [f"<0x{byte:02X}>" for byte in "你".encode()]
    text = "".join(out.push(ids[token])[0] for token in ["a", *finished, "<0xE4>", "b", "a"])
    assert text.startswith("a你")
    assert text.endswith("ba")


@pytest.mark.parametrize(
    ("continues", "prompt", "answer", "text"),
    [
        (True, ["b"], ["▁a", "b"], " ab"),
        (True, ["b", *["<unk>"] * 3, "▁"], ["▁a"], " a"),
        (True, ["b", *(f"<0x{byte:02X}>" for byte in "你".encode())], ["▁a"], " a"),
        (True, ["b", *(f"<0x{byte:02X}>" for byte in "你".encode()[:2])], ["<0xA0>", "b"], "\ufffdb"),
        (True, ["<unk>"] * 20, ["▁a"], " a"),
        (False, ["b"], ["▁a", "b"], "ab"),  # a turn of its own: its template writes the blank
    ],
)
def test_an_answer_that_continues_a_text_keeps_its_first_blank(
    continues: bool, prompt: list[str], answer: list[str], text: str
) -> None:
    backend, ids = byte_fallback()
    params = SamplingParams(max_tokens=len(answer), continues_text=continues)
    request = GenerateRequest("r", [ids[token] for token in prompt], params)
    tokens = array("I", request.prompt_token_ids)
    opened, choice = OpenAnswers(request), Sequence("r", 0, bytes(32), tokens, len(prompt), params, seed=0)
    outputs = OutputProcessor(backend, (), TokenText(backend, frozenset()), 4096)
    assert "".join(outputs.append(opened, choice, ids[token]).text for token in answer) == text


def test_token_bytes_join_to_the_text(backend: Tokenizer) -> None:
    of = TokenText(backend, frozenset({0, 1, 2})).of
    text = "Zürich 🍵 tea"
    ids = backend.encode(text, add_special_tokens=False).ids
    assert b"".join(of(i)[1] for i in ids) == text.encode()
    assert of(1) == ("<|im_start|>", b"<|im_start|>")
    assert of(10**6) == ("", b"")
