"""What outlives a process, in each format that this code reads: small fixtures, in `tests/fixtures`.

`python -m tests.support.formats` writes those of today that are missing, and never one that is there. Those
of former formats (2026-11-28) were written by the last commit that wrote each: records 1 and 2 by 9bc1b67e
and 01cf15f6; predictors 2, 3 and 4 by 0a6a44b2, 4aa5ba95 and d3e98d86; the first format of knowledge,
documents and summaries by cf28b175, 052ceff8 and the parent of e11e4bb4.

What is encrypted opens by the keys in the fixture `session_keys`, which the tests' own outer key wraps
(`tests/support/nodes/encrypted.py` `OUTER`).
"""

from __future__ import annotations

import base64
import gzip
import json
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load as load_tensors

from samovar.cache_tiers.blocks import SEALED_MAGIC, SEALED_TEXT
from samovar.cache_tiers.blocks import record as records
from samovar.cache_tiers.blocks.extent import Address, Clear
from samovar.cache_tiers.encryption import tier as encryption
from samovar.cache_tiers.encryption.keys import SLOT_BYTES, SessionKeyFile
from samovar.cache_tiers.encryption.sealer import as_text, seal_row
from samovar.cache_tiers.forecast import learner
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.node import state
from samovar.cache_tiers.node.state import PendingDeletes
from samovar.cache_tiers.recording import VERSION as TRACE_VERSION
from samovar.cache_tiers.recording import RecordedTurn, TurnRecorder
from samovar.cache_tiers.sessions import item_file
from samovar.cache_tiers.sessions.item_file import ItemFile
from samovar.cache_tiers.sessions.shelf import Item
from samovar.configs.sections import MIB, PredictorSettings
from samovar.router.context.compaction import summaries
from samovar.router.context.compaction.compose import Summary
from samovar.router.context.compaction.summaries import SummaryStore
from samovar.router.context.documents import store as documents
from samovar.router.context.documents.document import Document, Quota
from samovar.router.context.documents.store import DocumentStore
from samovar.router.context.knowledge import sqlite_schema
from samovar.router.identities.key_file import KeyFile
from tests.house import ROOT
from tests.support.nodes.encrypted import key_file
from tests.support.nodes.node_harness import SESSION, TENANT, sample
from tests.support.router.knowledge_desks import SqliteDesk
from tests.support.turn_streams import Rule, stream

FOLDER = ROOT / "tests" / "fixtures"
FIXTURE_BYTES_MAX = 40 * 1024
ADDRESS = Address(TENANT, b"n" * 32, b"e" * 32)
LINK = b"l" * 32
TURNS = 100
ROW, SAID = b"the name of a row", b"they spoke of tea"


@dataclass(frozen=True)
class Format:
    """One kind of file. `current`: the version that is written; `readable`: those that are read.

    `make`: writes one of today to a path. `layout`: what of the bytes is the format's, and not of one file.
    """

    name: str
    current: int
    readable: tuple[int, ...]
    make: Callable[[Path], None]
    layout: Callable[[bytes], Any]

    def fixture(self, version: int) -> Path:
        return FOLDER / f"{self.name}-{version}.gz"

    def made(self) -> bytes:
        """The bytes of one of today."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "data" / self.name
            path.parent.mkdir(mode=0o700)
            self.make(path)
            return path.read_bytes()


def _record(path: Path) -> None:
    path.write_bytes(sample(7).record.tobytes())


def _predictor(path: Path) -> None:
    predictor = Predictor(PredictorSettings())
    for count, (turn, _) in enumerate(stream(Rule(), seed=1, end_s=120.0)):
        if count == TURNS:
            break
        predictor.arrived(turn.session, turn.started_s)
        predictor.ended(turn)
    path.write_bytes(learner.encode(predictor))


def _session_keys(path: Path) -> None:
    made = key_file(path.parent)
    made.key_for(TENANT, SESSION)
    made.close()
    (path.parent / "session-keys").rename(path)


@contextmanager
def kept_keys(folder: Path) -> Iterator[SessionKeyFile]:
    """The keys of the fixture, and the operator's, in `folder`."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "session-keys").write_bytes(gzip.decompress(KEYS_FIXTURE.read_bytes()))
    keys = key_file(folder)
    try:
        yield keys
    finally:
        keys.close()


def _encrypted(path: Path) -> None:
    wanted = sample(7)
    with kept_keys(path.parent / "keys") as keys:
        key = keys.key_for(TENANT, SESSION)
    path.write_bytes(encryption.encrypt(wanted.record, encryption.geometry_of(wanted.header), key).tobytes())


def _sealed(path: Path) -> None:
    with kept_keys(path.parent / "keys") as keys:
        path.write_text(as_text(seal_row(keys.key_for(TENANT, SESSION), ROW, SAID)))


def _deletes(path: Path) -> None:
    made = PendingDeletes(path, 100)
    made.add("nvme", ADDRESS, cleared=True)
    made.add_clear("s3", Clear(TENANT, SESSION))
    made.add_clear("nvme", Clear(TENANT, None))
    assert made.save(made.text())


