"""Does exact mode hold on this machine? Asked of the real model at start, not assumed.

That every row has the same bits in any company is a property of the math libraries in use
(ENGINE.md section 7), not a promise. The probe computes the same tokens in one go, in
chunks, one by one, and in a batch with others, and compares logits and KV.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch

from replicas.attention import AttentionBackend
from replicas.kv_pool import KvGeometry, KvPool
from replicas.messages import SamplingParams
from replicas.runner import Runner
from replicas.scheduler import Chunk
from replicas.sequence import Sequence

_PROBE_TOKENS = 45  # no multiple of 4 or of a block
_CHUNKINGS: tuple[tuple[int, ...], ...] = ((20, 1, 24), (44, 1), (3, 40, 1, 1))

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


def probe_exactness(
    model: torch.nn.Module, geometry: KvGeometry, backend: AttentionBackend, vocab: int, device: torch.device
) -> ProbeResult:
    """Whether `backend` (an exact one) gives the same bits however the tokens are batched."""
    tokens = [(7919 * i + 13) % vocab for i in range(_PROBE_TOKENS)]
    logits, kv = _compute(model, geometry, backend, device, tokens, (len(tokens),))
    tried = 0
    for chunking in _CHUNKINGS:
        for companions in (0, 3):
            other = _compute(model, geometry, backend, device, tokens, chunking, companions)
            tried += 1
            if not (torch.equal(logits, other[0]) and torch.equal(kv, other[1])):
                difference = (logits - other[0]).abs().max().item()
                return ProbeResult(
                    False,
                    f"not bitwise (chunks {'+'.join(map(str, chunking))} in a batch of {companions + 1}: "
                    f"logits differ by {difference:.2g}); tolerance: {TOLERANCES[geometry.dtype]}",
                )
    return ProbeResult(True, f"bitwise: {tried} other chunkings and batches gave the same logits and KV")


def _compute(
    model: torch.nn.Module,
    geometry: KvGeometry,
    backend: AttentionBackend,
    device: torch.device,
    tokens: list[int],
    chunking: tuple[int, ...],
    companions: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits `[vocab]` behind the last token, KV `[layers, 2, tokens, kv_heads, head_dim]`)."""
    blocks = -(-len(tokens) // geometry.block_tokens)
    pool = KvPool(geometry, 1 + blocks * (1 + companions), device)
    runner = Runner(model, pool, backend, exact=True)
    sequences = []
    for number in range(1 + companions):
        ids = tokens if number == 0 else tokens[number:] + tokens[:number]
        first = 1 + number * blocks
        sequences.append(_sequence(ids, list(range(first, first + blocks))))
    start, logits = 0, torch.empty(0)
    for count in chunking:
        logits = runner.run([Chunk(sequence, start, count) for sequence in sequences])
        start += count
    return logits[0], pool.gather(sequences[0].pages, len(tokens))


def _sequence(ids: list[int], pages: list[int]) -> Sequence:
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
