"""Chains of blocks by lineage: what a prompt keeps of the one before, and what edits have left behind.

From marks of the chains (`blocks/keys.py`), so that it is known whatever was evicted since. Pure; the caller
holds the lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from samovar.cache_tiers.blocks import KEY_BYTES, ChainMarks, kept_blocks
from samovar.cache_tiers.forecast.turns import TURN_S_MAX, Opening, SessionKey

ROOT_DEPTHS: Final = (1, 2, 4, 8)
"""Numbers of blocks that a prompt's roots cover."""

CHAINS_MAX: Final = 6
"""Chains of one lineage: of its latest turns, and the branches that were left last."""

RUNNING_MAX: Final = 64
"""Running turns of one lineage that are remembered."""

LEFT_PARTS: Final = 8
"""A branch counts as left if it is longer than this part of its chain: marks are coarse, and the last block
of an answer is often tokenized otherwise in the next prompt."""

_ROOT_BYTES: Final = 8


@dataclass(slots=True)
class _Chain:
    """A chain after a turn. `fork`: how many of its blocks a later prompt kept, if it was left there.

    `is_used`: a later prompt contains (nearly) all of it, so that the chain of that turn stands for it.
    """

    marks: ChainMarks
    tokens: int
    fork: int | None = None
    is_used: bool = False

    @property
    def blocks(self) -> int:
        return self.marks.blocks[-1] if self.marks.blocks else 0


@dataclass(slots=True)
class _Chains:
    """Of one lineage. `chains`: oldest first. `running`: of each running turn, its prompt's blocks, how many
    were kept, since when it runs."""

    chains: list[_Chain] = field(default_factory=list)
    running: list[tuple[int, int, float]] = field(default_factory=list)


class LineageChains:
    """The latest chains of at most `lineages_max` lineages, least recently touched dropped first."""

    def __init__(self, lineages_max: int) -> None:
        self._lineages_max = lineages_max
        self._of: OrderedDict[SessionKey, _Chains] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[SessionKey]:
        return iter(self._of)

    def began(self, lineage: SessionKey, whole: SessionKey, keys: bytes, now_s: float) -> Opening:
        """Record a turn's prompt by the `keys` of its full blocks, joined; return what it says."""
        of = self._touched(lineage)
        of.running = [turn for turn in of.running if now_s - turn[2] < TURN_S_MAX]
        is_alone = not of.running
        if is_alone and of.chains:
            *older, latest = of.chains
            latest.is_used = False  # by a turn that has left no chain
            of.chains = [*(chain for chain in older if not chain.is_used), latest]
        kept, branches, regained = 0, 0, 0.0
        for chain in of.chains:
            blocks = kept_blocks(chain.marks, keys)
            kept = max(kept, blocks)
            if chain.fork is not None and is_alone:
                branches += 1
                regained += max(0, blocks - chain.fork) / (chain.blocks - chain.fork)
            is_left = chain.blocks - blocks > max(1, chain.blocks // LEFT_PARTS)
            if not is_left:
                chain.is_used = True
            elif not chain.is_used:
                chain.fork = max(blocks, chain.fork or 0)
        if len(of.running) < RUNNING_MAX:
            of.running.append((len(keys) // KEY_BYTES, kept, now_s))
        return Opening(whole, roots_of(keys), branches, regained)

    def ended(
        self, lineage: SessionKey, marks: ChainMarks, *, input_tokens: int, tokens: int, block_tokens: int
    ) -> int:
        """Record the chain of a turn that is over; return how many tokens its prompt had kept.

        `tokens`: of the chain, the answer included. Of several running turns it is the one whose prompt had
        as many blocks, else the latest.
        """
        of = self._touched(lineage)
        kept = of.chains[-1].tokens if of.chains else 0
        if of.running:
            prompts = [blocks for blocks, *_ in of.running]
            blocks = input_tokens // block_tokens
            _, of_prompt, _ = of.running.pop(prompts.index(blocks) if blocks in prompts else -1)
            kept = of_prompt * block_tokens
        of.chains.append(_Chain(marks, tokens))
        del of.chains[:-CHAINS_MAX]
        return min(kept, input_tokens)

    def forget(self, lineage: SessionKey) -> None:
        """Forget a lineage. No-op if it is unknown."""
        self._of.pop(lineage, None)

    def _touched(self, lineage: SessionKey) -> _Chains:
        of = self._of.get(lineage)
        if of is None:
            of = self._of[lineage] = _Chains()
            if len(self._of) > self._lineages_max:
                self._of.popitem(last=False)
        self._of.move_to_end(lineage)
        return of

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._of) <= self._lineages_max, "too many chains are remembered"
        for of in self._of.values():
            assert len(of.chains) <= CHAINS_MAX, "too many chains of one lineage"
            assert len(of.running) <= RUNNING_MAX, "too many turns of one lineage"
            for chain in of.chains:
                assert chain.fork is None or 0 <= chain.fork < chain.blocks, "a fork is not on its chain"


def roots_of(keys: bytes) -> tuple[int, ...]:
    """Return digests of a chain's first blocks, as far as it has `ROOT_DEPTHS`; `keys`: joined."""
    begins = [(depth - 1) * KEY_BYTES for depth in ROOT_DEPTHS if depth * KEY_BYTES <= len(keys)]
    return tuple(int.from_bytes(keys[at : at + _ROOT_BYTES], "little") for at in begins)
