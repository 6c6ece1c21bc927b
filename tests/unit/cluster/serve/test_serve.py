"""The life of `samovar serve` without Ray: what starts first, what ends last, what is said on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError

from samovar.cache_tiers.actors import tier as tier_actors
from samovar.cluster.serve import app, s3_demo
from samovar.cluster.serve import rollout as flush
from samovar.cluster.serve.app import (
    EXIT_INTERRUPTED,
    EXIT_START_FAILED,
    HELD_BACK,
    Signals,
    StartFailed,
    serve_forever,
)
from samovar.cluster.serve.ray_cluster import RayFolder
from samovar.cluster.serve.rollout import FRONT_APP
from samovar.configs.sections import S3TierSettings, TierSettings
from samovar.configs.settings import ModelSettings, ServerSettings, Settings
from tests.support.services.service import until


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


class Stage:
    """Stands in for Ray, the service and the S3 server; notes in which order they are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self.settings: Settings | None = None
        self.at_start: BaseException | None = None
        self.folder: RayFolder | None = None
        self.demo_at_start: Exception | None = None
        stage = self

        class FakeService:
            folder: RayFolder | None = None
            has_own_ray = False
            url_here = "http://127.0.0.1:8811"

            def __init__(self, settings: Settings, stages: object, kind: object) -> None:
                stage.settings = self.settings = settings
                self.folder = stage.folder

            def start(self) -> None:
                stage.steps.append("start")
                if stage.at_start is not None:
                    raise stage.at_start

            def stop(self) -> None:
                stage.steps.append("stop")

        class FakeDemo:
            def __init__(self, directory: Path) -> None:
                stage.steps.append(f"demo in {directory}")

            def start(self) -> None:
                if stage.demo_at_start is not None:
                    raise stage.demo_at_start

            def settings(self, base: Settings) -> Settings:
                tiers = base.tiers.model_copy(update={"s3": S3TierSettings(bucket="demo")})
                return base.model_copy(update={"tiers": tiers})

            def stop(self) -> None:
                stage.steps.append("demo stops")

        monkeypatch.setattr(app, "Service", FakeService)
        monkeypatch.setattr(s3_demo, "S3Demo", FakeDemo)
        monkeypatch.setattr(app, "_say_ready", lambda console, service: signal.raise_signal(signal.SIGTERM))
        monkeypatch.setattr(app.ray, "shutdown", lambda: stage.steps.append("ray stops"))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_the_s3_demo_starts_first_and_stops_last(stage: Stage, tmp_path: Path) -> None:
    settings = Settings(model=ModelSettings(cache_dir=tmp_path))
    assert serve_forever(settings, with_s3_demo=True) == 0
    assert stage.steps == [f"demo in {tmp_path}/s3-demo", "start", "stop", "ray stops", "demo stops"]
    assert stage.settings is not None
    assert stage.settings.tiers.s3.bucket == "demo"


