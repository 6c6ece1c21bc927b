"""Whether a load is worth its time, by what prompts and loads were measured to take. Pure, with a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from samovar.cache_tiers.blocks import LoadSource
from samovar.cache_tiers.messages import LookupResult
from samovar.cache_tiers.pricing import (
    Doubt,
    LoadPiece,
    PrefillMeter,
    TierPrice,
    fit_prefill,
    pairs_of,
    plan_load,
    plan_wait,
)
from samovar.cache_tiers.vllm.messages import EXTENT_BYTES_MAX
from samovar.cache_tiers.vllm.spans import CommonRun

LOOKUP_SHARE = 0.5
"""As `tiers.lookup_share` is by default: a lookup is waited for this share of what loading could save."""

STEP_TOKENS_MIN = 16
"""A step of fewer new tokens says little of what a prompt costs."""
STEPS_UNDER_WAY_MAX = 16
"""More than vLLM has at once: then some have ended unseen, and none is measured."""


class Worth:
    """What computing costs one engine, learned from its steps. `fetches`: so many run at a time."""

    def __init__(self, block_tokens: int, fetches: int, clock: Callable[[], float]) -> None:
        self._block_tokens = block_tokens
        self._fetches = fetches
        self._clock = clock
        self._prefill = PrefillMeter(fit_prefill([]))
        self._doubt = Doubt(EXTENT_BYTES_MAX)
        self._prices: Mapping[LoadSource, TierPrice] = {}
        self._block_bytes = 0.0  # of all ranks; 0 until something was found
        self._steps: deque[tuple[float, int, float]] = deque()  # under way: began, new tokens, pairs
        self._stepped_s = float("-inf")

    def leading(
        self, tokens: int, first: int, spans: Sequence[CommonRun], prices: Mapping[LoadSource, TierPrice]
    ) -> int:
        """Return how many leading segments are cheaper to load than to compute.

        `tokens`: of the prompt. `first`: the block that they begin with; what is before it is there.
        """
        pieces = [
            LoadPiece(
                span.first * self._block_tokens, span.blocks * self._block_tokens, span.nbytes, span.tier
            )
            for span in spans
        ]
        plan = plan_load(
            prompt_tokens=tokens,
            resident_tokens=first * self._block_tokens,
            pieces=pieces,
            prices=prices,
            prefill=self._prefill.price,
            parallel=self._fetches,
            hedge_factor=1.0,
            hedge_slack_s=0.0,
            doubt=self._doubt,
        )
        self._doubt.decided(sum(piece.nbytes for piece in pieces))
        if plan.decision != "meet":
            return len(plan.pieces)
        # vLLM loads from the front only: all of it, or nothing.
        front = pieces[: len(plan.pieces) + pieces.index(plan.pieces[-1])]
        load_s = sum(prices[piece.tier].seconds(piece.nbytes) for piece in front)
        return len(front) if load_s < self.compute_s(sum(piece.tokens for piece in front), first) else 0

    def wait_s(self, missing_tokens: int, resident_tokens: int, usual_s: float, s_max: float) -> float:
        """Return how long a prompt is to wait to learn what the tiers have of it, see `plan_wait`."""
        wait = plan_wait(
            missing_tokens=missing_tokens,
            resident_tokens=resident_tokens,
            nbytes=int(self._block_bytes * max(0, missing_tokens) / self._block_tokens),
            prefill=self._prefill.price,
            prices=self._prices,
            usual_s=usual_s,
            share=LOOKUP_SHARE,
            idle_share=1.0,
            s_max=s_max,
        )
        return wait.until_s

    def heard(self, found: Sequence[LookupResult]) -> None:
        """Take the prices and the size of a block from an answer: of each rank, one."""
        self._prices = found[0].prices
        sizes = [next((span.nbytes / span.blocks for span in one.spans), 0.0) for one in found]
        if all(sizes):
            self._block_bytes = sum(sizes)

    def compute_s(self, tokens: int, first: int) -> float:
        """Return the seconds that computing `tokens` from block `first` on adds to a prompt."""
        return self._prefill.price.added_seconds(tokens, first * self._block_tokens)

    def step(self, new_tokens: int, context_tokens: int) -> None:
        """Record the begin of a step that computes `new_tokens` behind `context_tokens` each on average."""
        if len(self._steps) == STEPS_UNDER_WAY_MAX:
            self._steps.clear()
        self._steps.append((self._clock(), new_tokens, pairs_of(new_tokens, context_tokens)))

    def step_over(self) -> None:
        """Measure the oldest step under way, which has ended. It ran when the one before it had ended."""
        if not self._steps:
            return
        (began_s, tokens, pairs), now_s = self._steps.popleft(), self._clock()
        if tokens >= STEP_TOKENS_MIN:
            self._prefill.observe_steps(1, tokens, pairs, now_s - max(began_s, self._stepped_s))
        self._stepped_s = now_s
