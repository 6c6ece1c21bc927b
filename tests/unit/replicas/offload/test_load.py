"""What a fetch brings is compared with all that was asked for."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import KEY_BYTES, ROOT, TAG_BYTES, BlockShape, Bytes, Placement
from samovar.cache_tiers.blocks.record import BadRecord, header_bytes, seal
from samovar.cache_tiers.messages import Fetch, Fetched, FetchFailed
from samovar.replicas.offload.load import Expected, PieceLoad, PieceLoads, unpack
from samovar.replicas.offload.tier_client import CompletionQueue
from samovar.replicas.scheduling import Restore, RestorePiece
from tests.support.engines.tier_engines import InlineExecutor

SHAPE = BlockShape(layers=2, layer_bytes=32, block_tokens=4)
NAMESPACE, KEYS = b"n" * KEY_BYTES, (b"1" * KEY_BYTES, b"2" * KEY_BYTES)


def record(token_counts: tuple[int, ...]) -> Bytes:
    start = header_bytes(len(KEYS), SHAPE.layers)
    data = np.arange(start + len(KEYS) * SHAPE.block_bytes, dtype=np.uint8)
    seal(
        data,
        namespace=NAMESPACE,
        tenant=b"t" * TAG_BYTES,
        session=b"s" * TAG_BYTES,
        shape=SHAPE,
        parent=ROOT,
        first_block=0,
        keys=KEYS,
        token_counts=token_counts,
        placement=Placement("cpu", (), "cpu"),
        created_unix_s=1.0,
    )
    return data


def expected(*token_counts: int) -> Expected:
    return Expected(NAMESPACE, SHAPE, 0, KEYS, token_counts)


def test_g7_what_was_asked_for_is_unpacked() -> None:
    payload, good = unpack(record((4, 3)), 0, 0, expected(4, 3))
    assert (payload.nbytes, good) == (2 * SHAPE.block_bytes, 2)


@pytest.mark.parametrize("stored", [1, 2, 4])
@pytest.mark.guarantee("G1", "G7")
def test_g6_a_block_of_another_number_of_tokens_is_refused(stored: int) -> None:
    """Its key says so as well; but behind what was computed a block is zeros, and nobody may read them."""
    with pytest.raises(BadRecord, match="token counts"):
        unpack(record((4, stored)), 0, 0, expected(4, 3))


class Watched:
    """A lock; whenever it is free again, another thread looks at what it guards."""

    def __init__(self) -> None:
        self.look: Any = lambda: None
        self.is_looking = False
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not self.is_looking:
            self.is_looking = True
            self.look()
            self.is_looking = False


def test_whoever_looks_at_loads_while_others_end_finds_none_forgotten() -> None:
    """An idle engine does, beside the threads that fetch for requests that are over."""

    def fetch_now(fetch: Fetch) -> Fetched | FetchFailed:
        return FetchFailed("gone")

    lane, arrivals, over = InlineExecutor(), CompletionQueue(), list[object]()
    loads = PieceLoads(fetch_now, None, lane, arrivals, SHAPE, 1, lambda: 0.0)  # type: ignore[arg-type]
    loads._lock = watched = Watched()  # type: ignore[assignment]
    watched.look = loads.check_integrity
    lane.held = True
    for start in range(0, 12, 4):
        piece = RestorePiece(start, start + 4, "cpu", 1)
        restore = Restore([piece], 4, "load", True, started_s=0.0, hedge_at_s=1.0)
        load = PieceLoad(restore, piece, (start,), None, lambda result, _: over.append(result))  # type: ignore[arg-type]
        fetch = Fetch(NAMESPACE, b"t" * TAG_BYTES, KEYS[0], 0, 1, "cpu", deadline_s=1.0)
        loads.fetch(load, fetch, expected(4))
    while lane.waiting:
        assert lane.waiting == 1, "more are fetched than may be"
        lane.release()
    arrivals.take_in()
    assert over == [FetchFailed("gone")] * 3
