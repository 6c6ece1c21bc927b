"""The S3 tier on a real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pydantic import SecretStr

from samovar.cache_tiers.blocks.extent import Address
from samovar.cache_tiers.blocks.record import (
    BadRecord,
    Record,
    TierError,
    TierMiss,
    check_belongs,
    decode_header,
    good_blocks,
)
from samovar.cache_tiers.media.s3 import S3Tier
from samovar.cache_tiers.media.s3_client import S3Keys
from samovar.cache_tiers.media.tier import Deadline
from samovar.configs.sections import S3TierSettings
from tests.support.nodes.s3_extents import NAMESPACE, SHAPE, TENANT, sealed
from tests.support.services.rclone import plain_client, s3_server

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

DEADLINE_S = 20.0
NOW_UNIX_S = 4e9  # later than any server's clock

MakeTier = Callable[..., S3Tier]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3TierSettings]:
    with s3_server(tmp_path_factory.mktemp("s3")) as settings:
        yield settings


@pytest.fixture
def settings(server: S3TierSettings, request: pytest.FixtureRequest) -> S3TierSettings:
    """A prefix of each test's own."""
    return server.model_copy(update={"prefix": request.node.name.replace("[", "/").replace("]", "")})


@pytest.fixture
def make(settings: S3TierSettings) -> Iterator[MakeTier]:
    made = []

    def make_one(now_unix_s: float = NOW_UNIX_S, **changes: object) -> S3Tier:
        made.append(S3Tier(settings.model_copy(update=changes), lambda: now_unix_s))
        return made[-1]

    yield make_one
    for tier in made:
        tier.check_integrity()
        tier.close()


@pytest.fixture
def client(settings: S3TierSettings) -> S3Client:
    return plain_client(settings)


@pytest.fixture
def put_raw(client: S3Client, settings: S3TierSettings) -> Callable[[Address, bytes], None]:
    """Write past the tier, at the key of an address."""

    def put(address: Address, body: bytes) -> None:
        client.put_object(Bucket="samovar", Key=S3Keys(settings.prefix).record(address), Body=body)

    return put


def read_all(tier: S3Tier, address: Address, record: Record) -> bytes:
    return tier.read(address, 0, record.nbytes, deadline=Deadline(DEADLINE_S)).tobytes()


def keys_under(client: S3Client, prefix: str) -> list[str]:
    return [
        item["Key"]
        for item in client.list_objects_v2(Bucket="samovar", Prefix=prefix + "/").get("Contents", [])
    ]


def test_round_trip_ranges_delete(make: MakeTier, client: S3Client, settings: S3TierSettings) -> None:
    tier = make()
    assert list(tier.scan()) == []
    header, record = sealed(1)
    with pytest.raises(TierMiss):
        tier.read(header.address, 0, 10, deadline=Deadline(DEADLINE_S))
    for _ in range(2):  # idempotent
        tier.put(header.address, record, deadline=Deadline(DEADLINE_S))
        assert tier.bytes_held() == record.nbytes
        tier.check_integrity()
    assert read_all(tier, header.address, record) == record.data.tobytes()
    for start, nbytes in [(0, 1), (record.nbytes - 1, 1), (100, 5000), (4096, 1024)]:
        part = tier.read(header.address, start, nbytes, deadline=Deadline(DEADLINE_S))
        assert part.dtype == np.uint8
        assert part.tobytes() == record.data[start : start + nbytes].tobytes()
    assert keys_under(client, settings.prefix) == [S3Keys(settings.prefix).record(header.address)]
    tier.touch(header.address)
    for _ in range(2):
        tier.delete(header.address)
        assert tier.bytes_held() == 0
        tier.check_integrity()
    with pytest.raises(TierMiss):
        tier.read(header.address, 0, 10, deadline=Deadline(DEADLINE_S))
    assert keys_under(client, settings.prefix) == []


def test_a_range_past_the_end_is_truncated(make: MakeTier) -> None:
    tier = make()
    header, record = sealed(1)
    tier.put(header.address, record, deadline=Deadline(DEADLINE_S))
    for start in (record.nbytes - 5, record.nbytes, record.nbytes + 100):
        with pytest.raises(BadRecord, match="truncated"):
            tier.read(header.address, start, 10, deadline=Deadline(DEADLINE_S))


