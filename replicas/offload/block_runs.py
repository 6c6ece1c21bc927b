"""Selects the runs of a chain's blocks to load and to store. Pure arithmetic over block numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from samovar.cache_tiers.blocks import ROOT, LoadSource, block_key
from samovar.cache_tiers.messages import LookupResult, PartialBlock


@dataclass(frozen=True, slots=True)
class LoadCut:
    """Blocks `[first, first + len(keys))` of the chain, at blocks `[offset, ...)` of an extent in `tier`.

    `token_counts`: of these blocks; only the last may be partial. `node`: as in `BlockRange`.
    """

    extent_id: bytes
    tenant: bytes
    tier: LoadSource
    offset: int
    first: int
    keys: tuple[bytes, ...]
    token_counts: tuple[int, ...]
    node: str = ""

    @property
    def tokens(self) -> int:
        return sum(self.token_counts)


def load_cuts(
    found: LookupResult,
    *,
    namespace: bytes,
    keys: Sequence[bytes],
    token_ids: Sequence[int],
    block_tokens: int,
    resident_blocks: int,
) -> list[LoadCut]:
    """Return what the tiers have directly behind the pool's `resident_blocks`, without a gap.

    `keys`: of the full blocks that may be loaded; `token_ids`: of the prompt without its last token, which is
    always computed.
    """
    cuts: list[LoadCut] = []
    end = resident_blocks
    for span in sorted(found.spans, key=lambda span: span.first):
        last = min(span.first + span.blocks, len(keys))
        if last <= end:
            continue
        if span.first > end:
            break
        offset = span.offset + end - span.first
        counts = (block_tokens,) * (last - end)
        cuts.append(
            LoadCut(
                span.extent_id,
                span.tenant,
                span.tier,
                offset,
                end,
                tuple(keys[end:last]),
                counts,
                node=span.node,
            )
        )
        end = last
    tail = _longest_tail(found.tails, namespace, keys, token_ids, end, block_tokens)
    if tail is None:
        return cuts
    at = tail.span
    last_cut = cuts[-1] if cuts else None
    if (
        last_cut is not None
        and (last_cut.extent_id, last_cut.tier, last_cut.node) == (at.extent_id, at.tier, at.node)
        and last_cut.offset + len(last_cut.keys) == at.offset
    ):
        # Directly behind, in the same extent: one fetch.
        cuts[-1] = LoadCut(
            last_cut.extent_id,
            last_cut.tenant,
            last_cut.tier,
            last_cut.offset,
            last_cut.first,
            (*last_cut.keys, tail.key),
            (*last_cut.token_counts, tail.tokens),
            last_cut.node,
        )
    else:
        cuts.append(
            LoadCut(
                at.extent_id,
                at.tenant,
                at.tier,
                at.offset,
                end,
                (tail.key,),
                (tail.tokens,),
                node=at.node,
            )
        )
    return cuts


def _longest_tail(
    tails: Iterable[PartialBlock],
    namespace: bytes,
    keys: Sequence[bytes],
    token_ids: Sequence[int],
    end: int,
    block_tokens: int,
) -> PartialBlock | None:
    """Return the longest partial block behind block `end - 1` that matches the prompt, or None."""
    if end > len(keys):
        return None
    parent = keys[end - 1] if end else ROOT
    best: PartialBlock | None = None
    for tail in tails:
        start = end * block_tokens
        fits = 0 < tail.tokens < block_tokens and start + tail.tokens <= len(token_ids)
        if tail.span.first != end or not fits or (best is not None and tail.tokens <= best.tokens):
            continue
        if block_key(namespace, parent, token_ids[start : start + tail.tokens]) == tail.key:
            best = tail
    return best


def held_keys(found: LookupResult, keys: Sequence[bytes]) -> set[bytes]:
    """Return the keys held by this node's tiers; blocks that only another node holds must be stored."""
    held = {tail.key for tail in found.tails if tail.span.tier != "peer"}
    for span in found.spans:
        if span.tier != "peer":
            held.update(keys[span.first : span.first + span.blocks])
    return held


@dataclass(frozen=True, slots=True)
class StoreRun:
    """Blocks `[first, first + len(keys))` of a chain, to be stored as one extent."""

    first: int
    keys: tuple[bytes, ...]
    token_counts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.token_counts)

    @property
    def end(self) -> int:
        """Return the number of the block behind the last one."""
        return self.first + len(self.keys)


def store_runs(
    keys: Sequence[bytes],
    tail: tuple[bytes, int] | None,
    *,
    block_tokens: int,
    blocks_max: int,
    is_held: Callable[[bytes], bool],
) -> list[StoreRun]:
    """Return the runs of blocks that are not held yet, none longer than `blocks_max`.

    `keys`: of the full blocks from the chain's beginning; `tail`: key and tokens of the partial block behind
    them.
    """
    counts = [block_tokens] * len(keys)
    chain = list(keys)
    if tail is not None:
        chain.append(tail[0])
        counts.append(tail[1])
    runs: list[StoreRun] = []
    begin: int | None = None
    for block in range(len(chain) + 1):
        wanted = block < len(chain) and not is_held(chain[block])
        if begin is not None and (not wanted or block - begin == blocks_max):
            runs.append(StoreRun(begin, tuple(chain[begin:block]), tuple(counts[begin:block])))
            begin = None
        if wanted and begin is None:
            begin = block
    return runs
