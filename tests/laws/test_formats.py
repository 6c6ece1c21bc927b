"""What a process leaves behind is read by later ones: a fixture of each format that is, or was, written.

A format that changes needs another version, and that one a fixture: `python -m tests.support.formats`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samovar.cache_tiers.blocks import record as records
from samovar.cache_tiers.blocks.extent import Clear
from samovar.cache_tiers.encryption.sealer import BadSeal, key_id_of, of_text, open_row
from samovar.cache_tiers.encryption.tier import EncryptedTier, decode_front
from samovar.cache_tiers.forecast.learner import restore
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.media.tier import Deadline
from samovar.cache_tiers.node.state import PendingDeletes
from samovar.cache_tiers.recording import read_header, read_row
from samovar.cache_tiers.sessions import item_file
from samovar.cache_tiers.sessions.item_file import ItemFile
from samovar.configs.sections import PredictorSettings
from samovar.router.context.compaction.compose import Summary
from samovar.router.context.documents import store as documents
from samovar.router.context.documents.store import DocumentStore
from samovar.router.identities.key_file import KeyFile
from tests.house import ROOT
from tests.support.formats import (
    ADDRESS,
    FIXTURE_BYTES_MAX,
    FOLDER,
    FORMATS,
    LINK,
    ROW,
    SAID,
    Format,
    kept_keys,
    open_summaries,
)
from tests.support.nodes.node_harness import SESSION, TENANT, sample
from tests.support.nodes.nvme_harness import Sealed, check, check_as_replica, open_tier, path_of, read_all
from tests.support.router.knowledge_desks import SqliteDesk

OWNER_ONLY = 0o600
EVERY = [
    pytest.param(one, version, id=f"{one.name}-{version}") for one in FORMATS for version in one.readable
]


def _record(path: Path, version: int) -> None:
    """As the nvme tier of a former version has left it in its directory."""
    data, wanted = np.frombuffer(path.read_bytes(), np.uint8), sample(7)
    header = records.decode_header(data, record_bytes=len(data))
    assert header.version == version
    tier = open_tier(path.parent / "kv")
    place = path_of(tier, header.address)
    tier.close()
    place.parent.mkdir(parents=True)
    place.write_bytes(path.read_bytes())
    again = open_tier(path.parent / "kv")
    ((found, nbytes),) = [(one.header.address, one.nbytes) for one in again.scan()]
    assert (found, nbytes) == (wanted.header.address, len(data))
    sealed = Sealed(wanted.header, records.Record(wanted.record))
    came = read_all(again, sealed)
    check_as_replica(sealed, came)  # each block's checksum among it
    assert came[-len(wanted.payload) :].tobytes() == wanted.payload.tobytes()
    check(again)
    again.close()


def _session_keys(path: Path, version: int) -> None:
    with kept_keys(path.parent / "keys") as keys:
        before = keys.live()
        key = keys.key_for(TENANT, SESSION)
        assert {key.key_id} == before == keys.live(), "another key was made: the one that is there opens not"
        assert keys.find(TENANT, SESSION, key.key_id) == key
        keys.check_integrity()


def _encrypted(path: Path, version: int) -> None:
    """As the nvme tier of a former version has left it in its directory, with the file of keys."""
    data, wanted = np.frombuffer(path.read_bytes(), np.uint8), sample(7)
    header = decode_front(data, record_bytes=len(data))
    assert header.address == wanted.header.address
    with kept_keys(path.parent / "keys") as keys:
        inner = open_tier(path.parent / "kv")
        place = path_of(inner, header.address)
        place.parent.mkdir(parents=True)
        place.write_bytes(path.read_bytes())
        tier = EncryptedTier(inner, keys)
        (found,) = tier.scan()
        assert (found.header.address, found.nbytes) == (wanted.header.address, wanted.record.nbytes)
        came = tier.read(header.address, 0, found.nbytes, deadline=Deadline(60.0))
        assert np.array_equal(came, wanted.record)
        tier.close()


def _sealed(path: Path, version: int) -> None:
    sealed = of_text(path.read_text())
    assert sealed is not None
    with kept_keys(path.parent / "keys") as keys:
        key = keys.find(TENANT, SESSION, key_id_of(sealed) or b"")
        assert key is not None
        assert open_row(key, ROW, sealed) == SAID
        with pytest.raises(BadSeal):
            open_row(key, ROW + b"?", sealed)


def _predictor(path: Path, version: int) -> None:
    predictor = Predictor(PredictorSettings())
    assert restore(path, predictor) is None
    predictor.check_integrity()
    assert predictor.counts.counts.sum() > 0, "nothing of what was learned came back"


def _deletes(path: Path, version: int) -> None:
    found = PendingDeletes(path, 100)
    assert not found.read_failed
    assert found.of("nvme") == [ADDRESS]
    assert [clear for clear, _ in found.clears_of("s3")] == [Clear(TENANT, SESSION)]
    assert [clear for clear, _ in found.clears_of("nvme")] == [Clear(TENANT, None)]


def _items(path: Path, version: int) -> None:
    file = ItemFile(path)
    found = file.load(2000.0)
    assert [one.kind for one in found] == list(item_file.KINDS.values())
    assert {(one.tenant, one.session, one.name, one.body) for one in found} == {
        (TENANT, SESSION, b"name", b"body")
    }
    file.close()


def _trace(path: Path, version: int) -> None:
    head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert read_header(head) == 16
    first, end = (read_row(row, 16) for row in rows)
    assert first is not None
    assert (first.input_tokens, first.output_tokens, first.kept_tokens, first.lineage) == (40, 5, 32, 1)
    assert len(first.blocks) == 2
    assert end is None


def _keys(path: Path, version: int) -> None:
    tea, admin = KeyFile(path).read()
    assert (tea.tenant, tea.state(1_000_100.0), tea.state(1_003_600.0)) == ("tea", "valid", "expired")
    assert (admin.tenant, admin.state(1_000_100.0)) == (None, "revoked")


def _knowledge(path: Path, version: int) -> None:
    desk = SqliteDesk(path)
    (entry,) = desk.found("cents")
    assert [one.content.text for one in desk.store.history("tea", entry)] == [
        "orders are in euro",
        "orders are in cents",
    ]
    desk.add("and what is added is found")
    assert desk.found("added")
    desk.store.check_integrity()
    desk.store.close()


def _documents(path: Path, version: int) -> None:
    desk = SqliteDesk(path.with_name("knowledge"))
    store = DocumentStore(desk.store.beside(path.name, documents.SCHEMAS))
    (one,) = store.all("tea", 9)
    assert (one.title, one.text_bytes, store.text("tea", one.id)) == ("Manual", 5, "tëxt")
    store.close()
    desk.store.close()


def _summaries(path: Path, version: int) -> None:
    store = open_summaries(path)
    found = store.latest(("tea", SESSION), [b"", b"", LINK, b"", b""])
    assert found == Summary(2, "they spoke of tea", ())
    store.close()


READ: dict[str, Callable[[Path, int], None]] = {
    "record": _record,
    "session_keys": _session_keys,
    "encrypted": _encrypted,
    "sealed": _sealed,
    "predictor": _predictor,
    "deletes": _deletes,
    "items": _items,
    "trace": _trace,
    "keys": _keys,
    "knowledge": _knowledge,
    "documents": _documents,
    "summaries": _summaries,
}


@pytest.fixture
def left_behind(tmp_path: Path) -> Callable[[Path], Path]:
    """Unpacks a fixture into a directory of its own."""

    def unpacked(fixture: Path) -> Path:
        path = tmp_path / "data" / fixture.stem
        path.parent.mkdir(mode=0o700)
        path.write_bytes(gzip.decompress(fixture.read_bytes()))
        path.chmod(OWNER_ONLY)
        return path

    return unpacked


@pytest.mark.parametrize(("one", "version"), EVERY)
def test_what_a_former_version_left_is_read(one: Format, version: int, left_behind: Any) -> None:
    fixture = one.fixture(version)
    assert fixture.exists(), f"{fixture.name} is missing: `python -m tests.support.formats` makes it"
    assert fixture.stat().st_size <= FIXTURE_BYTES_MAX
    READ[one.name](left_behind(fixture), version)


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
def test_a_format_does_not_change_under_its_version(one: Format) -> None:
    kept = gzip.decompress(one.fixture(one.current).read_bytes())
    assert one.layout(one.made()) == one.layout(kept), (
        f"what is written differs from the fixture of version {one.current}: give it another version, read "
        "this one, too, and run `python -m tests.support.formats`"
    )


def test_each_fixture_is_of_a_format_that_is_read() -> None:
    known = {one.fixture(version).name for one in FORMATS for version in one.readable}
    assert {path.name for path in FOLDER.iterdir()} == known
    assert all(max(one.readable) == one.current for one in FORMATS)


def test_the_page_names_each_format_and_its_versions() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| [^|]+ \| `(\w+)` \| ([0-9, ]+) \|", page, re.MULTILINE))
    assert {name: [int(one) for one in found.split(",")] for name, found in rows.items()} == {
        one.name: sorted(one.readable, reverse=True) for one in FORMATS
    }
