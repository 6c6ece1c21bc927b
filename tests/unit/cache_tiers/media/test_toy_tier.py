"""A tier made by docs/ARCHITECTURE.md alone ("to change X, start at Y"): records in a SQLite database.

The node around it is the product's: nothing of it knows which medium it is given.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from samovar.cache_tiers.actors.staging import StagingBuffer
from samovar.cache_tiers.blocks import (
    TIERS,
    Address,
    BadRecord,
    Bytes,
    Clear,
    Placement,
    Record,
    TierError,
    TierFull,
    TierMiss,
    TierName,
    sources,
)
from samovar.cache_tiers.blocks.record import decode_header
from samovar.cache_tiers.media.faults import FaultyTier
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.tier import Deadline, Scanned, Tier
from samovar.cache_tiers.node import NodeIdentity, NodeMedia, NodePorts, TierNode
from samovar.cache_tiers.node.build import PENDING_FILE, build_tiers
from samovar.configs.json_text import parse_json
from samovar.configs.sections import FaultSettings, TierSettings
from samovar.router.generation import TenantUsage, summed
from samovar.router.generation.answer import joined
from tests.support.clock import Clock
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import receipt_of, same, tiered
from tests.support.nodes.encrypted import key_file
from tests.support.nodes.node_harness import (
    MIB,
    SESSION,
    TENANT,
    Bench,
    Sample,
    bench,
    records_of,
    sample,
)


class SqliteTier(Tier):
    """One row per record, committed before `put` returns."""

    keeps_bad = True

    def __init__(self, name: TierName, bytes_max: int, *, path: str) -> None:
        self.name = name
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


def settings_of(folder: Path, **more: object) -> TierSettings:
    """The one setting that it takes: a tier named `archive`, made by this file."""
    given = {
        "medium": f"{__name__}:SqliteTier",
        "name": "archive",
        "options": {"path": str(folder / "kv.db")},
    }
    return TierSettings.model_validate(
        {"nvme": {"bytes_max": MIB}, "more": {**given, "bytes_max": MIB, **more}}
    )


def media_of(folder: Path, settings: TierSettings) -> NodeMedia:
    return build_tiers(settings, folder / "kv", make_cpu=HeapTier, wall_clock=lambda: 2000.0)


def node_of(
    folder: Path, faults: FaultSettings | None = None, incarnation: str = "first", **more: object
) -> Bench:
    """A node of main memory, files, and `archive`."""
    settings = settings_of(folder, **more)
    media = media_of(folder, settings)
    assert media.off == {"s3": "no bucket"}
    if faults is not None:
        media.tiers["archive"] = FaultyTier(media.tiers["archive"], faults)
    return bench(
        [*media.tiers.values()],
        settings=settings,
        incarnation=incarnation,
        bytes_max=MIB,
        pending_path=media.pending_path,
    )


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins and ends with the table of a process without further tiers."""
    monkeypatch.setattr(TIERS, "_kinds", TIERS._kinds)
    monkeypatch.setattr(TIERS, "_names", TIERS._names)


def demoted(folder: Path) -> Sample:
    """A node stores a record, demotes it, and ends."""
    node, wanted = node_of(folder), sample(1)
    assert node.store(wanted) == "taken"
    assert node.copies(wanted) == ("cpu",)
    assert node.node.sessions.demote(TENANT, SESSION) == 1
    node.work()
    assert node.copies(wanted) == ("archive",)
    assert node.tiers_of(wanted) == ["archive"]
    node.node.close()
    return wanted


@pytest.mark.parametrize("after", ["cpu", "nvme"])
def test_a_setting_puts_it_between_two_tiers(tmp_path: Path, after: str) -> None:
    node = node_of(tmp_path, after=after)
    order = {"cpu": ["cpu", "archive", "nvme", "s3"], "nvme": ["cpu", "nvme", "archive", "s3"]}[after]
    assert [row.name for row in node.node.stats().tiers] == list(TIERS) == order
    assert sources() == ("compute", "gpu", *order, "peer")
    assert [name for name, nbytes in settings_of(tmp_path).sizes.items() if nbytes] == [
        "cpu",
        "nvme",
        "archive",
    ]
    node.node.close()


def test_what_is_stored_and_demoted_is_loaded_after_a_restart(tmp_path: Path) -> None:
    wanted = demoted(tmp_path)
    second = node_of(tmp_path, incarnation="second")
    assert second.tiers_of(wanted) == ["archive"]
    assert np.array_equal(second.load(wanted), wanted.payload)
    second.work()
    assert second.copies(wanted) == ("cpu", "archive")  # promoted on the way
    second.node.check_integrity()


def test_nothing_goes_where_its_placement_does_not_allow(tmp_path: Path) -> None:
    node, wanted = node_of(tmp_path), sample(1, placement=Placement("cpu", (), "nvme"))
    node.store(wanted)
    node.node.sessions.demote(TENANT, SESSION)
    node.work()
    assert node.copies(wanted) == ("nvme",)


def test_records_do_not_name_it(tmp_path: Path) -> None:
    """So that a process without it can read them, and the numbers of the others stay."""
    TIERS.take_up(settings_of(tmp_path, after="cpu").more)
    with pytest.raises(ValueError, match="is none of cpu, nvme, s3"):
        Placement("archive", (), "s3")
    placed = Placement("nvme", ("cpu", "s3"), "s3")
    assert decode_header(sample(1, placement=placed).record).placement == replace(
        placed, write_behind=("cpu", "s3")
    )