def test_many_at_once(make: MakeTier) -> None:
    tier = make()
    extents = [sealed(seed, blocks=20) for seed in range(24)]

    def there_and_back(number: int) -> None:
        header, record = extents[number]
        tier.put(header.address, record, deadline=Deadline(DEADLINE_S))
        assert read_all(tier, header.address, record) == record.data.tobytes()

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(there_and_back, range(len(extents))))
    tier.check_integrity()
    assert len(list(tier.scan())) == len(extents)
    assert tier.bytes_held() == sum(record.nbytes for _, record in extents)


def test_scan_after_a_restart(make: MakeTier, client: S3Client, settings: S3TierSettings) -> None:
    before = make()
    # The second's header is longer than the first read of a scan.
    extents = [sealed(1), sealed(2, blocks=200), sealed(3, tenant=b"another-16-bytes")]
    for header, record in extents:
        before.put(header.address, record, deadline=Deadline(DEADLINE_S))
    foreign = {f"{settings.prefix}/readme.txt", f"{settings.prefix}/v1/note", f"{settings.prefix}/v1/a/b/c"}
    for key in foreign:
        client.put_object(Bucket="samovar", Key=key, Body=b"not ours")
    began_unix_s = time.time()
    tier = make()
    with pytest.raises(TierError, match="not been listed"):
        tier.bytes_held()
    scanned = {found.header.extent_id: found for found in tier.scan()}
    tier.check_integrity()
    assert scanned.keys() == {header.extent_id for header, _ in extents}
    for header, record in extents:
        found = scanned[header.extent_id]
        assert found.nbytes == record.nbytes
        assert found.header.address == header.address
        assert found.header.keys == header.keys
        assert np.array_equal(found.header.checksums, header.checksums)
        assert began_unix_s - 60 < found.last_used_unix_s < began_unix_s + 60
        assert read_all(tier, header.address, record) == record.data.tobytes()
    assert tier.bytes_held() == sum(record.nbytes for _, record in extents)
    assert foreign <= set(keys_under(client, settings.prefix))
    assert not tier.bad_found().kinds


def test_times_of_the_future_are_now(make: MakeTier) -> None:
    header, record = sealed(1)
    make().put(header.address, record, deadline=Deadline(DEADLINE_S))
    (found,) = make(now_unix_s=1234.5).scan()
    assert found.last_used_unix_s == 1234.5


def test_quarantine(make: MakeTier, client: S3Client, settings: S3TierSettings) -> None:
    tier = make()
    list(tier.scan())
    header, record = sealed(1)
    tier.put(header.address, record, deadline=Deadline(DEADLINE_S))
    tier.quarantine(header.address)
    with pytest.raises(TierMiss):
        tier.read(header.address, 0, 10, deadline=Deadline(DEADLINE_S))
    assert keys_under(client, settings.prefix) == [S3Keys(settings.prefix).bad(header.address)]
    assert tier.bytes_held() == record.nbytes
    tier.quarantine(sealed(2)[0].address)  # of nothing
    assert tier.bytes_held() == record.nbytes
    after = make()
    assert list(after.scan()) == []
    assert after.bytes_held() == record.nbytes


