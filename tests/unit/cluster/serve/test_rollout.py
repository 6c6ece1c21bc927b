"""Changing a running service: what may be changed, in which order that is done, and what undoes it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from samovar.cluster.serve import app, rollout
from samovar.cluster.serve.app import Service, StartFailed
from samovar.cluster.serve.graph import build_front_app, build_model_app, model_app_name, run_targets
from samovar.cluster.serve.rollout import (
    FIXED,
    FRONT_APP,
    Apps,
    LocalServe,
    Missing,
    Patience,
    cluster_of,
    exchange,
    refuse_what_needs_a_restart,
    s3_demo_of,
    unhealthy_here,
)
from samovar.configs.cluster import LinkSettings
from samovar.configs.loader import ConfigError, Problem
from samovar.configs.settings import ServerSettings, Settings
from samovar.replicas.messages import ModelRefused
from samovar.router.proxy import proxy_environment, read_by_proxies
from tests.support.inside import deployment_of

FINGERPRINT = b"f" * 32


def settings(**sections: dict[str, Any]) -> Settings:
    return Settings.model_validate(sections)


def changed(base: Settings, **sections: dict[str, Any]) -> Settings:
    return Settings.model_validate(
        {**base.model_dump(), **{k: getattr(base, k).model_dump() | v for k, v in sections.items()}}
    )


# What may be changed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("server", {"port": 9}),
        ("server", {"start_timeout_s": 9}),
        ("tiers", {"flush_s": 1}),
        ("auth", {"api_keys": {"a": "k" * 16}}),
        ("auth", {"admin_key": "k" * 16}),
    ],
)
def test_what_needs_a_restart_is_refused_by_name(name: str, section: dict[str, Any]) -> None:
    assert name in FIXED
    with pytest.raises(StartFailed, match=f"the section `{name}` cannot be changed"):
        refuse_what_needs_a_restart(settings(), settings(**{name: section}))


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("limits.body_bytes_max", {"limits": {"body_bytes_max": 1 << 20}}),
        ("limits.request_timeout_s", {"limits": {"request_timeout_s": 77.0}}),
        ("ingress.repeat_bytes_max", {"ingress": {"repeat_bytes_max": 1 << 20}}),
        ("telemetry.otlp_endpoint", {"telemetry": {"otlp_endpoint": "http://127.0.0.1:4318"}}),
        ("cluster.autoscaling", {"cluster": {"autoscaling": {"replicas_max": 7}}}),
    ],
)
def test_what_would_not_reach_everybody_is_refused_by_name(name: str, section: dict[str, Any]) -> None:
    """Proxies read their settings when they start: an update would be told as done, and hold in part."""
    with pytest.raises(StartFailed, match=f"^{name} cannot be changed while the service runs"):
        refuse_what_needs_a_restart(settings(), settings(**section))


def test_a_proxy_is_told_nothing_that_an_update_might_change() -> None:
    """Each variable of its environment is a setting that `read_by_proxies` names."""
    told = proxy_environment(settings(telemetry={"otlp_endpoint": "http://127.0.0.1:4318"}))
    named = {name.rpartition(".")[2] for name in read_by_proxies(settings())} | set(LinkSettings.model_fields)
    named |= {"wait_ms", "callback_import_path"}  # a constant; and what installs the guard
    left = [name for name in told if not any(name.lower().endswith(one) for one in named)]
    assert left == [], "an update is to refuse these"


def test_the_rest_may_change() -> None:
    now = settings(auth={"server_secret": "s" * 16})
    wanted = settings(
        cluster={"replicas": 3}, limits={"n_max": 2}, router={"sync_s": 1}, engine={"queue_max": 3}, model={}
    )
    refuse_what_needs_a_restart(now, wanted)  # the secret is drawn at the start, and kept


def test_the_name_of_a_models_application_changes_with_what_is_served_and_with_nothing_else() -> None:
    now = settings()
    same = [changed(now, cluster={"replicas": 3}), changed(now, limits={"n_max": 2})]
    assert {model_app_name(one, FINGERPRINT) for one in [now, *same]} == {model_app_name(now, FINGERPRINT)}
    others = [
        model_app_name(changed(now, model={"served_name": "x"}), FINGERPRINT),
        model_app_name(changed(now, engine={"block_tokens": 32}), FINGERPRINT),
        model_app_name(now, b"g" * 32),
    ]
    assert len({model_app_name(now, FINGERPRINT), *others}) == 4


def version_of(application: Any) -> str:
    version: str | None = deployment_of(application).version
    assert version, "Serve would draw one"
    return version


def test_scaling_is_no_new_version_to_serve_which_would_restart_everybody() -> None:
    now = settings()
    two, three = build_model_app(now, "/m", 2), build_model_app(now, "/m", 3)
    assert version_of(two) == version_of(three)
    assert deployment_of(three).num_replicas == 3
    fronts = [build_front_app(now, "/m", "x", n, is_update=n > 2) for n in (2, 3)]
    assert version_of(fronts[0]) == version_of(fronts[1])
    assert fronts[1]._bound_deployment.user_config == {"replicas": 3}


def test_other_arguments_are_a_new_version() -> None:
    now = settings()
    limits = changed(now, limits={"n_max": 2})
    models = [build_model_app(*args, 2) for args in ((now, "/m"), (now, "/other"), (limits, "/m"))]
    assert len({version_of(one) for one in models}) == 3
    fronts = [
        build_front_app(*args, 2)
        for args in ((now, "/m", "x"), (now, "/m", "y"), (now, "/other", "x"), (limits, "/m", "x"))
    ]
    assert len({version_of(one) for one in fronts}) == 4


def test_replicas_that_get_company_share_the_machine_as_before() -> None:
    now = settings(cluster={"replicas": 2, "object_store_bytes": 2**30})
    wanted = settings(cluster={"replicas": 4})
    assert cluster_of(now, wanted, is_scaling=True) == now.cluster
    another = cluster_of(now, wanted, is_scaling=False)
    assert (another.replicas, another.object_store_bytes) == (4, 2**30)


def test_the_s3_server_of_the_demo_stays() -> None:
    plain, mine = settings(), settings(tiers={"s3": {"bucket": "mine"}})
    demo = settings(tiers={"s3": {"bucket": "demo", "endpoint": "http://127.0.0.1:9"}})
    assert s3_demo_of(demo, plain).tiers == demo.tiers
    assert s3_demo_of(demo, mine) is mine
    assert s3_demo_of(plain, plain) is plain


# The order, over a Serve that only looks like one ----------------------------------------------


class FakeServe:
    """Notes what is deployed and deleted. `broken`: the application of that name does not come up, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[str, str]] = []
        self.running: dict[str, str] = {}  # name -> version
        self.broken = ""
        self.delete_fails = False
        monkeypatch.setattr(rollout.serve, "run_many", self.run_many)
        monkeypatch.setattr(rollout.serve, "delete", self.delete)
        monkeypatch.setattr(rollout.serve, "status", self.status)

    def run_many(self, targets: list[Any], wait_for_applications_running: bool) -> None:
        assert not wait_for_applications_running
        for target in targets:
            assert target.route_prefix == ("/" if target.name == FRONT_APP else None)
            self.steps.append(("deploy", target.name))
            self.running[target.name] = version_of(target.target)

    def delete(self, name: str) -> None:
        self.steps.append(("delete", name))
        if self.delete_fails:
            raise RayServeException("Serve is away")
        del self.running[name]

    def status(self) -> Any:
        broken = ""
        if self.steps[-1] == ("deploy", self.broken):
            broken, self.broken = self.broken, ""
        failed = SimpleNamespace(status=ApplicationStatus.DEPLOY_FAILED, message="no room")
        fine = SimpleNamespace(status=ApplicationStatus.RUNNING, message="")
        return SimpleNamespace(
            applications={name: failed if name == broken else fine for name in self.running}
        )


