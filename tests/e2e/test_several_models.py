"""Two models at one address, each in processes of its own: named, listed, warm, lost and exchanged apart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.api.test_failover import pids_of
from tests.e2e.test_rollout import Rolling
from tests.support.engines.tiny_models import make_tiny_model
from tests.support.services.service import until

FIRST, SMALL = "first", "small"
QUICK = {"engine": {"threads": 1, "pool_bytes_max": 8 << 20, "step": "lean", "fast_start": True}}
TEXT = "A samovar keeps the tea hot for guests who come back for another cup. " * 4


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rolling]:
    folder = tmp_path_factory.mktemp("several")
    first = make_tiny_model(folder / "first", "llama", seed=1)
    make_tiny_model(folder / "small", "qwen3", seed=2, vocab=400, context=1024)
    file = folder / "samovar.yaml"
    file.write_text(yaml.safe_dump(settings_of()))
    flags = {"config": file, "model.path": first, f"models.{SMALL}.model.path": folder / "small"}
    service = Rolling(folder / "service", flags)
    service.file = file
    try:
        service.wait_ready()
        yield service
    finally:
        code = service.stop()
    assert code == 0, service.text


def settings_of(**small: Any) -> dict[str, Any]:
    model = {"served_name": FIRST, "dtype": "float32"}
    own = {"model": {"aliases": ["little"]}, **small}
    return {**QUICK, "model": model, "models": {SMALL: own}}


def ask(service: Rolling, model: str, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 12, **more}
    with service.http() as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json() | {"replica": answer.headers["x-replica"]}
    return found


def talk(service: Rolling, model: str, session: str, **more: Any) -> list[dict[str, Any]]:
    """Two turns of a session."""
    messages = [{"role": "user", "content": TEXT}]
    first = ask(service, model, messages, session_id=session, **more)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    return [first, ask(service, model, messages, session_id=session, **more)]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def replicas(service: Rolling) -> dict[str, str]:
    """Model -> its replica."""
    return {one["model_name"]: one["replica_id"] for one in service.stats()["serving"]}


def test_both_are_listed_and_each_request_goes_to_its_own(service: Rolling) -> None:
    with service.http() as client:
        cards = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
        health = client.get("/health").json()
        unknown = client.post("/v1/chat/completions", json={"model": "x", "messages": []})
    assert (list(cards), cards["little"]["root"]) == ([FIRST, SMALL, "little"], SMALL)
    assert (cards[FIRST]["max_model_len"], cards[SMALL]["max_model_len"]) == (4096, 1024)
    assert (health["status"], health["models"]) == ("ok", {FIRST: 1, SMALL: 1})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    answers = [ask(service, name, [{"role": "user", "content": "Hi"}]) for name in (FIRST, SMALL, "little")]
    assert [one["model"] for one in answers] == [FIRST, SMALL, SMALL]
    assert [one["replica"] for one in answers] == [replicas(service)[name] for name in (FIRST, SMALL, SMALL)]
    texts = [one["choices"][0]["message"]["content"] for one in answers]
    assert texts[0] != texts[1] == texts[2]
    assert service.text.count("KV pool") == 2, "a table of each"


def test_a_session_is_warm_with_each_and_what_is_cached_changes_no_answer(service: Rolling) -> None:
    turns = {name: talk(service, name, "both") for name in (FIRST, SMALL)}
    for name, (first, second) in turns.items():
        assert cached(first) == 0, "another model's blocks"
        assert cached(second) >= 0.7 * first["usage"]["prompt_tokens"], second["usage"]
        assert second["replica"] == replicas(service)[name]
    alone = {name: talk(service, name, f"alone {name}", cache_salt=name) for name in (FIRST, SMALL)}
    for name, answers in turns.items():
        said = [one["choices"][0]["message"]["content"] for one in answers]
        assert said == [one["choices"][0]["message"]["content"] for one in alone[name]]
    with service.http() as client:
        card = client.get("/v1/sessions/both").json()
        done = client.delete("/v1/sessions/both").json()
    assert len({one["home"] for one in card["lineages"]}) == 2
    assert done["replicas"] == 2
    assert done["cleared"]["pages"] > 0


def test_metrics_say_which_model(service: Rolling) -> None:
    ask(service, SMALL, [{"role": "user", "content": "Hi"}])
    assert service.total("samovar_e2e_seconds_count", model=SMALL) >= 1
    assert service.total("samovar_e2e_seconds_count", model=FIRST) >= 1
    with service.http() as client:
        kept = client.get("/metrics").text
    assert all(f'replica="{replica}"' in kept for replica in replicas(service).values())


@pytest.mark.slow
def test_one_model_changes_and_the_other_is_not_touched(service: Rolling) -> None:
    before = replicas(service)
    service.file.write_text(yaml.safe_dump(settings_of(engine={"block_tokens": 32})))
    service.reload()
    until("the old replica is gone", lambda: replicas(service).get(SMALL) not in (None, before[SMALL]))
    assert replicas(service)[FIRST] == before[FIRST]
    for name in (FIRST, SMALL):
        assert cached(talk(service, name, f"changed {name}")[1]) > 0


def test_a_model_that_is_lost_takes_no_other_with_it_and_comes_back(service: Rolling) -> None:
    lost = replicas(service)[SMALL]
    pids = pids_of(service, {lost})
    os.kill(pids[lost], signal.SIGKILL)
    hi = [{"role": "user", "content": "Hi"}]
    assert ask(service, FIRST, hi)["replica"] == replicas(service)[FIRST]
    assert ask(service, SMALL, hi)["replica"] != lost, "it has waited for the next one"
    until("all is well", lambda: set(replicas(service)) == {FIRST, SMALL}, 60)