def test_a_reload_that_is_asked_for_before_it_is_ready_is_done_once_it_is(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd does that takes a process for started at once: it would end, and stay ended."""
    monkeypatch.setattr(app, "_hung_up", [])
    monkeypatch.setattr(app, "_update", lambda *_: stage.steps.append("reload"))
    monkeypatch.setattr(app, "_say_ready", lambda *_: None)
    monkeypatch.setattr(app.Run, "_next", lambda run, signals: signal.SIGTERM)
    start = app.Service.start

    def hung_up(service: app.Service) -> None:
        start(service)
        signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr(app.Service, "start", hung_up)
    assert serve_forever(Settings(), reload=Settings) == 0
    assert stage.steps == ["start", "reload", "stop", "ray stops"]


def test_without_the_flag_there_is_no_demo(stage: Stage) -> None:
    assert serve_forever(Settings()) == 0
    assert stage.steps == ["start", "stop", "ray stops"]


def test_the_address_is_told_once_requests_are_served(stage: Stage) -> None:
    assert serve_forever(Settings(), on_ready=stage.steps.append) == 0
    assert stage.steps == ["start", "http://127.0.0.1:8811", "stop", "ray stops"]
    stage.steps, stage.at_start = [], StartFailed("no room")
    assert serve_forever(Settings(), on_ready=stage.steps.append) == EXIT_START_FAILED
    assert stage.steps == ["start", "ray stops"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StartFailed("no room"), EXIT_START_FAILED),
        (KeyboardInterrupt(), EXIT_INTERRUPTED),
        (SystemExit(15), EXIT_INTERRUPTED),  # Ray's own handler of SIGTERM while it starts
    ],
)
def test_a_start_that_fails_takes_everything_down(
    stage: Stage, error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.at_start = error
    assert serve_forever(Settings(), with_s3_demo=True) == code
    assert stage.steps[1:] == ["start", "ray stops", "demo stops"]
    assert ("no room" in capsys.readouterr().err) == (code == EXIT_START_FAILED)


def test_a_demo_that_does_not_start_is_said_and_nothing_else_starts(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.demo_at_start = RuntimeError("no rclone")
    assert serve_forever(Settings(), with_s3_demo=True) == EXIT_START_FAILED
    assert stage.steps[1:] == []
    assert "no rclone" in capsys.readouterr().err


def test_a_demo_beside_a_configured_bucket_is_refused(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Settings(tiers=TierSettings(s3=S3TierSettings(bucket="mine")))
    assert serve_forever(mine, with_s3_demo=True) == EXIT_START_FAILED
    assert stage.steps == []
    assert "two S3 tiers" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_is_not_lost_whichever_thread_takes_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A process that was stopped or traced as a signal came: any thread may have it, Ray's among them."""
    late: list[int] = []

    def ready(console: object, service: object) -> None:
        main, ended = threading.main_thread(), threading.Event()

        def thread_of_rays() -> None:
            asleep_in_kernel(main.native_id)
            signal.pthread_kill(threading.get_ident(), number)
            if not ended.wait(5):
                late.append(number)
                signal.pthread_kill(main.ident or 0, number)

        thread = threading.Thread(target=thread_of_rays)
        thread.start()
        after.append((ended, thread))

    monkeypatch.setattr(app, "_say_ready", ready)
    for _ in range(20):
        after: list[tuple[threading.Event, threading.Thread]] = []
        assert serve_forever(Settings(), reload=Settings) == 0
        for ended, thread in after:
            ended.set()
            thread.join()
        assert late == [], "it was there, and the main thread slept on"
    assert stage.steps == ["start", "stop", "ray stops"] * 20


def asleep_in_kernel(native_id: int | None) -> None:
    """Returns when that thread of this process waits for something."""
    status = Path(f"/proc/self/task/{native_id}/stat")
    while status.read_text().rpartition(")")[2].split()[0] != "S":
        threading.Event().wait(0.001)


def test_signals_come_in_their_order_and_others_are_left_out() -> None:
    handled = threading.Event()
    kept = signal.signal(signal.SIGUSR1, lambda _number, _frame: handled.set())
    try:
        with Signals((signal.SIGINT, signal.SIGHUP)) as signals:
            for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
                signal.raise_signal(number)
            assert [signals.wait() for _ in range(3)] == [signal.SIGHUP, signal.SIGINT, signal.SIGHUP]
    finally:
        signal.signal(signal.SIGUSR1, kept)
    assert handled.is_set()
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    ("error", "is_kept"), [(None, False), (KeyboardInterrupt(), False), (StartFailed("no room"), True)]
)
def test_rays_folder_goes_with_it_but_after_a_failure(
    stage: Stage,
    tmp_path: Path,
    error: BaseException | None,
    is_kept: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stage.folder, stage.at_start = RayFolder(tmp_path), error
    serve_forever(Settings())
    assert stage.folder.path.parent.exists() == is_kept
    assert (f"Ray's logs are in {stage.folder.path}" in capsys.readouterr().err) == is_kept


# Asleep between the start and the end ------------------------------------------------------------

SLEEPS = """
import os, signal, subprocess, sys
from samovar.cluster.serve.app import Signals
children = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
with Signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)) as signals:
    if sys.argv[1:]:
        signal.raise_signal(signal.SIGUSR2 if sys.argv[1] == "other" else int(sys.argv[1]))
    print(os.getpid(), *(child.pid for child in children), flush=True)
    held = "held = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())));"
    said = "print(os.getpid(), sys.argv[1], held, len(os.listdir('/proc/self/fd')), flush=True)"
    signals.sleep([sys.executable, "-c", f"import os, signal, sys; {held} {said}"], [children[0].pid])
"""
HELD = sorted(map(int, HELD_BACK))
SLOW_S = 120.0
"""For a machine with much else to do: these wait for what comes, and measure nothing."""


class Sleeper:
    """A process that sleeps beside two children, of which it watches one."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "-c", "import signal; signal.signal(12, lambda *_: 0)" + SLEEPS, *args]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.lines = self.process.stdout
        self.pid, self.watched, self.other = map(int, self.lines.readline().split())

    def is_asleep(self) -> bool:
        found = psutil.Process(self.pid)
        return "# samovar serve" in " ".join(found.cmdline()) and found.status() == psutil.STATUS_SLEEPING

    def woken_by(self) -> int:
        """The number that the program got which the process has become."""
        pid, number, held = self.lines.readline().split(maxsplit=2)
        assert int(pid) == self.pid, "one process all the time"
        assert held.startswith(str(HELD)), "a signal that comes now must wait for who handles it"
        assert self.process.wait(SLOW_S) == 0
        return int(number)

    def __enter__(self) -> Sleeper:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self.watched, self.other, self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.lines.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_that_sleeps_is_woken_by_a_signal_as_the_same_process(number: signal.Signals) -> None:
    with Sleeper() as sleeper:
        until("it sleeps", sleeper.is_asleep, SLOW_S)
        assert psutil.Process(sleeper.pid).num_threads() == 1
        os.kill(sleeper.pid, number)
        assert sleeper.woken_by() == number


def test_a_signal_just_before_the_sleep_is_not_slept_through() -> None:
    with Sleeper(str(int(signal.SIGHUP))) as sleeper:
        assert sleeper.woken_by() == signal.SIGHUP


def test_a_sleep_ends_with_what_is_watched_and_with_nothing_else() -> None:
    with Sleeper("other") as sleeper:
        until("it sleeps", sleeper.is_asleep, SLOW_S)
        os.kill(sleeper.other, signal.SIGKILL)
        until("it is reaped", lambda: not psutil.pid_exists(sleeper.other), SLOW_S)
        until("it sleeps on", sleeper.is_asleep, SLOW_S)
        os.kill(sleeper.watched, signal.SIGKILL)
        assert sleeper.woken_by() == signal.SIGCHLD


class Asleep:
    """A run that has slept: what it does when it is woken, and what of Ray then."""

    def __init__(self, stage: Stage, monkeypatch: pytest.MonkeyPatch, joins: BaseException | None) -> None:
        def join(cluster: object, address: str, folder: object) -> None:
            stage.steps.append(f"joins {address}")
            if joins is not None:
                raise joins

        monkeypatch.setattr(app, "join_ray", join)
        monkeypatch.setattr(app, "end_children", lambda: stage.steps.append("ray ends"))
        monkeypatch.setattr(app, "_update", lambda *_: stage.steps.append("update"))
        service: Any = app.Service(Settings(), None, None)
        on_end = partial(stage.steps.append, "withdrawn")
        self.run = app.Run(service, Settings, on_end, may_sleep=False, address="127.0.0.1:6379")


ENDS = ["ray stops", "ray ends", "withdrawn"]


@pytest.mark.parametrize(
    ("number", "joins", "code", "steps"),
    [
        (signal.SIGTERM, None, 0, ["joins 127.0.0.1:6379", "stop"]),
        (signal.SIGINT, KeyboardInterrupt(), EXIT_INTERRUPTED, ["joins 127.0.0.1:6379"]),
        (signal.SIGTERM, ConnectionError("none"), EXIT_START_FAILED, ["joins 127.0.0.1:6379"]),
        (signal.SIGCHLD, None, EXIT_START_FAILED, []),
    ],
)
def test_one_that_is_woken_stops_what_it_has_started(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    joins: BaseException | None,
    code: int,
    steps: list[str],
) -> None:
    assert Asleep(stage, monkeypatch, joins).run.go_on(number) == code
    assert stage.steps == [*steps, *ENDS]


def test_one_that_is_woken_to_reload_goes_on_waiting(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = Asleep(stage, monkeypatch, None)
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        signal.raise_signal(signal.SIGTERM)  # while it is woken: neither lost, nor an end at once
        assert asleep.run.go_on(signal.SIGHUP) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    assert stage.steps == ["joins 127.0.0.1:6379", "update", "stop", *ENDS]


def test_a_run_goes_on_with_what_it_had(tmp_path: Path) -> None:
    service = app.Service(Settings(cluster={"replicas": 3}))
    service.folder, service.model_app = RayFolder(tmp_path), "samovar-model-1"
    run = app.Run(service, Settings, int, may_sleep=True, address="127.0.0.1:1")
    again: app.Run = cloudpickle.loads(cloudpickle.dumps(run))
    assert (again.service.settings, again.service.model_app) == (service.settings, "samovar-model-1")
    assert again.service.folder is not None
    again.service.folder.close(keep=False)
    assert not list(tmp_path.iterdir())


# The stop of a real Service over a Serve that only looks like one --------------------------------


class FakeServe:
    """Serve's handles and the tier actors; `settle` and `flush` answer, or raise what a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[str, ...]] = []
        self.settle: Any = [True]
        self.waited_s: list[float] = []
        self.lost: list[Exception] = []
        """What ingresses say, beside the one that has something in flight."""
        self.flush: Any = {"written": 2, "failed": 0, "left": 1}
        self.open_at_end = 0
        self.rounds = 2
        self.refused: Collection[str] = ()
        self.named: list[Collection[str]] = [()]
        """Actors, at each look; the last answer stays."""
        monkeypatch.setattr(app.serve, "get_deployment_handle", lambda name, application: _Handle(self, name))
        monkeypatch.setattr(app.serve, "delete", self.delete)
        monkeypatch.setattr(app.serve, "status", self.status)
        monkeypatch.setattr(app, "list_named_actors", self.actors)
        monkeypatch.setattr(app, "POLL_S", 0.001)
        monkeypatch.setattr(app, "flush_tiers", self.flush_tiers)

    def delete(self, name: str, _blocking: bool) -> None:
        assert not _blocking, "one after the other they take twice as long"
        self.steps.append(("delete", name))
        if name in self.refused:
            raise RayActorError

    def status(self) -> SimpleNamespace:
        """Say that the applications are there for some rounds more; those that were not deleted for ever."""
        assert not self.open_at_end, "what has had its time is not waited for"
        self.rounds -= 1
        return SimpleNamespace(applications=dict.fromkeys((FRONT_APP, "") if self.rounds else self.refused))

    def actors(self, all_namespaces: bool) -> list[dict[str, str]]:
        assert all_namespaces, "Serve's are in its own"
        now = self.named.pop(0) if self.named[1:] else self.named[0]
        return [{"name": name, "namespace": "serve"} for name in now]

    def flush_tiers(self, flush_s: float) -> dict[str, int]:
        assert 0 <= flush_s <= 20
        self.steps.append(("flush",))
        if isinstance(self.flush, Exception):
            raise self.flush
        done: dict[str, int] = self.flush
        return done


class _Handle:
    def __init__(self, house: FakeServe, name: str) -> None:
        self._house, self._name, self._method = house, name, ""

    def broadcast(self, method: str, *args: float) -> _Handle:
        self._house.steps.append((self._name, method))
        self._method = method
        return self

    def results(self, timeout_s: float, return_exceptions: bool) -> Any:
        assert return_exceptions, "one that fails must not hide what the others have in flight"
        return [*self._house.lost, self._house.open_at_end]

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> Any:
        assert return_exceptions, "one that fails must not keep the others from being waited for"
        self._house.waited_s.append(timeout_s)
        await asyncio.sleep(0)
        self._house.steps.append((self._name, "settled"))
        if isinstance(self._house.settle, Exception):
            raise self._house.settle
        return self._house.settle


DELETES = [("delete", FRONT_APP), ("delete", "")]
IN_ORDER = [("Ingress", "drain"), ("Replica", "settle"), ("Replica", "settled"), ("flush",), *DELETES]


def test_memory_is_written_down_after_the_drain_and_before_the_replicas_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    house = FakeServe(monkeypatch)
    app.Service(Settings()).stop()
    assert house.steps == IN_ORDER
    said = capsys.readouterr().err
    assert "writing conversations to disk (at most 20 s, tiers.flush_s)" in said
    assert "2 extents written; 1 not" in said


def test_what_cannot_be_flushed_does_not_stop_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    house = FakeServe(monkeypatch)
    house.settle, house.flush = TimeoutError(), RayActorError()
    app.Service(Settings()).stop()
    assert house.steps == IN_ORDER


def test_one_that_hangs_takes_no_time_of_the_tiers_nor_of_another_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = FakeServe(monkeypatch)
    house.settle = TimeoutError()
    service = app.Service(Settings())
    service.further = {"other": Mock(app="samovar-model-other", settings=service.settings)}
    service.stop()
    asked, settled = ("Replica", "settle"), ("Replica", "settled")
    assert house.steps[1:6] == [asked, asked, settled, settled, ("flush",)]
    assert max(house.waited_s) <= service.settings.tiers.flush_s / 2 + 1


def test_an_ingress_that_is_lost_does_not_hide_what_another_has_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = FakeServe(monkeypatch)
    house.lost, house.open_at_end = [RayActorError()], 2
    app.Service(Settings(server=ServerSettings(graceful_shutdown_s=0))).stop()
    assert house.rounds == 2, "the applications were waited for, as if there was nothing in flight"


def test_all_applications_go_at_once_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    house = FakeServe(monkeypatch)
    app.Service(Settings()).stop()
    assert house.rounds == 0


def test_what_has_ended_is_not_waited_for_until_serve_has_forgotten_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = FakeServe(monkeypatch)
    house.rounds = 100
    service = app.Service(Settings())
    service.model_app = "samovar-model-1"
    ours = ("SERVE_REPLICA::samovar#Ingress#a", "SERVE_REPLICA::samovar-model-1#Replica#b")
    others = ("tiers:1", "SERVE_REPLICA::samovar-model-2#Replica#c")
    house.named = [(*ours, *others), (*ours, *others), (ours[1], *others), others]
    service.stop()
    assert house.rounds == 97, "as long as one of ours lives"


def test_one_that_cannot_be_deleted_keeps_no_other_and_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house = FakeServe(monkeypatch)
    house.refused = (FRONT_APP,)
    app.Service(Settings()).stop()
    assert house.steps == IN_ORDER
    assert house.rounds == 0
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"could not delete the application {FRONT_APP}"
    ]


