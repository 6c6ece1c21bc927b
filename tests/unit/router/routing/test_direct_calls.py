"""Requests go to replicas over links: the same answers as through Serve, which carries what no link takes."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samovar.configs.settings import RouterSettings
from samovar.replicas.links import Inlet
from samovar.replicas.messages import (
    Admitted,
    Delta,
    Event,
    Failed,
    GenerateRequest,
    Keep,
    Refused,
    Route,
    SamplingParams,
)
from samovar.replicas.serving.deployment import Replica
from samovar.replicas.serving.served import Places
from samovar.router.generation.failover import resuming
from samovar.router.routing import ReplicaFailed, ReplicaLost, load_tracker, roster
from tests.support.constants import tuned
from tests.support.engines.engines import prompt_of
from tests.support.inside import (
    boxes_of,
    direct_calls,
    info_of,
    inlet_of,
    links_of,
    places_of,
    replicas_in,
    streams_of,
)
from tests.support.router.called_replicas import CalledReplicas, called
from tests.support.router.linked_replicas import LINKS
from tests.support.router.router_harness import until
from tests.support.router.tiny_replicas import FREE, TinyReplica, tiny_replicas

TOKENS = 12
KEPT = Keep(b"k" * 16, b"body", 1)


def request(name: str = "r", **more: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    return replace(GenerateRequest(name, prompt_of(20), sampling), **more)


async def answer(front: CalledReplicas, ask: GenerateRequest) -> list[Event]:
    return [event async for events in front.client.generate(ask, "session") for event in events]


def ids_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def server_of(events: list[Event]) -> str:
    (admitted,) = [event for event in events if isinstance(event, Admitted)]
    return admitted.replica_id


@pytest.mark.parametrize("keep", [None, KEPT])
async def test_both_roads_give_the_same_answer_and_serve_hears_of_one_only(
    tiny_llama: Path, keep: Keep | None
) -> None:
    answers = []
    for has_links in (True, False):
        async with tiny_replicas(tiny_llama) as replicas, called(replicas, has_links=has_links) as front:
            events = await answer(front, request(keep=keep))
            answers.append(ids_of(events))
            assert len(front.handle.calls) == (0 if has_links else 1)
            assert server_of(events) == "replica-1"
            await until(lambda: places_of(replicas[0]).taken == 0)
    assert answers[0] == answers[1]
    assert len(answers[0]) == TOKENS


async def test_the_roads_choice_is_the_routers(tiny_llama: Path) -> None:
    """Home, what is to be avoided, and the only one that can serve mean what they mean with Serve."""
    async with tiny_replicas(tiny_llama, 3) as replicas, called(replicas) as front:
        for name in ("replica-1", "replica-2", "replica-3"):
            assert server_of(await answer(front, request(route=Route(home=name, cached_tokens=19)))) == name
            assert server_of(await answer(front, request(route=Route(only=name)))) == name
            others = tuple({"replica-1", "replica-2", "replica-3"} - {name})
            assert server_of(await answer(front, request(route=Route(home=others[0], avoid=others)))) == name
        assert load_tracker.BOOK.outcomes["home"] == 3
        assert not front.handle.calls


async def test_who_is_full_is_passed_over_and_serve_queues_when_all_are(tiny_llama: Path) -> None:
    async with tiny_replicas(tiny_llama, 2) as replicas, called(replicas) as front:
        home = request(route=Route(home="replica-1", cached_tokens=19))
        replicas[0]._places = Places(0, 1)
        await front.list_all()  # its handler counts these places
        assert server_of(await answer(front, home)) == "replica-2"
        assert load_tracker.BOOK.outcomes["spilled"] == 1
        replicas[1]._places = Places(0, 1)
        await front.list_all()
        waiting = asyncio.create_task(answer(front, home))
        await until(lambda: len(front.handle.calls) == 1)
        await until(lambda: len(places_of(replicas[0])._waiting) == 1)
        assert not waiting.done()
        places_of(replicas[0])._places = 1
        places_of(replicas[0]).taken += 1
        places_of(replicas[0]).leave()  # there is room: who waits begins
        assert server_of(await asyncio.wait_for(waiting, 30)) == "replica-1"


async def test_while_requests_wait_with_serve_later_ones_stand_behind_them(tiny_llama: Path) -> None:
    async with tiny_replicas(tiny_llama) as replicas, called(replicas) as front:
        roster.ROSTER.queued.add("an earlier one")
        await answer(front, request())
        assert len(front.handle.calls) == 1
        roster.ROSTER.queued.discard("an earlier one")
        await answer(front, request())
        assert len(front.handle.calls) == 1


async def test_a_request_that_serve_has_handed_over_holds_up_no_later_one(tiny_llama: Path) -> None:
    async with tiny_replicas(tiny_llama) as replicas, called(replicas) as front:
        replicas[0].allow(0)  # it says nothing of the answer yet
        roster.ROSTER.queued.add("an earlier one")
        asked = asyncio.create_task(answer(front, request()))
        await until(lambda: len(front.handle.calls) == 1)
        await until(lambda: roster.ROSTER.queued == {"an earlier one"})
        roster.ROSTER.queued.clear()
        replicas[0].allow(FREE)
        assert len(ids_of(await asyncio.wait_for(asked, 30))) == TOKENS


async def test_serve_carries_what_is_not_for_links(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=0, prompt_logprobs_from=1)
    async with tiny_replicas(tiny_llama) as replicas, called(replicas) as front:
        assert ids_of(await answer(front, request(sampling=sampling)))
        assert len(front.handle.calls) == 1
        assert direct_calls(front.client) is not None
        small = tuned(direct_calls(front.client)._settings, call_bytes_max=64)
        monkeypatch.setattr(direct_calls(front.client), "_settings", small)
        await answer(front, request())
        assert len(front.handle.calls) == 2
        await until(lambda: not streams_of(replicas[0]))


async def test_serve_carries_calls_to_replicas_without_an_address_or_out_of_reach(tiny_llama: Path) -> None:
    async with tiny_replicas(tiny_llama) as replicas, called(replicas) as front:
        await answer(front, request())
        assert not front.handle.calls
        (listed,) = replicas_in(roster.ROSTER)
        assert listed.address is not None
        gone = replace(listed.address, port=1)
        for number, address in enumerate((None, gone), 1):
            roster.ROSTER.update([replace(listed, address=address)], roster.RankOptions())
            await answer(front, request())
            assert len(front.handle.calls) == number
        roster.ROSTER.update([], roster.RankOptions())  # the router knows of none yet: Serve waits for one
        await answer(front, request())
        assert len(front.handle.calls) == 3


async def test_an_ingress_that_cannot_listen_is_answered_through_serve(tiny_llama: Path) -> None:
    async with tiny_replicas(tiny_llama) as replicas, called(replicas) as front:
        assert direct_calls(front.client) is not None
        direct_calls(front.client)._inlet = Inlet("192.0.2.1", LINKS, 0.0)  # no address of this machine
        for number in (1, 2):
            assert len(ids_of(await answer(front, request()))) == TOKENS
            assert len(front.handle.calls) == number


async def test_an_ingress_that_a_replica_does_not_reach_is_answered_through_serve(
    tiny_llama: Path,
) -> None:
    async with tiny_replicas(tiny_llama) as replicas, called(replicas) as front:
        links_of(replicas[0])._unreached[await front.inlet.address()] = asyncio.get_running_loop().time() + 60
        assert len(ids_of(await answer(front, request()))) == TOKENS
        assert len(front.handle.calls) == 1
        await until(lambda: not streams_of(replicas[0]))


async def test_a_reader_that_leaves_aborts_its_answer(tiny_llama: Path) -> None:
    async with tiny_replicas(tiny_llama) as replicas, called(replicas) as front:
        (replica,) = replicas
        replica.allow(3)
        async with aclosing(front.client.generate(request(), "session")) as stream:
            await anext(stream)
            assert load_tracker.BOOK.open_requests("replica-1") == 1
        await until(lambda: not streams_of(replica) and places_of(replica).taken == 0)
        await until(lambda: replica.engine.real.stats().aborted == 1)
        assert load_tracker.BOOK.open_requests("replica-1") == 0
        assert inlet_of(replica) is not None
        assert inlet_of(replica).calls.open == 0
        assert replica.generated < TOKENS


async def test_a_reader_that_leaves_before_the_first_word_aborts_its_answer(tiny_llama: Path) -> None:
    async with tiny_replicas(tiny_llama) as replicas, called(replicas) as front:
        (replica,) = replicas
        replica.allow(0)
        asked = asyncio.create_task(answer(front, request()))
        await until(lambda: len(streams_of(replica)) == 1)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await until(lambda: not streams_of(replica) and places_of(replica).taken == 0)


async def lose(replica: TinyReplica, way: str, front: CalledReplicas) -> None:
    """End the connection that the request went over, or the one over which the answer comes."""
    assert inlet_of(replica) is not None
    replica.is_lost = True
    replica.allow(0)
    if way == "request":
        inlet_of(replica).close()
    else:
        for link in links_of(replica)._links.values():
            link.cut()
    replica.is_lost = False  # the engine lives on


@pytest.mark.parametrize("way", ["request", "answer"])
async def test_a_lost_link_is_a_lost_replica_and_its_answer_is_resumed_on_another(
    tiny_llama: Path, way: str
) -> None:
    async with tiny_replicas(tiny_llama, 2) as replicas, called(replicas) as front:
        whole = ids_of(await answer(front, request()))
        ask = request(route=Route(home="replica-1", cached_tokens=19))
        replicas[0].allow(4)
        outcomes: list[str] = []
        seen: list[Event] = []
        settings = RouterSettings(affinity_penalty_s=0.05)
        async for events in resuming(front.client, ask, "session", settings, outcomes.append):
            if not ids_of(seen) and ids_of(events):
                await lose(replicas[0], way, front)
                await front.list_all("replica-1")
            seen += events
        assert outcomes == ["resumed"]
        assert ids_of(seen) == whole
        assert [event.replica_id for event in seen if isinstance(event, Admitted)] == [
            "replica-1",
            "replica-2",
        ]
        await until(lambda: not streams_of(replicas[0]) and places_of(replicas[0]).taken == 0)
        replicas[0].allow(FREE)


async def test_a_replica_lost_before_its_first_word_is_lost_and_suspected(tiny_llama: Path) -> None:
    async with tiny_replicas(tiny_llama) as replicas, called(replicas) as front:
        replicas[0].allow(0)
        asked = asyncio.create_task(answer(front, request()))
        await until(lambda: len(streams_of(replicas[0])) == 1)
        await lose(replicas[0], "request", front)
        with pytest.raises(ReplicaLost):
            await asyncio.wait_for(asked, 30)
        assert not front.handle.calls
        (view,) = load_tracker.BOOK.views(["replica-1"], lambda _: False)
        assert view.is_leaving
        replicas[0].allow(FREE)


async def test_what_a_replica_says_before_it_streams_comes_over_the_link(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_replicas(tiny_llama) as replicas, called(replicas) as front:
        (replica,) = replicas
        replica._info = replace(info_of(replica), model="ours")
        (failed,) = await answer(front, request(model="theirs"))
        assert isinstance(failed, Failed)
        assert (failed.replica_lost, failed.replica_id) == (True, "replica-1")
        long = request(prompt_token_ids=prompt_of(5000), model="ours")
        (refused,) = await answer(front, long)
        assert isinstance(refused, Refused)
        assert refused.reason == "too_long"

        async def broken(_: object) -> Any:
            raise RuntimeError("planted")

        monkeypatch.setattr(replica, "_refusal_of", broken)
        with pytest.raises(ReplicaFailed):
            await answer(front, request(model="ours"))
        assert not front.handle.calls
        assert places_of(replica).taken == 0


async def test_a_replica_that_stops_refuses_new_calls_and_finishes_those_it_has(tiny_llama: Path) -> None:
    async with tiny_replicas(tiny_llama, 2) as replicas, called(replicas) as front:
        leaves = replicas[0]
        leaves._runner = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
        home = request(route=Route(home="replica-1", cached_tokens=19))
        leaves.allow(3)
        asked = asyncio.create_task(answer(front, home))
        await until(lambda: leaves.engine.steps_left == 0)
        stopping = asyncio.create_task(Replica.__del__(leaves))
        await until(lambda: inlet_of(leaves) is not None and inlet_of(leaves).calls._handler is None)
        assert server_of(await answer(front, home)) == "replica-2"  # Serve has not said yet that it stops
        assert not stopping.done()
        leaves.allow(FREE)
        assert len(ids_of(await asyncio.wait_for(asked, 30))) == TOKENS
        await asyncio.wait_for(stopping, 30)
        leaves.is_lost = True
        assert not front.handle.calls


async def test_many_at_once_are_answered_and_leave_nothing_behind(tiny_llama: Path) -> None:
    async with tiny_replicas(tiny_llama, 2) as replicas, called(replicas) as front:
        answers = await asyncio.gather(*(answer(front, request(f"r{number}")) for number in range(16)))
        assert len({tuple(ids_of(events)) for events in answers}) == 1
        assert not front.handle.calls
        assert {server_of(events) for events in answers} == {"replica-1", "replica-2"}
        await until(lambda: all(places_of(one).taken == 0 for one in replicas))
        assert not boxes_of(front.inlet)
