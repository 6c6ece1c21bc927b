"""An engine over its node's tiers, both telling their blocks: a router knows what either really has."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks.extent import TAG_BYTES, Clear
from samovar.cache_tiers.catalog import announced_catalog
from samovar.cache_tiers.events.feed import hash_of
from samovar.cache_tiers.events.publisher import publisher_at
from samovar.configs.optional_sections import TelemetrySettings
from samovar.replicas.kv import PagePool
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import Tiered, tiered
from tests.support.inside import registry_of, state_of
from tests.support.kv_subscriber import Subscriber, free_ports, until

TENANT = bytes(TAG_BYTES)


def in_pool(engine: Tiered) -> dict[int, tuple[int, ...]]:
    pool: PagePool = engine.built.engine.scheduler.pool
    entries = [pool.index.of_page(page) for page in pool.index.pages()]
    return {hash_of(entry.key): tuple(entry.token_ids) for entry in entries if entry is not None}


def in_tier(engine: Tiered, tier: str) -> set[int]:
    extents = registry_of(state_of(engine.node).catalog)
    return {hash_of(key) for one in extents if tier in one.copies for key in one.block_keys()}


@pytest.mark.guarantee("G12")
def test_a_router_knows_what_pool_and_tiers_have(tiny_llama: Path, tmp_path: Path) -> None:
    port = free_ports(8)[0]
    endpoint = f"tcp://127.0.0.1:{port}"
    of_tiers = publisher_at(endpoint, is_replica=False)
    engine = tiered(
        tiny_llama,
        tmp_path,
        node={"catalog": partial(announced_catalog, of_tiers.feed), "bytes_max": 400_000},
        telemetry=TelemetrySettings(kv_events=endpoint),
        pool_tokens=512,
    )
    rng = random.Random(3)
    sessions = [bytes([one]) + bytes(TAG_BYTES - 1) for one in range(1, 7)]
    said: dict[bytes, list[int]] = {}
    with Subscriber(port) as tiers, Subscriber(port + 1) as replica:

        def knows_all() -> bool:
            heard = replica.heard.blocks.get(("GPU", None), {})
            return (
                {one: block.token_ids for one, block in heard.items()} == in_pool(engine)
                and tiers.heard.at("CPU") == in_tier(engine, "cpu")
                and tiers.heard.at("STORAGE") == in_tier(engine, "nvme")
            )

        for turn in range(30):
            session = rng.choice(sessions)
            prompt = [*said.get(session, []), *prompt_of(rng.randrange(20, 60), seed=turn)][:300]
            answer = engine.run(prompt, session=session)
            said[session] = [*prompt, *answer.ids]
            if turn % 5 == 4:
                until(knows_all, tiers.read, replica.read, tiers.replay, replica.replay)
        assert engine.built.engine.scheduler.pool.evictions, "the pool was never full"
        assert in_pool(engine).keys() & in_tier(engine, "cpu"), "a block has the same name in pool and tiers"
        gone = rng.choice(list(said))
        of_gone = in_pool(engine).keys()
        engine.built.engine.requests.forget({TENANT + gone})
        engine.node.clear(Clear(TENANT, gone))
        engine.work()
        until(knows_all, tiers.read, replica.read, tiers.replay, replica.replay)
        assert of_gone - in_pool(engine).keys(), "nothing of it was in the pool"
    of_tiers.close()
