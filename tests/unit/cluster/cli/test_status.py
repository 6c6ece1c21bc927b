"""`samovar status`: from what a server says to two tables, and clear words when it says nothing."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from samovar.cache_tiers.messages import NodeStats, PeerStats, TierStats
from samovar.cache_tiers.pricing.meters import TierPrice
from samovar.cluster.cli import main as cli
from samovar.cluster.cli import status
from samovar.cluster.cli.status import (
    PEER_HEAD,
    REPLICA_HEAD,
    SHORT_HEAD,
    TIER_HEAD,
    Status,
    StatusFailed,
    all_of,
    ask,
    draining_lines,
    peer_rows,
    replica_rows,
    short,
    short_rows,
    sources_in_words,
    tier_rows,
    troubles,
)
from samovar.cluster.serve.rollout import flush_line
from samovar.replicas.messages import EngineStats
from tests.support.router.router_harness import ADMIN_KEY, KEY, House, make_settings

ROOT = Path(__file__).resolve().parents[4]
NODE = NodeStats(
    node_id="0123456789abcdef",
    incarnation="i",
    restarts=0,
    tiers=(
        TierStats(
            "cpu",
            "up",
            bytes_held=3 * 2**29,
            bytes_max=2**31,
            extents=1234,
            tokens=56789,
            read_bytes=2**20,
            price=TierPrice(0.00042, 3.5e9),
        ),
        TierStats("nvme", "open", verify_failures={"checksum": 2, "torn": 1}, read_errors=4, write_errors=1),
        TierStats("s3", "off: no bucket", price=TierPrice(0.03, float("inf")), listed_ago_s=41.6),
    ),
)
REPLICA = EngineStats(
    "replica-1",
    kv_dtype="int8",
    running=1,
    waiting=2,
    loading=3,
    pages_total=40,
    tokens_by_source={"gpu": 5, "s3": 0, "cpu": 1000},
)


async def answered(house: House, key: str = "") -> httpx.MockTransport:
    """What `house` says on the two routes, for a client that is not async."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with house.client(**headers) as client:
        replies = {path: await client.get(path) for path in ("/health", "/cache/stats")}

    def say(request: httpx.Request) -> httpx.Response:
        reply = replies[request.url.path]
        return httpx.Response(reply.status_code, content=reply.content)

    return httpx.MockTransport(say)


def full() -> House:
    house = House()
    house.replicas.nodes, house.replicas.stats_now = [NODE], [REPLICA]
    return house


async def test_rows_of_what_a_server_says() -> None:
    found = ask("http://127.0.0.1:1/v1/", None, transport=await answered(full()))
    assert found.health == {"status": "ok", "replicas": 1}
    (replica,) = replica_rows(found)
    assert len(replica) == len(REPLICA_HEAD)
    assert replica == ("replica-1", "1", "2", "3", "0", "0", "0", "40", "int8", "gpu=5 cpu=1,000")
    cpu, nvme, s3 = tier_rows(found)
    assert len(cpu) == len(TIER_HEAD)
    assert cpu[:7] == ("01234567", "cpu", "up", "1.5 GiB / 2.0 GiB", "1,234", "56,789", "0")
    assert cpu[7:] == ("1.0 MiB / 0 B", "0.42", "3.50", "0", "0", "-")
    assert nvme[2] == "open"
    assert nvme[8:] == ("-", "-", "5, 3 bad", "0", "-")
    assert s3[2] == "off: no bucket"
    assert s3[8:] == ("30.00", "-", "0", "0", "42")


def test_other_nodes_and_drains_are_shown() -> None:
    peer = PeerStats(
        "up",
        pulls={"nixl": 3, "ray": 1},
        nbytes={"nixl": 2**30, "ray": 2**30},
        seconds={"nixl": 1.0, "ray": 1.0},
    )
    node = replace(NODE, peers={"fedcba9876543210": peer}, draining=True, drained={"s3": 2, "left": 1})
    found = Status({}, [], [asdict(node)])
    (row,) = peer_rows(found)
    assert len(row) == len(PEER_HEAD)
    assert row == ("01234567", "fedcba98", "up", "nixl=3 ray=1", "2.0 GiB", "1.07", "-", "-")
    assert draining_lines(found) == ["node 01234567 is draining: s3=2 left=1"]
    assert peer_rows(Status({}, [], [asdict(NODE)])) == []


