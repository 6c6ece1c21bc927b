"""API keys in PostgreSQL: as those of a file, for ingresses of several machines, and while it is away."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError
from typer.testing import CliRunner

from samovar.cluster.cli.main import app
from samovar.cluster.errors import StartFailed
from samovar.cluster.serve.preflight import check_keys_file
from samovar.configs.optional_sections import PostgresSettings
from samovar.configs.settings import Settings
from samovar.router.auth import Caller
from samovar.router.identities import FollowedKeys, KeyFile, KeysRefused, KeyStore
from samovar.router.identities.key_file import GRACE_S, KeyTable
from samovar.router.openai import AuthenticationFailed, Unavailable
from tests.support.clock import Clock
from tests.support.router.knowledge_desks import postgres_settings
from tests.support.services.postgres_server import PostgresServer

DAY_S = 86400


@dataclass
class Place:
    """A place for keys, and a second process's way to it."""

    store: KeyStore
    again: Callable[[], KeyStore]


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
def database(postgres_server: PostgresServer) -> Iterator[PostgresSettings]:
    """A schema of the test's own."""
    schema = f"keys_{secrets.token_hex(6)}"
    yield postgres_settings(postgres_server.url(), schema).postgres
    with postgres_server.superuser("samovar") as db:
        db.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE".encode())


@pytest.fixture
def table(database: PostgresSettings, clock: Clock) -> Iterator[KeyTable]:
    made = KeyTable(database, 5.0, clock)
    yield made
    made.close()


@pytest.fixture(params=["file", "table"])
def place(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Place]:
    if request.param == "file":
        yield Place(KeyFile(tmp_path / "keys.json", clock), lambda: KeyFile(tmp_path / "keys.json", clock))
        return
    database = request.getfixturevalue("database")
    made: list[KeyTable] = []

    def opened() -> KeyTable:
        made.append(KeyTable(database, 5.0, clock))
        return made[-1]

    yield Place(opened(), opened)
    for one in made:
        one.close()


def test_keys_are_made_rotated_revoked_and_read_by_another_process(place: Place, clock: Clock) -> None:
    store, other = place.store, place.again()
    with pytest.raises(FileNotFoundError):
        store.read()
    assert store.read_if_there() == ()
    first, secret = store.create("kitchen", 2 * DAY_S)
    admin, _ = store.create(None)
    assert other.read() == (first, admin)
    marks = {other.mark()}
    second, _ = other.rotate(first.id, 3600)
    marks.add(store.mark())
    assert store.revoke(admin.id).revoked == int(clock())
    marks.add(store.mark())
    assert len(marks) == 3
    clock.now_s += 3600
    assert [(key.id, key.state(clock())) for key in other.read()] == [
        (first.id, "expired"),
        (admin.id, "revoked"),
        (second.id, "valid"),
    ]
    store.note_used({second.id: clock()})
    assert other.read()[2].used == int(clock()) // 3600 * 3600
    for wrong in (admin.id, "key_nothing"):
        with pytest.raises(KeysRefused):
            store.rotate(wrong, 1)
    clock.now_s += 90 * DAY_S
    assert [key.id for key in (store.create("garden")[0], *other.read())][1:] == [
        key.id for key in store.read()
    ]
    assert first.id not in {key.id for key in other.read()}, "what has long ended makes room"
    assert secret not in repr(other.read())


def test_writers_take_turns(place: Place) -> None:
    made: list[str] = []
    stores = [place.store, place.again()]
    threads = [
        threading.Thread(target=lambda at=at: made.append(stores[at % 2].create("kitchen")[0].id))
        for at in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.id for key in place.store.read()) == sorted(made)
    assert len(made) == 8


def test_a_running_service_follows_them(place: Place, clock: Clock) -> None:
    record, key = place.store.create("kitchen")
    followed = FollowedKeys(place.again(), 1.0, clock)
    assert followed.owner(key.encode()) == Caller("kitchen", is_admin=False, credential=record.id)
    place.store.revoke(record.id)
    followed.look()
    with pytest.raises(AuthenticationFailed, match="revoked"):
        followed.owner(key.encode())


