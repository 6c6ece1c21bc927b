"""What an audit finds with either of the probe's verdicts, on any CPU: the runner computes by table."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import cast

import pytest
import torch

from samovar.replicas.engine.audit import RMS_MAX, Auditor
from samovar.replicas.forward.runner import Runner
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.kv.page_pool import PagePool
from samovar.replicas.messages import SamplingParams
from samovar.replicas.offload.load import Suspect
from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import Chunk

BLOCK, PROMPT, OWNER = 4, 10, b"o" * 32
DTYPES = (torch.float32, torch.bfloat16)


class TableRunner:
    """Its KV of a token depends on the token and the place alone, bit for bit."""

    def __init__(self, dtype: torch.dtype, *, exact: bool) -> None:
        self.exact = exact
        self.pool = KvPool(KvGeometry(2, BLOCK, 2, 8, dtype), 32, torch.device("cpu"))
        self._table = torch.randn((64, 2, 2, 2, 8), generator=torch.Generator().manual_seed(1)).to(dtype)

    def agrees(self, same: Callable[..., bool], *which: object) -> bool:
        return same(self, *which)

    def run(self, chunks: Listing[Chunk], copies: Listing[tuple[int, int]] = ()) -> torch.Tensor:
        for chunk in chunks:
            for place in range(chunk.start, chunk.start + chunk.count):
                page = chunk.sequence.pages[place // BLOCK]
                self.pool.data[page, 0, :, :, place % BLOCK] = self._table[chunk.sequence.tokens[place]]
        return torch.zeros((0, 64))


class Audited:
    """A prompt of `PROMPT` tokens whose first 8 slots are said to have come from a tier."""

    def __init__(self, *, exact: bool, dtype: torch.dtype) -> None:
        self.condemned: list[str] = []
        self.distrusted: list[bytes] = []
        self.runner = TableRunner(dtype, exact=exact)
        self.pool = PagePool(32, BLOCK)
        self.auditor = Auditor(
            cast(Runner, self.runner), self.pool, tokens_max=100, step_tokens=3,
            distrust=self.distrusted.append,
        )  # fmt: skip
        self.sequence = Sequence(
            request_id="r",
            arrival=0,
            namespace=bytes(32),
            tokens=array("I", range(PROMPT + 1)),
            prompt_tokens=PROMPT,
            sampling=SamplingParams(max_tokens=1),
            seed=0,
            owner=OWNER,
            pages=[self.pool.allocate() for _ in range(3)],
        )
        self.runner.run([Chunk(self.sequence, 0, PROMPT)])

    def add(self, place: int, layer: int, difference: float) -> None:
        """To one value of a slot."""
        slot = self.runner.pool.data[self.sequence.pages[place // BLOCK], 0, layer, 1, place % BLOCK]
        slot[1, 5] += difference

    def outcome(self) -> dict[str, int]:
        suspects = [
            Suspect(0, 4, lambda: self.condemned.append("first")),
            Suspect(4, 8, lambda: self.condemned.append("second")),
        ]
        assert self.auditor.consider(self.sequence, suspects)
        while self.auditor.has_work:
            self.auditor.step()
        self.pool.check_integrity([self.sequence.pages])
        return dict(self.auditor.outcomes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [True, False])
def test_g14_what_was_restored_whole_is_equal(exact: bool, dtype: torch.dtype) -> None:
    audited = Audited(exact=exact, dtype=dtype)
    audited.add(9, 0, 1.0)  # not restored: computed by the request itself
    assert audited.outcome() == {"equal": 1}
    assert (audited.condemned, audited.distrusted) == ([], [])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [0, 1])
def test_g14_where_bits_are_promised_one_value_that_differs_is_found(layer: int, dtype: torch.dtype) -> None:
    audited = Audited(exact=True, dtype=dtype)
    audited.add(6, layer, 0.02)
    assert audited.outcome() == {"mismatch": 1}
    assert (audited.condemned, audited.distrusted) == (["second"], [OWNER])


@pytest.mark.parametrize("dtype", DTYPES)
def test_g14_where_they_are_not_rounding_passes_and_another_block_does_not(dtype: torch.dtype) -> None:
    rounded = Audited(exact=False, dtype=dtype)
    rounded.add(6, 1, RMS_MAX[dtype])
    assert rounded.outcome() == {"equal": 1}
    wrong = Audited(exact=False, dtype=dtype)
    pages = wrong.sequence.pages
    wrong.runner.pool.copy_page(pages[1], pages[0])
    assert wrong.outcome() == {"mismatch": 1}
    assert (wrong.condemned, wrong.distrusted) == (["first"], [OWNER])
    lost = Audited(exact=False, dtype=dtype)
    lost.add(2, 0, float("nan"))
    assert lost.outcome() == {"mismatch": 1}
