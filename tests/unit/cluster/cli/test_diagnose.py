"""`samovar diagnose`, `doctor` and `plan --live` as they are called: what they print, and how they exit."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from samovar.cache_tiers.pricing import TierPrice
from samovar.cluster.cli import diagnose as commands
from samovar.cluster.cli import main as cli
from samovar.cluster.cli.status import StatusFailed
from samovar.cluster.doctor import doctor
from samovar.cluster.doctor.check import MachineCheck, diagnosis_view
from samovar.router.observe.diagnosis import BY_NAME, Snapshot, diagnose, snapshot_of
from tests.support.router.router_harness import House
from tests.support.router.snapshots import HEALTHY, NODE, PLANTED, REPLICA

URL = "http://127.0.0.1:1"
WIDE_MAX = 80


def run(*args: str) -> Result:
    return CliRunner().invoke(cli.app, [*args, *(["--url", URL] if args[0] != "doctor" else [])])


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a server of which these are the next snapshots, the last of them for ever."""

    def begin(*said: Snapshot | StatusFailed) -> None:
        left = list(said)

        def next_one(url: str, api_key: str | None, **_: Any) -> Snapshot:
            now = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(now, StatusFailed):
                raise now
            return now

        monkeypatch.setattr(commands, "snapshot", next_one)

    return begin


def test_a_healthy_server_is_told_so_and_exits_with_0(serve: Callable[..., None]) -> None:
    serve(HEALTHY)
    result = run("diagnose")
    assert result.exit_code == 0
    assert "Nothing is wrong: none of 15 conditions holds" in result.stdout
    every = run("diagnose", "--all").stdout
    assert all(f"✓ {name} " in every for name in BY_NAME)


@pytest.mark.parametrize(("name", "cause"), PLANTED)
def test_a_condition_is_told_with_its_numbers_and_exits_with_1(
    name: str, cause: str, serve: Callable[..., None]
) -> None:
    serve(PLANTED[name, cause])
    result = run("diagnose")
    assert result.exit_code == 1
    said = " ".join(result.stdout.split())
    assert f"✗ {BY_NAME[name].title}" in said
    assert said.count("✗") == 1
    assert "→" in said
    assert "1 of 15 conditions holds" in said
    assert "..." not in said.replace("....", "")
    assert ".." not in said, said
    record = json.loads(run("diagnose", "--json").stdout)
    assert [one["condition"] for one in record["findings"] if one["state"] == "holds"] == [name]


def test_a_server_that_cannot_be_asked_exits_with_2(serve: Callable[..., None]) -> None:
    serve(StatusFailed("nothing answers"))
    result = run("diagnose")
    assert (result.exit_code, result.stderr) == (2, "samovar: nothing answers\n")
    assert run("plan", "--live").exit_code == 2


def test_over_judges_what_happens_meanwhile(serve: Callable[..., None]) -> None:
    bad = PLANTED["timeouts", "nvme"]
    serve(bad, bad)
    result = run("diagnose", "--over", "0.2")
    assert result.exit_code == 0
    assert "0 answers in the last" in result.stdout
    serve(HEALTHY, bad)
    assert run("diagnose", "--over", "0.2").exit_code == 1


