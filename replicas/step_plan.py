"""What one step computes, as the scheduler has planned it."""

from __future__ import annotations

from dataclasses import dataclass, field

from replicas.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + count)` of a sequence are computed in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """The last known token is in: its logits give the next one."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(slots=True)
class StepPlan:
    """One forward pass. `copies` (source page, target page) come before it."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def prompts(self) -> list[Chunk]:
        """Those that are no decodes."""
        return [chunk for chunk in self.chunks if not chunk.sequence.is_decode]

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)