def wait(missing: Missing) -> None:
    assert missing() is None


def exchanged(now: Apps, wanted: Apps) -> None:
    exchange(now, wanted, LocalServe(), wait)


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    return FakeServe(monkeypatch)


NOW = run_targets(settings(), "/m", "samovar-model-1", 2)
SCALED = run_targets(settings(), "/m", "samovar-model-1", 3)
OTHER = run_targets(settings(), "/other", "samovar-model-2", 2)


def deployed(apps: Apps) -> dict[str, str]:
    return {name: version_of(app.target) for name, app in apps.items()}


def test_another_model_is_up_before_the_ingress_asks_it_and_the_old_one_goes_last(
    house: FakeServe,
) -> None:
    house.running = deployed(NOW)
    exchanged(NOW, OTHER)
    assert house.steps == [
        ("deploy", "samovar-model-2"),
        ("deploy", FRONT_APP),
        ("delete", "samovar-model-1"),
    ]
    assert house.running == deployed(OTHER)


def test_scaling_deletes_nothing(house: FakeServe) -> None:
    house.running = deployed(NOW)
    exchanged(NOW, SCALED)
    assert house.steps == [("deploy", "samovar-model-1"), ("deploy", FRONT_APP)]


@pytest.mark.parametrize(
    ("wanted", "broken", "steps"),
    [
        (OTHER, "samovar-model-2", [("deploy", "samovar-model-2"), ("delete", "samovar-model-2")]),
        (
            OTHER,
            FRONT_APP,
            [
                ("deploy", "samovar-model-2"),
                ("deploy", FRONT_APP),
                ("deploy", FRONT_APP),
                ("delete", "samovar-model-2"),
            ],
        ),
        (SCALED, "samovar-model-1", [("deploy", "samovar-model-1")] * 2),
    ],
)
def test_what_does_not_come_up_is_taken_back(
    house: FakeServe, wanted: Apps, broken: str, steps: list[tuple[str, str]]
) -> None:
    house.running, house.broken = deployed(NOW), broken
    with pytest.raises(StartFailed, match="no room"):
        exchanged(NOW, wanted)
    assert house.steps == steps
    assert house.running == deployed(NOW), "all is as it was"


