"""One answer in the making: its tokens, how far they are computed, and its page table.

Three integers drive everything (after nano-vllm): tokens known, tokens computed, tokens
scheduled. A prefix hit, a prefill chunk, a decode and a recompute after preemption are the
same arithmetic. The last sampled token is known but not computed: its slot was never written,
so it is never published (law L6).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from cache_tiers.extent import TAG_BYTES
from cache_tiers.keys import ROOT, block_key
from replicas.messages import SamplingParams
from replicas.prefix_index import ROOT_ENTRY
from replicas.restore import Restore
from replicas.visit import Visit


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one choice of one request. Only the scheduler and the engine change it."""

    request_id: str
    arrival: int  # smaller = earlier; the order of service
    namespace: bytes
    tokens: array[int]  # u32: prompt, then what was sampled
    prompt_tokens: int
    sampling: SamplingParams
    seed: int
    owner: bytes = bytes(2 * TAG_BYTES)  # tags of tenant and session: who may have its blocks forgotten
    is_cleared: bool = False  # forgotten while it ran: nothing of it is kept
    index: int = 0  # which of the request's choices
    forks: int = 1  # choices still to be split off when the prompt is computed
    computed: int = 0  # slots [0, computed) hold valid KV
    pages: list[int] = field(default_factory=list)
    admitted_s: float | None = None  # when it first had its pages; the engine's clock
    is_reported: bool = False  # the request has been told what was cached
    resident_tokens: int = 0  # found in the pool at the last admission
    # Of an admission before the last, when it was preempted: found in the pool then, and loaded then.
    first_resident: int | None = None
    earlier_loads: dict[str, int] = field(default_factory=dict)
    riding_s: float = 0.0  # what the step of its admission takes anyway, if all of it can ride along
    restore: Restore | None = None  # what comes from a tier since the last admission
    visit: Visit | None = None  # the request's dealings with the tiers; None: it has none
    # Keys of the full blocks so far, and how far they are published.
    keys: list[bytes] = field(default_factory=list)
    published_blocks: int = 0
    chain_entry: int = ROOT_ENTRY
    chain_broken: bool = False  # a key collided: nothing behind it may be published

    @property
    def tenant(self) -> bytes:
        """Tag of whose it is."""
        return self.owner[:TAG_BYTES]

    def keys_of(self, blocks: int, block_tokens: int) -> list[bytes]:
        """Keys of the first `blocks` full blocks of the known tokens, computed once."""
        while len(self.keys) < blocks:
            start = len(self.keys) * block_tokens
            parent = self.keys[-1] if self.keys else ROOT
            self.keys.append(block_key(self.namespace, parent, self.tokens[start : start + block_tokens]))
        return self.keys[:blocks]

    @property
    def holds(self) -> bool:
        """It has its pages and waits for blocks from a tier: nothing of it is computed."""
        return self.restore is not None and self.restore.holds

    @property
    def is_looking(self) -> bool:
        """It waits to hear what the tiers have."""
        return self.visit is not None and self.visit.waits

    @property
    def computable(self) -> int:
        """Tokens that can be computed before a run of slots that came from a tier."""
        limit = None if self.restore is None else self.restore.limit(self.computed)
        return self.pending if limit is None else limit - self.computed

    @property
    def pending(self) -> int:
        """Tokens known but not computed; at least 1 while the sequence runs."""
        return len(self.tokens) - self.computed

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def is_decode(self) -> bool:
        return self.pending == 1 and self.computed > 0

    def fork(self, index: int) -> Sequence:
        """A sibling with the same computed tokens; the caller adds the references to its pages."""
        return Sequence(
            request_id=self.request_id,
            arrival=self.arrival,
            namespace=self.namespace,
            tokens=array("I", self.tokens),
            prompt_tokens=self.prompt_tokens,
            sampling=self.sampling,
            seed=self.seed,
            owner=self.owner,
            is_cleared=self.is_cleared,
            index=index,
            computed=self.computed,
            pages=list(self.pages),
            admitted_s=self.admitted_s,
            is_reported=self.is_reported,
            resident_tokens=self.resident_tokens,
            first_resident=self.first_resident,
            earlier_loads=dict(self.earlier_loads),
            visit=self.visit,
            keys=list(self.keys),
            published_blocks=self.published_blocks,
            chain_entry=self.chain_entry,
            chain_broken=self.chain_broken,
        )

    def forget_computed(self) -> None:
        """All KV is gone (the pages were released): start over from token 0."""
        if self.restore is not None:
            self.earlier_loads |= self.restore.tokens_by_source(self.prompt_tokens)
        self.computed = 0
        self.pages = []
        self.restore = None
        self.published_blocks = 0
        self.chain_entry = ROOT_ENTRY
        self.chain_broken = False
