"""No number that a step is given leads the native step out of its pool, its tables or its rows."""

from __future__ import annotations

import pytest
import torch

from samovar.replicas.forward.inputs import StepInputs
from samovar.replicas.scheduling.sequence import bare_sequence
from samovar.replicas.scheduling.step import Chunk
from tests.support.engines.native_steps import StepBench
from tests.support.engines.plain_models import Shape, random_plain

PAGES, ROWS, LARGEST = 4, 3, 2**31 - 1
SENTENCES = {
    "a token is none of the vocabulary's": [(0, at, bad) for at in range(ROWS) for bad in (-1, 71, LARGEST)],
    "a position is behind all that the pool holds": [(1, 1, bad) for bad in (-1, 16 * PAGES, LARGEST)],
    "a slot is none of the pool's": [(2, 2, bad) for bad in (-1, 16 * PAGES, LARGEST, -LARGEST)],
    "a page is none of the pool's": [(-1, 0, bad) for bad in (-1, PAGES, LARGEST)],
    # Its first row, their number, the tokens of the sequence so far, where its page table begins.
    "a span is none of the step's": [
        *((3, 0, bad) for bad in (-1, 1, LARGEST)),
        *((3, 1, bad) for bad in (0, -1, ROWS + 1, LARGEST)),
        *((3, 2, bad) for bad in (ROWS - 1, -1, 16 * PAGES + 1, LARGEST)),
        *((3, 3, bad) for bad in (-1, LARGEST)),
    ],
}


def bench_of_one_page() -> tuple[StepBench, StepInputs]:
    """A step of three rows of one sequence, which is in bounds."""
    bench = StepBench(random_plain(Shape(), torch.float32), pages=PAGES)
    return bench, bench._packer.pack([Chunk(bare_sequence([1, 2, 3], [1]), 0, ROWS)])


@pytest.mark.parametrize(
    ("sentence", "section", "word", "number"),
    [(sentence, *place) for sentence, places in SENTENCES.items() for place in places],
)
def test_each_number_of_a_step_that_leads_out_of_bounds_is_refused(
    sentence: str, section: int, word: int, number: int
) -> None:
    """Only this check stands between a wrong number and memory anywhere in the process."""
    bench, inputs = bench_of_one_page()
    good = bench._forward.hidden(inputs)
    assert not good.isnan().any()
    inputs.words[inputs.shape.places()[section] + word] = number
    with pytest.raises(RuntimeError, match=sentence):
        bench._forward.hidden(inputs)
