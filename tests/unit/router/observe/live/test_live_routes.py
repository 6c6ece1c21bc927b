"""/v1/live, /v1/usage and the page: who sees what, what is gathered when, and how streams end."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from samovar.cache_tiers.blocks import session_of, tenant_tag
from samovar.cache_tiers.messages import LineageGlance, NodeGlance, NodeStats
from samovar.cache_tiers.pricing import PrefillPrice
from samovar.configs.optional_sections import LiveSettings
from samovar.replicas.messages import Receipt
from samovar.router.observe.live import hub as hub_module
from samovar.router.observe.live.feed import Json
from samovar.router.observe.live.hub import LiveHub
from samovar.router.observe.live.routes import LiveRoutes
from samovar.router.observe.live.state import owner_of
from tests.support.router.fake_directory import FakeLink
from tests.support.router.fake_replica import INFO, say
from tests.support.router.live_reader import LiveReader, reading
from tests.support.router.router_harness import (
    ADMIN_KEY,
    KEY,
    NODE,
    OTHER_KEY,
    House,
    bearer,
    chat,
    error_of,
    make_settings,
    until,
)

CHAT = "/v1/chat/completions"
SECRET = b"secret"
PRICE = PrefillPrice(0.1, 0.001, 0.0)


def house(link: FakeLink | None = None, *, keys: bool = True, live: Json | None = None, **more: Any) -> House:
    """Two tenants and an administrator (or without keys), whose streams are quick."""
    owners = {"keys": {"a": KEY, "b": OTHER_KEY}, "admin_key": ADMIN_KEY} if keys else {}
    settings = make_settings(**owners, **more)  # type: ignore[arg-type]
    quick = LiveSettings(**{"period_s": 0.1, "idle_period_s": 0.1, "busy_period_s": 0.1, **(live or {})})
    home = House(settings=settings.model_copy(update={"live": quick}), link=link or FakeLink())
    home.tracker.update_replicas({INFO.replica_id: NODE}, {INFO.replica_id: PRICE})
    return home


def hub(home: House) -> LiveHub:
    found: LiveHub = home.app.state.live
    return found


async def say_hi(client: httpx.AsyncClient, session: str, key: str = KEY, **headers: str) -> httpx.Response:
    answer = await client.post(CHAT, json=chat(session_id=session), headers={**bearer(key), **headers})
    assert answer.status_code == 200, answer.text
    return answer


async def seen_by(reader: LiveReader, *wanted: str) -> Json:
    """The state, once it has all of `wanted`."""
    await until(lambda: wanted_in(reader, wanted))
    return reader.state


def wanted_in(reader: LiveReader, wanted: tuple[str, ...]) -> bool:
    return reader.body != b"" and all(word in str(reader.state) for word in wanted)


# Who sees what ---------------------------------------------------------------------------------


@pytest.mark.guarantee("G2", "F14")
async def test_f14_a_tenant_s_stream_and_usage_tell_of_its_own_only() -> None:
    link = FakeLink()
    home = house(link)
    async with home.client() as client, reading(home.app, OTHER_KEY) as other:
        async with reading(home.app, KEY) as own, reading(home.app, ADMIN_KEY) as every:
            home.replicas.pooled_blocks = 3
            answer = await say_hi(client, "mine", KEY)
            await until(lambda: bool(own.turns and every.turns))
            state = await seen_by(own, "sess_", "'gpu': 3", "'requests': 1")
            await seen_by(every, "sess_", "'requests': 1")
            (turn,), (admins,) = own.turns, every.turns
            usages = [
                (await client.get("/v1/usage", headers=bearer(key))).json()
                for key in (KEY, OTHER_KEY, ADMIN_KEY)
            ]
        assert other.turns == []
        before = other.state
        silent = (before["sessions"], before["totals"]["requests"], before["scope"])
        theirs = await say_hi(client, "mine", OTHER_KEY)  # with its own turn all that waited would come
        await until(lambda: bool(other.turns))
        assert [one["request_id"] for one in other.turns] == [theirs.headers["x-request-id"]]
    (name,) = state["sessions"]
    assert silent == ({}, 0, "tenant")
    assert not {"replicas", "nodes", "routing"} & before.keys()
    assert (turn["session"], turn["request_id"]) == (name, answer.headers["x-request-id"])
    assert turn["lineage"] in state["sessions"][name]["lineages"]
    assert "tenant" not in turn
    assert admins["tenant"] == "a"
    assert (state["scope"], state["tenant"], state["totals"]["requests"]) == ("tenant", "a", 1)
    told = every.state
    assert (told["scope"], told["sessions"][name]["tenant"], told["totals"]["requests"]) == (
        "cluster",
        "a",
        1,
    )
    assert told["replicas"].keys() == {"replica-1"}
    assert [usage["requests"] for usage in usages] == [1, 0, 1]
    assert usages[2]["tenants"].keys() == {"a"}
    tags = {owner[:16] for owners, _ in link.glances for owner in owners}
    assert tags == {tenant_tag(SECRET, "a"), tenant_tag(SECRET, "b")}


async def test_without_keys_the_caller_sees_all() -> None:
    link = FakeLink()
    home = house(link, keys=False)
    link.shows = {NODE: NodeGlance(stats=NodeStats(NODE, "1", 0, ()))}
    async with home.client() as client, reading(home.app) as reader:
        await client.post(CHAT, json=chat(session_id="s"))
        state = await seen_by(reader, "sess_")
    assert (state["scope"], state["tenant"]) == ("cluster", "local")
    assert state["nodes"].keys() == {NODE}
    assert state["model"] == {
        "name": "tiny",
        "context_tokens": 2048,
        "block_tokens": 16,
        "bytes_per_token": 1,
        "kv_dtype": "float32",
        "device": "cpu",
    }


@pytest.mark.parametrize("path", ["/v1/live", "/v1/usage"])
async def test_data_needs_a_key(path: str) -> None:
    home = house()
    async with home.client() as client:
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers=bearer("sk-wrong-wrong-wrong"))).status_code == 401


# What a turn tells -----------------------------------------------------------------------------


async def test_a_turn_tells_its_sources_its_time_and_what_computing_it_would_have_taken() -> None:
    link = FakeLink()
    home = house(link)
    async with home.client() as client, reading(home.app, KEY) as reader:
        await say_hi(client, "s")
        tokens = len(home.replicas.calls[-1].prompt_token_ids)
        cached = tokens - 5
        receipt = Receipt({"cpu": cached, "compute": 5}, "load", load_s=0.002, miss="late")
        home.replicas.script = lambda request: say(["Hel", "lo"], cached=cached, receipt=receipt)
        await say_hi(client, "s")
        await until(lambda: len(reader.turns) == 2)
        first, turn = reader.turns
        tag = tenant_tag(SECRET, "a")
        link.holds[(tag, b"x")] = {"cpu": 10, "s3": 7}
        usage = (await client.get("/v1/usage", headers=bearer(KEY))).json()
        link.is_lost = True
        lost = (await client.get("/v1/usage", headers=bearer(KEY))).json()
    assert first["recompute_ms"] == round(1000 * PRICE.seconds(tokens, 0), 1)
    assert first["saved_ms"] == 0.0
    assert "miss" not in first
    saved_s = PRICE.seconds(tokens, 0) - PRICE.seconds(5, cached) - 0.002
    assert turn["saved_ms"] == round(1000 * saved_s, 1)
    assert turn["tokens"] == {"compute": 5, "gpu": 0, "cpu": cached, "nvme": 0, "s3": 0, "peer": 0}
    assert (turn["decision"], turn["load_ms"], turn["miss"], turn["finish"]) == ("load", 2.0, "late", "stop")
    assert 0 <= turn["ttft_ms"] <= turn["e2e_ms"]
    assert (turn["output_tokens"], turn["replica"], turn["missed"]) == (2, ["replica-1"], 0)
    assert usage["tokens"]["compute"] == tokens + 5
    assert usage["prompt_tokens"] == 2 * tokens
    assert usage["hit_rate"] == round(cached / (2 * tokens), 4)
    assert usage["saved_s"] == round(saved_s, 3)
    assert usage["bytes_held"] == {"gpu": 4096, "cpu": 10, "nvme": 0, "s3": 7}
    assert lost["bytes_held"] is None


async def test_a_client_that_leaves_midway_is_counted_and_one_that_was_not_admitted_is_not() -> None:
    home = house()
    waits = asyncio.Event()
    home.replicas.script = lambda request: [*say(["Hel", "lo"])[:2], waits]
    async with home.client() as client, reading(home.app, KEY) as reader:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(say_hi(client, "s"), 0.3)
        await until(lambda: bool(reader.turns))
        home.replicas.script = lambda request: [waits]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(say_hi(client, "s"), 0.3)
        usage = (await client.get("/v1/usage", headers=bearer(KEY))).json()
        (turn,) = reader.turns
    assert (turn["finish"], turn["output_tokens"]) == ("left", 1)
    assert usage["requests"] == 1


# What is gathered ------------------------------------------------------------------------------


async def test_nothing_is_gathered_while_no_stream_is_open() -> None:
    link = FakeLink()
    home = house(link)
    async with home.client() as client:
        await say_hi(client, "s")
        assert (hub(home).looks, link.glances, home.replicas.glances) == (0, [], [])
        async with reading(home.app, KEY) as reader:
            await seen_by(reader, "sess_")
        hub(home).check_integrity()
        looks = hub(home).looks
        assert looks > 0
        assert home.service.usage.listeners == []
        await say_hi(client, "s")
        assert (hub(home).looks, len(link.glances)) == (looks, looks)
        async with reading(home.app, KEY) as reader:
            assert (await seen_by(reader, "sess_"))["totals"]["requests"] == 2


async def test_streams_of_one_audience_share_a_look_and_only_cluster_streams_ask_for_counters() -> None:
    link = FakeLink()
    home = house(link, live={"idle_period_s": 30.0})
    async with home.client(), reading(home.app, KEY) as one, reading(home.app, KEY) as two:
        await seen_by(one, "tenant")
        await seen_by(two, "tenant")
        assert {with_stats for _, with_stats in link.glances} == {False}
        async with reading(home.app, ADMIN_KEY) as admin:
            await seen_by(admin, "cluster")
    assert link.glances[-1][1]
    hub(home).check_integrity()


async def test_a_tenant_s_stream_draws_its_own_tag_and_an_operator_s_each_tenant_s_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[str] = []

    def counted(secret: bytes, tenant: str) -> bytes:
        drawn.append(tenant)
        return tenant_tag(secret, tenant)

    monkeypatch.setattr(hub_module, "tenant_tag", counted)
    home = house()
    async with home.client():
        async with reading(home.app, KEY):
            await until(lambda: hub(home).looks >= 3)
        assert set(drawn) == {"a"}
        drawn.clear()
        looks = hub(home).looks
        async with reading(home.app, ADMIN_KEY):
            await until(lambda: hub(home).looks >= looks + 3)
    assert sorted(drawn) == ["a", "b"]


async def test_pools_are_asked_again_only_after_turns() -> None:
    home = house()
    async with home.client() as client, reading(home.app, KEY) as reader:
        await say_hi(client, "s")
        await seen_by(reader, "sess_")
        quiet = hub(home).looks
        await until(lambda: hub(home).looks >= quiet + 2)
        asked, looks = len(home.replicas.glances), hub(home).looks
        await until(lambda: hub(home).looks >= looks + 4)
        assert len(home.replicas.glances) == asked
        await say_hi(client, "s")
        await until(lambda: len(home.replicas.glances) > asked)


async def test_changes_are_patches_and_blocks_are_seen_to_move() -> None:
    link = FakeLink()
    home = house(link)
    async with home.client() as client, reading(home.app, KEY) as reader:
        await say_hi(client, "s")
        await seen_by(reader, "sess_")
        (row,) = home.directory.table
        for tier in ("cpu", "nvme"):
            glance = LineageGlance({tier: 64}, {tier: 4}, ((tier, 4),), (0.5,) * 10, 1.0)
            link.shows = {NODE: NodeGlance({owner_of(row): glance})}
            state = await seen_by(reader, f"[['{tier}', 4]]")
        link.is_lost = True
        await until(lambda: "blocks" not in str(reader.state))
    (session,) = state["sessions"].values()
    (told,) = session["lineages"].values()
    assert told["blocks"] == {"gpu": 0, "cpu": 0, "nvme": 4, "s3": 0, "peer": 0}
    assert told["forecast"]["survival"] == [0.5] * 10
    assert told["node"] == NODE
    assert reader.names()[0] == "state"
    assert "change" in reader.names()
    assert session_of(row.session).hex() in next(iter(state["sessions"]))


async def test_a_failing_look_costs_news_not_the_stream() -> None:
    home = house()
    working = home.replicas.glance

    async def broken(owners: tuple[bytes, ...]) -> Any:
        raise RuntimeError("the control plane is away")

    home.replicas.glance = broken  # type: ignore[method-assign]
    async with home.client() as client, reading(home.app, KEY) as reader:
        await until(lambda: hub(home).looks >= 2)
        assert reader.body == b""
        home.replicas.glance = working  # type: ignore[method-assign]
        await say_hi(client, "s")
        await seen_by(reader, "sess_")


# Limits, and the end ---------------------------------------------------------------------------


async def test_a_stream_too_many_is_refused_in_openai_s_shape() -> None:
    home = house(live={"listeners_per_key_max": 1})
    async with home.client() as client, reading(home.app, KEY):
        refused = await client.get("/v1/live", headers=bearer(KEY))
        assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_streams")
        assert refused.headers["retry-after"]
        async with reading(home.app, OTHER_KEY) as other:
            assert other.status == 200


async def test_a_message_is_bounded_and_says_what_it_left_out() -> None:
    home = house(live={"message_bytes_max": 4096, "sessions_max": 20})
    async with home.client() as client, reading(home.app, KEY) as reader:
        for number in range(24):
            await say_hi(client, f"s{number}")
        state = await seen_by(reader, "left_out")
        await until(lambda: len(reader.turns) == 24)
    assert len(state["sessions"]) < 20
    whole = len("event: state\ndata: \n\n") + 4096
    assert reader.largest <= whole + sum(len(str(turn)) + 40 for turn in reader.turns)


async def test_streams_that_come_and_go_make_no_looks_of_their_own() -> None:
    home = house(live={"period_s": 60.0, "idle_period_s": 60.0})
    async with home.client():
        for method in ("GET", "HEAD") * 3:
            async with reading(home.app, KEY, method):
                await until(lambda: hub(home).looks > 0)
    assert hub(home).looks == 1


async def test_a_reader_that_leaves_in_the_moment_of_a_message_is_not_forgotten() -> None:
    home = house()
    routes = LiveRoutes(home.service, hub(home))

    async def send(message: Any) -> None:
        stream.cancel()

    async def endless() -> None:
        await routes._put(send, {"type": "http.response.body", "body": b"", "more_body": True})
        await asyncio.Event().wait()

    stream = asyncio.create_task(endless())
    done, _ = await asyncio.wait({stream}, timeout=30)
    stream.cancel()
    assert done


async def test_a_reader_that_takes_nothing_is_not_waited_for_at_the_end_of_its_time() -> None:
    home = house(live={"stream_s_max": 1.0}, limits={"write_idle_s": 2})
    async with home.client() as client, reading(home.app, KEY) as reader:
        await seen_by(reader, "tenant")
        reader.flow.clear()
        await say_hi(client, "s")
        await until(lambda: reader.is_closed)


@pytest.mark.parametrize("end", ["drain", "stop", "time", "leave", "stuck"])
async def test_streams_end(end: str) -> None:
    """When the server drains or stops, after their time, when a reader leaves, and when it does not read."""
    home = house(live={"stream_s_max": 1.0} if end == "time" else None, limits={"write_idle_s": 1})
    async with home.client() as client, reading(home.app, KEY) as reader:
        await seen_by(reader, "tenant")
        if end == "drain":
            home.service.readiness.drain()
        elif end == "stop":
            await hub(home).stop()
        elif end == "leave":
            reader.gone.set()
        elif end == "stuck":
            reader.flow.clear()
            await say_hi(client, "s")
        await until(lambda: reader.is_over or not home.service.usage.listeners)
        if end in ("drain", "stop"):
            refused = await client.get("/v1/live", headers=bearer(KEY))
            assert (refused.status_code, error_of(refused)["code"]) == (503, "draining")
    hub(home).check_integrity()
    assert home.service.usage.listeners == []


async def test_head_opens_no_stream_for_long() -> None:
    home = house()
    async with home.client(), reading(home.app, KEY, "HEAD") as reader:
        await until(lambda: reader.is_over)
    assert reader.status == 200


async def test_silence_is_broken_by_pings() -> None:
    home = house(sse_keepalive_s=0.05, live={"idle_period_s": 30.0})
    async with home.client(), reading(home.app, KEY) as reader:
        await until(lambda: reader.body.count(b": ping\n\n") >= 2)


async def test_without_the_page_there_is_no_stream_and_usage_stays() -> None:
    home = house(page=False)
    async with home.client(**bearer(KEY)) as client:
        for path in ("/", "/v1/live", "/page/app.js"):
            answer = await client.get(path)
            assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_route")
        assert (await client.get("/v1/usage")).status_code == 200
    async with home.client() as client:
        assert (await client.get("/")).status_code == 401, "the page's paths are open only where it is"
