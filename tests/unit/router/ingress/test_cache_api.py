"""Clearing: who may, what is reached, and that what was not reached is said aloud."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from samovar.cache_tiers.blocks import session_of, tenant_tag
from samovar.configs.loader import ConfigError, load
from samovar.replicas.messages import Forgotten
from samovar.router.erasure import Erasure, Left
from samovar.router.routing.ray_clients import RayReplicaClient
from samovar.router.routing.replica_client import ClearCounts
from tests.support.router.fake_replica import say
from tests.support.router.router_harness import (
    ADMIN_KEY,
    KEY,
    MODEL,
    OTHER_KEY,
    SENT,
    TOKENIZER,
    House,
    bearer,
    chat,
    error_of,
    make_settings,
)
from tests.unit.router.test_parts import FakeHandle

CHAT = "/v1/chat/completions"
SECRET = b"secret"
ADMIN_ROUTES = [("POST", "/cache/clear"), ("POST", "/reset_prefix_cache"), ("GET", "/cache/stats")]
METRICS = ("GET", "/metrics")  # as those, where there are tenants
VOCAB = TOKENIZER.get_vocab()
THE = [VOCAB[letter] for letter in "the"]  # not how the tokenizer would cut "the"


def guarded(**more: Any) -> House:
    house = House(
        lambda request: say(["t", "h", "e"], ids=THE),
        settings=make_settings(keys={"a": KEY, "b": OTHER_KEY}, **more),
    )
    return house


async def knows_the_reply(client: Any, key: str, house: House, **fields: Any) -> bool:
    """Whether the next turn is made of the very ids of the reply."""
    turn2 = [*chat()["messages"], {"role": "assistant", "content": "the"}, {"role": "user", "content": "x"}]
    await client.post(CHAT, json={"model": MODEL, "messages": turn2, **fields}, headers=bearer(key))
    fresh = TOKENIZER.apply_chat_template(turn2, add_generation_prompt=True, return_dict=False)
    return house.replicas.calls[-1].prompt_token_ids != fresh


@pytest.mark.parametrize(("fields", "headers"), SENT)
@pytest.mark.parametrize("charset", ["utf-8", "latin-1"])
async def test_g12_a_session_is_found_however_its_id_was_sent(
    fields: dict[str, Any], headers: dict[str, str], charset: str
) -> None:
    house = House(lambda request: say(["t", "h", "e"], ids=THE))
    raw = {name: value.encode(charset) for name, value in headers.items()}
    async with house.client() as client:
        sent = await client.post(CHAT, json=chat(**fields), headers=raw)  # type: ignore[arg-type]
        assert sent.status_code == 200, sent.text
        response = await client.delete("/v1/sessions/id%2F%C3%A9%20%3F")
    assert response.json() == {
        "object": "cache.cleared",
        "cleared": {"replies": 1, "pages": 3, "extents": 2, "bytes": 100},
        "replicas": 1,
    }
    ((tenant, sessions),) = house.replicas.clears
    assert tenant == tenant_tag(SECRET, "local") == house.replicas.calls[0].tenant
    assert sessions is not None
    assert session_of(house.replicas.calls[0].session) in sessions
    assert len(sessions) <= 2 * len(SENT)


async def test_g12_g2_a_session_of_another_tenant_stays() -> None:
    house = guarded()
    async with house.client() as client:
        for key in (KEY, OTHER_KEY):
            await client.post(CHAT, json=chat(session_id="s"), headers=bearer(key))
        assert (await client.delete("/v1/sessions/s", headers=bearer(KEY))).status_code == 200
        ((tenant, sessions),) = house.replicas.clears
        of_a, of_b = house.replicas.calls[:2]
        assert sessions is not None
        assert tenant == of_a.tenant != of_b.tenant
        assert session_of(of_a.session) in sessions
        assert session_of(of_b.session) not in sessions
        assert not await knows_the_reply(client, KEY, house, session_id="s")
        assert await knows_the_reply(client, OTHER_KEY, house, session_id="s")


async def test_g12_a_tenant_clears_all_its_own_under_every_salt_and_nothing_else() -> None:
    house = guarded()
    async with house.client() as client:
        for key in (KEY, OTHER_KEY):
            for fields in ({}, {"cache_salt": "x"}):
                await client.post(CHAT, json=chat(**fields), headers=bearer(key))
        response = await client.delete("/v1/cache", headers=bearer(KEY))
        assert response.json()["cleared"]["replies"] == 2
        assert house.replicas.clears == [(tenant_tag(SECRET, "a"), None)]
        for fields in ({}, {"cache_salt": "x"}):
            assert not await knows_the_reply(client, KEY, house, **fields)
            assert await knows_the_reply(client, OTHER_KEY, house, **fields)


async def test_g12_an_answer_under_way_is_not_remembered_after_a_clear() -> None:
    gate = asyncio.Event()
    house = guarded()
    script = house.replicas.script
    house.replicas.script = lambda request: [gate, *script(request)]
    async with house.client() as client:
        asking = asyncio.create_task(client.post(CHAT, json=chat(), headers=bearer(KEY)))
        await house.replicas.began.wait()
        await client.delete("/v1/cache", headers=bearer(KEY))
        gate.set()
        await asking
        assert not await knows_the_reply(client, KEY, house)


@pytest.mark.parametrize(("path", "status"), [("/v1/sessions/", 400), (f"/v1/sessions/{'x' * 600}", 400)])
async def test_ids_that_no_request_could_have_are_refused(path: str, status: int) -> None:
    house = House()
    async with house.client() as client:
        response = await client.delete(path)
        assert (response.status_code, error_of(response)["param"]) == (status, "session_id")
        control = await client.delete("/v1/sessions/a%00b")
        assert (control.status_code, error_of(control)["param"]) == (400, "session_id")
        assert (await client.put("/v1/sessions/x")).status_code == 405
        text = (await client.get("/metrics")).text
    assert house.replicas.clears == []
    assert 'route="/v1/sessions/{session_id:path}",status="400"' in text
    assert "xxx" not in text


@pytest.mark.parametrize(
    ("answers", "replicas", "says"),
    [
        ([], 1, "1 of 1 replicas did not answer"),
        ([Forgotten(1, 1, 1)], 2, "1 of 2 replicas did not answer"),
        ([Forgotten(1, 1, 1), RayActorError()], 1, "1 of 2 replicas did not answer"),
        ([Forgotten(1, 1, 1, ("s3",)), Forgotten(1, 0, 0, ("s3", "nvme"))], 2, "tiers s3, nvme did not"),
    ],
)
async def test_g12_a_clear_that_did_not_reach_everything_is_an_error(
    answers: list[Forgotten | Exception], replicas: int, says: str
) -> None:
    house = House(settings=make_settings(replicas=replicas))
    house.replicas.clear_answers = answers
    async with house.client() as client:
        for method, path in (("DELETE", "/v1/cache"), ("DELETE", "/v1/sessions/x"), ("POST", "/cache/clear")):
            response = await client.request(method, path)
            assert (response.status_code, error_of(response)["code"]) == (503, "clear_incomplete")
            assert says in error_of(response)["message"]
            assert response.headers["retry-after"] == "1"


async def test_g12_the_replicas_that_are_there_are_asked_once_though_others_are_missing() -> None:
    """A deletion was gone on with by a new process, which waited for all of them before it asked any."""
    house = House(settings=make_settings(replicas=2))
    async with house.client():
        place = house.service.clears.places["sessions"]["replicas"]
        unheard, heard = (Erasure("sessions", name, None, is_late=True) for name in ("a", "b"))
        house.replicas.clear_answers = []
        for asked in (1, 2):
            with pytest.raises(Left):
                await place(unheard)
            assert len(house.replicas.clears) == asked
        house.replicas.clear_answers = [Forgotten(1, 1, 1)]
        for _ in range(2):  # what came since is not cleared again and again
            with pytest.raises(Left):
                await place(heard)
            assert len(house.replicas.clears) == 3


# The administrator ------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), [*ADMIN_ROUTES, METRICS])
async def test_f33_admin_routes_need_the_admin_key(method: str, path: str) -> None:
    for house, admin_status in ((guarded(admin_key=ADMIN_KEY), 200), (guarded(), 401)):
        async with house.client() as client:
            for headers, status in (({}, 401), (bearer(KEY), 403), (bearer("sk-nobody"), 401)):
                response = await client.request(method, path, headers=headers)
                assert response.status_code == status
                error_of(response)
            assert house.replicas.clears == []
            assert (await client.request(method, path, headers=bearer(ADMIN_KEY))).status_code == admin_status


async def test_f33_the_admin_key_is_no_tenants_key() -> None:
    house = guarded(admin_key=ADMIN_KEY)
    async with house.client(**bearer(ADMIN_KEY)) as client:
        for method, path in (("POST", CHAT), ("DELETE", "/v1/cache"), ("DELETE", "/v1/sessions/x")):
            response = await client.request(method, path, json=chat())
            assert (response.status_code, error_of(response)["code"]) == (403, "forbidden"), path
        assert (await client.get("/metrics")).status_code == 200
    assert house.replicas.clears == []
    assert house.replicas.calls == []


@pytest.mark.guarantee("G2", "F15")
async def test_metrics_tell_no_tenant_of_another() -> None:
    """How many tokens somebody else has sent, and how many were cached, follow from two scrapes."""
    house = guarded(admin_key=ADMIN_KEY)
    async with house.client() as client:
        await client.post(CHAT, json=chat(), headers=bearer(KEY))
        for method in ("GET", "HEAD"):
            refused = await client.request(method, "/metrics", headers=bearer(OTHER_KEY))
            assert refused.status_code == 403
        error = error_of(await client.get("/metrics", headers=bearer(OTHER_KEY)))
        assert error["code"] == "forbidden"
        assert "/metrics" in error["message"]
        assert "auth.admin_key" in error["message"]
        told = await client.get("/metrics", headers=bearer(ADMIN_KEY))
        assert "samovar_generation_tokens_total" in told.text


@pytest.mark.parametrize("admin_key", [None, ADMIN_KEY])
async def test_without_tenants_metrics_are_open_to_scrapers(admin_key: str | None) -> None:
    async with House(settings=make_settings(admin_key=admin_key)).client() as client:
        assert (await client.get("/metrics")).status_code == 200


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
async def test_without_keys_admin_routes_are_open_unless_there_is_an_admin_key(
    method: str, path: str
) -> None:
    async with House().client() as client:
        assert (await client.request(method, path)).status_code == 200
        foreign = await client.request(method, path, headers={"origin": "https://evil.example"})
        assert foreign.status_code == 403
    async with House(settings=make_settings(admin_key=ADMIN_KEY)).client() as client:
        assert (await client.request(method, path)).status_code == 403
        assert (await client.request(method, path, headers=bearer("unused"))).status_code == 403
        assert (await client.post(CHAT, json=chat(), headers=bearer("unused"))).status_code == 200
        assert (await client.request(method, path, headers=bearer(ADMIN_KEY))).status_code == 200


async def test_the_administrator_clears_one_tenant_or_all() -> None:
    house = guarded(admin_key=ADMIN_KEY)
    tags = {name: tenant_tag(SECRET, name) for name in ("a", "b", "gone")}
    async with house.client() as client:
        for key in (KEY, OTHER_KEY):
            await client.post(CHAT, json=chat(), headers=bearer(key))
        one = await client.post("/cache/clear", json={"tenant": "a"}, headers=bearer(ADMIN_KEY))
        assert one.json()["cleared"]["replies"] == 1
        assert house.replicas.clears == [(tags["a"], None)]
        gone = await client.post("/cache/clear", json={"tenant": "gone"}, headers=bearer(ADMIN_KEY))
        assert gone.json()["cleared"]["replies"] == 0
        assert house.replicas.clears[1:] == [(tags["gone"], None)]
        every = await client.post("/reset_prefix_cache", headers=bearer(ADMIN_KEY))
        assert every.json()["cleared"] == {"replies": 1, "pages": 6, "extents": 4, "bytes": 200}
        assert house.replicas.clears[2:] == [(tags["a"], None), (tags["b"], None)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"tenat": "a"}', "tenat"),
        ('{"tenant": 5}', "tenant"),
        ('{"tenant": "../x"}', "tenant"),
        ("[]", None),
        ("{", None),
    ],
)
async def test_a_bad_body_clears_nothing(body: str, param: str | None) -> None:
    house = House()
    async with house.client() as client:
        response = await client.post("/cache/clear", content=body)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert house.replicas.clears == []


@given(st.tuples(*[st.integers(0, 99)] * 5), st.tuples(*[st.integers(0, 99)] * 5))
def test_two_clears_add_up_in_every_part_for_itself(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    replicas, silent, *reached = zip(one, other, strict=True)
    added = ClearCounts(*one, ("s3", "nvme")) + ClearCounts(*other, ("nvme", "more"))
    assert added == ClearCounts(
        min(replicas), max(silent), *(sum(parts) for parts in reached), ("s3", "nvme", "more")
    )


async def test_ray_client_asks_every_replica_and_counts_those_that_do_not_answer() -> None:
    handle = FakeHandle(Forgotten(2, 5, 60), Forgotten(3, 4, 100, ("s3",)), RayActorError(), None)
    counts = await RayReplicaClient(handle, retry_after_s=1).clear(b"t", (b"s",))
    assert counts == ClearCounts(replicas=2, silent=2, pages=5, extents=5, nbytes=100, unreachable=("s3",))
    assert handle.broadcasts == [("clear", b"t", (b"s",))]
    for failure in (TimeoutError(), RayActorError()):
        counts = await RayReplicaClient(FakeHandle(failure), retry_after_s=1).clear(b"t", None)
        assert counts == ClearCounts(silent=1)


@pytest.mark.parametrize(("answers", "told"), [((5, 7), 12), ((5, None), None), ((5, RayActorError()), 5)])
async def test_bytes_of_a_pool_are_none_where_an_engine_does_not_say(
    answers: tuple[object, ...], told: int | None
) -> None:
    client = RayReplicaClient(FakeHandle(*answers), retry_after_s=1)
    assert await client.pool_bytes(b"t", b"s") == told


def test_f33_a_tenants_key_cannot_be_the_administrators() -> None:
    env = {"SAMOVAR_AUTH__API_KEYS": json.dumps({"a": KEY}), "SAMOVAR_AUTH__ADMIN_KEY": KEY}
    with pytest.raises(ConfigError, match=r"auth\.admin_key is the API key of tenant a") as refused:
        load(None, env, [])
    assert KEY not in str(refused.value)
