"""The record's bytes: what is sealed comes back, and nothing else is believed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks import record as codec
from samovar.cache_tiers.blocks.extent import ROOT, BlockShape, Bytes, ExtentHeader, Placement
from samovar.cache_tiers.blocks.record import BadRecord
from tests.support.nodes.old_records import as_version, forge

SHAPE = BlockShape(layers=3, layer_bytes=40, block_tokens=16)
GOLDEN = {
    1: "eb126466e8fa4d2848760109627a8e20e740cc8b2b738a74fd9d66751be31c24",
    2: "19dcc64ee6f70157895cc9cea77ef3649b820f9428fa286d4e2a470dc7995882",
    3: "248a44c281a8a30d38480f5f9831629b1c2aae2fa3cb5bd589048d9d5064cbf5",
}
"""sha256 of the same record as each version's own code wrote it."""
KEYS = [bytes([n]) * 32 for n in range(1, 6)]


def sealed(**changed: Any) -> tuple[Bytes, ExtentHeader]:
    """A record of 4 blocks whose bytes are a function of nothing but this code."""
    shape: BlockShape = changed.pop("shape", SHAPE)
    fields: dict[str, Any] = {
        "namespace": b"n" * 32,
        "tenant": b"t" * 16,
        "session": b"s" * 16,
        "parent": KEYS[4],
        "first_block": 7,
        "keys": KEYS[:4],
        "token_counts": [16, 16, 16, 3],
        "placement": Placement("nvme", ("cpu", "s3"), "s3", 60.0, 3600.0),
        "created_unix_s": 1_700_000_000.5,
    } | changed
    blocks = len(fields["keys"])
    length = codec.header_bytes(blocks, shape.layers) + blocks * shape.block_bytes
    record = (np.arange(length, dtype=np.int64) * 7 % 251).astype(np.uint8)
    return record, codec.seal(record, shape=shape, **fields)


def kind_of(action: Callable[[], object]) -> str:
    with pytest.raises(BadRecord) as caught:
        action()
    assert caught.value.kind in codec.KINDS
    return caught.value.kind


def same(one: ExtentHeader, other: ExtentHeader) -> bool:
    empty = np.zeros((0, 0), np.uint64)
    plain = [{name: getattr(replace(h, checksums=empty), name) for name in h.__slots__} for h in (one, other)]
    for fields in plain:
        del fields["checksums"]
    return plain[0] == plain[1] and np.array_equal(one.checksums, other.checksums)


def test_what_is_sealed_is_decoded() -> None:
    record, header = sealed()
    decoded = codec.decode_header(record, record_bytes=len(record))
    assert same(header, decoded)
    assert decoded.placement == Placement("nvme", ("cpu", "s3"), "s3", 60.0, 3600.0)
    assert (decoded.blocks, decoded.tokens, decoded.payload_bytes) == (4, 51, 480)
    assert decoded.address == header.address
    assert decoded.checksums.dtype == np.uint64
    assert not decoded.checksums.flags.writeable
    length = codec.read_header_bytes(record[:64])
    assert length == codec.header_bytes(4, 3) == 4096
    assert same(header, codec.decode_header(record[:length]))
    assert codec.good_blocks(decoded, record[length:], 0) == 4


def test_the_format_does_not_change_by_accident() -> None:
    """Files and objects outlive the program: another layout needs another `VERSION`."""
    record, _ = sealed()
    assert record[:8].tobytes() == b"\x89SMVRKV\n"
    assert hashlib.sha256(record).hexdigest() == GOLDEN[codec.VERSION]


@pytest.mark.parametrize("version", [1, 2])
def test_what_older_versions_wrote_is_read_verified_and_tells_its_bad_layer(version: int) -> None:
    record = as_version(version, sealed()[0])
    assert hashlib.sha256(record).hexdigest() == GOLDEN[version]
    header = codec.decode_header(record, record_bytes=len(record))
    assert header.version == version
    payload = record[4096:]
    assert codec.good_blocks(header, payload, 0) == 4
    for at in range(len(payload)):
        payload[at] ^= 1 << at % 8
        assert codec.good_blocks(header, payload, 0) == at // SHAPE.block_bytes
        block, layer = at // SHAPE.block_bytes, at % SHAPE.block_bytes // SHAPE.layer_bytes
        assert codec.bad_layers(header, payload, block) == [layer]
        payload[at] ^= 1 << at % 8


