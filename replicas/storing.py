"""Handing a turn's new blocks to the tiers, on a worker thread: copy, blank, seal, stage, offer.

The pages are held for us until `copied` is called. Only computed slots go out: what lies behind the
last of them in a partial block is somebody's old content and is blanked (laws L2, L6). Knows nothing
of which blocks are worth storing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache_tiers.codec import header_bytes, seal
from cache_tiers.extent import BlockShape, Bytes, ExtentHeader, Placement
from cache_tiers.messages import Offer
from cache_tiers.outbox import Outbox
from replicas.chain_cuts import StoreRun
from replicas.page_io import PageIo
from replicas.tier_link import TierLink


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose blocks they are and what the tiers said when the turn began."""

    namespace: bytes
    tenant: bytes
    session: bytes
    placement: Placement
    incarnation: str
    clear_seq: int
    created_unix_s: float


@dataclass(frozen=True, slots=True)
class StoreJob:
    """`runs` with the pages of each and what computing it again would take; `mark`: see `PageIo`."""

    origin: Origin
    runs: tuple[StoreRun, ...]
    parents: tuple[bytes, ...]
    pages: tuple[tuple[int, ...], ...]
    recompute_s: tuple[float, ...]
    mark: Any


def sealed_record(
    run: StoreRun,
    parent: bytes,
    pages: Sequence[int],
    origin: Origin,
    shape: BlockShape,
    io: PageIo,
    mark: Any,
) -> tuple[Bytes, ExtentHeader]:
    """The record of one run: a fresh array that nobody else has."""
    start = header_bytes(len(run.keys), shape.layers)
    record = np.empty(start + len(run.keys) * shape.block_bytes, dtype=np.uint8)
    payload = record[start:]
    io.copy_out(pages, payload, mark)
    blank_behind(payload[-shape.block_bytes :], run.token_counts[-1], shape)
    header = seal(
        record,
        namespace=origin.namespace,
        tenant=origin.tenant,
        session=origin.session,
        shape=shape,
        parent=parent,
        first_block=run.first,
        keys=run.keys,
        token_counts=run.token_counts,
        placement=origin.placement,
        created_unix_s=origin.created_unix_s,
    )
    return record, header


def blank_behind(block: Bytes, tokens: int, shape: BlockShape) -> None:
    """Zero the slots of one block's payload, u8 `[block_bytes]`, behind its first `tokens`."""
    slots = block.reshape(shape.layers * 2, shape.block_tokens, -1)
    slots[:, tokens:] = 0


def stage(
    job: StoreJob, *, shape: BlockShape, io: PageIo, outbox: Outbox, copied: Callable[[], None]
) -> list[Offer]:
    """Put the records of the leading runs into the outbox, as many as find room. Calls `copied` once.

    The first that finds none ends it: what lies behind a gap would never be found.
    """
    offers: list[Offer] = []
    try:
        for place, run in enumerate(job.runs):
            record, header = sealed_record(
                run, job.parents[place], job.pages[place], job.origin, shape, io, job.mark
            )
            ticket = outbox.put(record)
            if ticket is None:
                break
            offers.append(
                Offer(
                    ticket=ticket,
                    header=header,
                    nbytes=record.nbytes,
                    incarnation=job.origin.incarnation,
                    clear_seq=job.origin.clear_seq,
                    recompute_s=job.recompute_s[place],
                )
            )
    except BaseException:
        for offer in offers:
            outbox.drop(offer.ticket)
        raise
    finally:
        copied()
    return offers


def offer_staged(offers: Sequence[Offer], outbox: Outbox, link: TierLink) -> list[str]:
    """Offer what is staged; an outcome each: `taken`, `held` or `refused:...`."""
    outcomes = ["refused:error"] * len(offers)
    try:
        outcomes = list(link.offer(offers).outcomes)
    finally:
        for offer, outcome in zip(offers, outcomes, strict=True):
            if outcome != "taken":
                outbox.drop(offer.ticket)
    return outcomes
