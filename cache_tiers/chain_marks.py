"""How much of a session's chain stands at the front of its next prompt, told from a few of its block keys.

A block key stands for all that comes before it, so one that agrees far into the chain settles all before.
A thousand sessions' whole chains would not fit; sixteen marks each do, and the last of them, which nearly
every turn agrees in, is the chain's last full block. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache_tiers.keys import KEY_BYTES

MARKS_MAX = 16
MARK_BYTES = 8


@dataclass(frozen=True, slots=True)
class ChainMarks:
    """`blocks[i]`: after how many full blocks mark `i` stands, growing; `digests`: `MARK_BYTES` each."""

    blocks: tuple[int, ...] = ()
    digests: bytes = b""


def marks_of(keys: Sequence[bytes]) -> ChainMarks:
    """Of the keys of a chain's full blocks: evenly spaced, the last one among them."""
    count = min(MARKS_MAX, len(keys))
    blocks = tuple(len(keys) * (number + 1) // count for number in range(count))
    return ChainMarks(blocks, b"".join(keys[block - 1][:MARK_BYTES] for block in blocks))


def kept_blocks(marks: ChainMarks, keys: bytes) -> int:
    """Of the marked chain, the full blocks that a prompt with these `keys` (joined) begins with.

    At most a sixteenth of the chain too few.
    """
    kept = 0
    for number, block in enumerate(marks.blocks):
        at = (block - 1) * KEY_BYTES
        mark = marks.digests[number * MARK_BYTES : (number + 1) * MARK_BYTES]
        if block * KEY_BYTES > len(keys) or keys[at : at + MARK_BYTES] != mark:
            break
        kept = block
    return kept