def _items(path: Path) -> None:
    made = ItemFile(path)
    for kind in item_file.KINDS.values():
        made.put(Item(TENANT, SESSION, kind, b"name", b"body", 1000.0, 2e10, is_durable=True))
    made.close()
    _whole(path)


def _trace(path: Path) -> None:
    made = TurnRecorder(path, 16, MIB)
    made.turn(RecordedTurn("s", 1.0, 2.0, 40, 5, 32, [b"a" * 32, b"b" * 32], tool="run", lineage=1))
    made.close()


def _keys(path: Path) -> None:
    made = KeyFile(path, clock=lambda: 1_000_000.0)
    made.create("tea", lasts_s=3600)
    made.revoke(made.create(None)[0].id)


def _knowledge(path: Path) -> None:
    desk = SqliteDesk(path)
    ref = desk.add("orders are in euro")
    desk.change(ref.entry, "orders are in cents", base=1)
    desk.store.close()
    _whole(path)


def _documents(path: Path) -> None:
    desk = SqliteDesk(path.with_name("knowledge"))
    store = DocumentStore(desk.store.beside(path.name, documents.SCHEMAS))
    one = Document("doc_1", "tea", "Manual", "text", "processing", "auto", 4, 1000.0)
    store.add(one, b"text", Quota(9, MIB))
    store.put_text("tea", "doc_1", "tëxt", Quota(9, MIB))
    store.close()
    desk.store.close()
    _whole(path)


def _summaries(path: Path) -> None:
    made = open_summaries(path)
    made.put(("tea", SESSION), LINK, Summary(2, "they spoke of tea", ()))
    made.close()
    _whole(path)


def open_summaries(path: Path) -> SummaryStore:
    return SummaryStore(path, of_session_max=4, rows_max=9, busy_s=1.0, wall_clock=lambda: 1000.0)


def _whole(path: Path) -> None:
    """Bring what is in the journal into the file."""
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("VACUUM")
    db.close()


def _head_of(data: bytes) -> Any:
    return data[: records.header_bytes(3, 2)]


def _envelope_of(data: bytes) -> Any:
    """All in front of the blocks but the key's id, random bytes and the tag."""
    head = encryption.ENVELOPE_BYTES + records.header_bytes(3, 2)
    return data[:16], data[72:head], len(data)


def _slots(data: bytes) -> Any:
    """Of each slot its kind, tenant and session."""
    return [data[at : at + 36] for at in range(0, len(data), SLOT_BYTES)]


def _seal(data: bytes) -> Any:
    text = data.decode()
    sealed = base64.b64decode(text.removeprefix(SEALED_TEXT))
    return text.startswith(SEALED_TEXT), sealed.startswith(SEALED_MAGIC), len(sealed)


def _arrays(data: bytes) -> Any:
    payload = load_tensors(data[52:])
    return {name: (str(one.dtype), one.shape[1:]) for name, one in payload.items()}


def _tables(data: bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        db = sqlite3.connect(path)
        found = db.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
        version = db.execute("PRAGMA user_version").fetchone()
        db.close()
    return version, [row for row in found if "words" not in row[1]]  # of a tenant, named by its number


def _names(data: bytes) -> Any:
    return _shape(json.loads(data))


def _lines(data: bytes) -> Any:
    return [_shape(json.loads(line)) for line in data.splitlines()]


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shape(one) for name, one in value.items()}
    return [_shape(one) for one in value] if isinstance(value, list) else type(value).__name__


def _upto(current: int) -> tuple[int, ...]:
    return tuple(range(1, current + 1))


FORMATS = (
    Format("record", records.VERSION, records.READABLE, _record, _head_of),
    Format("session_keys", 1, (1,), _session_keys, _slots),
    Format("encrypted", encryption.VERSION, (encryption.VERSION,), _encrypted, _envelope_of),
    Format("sealed", 1, (1,), _sealed, _seal),
    Format("predictor", learner.VERSION, learner.READABLE, _predictor, _arrays),
    Format("deletes", state.VERSION, (state.VERSION,), _deletes, _names),
    Format("items", item_file.VERSION, (item_file.VERSION,), _items, _tables),
    Format("trace", TRACE_VERSION, (TRACE_VERSION,), _trace, _lines),
    Format("keys", 1, (1,), _keys, _names),
    Format(
        "knowledge",
        len(sqlite_schema.SCHEMAS),
        _upto(len(sqlite_schema.SCHEMAS)),
        _knowledge,
        _tables,
    ),
    Format("documents", len(documents.SCHEMAS), _upto(len(documents.SCHEMAS)), _documents, _tables),
    Format("summaries", len(summaries.SCHEMAS), _upto(len(summaries.SCHEMAS)), _summaries, _tables),
)


KEYS_FIXTURE = next(one for one in FORMATS if one.name == "session_keys").fixture(1)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for one in FORMATS:
        path = one.fixture(one.current)
        if not path.exists():
            path.write_bytes(gzip.compress(one.made(), 9, mtime=0))
            print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
