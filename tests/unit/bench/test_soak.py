"""The soak fails when it must: each thing it looks for, planted."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bench import _report as report
from bench._soak_clients import Tally
from bench._soak_faults import Saboteur, disk_use, fault_flags, files_below
from bench._soak_oracle import Answer, Message, Oracle, Turn
from bench._soak_watch import Growth, Sample, TierCounters, growths, process_name
from bench.soak import Books, Found, Soak
from samovar.cache_tiers.messages import NodeStats, TierStats
from samovar.configs.loader import load
from samovar.configs.sections import MIB
from samovar.replicas.messages import EngineStats
from tests.support.services.service import until

RECEIPT = {"tokens": {"gpu": 10, "cpu": 20, "compute": 30}, "decision": "load"}
CACHED = Answer("tea and cake", "stop", 60, 4, 30, RECEIPT)
FRESH = replace(CACHED, cached_tokens=0)


def turn(answer: Answer = CACHED) -> Turn:
    return Turn("soak-1-1", 2, ({"role": "user", "content": "?"},), 8, {"session_id": "soak-1-1"}, answer)


class Service:
    """Answers `fresh` under a salt, `cached` otherwise."""

    def __init__(self, fresh: Answer = FRESH, cached: Answer = CACHED) -> None:
        self.fresh, self.cached = fresh, cached
        self.salts: list[str] = []

    async def __call__(
        self, messages: Sequence[Message], max_tokens: int, extra: Mapping[str, Any]
    ) -> Answer:
        if "cache_salt" not in extra:
            return self.cached
        self.salts.append(extra["cache_salt"])
        return self.fresh


async def test_answers_that_agree_are_no_finding() -> None:
    service = Service()
    oracle = Oracle(service)
    turns = [turn(), turn()]
    await oracle.check(turns[0])
    assert await oracle.check_all(turns, at_once=1) == []
    assert (oracle.checked, oracle.wrong) == (2, [])
    assert len(set(service.salts)) == 2
    assert oracle.repeated["cpu"] == 40


@pytest.mark.parametrize(
    "change",
    [
        {"text": "tea and bread"},
        {"answer_tokens": 5},
        {"finish_reason": "length"},
        {"prompt_tokens": 61},
        {"cached_tokens": 16},
    ],
)
async def test_g14_every_difference_to_an_answer_without_a_cache_is_wrong(change: dict[str, Any]) -> None:
    oracle = Oracle(Service(fresh=replace(FRESH, **change)))
    await oracle.check(turn())
    (row,) = oracle.wrong
    (problem,) = replace_found(wrong=oracle.wrong).problems()
    assert problem == f"WRONG ANSWER in soak-1-1, turn 2: {row['what']}"


async def test_g14_another_answer_with_the_cache_later_is_wrong() -> None:
    oracle = Oracle(Service(cached=replace(CACHED, text="tea")))
    await oracle.check_all([turn()], at_once=1)
    assert len(oracle.wrong) == 1


async def test_what_could_not_be_asked_is_told() -> None:
    async def broken(messages: Sequence[Message], max_tokens: int, extra: Mapping[str, Any]) -> Answer:
        raise RuntimeError("no")

    oracle = Oracle(broken)
    assert [str(error) for error in await oracle.check_all([turn()], at_once=1)] == ["no"]
    assert oracle.checked == 0


GOOD_BOOKS = Books(bytes_held=100_000, disk_bytes=100_000, disk_files=1)
GOOD_REPLICA = {"audits": {"equal": 3}, "integrity_failures": 0}


def replace_found(**change: Any) -> Found:
    """A run without a problem, but for `change`."""
    tally = Tally(tokens=Counter(nvme=1))
    good = Found(minutes=20, tally=tally, checked=1, replicas=[GOOD_REPLICA], books=GOOD_BOOKS)
    return replace(good, **change)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing checked": ({"checked": 0}, "no answer was checked"),
    "no tier used": ({"tally": Tally()}, "no token came from a tier"),
    "error": ({"tally": Tally(errors=Counter(boom=2), tokens=Counter(s3=1))}, "2 x boom"),
    "audit": ({"replicas": [{"audits": {"mismatch": 1}, "integrity_failures": 0}]}, "audit: 1 restored"),
    "integrity": ({"replicas": [{"audits": {}, "integrity_failures": 1}]}, "an engine's books"),
    "pages": ({"books": replace(GOOD_BOOKS, pages=1)}, "1 pages are held"),
    "running": ({"books": replace(GOOD_BOOKS, running=1)}, "1 sequences run"),
    "counted too little": ({"books": replace(GOOD_BOOKS, disk_bytes=110_000)}, "the nvme tier counts"),
    "counted too much": ({"books": replace(GOOD_BOOKS, disk_bytes=90_000)}, "the nvme tier counts"),
    "leak": ({"growths": [Growth("all", "memory", 100 * MIB, 106 * MIB)]}, "grows: all"),
}


class StatsService:
    """Answers every request with `stats`."""

    def __init__(self, stats: dict[str, Any]) -> None:
        self.stats = stats
        self.process = psutil.Process()

    def http(self) -> httpx.Client:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, json=self.stats))
        return httpx.Client(transport=transport, base_url="http://soak")


@pytest.mark.parametrize(("queue", "staged_bytes"), [(0, 0), (1, 0), (0, 4096)])
def test_the_books_are_read_when_nothing_is_on_its_way(tmp_path: Path, queue: int, staged_bytes: int) -> None:
    """The fields are those of `/cache/stats`: a node's work, and what a replica has staged."""
    node = asdict(NodeStats("n", "i", 0, (TierStats("nvme", "up", bytes_held=7),), queue=queue))
    replica = asdict(EngineStats("r", pages_active=3, staged_bytes=staged_bytes))
    service = StatsService({"nodes": [node], "replicas": [replica]})
    soak = Soak(argparse.Namespace(seed=1, replicas=1, minutes=1), service, tmp_path)  # type: ignore[arg-type]
    books = soak._look()
    if queue or staged_bytes:
        assert books is None
    else:
        assert books == Books(pages=3, bytes_held=7)