async def test_keys_that_may_not_look_are_told_so() -> None:
    house = House(settings=make_settings(keys={"a": KEY}, admin_key=ADMIN_KEY))
    for key in ("", KEY):
        transport = await answered(house, key)
        with pytest.raises(StatusFailed, match=r"auth\.admin_key.*SAMOVAR_API_KEY"):
            ask("http://127.0.0.1:1", key, transport=transport)
    assert ask("http://127.0.0.1:1", ADMIN_KEY, transport=await answered(house, ADMIN_KEY)).nodes == []


async def test_the_key_goes_out_as_a_bearer() -> None:
    seen: list[str | None] = []

    def say(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json={})

    ask("http://127.0.0.1:1", "key", transport=httpx.MockTransport(say))
    ask("http://127.0.0.1:1", None, transport=httpx.MockTransport(say))
    assert seen == ["Bearer key"] * 2 + [None] * 2


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (httpx.Response(404), "is this a Samovar server"),
        (httpx.Response(200, text="<html>"), "is this a Samovar server"),
        (httpx.Response(200, text="[1]"), "is this a Samovar server"),
        (httpx.ConnectError("refused"), "samovar serve"),
        (httpx.ReadTimeout("slow"), "does not answer: ReadTimeout"),
    ],
)
def test_what_is_no_samovar_is_said_in_words(reply: httpx.Response | Exception, said: str) -> None:
    def say(request: httpx.Request) -> httpx.Response:
        if isinstance(reply, Exception):
            raise reply
        return reply

    with pytest.raises(StatusFailed, match=said):
        ask("http://127.0.0.1:1", None, transport=httpx.MockTransport(say))
    with pytest.raises(StatusFailed, match="is not a URL"):
        ask("localhost", None)


async def test_a_server_that_loads_has_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    house.replicas.infos = []
    found = ask("http://127.0.0.1:1", None, transport=await answered(house))
    assert found.health["status"] == "loading"


def test_the_command_prints_tables_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def fake(url: str, api_key: str | None) -> Status:
        asked.append((url, api_key))
        tier: dict[str, Any] = json.loads(json.dumps({"node_id": "n", "tiers": []}))
        return Status({"status": "ok"}, [], [tier])

    monkeypatch.setattr(status, "ask", fake)
    monkeypatch.setenv("SAMOVAR_API_KEY", "from-env")
    monkeypatch.setenv("XDG_STATE_HOME", "/nowhere")
    table = CliRunner().invoke(cli.app, ["status", "--url", "h:1", "--all"])
    assert table.exit_code == 0
    assert "http://h:1: ok" in table.stdout
    assert "\t".join(TIER_HEAD) in table.stdout
    as_json = CliRunner().invoke(cli.app, ["status", "--json"])
    assert json.loads(as_json.stdout)["health"] == {"status": "ok"}
    in_short = CliRunner().invoke(cli.app, ["status"], env={"SAMOVAR_URL": "http://h:2"})
    assert "http://h:2: ok" in in_short.stdout
    assert "prompt tokens so far: none" in in_short.stdout
    assert asked == [
        *(("http://h:1", "from-env"), ("http://127.0.0.1:8000", "from-env"), ("http://h:2", "from-env"))
    ]


