"""The file of API keys: digests only, changed as a whole by one at a time, followed by who reads it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from pathlib import Path

import pytest

from samovar.configs.settings import AuthSettings
from samovar.router import identities as wing
from samovar.router.auth import Authenticator, Caller
from samovar.router.identities import FollowedKeys, KeyFile, KeysRefused
from samovar.router.openai import AuthenticationFailed, Unavailable
from tests.support.clock import Clock

DAY_S = 86400


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000 * DAY_S)


@pytest.fixture
def file(tmp_path: Path, clock: Clock) -> KeyFile:
    return KeyFile(tmp_path / "keys" / "keys.json", clock)


def test_a_key_is_kept_as_a_digest_by_its_owner_alone(file: KeyFile) -> None:
    before = os.umask(0o000)
    try:
        record, key = file.create("kitchen")
    finally:
        os.umask(before)
    text = file.path.read_text()
    assert key.startswith("smv-")
    assert len(key) == 47
    assert key[12:] not in text
    assert hashlib.sha256(key.encode()).hexdigest() in text
    assert record.shown == key[:12]
    assert "sha256" not in record.told(0.0)
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700
    assert not list(file.path.parent.glob("*.tmp"))


def test_keys_end_by_time_by_hand_and_by_another(file: KeyFile, clock: Clock) -> None:
    first, _ = file.create("kitchen", DAY_S)
    second, _ = file.create(None)
    assert [key.state(clock()) for key in file.read()] == ["valid", "valid"]
    clock.now_s += 10
    third, _ = file.rotate(first.id, 3600)
    assert third.tenant == "kitchen"
    assert third.expires == clock() + DAY_S
    assert file.read()[0].expires == clock() + 3600
    clock.now_s += 3600
    assert file.revoke(second.id).revoked == int(clock())
    clock.now_s += 5
    assert file.revoke(second.id).revoked == int(clock()) - 5, "it keeps when it ended"
    assert [key.state(clock()) for key in file.read()] == ["expired", "revoked", "valid"]
    with pytest.raises(KeysRefused, match="is revoked"):
        file.rotate(second.id, 1)
    with pytest.raises(KeysRefused, match="key_nothing"):
        file.revoke("key_nothing")


def test_rotation_does_not_let_a_key_live_longer(file: KeyFile, clock: Clock) -> None:
    first, _ = file.create("kitchen", 60)
    file.rotate(first.id, DAY_S)
    assert file.read()[0].expires == clock() + 60


def test_what_has_long_ended_leaves_the_file(file: KeyFile, clock: Clock) -> None:
    old, _ = file.create("kitchen", 60)
    kept, _ = file.create("garden")
    clock.now_s += 90 * DAY_S
    assert [key.id for key in file.read()] == [old.id, kept.id]
    clock.now_s += 61
    new, _ = file.create("garden")
    assert [key.id for key in file.read()] == [kept.id, new.id]


def test_writers_take_turns(file: KeyFile) -> None:
    made: list[str] = []
    threads = [threading.Thread(target=lambda: made.append(file.create("kitchen")[0].id)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.id for key in file.read()) == sorted(made)


def test_a_lock_that_is_not_given_back_is_named(file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.create("kitchen")
    monkeypatch.setattr("samovar.router.identities.key_file.LOCK_S", 0.05)
    held = os.open(f"{file.path}.lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(OSError, match=r"keys\.json\.lock"):
        file.create("kitchen")
    os.close(held)
    assert len(file.read()) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "no JSON"),
        ("{}", "version"),
        ('{"version": 2, "keys": []}', "version"),
        ('{"version": 1, "keys": [{"id": "key_0"}]}', r"keys\.0\.id"),
        (" " * (8 << 20) + "{}", "larger than"),
    ],
)
def test_what_is_no_file_of_keys_is_refused(file: KeyFile, text: str, why: str) -> None:
    file.create("kitchen")
    file.path.write_text(text)
    with pytest.raises(KeysRefused, match=why):
        file.read()
    with pytest.raises(KeysRefused, match=why):
        file.create("kitchen")
    assert file.path.read_text() == text, "nothing is written over what is not understood"


def test_a_file_that_others_may_write_is_refused(file: KeyFile) -> None:
    file.create("kitchen")
    file.path.chmod(0o644)
    assert len(file.read()) == 1
    file.path.chmod(0o660)
    with pytest.raises(KeysRefused, match="others may write"):
        file.read()
    file.path.unlink()
    os.mkfifo(file.path, 0o600)
    with pytest.raises(KeysRefused, match="is not a file"):
        file.read()


def asks(who: Authenticator, key: str, path: str = "/v1/models") -> Caller | None:
    headers = [(b"authorization", b"Bearer " + key.encode())]
    return who.caller({"type": "http", "path": path, "method": "GET", "headers": headers})


def test_a_running_service_follows_the_file(
    file: KeyFile, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    record, key = file.create("kitchen", DAY_S)
    followed = FollowedKeys(file, 1.0, clock)
    who = Authenticator(AuthSettings(keys_file=file.path), others=followed)
    found = asks(who, key)
    assert found == Caller("kitchen")
    assert found is not None
    assert found.credential == record.id
    admin_record, admin_key = file.create(None)
    with pytest.raises(AuthenticationFailed):
        asks(who, admin_key)
    followed.look()
    assert asks(who, admin_key) == Caller(None, is_admin=True)
    assert followed.tenants == ("kitchen",)
    with pytest.raises(AuthenticationFailed, match="not valid"):
        asks(who, key[:-1])
    with pytest.raises(AuthenticationFailed, match="not valid"):
        asks(who, hashlib.sha256(key.encode()).hexdigest())  # what the file holds is no key
    file.revoke(admin_record.id)
    followed.look()
    with pytest.raises(AuthenticationFailed, match="revoked"):
        asks(who, admin_key)
    clock.now_s += DAY_S
    with pytest.raises(AuthenticationFailed, match="expired"):
        asks(who, key)
    assert caplog.messages == []


def test_keys_of_settings_and_of_the_file_are_one_list(file: KeyFile, clock: Clock) -> None:
    _, key = file.create("kitchen")
    settings = AuthSettings.model_validate({"api_keys": {"garden": "k" * 16}, "keys_file": file.path})
    who = Authenticator(settings, others=FollowedKeys(file, 1.0, clock))
    assert asks(who, key) == Caller("kitchen")
    assert asks(who, "k" * 16) == Caller("garden")
    both = [(b"authorization", b"Bearer " + key.encode()), (b"x-api-key", b"k" * 16)]
    with pytest.raises(AuthenticationFailed, match="different owners"):
        who.caller({"type": "http", "path": "/v1/models", "method": "GET", "headers": both})
    one = [(b"authorization", b"Bearer " + key.encode()), (b"x-api-key", b"unknown-key-of-sixteen")]
    assert who.caller({"type": "http", "path": "/v1/models", "method": "GET", "headers": one}) == Caller(
        "kitchen"
    )


def test_a_file_that_cannot_be_read_has_no_keys(
    file: KeyFile, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Not those that it had: one of them may be revoked now."""
    _, key = file.create("kitchen")
    followed = FollowedKeys(file, 1.0, clock)
    settings = AuthSettings.model_validate({"api_keys": {"garden": "k" * 16}, "keys_file": file.path})
    who = Authenticator(settings, others=followed)
    content = file.path.read_bytes()
    for broken in (lambda: file.path.write_text("no JSON"), file.path.unlink):
        caplog.clear()
        broken()
        for _ in range(3):
            followed.look()
        assert len(caplog.messages) == 1, "it is said once"
        with pytest.raises(Unavailable, match=r"auth\.keys_file"):
            asks(who, key)
        assert asks(who, "k" * 16) == Caller("garden")
        assert asks(who, key, "/health") is None
    file.path.write_bytes(content)
    file.path.chmod(0o600)
    followed.look()
    assert asks(who, key) == Caller("kitchen")


