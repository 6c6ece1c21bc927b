"""One answer in the making: its tokens, how far they are computed, and its page table.

Three integers drive everything (after nano-vllm): tokens known, tokens computed, tokens
scheduled. A prefix hit, a prefill chunk, a decode and a recompute after preemption are the
same arithmetic. The last sampled token is known but not computed: its slot was never written,
so it is never published (law L6).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from cache_tiers.keys import ROOT
from replicas.messages import SamplingParams
from replicas.prefix_index import ROOT_ENTRY


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
    index: int = 0  # which of the request's choices
    forks: int = 1  # choices still to be split off when the prompt is computed
    computed: int = 0  # slots [0, computed) hold valid KV
    pages: list[int] = field(default_factory=list)
    cached_tokens: int | None = None  # prompt tokens not computed at first admission
    # How far the chain of full blocks is published, and the chain's end there.
    published_blocks: int = 0
    chain_key: bytes = ROOT
    chain_entry: int = ROOT_ENTRY
    chain_broken: bool = False  # a key collided: nothing behind it may be published

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
            index=index,
            computed=self.computed,
            pages=list(self.pages),
            cached_tokens=self.cached_tokens,
            published_blocks=self.published_blocks,
            chain_key=self.chain_key,
            chain_entry=self.chain_entry,
            chain_broken=self.chain_broken,
        )

    def forget_computed(self) -> None:
        """All KV is gone (the pages were released): start over from token 0."""
        self.computed = 0
        self.pages = []
        self.published_blocks = 0
        self.chain_key = ROOT
        self.chain_entry = ROOT_ENTRY
        self.chain_broken = False