def drawn(view: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(view)
    return console.export_text()


def test_the_short_form_says_in_peoples_words_where_blocks_are() -> None:
    found = Status({"status": "ok"}, [asdict(REPLICA)], [asdict(NODE)])
    assert [len(row) for row in short_rows(found)] == [len(SHORT_HEAD)] * 4
    assert short_rows(found) == [
        ("pool", "0 pages", "40", "", "", ""),
        ("RAM", "1.5 GiB", "2.0 GiB", "56,789", "1.0 MiB", "up"),
        ("disk", "0 B", "0 B", "0", "0 B", "open"),
        ("S3", "0 B", "0 B", "0", "0 B", "not set up"),
    ]
    assert sources_in_words(found.replicas) == "1,005 (RAM 100%, pool 0%)"
    assert troubles(found) == ["disk: not in use: it does not answer, and is tried again"]
    text = drawn(short(found, "http://127.0.0.1:8000"))
    assert "1 replica, 1 node; requests: 1 running, 2 waiting, 3 loading" in text
    for jargon in ("gpu", "cpu", "nvme", "extent", "breaker", "predictor", "regret"):
        assert jargon not in text


def test_nodes_are_added_up_and_a_shared_bucket_is_not() -> None:
    tier = {"bytes_held": 2**30, "bytes_max": 2**31, "tokens": 10, "read_bytes": 2**20}
    up = replace(NODE, tiers=tuple(TierStats(name, "up", **tier) for name in ("cpu", "s3")))
    busy = "off: in use by pid 21046 (/home/somebody/.cache/samovar/kv/lock)"
    down = replace(up, node_id="fedcba9876543210", tiers=(TierStats("cpu", busy), up.tiers[1]))
    found = Status({}, [], [asdict(up), asdict(down)])
    assert short_rows(found)[1:] == [
        ("RAM", "1.0 GiB", "2.0 GiB", "10", "1.0 MiB", "1 of 2 up"),
        ("S3", "1.0 GiB", "2.0 GiB", "10", "2.0 MiB", "up"),
        ("other node", "", "", "", "0 B", ""),
    ]
    (line,) = troubles(found)
    assert line == f"RAM (node fedcba98): {busy}"


@pytest.mark.parametrize("width", [80, 60])
def test_no_line_of_the_status_is_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    node = replace(NODE, draining=True, drained={"s3": 2})
    found = Status({"status": "ok"}, [asdict(REPLICA)], [asdict(node)])
    for view in (short(found, "http://h"), all_of(found, "http://h")):
        text = drawn(view, width)
        assert "…" not in text
        assert "56,789" in text
        assert max(map(len, text.splitlines())) <= width


def test_watching_goes_on_when_the_server_does_not_answer_and_ends_with_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [Status({"status": "ok"}, [], []), StatusFailed("nothing answers"), KeyboardInterrupt()]

    def fake(url: str, api_key: str | None) -> Status:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(status, "ask", fake)
    status.show("http://h", None, watch_s=0.0)
    assert answers == []
    assert "nothing answers" in capsys.readouterr().out


def test_the_command_refuses_in_words() -> None:
    result = CliRunner().invoke(cli.app, ["status", "--url", "nowhere"])
    assert result.exit_code == 2
    assert "is not a URL" in result.stderr
    assert "Traceback" not in result.output


def test_status_imports_nothing_heavy() -> None:
    code = (
        "import sys, samovar.cluster.cli.status\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'boto3') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("done", "said"),
    [
        ({}, ""),
        ({"written": 0, "failed": 0, "left": 0, "silent": 0}, ""),
        ({"written": 1200}, "1,200 extents written"),
        (
            {"written": 1, "failed": 2, "left": 3, "silent": 1},
            "1 extents written; 5 not written: .*; 1 nodes did not",
        ),
    ],
)
def test_what_is_said_after_a_flush(done: dict[str, int], said: str) -> None:
    assert re.match(said, flush_line(done))
    assert bool(flush_line(done)) == bool(said)


def test_a_server_that_starts_or_stops_says_so() -> None:
    error = {"error": {"message": "Samovar is loading. Try again in a moment.", "type": "unavailable"}}
    transport = httpx.MockTransport(lambda _: httpx.Response(503, json=error))
    with pytest.raises(StatusFailed, match="Samovar is loading"):
        ask("http://127.0.0.1:1", None, transport=transport)


@pytest.mark.parametrize(
    "command",
    [["status"], ["diagnose"], ["kb", "export"], ["chat", "hi"]],
    ids=["status", "diagnose", "kb", "chat"],
)
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"SAMOVAR_API_KEY": "schl\u00fcssel"}, "SAMOVAR_API_KEY"),
        ({"SAMOVAR_URL": "http://[::1"}, "is not a URL"),
        ({"SAMOVAR_URL": "http://h:99999"}, "is not a URL"),
    ],
)
def test_an_address_or_a_key_that_cannot_be_used_is_said_in_a_line(
    command: list[str], env: dict[str, str], said: str
) -> None:
    given = {"SAMOVAR_URL": "http://127.0.0.1:1", "SAMOVAR_API_KEY": "", **env}
    done = CliRunner().invoke(cli.app, command, env=given)
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (1, 2)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