def test_the_command_that_is_written_down_is_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "OUT_DIR", tmp_path)
    monkeypatch.setattr("sys.argv", ["anything", "--quick"])
    written = json.loads(report.write("return", [{"a": 1}], module="returning", wrong=0).read_text())
    assert written["command"].endswith(" -m bench.returning --quick")
    assert (written["rows"], written["wrong"]) == ([{"a": 1}], 0)
    written = json.loads(report.write("engine", []).read_text())
    assert written["command"].endswith(" -m bench.engine --quick")


def test_a_good_run_has_no_problems() -> None:
    assert list(replace_found().problems()) == []


@pytest.mark.parametrize("name", BAD)
def test_every_problem_is_told(name: str) -> None:
    change, said = BAD[name]
    (problem,) = replace_found(**change).problems()
    assert said in problem


def test_files_that_the_soak_deleted_may_still_be_counted_but_no_more() -> None:
    books = replace(GOOD_BOOKS, disk_bytes=50_000, missing_bytes=50_000)
    assert list(books.problems()) == []
    assert list(replace(books, missing_bytes=40_000).problems())


def test_a_short_run_is_not_judged_by_its_growth() -> None:
    growth = [Growth("all", "memory", 100, 200)]
    assert list(replace_found(minutes=1, growths=growth).problems()) == []


@pytest.mark.parametrize(
    ("growth", "is_leak"),
    [
        (Growth("all", "memory", 1000 * MIB, 1040 * MIB), False),
        (Growth("all", "memory", 1000 * MIB, 1060 * MIB), True),
        (Growth("x", "memory", 100 * MIB, 160 * MIB), False),
        (Growth("x", "memory", 100 * MIB, 170 * MIB), True),
        (Growth("x", "files", 20, 36), False),
        (Growth("x", "files", 20, 37), True),
        (Growth("x", "threads", 200, 241), True),
        (Growth("x", "threads", 200, 100), False),
    ],
)
def test_leaks(growth: Growth, is_leak: bool) -> None:
    assert growth.is_leak is is_leak


def test_growth_is_between_the_second_quarter_and_the_last() -> None:
    samples: list[Sample] = [
        {"a": Counter(memory=memory, files=1, threads=1), "b": Counter(memory=10)}
        for memory in (1, 2, 100, 100, 300, 900, 200, 200)
    ]
    by_name = {(growth.name, growth.kind): growth for growth in growths(samples)}
    assert by_name["a", "memory"] == Growth("a", "memory", 100, 200)
    assert by_name["all", "memory"] == Growth("all", "memory", 110, 210)