def test_an_update_that_ray_interrupts_is_taken_back(
    house: FakeServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a call has done that fails is not known: another model must not stay for ever."""
    house.running = deployed(NOW)
    put = house.run_many

    def lost(targets: list[Any], wait_for_applications_running: bool) -> None:
        put(targets, wait_for_applications_running)
        monkeypatch.setattr(rollout.serve, "run_many", put)
        raise RayServeException("the answer was lost")

    monkeypatch.setattr(rollout.serve, "run_many", lost)
    with pytest.raises(RayServeException, match="the answer was lost"):
        exchanged(NOW, OTHER)
    assert house.steps == [("deploy", "samovar-model-2"), ("delete", "samovar-model-2")]
    assert house.running == deployed(NOW)


def test_what_cannot_be_restored_does_not_hide_why(
    house: FakeServe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house.running = deployed(NOW)

    def fails(*_: object, **__: object) -> None:
        raise RayServeException("Serve is away")

    monkeypatch.setattr(LocalServe, "put", fails)
    with pytest.raises(RayServeException, match="Serve is away"):
        exchanged(NOW, OTHER)
    assert "could not restore" in caplog.text


def test_serve_that_does_not_answer_is_waited_for(house: FakeServe, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise RayServeException("no controller")

    monkeypatch.setattr(rollout.serve, "status", away)
    assert LocalServe().missing(NOW) == "Serve does not answer: no controller"


def test_an_old_model_that_cannot_be_deleted_is_no_failure(
    house: FakeServe, caplog: pytest.LogCaptureFixture
) -> None:
    house.running, house.delete_fails = deployed(NOW), True
    exchanged(NOW, OTHER)
    assert "could not delete samovar-model-1" in caplog.text


def test_an_application_is_running_when_nothing_of_it_is_old(
    house: FakeServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, now = LocalServe(), SimpleNamespace(status=ApplicationStatus.DEPLOYING, message="no room")
    monkeypatch.setattr(
        rollout.serve, "status", lambda: SimpleNamespace(applications=dict.fromkeys(NOW, now))
    )
    assert serving.missing(NOW) == "samovar is DEPLOYING, samovar-model-1 is DEPLOYING"
    now.status = ApplicationStatus.RUNNING
    assert serving.missing(NOW) is None
    for status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
        now.status = status
        with pytest.raises(StartFailed, match="did not start: no room"):
            serving.missing(NOW)


def test_health_is_asked_of_this_machine_wherever_the_proxy_listens() -> None:
    for host, url in (("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1")):
        assert str(unhealthy_here(ServerSettings(host=host, port=1))).startswith(
            f"{url}/health does not answer"
        )


def test_waiting_says_each_change_once_and_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "POLL_S", 0.0)
    said: list[str] = []
    words = iter(["a", "a", "b"])
    Patience(60, "x.y_s", said.append).wait(lambda: next(words, None))
    assert said == ["a", "b"]
    clock = iter(range(0, 1000, 20))
    with pytest.raises(StartFailed, match=r"not ready after 60 s \(x\.y_s\): c"):
        Patience(60, "x.y_s", said.append, lambda: next(clock)).wait(lambda: "c")
    assert next(clock) == 80


# The service -----------------------------------------------------------------------------------


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, house: FakeServe) -> Service:
    """One that runs, as after `start`."""
    monkeypatch.setattr(app, "ensure_model", lambda model: Path(model.path or "/m"))
    monkeypatch.setattr(
        app,
        "describe_model",
        lambda settings, path, begin: SimpleNamespace(fingerprint=str(path).encode(), name="tiny"),
    )
    monkeypatch.setattr(app, "check_gpus", lambda settings: None)
    monkeypatch.setattr(Service, "_wait_for_replicas", lambda self: [])
    given = settings(cluster={"replicas": 2})
    service = Service(given)
    service.settings = changed(given, auth={"server_secret": "s" * 16}, cluster={"object_store_bytes": 2**30})
    service.model_dir, service.model_app = "/m", model_app_name(service.settings, b"/m")
    house.running = deployed(run_targets(service.settings, "/m", service.model_app, 2))
    return service


def test_a_service_gets_replicas_and_keeps_those_it_has(service: Service, house: FakeServe) -> None:
    before = dict(house.running)
    service.update(settings(cluster={"replicas": 3}))
    assert service.replicas == 3
    assert house.running == before, "no new version: nobody is restarted"
    assert house.steps == [("deploy", service.model_app), ("deploy", FRONT_APP)]
    assert service.settings.auth.server_secret is not None, "completed at the start, and kept"
    service.update(settings(cluster={"replicas": 2}))
    assert (service.replicas, house.running) == (2, before)


def test_a_service_takes_up_another_model_and_can_go_back(service: Service, house: FakeServe) -> None:
    first, before = service.model_app, dict(house.running)
    service.update(settings(cluster={"replicas": 3}, model={"path": "/other"}))
    assert house.steps[-1] == ("delete", first)
    assert (service.model_dir, service.settings.cluster.replicas) == ("/other", 3)
    assert set(house.running) == {service.model_app, FRONT_APP} != set(before)
    service.update(settings(cluster={"replicas": 2}))
    assert service.model_app == first
    assert house.running == before


@pytest.mark.parametrize("at_front", [True, False])
def test_an_update_that_fails_leaves_everything_as_it_was(
    service: Service, house: FakeServe, at_front: bool
) -> None:
    wanted = settings(cluster={"replicas": 2}, model={"path": "/other"})
    before, was = dict(house.running), (service.settings, service.model_app, service.model_dir)
    house.broken = FRONT_APP if at_front else model_app_name(wanted, b"/other")
    with pytest.raises(StartFailed):
        service.update(wanted)
    assert house.running == before
    assert (service.settings, service.model_app, service.model_dir) == was
    service.update(wanted)
    assert service.model_dir == "/other"


def test_a_replica_that_does_not_answer_takes_no_update_back(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(_: Service) -> None:
        raise StartFailed("2 replicas answered, not all")

    monkeypatch.setattr(Service, "_wait_for_replicas", wait)
    assert service.update(settings(cluster={"replicas": 3})) == "2 replicas answered, not all"
    assert service.replicas == 3


def test_what_is_refused_touches_nothing(service: Service, house: FakeServe) -> None:
    with pytest.raises(StartFailed, match="`server`"):
        service.update(settings(cluster={"replicas": 2}, server={"port": 9}))
    assert house.steps == []


# SIGHUP ----------------------------------------------------------------------------------------


@pytest.fixture
def own_signals() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


PROBLEM = ConfigError([Problem("cluster.replicas", "samovar.yaml", "0 is too few", "Take 1 or more")])


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (None, "Samovar is updated"),
        (
            StopIteration("2 replicas answered"),
            "the new configuration is in service, and not all replicas have answered: 2 replicas answered",
        ),
        (PROBLEM, "is unchanged: the configuration has a problem:"),
        (StartFailed("no room"), "is unchanged: no room"),
        (
            ModelRefused("there is no config.json", "give one"),
            "is unchanged: there is no config.json",
        ),
        (
            RayServeException("the controller is away"),
            "is unchanged: the controller is away",
        ),
    ],
)
@pytest.mark.usefixtures("own_signals")
def test_a_hangup_changes_the_service_or_says_why_not_and_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception | None, says: str
) -> None:
    steps: list[str] = []

    class Running:
        def __init__(self, given: Settings, stages: object, kind: object) -> None:
            self.settings, self.url, self.infos = given, "http://127.0.0.1:1", ["info"]
            self.folder, self.has_own_ray, self.url_here = None, False, self.url

        def start(self) -> None:
            steps.append("start")

        def update(self, wanted: Settings) -> str | None:
            steps.append(f"update to {wanted.cluster.replicas}")
            if isinstance(error, StopIteration):  # nothing that fails: what was not seen
                return str(error)
            if error is not None and not isinstance(error, ConfigError):
                raise error
            return None

        def stop(self) -> None:
            steps.append("stop")

    def reload() -> Settings:
        if isinstance(error, ConfigError):
            raise error
        return settings(cluster={"replicas": 7})

    def ready(console: object, service: object) -> None:
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(number)

    monkeypatch.setattr(app, "Service", Running)
    monkeypatch.setattr(app, "_say_ready", ready)
    monkeypatch.setattr(app, "_print_tables", lambda console, service: None)
    monkeypatch.setattr(app.ray, "shutdown", lambda: steps.append("ray stops"))
    assert app.serve_forever(settings(), reload=reload) == 0
    updated = [] if isinstance(error, ConfigError) else ["update to 7"]
    assert steps == ["start", *updated, "stop", "ray stops"]
    said = capsys.readouterr()
    assert says in said.out + said.err
    assert ("Samovar is updated" in said.out) == (error is None)
