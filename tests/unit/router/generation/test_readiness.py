"""An ingress that starts beside others takes requests when it has seen a replica: no client waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from samovar.replicas.messages import ReplicaInfo
from samovar.router.generation import services
from samovar.router.generation.services import LOOKS_A_POLL, Readiness, is_due
from tests.support.router.fake_replica import INFO, FakeReplicas, say
from tests.support.router.router_harness import until

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
    """Serve sends requests to an ingress that has started. Without the wait the first ones are refused."""
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


@pytest.mark.parametrize(
    ("looks", "known", "answered", "due"),
    [
        (1, (), ("a",), True),  # Serve's own router names none
        (1, ("a",), ("a",), False),
        (LOOKS_A_POLL - 1, ("b", "a"), ("a", "b"), False),
        (LOOKS_A_POLL, ("a",), ("a",), True),
        (1, ("a", "b"), ("a",), True),  # one has come, or does not answer
        (1, ("a",), ("a", "b"), True),  # one has gone
        (1, ("a",), (), True),
    ],
)
def test_replicas_are_polled_seldom_while_they_are_the_same(
    looks: int, known: tuple[str, ...], answered: tuple[str, ...], due: bool
) -> None:
    assert is_due(looks, known, answered) is due


async def test_a_replica_that_comes_is_seen_at_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "POLL_READY_S", 0.0)
    client, known, looks = replicas(are_up=True), {INFO.replica_id}, 0
    polls: list[int] = []
    describe = client.describe

    async def counted() -> list[ReplicaInfo]:
        polls.append(looks)
        return await describe()

    def look() -> set[str]:
        nonlocal looks
        looks += 1
        return known

    client.describe = counted  # type: ignore[method-assign]
    readiness = Readiness(client, known=look)
    await readiness.start()
    await until(lambda: looks > 3 * LOOKS_A_POLL)
    assert len(polls) <= 1 + looks // LOOKS_A_POLL
    known.add("another")
    client.infos = [INFO, replace(INFO, replica_id="another")]
    await until(lambda: len(readiness.replicas) == 2)
    await readiness.stop()
