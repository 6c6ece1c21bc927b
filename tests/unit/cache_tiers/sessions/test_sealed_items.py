"""Replies on disk where records are encrypted: sealed, each in its place, gone with their session's key."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks import SEALED_MAGIC, Clear
from samovar.cache_tiers.encryption import SessionSealer
from samovar.cache_tiers.encryption.keys import LeasedKeys, SessionKeyFile
from samovar.cache_tiers.sessions import Item, ItemBounds, ItemStore
from tests.support.clock import Clock
from tests.support.nodes.encrypted import key_file, outer_file

A, B = bytes([1]) * 16, bytes([2]) * 16
S, T = bytes([3]) * 8 + bytes(8), bytes([4]) * 8 + bytes(8)
MARKER = b"the eagle lands at noon: 0123456789abcde"


def item(
    name: str, *, tenant: bytes = A, session: bytes = S, body: bytes = MARKER, unix_s: float = 10.0
) -> Item:
    return Item(tenant, session, "reply", name.encode(), body, unix_s, unix_s + 100.0, is_durable=True)


def kept(folder: Path, keys: SessionKeyFile | None) -> ItemStore:
    sealer = None if keys is None else SessionSealer(LeasedKeys(keys, Clock()))
    path = folder / "replies.sqlite"
    return ItemStore(ItemBounds(1 << 20, 4, path), lambda tenant, session: 0.0, lambda: 20.0, sealer)


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.glob("replies.sqlite*"))


def bodies(store: ItemStore, tenant: bytes = A, session: bytes = S) -> list[bytes]:
    return [one.body for one in store.replies(tenant, session)]


def test_nothing_of_a_reply_is_readable_on_disk_and_it_is_there_after_a_restart(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys")
    store = kept(tmp_path, keys)
    assert store.put([item("r"), item("q", session=T, body=MARKER * 3)]) == 2
    assert bodies(store) == [MARKER]
    assert MARKER not in on_disk(tmp_path)
    assert SEALED_MAGIC in on_disk(tmp_path)
    store.close()
    again = kept(tmp_path, keys)
    assert again.replies(A, S) == [item("r")], "as it was, and not as it lies there"
    assert again.get(A, "reply", b"q") == item("q", session=T, body=MARKER * 3)
    assert bodies(again, T) == []
    again.check_integrity()
    again.close()


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE kept SET body = (SELECT body FROM kept WHERE name = x'72')",  # r's in q's place
        "UPDATE kept SET expires_unix_s = 1e12",
        "UPDATE kept SET unix_s = 11.0",
        "UPDATE kept SET name = x'73' WHERE name = x'72'",
        "UPDATE kept SET tenant = x'02020202020202020202020202020202'",
        "UPDATE kept SET body = substr(body, 1, length(body) - 1) || x'00'",
    ],
)
def test_a_row_that_was_changed_or_lies_in_anothers_place_is_not_used(tmp_path: Path, change: str) -> None:
    keys = key_file(tmp_path / "keys")
    store = kept(tmp_path, keys)
    store.put([item("r"), item("q", body=b"another")])
    store.close()
    with sqlite3.connect(tmp_path / "replies.sqlite") as db:
        db.execute(change)
    db.close()
    again = kept(tmp_path, keys)
    (r, q) = item("r"), item("q", body=b"another")
    for tenant in (A, B):
        for found in again.replies(tenant, S):
            assert found in (r, q)
    for name in (b"r", b"q", b"s"):
        found_one = again.get(A, "reply", name)
        assert found_one is None or found_one == {b"r": r, b"q": q}[name]
    assert len(bodies(again)) + len(bodies(again, B)) < 2
    again.close()


@pytest.mark.guarantee("G12")
def test_a_backup_of_an_erased_session_says_nothing(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys", now_s=15.0)
    store = kept(tmp_path, keys)
    store.put([item("r"), item("q", session=T)])
    store.close()
    backup = (tmp_path / "replies.sqlite").read_bytes()
    keys.destroy([Clear(A, S)])
    (tmp_path / "replies.sqlite").write_bytes(backup)
    again = kept(tmp_path, keys)
    assert bodies(again) == []
    assert bodies(again, A, T) == [MARKER]
    again.put([item("late", unix_s=14.0), item("since", unix_s=16.0)])
    assert len(bodies(again)) == 2, "in memory, where no clear has told otherwise"
    again.close()
    last = kept(tmp_path, keys)
    assert [one.name for one in last.replies(A, S)] == [b"since"], "what came before has no key, and no place"
    last.close()


def test_what_is_not_as_it_is_to_be_is_erased_at_the_start(tmp_path: Path) -> None:
    plain, keys = kept(tmp_path, None), key_file(tmp_path / "keys")
    plain.put([item("r")])
    assert MARKER in on_disk(tmp_path)
    plain.close()
    sealed = kept(tmp_path, keys)
    assert MARKER not in on_disk(tmp_path)
    assert bodies(sealed) == []
    sealed.put([item("r")])
    sealed.close()
    again = kept(tmp_path, None)
    assert bodies(again) == []
    assert SEALED_MAGIC not in on_disk(tmp_path)
    again.close()


def test_without_keys_nothing_is_written_and_what_is_there_is_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "keys"
    keys = key_file(folder)
    store = kept(tmp_path, keys)
    store.put([item("r")])
    store.close()
    (folder / "outer").unlink()
    away = kept(tmp_path, keys)
    assert away.put([item("q")]) == 1
    assert [one.name for one in away.replies(A, S)] == [b"q"], "one that is in memory only"
    assert "cannot be read" in caplog.text
    away.close()
    outer_file(folder)
    again = kept(tmp_path, keys)
    assert [one.name for one in again.replies(A, S)] == [b"r"]
    again.close()
