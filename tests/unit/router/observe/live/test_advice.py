"""Advice for who sees the cluster: what the commands say, bounded, seldom, and to no one else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from samovar.cache_tiers.messages import NodeGlance
from samovar.cache_tiers.pricing import TierPrice
from samovar.configs.optional_sections import LiveSettings
from samovar.router.generation import TenantUsage
from samovar.router.observe.diagnosis import CONDITIONS, Snapshot, diagnose, size_live, snapshot_of
from samovar.router.observe.live import hub as hub_module
from samovar.router.observe.live.feed import Audience, Json, diff, encoded
from samovar.router.observe.live.hub import CONTEXTS, advice_of
from samovar.router.observe.live.state import LEFT_OUT, Seen, Shown, fitted, state_of
from tests.support.router.fake_directory import FakeLink
from tests.support.router.fake_replica import say
from tests.support.router.live_reader import reading
from tests.support.router.router_harness import ADMIN_KEY, KEY, House, chat, make_settings, until
from tests.support.router.router_harness import NODE as NODE_ID
from tests.support.router.snapshots import HEALTHY, NODE, NVME, OFF, PLANTED, REPLICA, SERVING, with_tiers
from tests.unit.router.ingress.test_several_models import TwoModels

CHARS = LiveSettings().advice_chars_max
CLUSTER, TENANT = Audience(None, sees_all=True), Audience("a", sees_all=False)


def state(advice: Json, audience: Audience = CLUSTER) -> Json:
    shown = Shown(audience, [], False, TenantUsage(), 0.0)
    return state_of(shown, Seen(1.0, nodes={}, advice=advice), "tiny", LiveSettings(), None)


def texts(value: Any) -> Iterator[str]:
    """All texts in plain data."""
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts(item)


@pytest.mark.parametrize("snapshot", [HEALTHY, *PLANTED.values()])
def test_it_says_what_the_command_says(snapshot: Snapshot) -> None:
    told, found = advice_of(snapshot, CHARS)["diagnosis"], diagnose(snapshot)
    assert list(told["conditions"]) == [one.name for one in CONDITIONS]
    assert told["turns"] == found.turns
    holding = {name: one for name, one in told["conditions"].items() if one["state"] == "holds"}
    assert list(holding) == [one.condition for one in found.holding]
    for finding in found.holding:
        one = holding[finding.condition]
        assert one["evidence"] == finding.evidence
        assert [change["brings"] for change in one["changes"]] == [c.brings for c in finding.changes]
        for change, said in zip(finding.changes, one["changes"], strict=True):
            words = [str(word) for word in said.values() if word]
            assert all(word in str(change) for word in words)


@pytest.mark.parametrize("snapshot", [HEALTHY, *PLANTED.values()])
def test_a_state_with_it_holds_no_null_and_only_numbers_that_json_has(snapshot: Snapshot) -> None:
    endless = replace(NVME, price=TierPrice(1e-3, math.inf))
    for at in (snapshot, replace(snapshot, nodes=with_tiers(endless, OFF).nodes)):
        told = encoded(state(advice_of(at, CHARS)))
        assert b"null" not in told
        json.loads(told)


def test_memory_is_that_of_plan_live() -> None:
    told, sizing = advice_of(HEALTHY, CHARS)["memory"], size_live(HEALTHY, (2048, 4096, 8192))
    assert sizing is not None
    assert told["bytes_per_token"] == SERVING.bytes_per_token
    fits = {one["tokens"]: one.get("sequences") for one in told["contexts"]}
    assert fits == {one.tokens: one.sequences for one in sizing.contexts}
    assert fits[8192] == 2
    assert told["tiers"].keys() == {"cpu", "nvme"}
    assert told["tiers"]["nvme"]["wins_from"] == sizing.tiers[1].wins_from
    assert told["contexts"][0]["load_s"]["nvme"] == pytest.approx(sizing.tiers[1].load_s[0], rel=0.01)
    slow = with_tiers(replace(NVME, price=TierPrice(20.0, 1e3)), OFF)
    assert "wins_from" not in advice_of(slow, CHARS)["memory"]["tiers"]["nvme"]


@pytest.mark.parametrize(
    ("context", "lengths"),
    [(1000, [1000]), (2048, [2048]), (5000, [2048, 4096, 5000]), (1 << 17, list(CONTEXTS))],
)
def test_memory_is_told_up_to_the_model_s_context(context: int, lengths: list[int]) -> None:
    model = replace(HEALTHY, serving=(replace(SERVING, context_tokens_max=context),))
    contexts = advice_of(model, CHARS)["memory"]["contexts"]
    assert [one["tokens"] for one in contexts] == lengths
    assert all("sequences" in one for one in contexts)


def test_a_tenant_s_state_has_none_of_it() -> None:
    advice = advice_of(HEALTHY, CHARS)
    assert advice.keys() == {"diagnosis", "memory"}
    assert not advice.keys() & state(advice, TENANT).keys()
    assert advice.keys() <= state(advice).keys()


def test_texts_are_bounded_and_a_message_too() -> None:
    nodes = tuple(replace(NODE, node_id=f"{number:016x}") for number in range(300))
    advice = advice_of(replace(HEALTHY, nodes=nodes), CHARS)
    assert max(map(len, texts(advice))) == CHARS
    whole = state(advice)
    cut = fitted(whole, len(encoded(whole)) - 1)
    assert (cut[LEFT_OUT], "diagnosis" in cut, "memory" in cut) == (["diagnosis"], False, True)
    least = fitted(whole, 600)
    assert (least[LEFT_OUT], len(encoded(least)) <= 600) == (["diagnosis", "memory"], True)


def test_before_a_replica_tells_of_itself_there_is_nothing_to_say() -> None:
    assert advice_of(replace(HEALTHY, replicas=()), CHARS) == {}
    assert advice_of(replace(HEALTHY, serving=()), CHARS) == {}
    cold = advice_of(replace(HEALTHY, replicas=(replace(REPLICA, prefill_price=(0.0, 0.0, 0.0)),)), CHARS)
    assert cold.keys() == {"diagnosis"}


def test_a_price_that_drifts_changes_nothing() -> None:
    c0, a, b = REPLICA.prefill_price
    drifted = replace(HEALTHY, replicas=(replace(REPLICA, prefill_price=(c0, a * 1.00001, b)),))
    assert diff(advice_of(HEALTHY, CHARS)["memory"], advice_of(drifted, CHARS)["memory"]) == {}


# In the stream ---------------------------------------------------------------------------------


def house(link: FakeLink, *, advice_period_s: float = 0.1) -> House:
    """A tenant and an administrator; the replica and the node of `HEALTHY`."""
    settings = make_settings(keys={"a": KEY}, admin_key=ADMIN_KEY)
    quick = {"period_s": 0.1, "idle_period_s": 0.1, "busy_period_s": 0.1, "advice_period_s": advice_period_s}
    home = House(
        lambda request: say(["Hel", "lo"]),
        settings=settings.model_copy(update={"live": LiveSettings(**quick)}),
        link=link,
    )
    home.replicas.stats_now, home.replicas.nodes = [REPLICA], [NODE]
    link.shows = {NODE_ID: NodeGlance(stats=NODE)}
    return home


async def test_the_stream_says_what_diagnose_says_of_stats_and_metrics() -> None:
    home = house(FakeLink())
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with home.client() as client:
        for turn in range(6):
            messages = [{"role": "system", "content": f"It is {turn} o'clock, and I am kind. " * 9}]
            messages += [{"role": "user", "content": "What is the time, please?"}] * (turn + 1)
            body = chat(session_id="s") | {"messages": messages}
            await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"})
        async with reading(home.app, ADMIN_KEY) as reader:
            await until(lambda: "diagnosis" in reader.state if reader.body else False)
            told = reader.state
        stats = (await client.get("/cache/stats", headers=admin)).text
        metrics = (await client.get("/metrics", headers=admin)).text
    assert told["diagnosis"] == advice_of(snapshot_of(json.loads(stats), metrics, 1.0), CHARS)["diagnosis"]
    changes = told["diagnosis"]["conditions"]["prompt_changes"]
    assert (changes["state"], "of 6 prompts left" in changes["evidence"]) == ("holds", True)
    assert changes["cause"].startswith("The system prompt changes")
    assert told["memory"]["contexts"][0]["tokens"] == CONTEXTS[0]


async def test_with_several_models_the_stream_says_what_diagnose_says_of_the_metrics_of_all() -> None:
    settings = make_settings(keys={"a": KEY}, admin_key=ADMIN_KEY)
    home = TwoModels(settings.model_copy(update={"live": LiveSettings(period_s=0.1, advice_period_s=0.1)}))
    home.replicas.stats_now, home.replicas.nodes = [REPLICA], [NODE]
    home.link.shows = {NODE_ID: NodeGlance(stats=NODE)}
    for _ in range(9):
        home.small.metrics.prefixes_left.labels("system").inc()
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with home.client() as client:
        async with reading(home.app, ADMIN_KEY) as reader:
            await until(lambda: "diagnosis" in reader.state if reader.body else False)
            told = reader.state["diagnosis"]
        stats = (await client.get("/cache/stats", headers=admin)).text
        metrics = (await client.get("/metrics", headers=admin)).text
    assert told == advice_of(snapshot_of(json.loads(stats), metrics, 1.0), CHARS)["diagnosis"]
    changes = told["conditions"]["prompt_changes"]
    assert (changes["state"], changes["evidence"].startswith("9 of ")) == ("holds", True)


@pytest.mark.guarantee("G2", "F14")
async def test_f14_for_a_tenant_s_stream_nothing_is_diagnosed_and_none_of_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[Snapshot] = []

    def counted(now: Snapshot, chars_max: int) -> Json:
        judged.append(now)
        return advice_of(now, chars_max)

    monkeypatch.setattr(hub_module, "advice_of", counted)
    home = house(FakeLink())
    async with home.client(), reading(home.app, KEY) as own:
        await until(lambda: home.app.state.live.looks >= 2)
        assert judged == []
        async with reading(home.app, ADMIN_KEY) as every:
            await until(lambda: "diagnosis" in every.state if every.body else False)
            looks = home.app.state.live.looks
            await until(lambda: home.app.state.live.looks >= looks + 2)
    assert judged
    assert {"diagnosis", "memory"} <= every.state.keys()
    assert not {"diagnosis", "memory"} & own.state.keys()
    assert b"KV memory" in every.body
    assert b"KV memory" not in own.body


async def test_it_is_judged_seldom_and_stays_while_the_directory_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[Snapshot] = []

    def counted(now: Snapshot, chars_max: int) -> Json:
        judged.append(now)
        return advice_of(now, chars_max)

    monkeypatch.setattr(hub_module, "advice_of", counted)
    link = FakeLink()
    home = house(link, advice_period_s=3600)
    async with reading(home.app, ADMIN_KEY) as every:
        await until(lambda: home.app.state.live.looks >= 2)
        assert "diagnosis" not in every.state  # no replica is known yet
        await home.service.readiness.poll()
        await until(lambda: "diagnosis" in every.state)
        before, looks = len(judged), home.app.state.live.looks
        await until(lambda: home.app.state.live.looks >= looks + 3)
        assert len(judged) == before
        link.is_lost = True
        looks = home.app.state.live.looks
        await until(lambda: home.app.state.live.looks >= looks + 3)
        assert "nodes" not in every.state
        assert every.state["diagnosis"]["conditions"]["idle_sessions"]["state"] == "clear"
    assert len(judged) == before
