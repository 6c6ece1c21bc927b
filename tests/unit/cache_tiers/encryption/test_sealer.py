"""Rows that only a key opens, each in its own place, and keys of tenants that lie with what they open."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks import SEALED_TEXT, Clear, TierError
from samovar.cache_tiers.encryption import (
    BadSeal,
    OuterKeys,
    OuterWrapper,
    SessionSealer,
    Unwrapped,
    as_text,
    key_id_of,
    of_text,
    open_row,
    random_key,
    row_name,
    seal_row,
)
from samovar.cache_tiers.encryption.keys import LeasedKeys
from samovar.cache_tiers.encryption.sealer import SEALED_BYTES
from tests.support.clock import Clock
from tests.support.nodes.encrypted import OTHER_OUTER, OUTER, key_file, outer_file

TENANT, SESSION, OTHER = b"t" * 16, b"s" * 8 + bytes(8), b"o" * 8 + bytes(8)
KEY = random_key()


def test_a_row_says_what_it_said_and_every_changed_byte_is_seen() -> None:
    name = row_name("reply", b"n")
    sealed = seal_row(KEY, name, b"the eagle lands at noon")
    assert open_row(KEY, name, sealed) == b"the eagle lands at noon"
    assert len(sealed) == SEALED_BYTES + 23
    assert key_id_of(sealed) == KEY.key_id
    for at in range(8, len(sealed)):  # in front of it is what tells it from a plain one
        changed = bytearray(sealed)
        changed[at] ^= 1
        with pytest.raises(BadSeal):
            open_row(KEY, name, bytes(changed))
    with pytest.raises(BadSeal):
        open_row(random_key(), name, sealed)
    assert key_id_of(b"plain") is key_id_of(sealed[:20]) is None


def test_no_row_opens_in_the_place_of_another() -> None:
    parts: list[tuple[str | bytes | float | None, ...]] = [
        ("ab", "c"), ("a", "bc"), ("abc",), (b"abc",), ("a", b"bc"), (1,), ("1",), (1.0,), (None,), ("None",)
    ]  # fmt: skip
    names = [row_name(*one) for one in parts]
    assert len(set(names)) == len(names)
    for mine, others in combinations(names, 2):
        sealed = seal_row(KEY, mine, b"x")
        with pytest.raises(BadSeal):
            open_row(KEY, others, sealed)


def test_no_two_rows_are_alike() -> None:
    sealed = {seal_row(KEY, b"n", b"the same text, twice") for _ in range(50)}
    assert len({one[-36:] for one in sealed}) == 50, "one key stream for two texts"


def test_a_column_of_text_holds_a_row() -> None:
    sealed = seal_row(KEY, b"n", "текст".encode())
    assert as_text(sealed).startswith(SEALED_TEXT)
    assert of_text(as_text(sealed)) == sealed
    assert of_text("a text as people write it") is None
    with pytest.raises(BadSeal):
        of_text(SEALED_TEXT + "*")


def test_what_a_session_left_goes_with_its_key_and_the_next_one_does_not_take_it_over(tmp_path: Path) -> None:
    keys, clock = key_file(tmp_path, now_s=50.0), Clock()
    sealer, other = (SessionSealer(LeasedKeys(keys, clock)) for _ in range(2))
    sealed = sealer.seal(TENANT, SESSION, 1.0, b"n", b"said")
    stays = sealer.seal(TENANT, OTHER, 1.0, b"n", b"said by another")
    assert sealed is not None
    assert stays is not None
    assert other.open(TENANT, SESSION, b"n", sealed) == b"said"
    assert sealer.open(TENANT, OTHER, b"n", sealed) is None, "under another session's name"
    with pytest.raises(BadSeal):
        sealer.open(TENANT, SESSION, b"another row", sealed)
    keys.destroy([Clear(TENANT, SESSION)])
    sealer.forget(TENANT, SESSION)
    assert sealer.open(TENANT, SESSION, b"n", sealed) is None
    assert other.open(TENANT, SESSION, b"n", sealed) == b"said", "it was not told, and has a lease"
    clock.now_s += 61.0
    assert other.open(TENANT, SESSION, b"n", sealed) is None
    assert sealer.open(TENANT, OTHER, b"n", stays) == b"said by another"
    assert sealer.seal(TENANT, SESSION, 49.0, b"n", b"late") is None, "it is from before the erasure"
    after = sealer.seal(TENANT, SESSION, 51.0, b"n", b"since")
    assert after is not None
    assert sealer.open(TENANT, SESSION, b"n", sealed) is None
    assert sealer.open(TENANT, SESSION, b"n", after) == b"since"


def test_a_tenants_key_is_opened_by_what_wrapped_it_and_said_to_be_an_older_ones(tmp_path: Path) -> None:
    path = outer_file(tmp_path)
    wrapper = OuterWrapper(OuterKeys(path))
    wrapped, proof = wrapper.wrap(b"name", b"secret" * 5)
    assert proof == b""
    found = wrapper.unwrap(b"name", wrapped, proof)
    assert found == Unwrapped(b"secret" * 5, is_current=True)
    with pytest.raises(TierError, match="changed"):
        wrapper.unwrap(b"another", wrapped, proof)
    outer_file(tmp_path, OTHER_OUTER, OUTER)
    found = wrapper.unwrap(b"name", wrapped, proof)
    assert found == Unwrapped(b"secret" * 5, is_current=False)
    outer_file(tmp_path, OTHER_OUTER)
    assert wrapper.unwrap(b"name", wrapped, proof) is None
