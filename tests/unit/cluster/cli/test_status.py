"""`samovar status`: from what a server says to two tables, and clear words when it says nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cache_tiers.messages import NodeStats, PeerStats, TierStats
from cache_tiers.pricing.meters import TierPrice
from cluster.cli import main as cli
from cluster.cli import status
from cluster.cli.status import (
    PEER_HEAD,
    REPLICA_HEAD,
    TIER_HEAD,
    Status,
    StatusFailed,
    ask,
    draining_lines,
    peer_rows,
    replica_rows,
    tier_rows,
)
from cluster.serve.rollout import flush_line
from replicas.messages import EngineStats
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
    assert replica == ("replica-1", "1", "2", "3", "0", "0", "0", "40", "gpu=5 cpu=1,000")
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
    table = CliRunner().invoke(cli.app, ["status", "--url", "http://h:1"])
    assert table.exit_code == 0
    assert "http://h:1: ok" in table.stdout
    assert "\t".join(TIER_HEAD) in table.stdout
    as_json = CliRunner().invoke(cli.app, ["status", "--json"])
    assert json.loads(as_json.stdout)["health"] == {"status": "ok"}
    assert asked == [("http://h:1", "from-env"), ("http://127.0.0.1:8000", "from-env")]


def test_the_command_refuses_in_words() -> None:
    result = CliRunner().invoke(cli.app, ["status", "--url", "nowhere"])
    assert result.exit_code == 2
    assert "is not a URL" in result.stderr
    assert "Traceback" not in result.output


def test_status_imports_nothing_heavy() -> None:
    code = (
        "import sys, cluster.cli.status\n"
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