def test_a_wait_for_what_does_not_go_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house = FakeServe(monkeypatch)
    house.rounds = -1
    monkeypatch.setattr(app, "DELETE_S", 0.01)
    app.Service(Settings()).stop()
    assert "could not see the applications go" in caplog.text


@pytest.mark.parametrize("tiers", [TierSettings(enabled=False), TierSettings(flush_s=0)])
def test_there_is_no_flush_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch, tiers: TierSettings) -> None:
    house = FakeServe(monkeypatch)
    app.Service(Settings(tiers=tiers)).stop()
    assert house.steps == [("Ingress", "drain"), *DELETES]


def test_answers_that_do_not_end_in_time_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    house = FakeServe(monkeypatch)
    house.open_at_end = 1
    settings = Settings(server=ServerSettings(graceful_shutdown_s=0), tiers=TierSettings(enabled=False))
    app.Service(settings).stop()
    assert house.steps == [("Ingress", "drain"), *DELETES]


class _Actor:
    """A tier actor; a flush's "ref" is its outcome, None when it never answers."""

    def __init__(self, outcome: object) -> None:
        self._outcome = outcome
        self.flush = self

    def remote(self, flush_s: float) -> object:
        return self._outcome


def test_all_nodes_tier_actors_are_flushed_whichever_namespace_they_are_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors = {
        ("tiers:a", "serve"): _Actor({"written": 1, "left": 1}),
        ("tiers:b", "other"): _Actor({"written": 2}),
        ("tiers:c", "serve"): _Actor(RayActorError()),
        ("tiers:d", "serve"): _Actor(None),
        ("SERVE_CONTROLLER_ACTOR", "serve"): None,
    }
    rows = [{"name": name, "namespace": namespace} for name, namespace in actors]
    rows.append({"name": "tiers:gone", "namespace": "serve"})

    def get_actor(name: str, namespace: str) -> Any:
        if (name, namespace) not in actors:
            raise ValueError(name)
        return actors[name, namespace]

    def get(outcome: Any, timeout: float) -> Any:
        if outcome is None:
            raise GetTimeoutError
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def wait(refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert (num_returns, timeout) == (4, 5 + flush.GRACE_S)
        return [ref for ref in refs if ref is not None], [ref for ref in refs if ref is None]

    monkeypatch.setattr(tier_actors, "list_named_actors", lambda all_namespaces: rows)
    for name, fake in (("get_actor", get_actor), ("get", get), ("wait", wait)):
        monkeypatch.setattr(flush.ray, name, fake)
    assert set(tier_actors.tier_actors()) == {"a", "b", "c", "d"}
    assert flush.flush_tiers(5) == {"written": 3, "left": 1, "silent": 2}
    rows[:] = []
    assert flush.flush_tiers(5) == {}
