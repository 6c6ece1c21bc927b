"""The audit log: what is in it, what is never in it, and that it neither grows nor holds anybody up."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from samovar.cluster.cli.main import app
from samovar.configs.settings import Settings
from samovar.router.auth import Caller
from samovar.router.identities import AuditLog, AuditQueue, KeyFile, audit
from samovar.router.identities.audit import REFUSALS_AT_ONCE, RefusalPace, event_of
from tests.support.router.router_harness import ADMIN_KEY, KEY, House, bearer, chat, until


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def settings_of(path: Path) -> Settings:
    keys = {"api_keys": {"kitchen": KEY}, "admin_key": ADMIN_KEY, "audit_file": path}
    return Settings.model_validate({"auth": keys})


async def test_who_did_what_when_and_from_where_and_no_text(tmp_path: Path) -> None:
    path = tmp_path / "log" / "audit.jsonl"
    house = House(settings=settings_of(path))
    async with house.server(proxy_headers=False) as url, httpx.AsyncClient(base_url=url) as client:
        said = chat("a secret of the prompt")
        named = {"x-session-id": "patient-4711"}
        assert (
            await client.post("/v1/chat/completions", json=said, headers=bearer(KEY) | named)
        ).status_code == 200
        await client.get("/v1/models", headers=bearer("a-wrong-key-of-many"))
        await client.get("/cache/stats", headers=bearer(KEY))
        await client.get("/metrics", headers=bearer(ADMIN_KEY))
        done = await client.delete(
            "/v1/sessions/patient-4711", headers=bearer(KEY) | {"x-forwarded-for": "10.0.0.9"}
        )
        assert done.status_code == 200
        await client.post("/cache/clear", json={"tenant": "kitchen"}, headers=bearer(ADMIN_KEY))
        await client.get("/v1/sessions", headers=bearer(ADMIN_KEY))
        await until(lambda: len(lines(path)) >= 5)
    found = lines(path)
    assert [(one["event"], one["what"], one["status"]) for one in found] == [
        ("refused", "GET /v1/models", 401),
        ("refused", "GET /cache/stats", 403),
        ("erased", "DELETE /v1/sessions/{session_id:path}", 200),
        ("erased", "POST /cache/clear", 200),
        ("admin", "GET /v1/sessions", 200),
    ]
    assert [one["who"] for one in found] == [
        {},
        {"tenant": "kitchen", "is_admin": False},
        {"tenant": "kitchen", "is_admin": False},
        {"tenant": None, "is_admin": True},
        {"tenant": None, "is_admin": True},
    ]
    assert {one["from"] for one in found} == {"127.0.0.1"}
    assert found[2]["says_it_is_for"] == "10.0.0.9"
    assert found[2]["request_id"] == done.headers["x-request-id"]
    assert found[3]["of_tenant"] == "kitchen"
    text = path.read_text()
    for hidden in ("secret", "patient", KEY, ADMIN_KEY, "a-wrong-key"):
        assert hidden not in text
    assert path.stat().st_mode & 0o777 == 0o600


async def test_without_the_setting_there_is_no_log_and_no_thread(tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    house = House(settings=Settings.model_validate({"auth": {"api_keys": {"kitchen": KEY}}}))
    async with house.server() as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/v1/models")).status_code == 401
        now = {thread.name for thread in threading.enumerate()}
        assert not {name for name in now - before if name.startswith("samovar-")}


async def test_a_credential_of_the_file_is_named_by_its_id(tmp_path: Path) -> None:
    keys, path = KeyFile(tmp_path / "keys.json"), tmp_path / "audit.jsonl"
    record, key = keys.create("kitchen")
    house = House(settings=Settings.model_validate({"auth": {"keys_file": keys.path, "audit_file": path}}))
    async with house.server() as url, httpx.AsyncClient(base_url=url) as client:
        await client.delete("/v1/cache", headers=bearer(key))
    (line,) = lines(path)  # the end of the server waits for it
    assert line["who"] == {"tenant": "kitchen", "is_admin": False, "by": record.id}


@pytest.mark.parametrize(
    ("caller", "method", "route", "status", "event"),
    [
        (None, "GET", "/v1/models", 401, "refused"),
        (Caller("t"), "GET", "/metrics", 403, "refused"),
        (None, "GET", "/health", 200, None),
        (Caller(None, True), "GET", "/metrics", 200, None),
        (Caller("t"), "POST", "/v1/chat/completions", 200, None),
        (Caller("t"), "DELETE", "/v1/cache", 503, "erased"),
        (Caller("t", True), "POST", "/cache/clear", 200, "erased"),
        (Caller("t", True), "GET", "/cache/stats", 200, "admin"),
        (Caller("t", True), "GET", "/v1/models", 200, None),
        (Caller("t", True), "GET", "/v1/live", 200, "admin"),  # it shows every tenant
        (Caller("t", True), "GET", "/v1/usage", 200, None),  # it shows its own
        (Caller("t"), "GET", "/v1/live", 200, None),
        (Caller(None, True), "GET", "/v1/usage", 200, "admin"),
    ],
)
def test_what_is_written(
    caller: Caller | None, method: str, route: str, status: int, event: str | None
) -> None:
    assert event_of(caller, method, route, status) == event


def test_a_flood_of_refusals_is_counted_not_written() -> None:
    pace = RefusalPace()
    first = [pace.take(100.0) for _ in range(1000)]
    written = [one for one in first if one is not None]
    assert len(written) == REFUSALS_AT_ONCE
    assert sum(written) == 0
    assert pace.take(100.5) == 1000 - REFUSALS_AT_ONCE, "the next one says how many there were"
    assert pace.take(100.5) == 0
    assert pace.take(100.5) is None


def test_files_are_bounded_and_turned(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit", bytes_max=1000, files=3)
    for number in range(200):
        log.write({"number": number})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["audit", "audit.1", "audit.2", "audit.lock"]
    assert all((tmp_path / name).stat().st_size <= 1000 for name in names)
    kept = [one["number"] for name in ("audit.2", "audit.1", "audit") for one in lines(tmp_path / name)]
    assert kept == list(range(kept[0], 200)), "the newest, in order"
    log.write({"long": "x" * 5000})
    assert lines(tmp_path / "audit")[0]["long"] == "x" * 5000, "one that is too long has a file of its own"


def test_a_turn_that_fails_closes_no_descriptor_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, opened = AuditLog(tmp_path / "audit", bytes_max=1), list[int]()
    log.write({"number": 1})

    def full(source: Path, target: object) -> Path:
        opened.append(os.open(os.devnull, os.O_RDONLY))  # as another thread may at this moment
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            log.write({"number": 2})
    (own,) = opened
    assert os.path.sameopenfile(own, own), "it is open"
    os.close(own)
    log.write({"number": 3})
    assert [one["number"] for name in ("audit.1", "audit") for one in lines(tmp_path / name)] == [1, 3]


def test_several_writers_lose_nothing(tmp_path: Path) -> None:
    logs = [AuditLog(tmp_path / "audit", bytes_max=2000, files=50) for _ in range(4)]

    def write(log: AuditLog, number: int) -> None:
        for each in range(25):
            log.write({"by": number, "each": each})

    threads = [threading.Thread(target=write, args=one) for one in zip(logs, range(4), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [
        (one["by"], one["each"])
        for path in tmp_path.iterdir()
        if path.suffix != ".lock"
        for one in lines(path)
    ]
    assert sorted(found) == [(by, each) for by in range(4) for each in range(25)]


def test_a_disk_that_is_full_is_said_once_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit"
    real = os.write
    log = AuditLog(path)
    log.write({"first": 1})
    monkeypatch.setattr(
        "samovar.router.identities.audit.os.write", lambda file, data: real(file, data[: len(data) // 2])
    )
    waiting = AuditQueue(log)
    for number in range(2000):  # more than may wait
        waiting.put({"number": number})
    waiting.start()
    waiting.stop()
    assert [one["first"] for one in lines(path)] == [1], "no half a line is left"
    assert len(caplog.messages) == 1
    assert "auth.audit_file" in caplog.messages[0]


def test_a_disk_that_takes_nothing_does_not_hold_up_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    class Stuck(AuditLog):
        def write(self, line: Any) -> None:
            assert released.wait(60)

    monkeypatch.setattr(audit, "STOP_S", 0.01)
    waiting = AuditQueue(Stuck(tmp_path / "audit"))
    waiting.start()
    for number in range(2 * audit.QUEUE_MAX):  # more than may wait
        waiting.put({"number": number})
    waiting.stop()
    assert not released.is_set(), "it ended before the disk did"
    released.set()


def test_commands_that_change_keys_are_in_it(tmp_path: Path) -> None:
    env = {
        "SAMOVAR_AUTH__KEYS_FILE": str(tmp_path / "keys.json"),
        "SAMOVAR_AUTH__AUDIT_FILE": str(tmp_path / "audit"),
    }

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["keys", *words], env=env)
        assert done.exit_code == 0, done.output
        return done.stdout.strip()

    made = json.loads(run("create", "kitchen", "--json"))
    run("list")
    second = json.loads(run("rotate", made["id"], "--json"))
    run("revoke", second["id"])
    found = lines(tmp_path / "audit")
    assert [one["what"].split()[-1] for one in found] == ["create", "rotate", "revoke"]
    assert [one["key"]["id"] for one in found] == [made["id"], second["id"], second["id"]]
    assert {one["who"]["uid"] for one in found} == {os.getuid()}
    assert made["key"] not in (tmp_path / "audit").read_text()
