"""A tier made by docs/ARCHITECTURE.md alone ("to change X, start at Y"): records in a SQLite database.

The node around it is the product's: nothing of it knows which medium it is given.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cache_tiers.blocks import Address, BadRecord, Bytes, Placement, Record, TierError, TierFull, TierMiss
from cache_tiers.blocks.record import decode_header
from cache_tiers.media.faults import FaultyTier
from cache_tiers.media.memory import HeapTier
from cache_tiers.media.tier import Deadline, Scanned, Tier
from configs.sections import FaultSettings
from tests.support.nodes.node_harness import MIB, TENANT, Bench, bench, sample

BEHIND = Placement(first="cpu", write_behind=("nvme",))


class SqliteTier(Tier):
    """Takes the place of `nvme`: one row per record, committed before `put` returns."""

    name = "nvme"
    keeps_bad = True

    def __init__(self, path: Path, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("CREATE TABLE IF NOT EXISTS records (name PRIMARY KEY, record, used, is_bad)")

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        deadline.check()
        if self.bytes_held() + record.nbytes > self._bytes_max:
            raise TierFull("the database is full")
        row = (_name(address), record.data.tobytes(), 1.0)
        self._do("INSERT OR IGNORE INTO records VALUES (?, ?, ?, 0)", *row)

    def read(self, address: Address, start: int, nbytes: int, *, deadline: Deadline) -> Bytes:
        deadline.check()
        rows = self._do("SELECT record FROM records WHERE name = ? AND NOT is_bad", _name(address))
        if not rows:
            raise TierMiss("no such row")
        data = np.frombuffer(rows[0][0], dtype=np.uint8)
        if data.nbytes < start + nbytes:
            raise BadRecord("truncated", f"{data.nbytes} bytes, {start + nbytes} were wanted")
        return data[start : start + nbytes]

    def delete(self, address: Address) -> None:
        self._do("DELETE FROM records WHERE name = ? AND NOT is_bad", _name(address))

    def quarantine(self, address: Address) -> None:
        self._do("UPDATE records SET is_bad = 1, name = name || '.bad' WHERE name = ?", _name(address))

    def scan(self) -> Iterator[Scanned]:
        for record, used_s in self._do("SELECT record, used FROM records WHERE NOT is_bad"):
            yield Scanned(decode_header(np.frombuffer(record, dtype=np.uint8)), len(record), used_s)

    def touch(self, address: Address) -> None:
        self._do("UPDATE records SET used = used + 1 WHERE name = ?", _name(address))

    def purge_quarantine(self, tenant: bytes) -> int:
        bad = "is_bad AND name LIKE ?"
        (count,) = self._do(f"SELECT count(*) FROM records WHERE {bad}", f"{tenant.hex()}%")[0]
        self._do(f"DELETE FROM records WHERE {bad}", f"{tenant.hex()}%")
        return int(count)

    def bytes_held(self) -> int:
        return int(self._do("SELECT coalesce(sum(length(record)), 0) FROM records")[0][0])

    def probe(self) -> None:
        self._do("SELECT 1")

    def close(self) -> None:
        self._db.close()

    def _do(self, statement: str, *values: object) -> list[tuple[object, ...]]:  # type: ignore[type-arg]
        with self._lock:
            try:
                return self._db.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                raise TierError(str(error)) from error


def _name(address: Address) -> str:
    return f"{address.tenant.hex()}/{address.namespace.hex()}/{address.extent_id.hex()}"


def node_of(path: Path, faults: FaultSettings | None = None, **options: object) -> Bench:
    """A node with main memory, and this tier below it."""
    toy: Tier = SqliteTier(path, MIB)
    if faults is not None:
        toy = FaultyTier(toy, faults)
    return bench([HeapTier(4 * MIB), toy], **options)  # type: ignore[arg-type]


def test_records_are_written_behind_and_found_after_a_restart(tmp_path: Path) -> None:
    first, wanted = node_of(tmp_path / "kv.db"), sample(1, placement=BEHIND)
    assert first.store(wanted) == "taken"
    assert first.copies(wanted) == ("cpu", "nvme")
    first.node.close()

    second = node_of(tmp_path / "kv.db", incarnation="second")
    assert second.tiers_of(wanted) == ["nvme"]
    assert np.array_equal(second.load(wanted), wanted.payload)
    second.node.check_integrity()


def test_a_rotten_record_is_seen_and_put_aside(tmp_path: Path) -> None:
    path, wanted = tmp_path / "kv.db", sample(1, placement=BEHIND)
    first = node_of(path)
    first.store(wanted)
    first.node.close()
    with sqlite3.connect(path) as db:
        (data,) = db.execute("SELECT record FROM records").fetchone()
        db.execute("UPDATE records SET record = ?", (data[:-1] + bytes([data[-1] ^ 1]),))
    db.close()

    second = node_of(path, incarnation="second")
    with pytest.raises(BadRecord, match="as a replica sees it"):  # which takes the good blocks in front
        second.load(wanted)
    assert second.copies(wanted) == ()
    assert second.tiers["nvme"].purge_quarantine(TENANT) == 1
    second.node.check_integrity()


def test_its_faults_are_misses(tmp_path: Path) -> None:
    node = node_of(tmp_path / "kv.db", FaultSettings(full_rate=1.0))
    wanted = sample(1, placement=BEHIND)
    assert node.store(wanted) == "taken"
    assert node.copies(wanted) == ("cpu",)
    assert np.array_equal(node.load(wanted), wanted.payload)
    node.node.check_integrity()