def test_watch_judges_each_period_by_itself_until_ctrl_c(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, left = PLANTED["timeouts", "nvme"], [HEALTHY, PLANTED["timeouts", "nvme"]]

    def next_one(url: str, api_key: str | None) -> Snapshot:
        if not left:
            raise KeyboardInterrupt
        return left.pop(0)

    monkeypatch.setattr(commands, "snapshot", next_one)
    result = run("diagnose", "--watch", "--json", "--interval", "0.2")
    first, second = map(json.loads, result.stdout.splitlines())
    held = [
        [one["condition"] for one in said["findings"] if one["state"] == "holds"] for said in (first, second)
    ]
    assert (result.exit_code, held) == (0, [[], ["timeouts"]])
    assert (first["period_s"], second["turns"]) == (None, 0)
    left.append(bad)  # the last picture stays: here the first one, since the start
    said = run("diagnose", "--watch", "--interval", "0.2")
    assert said.exit_code == 0
    assert BY_NAME["timeouts"].title in said.stdout


def test_what_is_wrong_fits_a_narrow_terminal() -> None:
    for snapshot in PLANTED.values():
        out = io.StringIO()
        Console(file=out, width=WIDE_MAX).print(diagnosis_view(diagnose(snapshot), URL, every=True))
        assert all(len(line) <= WIDE_MAX for line in out.getvalue().splitlines())


async def test_the_snapshot_is_that_of_the_servers_three_answers() -> None:
    house = House()
    house.replicas.nodes, house.replicas.stats_now = [NODE], [REPLICA]
    async with house.client() as client:
        replies = {path: await client.get(path) for path in ("/cache/stats", "/metrics")}

    def say(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=replies[request.url.path].content)

    found = commands.snapshot(URL, None, transport=httpx.MockTransport(say))
    assert (found.replicas, found.nodes) == ((REPLICA,), (NODE,))
    other = httpx.MockTransport(lambda request: httpx.Response(200, json={"replicas": [{}]}))
    with pytest.raises(StatusFailed, match="another version"):
        commands.snapshot(URL, None, transport=other)


def test_plan_live_shows_what_fits_and_from_where_on_loading_wins(
    serve: Callable[..., None], tmp_path: Path
) -> None:
    serve(HEALTHY)
    result = run("plan", "--live", "--json", str(tmp_path / "live.json"))
    assert result.exit_code == 0, result.stderr
    assert "a/model: 50,000 bytes of KV a token (bfloat16)" in result.stdout
    assert "-: the context ends at 8,192 tokens (32k, 128k)" in result.stdout
    record = json.loads((tmp_path / "live.json").read_text())
    first = record["contexts"][0]
    # 1,024 pages of 16 tokens hold 8 contexts of 2,048; a step of one takes c0 + a + b x (2 x 2048 + 1).
    assert (first["sequences"], first["running"]) == (8, 8)
    assert first["alone_tokens_per_s"] == pytest.approx(1 / (0.01 + 1e-3 + 1e-8 * 4097))
    assert first["compute_s"] == pytest.approx(4 * 0.01 + 2.048 + 1e-8 * 2048 * 2048)
    cpu, nvme = record["tiers"]
    # A token is computed in 1 ms + 10 ms / 512, and loaded in 50 kB / 4 GB/s behind 1 ms.
    assert (cpu["name"], cpu["wins_from"], nvme["wins_from"]) == ("cpu", 1, 4)
    assert cpu["load_s"][0] == pytest.approx(1e-3 + 2048 * 50_000 / 4e9)


def test_plan_live_writes_json_without_infinities(serve: Callable[..., None], tmp_path: Path) -> None:
    """Of a step without a bound, and of a tier whose bandwidth was told as null."""
    unmeasured = replace(NODE.tiers[0], price=TierPrice(1e-3, math.inf))
    node, settings = replace(NODE, tiers=(unmeasured,)), {"engine.sequences_max": 8}
    serve(replace(HEALTHY, nodes=(node,), settings=settings))
    assert run("plan", "--live", "--json", str(tmp_path / "live.json")).exit_code == 0

    def refuse(word: str) -> None:
        raise AssertionError(word)

    record = json.loads((tmp_path / "live.json").read_text(), parse_constant=refuse)
    assert record["tiers"][0]["bytes_per_s"] is None
    assert record["prefill"]["step_tokens"] is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--live", "--trace", "f"], "leave --trace"),
        (["--live", "--gpu", "80GB"], "--gpu is not needed with --live"),
        (["--live", "--replicas", "2"], "--replicas needs --trace"),
        (["--live", "--context", "many"], "'many' is not a number of tokens"),
        ([], "or --live"),
    ],
)
def test_plan_live_refuses_what_describes_something_else(
    args: list[str], said: str, serve: Callable[..., None]
) -> None:
    serve(HEALTHY)
    result = run("plan", *args)
    assert result.exit_code == 2
    assert said in result.stderr


def test_plan_live_of_a_service_without_replicas_is_refused(serve: Callable[..., None]) -> None:
    serve(Snapshot(0.0))
    assert "is it ready?" in run("plan", "--live").stderr


@pytest.mark.parametrize(
    ("states", "code", "said"),
    [
        (["ok", "ok"], 0, "all is well"),
        (["ok", "warning"], 0, "1 warning."),
        (["warning", "error"], 1, "1 error"),
    ],
)
def test_doctor_exits_by_its_worst_check(
    states: list[Any], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [
        MachineCheck(f"c{n}", f"check {n}", lambda state=state: (state, "found", "mend"))
        for n, state in enumerate(states)
    ]
    monkeypatch.setattr(doctor, "checks_of", lambda *_, **__: checks)
    result = run("doctor")
    assert result.exit_code == code
    assert said in result.stdout
    assert json.loads(run("doctor", "--json").stdout)[1] == {
        **{"name": "c1", "title": "check 1", "state": states[1]},
        **{"says": "found", "fix": "mend"},
    }
    assert run("doctor", "--no.such", "1").exit_code == 2


def test_the_record_survives_json_and_names_its_fields() -> None:
    record = diagnose(PLANTED["kv_memory", ""]).json()
    assert set(record) == {"findings", "turns", "period_s"}
    finding = next(one for one in record["findings"] if one["state"] == "holds")
    assert set(finding) == {"condition", "state", "evidence", "numbers", "changes", "cause"}
    assert {"setting", "now", "to", "brings", "deed"} == set(finding["changes"][0])
    assert asdict(snapshot_of({}, "", 1.0))["at_s"] == 1.0


def test_doctor_looks_at_what_a_vllm_here_needs_and_at_nothing_else(tmp_path: Path) -> None:
    found = run("doctor", "--vllm", "--socket", str(tmp_path / "t.sock"), "--json")
    rows = {row["name"]: row["state"] for row in json.loads(found.stdout)}
    assert rows == {
        **{"vllm": "error", "connector": "warning", "config": "ok"},
        **{"socket": "error", "tiers": "warning", "memory_files": "ok"},
    }
    assert found.exit_code == 1
    assert run("doctor", "--socket", str(tmp_path / "t.sock")).exit_code == 2
