"""Proof while serving: restored blocks are computed again, off the hot path, and compared (G14).

When the engine has nothing else to do, the tokens of a restored prompt are computed in scratch pages,
without any cache, some at a time; then the slots that came from a tier are compared with what was
computed: `torch.equal` in exact mode, else within a bound. A mismatch is counted and reported, the
extents it came from are quarantined, and the tenant's cache is forgotten: what was computed behind a
wrong block is wrong as well, and has good checksums. One audit at a time; what finds too
few idle pages is skipped and counted. Knows nothing of how blocks are loaded.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from replicas.messages import SamplingParams
from replicas.page_pool import PagePool
from replicas.runner import Runner
from replicas.scheduler import Chunk
from replicas.sequence import Sequence

logger = logging.getLogger("samovar.audit")

# Root mean square of the difference over that of the values, per layer, where exact mode is off: rounding
# that differs with the chunking stays far below, a wrong block is at 1 and above (ENGINE.md section 7).
RMS_MAX = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


SCRATCH_SHARE = 0.5
"""Of the pages that nobody uses an audit takes at most this; cached ones have copies in the tiers."""


@dataclass(slots=True)
class Suspect:
    """Slots `[start, end)` of a prompt that came from a tier; `condemn`: what to do when they are wrong."""

    start: int
    end: int
    condemn: Callable[[], None]


@dataclass(slots=True)
class _Audit:
    sequence: Sequence  # computes in scratch pages
    suspects: list[Suspect]
    pages: list[int]  # the restored ones, held meanwhile


class Auditor:
    """For the engine's thread. `tokens_max`: of one prompt; `step_tokens`: of one `step`."""

    def __init__(
        self,
        runner: Runner,
        pool: PagePool,
        *,
        tokens_max: int,
        step_tokens: int,
        exact: bool,
        distrust: Callable[[bytes], None],
    ) -> None:
        """`distrust`: forget everything of an owner's tenant."""
        self._distrust = distrust
        self.outcomes: Counter[str] = Counter()
        self._runner = runner
        self._pool = pool
        self._tokens_max = tokens_max
        self._step_tokens = step_tokens
        self._exact = exact
        self._audit: _Audit | None = None

    @property
    def has_work(self) -> bool:
        return self._audit is not None

    def consider(self, sequence: Sequence, suspects: list[Suspect]) -> bool:
        """Begin an audit of a sequence whose prompt is computed. False (and counted) when it cannot be."""
        bt = self._pool.block_tokens
        end = min(max((s.end for s in suspects), default=0), self._tokens_max)
        wanted = [Suspect(s.start, min(s.end, end), s.condemn) for s in suspects if s.start < end]
        blocks = -(-end // bt)
        if not wanted or self._audit is not None or blocks > SCRATCH_SHARE * self._pool.available:
            self.outcomes["skipped"] += 1
            return False
        pages = sequence.pages[:blocks]
        for page in pages:
            self._pool.acquire(page)
        scratch = Sequence(
            request_id=f"audit-{sequence.request_id}",
            arrival=0,
            namespace=sequence.namespace,
            tokens=array("I", sequence.tokens[: end + 1]),  # never samples: the last one is not computed
            prompt_tokens=end,
            sampling=SamplingParams(max_tokens=1),
            seed=0,
            owner=sequence.owner,
            pages=[self._pool.allocate() for _ in range(blocks)],
        )
        self._audit = _Audit(scratch, wanted, pages)
        return True

    def step(self) -> None:
        """Compute some tokens; at the end compare. An audit that fails is none; it takes nobody along."""
        assert self._audit is not None, "there is nothing to audit"
        try:
            self._step(self._audit)
        except Exception:  # out of memory, say: proof is good to have, service is better
            logger.exception("an audit failed")
            self.outcomes["error"] += 1
            self._end(self._audit)

    def _step(self, audit: _Audit) -> None:
        sequence = audit.sequence
        count = min(self._step_tokens, len(sequence.tokens) - 1 - sequence.computed)
        self._runner.run([Chunk(sequence, sequence.computed, count)])
        sequence.computed += count
        if sequence.computed == len(sequence.tokens) - 1:
            self._compare(audit)
            self._end(audit)

    def give_up(self) -> None:
        """The pages are needed, or the service stops."""
        if self._audit is not None:
            self.outcomes["given up"] += 1
            self._end(self._audit)

    def pages_held(self) -> list[list[int]]:
        return [] if self._audit is None else [self._audit.pages, self._audit.sequence.pages]

    def _compare(self, audit: _Audit) -> None:
        wrong = [suspect for suspect in audit.suspects if not self._is_same(audit, suspect)]
        self.outcomes["mismatch" if wrong else "equal"] += 1
        for suspect in wrong:
            logger.error("audit: restored slots %d to %d are wrong", suspect.start, suspect.end)
            suspect.condemn()
        if wrong:
            self._distrust(audit.sequence.owner)

    def _is_same(self, audit: _Audit, suspect: Suspect) -> bool:
        """Layer by layer: two copies of all of them may be more than the device has room for."""
        pool = self._runner.pool
        for layer in range(pool.geometry.layers):
            ours = pool.gather_layer(layer, audit.pages, suspect.start, suspect.end)
            fresh = pool.gather_layer(layer, audit.sequence.pages, suspect.start, suspect.end)
            if self._exact:
                if not torch.equal(ours, fresh):
                    return False
                continue
            difference = (ours.float() - fresh.float()).pow(2).mean().sqrt()
            if not difference <= RMS_MAX[fresh.dtype] * fresh.float().pow(2).mean().sqrt():
                return False
        return True

    def _end(self, audit: _Audit) -> None:
        self._audit = None
        self._pool.release(audit.pages)
        self._pool.release(audit.sequence.pages)
