"""Verifies KV by computing it again: audits of restored blocks while serving (G14), probe at start."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from samovar.replicas.forward import EXACT_ROWS, GatherSdpa, MakeForward, Runner, groups_experts
from samovar.replicas.kv import KvGeometry, KvPool, PagePool
from samovar.replicas.messages import SamplingParams
from samovar.replicas.model import is_device_lost
from samovar.replicas.offload import Suspect
from samovar.replicas.scheduling import Chunk, Sequence, bare_sequence, page_table

logger = logging.getLogger(__name__)

# Bound per layer without exact mode: root mean square of the difference over that of the values. Rounding by
# chunking stays far below, a wrong block is at 1 and above.
# By what is stored: int8 rounds the last bits of float32 to neighbouring codes.
RMS_MAX = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1, torch.int8: 0.1}


def same_slots(runner: Runner, ours: list[int], fresh: list[int], start: int, end: int) -> bool:
    """Compare slots `[start, end)` of two page tables, layer by layer: all at once might not fit.

    Bit for bit in exact mode, else within the bound.
    """
    pool = runner.pool
    for layer in range(pool.geometry.layers):
        restored = pool.gather_layer(layer, ours, start, end)
        computed = pool.gather_layer(layer, fresh, start, end)
        if runner.exact:
            if not torch.equal(restored, computed):
                return False
            continue
        difference = (restored.float() - computed.float()).pow(2).mean().sqrt()
        if not difference <= RMS_MAX[pool.geometry.stored_dtype] * computed.float().pow(2).mean().sqrt():
            return False
    return True


SCRATCH_SHARE = 0.5
"""An audit uses at most this share of the available pages; cached ones have copies in the tiers."""


@dataclass(slots=True)
class _Audit:
    sequence: Sequence  # computes in scratch pages
    suspects: list[Suspect]
    pages: list[int]  # the restored ones, referenced during the audit


class Auditor:
    """Computes restored blocks again, off the hot path, and compares them.

    While the engine has nothing else to do, the tokens of a restored prompt are computed in scratch pages,
    without any cache, a few at a time. Then the slots that came from a tier are compared with the computed
    ones: `torch.equal` in exact mode, else within a bound. A mismatch is counted and reported, its extents
    are quarantined, and the tenant's cache is forgotten: KV computed behind a wrong block is wrong as well,
    and has good checksums. One audit at a time; an audit that finds too few idle pages is skipped and
    counted.

    For the engine's thread. `tokens_max`: of one prompt; `step_tokens`: of one `step`.
    """

    def __init__(
        self,
        runner: Runner,
        pool: PagePool,
        *,
        tokens_max: int,
        step_tokens: int,
        distrust: Callable[[bytes], None],
        audits: Callable[[], bool] = lambda: False,
    ) -> None:
        """Set up an idle auditor.

        `distrust`: forgets everything of an owner's tenant; `audits`: decides whether a restore is audited.
        """
        self.audits = audits
        self._distrust = distrust
        self.outcomes: Counter[str] = Counter()
        self._runner = runner
        self._pool = pool
        self._tokens_max = tokens_max
        self._step_tokens = step_tokens
        self._audit: _Audit | None = None

    @property
    def has_work(self) -> bool:
        return self._audit is not None

    def consider(self, sequence: Sequence, suspects: list[Suspect]) -> bool:
        """Start an audit of a sequence whose prompt is computed. False (and counted) if not possible."""
        bt = self._pool.block_tokens
        end = min(max((s.end for s in suspects), default=0), self._tokens_max)
        wanted = [Suspect(s.start, min(s.end, end), s.condemn) for s in suspects if s.start < end]
        blocks = -(-end // bt)
        if not wanted or self._audit is not None or blocks > SCRATCH_SHARE * self._pool.available:
            self.outcomes["skipped"] += 1
            return False
        pages = list(sequence.pages[:blocks])
        self._pool.acquire(*pages)
        scratch = Sequence(
            request_id=f"audit-{sequence.request_id}",
            arrival=0,
            namespace=sequence.namespace,
            tokens=array("I", sequence.tokens[: end + 1]),  # never samples: the last one is not computed
            prompt_tokens=end,
            sampling=SamplingParams(max_tokens=1),
            seed=0,
            owner=sequence.owner,
            pages=page_table(self._pool.allocate() for _ in range(blocks)),
        )
        self._audit = _Audit(scratch, wanted, pages)
        return True

    def step(self) -> None:
        """Compute some tokens; after the last ones compare.

        An exception drops this audit and affects no request, unless the device is lost: that is raised.
        """
        assert self._audit is not None, "there is nothing to audit"
        try:
            self._step(self._audit)
        except Exception as error:  # out of memory, say: service is more important than an audit
            logger.exception("an audit failed")
            self.outcomes["error"] += 1
            self._end(self._audit)
            if is_device_lost(error):
                raise

    def _step(self, audit: _Audit) -> None:
        sequence = audit.sequence
        count = min(self._step_tokens, len(sequence.tokens) - 1 - sequence.computed)
        self._runner.run([Chunk(sequence, sequence.computed, count)])
        sequence.computed += count
        if sequence.computed == len(sequence.tokens) - 1:
            self._compare(audit)
            self._end(audit)

    def abandon(self) -> None:
        """Drop the audit because its pages are needed, or the service stops."""
        if self._audit is not None:
            self.outcomes["given up"] += 1
            self._end(self._audit)

    def pages_held(self) -> list[list[int]]:
        return [] if self._audit is None else [self._audit.pages, list(self._audit.sequence.pages)]

    def _compare(self, audit: _Audit) -> None:
        ours, fresh = audit.pages, list(audit.sequence.pages)
        wrong = [
            suspect
            for suspect in audit.suspects
            if not self._runner.agrees(same_slots, ours, fresh, suspect.start, suspect.end)
        ]
        self.outcomes["mismatch" if wrong else "equal"] += 1
        for suspect in wrong:
            logger.error("audit: restored slots %d to %d are wrong", suspect.start, suspect.end)
            suspect.condemn()
        if wrong:
            self._distrust(audit.sequence.owner)

    def _end(self, audit: _Audit) -> None:
        self._audit = None
        self._pool.release(audit.pages)
        self._pool.release(audit.sequence.pages)


_TOKENS = 45  # no multiple of 4 or of a block
# (chunks, other sequences in the batch). The row counts include 1 to 12 and more, because GEMM libraries
# choose another kernel for a few rows.
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

_SCORE_THREADS_MAX = 2
"""Threads whose shares of the scores (heads x rows x keys of a run) end at whole vectors."""
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""The config's names of how wide the activation function's input is."""

