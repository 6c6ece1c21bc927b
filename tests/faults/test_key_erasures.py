"""Ten erasures with a crash between every two steps: what was erased can be read nowhere, whoever has a copy.

The process may die at each system call that touches the file of keys, and at each step of the node's clear.
What an attacker has afterwards is the most there can be: every version of every object that was ever in the
bucket, every file of the disk as it was before the erasure (a backup), the disk as it is now, the operator's
key, and this very code. Searched for is the payload of the records: a marker of 40 bytes, and samples of KV.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samovar.cache_tiers.blocks import record as codec
from samovar.cache_tiers.blocks.extent import Clear
from samovar.cache_tiers.blocks.record import BadRecord, Record, TierError
from samovar.cache_tiers.encryption.keys import SessionKeyFile
from samovar.cache_tiers.encryption.tier import EncryptedTier
from samovar.cache_tiers.media.s3 import S3Tier
from samovar.cache_tiers.media.s3_client import S3Keys, S3Objects
from samovar.cache_tiers.media.tier import Deadline, Tier
from samovar.configs.sections import S3TierSettings
from tests.support.inside import join_scans
from tests.support.nodes.encrypted import encrypted, key_file
from tests.support.nodes.node_harness import Bench, Sample, bench, sample
from tests.support.nodes.nvme_harness import Killed, SickCalls, die, halfway
from tests.support.services.rclone import plain_client, s3_server

MARKER = b"the eagle lands at noon: 0123456789abcdef"[:40]
KV_SAMPLE_BYTES = 48
ERASURES = 10
STEPS = [("keys", 1), ("keys", 2), ("node", 0), ("node", 1)]
"""At which call of the file of keys (write, flush), or step of the node (a record in each tier)."""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3TierSettings]:
    with s3_server(tmp_path_factory.mktemp("s3")) as settings:
        yield settings


Versions = list[tuple[str, bytes]]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Versions:
    """Every version of every object that is put: the server of the tests keeps the last one only."""
    kept: Versions = []
    put = S3Objects.put

    def keeping(objects: S3Objects, key: str, data: bytes, *args: Any, **kwargs: Any) -> bool:
        kept.append((key, data))
        return put(objects, key, data, *args, **kwargs)

    monkeypatch.setattr(S3Objects, "put", keeping)
    return kept


def marked(number: int) -> Sample:
    """A record whose payload begins with the marker."""
    tag = number.to_bytes(2, "little") * 8
    plain = sample(number, session=tag)
    record = plain.record.copy()
    payload = record[-plain.header.payload_bytes :]
    payload[: len(MARKER)] = np.frombuffer(MARKER, np.uint8)
    header = plain.header
    sealed = codec.seal(
        record,
        namespace=header.namespace,
        tenant=header.tenant,
        session=header.session,
        shape=header.shape,
        parent=header.parent,
        first_block=0,
        keys=header.keys,
        token_counts=header.token_counts,
        placement=header.placement,
        created_unix_s=1.0,
    )
    return Sample(sealed, record)


class _Node:
    """A node over encrypted files and an encrypted bucket; `restart` is what comes after a kill."""

    def __init__(self, folder: Path, bucket: S3TierSettings) -> None:
        self.folder, self.calls = folder, SickCalls()
        self._s3 = S3Tier(bucket, wall_clock=lambda: 2000.0)  # its connections outlive the node
        self._s3.close = lambda: None  # type: ignore[method-assign]
        self.step: int | None = None  # of the node's steps, at which it dies
        self.start()

    def start(self) -> None:
        self.keys = key_file(self.folder, calls=self.calls)
        self.tiers: list[Tier] = [encrypted(self.folder, self.keys), EncryptedTier(self._s3, self.keys)]
        self.bench: Bench = bench(
            self.tiers, reach=self._reach, pending_path=self.folder / "kv" / "owed.json", keys=self.keys
        )
        join_scans(self.bench.node, 30.0)

    def _reach(self, _state: str) -> None:
        if self.step is not None:
            self.step -= 1
            if self.step < 0:
                raise Killed

    def restart(self) -> None:
        self.step = None
        self.calls.heal()
        self.stop()
        self.start()

    def stop(self) -> None:
        self.bench.node.close()
        self.keys.close()


def found_in(data: bytes, one: Sample) -> bool:
    """Whether the marker or a sample of its KV is there, at any place."""
    payload = one.payload.tobytes()
    samples = [payload[at : at + KV_SAMPLE_BYTES] for at in range(0, len(payload) - KV_SAMPLE_BYTES, 97)]
    return MARKER in data or any(sample in data for sample in samples)


def opened(keys: SessionKeyFile, folder: Path, path: str, data: bytes, one: Sample) -> bytes:
    """What this code reads of a stored record that was laid into a disk of its own; empty: nothing."""
    tier = encrypted(folder, keys)
    target = folder / "kv" / "v1" / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    try:
        return tier.read(one.header.address, 0, one.record.nbytes, deadline=Deadline(5.0)).tobytes()
    except (TierError, BadRecord):
        return b""
    finally:
        tier.close()
        target.unlink()


def place_of(one: Sample) -> str:
    address = one.header.address
    name = address.extent_id.hex()
    return f"{address.tenant.hex()}/{address.namespace.hex()}/{name[:2]}/{name}.kv"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [die, halfway])
def test_g12_what_was_erased_is_readable_nowhere_wherever_the_process_died(
    tmp_path: Path, bucket: S3TierSettings, versions: Versions, fault: Any
) -> None:
    prefix = f"kv-{fault.__name__}"
    node = _Node(tmp_path / "node", bucket.model_copy(update={"prefix": prefix}))
    names = S3Keys(prefix)
    client = plain_client(bucket)
    kept = marked(5000)
    for tier in node.tiers:
        tier.put(kept.header.address, Record(kept.record), deadline=Deadline(5.0))
    for number in range(ERASURES):
        one = marked(number)
        for tier in node.tiers:
            tier.put(one.header.address, Record(one.record), deadline=Deadline(5.0))
        for tier in node.tiers:
            there = tier.read(one.header.address, 0, one.record.nbytes, deadline=Deadline(5.0))
            assert found_in(there.tobytes(), one)
        node.restart()  # its scans take them in
        backup = shutil.copytree(node.folder / "kv", tmp_path / f"backup-{number}")
        clear = Clear(one.header.tenant, one.header.session)
        where, step = STEPS[number % len(STEPS)]
        if where == "keys":
            node.calls.arm(fault, step)
        else:
            node.step = step
        with pytest.raises(Killed):
            node.bench.node.clear(clear)
        node.restart()
        assert node.bench.node.clear(clear).unreachable == ()  # it is wished again, and is over now
        node.restart()
        # Nothing on the disk or in the bucket as they are, without any key.
        files = [path for path in node.folder.rglob("*") if path.is_file()]
        assert not any(found_in(path.read_bytes(), one) for path in files)
        # Nothing in what was there before, with all the keys that are left.
        old = [path.read_bytes() for path in backup.rglob("*.kv")]
        old += [data for key, data in versions if key == names.record(one.header.address)]
        assert len(old) >= 2
        for data in old:
            assert not found_in(data, one)
            assert not found_in(opened(node.keys, tmp_path / "attacker", place_of(one), data, one), one)
        with suppress(client.exceptions.NoSuchKey):
            there = client.get_object(Bucket=bucket.bucket or "", Key=names.record(one.header.address))
            assert not found_in(there["Body"].read(), one)
    # Another session's is read as it was, from the very same places: the search finds what is there.
    data = next(data for key, data in versions if key == names.record(kept.header.address))
    assert found_in(opened(node.keys, tmp_path / "attacker", place_of(kept), data, kept), kept)
    node.stop()