def test_counters_of_actors_that_died_are_not_lost() -> None:
    def node(incarnation: str, stored: int, bad: int) -> dict[str, Any]:
        tier = {"name": "nvme", "verify_failures": {"checksum": bad}, "read_errors": 1}
        counts = {"incarnation": incarnation, "stores": {"stored": stored}}
        return {**counts, "restarts": int(incarnation), "tiers": [tier]}

    counters = TierCounters()
    for seen in (node("0", 1, 0), node("0", 5, 2), node("1", 3, 1)):
        counters.note([seen])
    assert counters.words("stores") == {"stored": 8}
    assert counters.of_tiers("verify_failures", "read_errors")["nvme"] == {"checksum": 3, "read_errors": 2}
    assert counters.restarts == 1


def test_harm_is_done_and_deleted_room_is_known(tmp_path: Path) -> None:
    saboteur = Saboteur(psutil.Process(), tmp_path, seed=1)
    assert not saboteur._flip()
    assert not saboteur._delete()
    content = random.Random(0).randbytes(8192)
    path = tmp_path / "a" / "x.kv"
    path.parent.mkdir()
    path.write_bytes(content)
    room, files = disk_use(tmp_path)
    assert (room, files) == (path.stat().st_blocks * 512, 1)
    assert saboteur._flip()
    changed = [one ^ other for one, other in zip(content, path.read_bytes(), strict=True)]
    assert sum(byte.bit_count() for byte in changed) == 1
    assert saboteur._delete()
    assert saboteur.missing_bytes == room
    path.write_bytes(content)  # the tier wrote it again
    assert saboteur.missing_bytes == 0


def test_flags_of_faults_are_settings() -> None:
    faults = load(None, {}, list(fault_flags(3))).settings.tiers.faults
    assert faults.nvme.flip_rate > 0
    assert faults.s3.full_rate > 0
    assert faults.cpu.error_rate == 0  # or main memory would be another tier than in production
    assert faults.s3.seed == 3


@pytest.fixture
def service_process() -> Iterator[psutil.Process]:
    """A process with two children that look like the tier actor at work and the S3 server."""
    script = "(exec -a ray::TierActor.fetch sleep 60) & (exec -a /x/rclone sleep 60) & echo; wait"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        root = psutil.Process(process.pid)
        until("both run", lambda: {"ray::TierActor", "rclone"} <= {process_name(p) for p in root.children()})
        yield root
        for child in root.children():
            child.kill()


def child(root: psutil.Process, name: str) -> psutil.Process | None:
    return next((process for process in root.children() if process_name(process) == name), None)


def test_the_actor_is_found_by_its_title_and_killed(service_process: psutil.Process, tmp_path: Path) -> None:
    assert Saboteur(service_process, tmp_path, seed=1)._kill_actor()
    until("the actor is gone", lambda: child(service_process, "ray::TierActor") is None)
    assert child(service_process, "rclone")


async def test_a_frozen_server_goes_on_even_when_the_soak_ends_meanwhile(
    service_process: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench._soak_faults.FREEZE_S", (60.0, 60.0))
    server = child(service_process, "rclone")
    assert server is not None
    freezing = asyncio.create_task(Saboteur(service_process, tmp_path, seed=1)._freeze_s3())
    await asyncio.to_thread(until, "it is frozen", lambda: server.status() == psutil.STATUS_STOPPED)
    freezing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await freezing
    until("it goes on", lambda: server.status() != psutil.STATUS_STOPPED)


async def test_harm_is_done_until_the_time_is_up(
    service_process: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench._soak_faults.FREEZE_S", (0.01, 0.01))
    (tmp_path / "x.kv").write_bytes(bytes(64))
    saboteur = Saboteur(service_process, tmp_path, seed=1)
    await saboteur.run(time.monotonic() + 1.0)
    assert saboteur.counts.total() > 0


def test_folders_may_go_while_the_soak_walks_them(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.kv").touch()
    found = files_below(tmp_path, ".kv")
    first = next(found)
    for folder in tmp_path.iterdir():
        if folder != first.parent:
            shutil.rmtree(folder)
    assert list(found) == []
