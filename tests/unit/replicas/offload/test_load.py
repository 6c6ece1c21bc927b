"""What a fetch brings is compared with all that was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from cache_tiers.blocks.extent import TAG_BYTES, BlockShape, Bytes, Placement
from cache_tiers.blocks.keys import KEY_BYTES, ROOT
from cache_tiers.blocks.record import BadRecord, header_bytes, seal
from replicas.offload.load import Expected, unpack

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