_ROUNDED = "KL below 0.1 and the same greedy token where the best two differ by more than 2"
TOLERANCES = {
    torch.float32: "logits within 1e-3 and the same greedy token",
    **dict.fromkeys((torch.bfloat16, torch.float16, torch.int8), _ROUNDED),
}
"""By what K and V are stored as: what holds where results are not bitwise equal (G14, docs/guarantees.md)."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A verdict. `is_tried`: it comes from computing tokens in several ways; another step may fare better."""

    exact: bool
    sentence: str
    is_tried: bool = False


class Probe:
    """Tests on the real model at start whether exact mode holds on this machine.

    That a row has the same bits in any batch is a property of the math libraries in use, of the dtype and of
    the number of threads, not a promise: with 3 threads and more, torch splits
    elementwise float32 work at places that depend on the number of rows. The probe computes the same tokens
    at once, in chunks and in a batch with others, and compares logits and KV; and it runs the activation
    function at every number of rows that a step may have.

    `model`: loaded for the paged pool; None: neither `forward` nor its elementwise functions are of torch.
    `geometry`: of the pool it will run on, or of its first layers, where all others compute as they do.
    `forward`: what computes the steps there; None: the model's modules. `is_torch`: whether its elementwise
    functions are torch's.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        geometry: KvGeometry,
        vocab: int,
        device: torch.device,
        forward: MakeForward | None = None,
        is_torch: bool = True,
    ) -> None:
        self._model = model
        self._geometry = geometry
        self._vocab = vocab
        self._device = device
        self._forward = forward
        self._is_torch = is_torch
        self._tolerance = f"tolerance: {TOLERANCES[geometry.stored_dtype]}"

    def run(self, step_tokens_max: int) -> ProbeResult:
        """Return whether all results are bitwise equal, up to steps of `step_tokens_max` rows."""
        why = self._why_never(step_tokens_max) if self._is_torch else None
        if why is not None:
            return ProbeResult(False, f"not bitwise{why}; {self._tolerance}")
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
                return ProbeResult(False, f"{sentence}; {self._tolerance}", is_tried=True)
        tried = len(_CIRCUMSTANCES)
        sentence = f"bitwise: {tried} other chunkings and batches gave the same logits and KV"
        return ProbeResult(True, sentence, is_tried=True)

    def _why_never(self, rows_max: int) -> str | None:
        """Return why torch's elementwise functions rule exact mode out, as the end of a sentence; or None."""
        why = self._why_uneven()
        if why is not None:
            return f": {why}"
        rows = self._first_uneven_activation(rows_max)
        if rows is None:
            return None
        return f" with {torch.get_num_threads()} threads (the activation of {rows} rows differs)"

    def _why_uneven(self) -> str | None:
        """Return why this model's bits depend on the number of rows here, whatever a few tries show; or None.

        torch computes what is left of an elementwise operation, behind whole vectors and at the ends of its
        threads' shares, by another exp than the rest.
        """
        assert self._model is not None
        config, threads = self._model.config, torch.get_num_threads()
        if getattr(config, "shared_expert_intermediate_size", None):
            return "the gate of the shared expert is one number for each row"
        if groups_experts(self._model):
            return "its experts are computed by grouped products, whose rows depend on the batch"
        by_scores = getattr(config, "attn_logit_softcapping", None) is not None or any(
            name.endswith(".sinks") for name, _ in self._model.named_parameters()
        )
        if by_scores and threads > _SCORE_THREADS_MAX:
            return f"soft caps and sinks are computed elementwise, here with {threads} threads"
        return None

    def _first_uneven_activation(self, rows_max: int) -> int | None:
        """Return the smallest row count at which an elementwise function changes a row's bits, or None."""
        from transformers.activations import ACT2FN

        assert self._model is not None
        config = self._model.config
        named = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "silu"
        activation = ACT2FN[named]
        widths = {int(getattr(config, name, None) or 0) for name in _WIDTHS} - {0}
        generator = torch.Generator().manual_seed(0)
        rows_max += -rows_max % EXACT_ROWS
        for width in sorted(widths):
            values = torch.randn((rows_max, width), generator=generator)
            values = values.to(self._device, self._geometry.dtype)
            starts = range(0, rows_max, EXACT_ROWS)
            truth = torch.cat([activation(values[start : start + EXACT_ROWS]) for start in starts])
            for rows in range(EXACT_ROWS, rows_max + 1, EXACT_ROWS):
                if not torch.equal(activation(values[:rows]), truth[:rows]):
                    return rows
        return None

    def _compute(
        self, tokens: list[int], chunks: tuple[int, ...], others: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all tokens' logits `[tokens, vocab]` and KV `[layers, 2, tokens, kv_heads, head_dim]`."""
        blocks = -(-len(tokens) // self._geometry.block_tokens)
        pool = KvPool(self._geometry, 1 + blocks * (1 + others), self._device)
        backend = GatherSdpa(True, self._geometry.dtype)
        runner = Runner(self._model, pool, backend, exact=True, forward=self._forward)
        sequences = []
        for number in range(1 + others):
            ids = tokens[number:] + tokens[:number]
            first = 1 + number * blocks
            sequences.append(bare_sequence(ids, list(range(first, first + blocks))))
        probed, rows = sequences[0], list[torch.Tensor]()

        def score(_: Chunk, start: int, logits: torch.Tensor) -> None:
            rows.append(logits)
            probed.score_from = start + logits.shape[0]

        probed.score_from = start = 0
        logits = torch.empty(0)
        for count in chunks:
            logits = runner.run([Chunk(sequence, start, count) for sequence in sequences], score=score)
            start += count
        return torch.cat([*rows, logits[:1]]), pool.gather(list(probed.pages), len(tokens))
