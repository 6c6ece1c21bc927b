"""`bench.kv_quality`: what it reckons; and, slowly, that the default model is within the bars."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import kv_quality as bench


def test_the_numbers_of_predictions_that_differ_in_one_place() -> None:
    expected = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.5], [9.0, 0.0, 0.0]])
    got = expected.clone()
    got[1] = torch.tensor([0.0, 1.0, 1.25])
    row = bench.compare(expected, got, [7, 0, 1])
    kl = (expected[1].softmax(-1) * (expected[1].log_softmax(-1) - got[1].log_softmax(-1))).sum()
    assert row["kl_mean"] == pytest.approx(float(kl) / 3)
    assert row["kl_max"] == pytest.approx(float(kl))
    assert row["argmax_same"] == pytest.approx(2 / 3)
    assert row["worst_flip"] == 0.5
    assert row["d_nll"] == pytest.approx(
        float(expected[1].log_softmax(-1)[1] - got[1].log_softmax(-1)[1]) / 2
    )


def test_each_text_has_a_row_and_int8_is_what_is_measured(tiny_llama: Path) -> None:
    rows = bench.measure(
        tiny_llama, {"one": "to be or not to be, " * 9, "two": "that is the question " * 9}, 90
    )
    assert [(row["text"], row["tokens"]) for row in rows] == [("one", 90), ("two", 90), ("all", 180)]
    for row in rows:
        assert 0 < row["kl_mean"] < 0.05
    assert not bench.meets({"kl_mean": 0.006, "argmax_same": 1.0, "d_nll": 0.0})
    assert bench.meets({"kl_mean": 0.005, "argmax_same": 0.97, "d_nll": 0.01})


@pytest.mark.slow
def test_the_default_model_in_int8_is_within_the_bars(smollm2: Path) -> None:
    *texts, together = bench.measure(smollm2, bench.own_texts())
    assert len(texts) == 3
    assert bench.meets(together), together
