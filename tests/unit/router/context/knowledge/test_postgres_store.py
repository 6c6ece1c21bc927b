"""PostgreSQL as the store: walls between tenants, secrets, bounds, a database that is away, crashes."""

from __future__ import annotations

import logging
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import SecretStr, ValidationError

from samovar.configs.fields import public_tree, secret_tree
from samovar.configs.loader import ConfigError, load
from samovar.configs.optional_sections import PostgresSettings
from samovar.router.context.knowledge import (
    Change,
    KnowledgeError,
    Limits,
    LoopRecord,
    PlacedTurn,
    QuotaExceeded,
    RecordBounds,
    SqliteStore,
    StoreBusy,
)
from samovar.router.context.knowledge.postgres import connections, database
from samovar.router.context.knowledge.postgres.connections import Connections
from samovar.router.context.knowledge.postgres.store import PostgresStore
from tests.house import ROOT
from tests.support.clock import Clock
from tests.support.inside import connections_of, database_of
from tests.support.router.knowledge_desks import (
    LIMITS,
    ME,
    PostgresDesk,
    SqliteDesk,
    axis,
    content,
    postgres,
    postgres_settings,
)
from tests.support.services.postgres_server import PASSWORD, PostgresServer

WORDS = [
    "order",
    "orders",
    "orders_raw",
    "raw",
    "refund",
    "refunds",
    "refund.policy",
    "Über",
    "uber",
    "naïve",
    "naive",
    "err-42",
    "42",
    "x",
    "表",
    "表格",
    "the",
]


@pytest.fixture
def desk(postgres_server: PostgresServer) -> Iterator[PostgresDesk]:
    made = PostgresDesk(postgres_server)
    yield made
    made.store.check_integrity()
    made.store.close()
    made.drop()


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """One that these tests stop and kill."""
    made = PostgresServer(durable=True)
    yield made
    made.close()


def test_words_are_ranked_as_in_the_embedded_store_with_equal_scores(
    desk: PostgresDesk, tmp_path: Path
) -> None:
    rng, other = random.Random(18), SqliteDesk(tmp_path / "file" / "knowledge.sqlite")
    texts = [
        (f"n{number}", " ".join(rng.choices(WORDS, k=rng.randint(0, 30))), tuple(rng.choices(WORDS, k=2)))
        for number in range(80)
    ]
    texts.append(("long", "w" * 10_000 + " orders raw", ()))
    changes = [
        Change(content(text, title, rng.choice(["gotcha", "schema"]), topics), ME)
        for title, text, topics in texts
    ]

    def ranked(store: Any, words: list[str], kinds: list[str]) -> list[tuple[str, float]]:
        found = store.by_words("tea", words, kinds, 200)
        titles = store.versions("tea", [ref for ref, _ in found])
        return sorted(
            ((titles[ref].content.title, round(score, 6)) for ref, score in found),
            key=lambda x: (-x[1], x[0]),
        )

    for store in (desk.store, other.store):
        ids = [one.ref.entry for one in store.write("tea", changes, LIMITS)]
        store.write(
            "tea",
            [Change(content("orders"), ME, ids[0], "update"), Change(content(""), ME, ids[1], "retire")],
            LIMITS,
        )
    found = 0
    for _ in range(60):
        words, kinds = (
            rng.sample([*WORDS, "w" * 10_000, "_", '"', "order raw"], 4),
            rng.choice([[], ["schema"]]),
        )
        expected = ranked(other.store, words, kinds)
        assert ranked(desk.store, words, kinds) == expected, words
        found += len(expected)
    assert found > 1000
    other.store.close()