def test_no_key_can_be_read_in_the_database(
    table: KeyTable, database: PostgresSettings, postgres_server: PostgresServer
) -> None:
    _, key = table.create("kitchen")
    with postgres_server.superuser("samovar") as db:
        rows = db.execute(f"SELECT * FROM {database.schema_name}.api_keys".encode()).fetchall()
    assert len(rows) == 1
    assert key[12:] not in repr(rows)


def test_what_is_changed_halfway_is_not_changed(table: KeyTable, monkeypatch: pytest.MonkeyPatch) -> None:
    record, _ = table.create("kitchen")
    before = table.mark()

    def fails(*_: object) -> None:
        raise KeysRefused("no")

    with monkeypatch.context() as patched:
        patched.setattr(KeyTable, "_write", fails)
        with pytest.raises(KeysRefused):
            table.revoke(record.id)
    assert table.read() == (record,)
    assert table.mark() == before
    table.note_used({})
    assert table.mark() == before, "nothing was changed"


def test_a_table_of_another_release_is_left_as_it_is(
    table: KeyTable, database: PostgresSettings, postgres_server: PostgresServer
) -> None:
    table.create("kitchen")
    with postgres_server.superuser("samovar") as db:
        db.execute(f"UPDATE {database.schema_name}.api_keys_state SET format = 2".encode())
    for work in (table.read, table.mark, lambda: table.create("kitchen")):
        with pytest.raises(KeysRefused, match="another release"):
            work()


def test_while_the_database_is_away_known_keys_are_good_for_a_while(clock: Clock) -> None:
    server = PostgresServer()
    try:
        table = KeyTable(postgres_settings(server.url(), "keys", retry_s=0.0).postgres, 5.0, clock)
        _, key = table.create("kitchen")
        followed = FollowedKeys(table, 1.0, clock, clock)
        server.stop()
        clock.now_s += GRACE_S - 1
        followed.look()
        assert followed.owner(key.encode()) is not None
        clock.now_s += 2
        followed.look()
        with pytest.raises(Unavailable, match=r"auth\.keys_file"):
            followed.owner(key.encode())
        with pytest.raises(KeysRefused, match=r"auth\.keys_file, knowledge\.postgres\.url"):
            table.create("kitchen")
        server.start()
        followed.look()
        assert followed.owner(key.encode()) is not None
        table.close()
    finally:
        server.close()


# -- the command and the start -------------------------------------------------------------


def test_the_command_writes_it_and_the_start_reads_it(
    database: PostgresSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert database.url is not None
    environment = {
        "SAMOVAR_AUTH__KEYS_FILE": "postgres:",
        "SAMOVAR_KNOWLEDGE__POSTGRES__URL": database.url.get_secret_value(),
        "SAMOVAR_KNOWLEDGE__POSTGRES__SCHEMA_NAME": database.schema_name,
    }
    settings = Settings.model_validate(
        {"auth": {"keys_file": "postgres:"}, "knowledge": {"postgres": database.model_dump()}}
    )
    with pytest.raises(StartFailed, match="Make a first key"):
        check_keys_file(settings)
    made = CliRunner().invoke(app, ["keys", "create", "kitchen", "--json"], env=environment)
    assert made.exit_code == 0, made.output
    check_keys_file(settings)
    listed = CliRunner().invoke(app, ["keys", "list", "--json"], env=environment)
    (row,) = json.loads(listed.stdout)
    assert (row["tenant"], row["state"]) == ("kitchen", "valid")
    assert json.loads(made.stdout)["key"] not in listed.stdout


def test_without_a_database_the_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"knowledge\.postgres\.url is empty"):
        Settings.model_validate({"auth": {"keys_file": "postgres:"}})


def test_a_database_that_does_not_answer_is_named_and_no_password(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {
            "auth": {"keys_file": "postgres:"},
            "knowledge": {"postgres": {"url": SecretStr(f"postgresql://tea:sweet@/x?host={tmp_path}")}},
        }
    )
    with pytest.raises(StartFailed, match="the database of API keys") as failed:
        check_keys_file(settings)
    assert "sweet" not in str(failed.value)
