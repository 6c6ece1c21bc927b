"""Several models of one service: each an application of its own, and one front before them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samovar.cluster.deploy.deploy import refuse_unfit
from samovar.cluster.errors import StartFailed
from samovar.cluster.launch.settings import RenderFailed, node_settings
from samovar.cluster.serve import app, preflight
from samovar.cluster.serve.app import described, further_of, weights_of_each
from samovar.cluster.serve.graph import FurtherModel, model_app_name, run_targets
from samovar.cluster.serve.preflight import check_gpus, check_memory, first_look, memory_needs
from samovar.cluster.serve.rollout import FRONT_APP
from samovar.configs.sections import GIB
from samovar.configs.settings import Settings
from samovar.replicas.messages import ModelRefused
from samovar.router.routing import load_tracker, roster
from samovar.router.routing.request_router import SessionRouter
from tests.support.inside import deployment_of

WEIGHTS = {"/big": 6 * GIB, "/small": GIB}


def two(small: dict[str, Any] | None = None, **sections: Any) -> Settings:
    given = {"model": {"path": "/small"}, **(small or {})}
    return Settings.model_validate({"model": {"path": "/big"}, "models": {"small": given}, **sections})


@pytest.fixture(autouse=True)
def models_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(settings: Settings, path: Path, begin: object) -> Any:
        if path.name == "bad":
            raise ModelRefused("it embeds", "take another")
        return SimpleNamespace(
            fingerprint=str(path).encode(), name=path.name, weights_bytes=WEIGHTS[str(path)], commit=None
        )

    monkeypatch.setattr(app, "ensure_model", lambda model: Path(model.path or "/big"))
    monkeypatch.setattr(app, "describe_model", describe)


def served(settings: Settings) -> dict[str, FurtherModel]:
    return further_of(described(settings), settings)


def of(target: Any) -> Any:
    return deployment_of(target.target)


def test_each_model_is_an_application_and_one_front_knows_all() -> None:
    settings = two({"cluster": {"replicas": 3}})
    further = served(settings)
    targets = run_targets(settings, "/big", "samovar-model-1", 2, further=further)
    small = further["small"]
    assert list(targets) == ["samovar-model-1", small.app, FRONT_APP]
    assert small.app == model_app_name(small.settings, b"/small") != "samovar-model-1"
    front, first, other = (of(targets[name]) for name in (FRONT_APP, "samovar-model-1", small.app))
    assert front.user_config == {"replicas": 2, "models": {"small": 3}}
    assert (first.num_replicas, other.num_replicas) == (2, 3)
    kwargs = [one._deployment_config.request_router_config.request_router_kwargs for one in (first, other)]
    assert ["further" in one for one in kwargs] == [False, True]
    assert kwargs[1]["further"] == "small"
    assert other.init_args[0].model.served_name == "small"
    assert first.init_args[0].models == {}
    assert front.init_args[4]["small"][1:] == ("/small", small.app)


def test_the_front_and_the_replicas_of_one_model_are_as_before() -> None:
    settings = Settings()
    targets = run_targets(settings, "/big", "m", 2)
    front = of(targets[FRONT_APP])
    assert list(targets) == ["m", FRONT_APP]
    assert front.user_config == {"replicas": 2}
    assert front.init_args == (settings, "/big", "m", False)


def versions(settings: Settings) -> dict[str, str]:
    targets = run_targets(settings, "/big", "m", 1, further=served(settings))
    return {name if name in ("m", FRONT_APP) else "small": of(one).version for name, one in targets.items()}


def test_a_change_of_one_model_restarts_no_replica_of_another() -> None:
    now, other = versions(two()), versions(two({"engine": {"sequences_max": 64}}))
    assert now["m"] == other["m"]
    assert now["small"] != other["small"]
    assert now[FRONT_APP] != other[FRONT_APP]
    assert now["m"] == versions(Settings.model_validate({"model": {"path": "/big"}}))["m"], "alone, too"


def test_what_goes_on_keeps_its_part_of_the_machine() -> None:
    now = served(two({"cluster": {"replicas": 2}}))
    wanted = two({"cluster": {"replicas": 3}})
    found = further_of(described(wanted), wanted, now)["small"]
    assert (found.replicas, found.app) == (3, now["small"].app)
    assert found.settings.cluster.sharing_node(8) == now["small"].settings.cluster.sharing_node(8) == 3
    other = two({"engine": {"block_tokens": 32}, "cluster": {"replicas": 3}})
    assert further_of(described(other), other, now)["small"].settings.cluster.sharing_node(8) == 4


def test_a_model_that_is_refused_is_named() -> None:
    with pytest.raises(ModelRefused, match=r"models\.small: it embeds"):
        described(two({"model": {"path": "/bad"}}))
    with pytest.raises(StartFailed, match=r"models\.big: 'big' is another model's name"):
        described(
            Settings.model_validate(
                {"model": {"path": "/big"}, "models": {"big": {"model": {"path": "/small"}}}}
            )
        )


def test_weights_are_the_mean_of_those_that_share_a_node() -> None:
    settings = two({"cluster": {"replicas": 4}})
    assert weights_of_each(described(settings), settings) == 2 * GIB
    alone = Settings.model_validate({"model": {"path": "/big"}})
    assert weights_of_each(described(alone), alone) == 6 * GIB


def test_models_that_do_not_fit_are_named_with_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpus_seen", lambda *of: 0)
    settings = two({"cluster": {"replicas": 2}, "engine": {"pool_bytes_max": GIB}})
    models = described(settings)
    needs = {one.name: memory_needs(one.settings, one.card.weights_bytes) for one in models.values()}
    assert needs == {"big": 6 * GIB, "small": 4 * GIB}
    check_memory(needs, 10 * GIB)
    with pytest.raises(StartFailed, match=r"10.0 GiB of memory \(big 6.0 GiB, small 4.0 GiB\), and 9.0 GiB"):
        check_memory(needs, 9 * GIB)
    assert memory_needs(two(engine={"device": "cuda"}), GIB) == 0


def test_gpus_are_counted_over_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpus_seen", lambda *of: 2)
    check_gpus(two())
    check_gpus(two({"engine": {"device": "cpu"}, "cluster": {"replicas": 9}}, cluster={"replicas": 2}))
    with pytest.raises(StartFailed, match=r"take 3 GPUs \(the first 1, small 2\), but this machine has 2"):
        check_gpus(two({"cluster": {"replicas": 2}}))


def test_the_first_look_looks_at_every_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    given = {
        "server": {"port": 1 << 15},
        "model": {"cache_dir": str(tmp_path)},
        "models": {"small": {"model": {"path": str(tmp_path)}}},
    }
    with pytest.raises(ModelRefused, match=r"models\.small: .*bert"):
        first_look(Settings.model_validate(given))


def test_what_makes_clusters_refuses_several_models() -> None:
    with pytest.raises(StartFailed, match="models has small: `samovar deploy` deploys one model"):
        refuse_unfit(two(cluster={"ray_address": "auto"}, engine={"device": "cpu"}))
    with pytest.raises(RenderFailed, match="models has small: a cluster of `samovar up` serves one"):
        node_settings(two(), None)


def test_each_model_has_its_load_book_and_roster_and_all_say_they_are_one_ingress() -> None:
    book, listed = load_tracker.book_of("x"), roster.roster_of("x")
    assert load_tracker.book_of("x") is book is not load_tracker.BOOK
    assert roster.roster_of("x") is listed is not roster.ROSTER
    assert load_tracker.book_of("") is load_tracker.BOOK
    assert roster.roster_of("") is roster.ROSTER
    assert book.ingress == load_tracker.BOOK.ingress


def test_a_router_tells_the_book_of_its_own_model() -> None:
    routers = [SessionRouter.__new__(SessionRouter) for _ in range(2)]
    routers[0].initialize_state()
    routers[1].initialize_state(further="y")
    assert routers[0].book is load_tracker.BOOK
    assert routers[1].book is load_tracker.book_of("y")
