"""Encrypted records on a medium: what is read is what was put, and nothing else is ever read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import BlockShape, Bytes, Clear
from samovar.cache_tiers.blocks.record import BadRecord, TierError, TierMiss
from samovar.cache_tiers.encryption.tier import ENVELOPE_BYTES, SCRATCH_BYTES, EncryptedTier, geometry_of
from samovar.cache_tiers.media.faults import FaultyTier
from samovar.cache_tiers.media.files import PAGE_BYTES, aligned_empty
from samovar.cache_tiers.media.nvme import NvmeTier
from samovar.cache_tiers.media.tier import Deadline
from samovar.configs.sections import FaultSettings
from tests.support.nodes.encrypted import OTHER_OUTER, encrypted, key_file, outer_file
from tests.support.nodes.nvme_harness import Sealed, make, open_tier, path_of

LARGE = BlockShape(layers=2, layer_bytes=700_001, block_tokens=16)


def deadline() -> Deadline:
    return Deadline(30.0)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[EncryptedTier]:
    opened = encrypted(tmp_path)
    yield opened
    opened.close()


def files_of(tier: EncryptedTier) -> NvmeTier:
    inner = tier.inner
    assert isinstance(inner, NvmeTier)
    return inner


def read(tier: EncryptedTier, one: Sealed) -> Bytes:
    return tier.read(one.address, 0, one.record.nbytes, deadline=deadline())


def put(tier: EncryptedTier, one: Sealed) -> Path:
    tier.put(one.address, one.record, deadline=deadline())
    return path_of(files_of(tier), one.address)


@pytest.mark.parametrize("direct_io", [False, True])
@pytest.mark.parametrize("shape", [BlockShape(3, 500, 16), LARGE])
def test_any_part_is_read_as_it_was_put(tmp_path: Path, shape: BlockShape, direct_io: bool) -> None:
    keys = key_file(tmp_path)
    tier = encrypted(tmp_path, keys, open_tier(tmp_path / "kv", direct_io=direct_io))
    one = make(1, blocks=5, shape=shape)
    put(tier, one)
    head = geometry_of(one.header).plain_head
    step = shape.block_bytes
    parts = [(0, len(one.data)), (0, head), (head, 1), (head + step, 2 * step), (len(one.data), 0), (0, 0)]
    parts += [(head - 5, 10), (head + 7, 2 * step), (head + 4 * step, step), (3, head + 3 * step + 1)]
    fresh = EncryptedTier(tier.inner, keys)  # knows nothing of the record
    for start, nbytes in parts:
        for each in (tier, fresh):
            got = each.read(one.address, start, nbytes, deadline=deadline())
            assert np.array_equal(got, one.data[start : start + nbytes]), (start, nbytes)
    room = aligned_empty(2 * len(one.data) // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)
    assert 2 * step < SCRATCH_BYTES < 5 * step or shape != LARGE
    got = tier.read(one.address, 0, len(one.data), deadline=deadline(), room=room)
    assert got.base is not None
    assert np.shares_memory(got, room)
    assert np.array_equal(got, one.data)
    tier.close()


def test_nothing_of_it_is_in_the_file(tier: EncryptedTier) -> None:
    one = make(1)
    stored = put(tier, one).read_bytes()
    payload = one.data[geometry_of(one.header).plain_head :].tobytes()
    assert not any(payload[at : at + 8] in stored for at in range(0, len(payload) - 8, 101))


def test_no_two_records_are_alike(tier: EncryptedTier) -> None:
    one = make(1)
    first = put(tier, one).read_bytes()
    second = put(tier, one).read_bytes()
    assert first[ENVELOPE_BYTES + PAGE_BYTES :] != second[ENVELOPE_BYTES + PAGE_BYTES :]
    assert np.array_equal(read(tier, one), one.data)


def test_g5_every_changed_byte_of_its_front_and_any_of_its_blocks_is_seen(tier: EncryptedTier) -> None:
    one = make(1, blocks=2, shape=BlockShape(2, 48, 16))
    path = put(tier, one)
    good = path.read_bytes()
    head = geometry_of(one.header).head
    for at in [*range(ENVELOPE_BYTES), *range(ENVELOPE_BYTES, head, 61), *range(head, len(good))]:
        spoilt = bytearray(good)
        spoilt[at] ^= 0x10
        path.write_bytes(spoilt)
        with pytest.raises((BadRecord, TierMiss)):
            read(tier, one)
    path.write_bytes(good)
    assert np.array_equal(read(tier, one), one.data)


def test_no_record_opens_in_the_place_of_another(tier: EncryptedTier) -> None:
    """Of the same session or not, and blocks change no places either."""
    one, other = make(1, tenant=1), make(2, tenant=1)
    path, other_path = put(tier, one), put(tier, other)
    kept = path.read_bytes()
    shutil.copy(other_path, path)
    with pytest.raises(BadRecord, match="key"):
        read(tier, one)
    mixed = bytearray(kept)  # its own front, the other's blocks
    head = geometry_of(one.header).head
    mixed[head:] = other_path.read_bytes()[head:]
    path.write_bytes(mixed)
    with pytest.raises(BadRecord, match="checksum"):
        read(tier, one)
    swapped = bytearray(kept)
    stride = geometry_of(one.header).stride
    swapped[head : head + stride], swapped[head + stride : head + 2 * stride] = (
        kept[head + stride : head + 2 * stride],
        kept[head : head + stride],
    )
    path.write_bytes(swapped)
    with pytest.raises(BadRecord, match="checksum"):
        read(tier, one)


def test_an_older_record_does_not_outlive_the_erasure_of_its_session(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    tier, one = encrypted(tmp_path, keys), make(1)
    old = put(tier, one).read_bytes()
    keys.destroy([Clear(one.header.tenant, one.header.session)])
    with pytest.raises(TierMiss):
        read(tier, one)
    path = put(tier, one)  # the same conversation, once more
    assert np.array_equal(read(tier, one), one.data)
    path.write_bytes(old)
    with pytest.raises(TierMiss):
        read(tier, one)


def test_what_was_on_its_way_during_an_erasure_gets_no_new_key(tmp_path: Path) -> None:
    one, later = make(1), make(2)  # made a second apart
    keys = key_file(tmp_path, now_s=one.header.created_unix_s)
    tier = encrypted(tmp_path, keys)
    put(tier, one)
    for clear in (Clear(one.header.tenant, one.header.session), Clear(one.header.tenant)):
        keys.destroy([clear])
        for _ in range(2):
            with pytest.raises(TierMiss):
                put(tier, one)
            keys.close()  # the actor of the keys dies
    put(tier, later)
    assert np.array_equal(read(tier, later), later.data)


def test_a_scan_yields_plain_sizes_and_deletes_what_no_key_opens(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    tier, kept, gone = encrypted(tmp_path, keys), make(1), make(2)
    put(tier, kept)
    lost = put(tier, gone)
    tier.close()
    keys.destroy([Clear(gone.header.tenant, gone.header.session)])  # while this node was away
    again = encrypted(tmp_path, keys)
    (found,) = again.scan()
    assert found.header.address == kept.address
    assert type(found.header) is type(kept.header)
    assert found.nbytes == kept.record.nbytes
    assert not lost.exists()
    assert not again.bad_found().kinds
    assert np.array_equal(read(again, kept), kept.data)


def test_another_outer_key_makes_misses_and_nothing_bad(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    tier, one = encrypted(tmp_path, keys), make(1)
    path = put(tier, one)
    outer_file(tmp_path, OTHER_OUTER)
    with pytest.raises(TierMiss):
        read(tier, one)
    (found,) = tier.scan()  # counted, so that it can be evicted
    assert found.header.address == one.address
    assert not tier.bad_found().kinds
    assert path.exists()
    put(tier, one)
    assert np.array_equal(read(tier, one), one.data)


def test_without_the_operators_file_nothing_is_written_or_read(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    tier, one = encrypted(tmp_path, keys), make(1)
    put(tier, one)
    keys.close()
    (tmp_path / "outer").unlink()
    for call in (lambda: read(tier, one), lambda: put(tier, make(2)), tier.probe, lambda: list(tier.scan())):
        with pytest.raises(TierError, match="encryption_key_file") as raised:
            call()
        assert not isinstance(raised.value, TierMiss)
    outer_file(tmp_path)
    tier.probe()
    assert np.array_equal(read(tier, one), one.data)


def test_plain_records_go_when_encryption_comes_and_the_other_way(tmp_path: Path) -> None:
    plain, one = open_tier(tmp_path / "kv"), make(1)
    plain.put(one.address, one.record, deadline=deadline())
    plain.close()
    tier = encrypted(tmp_path)
    assert not list(tier.scan())
    assert not tier.bad_found().kinds
    assert not list((tmp_path / "kv").rglob("*.kv"))
    assert not list((tmp_path / "kv").rglob("*.bad"))
    put(tier, one)
    tier.close()
    plain = open_tier(tmp_path / "kv")
    assert not list(plain.scan())
    assert not plain.bad_found().kinds
    assert not list((tmp_path / "kv").rglob("*.bad"))
    assert plain.bytes_held() == 0
    plain.close()


def test_a_plain_record_put_into_the_place_of_one_is_a_miss(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    tier, one = encrypted(tmp_path, keys), make(1)
    put(tier, one).write_bytes(one.data.tobytes())
    for each in (tier, EncryptedTier(tier.inner, keys)):
        with pytest.raises((TierMiss, BadRecord)):
            read(each, one)


def test_flipped_bits_of_the_medium_are_seen(tmp_path: Path) -> None:
    faulty = FaultyTier(open_tier(tmp_path / "kv"), FaultSettings())
    tier, one = encrypted(tmp_path, inner=faulty), make(1)
    tier.put(one.address, one.record, deadline=deadline())
    (found,) = tier.scan()  # the format is the medium's behind the faults
    assert found.nbytes == one.record.nbytes
    faulty.update(FaultSettings(flip_rate=1.0, seed=3))
    for _ in range(50):
        with pytest.raises((BadRecord, TierMiss)):
            read(tier, one)