@pytest.mark.parametrize("version", codec.READABLE)
@pytest.mark.parametrize("other", codec.READABLE)
def test_no_versions_checksums_pass_for_anothers(version: int, other: int) -> None:
    record = as_version(version, sealed()[0])
    header = replace(codec.decode_header(record), version=other)
    assert codec.good_blocks(header, record[4096:], 0) == (4 if version == other else 0)


def test_behind_comes_back_in_order() -> None:
    _, header = sealed(placement=Placement("cpu", ("s3", "nvme"), "s3"))
    assert header.placement.write_behind == ("nvme", "s3")


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    blocks=st.integers(1, 40),
    layers=st.integers(1, 130),
    layer_bytes=st.integers(1, 70),
    last=st.integers(1, 16),
    first_block=st.sampled_from([0, 1, 2**32 - 41]),
    times=st.tuples(*[st.floats(0, 1e300)] * 3),
)
def test_round_trips(
    blocks: int,
    layers: int,
    layer_bytes: int,
    last: int,
    first_block: int,
    times: tuple[float, float, float],
) -> None:
    record, header = sealed(
        shape=BlockShape(layers, layer_bytes, 16),
        keys=[hashlib.sha256(bytes([n])).digest() for n in range(blocks)],
        token_counts=[16] * (blocks - 1) + [last],
        first_block=first_block,
        parent=ROOT if first_block == 0 else b"p" * 32,
        placement=Placement(min_ttl_s=times[0], ttl_s=times[1]),
        created_unix_s=times[2],
    )
    length = codec.read_header_bytes(record)
    assert length % codec.HEADER_ALIGN == 0
    assert same(header, codec.decode_header(record, record_bytes=len(record)))
    first = blocks // 2
    assert (
        codec.good_blocks(header, record[length + first * header.shape.block_bytes :], first)
        == blocks - first
    )


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "namespace": {"namespace": b"n" * 31},
    "tenant": {"tenant": b"t" * 17},
    "session": {"session": b""},
    "parent": {"parent": b"p"},
    "a root that is not the beginning": {"parent": ROOT},
    "a beginning that is not at the root": {"first_block": 0},
    "first block below 0": {"first_block": -1},
    "first block above u32": {"first_block": 2**32 - 4},
    "no blocks": {"keys": [], "token_counts": []},
    "a short key": {"keys": [*KEYS[:3], b"k"]},
    "a key twice": {"keys": [*KEYS[:3], KEYS[0]]},
    "its own parent": {"keys": [*KEYS[:3], KEYS[4]]},
    "a key that is the root": {"keys": [ROOT, *KEYS[:3]]},
    "fewer counts": {"token_counts": [16, 16, 16]},
    "a hole": {"token_counts": [16, 15, 16, 3]},
    "an empty tail": {"token_counts": [16, 16, 16, 0]},
    "too many tokens": {"token_counts": [16, 16, 16, 17]},
    "never": {"created_unix_s": float("nan")},
    "before time": {"created_unix_s": -1.0},
    "kept for ever": {"placement": Placement(min_ttl_s=float("inf"))},
    "expired before": {"placement": Placement(ttl_s=-1.0)},
    "no layers": {"shape": BlockShape(0, 40, 16)},
    "no bytes": {"shape": BlockShape(3, 0, 16)},
    "no tokens": {"shape": BlockShape(3, 40, 0)},
    "blocks of too many tokens": {
        "shape": BlockShape(3, 40, 65537),
        "token_counts": [65537, 65537, 65537, 1],
    },
}