def test_no_row_of_a_tenant_is_seen_or_written_without_naming_it_even_if_a_statement_forgets(
    desk: PostgresDesk,
) -> None:
    desk.add("of tea", place=1)
    desk.add("of coffee", tenant="coffee", place=1)
    desk.store.tag("coffee", "v1", LIMITS)
    desk.store.records.put("coffee", LoopRecord("log", "a", "{}"), RecordBounds(9, 9999))
    tables = ("tenants", "versions", "heads", "postings", "vectors", "tags", "records")
    for tenant, expected in (
        ("tea", {"tenants", "versions", "heads", "postings", "vectors"}),
        ("nobody", set()),
    ):
        with database_of(desk.store).transaction(tenant) as db:
            seen = {table for table in tables if db.execute(f"SELECT FROM {table}").fetchall()}
            assert seen == expected
            for table in expected:
                assert {row[0] for row in db.execute(f"SELECT DISTINCT tenant FROM {table}")} == {tenant}
            assert db.execute("UPDATE versions SET text = ''  WHERE text = 'of coffee'").rowcount == 0
            assert db.execute("DELETE FROM tags").rowcount == 0
    with (
        pytest.raises(KnowledgeError, match="row-level security"),
        database_of(desk.store).transaction("tea") as db,
    ):
        db.execute("INSERT INTO tags(tenant, name, seq) VALUES('coffee', 'planted', 1)")
    assert desk.store.tags("coffee") == {"v1": 2}
    with psycopg.connect(desk.server.url()) as db:  # a connection that says nothing of tenants
        assert db.execute(f"SELECT FROM {desk.schema}.versions").fetchall() == []


def test_a_part_of_a_transaction_that_fails_is_undone_alone(desk: PostgresDesk) -> None:
    bounds = RecordBounds(0, 10_000, ())
    with desk.store.transaction():
        desk.add("kept")
        with pytest.raises(QuotaExceeded):
            desk.store.records.put("coffee", LoopRecord("log", "b", "{}"), bounds)
        with pytest.raises(QuotaExceeded):
            desk.store.write("tea", [Change(content("gone"), ME)], Limits(0, 10_000, 9))
        with pytest.raises(KnowledgeError, match="NUL"):
            desk.add("gone \0")
        assert len(desk.found("kept")) == 1, "of the tenant of before"
    assert len(desk.found("kept")) == len(desk.store.heads("tea")) == 1
    assert desk.store.records.find("coffee", "log") == []


def test_nothing_of_one_transaction_is_left_on_its_connection(desk: PostgresDesk) -> None:
    desk.add("of tea")
    store = PostgresStore(postgres_settings(desk.server.url(), desk.schema))
    pids = set()
    for _ in range(3):
        assert store.heads("tea")
        with connections_of(database_of(store)).lease(lambda connection: None) as plain:
            pids.add(plain.info.backend_pid)
            assert plain.execute("SELECT current_setting('samovar.tenant', true)").fetchone() == ("",)
            assert plain.execute("SHOW search_path").fetchone() == ('"$user", public',)
    assert len(pids) == 1, "one connection serves them all"
    store.close()


def test_the_url_is_a_secret_wherever_settings_are_shown(
    desk: PostgresDesk, caplog: pytest.LogCaptureFixture
) -> None:
    own = load(None, {"SAMOVAR_KNOWLEDGE__POSTGRES__URL": desk.server.url()}, []).settings
    for shown in (repr(own), str(public_tree(own)), own.model_dump_json()):
        assert "pa%3A" not in shown
        assert PASSWORD not in shown
    assert secret_tree(own)["knowledge"]["postgres"]["url"] == desk.server.url()
    for wrong in ("mysql://u:xylophone@h/d", "postgresql://u:xylo@phone@h/d"):
        with pytest.raises(ConfigError) as refused:
            load(None, {}, [f"--knowledge.postgres.url={wrong}"])
        assert "xylo" not in str(refused.value)
        with pytest.raises(ValidationError) as invalid:
            PostgresSettings(url=SecretStr(wrong))
        assert "xylo" not in str(invalid.value)
    for url, said in (
        (desk.server.url("xylophone"), "password authentication failed"),
        ("postgresql://u:xylophone@127.0.0.1:1/d", "cannot be reached"),
        ("postgresql://u:xylophone@[/d", "no URL that libpq understands"),
        ("postgresql://u:p@h/d?xylophone=1", "no URL that libpq understands"),
    ):
        with pytest.raises(KnowledgeError, match=said) as failed:
            postgres(url, desk.schema)
        assert "xylophone" not in str(failed.value)
    assert "xylophone" not in caplog.text


