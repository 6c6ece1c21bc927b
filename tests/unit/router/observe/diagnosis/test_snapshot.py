"""A snapshot is read from what an ingress really says, and from nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from samovar.replicas.messages import EngineStats, Receipt
from samovar.router.observe.diagnosis import NoSnapshot, Snapshot, diagnose, snapshot_of
from tests.support.router.fake_replica import say
from tests.support.router.router_harness import House, chat
from tests.support.router.snapshots import NODE, PREFILL, REPLICA

TWELVE = EngineStats("r", finished={"stop": 12}, prefill_price=PREFILL)
SAID = {"headers": {"x-session-id": "one"}}


async def asked(house: House, *bodies: dict[str, Any]) -> Snapshot:
    """What the house counts after these requests of one conversation."""
    house.replicas.nodes, house.replicas.stats_now = [NODE], [REPLICA]
    house.replicas.tiers_up_now = {"node-1": True, "node-2": False}
    async with house.client() as client:
        for body in bodies:
            assert (await client.post("/v1/chat/completions", json=body, **SAID)).status_code == 200
        stats = (await client.get("/cache/stats")).text
        return snapshot_of(json.loads(stats), (await client.get("/metrics")).text, 5.0)


def turns(count: int, system: str, **fields: Any) -> list[dict[str, Any]]:
    """Prompts of one conversation; `{}` in `system` is the number of the turn."""
    bodies = []
    for turn in range(count):
        messages = [{"role": "system", "content": system.format(turn)}]
        for past in range(turn):
            messages += [
                {"role": "user", "content": f"question number {past} of many, and some words more"},
                {"role": "assistant", "content": "Hello"},
            ]
        messages.append({"role": "user", "content": f"question number {turn} of many, and some words more"})
        bodies.append(chat() | {"messages": messages} | fields)
    return bodies


async def test_what_replicas_nodes_and_settings_say_comes_back_as_it_was() -> None:
    house = House()
    found = await asked(house, *turns(2, "You are kind."))
    assert (found.replicas, found.nodes, found.at_s) == ((REPLICA,), (NODE,), 5.0)
    assert found.serving == tuple(house.replicas.infos)
    assert found.settings["tiers.nvme.bytes_max"] == house.settings.tiers.nvme.bytes_max
    assert found.silent_nodes == ("node-2",)
    assert found.front.queued == 2


async def test_returning_tokens_are_counted_as_reused_or_recomputed() -> None:
    house = House(lambda request: say(["Hel", "lo"], cached=32, receipt=Receipt({"gpu": 32, "compute": 8})))
    found = await asked(house, *turns(3, "You are kind."))
    left = sum(found.front.returning.values())
    assert found.front.returning["reused"] == 64
    assert left > 64
    assert (await asked(House(), *turns(1, "You are kind."))).front.returning == {}


async def test_a_clock_in_the_system_prompt_is_found_from_real_metrics() -> None:
    prompt = "Now it is {} minutes past the hour. You are kind, and you answer at length, in many words."
    found = await asked(House(), *turns(12, prompt))
    # A prompt of one message more under another system prompt may be a title: nothing is said of the second.
    assert found.front.prefixes_left == {"system": 10}
    assert found.front.prefix_lost["system"] > 10 * 16
    twelve = replace(found, replicas=(TWELVE,), silent_nodes=())
    (finding,) = diagnose(twelve).holding
    assert (finding.condition, finding.cause) == ("prompt_changes", "system")
    assert finding.numbers["token"] <= 32
    assert "10 of 12 prompts left the prefix" in finding.evidence


async def test_tools_that_change_are_found_from_real_metrics() -> None:
    def tools(turn: int) -> list[dict[str, Any]]:
        names = ("find", "read", "write", f"tool_{turn}")
        return [{"type": "function", "function": {"name": name, "description": "does it"}} for name in names]

    bodies = [body | {"tools": tools(turn)} for turn, body in enumerate(turns(12, "You are kind."))]
    found = await asked(House(), *bodies)
    twelve = replace(found, replicas=(TWELVE,), silent_nodes=())
    assert [(one.condition, one.cause) for one in diagnose(twelve).holding] == [("prompt_changes", "tools")]


async def test_another_cache_salt_for_each_turn_is_counted_and_told_in_no_answer() -> None:
    house = House()
    bodies = turns(4, "You are kind, and you answer at length, in many words.")
    salted = [body | {"cache_salt": f"salt {turn}"} for turn, body in enumerate(bodies)]
    async with house.client() as client:
        for body in salted:
            reply = await client.post("/v1/chat/completions", json=body, **SAID)
            assert reply.json()["receipt"]["miss"] is None
        text = (await client.get("/metrics")).text
    assert snapshot_of({}, text, 0.0).front.salts_changed == 3
    same = await asked(House(), *[body | {"cache_salt": "salt"} for body in bodies])
    assert same.front.salts_changed == 0


@pytest.mark.parametrize(
    ("stats", "metrics"),
    [
        ({"replicas": [{"running": 1}]}, ""),  # without a name
        ({"nodes": "none"}, ""),
        ({"replicas": [{"replica_id": "r", "pages_total": "many"}]}, ""),
        ({}, 'samovar_affinity_total{outcome="home"} many\n'),
    ],
)
def test_statistics_of_another_version_are_refused_in_words(stats: dict[str, Any], metrics: str) -> None:
    with pytest.raises(NoSnapshot, match="another version"):
        snapshot_of(stats, metrics, 0.0)


def test_fields_that_a_later_version_adds_are_ignored_and_missing_ones_have_their_defaults() -> None:
    found = snapshot_of({"replicas": [{"replica_id": "r", "of_tomorrow": 1}]}, "", 0.0)
    assert found.replicas[0].replica_id == "r"
    assert diagnose(found).holding == ()