@pytest.mark.parametrize("fields", BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_nonsense_is_not_sealed(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        sealed(**fields)


@pytest.mark.parametrize(
    "change", [lambda r: r[:-1], lambda r: np.append(r, r[:1]), lambda r: r.view(np.int8)]
)
def test_only_a_record_of_the_right_size_is_sealed(change: Callable[[Bytes], Bytes]) -> None:
    record, header = sealed()
    fields = {
        name: getattr(header, name) for name in header.__slots__ if name not in ("checksums", "version")
    }
    with pytest.raises(ValueError, match="bytes"):
        codec.seal(change(record), **fields)
    record.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        codec.seal(record, **fields)


# Offsets of the format, said here once more. Each lie has a right header checksum: only the check fires.
LIES: dict[str, tuple[int, bytes, str]] = {
    "magic": (1, b"X", "magic"),
    "no version": (8, b"\0", "version"),
    "a later version": (8, b"\4", "version"),
    "flags": (10, b"\1", "version"),
    "header length": (12, struct.pack("<I", 8192), "header"),
    "no blocks": (16, struct.pack("<I", 0), "header"),
    "more blocks": (16, struct.pack("<I", 5), "header"),
    "a block less": (16, struct.pack("<I", 3), "header"),
    "all blocks": (16, struct.pack("<I", 2**32 - 1), "header"),
    "no layers": (20, struct.pack("<I", 0), "header"),
    "all layers": (20, struct.pack("<I", 2**32 - 1), "header"),
    "no layer bytes": (24, struct.pack("<I", 0), "header"),
    "larger layers": (24, struct.pack("<I", 41), "truncated"),
    "smaller layers": (24, struct.pack("<I", 39), "oversized"),
    "no tokens": (28, struct.pack("<I", 0), "header"),
    "all tokens": (28, struct.pack("<I", 2**32 - 1), "header"),
    "other tokens": (28, struct.pack("<I", 17), "header"),
    "the beginning": (32, struct.pack("<I", 0), "header"),
    "beyond u32": (32, struct.pack("<I", 2**32 - 1), "header"),
    "parent is the root": (100, ROOT, "header"),
    "parent is a key": (100, KEYS[2], "header"),
    "created never": (132, struct.pack("<d", float("nan")), "header"),
    "created before time": (132, struct.pack("<d", -1.0), "header"),
    "first in no tier": (140, b"\3", "header"),
    "behind in no tier": (141, b"\x08", "header"),
    "lowest is no tier": (142, b"\xff", "header"),
    "kept for ever": (144, struct.pack("<d", float("inf")), "header"),
    "expired before": (152, struct.pack("<d", -0.5), "header"),
    "a key twice": (176, KEYS[1], "header"),
    "a key is the root": (176, ROOT, "header"),
    "an empty block": (176 + 4 * 32, struct.pack("<I", 0), "header"),
    "a hole": (176 + 4 * 32, struct.pack("<I", 15), "header"),
    "a long tail": (176 + 4 * 32 + 12, struct.pack("<I", 17), "header"),
    "padding": (4095, b"\1", "header"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_contradicts_itself_is_refused(lie: str) -> None:
    at, new, kind = LIES[lie]
    record, _ = sealed()
    assert same(sealed()[1], codec.decode_header(forge(record, 0, record[:1].tobytes())))  # forging is right
    forged = forge(record, at, new)
    assert kind_of(lambda: codec.decode_header(forged, record_bytes=len(forged))) == kind


def test_a_long_header_is_refused_before_it_is_read() -> None:
    """The counts agree with the length, and they would take 128 MiB."""
    blocks = 128 * 1024 * 1024 // 44 - 100
    prefix = sealed()[0][:64].copy()
    length = codec.header_bytes(blocks, 1)
    prefix[12:24] = np.frombuffer(struct.pack("<III", length, blocks, 1), np.uint8)
    assert kind_of(lambda: codec.read_header_bytes(prefix)) == "header"
    prefix[12:24] = np.frombuffer(struct.pack("<III", 4096, 0, 1), np.uint8)
    assert kind_of(lambda: codec.read_header_bytes(prefix)) == "header"


@pytest.mark.parametrize("length", [0, 1, 7, 8, 63, 64, 4095])
def test_less_than_a_header_is_truncated(length: int) -> None:
    record, _ = sealed()
    assert kind_of(lambda: codec.decode_header(record[:length])) == "truncated"
    if length < 64:
        assert kind_of(lambda: codec.read_header_bytes(record[:length])) == "truncated"


def test_every_flipped_bit_of_a_header_is_found() -> None:
    record, _ = sealed()
    for at in range(4096):
        record[at] ^= 1 << at % 8
        kind_of(lambda: codec.decode_header(record, record_bytes=len(record)))
        record[at] ^= 1 << at % 8
    codec.decode_header(record, record_bytes=len(record))


@pytest.mark.parametrize(("change", "kind"), [(-1, "truncated"), (1, "oversized")])
def test_the_size_of_the_whole_record_is_checked(change: int, kind: str) -> None:
    record, _ = sealed()
    assert kind_of(lambda: codec.decode_header(record, record_bytes=len(record) + change)) == kind


@settings(max_examples=300, derandomize=True, deadline=None)
@given(data=st.data())
def test_f12_any_bytes_at_all_are_either_a_header_or_a_bad_record(data: st.DataObject) -> None:
    record, _ = sealed()
    start = data.draw(st.binary(max_size=200))
    keep = data.draw(st.integers(0, 200))
    tail = data.draw(st.sampled_from([record[keep:], record[:0]]))
    mixed = np.concatenate([record[:keep], np.frombuffer(start, np.uint8), tail])
    mixed = mixed if len(mixed) < 4096 else forge(mixed, 0, mixed[:1].tobytes()) if keep >= 16 else mixed
    with suppress(BadRecord):
        assert codec.decode_header(mixed).blocks == 4


def test_g1_blocks_belong_where_they_are_expected() -> None:
    _, header = sealed()

    def belongs(
        offset: int, first: int, keys: list[bytes], namespace: bytes = b"n" * 32, shape: BlockShape = SHAPE
    ) -> None:
        codec.check_belongs(header, namespace, shape, offset, first, keys)

    belongs(0, 7, KEYS[:4])
    belongs(1, 8, KEYS[1:3])
    belongs(3, 10, KEYS[3:4])
    assert kind_of(lambda: belongs(0, 7, KEYS[:4], namespace=b"m" * 32)) == "namespace"
    assert kind_of(lambda: belongs(0, 7, KEYS[:4], shape=BlockShape(3, 40, 17))) == "namespace"
    assert kind_of(lambda: belongs(0, 7, [*KEYS[:3], KEYS[4]])) == "key"
    assert kind_of(lambda: belongs(0, 7, [KEYS[1], KEYS[0]])) == "key"
    assert kind_of(lambda: belongs(1, 8, KEYS[:2])) == "key"
    assert kind_of(lambda: belongs(0, 8, KEYS[:4])) == "key"
    assert kind_of(lambda: belongs(0, 7, KEYS)) == "key"
    assert kind_of(lambda: belongs(-2, 5, KEYS[2:3])) == "key"
    assert kind_of(lambda: belongs(4, 11, KEYS[4:])) == "key"


def test_g5_blocks_are_good_up_to_the_first_flipped_bit() -> None:
    record, header = sealed()
    payload = record[4096:]
    for at in range(len(payload)):
        payload[at] ^= 1 << at % 8
        assert codec.good_blocks(header, payload, 0) == at // SHAPE.block_bytes
        block, layer = at // SHAPE.block_bytes, at % SHAPE.block_bytes // SHAPE.layer_bytes
        assert codec.bad_layers(header, payload, block) == [layer]
        assert codec.bad_layers(header, payload[block * SHAPE.block_bytes :], block, block) == [layer]
        payload[at] ^= 1 << at % 8
    assert codec.good_blocks(header, payload, 0) == 4
    assert codec.good_blocks(header, payload[120:-1], 1) == 2  # the last is not whole
    assert codec.good_blocks(header, payload[120:], 0) == 0
    assert codec.good_blocks(header, np.append(payload, payload), 0) == 4
    assert codec.good_blocks(header, payload, 4) == 0
    assert codec.good_blocks(header, payload, 9) == 0
    with pytest.raises(ValueError, match="-1"):
        codec.good_blocks(header, payload, -1)


def test_g1_the_same_bytes_elsewhere_have_another_checksum() -> None:
    record, header = sealed()
    record[4096:] = 0
    fields = {
        name: getattr(header, name) for name in header.__slots__ if name not in ("checksums", "version")
    }
    found = codec.seal(record, **fields).checksums
    assert len(set(found.ravel().tolist())) == found.size == 12
    other = codec.seal(record, **{**fields, "keys": [KEYS[1], KEYS[0], *KEYS[2:4]]}).checksums
    assert np.array_equal(other, found[[1, 0, 2, 3]]), "it is the key's, wherever the block stands"