def test_the_password_can_come_from_a_file_of_libpq(
    desk: PostgresDesk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pgpass"
    file.write_text("*:*:*:samovar:" + PASSWORD.replace(":", r"\:") + "\n")
    file.chmod(0o600)
    without = re.sub(r":pa[^@]*@", "@", desk.server.url())
    with pytest.raises(KnowledgeError, match="no password"):
        postgres(without, desk.schema)
    monkeypatch.setenv("PGPASSFILE", str(file))
    postgres(without, desk.schema).close()


def test_of_several_hosts_the_one_that_serves_is_used(desk: PostgresDesk, tmp_path: Path) -> None:
    desk.add("x")
    two = postgres(desk.server.url().replace("?host=", f"?host={tmp_path},"), desk.schema)
    assert len(two.heads("tea")) == 1
    two.close()


def test_without_pgvector_it_is_refused_in_words_and_words_need_none() -> None:
    own_server = PostgresServer()
    with own_server.superuser("samovar") as db:
        db.execute("DROP EXTENSION vector")
    url = own_server.url()
    with pytest.raises(KnowledgeError, match=r"no extension `vector`: install pgvector"):
        postgres(url, "kb", "axis")
    (own_server.installed / "share/postgresql/extension/vector.control").unlink()
    with pytest.raises(KnowledgeError, match=r"knowledge\.embedder=none"):
        postgres(url, "kb", "axis")
    store = postgres(url, "kb")
    store.write("tea", [Change(content("found by its words"), ME)], LIMITS)
    assert len(store.by_words("tea", ["words"], [], 9)) == 1
    assert store.by_meaning("tea", axis(1), [], 9) == store.without_vector("tea", 9) == []
    store.check_integrity()
    store.close()
    own_server.close()


def test_several_that_start_at_once_make_the_tables_once(desk: PostgresDesk) -> None:
    schema = desk.schema + "_many"
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: postgres(desk.server.url(), schema, "axis"), range(8)))
        list(
            pool.map(
                lambda store: store.write("tea", [Change(content("one"), ME, vector=axis(1))], LIMITS), stores
            )
        )
    assert len(stores[0].heads("tea")) == 8
    for store in stores:
        store.close()
    with desk.server.superuser("samovar") as db:
        db.execute(f"DROP SCHEMA {schema} CASCADE")


