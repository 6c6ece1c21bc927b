"""The shelf: bounded, fair to tenants, cleared, and the same after a restart."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from samovar.cache_tiers.sessions import Item, ItemBounds, ItemStore, Kind, NotErased
from samovar.cache_tiers.sessions.item_file import ItemFile
from samovar.cache_tiers.sessions.shelf import ITEM_OVERHEAD_BYTES, Shelf

A, B = bytes([1]) * 16, bytes([2]) * 16
S, T = bytes([3]) * 16, bytes([4]) * 16


def item(
    name: str,
    *,
    tenant: bytes = A,
    session: bytes = S,
    kind: Kind = "reply",
    body: bytes = b"body",
    unix_s: float = 10.0,
    lives_s: float = 100.0,
    is_durable: bool = True,
) -> Item:
    return Item(tenant, session, kind, name.encode(), body, unix_s, unix_s + lives_s, is_durable)


def names(items: list[Item]) -> list[str]:
    return [one.name.decode() for one in items]


def test_a_session_keeps_its_latest_replies() -> None:
    shelf = Shelf(1 << 20, replies_max=2)
    for number in range(4):
        shelf.put(item(f"r{number}"))
    assert names(shelf.replies(A, S, 20.0)) == ["r2", "r3"]
    assert not shelf.replies(B, S, 20.0)
    assert not shelf.replies(A, S, 110.0), "they have expired"
    shelf.check_integrity()


def test_the_tenant_with_most_gives_way_first() -> None:
    shelf = Shelf(5 * (ITEM_OVERHEAD_BYTES + 10), replies_max=9)
    shelf.put(item("small", tenant=B))
    gone = [lost for number in range(6) for lost in shelf.put(item(f"r{number}"))]
    assert names(gone) == ["r0", "r1"]
    assert shelf.get(B, "reply", b"small", 20.0) is not None
    assert names(shelf.put(item("huge", body=bytes(1 << 20)))) == ["huge"]


class Shelves(RuleBasedStateMachine):
    """Whatever comes, a shelf is bounded and consistent, and a clear leaves nothing of before."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(6 * ITEM_OVERHEAD_BYTES, 3)
        self.now_s = 0.0

    @rule(
        tenant=st.sampled_from([A, B]),
        session=st.sampled_from([S, T]),
        kind=st.sampled_from(["reply", "response"]),
        name=st.sampled_from("abcdef"),
        nbytes=st.integers(0, 3000),
    )
    def put(self, tenant: bytes, session: bytes, kind: Kind, name: str, nbytes: int) -> None:
        self.now_s += 1
        made = item(
            name, tenant=tenant, session=session, kind=kind, body=bytes(nbytes), unix_s=self.now_s, lives_s=8
        )
        gone = self.shelf.put(made)
        assert (self.shelf.get(tenant, kind, made.name, self.now_s) is made) != (made in gone)

    @rule(tenant=st.sampled_from([A, B]), session=st.sampled_from([S, T, None]))
    def clear(self, tenant: bytes, session: bytes | None) -> None:
        self.shelf.clear(tenant, session, self.now_s)
        for one in [S, T] if session is None else [session]:
            assert not self.shelf.replies(tenant, one, 0.0)

    @rule(tenant=st.sampled_from([A, B]), name=st.sampled_from("abcdef"))
    def delete(self, tenant: bytes, name: str) -> None:
        self.shelf.delete(tenant, "reply", name.encode())
        assert self.shelf.get(tenant, "reply", name.encode(), self.now_s) is None

    @rule()
    def expire(self) -> None:
        assert all(one.expires_unix_s <= self.now_s for one in self.shelf.expire(self.now_s))

    @invariant()
    def is_consistent(self) -> None:
        self.shelf.check_integrity()


TestShelves = Shelves.TestCase


def kept(path: Path | None, cleared_s: float = 0.0, now_s: float = 20.0) -> ItemStore:
    return ItemStore(ItemBounds(1 << 20, 4, path), lambda tenant, session: cleared_s, lambda: now_s)


def test_what_may_be_on_disk_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "kv" / "replies.sqlite"
    shelf = kept(path)
    told = [item("on disk"), item("in memory", is_durable=False), item("brief", lives_s=15)]
    assert shelf.put(told) == 3
    shelf.close()
    assert path.stat().st_mode & 0o077 == 0, "readable by others"
    again = kept(path, now_s=30.0)
    assert names(again.replies(A, S)) == ["on disk"]
    again.close()


def test_what_was_cleared_is_in_no_byte_of_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "replies.sqlite"
    shelf = kept(path)
    shelf.put([item("mine", body=b"a secret of S"), item("other", session=T, body=b"another of T")])
    assert shelf.clear(A, S, 15.0) == 1
    on_disk = b"".join(one.read_bytes() for one in tmp_path.iterdir())
    assert b"a secret of S" not in on_disk
    assert b"another of T" in on_disk
    assert names(kept(path).replies(A, T)) == ["other"]
    shelf.close()


def test_a_clear_also_covers_what_only_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "replies.sqlite"
    shelf = kept(path)
    shelf.put([item("mine")])
    shelf.close()
    blind = ItemStore(ItemBounds(0, 4, path), lambda tenant, session: 0.0, lambda: 20.0)
    assert not blind.replies(A, S)
    blind.clear(A, None, 15.0)
    assert not kept(path).replies(A, S)


def test_what_comes_after_its_clear_is_not_kept() -> None:
    shelf = kept(None, cleared_s=10.0)
    assert shelf.put([item("late", unix_s=10.0)]) == 0
    assert shelf.put([item("new", unix_s=10.5)]) == 1


def test_a_file_that_cannot_be_written_costs_the_file_only_and_a_clear_says_so(tmp_path: Path) -> None:
    path = tmp_path / "replies.sqlite"
    path.write_bytes(b"this is no database, but long enough to be looked at as one" * 20)
    shelf = kept(path)
    assert shelf.put([item("r")]) == 1
    assert names(shelf.replies(A, S)) == ["r"]
    with pytest.raises(NotErased):
        shelf.clear(A, S, 15.0)
    assert not shelf.replies(A, S)


def test_a_file_of_another_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "replies.sqlite"
    with sqlite3.connect(path) as base:
        base.execute("PRAGMA user_version = 99")
    base.close()
    with pytest.raises(sqlite3.DatabaseError, match="version"):
        ItemFile(path)