def test_quarantine_is_bounded(
    make: MakeTier, client: S3Client, settings: S3TierSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samovar.cache_tiers.media.s3.QUARANTINE_MAX", 2)
    tier = make()
    for seed in range(4):
        header, record = sealed(seed)
        tier.put(header.address, record, deadline=Deadline(DEADLINE_S))
        tier.quarantine(header.address)
    assert len(keys_under(client, settings.prefix)) == 2


def test_f11_garbage_at_our_key(
    make: MakeTier,
    put_raw: Callable[[Address, bytes], None],
    client: S3Client,
    settings: S3TierSettings,
    tmp_path: Path,
) -> None:
    """Found by the scan, put aside; never handed out as an extent; nothing of it is run."""
    marker = tmp_path / "executed"
    pickled = b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    header, record = sealed(0)
    flipped = bytearray(record.data.tobytes())
    flipped[200] ^= 1
    bodies = {
        1: b"",
        2: pickled,
        3: pickled + bytes(8192),
        4: b"PK\x03\x04" + bytes(10_000),
        5: sealed(5)[1].data.tobytes()[:-1],
        6: sealed(6)[1].data.tobytes() + b"x",
        7: sealed(7)[1].data.tobytes()[:4096],
        8: sealed(8, blocks=200)[1].data.tobytes()[:5000],
    }
    for seed, body in bodies.items():
        put_raw(sealed(seed)[0].address, body)
    put_raw(header.address, bytes(flipped))
    tier = make()
    assert list(tier.scan()) == []
    assert tier.bad_found().kinds == {"truncated": 5, "magic": 2, "oversized": 1, "header": 1}
    assert not marker.exists()
    assert all("/bad/" in key for key in keys_under(client, settings.prefix))
    assert list(make().scan()) == []  # and not found again


def test_f11_an_object_of_another_tenant_or_namespace_at_our_key(
    make: MakeTier, put_raw: Callable[[Address, bytes], None]
) -> None:
    ours, our_record = sealed(1)
    others = [
        sealed(1, tenant=b"another-16-bytes"),
        sealed(1, namespace=bytes(32)),
        sealed(2),
    ]
    for other, other_record in others:
        tier = make()
        tier.put(ours.address, our_record, deadline=Deadline(DEADLINE_S))
        put_raw(ours.address, other_record.data.tobytes())
        # It is as long as ours: the reader's checks see it.
        data = tier.read(ours.address, 0, our_record.nbytes, deadline=Deadline(DEADLINE_S))
        header = decode_header(data, record_bytes=data.nbytes)
        assert header.address == other.address != ours.address
        if other.tenant == TENANT:
            with pytest.raises(BadRecord):
                check_belongs(header, NAMESPACE, SHAPE, 0, 0, ours.keys)
        assert good_blocks(ours, data[-ours.payload_bytes :], 0) == (0 if other.keys != ours.keys else 3)
        # A scan sees it, too.
        again = make()
        assert list(again.scan()) == []
        assert again.bad_found().kinds == (
            {"key": 1}
            if other.address.namespace == NAMESPACE and other.tenant == TENANT
            else {"namespace": 1}
        )
        with pytest.raises(TierMiss):
            again.read(ours.address, 0, 10, deadline=Deadline(DEADLINE_S))


def test_f11_an_object_of_another_size_at_our_key(
    make: MakeTier, put_raw: Callable[[Address, bytes], None]
) -> None:
    tier = make()
    header, record = sealed(1)
    tier.put(header.address, record, deadline=Deadline(DEADLINE_S))
    put_raw(header.address, record.data.tobytes() + b"more")
    with pytest.raises(BadRecord, match="oversized"):
        tier.read(header.address, 0, 4096, deadline=Deadline(DEADLINE_S))
    put_raw(header.address, record.data.tobytes()[:-4])
    with pytest.raises(BadRecord, match="truncated"):
        tier.read(header.address, 0, 4096, deadline=Deadline(DEADLINE_S))


def test_f11_a_put_replaces_garbage(make: MakeTier, put_raw: Callable[[Address, bytes], None]) -> None:
    tier = make()
    header, record = sealed(1)
    put_raw(header.address, b"garbage")
    tier.put(header.address, record, deadline=Deadline(DEADLINE_S))
    assert read_all(tier, header.address, record) == record.data.tobytes()


def test_probe_leaves_nothing(make: MakeTier, client: S3Client, settings: S3TierSettings) -> None:
    make().probe()
    assert keys_under(client, settings.prefix) == []


def test_wrong_secret_and_missing_bucket_are_errors(make: MakeTier) -> None:
    header, record = sealed(1)
    for changes in ({"secret_access_key": SecretStr("wrong")}, {"bucket": "no-such-bucket"}):
        tier = make(**changes)
        for call in (
            lambda tier=tier: tier.put(header.address, record, deadline=Deadline(DEADLINE_S)),
            lambda tier=tier: tier.read(header.address, 0, 10, deadline=Deadline(DEADLINE_S)),
            lambda tier=tier: tier.delete(header.address),
            lambda tier=tier: list(tier.scan()),
            tier.probe,
        ):
            with pytest.raises(TierError) as caught:
                call()
            assert not isinstance(caught.value, TierMiss)


def test_the_newest_are_indexed_and_all_count(make: MakeTier) -> None:
    tier = make()
    extents = [sealed(seed) for seed in range(3)]
    for header, record in extents:
        tier.put(header.address, record, deadline=Deadline(DEADLINE_S))
    for most in (0, 2):
        limited = make(index_objects_max=most)
        assert len(list(limited.scan())) == most
        assert limited.bytes_held() == sum(record.nbytes for _, record in extents)