class Hanging(KeyFile):
    """A file on a mount that stops to answer, and raises nothing; `grace_s` as of a database."""

    def __init__(self, path: Path, clock: Clock, grace_s: float) -> None:
        super().__init__(path, clock)
        self.grace_s = grace_s
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()

    def mark(self) -> tuple[int, int, int]:
        self.asked.set()
        assert self.answers.wait(60)
        return super().mark()


@pytest.mark.parametrize("grace_s", [0.0, 300.0])
def test_keys_are_not_good_for_ever_while_a_read_of_them_hangs(
    file: KeyFile, clock: Clock, grace_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    store, passed = Hanging(file.path, clock, grace_s), Clock()
    record, key = file.create("kitchen")
    followed = FollowedKeys(store, 1.0, clock, passed)
    store.answers.clear()
    store.asked.clear()
    looking = threading.Thread(target=followed.look)
    looking.start()
    try:
        assert store.asked.wait(60)
        file.revoke(record.id)
        passed.now_s += grace_s + 10.0  # a look each second, one that waits for a lock, and a slow disk
        assert followed.owner(key.encode()) == Caller("kitchen", credential=record.id)
        passed.now_s += 0.1
        for _ in range(3):
            with pytest.raises(Unavailable, match=r"auth\.keys_file"):
                followed.owner(key.encode())
        assert caplog.messages == ["no key of auth.keys_file is accepted: reading them does not end"]
    finally:
        store.answers.set()
        looking.join()
    with pytest.raises(AuthenticationFailed, match="revoked"):
        followed.owner(key.encode())


def test_keys_that_are_not_followed_yet_are_those_of_the_beginning(file: KeyFile, clock: Clock) -> None:
    record, key = file.create("kitchen")
    passed = Clock()
    followed = FollowedKeys(file, 1.0, clock, passed)
    passed.now_s += DAY_S
    assert followed.owner(key.encode()) == Caller("kitchen", credential=record.id)


def test_without_the_file_nobody_is_let_in() -> None:
    """Whatever way an authenticator is made: settings with a file of keys are never an open endpoint."""
    who = Authenticator(AuthSettings(keys_file=Path("nowhere")))
    with pytest.raises(AuthenticationFailed):
        asks(who, "k" * 16)
    with pytest.raises(AuthenticationFailed):
        who.caller({"type": "http", "path": "/v1/models", "method": "GET", "headers": []})


def test_the_last_use_is_written_once_an_hour(
    file: KeyFile, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, key = file.create("kitchen")
    _, other = file.create("garden")
    followed = FollowedKeys(file, 1.0, clock)
    writes: list[dict[str, float]] = []
    real = KeyFile.note_used

    def counted(self: KeyFile, used: dict[str, float]) -> None:
        writes.append(dict(used))
        real(self, used)

    monkeypatch.setattr(KeyFile, "note_used", counted)
    for _ in range(7200):
        followed.owner(key.encode())
        followed.look()
        clock.now_s += 1
    assert len(writes) == 2
    used = file.read()[0].used
    assert used == 1_000 * DAY_S + 3600
    assert file.read()[1].used is None
    followed.owner(other.encode())
    clock.now_s += 60
    followed.look()
    assert file.read()[1].used == int(clock()) // 3600 * 3600


def test_a_file_that_is_only_read_is_followed_too(
    file: KeyFile, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, key = file.create("kitchen")

    def refused(self: KeyFile, used: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(KeyFile, "note_used", refused)
    followed = FollowedKeys(file, 1.0, clock)
    for _ in range(100):
        assert followed.owner(key.encode()) == Caller("kitchen")
        followed.look()
        clock.now_s += 1
    assert len(caplog.messages) == 1


def test_the_thread_looks_by_itself(file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.router.identities.identities.LOOK_S", 0.01)
    file = KeyFile(file.path)
    record, key = file.create("kitchen")
    found = wing.Identities(AuthSettings(keys_file=file.path), file, 1.0)
    found.start()
    assert found.owner(key.encode()) == Caller("kitchen")
    file.revoke(record.id)
    while True:
        try:
            found.owner(key.encode())
        except AuthenticationFailed:
            break
    found.stop()
    assert json.loads(file.path.read_text())["keys"][0]["used"] is not None


def test_a_look_that_fails_in_an_unknown_way_is_not_the_last(
    file: KeyFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("samovar.router.identities.identities.LOOK_S", 0.01)
    file = KeyFile(file.path)
    file.create("kitchen")
    found = wing.Identities(AuthSettings(keys_file=file.path), file, 1.0)
    failed, looks, mark = threading.Event(), threading.Semaphore(0), file.mark

    def broken() -> tuple[int, int, int]:
        failed.set()
        raise RuntimeError("planted")

    def seen() -> tuple[int, int, int]:
        looks.release()
        return mark()

    monkeypatch.setattr(file, "mark", broken)
    found.start()
    assert failed.wait(60)
    _, key = file.create("garden")
    monkeypatch.setattr(file, "mark", seen)
    for _ in range(2):  # the second begins when the first has read the keys
        assert looks.acquire(timeout=60), "it looks no more"
    assert found.owner(key.encode()) == Caller("garden")
    found.stop()
    assert len([one for one in caplog.messages if "could not be looked at" in one]) == 1
