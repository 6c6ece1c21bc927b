"""Does exact mode hold on this machine? Asked of the real model at start, not assumed.

That a row has the same bits in any company is a property of the math libraries in use, of the
dtype and of the number of threads (ENGINE.md section 7), not a promise: with 3 threads and more,
torch cuts elementwise float32 work at places that depend on the number of rows. The probe
computes the same tokens in one go, in chunks and in a batch with others, and compares logits and
KV; and it runs the activation function at every number of rows that a step may have.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from replicas.attention import EXACT_ROWS, GatherSdpa
from replicas.kv_pool import KvGeometry, KvPool
from replicas.messages import SamplingParams
from replicas.runner import Runner
from replicas.scheduler import Chunk
from replicas.sequence import Sequence

_TOKENS = 45  # no multiple of 4 or of a block
# (chunks, other sequences in the batch): row counts of 1 to 12 and more are among them, because
# GEMM libraries choose another kernel for a few rows.
_CIRCUMSTANCES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((20, 1, 24), 0),
    ((44, 1), 0),
    ((40, 5), 0),
    ((39, 6), 0),
    ((36, 9), 0),
    ((34, 11), 0),
    ((31, 14), 0),
    ((3, 40, 1, 1), 3),
    ((44, 1), 4),
    ((44, 1), 8),
)

TOLERANCES = {
    torch.float32: "logits within 1e-3 and the same greedy token",
    torch.bfloat16: "KL below 0.1 and the same greedy token where the best two differ by more than 2",
    torch.float16: "KL below 0.1 and the same greedy token where the best two differ by more than 2",
}
"""What takes the place of equality where it does not hold (ENGINE.md section 7)."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    exact: bool
    sentence: str


class Probe:
    """`model`: loaded for the paged pool; `geometry`: of the pool it will run on."""

    def __init__(
        self, model: torch.nn.Module, geometry: KvGeometry, vocab: int, device: torch.device
    ) -> None:
        self._model = model
        self._geometry = geometry
        self._vocab = vocab
        self._device = device
        self._tolerance = f"tolerance: {TOLERANCES[geometry.dtype]}"

    def run(self, step_tokens_max: int) -> ProbeResult:
        """Whether all goes the same, bit for bit, up to steps of `step_tokens_max` rows."""
        rows = self._first_uneven_activation(step_tokens_max)
        if rows is not None:
            threads = torch.get_num_threads()
            sentence = f"not bitwise with {threads} threads (the activation of {rows} rows differs)"
            return ProbeResult(False, f"{sentence}; {self._tolerance}")
        tokens = [(7919 * i + 13) % self._vocab for i in range(_TOKENS)]
        logits, kv = self._compute(tokens, (len(tokens),), 0)
        for chunks, others in _CIRCUMSTANCES:
            other_logits, other_kv = self._compute(tokens, chunks, others)
            if not (torch.equal(logits, other_logits) and torch.equal(kv, other_kv)):
                difference = (logits - other_logits).abs().max().item()
                sentence = (
                    f"not bitwise here (chunks {'+'.join(map(str, chunks))} in a batch of {others + 1}: "
                    f"logits differ by {difference:.2g})"
                )
                return ProbeResult(False, f"{sentence}; {self._tolerance}")
        tried = len(_CIRCUMSTANCES)
        return ProbeResult(True, f"bitwise: {tried} other chunkings and batches gave the same logits and KV")

    def _first_uneven_activation(self, rows_max: int) -> int | None:
        """The smallest number of rows at which an elementwise function gives a row other bits."""
        width = int(self._model.config.intermediate_size)  # type: ignore[arg-type, union-attr]
        generator = torch.Generator().manual_seed(0)
        rows_max += -rows_max % EXACT_ROWS
        values = torch.randn((rows_max, width), generator=generator).to(self._device, self._geometry.dtype)
        starts = range(0, rows_max, EXACT_ROWS)
        truth = torch.cat([F.silu(values[start : start + EXACT_ROWS]) for start in starts])
        for rows in range(EXACT_ROWS, rows_max + 1, EXACT_ROWS):
            if not torch.equal(F.silu(values[:rows]), truth[:rows]):
                return rows
        return None

    def _compute(
        self, tokens: list[int], chunks: tuple[int, ...], others: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits `[vocab]` behind the last token, KV `[layers, 2, tokens, kv_heads, head_dim]`)."""
        blocks = -(-len(tokens) // self._geometry.block_tokens)
        pool = KvPool(self._geometry, 1 + blocks * (1 + others), self._device)
        runner = Runner(self._model, pool, GatherSdpa(True, self._geometry.dtype), exact=True)
        sequences = []
        for number in range(1 + others):
            ids = tokens[number:] + tokens[:number]
            first = 1 + number * blocks
            sequences.append(bare_sequence(ids, list(range(first, first + blocks))))
        start, logits = 0, torch.empty(0)
        for count in chunks:
            logits = runner.run([Chunk(sequence, start, count) for sequence in sequences])
            start += count
        return logits[0], pool.gather(sequences[0].pages, len(tokens))


def bare_sequence(ids: list[int], pages: list[int]) -> Sequence:
    """Tokens on these pages, none computed yet, outside of any scheduler."""
    return Sequence(
        request_id="probe",
        arrival=0,
        namespace=bytes(32),
        tokens=array("I", ids),
        prompt_tokens=len(ids),
        sampling=SamplingParams(max_tokens=1),
        seed=0,
        pages=pages,
    )
