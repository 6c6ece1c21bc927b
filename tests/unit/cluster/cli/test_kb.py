"""`samovar kb` against the ingress on a socket, and backups of the file without a server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from samovar.cluster.cli import running
from samovar.cluster.cli.main import app
from tests.support.router.router_harness import MODEL, House, make_settings, spoken
from tests.support.services.postgres_server import PostgresServer

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
Run = Callable[..., Awaitable[str]]
MARKDOWN = (
    "# Orders\nkind: schema\n\nTable orders_raw has one row per order.\n\n# Refunds\n\nThey are negative.\n"
)
QUESTION = (
    '{"question": "orders_raw?", "checks": [{"contains": "one row"}, {"of": "answer", "contains": "Fine"}]}\n'
)


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    own = {"enabled": True, "dir": tmp_path / "kb", "embedder": "none"}
    house = House(lambda _: spoken("Fine."), settings=make_settings(knowledge=own))
    async with house.server() as url:
        monkeypatch.setenv("TEST_KB_URL", url)

        async def run(*words: str, code: int = 0) -> str:
            env = {"SAMOVAR_URL": url, "SAMOVAR_API_KEY": ""}
            done = await asyncio.to_thread(CliRunner().invoke, app, ["kb", *words], env=env)
            assert done.exit_code == code, done.output
            return done.output

        yield run


async def test_entries_are_added_found_changed_reverted_and_exported(run: Run, tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text(MARKDOWN)
    first, second = (await run("add", str(notes), "--why", "the manual")).splitlines()
    entry = first.split()[0]
    assert first.endswith("v1  schema  Orders")
    assert second.endswith("document_chunk  Refunds")
    assert "Orders  (words 1, names 1)" in await run("search", "what is orders_raw?")
    assert json.loads(await run("search", "orders_raw", "--json"))["data"][0]["id"] == entry
    assert (await run("tag", "v1")).strip() == "v1"
    assert "usage_pattern  Join on it" in await run("add", "--text", "Join on it", "--kind", "usage_pattern")
    await run("revert", entry, "--version", "1", "--why", "once more")
    told = (await run("log", entry, "--diff")).splitlines()
    assert told[0].startswith("v2")
    assert told[0].endswith("once more")
    assert told[-1].endswith("the manual")
    assert "Join on it" in await run("revert", "v1")
    lines = [json.loads(line) for line in (await run("export")).splitlines()]
    assert sorted(line["title"] for line in lines) == ["Orders", "Refunds"]
    copy = tmp_path / "copy.jsonl"
    copy.write_text(await run("export"))
    assert len((await run("add", str(copy))).splitlines()) == 2


async def test_questions_gate_a_change_and_report_what_broke(run: Run, tmp_path: Path) -> None:
    questions, notes, report = tmp_path / "q.jsonl", tmp_path / "notes.md", tmp_path / "report.json"
    questions.write_text(QUESTION)
    notes.write_text(MARKDOWN)
    assert "FAIL  orders_raw?\n      contains 'one row'" in await run("test", str(questions), code=1)
    assert "0 held before, 1 hold now" in await run("add", str(notes), "--test", str(questions))
    assert "ok    orders_raw?\n1 hold, 0 do not" in await run("test", str(questions), "--answers")
    report.write_text(await run("test", str(questions), "--json"))
    entry = json.loads((await run("export")).splitlines()[0])
    await run("tag", "now")
    questions.write_text(QUESTION.replace("Fine", "Wrong").replace("one row", "many rows"))
    told = await run("test", str(questions), "--answers", "--before", str(report), code=1)
    assert "orders_raw?  (held before)" in told
    assert "answer contains 'Wrong'" in told
    assert entry["version"] == 1


async def test_candidates_are_listed_shown_confirmed_and_rejected(run: Run) -> None:
    async with httpx.AsyncClient(base_url=os.environ["TEST_KB_URL"]) as client:

        async def learn(question: str) -> str:
            chat = {"model": MODEL, "knowledge": {}, "messages": [{"role": "user", "content": question}]}
            receipt = (await client.post("/v1/chat/completions", json=chat)).json()["receipt"]
            told = {"turn_id": receipt["knowledge"]["turn_id"], "verdict": "success"}
            candidate = (await client.post("/v1/feedback", json=told)).json()["candidate"]["id"]
            return str(candidate)

        assert await run("candidates") == ""
        first, second = [await learn(question) for question in ("What of refunds?", "Who pays?")]
    lines = (await run("candidates")).splitlines()
    assert lines[0] == f"{second}  open  query_template  seen 1  Who pays?"
    assert [json.loads(line)["id"] for line in (await run("candidates", "--json")).splitlines()] == [
        second,
        first,
    ]
    assert "| Question: What of refunds?\n| Answer: Fine." in await run("candidates", first)
    assert "query_template  Refunds" in await run("confirm", first, "--title", "Refunds", "--why", "read it")
    assert "is confirmed already" in await run("reject", first, code=1)
    assert "rejected  query_template" in await run("reject", second, "--why", "no")
    assert await run("candidates") == ""
    assert second in await run("candidates", "--state", "rejected")
    assert json.loads(await run("export"))["text"] == "Question: What of refunds?\nAnswer: Fine."
    assert "why: no" in await run("candidates", second)
    assert "there is no candidate" in await run("confirm", "cand_x", code=1)


async def test_a_log_of_many_versions_is_whole(run: Run) -> None:
    entry = (await run("add", "--text", "x", "--kind", "gotcha")).split()[0]
    for _ in range(4):
        await run("revert", entry, "--version", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samovar.cluster.cli.kb.PAGE", 2)
        lines = (await run("log", entry)).splitlines()
    assert [line.split()[0] for line in lines] == ["v5", "v4", "v3", "v2", "v1"]


async def test_a_loop_that_is_off_says_how_to_switch_it_on(tmp_path: Path) -> None:
    own = {"enabled": True, "dir": tmp_path / "kb", "embedder": "none", "loop": {"enabled": False}}
    house = House(settings=make_settings(knowledge=own))
    async with house.server() as url:
        done = await asyncio.to_thread(CliRunner().invoke, app, ["kb", "candidates", "--url", url])
    assert (done.exit_code, "--knowledge.loop.enabled true" in done.output) == (1, True)
    house.service.stage("knowledge").close()  # type: ignore[union-attr]


def test_a_backup_of_a_store_that_is_not_there_makes_none(tmp_path: Path) -> None:
    env = {"SAMOVAR_KNOWLEDGE__DIR": str(tmp_path / "wrong")}
    done = CliRunner().invoke(app, ["kb", "backup", str(tmp_path / "copy")], env=env)
    assert (done.exit_code, "there is no knowledge base" in done.output) == (2, True)
    assert list(tmp_path.iterdir()) == []


async def test_mistakes_are_named(run: Run, tmp_path: Path) -> None:
    assert "give --text TEXT, or files" in await run("add", code=2)
    assert "cannot be read" in await run("add", str(tmp_path / "gone.md"), code=2)
    assert "kind must be" in await run("add", "--text", "x", "--kind", "poem", code=1)
    assert "there is no entry kb_x" in await run("log", "kb_x", code=1)
    (tmp_path / "bad").write_text("{")
    assert "is no JSON" in await run("test", str(tmp_path / "bad"), code=2)
    assert "does not answer" in await run("export", "--url", "http://127.0.0.1:9", code=1)


async def test_a_server_without_it_says_how_to_switch_it_on() -> None:
    async with House().server() as url:
        done = await asyncio.to_thread(CliRunner().invoke, app, ["kb", "export", "--url", url])
    assert (done.exit_code, "--knowledge.enabled true" in done.output) == (1, True)


async def test_a_backup_is_restored_without_a_server(run: Run, tmp_path: Path) -> None:
    env = {"SAMOVAR_KNOWLEDGE__DIR": str(tmp_path / "kb")}

    async def local(*words: str, code: int = 0) -> str:
        done = await asyncio.to_thread(CliRunner().invoke, app, ["kb", *words], env=env)
        assert done.exit_code == code, done.output
        return done.output

    await run("add", "--text", "kept")
    await local("backup", str(tmp_path / "copy"))
    assert "could not be written" in await local("backup", str(tmp_path / "copy"), code=1)
    await run("add", "--text", "later")
    await local("restore", str(tmp_path / "copy"))
    assert [json.loads(line)["text"] for line in (await run("export")).splitlines()] == ["kept"]
    assert "there is no backup" in await local("restore", str(tmp_path / "gone"), code=1)


async def test_a_file_moves_into_postgresql_and_back(
    run: Run, tmp_path: Path, postgres_server: PostgresServer
) -> None:
    embedded = {"SAMOVAR_KNOWLEDGE__DIR": str(tmp_path / "kb")}
    shared = {
        "SAMOVAR_KNOWLEDGE__POSTGRES__URL": postgres_server.url(),
        "SAMOVAR_KNOWLEDGE__POSTGRES__SCHEMA_NAME": "moved",
    }

    async def local(env: dict[str, str], *words: str, code: int = 0) -> str:
        done = await asyncio.to_thread(CliRunner().invoke, app, ["kb", *words], env=env)
        assert done.exit_code == code, done.output
        return done.output

    await run("add", "--text", "kept")
    await local(embedded, "backup", str(tmp_path / "from-file"))
    await local(shared, "restore", str(tmp_path / "from-file"))
    await local(shared, "compact")
    await local(embedded, "compact")
    await local(shared, "backup", str(tmp_path / "from-postgres"))
    await run("add", "--text", "later")
    await local(embedded, "restore", str(tmp_path / "from-postgres"))
    assert [json.loads(line)["text"] for line in (await run("export")).splitlines()] == ["kept"]
    away = {**shared, "SAMOVAR_KNOWLEDGE__POSTGRES__URL": postgres_server.url("xylophone")}
    said = await local(away, "compact", code=1)
    assert "password authentication failed" in said
    assert "xylophone" not in said


async def test_what_was_exported_is_added_again_whatever_its_size(run: Run, tmp_path: Path) -> None:
    """As docs/isolation.md says to be rid of what is not sealed: export, erase, add."""
    entries, large, copy = tmp_path / "many.jsonl", tmp_path / "large.jsonl", tmp_path / "copy.jsonl"
    entries.write_text("".join(f'{{"text": "entry {n}", "kind": "gotcha"}}\n' for n in range(1001)))
    large.write_text("".join(f'{{"text": "{letter * 6000}", "kind": "gotcha"}}\n' for letter in LETTERS * 15))
    assert len((await run("add", str(entries))).splitlines()) == 1001
    await run("add", str(large))
    before = await run("export")
    copy.write_text(before)
    async with httpx.AsyncClient(base_url=os.environ["TEST_KB_URL"]) as client:
        assert (await client.delete("/v1/knowledge")).status_code == 200
    assert await run("export") == ""
    await run("add", str(copy))

    def texts(exported: str) -> list[str]:
        return sorted(json.loads(line)["text"] for line in exported.splitlines())

    assert texts(await run("export")) == texts(before)


async def test_a_part_that_is_refused_says_what_was_added(run: Run, tmp_path: Path) -> None:
    entries = tmp_path / "many.jsonl"
    entries.write_text("".join(f'{{"text": "entry {n}", "kind": "gotcha"}}\n' for n in range(1000)) + "[]\n")
    assert f"of {entries} only what is above line 1,001 was added" in await run("add", str(entries), code=1)
    assert len((await run("export")).splitlines()) == 1000


def test_an_error_that_is_a_text_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    told = httpx.MockTransport(lambda _: httpx.Response(502, json={"error": "bad gateway"}))
    monkeypatch.setattr(
        running, "client_of", lambda *_: httpx.Client(transport=told, base_url="http://127.0.0.1:1")
    )
    done = CliRunner().invoke(app, ["kb", "export"])
    assert (done.exit_code, done.stderr) == (1, "samovar: bad gateway\n")


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    env = {"SAMOVAR_URL": "http://127.0.0.1:1", "SAMOVAR_API_KEY": ""}
    for words, given in ((["search", "gr\udcfc"], b""), (["add", "-"], b"gr\xfc")):
        done = CliRunner().invoke(app, ["kb", *words], input=given, env=env)
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.exception
