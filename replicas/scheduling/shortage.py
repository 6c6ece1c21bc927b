"""What a step gives up when it does not fit into the device's memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Listing

from replicas.scheduling.step import CHUNK_TOKENS, Chunk


def halved(chunks: Listing[Chunk]) -> list[Chunk] | None:
    """Return a step with at most half of the prompt tokens, in the order of `chunks`; decodes stay.

    None: there is nothing left to halve. The last few tokens of a prompt are left out only beside decodes.
    """
    prompts = [chunk for chunk in chunks if not chunk.sequence.is_decode]
    tokens = sum(chunk.count for chunk in prompts)
    left = tokens // 2 // CHUNK_TOKENS * CHUNK_TOKENS
    if left == 0 and len(prompts) == len(chunks):
        left = CHUNK_TOKENS
    kept = []
    for chunk in chunks:
        if chunk.sequence.is_decode:
            kept.append(chunk)
            continue
        count = chunk.count if chunk.count <= left else left // CHUNK_TOKENS * CHUNK_TOKENS
        if count:
            kept.append(Chunk(chunk.sequence, chunk.start, count))
        left -= count
    return kept if sum(chunk.count for chunk in kept) < sum(chunk.count for chunk in chunks) else None
