"""A front door that starts beside others takes requests when it has seen a replica: no client waits."""

from __future__ import annotations

import asyncio

import pytest

from replicas.messages import ReplicaInfo
from router.generation.readiness import Readiness
from tests.support.router.fake_replica import INFO, FakeReplicas, say

FOREVER_S = 600.0


def replicas(*, are_up: bool) -> FakeReplicas:
    found = FakeReplicas(lambda request: say([]))
    found.infos = [INFO] if are_up else []
    return found


async def test_a_start_waits_until_a_replica_is_seen() -> None:
    client = replicas(are_up=False)
    readiness = Readiness(client, start_s=FOREVER_S, must_see=False)
    start = asyncio.create_task(readiness.start())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not start.done()
    client.infos = [INFO]
    await readiness.poll()
    await start
    assert readiness.takes_work
    await readiness.stop()


async def test_a_start_that_need_not_see_one_goes_on_without() -> None:
    readiness = Readiness(replicas(are_up=False), start_s=0.01, must_see=False)
    await readiness.start()
    assert (readiness.state, readiness.takes_work) == ("loading", False)
    await readiness.stop()
    strict = Readiness(replicas(are_up=False), start_s=0.01)
    with pytest.raises(TimeoutError):
        await strict.start()
    await strict.stop()


async def test_where_replicas_start_on_demand_nothing_is_waited_for() -> None:
    readiness = Readiness(replicas(are_up=False), 0, start_s=FOREVER_S, must_see=False)
    await readiness.start()
    assert readiness.takes_work
    await readiness.stop()


async def test_who_has_started_takes_requests_though_a_replica_is_slow_to_say_who_it_is() -> None:
    """Serve sends requests to a front door that has started. Without the wait the first ones are refused."""
    client, asked = replicas(are_up=True), asyncio.Event()
    describe = client.describe

    async def slowly() -> list[ReplicaInfo]:
        await asked.wait()
        return await describe()

    client.describe = slowly  # type: ignore[method-assign]
    rash = Readiness(client)
    await rash.start()
    assert not rash.takes_work
    await rash.stop()
    readiness = Readiness(client, start_s=FOREVER_S, must_see=False)
    start = asyncio.create_task(readiness.start())
    await asyncio.sleep(0)
    assert not start.done()
    asked.set()
    await start
    assert readiness.takes_work
    await readiness.stop()
