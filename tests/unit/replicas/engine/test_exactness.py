"""The law on any CPU: equal where the probe says so, else within the bound; and both branches can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from samovar.replicas.engine.audit import Probe
from samovar.replicas.forward import lean
from samovar.replicas.forward.loading import load_model
from samovar.replicas.kv.kv_pool import KvGeometry
from samovar.replicas.messages import Delta, TokenLogprob
from samovar.replicas.model.spec import inspect_model
from samovar.replicas.start import step_choice
from tests.support.engines import exactness, other_cpu
from tests.support.engines.exactness import (
    assert_same_deltas,
    assert_same_kv,
    assert_same_logits,
    assert_same_logprobs,
)

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
NOISE = {FP32: 1e-6, BF16: 1e-2}


def kv_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((2, 2, 32, 2, 16), generator=torch.Generator().manual_seed(1)).to(dtype)


def never_asked() -> bool:
    raise AssertionError("a probe takes seconds: what is equal needs none")


@DTYPES
def test_rounding_is_within_the_bound_and_a_wrong_block_is_not(dtype: torch.dtype) -> None:
    truth = kv_of(dtype)
    assert_same_kv(truth.clone(), truth, never_asked)
    rounded = (truth.float() * (1 + NOISE[dtype])).to(dtype)
    assert_same_kv(rounded, truth, False)
    with pytest.raises(AssertionError, match="the KV differs"):
        assert_same_kv(rounded, truth, lambda: True)
    wrong = truth.clone()
    wrong[1, :, :16] = truth[1, :, 16:]  # one block of two, in one layer
    for exact in (True, False):
        with pytest.raises(AssertionError, match="the KV differs"):
            assert_same_kv(wrong, truth, exact)
    with pytest.raises(AssertionError, match="nan"):
        assert_same_kv(truth * torch.nan, truth, False)


@DTYPES
def test_logits_keep_their_order_but_for_a_near_tie(dtype: torch.dtype) -> None:
    truth = torch.linspace(-20, 0, 50)
    truth[7] = 5.0  # the best by far
    near = truth + NOISE[dtype]
    assert_same_logits(near, truth, dtype, False)
    with pytest.raises(AssertionError, match="the logits differ"):
        assert_same_logits(near, truth, dtype, True)
    for exact in (True, False):
        with pytest.raises(AssertionError, match=r"differ|another greedy token"):
            assert_same_logits(truth.roll(1), truth, dtype, exact)
    tie = truth.clone()
    tie[8] = 5.0 - 1e-4
    other = tie.clone()
    other[[7, 8]] = tie[[8, 7]]
    assert_same_logits(other, tie, dtype, False)


def row(token_id: int, logprob: float, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token_id, "", b"", logprob, tuple(TokenLogprob(t, "", b"", lp) for t, lp in top))


CLEAR = row(1, -0.1, (1, -0.1), (2, -3.0))
TIE = row(3, -0.7, (3, -0.7), (4, -0.7001))
PARTED = row(4, -0.7, (4, -0.7), (3, -0.7001))


def test_greedy_answers_part_at_a_near_tie_only() -> None:
    assert_same_logprobs([CLEAR, PARTED, CLEAR], [CLEAR, TIE, PARTED], FP32, False, greedy=True)
    for exact, greedy in ((True, True), (False, False)):
        with pytest.raises(AssertionError, match=r"differ|is another one"):
            assert_same_logprobs([CLEAR, PARTED], [CLEAR, TIE], FP32, exact, greedy=greedy)
    another = row(2, -3.0, (1, -0.1), (2, -3.0))
    with pytest.raises(AssertionError, match="below the best"):
        assert_same_logprobs([another], [CLEAR], FP32, False, greedy=True)
    with pytest.raises(AssertionError, match=r"differ by 0\.1"):
        assert_same_logprobs([replace(CLEAR, logprob=-0.2)], [CLEAR], FP32, False, greedy=True)


def test_what_a_client_hears_is_the_same_on_any_cpu() -> None:
    said = Delta(0, "a", (1,), (CLEAR,))
    near = replace(said, logprobs=(replace(CLEAR, logprob=-0.1 + 1e-5),))
    assert_same_deltas([near], [said], FP32, False)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_deltas([near], [said], FP32, True)
    for changed in (replace(said, text="b"), replace(said, token_ids=(2,)), replace(said, logprobs=())):
        with pytest.raises(AssertionError):
            assert_same_deltas([changed], [said], FP32, False)


@pytest.fixture
def another_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", F.linear)  # all three are put back behind the test
    monkeypatch.setattr(lean, "PACKED_DTYPES", lean.PACKED_DTYPES)
    monkeypatch.setattr(step_choice, "FORMS", dict(step_choice.FORMS))
    other_cpu.play(frozenset({FP32}))


def test_another_cpu_is_played_so_that_the_probe_says_no(tiny_llama: Path, another_cpu: None) -> None:
    """And it differs by what such CPUs differ by: rounding, far within the bound."""
    spec, device = inspect_model(tiny_llama), torch.device("cpu")
    geometry = KvGeometry(spec.layers, 16, spec.kv_heads, spec.head_dim, FP32)
    found = Probe(load_model(spec, FP32, device), geometry, spec.vocab, device).run(64)
    assert not found.exact
    assert "not bitwise here" in found.sentence
    fixed = torch.Generator().manual_seed(9)
    values, weight = torch.randn(64, 32, generator=fixed), torch.randn(16, 32, generator=fixed)
    few, many = F.linear(values[:4], weight), F.linear(values, weight)[:4]
    assert not torch.equal(few, many)
    torch.testing.assert_close(few, many, atol=1e-4, rtol=0)
    same = [F.linear(rows.to(BF16), weight.to(BF16)) for rows in (values[:8], values[:16])]
    assert torch.equal(same[0], same[1][:8])


def test_a_dtype_that_is_none_does_not_play_nothing() -> None:
    assert other_cpu.dtypes_of("") == frozenset()
    assert other_cpu.dtypes_of("float32,bfloat16") == {FP32, BF16}
    with pytest.raises(ValueError, match="fp32: give float32 or bfloat16"):
        other_cpu.dtypes_of("fp32")


def test_the_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.backends.cpu.get_cpu_capability() in exactness.cpu_in_words()
    assert "bf16 yes" in exactness.cpu_in_words() or "bf16 no" in exactness.cpu_in_words()
    monkeypatch.setattr(exactness, "verdicts", {})
    exactness.note("m", "torch.float32", "not bitwise here")
    (line,) = exactness.verdicts_in_words()
    assert line.startswith("m float32, ")
    assert line.endswith(": not bitwise here")
