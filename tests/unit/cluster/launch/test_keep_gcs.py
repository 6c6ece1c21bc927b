"""What keeps GCS alive, with processes of our own in the place of GCS and the raylet."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from samovar.cluster.launch import keep_gcs
from samovar.cluster.launch.keep_gcs import (
    DELAY_S_MAX,
    RESTARTS_MAX,
    WINDOW_S,
    Program,
    Restarts,
    ended,
    find,
    is_durable,
    is_gcs,
    is_head_raylet,
    keep,
    main,
)
from tests.support.services.service import until

GCS = ("/x/gcs/gcs_server", "--gcs_server_port=6379", "--session-name=session_1")
RAYLET = ["/x/raylet/raylet", "--session-name=session_1", "--head"]


def test_gcs_and_its_raylet_are_told_from_all_others() -> None:
    assert is_gcs(GCS, 6379)
    assert not is_gcs(GCS, 637)
    assert not is_gcs(("python", *GCS), 6379)
    assert not is_gcs((), 6379)
    assert is_head_raylet(RAYLET, GCS)
    assert not is_head_raylet(RAYLET[:-1], GCS), "a worker's"
    assert not is_head_raylet([*RAYLET[:1], "--session-name=session_2", "--head"], GCS)
    assert not is_head_raylet(RAYLET, GCS[:2])


def test_only_a_gcs_that_finds_again_what_it_knew_is_kept() -> None:
    assert not is_durable(Program(1, GCS, {}, "/"))
    assert not is_durable(Program(1, GCS, {"RAY_gcs_storage": "memory"}, "/"))
    assert is_durable(Program(1, GCS, {"RAY_gcs_storage": "rocksdb"}, "/"))
    assert is_durable(Program(1, (*GCS, "--redis_address=10.0.0.1"), {}, "/"))


def test_restarts_come_later_and_later_and_end() -> None:
    restarts = Restarts()
    delays = [restarts.delay_s(float(second)) for second in range(RESTARTS_MAX)]
    assert delays[:5] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert set(delays[5:]) == {DELAY_S_MAX}
    assert restarts.delay_s(RESTARTS_MAX) is None
    assert restarts.delay_s(WINDOW_S + RESTARTS_MAX + 1) == 0.0, "that is long ago"


class World:
    """Programs named as Ray's, which live until they are killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sleeper = "import sys, time\nprint('up', flush=True)\ntime.sleep(600)"
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *flags: str, **environment: str) -> subprocess.Popen[bytes]:
        """`argv[0]` is what the program is known by."""
        words = [f"/ray/{name}", "-c", self._sleeper, *flags]
        process = subprocess.Popen(
            words,
            executable=sys.executable,
            env=os.environ | environment,
            cwd=self._folder,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def of(process: subprocess.Popen[bytes]) -> Program:
    it = psutil.Process(process.pid)
    # `sys.executable` in place of the name: Popen looks for the program there.
    return Program(it.pid, (sys.executable, *it.cmdline()[1:]), it.environ(), it.cwd())


def successor(parent: int) -> psutil.Process | None:
    return next(
        (one for one in psutil.Process(parent).children() if one.environ().get("MARK") == "new"), None
    )


def test_it_is_found_with_its_environment(world: World, tmp_path: Path) -> None:
    gcs = world.start("gcs_server", "--gcs_server_port=61379", "--session-name=here", MARK="x")
    assert find(61379) is None, "without a raylet there is nothing to keep it for"
    raylet = world.start("raylet", "--session-name=here", "--head")
    found = find(61379)
    assert found is not None
    program, raylet_pid = found
    assert (program.pid, raylet_pid) == (gcs.pid, raylet.pid)
    assert program.environment["MARK"] == "x"
    assert program.directory == str(tmp_path)
    assert program.command[0] == "/ray/gcs_server"
    assert find(61380) is None


def test_an_end_is_seen_also_of_a_zombie(world: World) -> None:
    first, second = world.start("a"), world.start("b")
    assert ended([first.pid, second.pid], 0.0) == set()
    first.kill()  # and nobody waits for it
    assert ended([first.pid, second.pid], 10.0) == {first.pid}
    first.wait()
    assert ended([first.pid, second.pid], 10.0) == {first.pid}


def test_it_comes_back_as_it_was_and_ends_with_the_raylet(world: World, tmp_path: Path) -> None:
    gcs, raylet = world.start("gcs_server", MARK="new"), world.start("raylet")
    program, outcome = of(gcs), list[bool]()
    keeper = threading.Thread(target=lambda: outcome.append(keep(program, raylet.pid, Restarts())))
    keeper.start()
    gcs.kill()
    gcs.wait()
    new = until("it is back", lambda: successor(os.getpid()))
    try:
        assert new.cwd() == str(tmp_path)
        assert new.cmdline()[1:] == of_words(gcs)
        assert new.pid != gcs.pid
        raylet.send_signal(signal.SIGTERM)
        raylet.wait()
        keeper.join(10.0)
        assert outcome == [True]
        assert new.is_running(), "only GCS itself, or `ray stop`, ends GCS"
    finally:
        new.kill()
        new.wait()


def of_words(process: subprocess.Popen[bytes]) -> list[str]:
    assert isinstance(process.args, list)
    return [str(word) for word in process.args[1:]]


def test_gcs_that_dies_with_its_raylet_is_not_started_again(world: World) -> None:
    gcs, raylet = world.start("gcs_server", MARK="new"), world.start("raylet")
    program = of(gcs)
    for process in (raylet, gcs):
        process.kill()
        process.wait()
    assert keep(program, raylet.pid, Restarts())
    assert successor(os.getpid()) is None


def test_one_that_always_dies_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keep_gcs, "DELAY_S_MAX", 0.01)
    raylet, gone = world.start("raylet"), world.start("gcs_server")
    gone.kill()
    gone.wait()
    failing = Program(gone.pid, (sys.executable, "-c", "raise SystemExit(7)"), dict(os.environ), "/")
    with caplog.at_level(logging.WARNING, "samovar.cluster.launch.keep_gcs"):
        assert not keep(failing, raylet.pid, Restarts())
    assert caplog.text.count("GCS is back") == RESTARTS_MAX
    assert "status 7" in caplog.text
    assert "it is not restarted" in caplog.text


def test_with_all_in_memory_it_says_so_and_ends(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start("gcs_server", "--gcs_server_port=61381", "--session-name=mem")
    world.start("raylet", "--session-name=mem", "--head")
    with caplog.at_level(logging.WARNING, "samovar.cluster.launch.keep_gcs"):
        assert main(["--port", "61381"]) == 0
    assert "launch.gcs.storage=rocksdb" in caplog.text


def test_where_no_head_runs_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_gcs, "FIND_S", 0.0)
    with pytest.raises(SystemExit, match="ray start --head --port=61382"):
        main(["--port", "61382"])
