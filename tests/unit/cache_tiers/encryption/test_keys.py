"""Keys of sessions: random, wrapped twice, rotated from outside, destroyed for good."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks.extent import Clear
from samovar.cache_tiers.blocks.record import TierError
from samovar.cache_tiers.encryption.keys import (
    LEASE_S,
    SLOT_BYTES,
    LeasedKeys,
    SessionKeyFile,
)
from samovar.cache_tiers.encryption.outer import OuterKeys
from samovar.cache_tiers.encryption.tier import SessionKey
from tests.support.clock import Clock
from tests.support.nodes.encrypted import OTHER_OUTER, OUTER, key_file, outer_file
from tests.support.nodes.nvme_harness import SickCalls, fails

TENANT, OTHER = b"t" * 16, b"o" * 16


def session(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(8)


def test_a_session_keeps_its_key_and_no_two_have_the_same(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    made = {(tenant, n): keys.key_for(tenant, session(n)) for tenant in (TENANT, OTHER) for n in range(5)}
    assert len({key.secret for key in made.values()}) == len({key.key_id for key in made.values()}) == 10
    keys.check_integrity()
    keys.close()
    again = key_file(tmp_path)
    for (tenant, n), key in made.items():
        assert again.key_for(tenant, session(n)) == key
        assert again.find(tenant, session(n), key.key_id) == key
        assert again.find(tenant, session(n + 1), key.key_id) is None
    assert again.live() == {key.key_id for key in made.values()}
    on_disk = (tmp_path / "session-keys").read_bytes()
    assert not any(key.secret in on_disk for key in made.values())


def test_all_lineages_of_a_session_have_its_key(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    assert keys.key_for(TENANT, session(1)) == keys.key_for(TENANT, session(1)[:8] + b"lineage!")


def test_a_destroyed_key_is_nowhere_and_the_log_says_when(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    gone, stays, other = (
        keys.key_for(*who) for who in ((TENANT, session(1)), (TENANT, session(2)), (OTHER, session(1)))
    )
    before = (tmp_path / "session-keys").read_bytes()
    assert keys.destroy([Clear(TENANT, session(1))]) == 1
    after = (tmp_path / "session-keys").read_bytes()
    assert keys.find(TENANT, session(1), gone.key_id) is None
    assert gone.key_id not in keys.live()
    assert keys.key_for(TENANT, session(1)).secret != gone.secret
    keys.close()
    slots = [before[at : at + SLOT_BYTES] for at in range(0, len(before), SLOT_BYTES)]
    (doomed,) = [slot for slot in slots if gone.key_id in slot]
    assert doomed not in after
    assert doomed[-64:] not in after
    again = key_file(tmp_path)
    assert again.find(TENANT, session(1), gone.key_id) is None
    assert again.find(TENANT, session(2), stays.key_id) == stays
    assert again.find(OTHER, session(1), other.key_id) == other
    (line,) = map(json.loads, (tmp_path / "session-keys.log").read_text().splitlines())
    assert line == {
        "time": "2001-09-09T01:46:40.000+00:00",
        "destroyed": "session",
        "tenant": TENANT.hex(),
        "session": session(1).hex(),
        "keys": 1,
    }
    assert again.destroy([Clear(TENANT, session(9))]) == 0
    assert len((tmp_path / "session-keys.log").read_text().splitlines()) == 1


def test_a_tenant_goes_with_its_own_key(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    gone = [keys.key_for(TENANT, session(n)) for n in range(3)]
    stays = keys.key_for(OTHER, session(0))
    assert keys.destroy([Clear(TENANT)]) == 4
    assert keys.live() == {stays.key_id}
    keys.close()
    assert (tmp_path / "session-keys").read_bytes().count(TENANT) == 0
    again = key_file(tmp_path)
    assert all(again.find(TENANT, session(n), key.key_id) is None for n, key in enumerate(gone))


def test_a_disk_that_does_not_overwrite_is_no_erasure_and_is_asked_again(tmp_path: Path) -> None:
    calls = SickCalls()
    keys = key_file(tmp_path, calls=calls)
    key = keys.key_for(TENANT, session(1))
    for failing in (1, 2):  # the write, the flush
        calls.arm(fails(errno.EIO), failing)
        with pytest.raises(TierError, match="could not be destroyed yet"):
            keys.destroy([Clear(TENANT, session(1))])
        assert calls.heal()
        assert (tmp_path / "session-keys.log").exists() == (failing == 2)
        keys.check()  # any later call goes on with it
        assert keys.find(TENANT, session(1), key.key_id) is None
        key = keys.key_for(TENANT, session(1))
    keys.check_integrity()
    assert len((tmp_path / "session-keys.log").read_text().splitlines()) == 2


def test_rotation_wraps_tenants_anew_and_nothing_else(tmp_path: Path) -> None:
    keys = key_file(tmp_path, OUTER)
    made = [keys.key_for(TENANT, session(n)) for n in range(3)]
    before = (tmp_path / "session-keys").read_bytes()
    outer_file(tmp_path, OTHER_OUTER, OUTER)
    assert keys.find(TENANT, session(0), made[0].key_id) == made[0]  # without a restart
    after = (tmp_path / "session-keys").read_bytes()
    slots = [slice(at, at + SLOT_BYTES) for at in range(0, len(before), SLOT_BYTES)]
    assert len([at for at in slots if before[at] != after[at]]) == 1
    outer_file(tmp_path, OTHER_OUTER)
    keys.close()
    again = key_file(tmp_path)
    assert [again.find(TENANT, session(n), key.key_id) for n, key in enumerate(made)] == made


@pytest.mark.parametrize("failing", [1, 2])  # the write, the flush
def test_a_disk_that_fails_during_a_rotation_takes_no_key(tmp_path: Path, failing: int) -> None:
    calls = SickCalls()
    keys = key_file(tmp_path, OUTER, calls=calls)
    key = keys.key_for(TENANT, session(1))
    outer_file(tmp_path, OTHER_OUTER, OUTER)
    calls.arm(fails(errno.EIO), failing)
    with pytest.raises(TierError, match="cannot be wrapped again"):
        keys.find(TENANT, session(1), key.key_id)
    assert calls.heal()
    calls.arm(fails(errno.EIO), 99)
    assert keys.find(TENANT, session(1), key.key_id) == key
    assert calls.seen == ["pwrite", "fsync"], "after a failed flush only another write is flushed"
    keys.check_integrity()
    keys.close()
    outer_file(tmp_path, OTHER_OUTER)
    assert key_file(tmp_path).find(TENANT, session(1), key.key_id) == key


def test_another_outer_key_opens_nothing_and_destroys_nothing(tmp_path: Path) -> None:
    keys = key_file(tmp_path, OUTER)
    key = keys.key_for(TENANT, session(1))
    outer_file(tmp_path, OTHER_OUTER)
    assert keys.find(TENANT, session(1), key.key_id) is None
    assert key.key_id in keys.live()
    new = keys.key_for(TENANT, session(1))
    assert new.secret != key.secret
    outer_file(tmp_path, OUTER)  # the right one is back
    assert keys.find(TENANT, session(1), key.key_id) == key
    assert keys.destroy([Clear(TENANT, session(1))]) == 2  # whichever wraps it
    assert not keys.live()


def test_an_erasure_needs_no_outer_key(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    gone, stays = keys.key_for(TENANT, session(1)), keys.key_for(TENANT, session(2))
    keys.close()
    (tmp_path / "outer").unlink()
    again = SessionKeyFile(tmp_path / "session-keys", OuterKeys(tmp_path / "outer"), wall_clock=lambda: 1.0)
    assert again.destroy([Clear(TENANT, session(1))]) == 1
    with pytest.raises(TierError):
        again.find(TENANT, session(2), stays.key_id)
    outer_file(tmp_path)
    assert again.find(TENANT, session(2), stays.key_id) == stays
    assert again.live() == {stays.key_id} != {gone.key_id}
    again.check_integrity()


@pytest.mark.parametrize("text", ["", "0f\n", "0f" * 32 + "\nxx\n", "é" * 64])
def test_a_file_that_is_no_key_is_told(tmp_path: Path, text: str) -> None:
    outer = tmp_path / "outer"
    outer.write_text(text)
    with pytest.raises(TierError, match="encryption_key_file"):
        SessionKeyFile(tmp_path / "keys", OuterKeys(outer), wall_clock=lambda: 1.0).check()
    outer_file(tmp_path)
    outer.chmod(0o666)
    with pytest.raises(TierError, match="others may write"):
        OuterKeys(outer).refresh()


def test_one_process_has_the_file(tmp_path: Path) -> None:
    first, second = key_file(tmp_path), key_file(tmp_path)
    first.check()
    with pytest.raises(TierError, match="another process"):
        second.check()
    first.close()
    second.check()


def test_a_full_file_takes_the_key_unused_for_longest(tmp_path: Path) -> None:
    keys = key_file(tmp_path, slots_max=4)  # a tenant and three sessions
    made = [keys.key_for(TENANT, session(n)) for n in range(3)]
    assert keys.find(TENANT, session(0), made[0].key_id) == made[0]
    keys.key_for(TENANT, session(3))
    assert keys.find(TENANT, session(1), made[1].key_id) is None
    assert keys.find(TENANT, session(0), made[0].key_id) == made[0]
    keys.check_integrity()
    assert (tmp_path / "session-keys").stat().st_size == 4 * SLOT_BYTES


@pytest.mark.parametrize("bit", [0, 8 * 25, 8 * 37, 8 * 60, 8 * 100])
def test_a_slot_that_was_changed_opens_nothing(tmp_path: Path, bit: int) -> None:
    keys = key_file(tmp_path)
    key = keys.key_for(TENANT, session(1))
    keys.close()
    data = bytearray((tmp_path / "session-keys").read_bytes())
    data[SLOT_BYTES + bit // 8] ^= 1 << bit % 8
    (tmp_path / "session-keys").write_bytes(data)
    again = key_file(tmp_path)
    assert again.find(TENANT, session(1), key.key_id) is None
    assert again.key_for(TENANT, session(1)).secret != key.secret
    again.check_integrity()


class _Counted:
    """Keys that say how often they were asked."""

    def __init__(self, keys: SessionKeyFile) -> None:
        self.keys, self.asked = keys, 0
        self.live, self.destroy, self.check = keys.live, keys.destroy, keys.check

    def key_for(self, tenant: bytes, session: bytes) -> SessionKey:
        self.asked += 1
        return self.keys.key_for(tenant, session)

    def find(self, tenant: bytes, session: bytes, key_id: bytes) -> SessionKey | None:
        self.asked += 1
        return self.keys.find(tenant, session, key_id)


def test_a_lease_ends_and_an_erasure_ends_it_at_once(tmp_path: Path) -> None:
    clock, source = Clock(), _Counted(key_file(tmp_path))
    leased = LeasedKeys(source, clock)
    key = leased.key_for(TENANT, session(1))
    assert leased.find(TENANT, session(1), key.key_id) == leased.key_for(TENANT, session(1)) == key
    assert source.asked == 1
    clock.now_s += LEASE_S
    assert leased.key_for(TENANT, session(1)) == key
    assert source.asked == 2
    assert leased.destroy([Clear(TENANT, session(1))]) == 1
    assert leased.find(TENANT, session(1), key.key_id) is None
    new = leased.key_for(TENANT, session(1))
    assert new != key
    assert leased.find(TENANT, session(1), key.key_id) is None  # what is leased is another


def test_a_key_that_was_asked_for_during_an_erasure_is_not_kept(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    source = _Counted(keys)
    leased = LeasedKeys(source, Clock())

    def meanwhile(tenant: bytes, session: bytes) -> SessionKey:
        key = keys.key_for(tenant, session)
        leased.destroy([Clear(tenant, session)])
        return key

    source.key_for = meanwhile  # type: ignore[method-assign]
    key = leased.key_for(TENANT, session(1))
    assert leased.find(TENANT, session(1), key.key_id) is None