def test_a_rotten_record_is_seen_and_put_aside(tmp_path: Path) -> None:
    wanted = demoted(tmp_path)
    with sqlite3.connect(tmp_path / "kv.db") as db:
        (data,) = db.execute("SELECT record FROM records").fetchone()
        db.execute("UPDATE records SET record = ?", (data[:-1] + bytes([data[-1] ^ 1]),))
    db.close()

    second = node_of(tmp_path, incarnation="second")
    with pytest.raises(BadRecord, match="as a replica sees it"):  # which takes the good blocks in front
        second.load(wanted)
    assert second.copies(wanted) == ()
    assert second.tiers["archive"].purge_quarantine(TENANT) == 1
    second.node.check_integrity()


def test_a_clear_reaches_it_and_is_written_down_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = demoted(tmp_path)
    second, written = node_of(tmp_path, incarnation="second"), list[str]()
    delete = SqliteTier.delete

    def late(made: SqliteTier, address: Address) -> None:
        written.append((tmp_path / "kv" / PENDING_FILE).read_text())
        delete(made, address)

    monkeypatch.setattr(SqliteTier, "delete", late)
    cleared = second.node.clear(Clear(TENANT))
    assert (cleared.extents, cleared.unreachable) == (1, ())
    assert [parse_json(text)["clears"] for text in written] == [[["archive", TENANT.hex(), None]]]
    assert (second.tiers_of(wanted), second.tiers["archive"].bytes_held()) == ([], 0)
    second.node.check_integrity()


@pytest.mark.parametrize("fault", [{"full_rate": 1.0}, {"flip_rate": 1.0}])
def test_its_faults_are_misses(tmp_path: Path, fault: dict[str, float]) -> None:
    """Also what a read-back finds: a medium that nothing is known of is not believed."""
    node = node_of(tmp_path, FaultSettings.model_validate(fault))
    wanted = sample(1)
    assert node.store(wanted) == "taken"
    node.node.sessions.demote(TENANT, SESSION)
    node.work()
    assert node.copies(wanted) == ("cpu",)
    assert np.array_equal(node.load(wanted), wanted.payload)
    node.node.check_integrity()


@pytest.mark.parametrize("is_known", [True, False])
def test_l14_a_returning_turn_is_the_same_from_it(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Also where replica and ingress are of settings without it: the tier actor outlives them."""
    if not is_known:
        for counter in (
            "samovar.replicas.engine.requests",
            "samovar.router.generation.answer",
            "samovar.router.generation.usage",
        ):
            monkeypatch.setattr(f"{counter}.sources", lambda: ("compute", "gpu", "peer"))
    settings = settings_of(tmp_path)
    made = media_of(tmp_path, settings).tiers["archive"]
    engine = tiered(tiny_llama, tmp_path, tiers={"archive": made})
    prompt = prompt_of(41, seed=1)
    again = [*prompt, *engine.run(prompt).ids, *prompt_of(21, seed=2)]
    engine.forget_pool()
    returned = engine.prefill(again, logprobs=5)
    same(
        returned,
        tiered(tiny_llama, tmp_path / "none", tiers={}, prefix_reuse=False).prefill(again, logprobs=5),
    )
    receipt = receipt_of(returned[0])
    assert receipt.tokens["archive"] == 41 + 8 - 1
    told = joined([(receipt, len(again), 48)], ["one"])
    usage = summed([TenantUsage(tokens=dict(told.tokens)), TenantUsage(tokens=dict(told.tokens))])
    assert (told.by_tier["archive"], usage.tokens["archive"]) == (48, 96)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"medium": "no_such_module:make"}, "No module named 'no_such_module'"),
        ({"medium": f"{__name__}:NoSuchName"}, "has no attribute 'NoSuchName'"),
        ({"options": {}}, "missing 1 required keyword-only argument: 'path'"),
        ({"medium": "builtins:dict", "options": {}}, "dict expected at most 1 argument"),
        ({"medium": f"{__name__}:misnamed"}, "made no tier named archive of this node alone"),
    ],
)
def test_a_medium_that_cannot_be_made_is_off_and_says_why(
    tmp_path: Path, more: dict[str, object], why: str
) -> None:
    media = media_of(tmp_path, settings_of(tmp_path, **more))
    assert list(media.tiers) == ["cpu", "nvme"]
    assert why in media.off["archive"]


@pytest.mark.guarantee("G12")
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["cannot be made", "would be plain"])
def test_a_medium_that_is_off_though_it_holds_records_is_left_of_a_clear(
    tmp_path: Path, is_encrypted: bool
) -> None:
    """It was done, and the records were found with the next start."""
    wanted = demoted(tmp_path)
    settings = settings_of(tmp_path) if is_encrypted else settings_of(tmp_path, options={})
    keys = key_file(tmp_path / "keys") if is_encrypted else None
    media = build_tiers(settings, tmp_path / "kv", make_cpu=HeapTier, wall_clock=lambda: 2000.0, keys=keys)
    ports = NodePorts(Clock(), lambda: 2000.0, records_of(StagingBuffer(MIB, keep_s=1.0)))
    second = TierNode(settings, media, NodeIdentity("node", "second"), ports, workers=0)
    second.start()
    cleared = second.clear(Clear(TENANT))
    assert (cleared.unreachable, cleared.is_noted) == (("archive",), False)
    second.close()

    third = node_of(tmp_path, incarnation="third")
    assert third.tiers_of(wanted) == ["archive"]
    assert third.node.clear(Clear(TENANT)).unreachable == ()
    assert third.tiers_of(wanted) == []
    third.node.close()


def misnamed(name: TierName, bytes_max: int, path: str) -> Tier:
    return SqliteTier("nvme", bytes_max, path=path)


@pytest.mark.parametrize("name", ["s3", "peer", "compute", "Archive", ""])
def test_names_that_mean_something_else_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        settings_of(tmp_path, name=name)