def test_tables_of_an_older_version_are_migrated_and_of_a_newer_one_refused(
    desk: PostgresDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.add("kept")
    monkeypatch.setattr(database, "MIGRATIONS", (*database.MIGRATIONS, "CREATE TABLE added(x int)"))
    newer = desk.open()
    assert newer._database.has("added")
    assert len(newer.heads("tea")) == 1
    newer.close()
    monkeypatch.undo()
    own = len(database.MIGRATIONS)
    with pytest.raises(KnowledgeError, match=f"has format {own + 1}, and this version reads {own}"):
        desk.open()


def test_a_migration_that_fails_leaves_the_tables_as_they_were(
    desk: PostgresDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (*database.MIGRATIONS, "CREATE TABLE added(x int)", "CREATE TABLE versions(x int)")
    monkeypatch.setattr(database, "MIGRATIONS", broken)
    with pytest.raises(KnowledgeError, match="already exists"):
        desk.open()
    monkeypatch.undo()
    again = desk.open()
    assert not again._database.has("added")
    again.close()


def test_a_database_that_goes_away_is_said_and_comes_back_by_itself(
    own_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = postgres(own_server.url(), "away", "axis")
    store.write("tea", [Change(content("kept"), ME, vector=axis(1))], LIMITS)
    own_server.stop()
    for _ in range(3):
        with pytest.raises(KnowledgeError, match="cannot be reached"):
            store.heads("tea")
    away = PostgresStore(postgres_settings(own_server.url(), "away", retry_s=0), must_open=False)
    assert "each call tries again" in caplog.text
    with pytest.raises(KnowledgeError, match="cannot be reached"):
        away.heads("tea")
    own_server.start()
    assert len(away.heads("tea")) == 1
    connections_of(database_of(store))._refused_until_s = 0.0  # as if `retry_s` had passed
    assert len(store.heads("tea")) == 1
    own_server.stop()
    own_server.start()
    assert len(store.heads("tea")) == 1, "a connection of before the restart costs no call"
    store.write("tea", [Change(content("next"), ME)], LIMITS)
    store.close()
    away.close()


def test_after_a_failed_connection_calls_are_refused_at_once_for_a_while() -> None:
    clock, tried = Clock(), []
    own = PostgresSettings(url=SecretStr("postgresql://127.0.0.1:1/d"), retry_s=2.0)
    shelf = Connections(own, 1.0, clock)
    real = connections.Connection.connect

    def counted(to: str, **more: Any) -> Any:
        tried.append(to)
        return real(to, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections.Connection, "connect", counted)
        for advance_s, expected in ((0.0, 1), (1.9, 1), (0.2, 2), (0.0, 2)):
            clock.now_s += advance_s
            with pytest.raises(KnowledgeError, match="cannot be reached"), shelf.lease(lambda _: None):
                raise AssertionError("nothing is lent")
            assert len(tried) == expected


def test_every_wait_has_a_bound(desk: PostgresDesk) -> None:
    def store(**settings: Any) -> PostgresStore:
        own = postgres_settings(desk.server.url(), desk.schema, busy_s=0.2)
        narrow = own.postgres.model_copy(update={"connections_max": 2, **settings})
        return PostgresStore(own.model_copy(update={"postgres": narrow}), embedder="axis")

    ref, waiting, slow = desk.add("x"), store(), store(statement_s=0.2)
    with database_of(desk.store).transaction("tea") as db:
        desk.store._changed(db, "tea")  # another writer of this tenant
        with pytest.raises(StoreBusy, match="another writer did not finish"):
            waiting.write("tea", [Change(content("y"), ME, ref.entry, "update")], LIMITS)
        assert waiting.heads("tea")[0].ref == ref, "readers do not wait"
        assert waiting.write("coffee", [Change(content("y"), ME)], LIMITS), "nor do other tenants' writers"
    with pytest.raises(StoreBusy, match="statement_s"), slow._database.transaction("tea") as db:
        db.execute("SELECT pg_sleep(60)")
    entered, leave = threading.Barrier(3), threading.Event()

    def hold() -> None:
        with waiting._database.transaction("tea", "read"):
            entered.wait()
            leave.wait()

    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(hold) for _ in range(2)]
        entered.wait()
        with pytest.raises(StoreBusy, match="all 2 connections"):
            waiting.heads("tea")
        leave.set()
        for one in held:
            one.result()
    assert waiting.heads("tea")
    waiting.close()
    slow.close()


def test_a_server_that_hangs_is_given_up_and_its_connection_is_never_used_again(desk: PostgresDesk) -> None:
    desk.add("x")
    store = PostgresStore(postgres_settings(desk.server.url(), desk.schema))

    def hang() -> None:
        with database_of(store).transaction("tea") as db:
            pid = db.info.backend_pid
            assert db.answer_s == 15.0 + connections.GRACE_S
            db.answer_s = 0.5
            desk.server.signal_backend(pid, signal.SIGSTOP)
            try:
                db.execute("SELECT 1")
            finally:
                desk.server.signal_backend(pid, signal.SIGCONT)

    with pytest.raises(KnowledgeError, match="no answer within"):
        hang()
    assert len(store.heads("tea")) == 1
    store.close()


CRASH = """
import sys
changes = [Change(Content("gotcha", "", "new"), Provenance("p"), sys.argv[1], "update")]
many = [Content("gotcha", "", f"beside {number} " + "x" * 5000) for number in range(50)]
changes += [Change(content, Provenance("p")) for content in many]
with store.transaction():
    store.write("tea", changes, Limits(9999, 10**9, 9))
    print("written", flush=True)
    if sys.argv[2] == "before commit":
        sys.stdin.read()
print("committed", flush=True)
sys.stdin.read()
"""


@pytest.mark.guarantee("F04")
@pytest.mark.parametrize(
    ("sent", "point", "text", "entries"),
    [
        (signal.SIGQUIT, "before commit", "old", 1),
        (signal.SIGKILL, "before commit", "old", 1),
        (signal.SIGKILL, "after it", "new", 51),
    ],
)
def test_a_server_that_crashes_has_the_old_or_the_new(
    own_server: PostgresServer, sent: signal.Signals, point: str, text: str, entries: int
) -> None:
    schema = f"crash_{sent}_{entries}"
    store = postgres(own_server.url(), schema)
    (made,) = store.write("tea", [Change(content("old"), ME)], LIMITS)
    code = f"{PostgresDesk.IMPORTS}store = postgres({own_server.url()!r}, {schema!r})\n{CRASH}"
    command = [sys.executable, "-c", code, made.ref.entry, point]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        lines = ["written\n"] if point == "before commit" else ["written\n", "committed\n"]
        assert [writer.stdout.readline().decode() for _ in lines] == lines
        own_server.stop(sent)
        writer.kill()
    own_server.start()
    assert store.head("tea", made.ref.entry).content.text == text
    assert len(store.heads("tea")) == entries
    store.check_integrity()
    store.close()


def test_what_was_erased_leaves_no_byte_in_the_tables_files_once_they_are_compacted(
    own_server: PostgresServer,
) -> None:
    store = postgres(own_server.url(), "erased", "axis")
    words = [b"xylophoneninety", b"xylophonenineti", b"quartzkey", b"zanzibarsixty"]
    secret = [Change(content("the vault code is xylophoneninety", "Quartzkey"), ME, vector=axis(1))]
    (made,) = store.write("tea", secret, LIMITS)
    store.write("tea", [Change(content("it was zanzibarsixty"), ME, made.ref.entry, "update")], LIMITS)
    store.write("tea", [Change(content(f"filler {number}"), ME) for number in range(20)], LIMITS)

    def left() -> list[bytes]:
        with own_server.superuser() as db:
            db.execute("CHECKPOINT")
        files = [path for path in (own_server.data / "base").rglob("*") if path.is_file()]
        raw = b"".join(path.read_bytes().lower() for path in files)
        return [word for word in words if word in raw]

    assert left() == words, "the search of files finds nothing at all"
    store.erase("tea", made.ref.entry)
    store.compact()
    assert left() == []
    assert len(store.heads("tea")) == 20
    store.check_integrity()
    store.close()


def test_erasing_leaves_no_dead_row(desk: PostgresDesk) -> None:
    entries = [desk.add(f"number {number}", place=1).entry for number in range(20)]
    for entry in entries[:10]:
        desk.store.erase("tea", entry)

    with desk.server.superuser("samovar") as db:
        notices: list[str] = []
        db.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
        for table in ("versions", "heads", "postings", "vectors"):
            db.execute(f"VACUUM (VERBOSE) {desk.schema}.{table}")
    told = [line for notice in notices for line in notice.splitlines() if line.startswith("tuples:")]
    assert len(told) >= 4
    assert all(line.startswith("tuples: 0 removed") for line in told), told


@pytest.mark.parametrize("to_file", [True, False])
def test_a_backup_of_one_store_is_restored_to_the_other(
    desk: PostgresDesk, tmp_path: Path, to_file: bool
) -> None:
    embedded = SqliteDesk(tmp_path / "file" / "knowledge.sqlite")
    source, target = (desk, embedded) if to_file else (embedded, desk)
    target.add("replaced", place=1)
    ref = source.add("orders_raw has refunds", place=1, title="Ordërs")
    source.change(ref.entry, "orders_raw has refunds of ERR_42")
    retired = source.add("gone")
    source.change(retired.entry, "gone", operation="retire")
    source.add("another's", tenant="coffee", place=2)
    source.store.tag("tea", "v1", LIMITS)
    source.store.note_turn("tea", b"s\0", b"k", PlacedTurn((ref,), ()))
    source.store.records.put(
        "tea", LoopRecord("candidate", "a", "{}", key=b"\xff", vector=axis(3)), RecordBounds(9, 9999)
    )
    source.store.backup(tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob("copy-*"))
    target.store.restore(tmp_path / "copy")

    def told(store: Any) -> list[Any]:
        record = store.records.find("tea", "candidate")[0]
        return [
            store.history("tea", ref.entry),
            store.history("tea", retired.entry),
            [one.content.text for one in store.heads("tea")],
            [one.content.text for one in store.heads("coffee")],
            store.by_words("tea", ["orders_raw"], [], 9)[0][0],
            store.by_names("tea", ["err_42"], [], 9),
            store.by_meaning("tea", axis(0), [], 9),
            store.tags("tea"),
            store.state_at("tea", 1),
            store.turns("tea", b"s\0", [b"k"]),
            (record.id, record.key, record.vector.tolist()),
        ]

    assert told(target.store) == told(source.store)
    assert target.add("next").number == 1
    target.store.check_integrity()
    embedded.store.close()


BOUNDS = RecordBounds(9, 9999)


def written_again_beside(desk: PostgresDesk, erase: Callable[[], object]) -> list[LoopRecord]:
    """Find the candidate of "tea" and write it again, as another one who erases it has not committed yet.

    Return what was found.
    """
    records, found = desk.store.records, list[LoopRecord]()
    is_erasing, goes_on = threading.Event(), threading.Event()

    def erase_slowly() -> None:
        with desk.store.transaction():
            erase()
            is_erasing.set()
            goes_on.wait(20)

    def write_again() -> None:
        with desk.store.transaction():
            found.extend(records.find("tea", "candidate", ids=["a"]))
            for one in found:
                records.put("tea", one, BOUNDS)

    first, second = threading.Thread(target=erase_slowly), threading.Thread(target=write_again)
    first.start()
    assert is_erasing.wait(20)
    second.start()
    second.join(0.5)
    goes_on.set()
    first.join(20)
    second.join(20)
    return found


def test_what_is_written_again_is_not_that_which_is_erased_meanwhile(desk: PostgresDesk) -> None:
    """A candidate that was found before its session was erased, and written behind that, was there again."""
    records = desk.store.records
    records.put("tea", LoopRecord("candidate", "a", "{}", session=b"s"), BOUNDS)
    found = written_again_beside(desk, lambda: desk.store.forget_sessions("tea", [b"s"]))
    assert (found, records.find("tea", "candidate")) == ([], [])


@pytest.mark.parametrize("what", ["records", "entry", "all"])
def test_what_is_erased_in_any_way_is_not_written_again_meanwhile(desk: PostgresDesk, what: str) -> None:
    entry, records = desk.add("learned from it").entry, desk.store.records
    records.put("tea", LoopRecord("candidate", "a", "{}", turn=str(ME.turn)), BOUNDS)

    def erase() -> None:
        if what == "records":
            records.erase("tea", kind="candidate", ids=["a"])
        else:
            desk.store.erase("tea", entry if what == "entry" else None)

    found = written_again_beside(desk, erase)
    assert (found, records.find("tea", "candidate")) == ([], [])


@pytest.mark.parametrize("of_all", [True, False])
def test_who_erases_and_who_writes_behind_a_look_at_records_do_not_wait_for_each_other(
    desk: PostgresDesk, of_all: bool
) -> None:
    """As a sealed store writes: it looks for its key first."""
    entry, has_looked = desk.add("old").entry, threading.Event()

    def write() -> None:
        with desk.store.transaction():
            desk.store.records.find("tea", "key")
            has_looked.set()
            time.sleep(0.5)  # the other one has come as far as it can
            desk.add("new")

    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write)
        assert has_looked.wait(20)
        desk.store.erase("tea", None if of_all else entry)
        writing.result(20)
    assert [one.content.text for one in desk.store.heads("tea")] == ([] if of_all else ["new"])


def test_a_restore_that_fails_changes_nothing(desk: PostgresDesk, tmp_path: Path) -> None:
    desk.add("kept", place=1)
    (tmp_path / "junk").write_bytes(b"junk" * 999)
    for name in ("junk", "missing"):
        with pytest.raises(KnowledgeError):
            desk.store.restore(tmp_path / name)
    source = SqliteStore(tmp_path / "bad" / "knowledge.sqlite")
    source.write("tea", [Change(content("good"), ME), Change(content("nul \0 here"), ME)], LIMITS)
    source.backup(tmp_path / "nul")
    source.close()
    with pytest.raises(KnowledgeError):
        desk.store.restore(tmp_path / "nul")
    assert [one.content.text for one in desk.store.heads("tea")] == ["kept"]


def test_errors_of_the_database_do_not_quote_a_row(
    desk: PostgresDesk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(KnowledgeError) as refused:
        desk.store.write("tea", [Change(content("xylophone \0"), ME)], LIMITS)
    assert "xylophone" not in str(refused.value)
    desk.add("xylophone")
    ref = desk.store.heads("tea")[0].ref
    with pytest.raises(KnowledgeError) as twice, database_of(desk.store).transaction("tea") as db:
        db.execute(
            "INSERT INTO heads(tenant, entry, seq, is_retired, tokens) VALUES('tea', %s, 99, false, 0)",
            (ref.entry,),
        )
    assert ref.entry not in str(twice.value)
    assert "xylophone" not in caplog.text
