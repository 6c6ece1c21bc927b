"""An answer that its client has named: another ingress goes on with it, and nothing is computed twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest

from samovar.configs.optional_sections import AnswerSettings
from samovar.replicas.answers import answer_log
from samovar.replicas.links import EventSender, pack_event
from samovar.replicas.messages import Delta
from samovar.replicas.serving.served import EventStream
from samovar.router.generation import AskedTurn, PromptStage
from samovar.router.openai import ChatMessage
from tests.support.clock import Clock
from tests.support.inside import boxes_of, bytes_in, kept_by
from tests.support.router.linked_replicas import LINKS
from tests.support.router.router_harness import (
    KEY,
    OTHER_KEY,
    TOKENIZER,
    chat,
    error_of,
    make_settings,
    until,
)
from tests.support.router.tiny_replicas import FREE, TinyReplicaClient, ingress, tiny_replicas

CHAT = "/v1/chat/completions"
NAMED = {"Idempotency-Key": "the first question"}
TOKENS = 24
TOOL = {"type": "function", "function": {"name": "brew", "parameters": {"type": "object"}}}
ASKS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0},
    "several": {"temperature": 1.0, "n": 3},
    "logprobs": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    "usage": {
        "temperature": 0,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    },
    "tools": {"temperature": 1.0, "tools": [TOOL], "tool_choice": "required", "ignore_eos": False},
}


def at_one_time(events: list[tuple[str | None, Any]]) -> list[tuple[str | None, Any]]:
    """The events as if they were of an answer that began at another time."""
    return [(name, {**event, "created": 0}) for name, event in events]


def packed_delta(number: int) -> bytes:
    data: bytes = msgpack.packb(pack_event(Delta(0, "x" * 40, (number,))))
    return data


def asking(**fields: Any) -> dict[str, Any]:
    whole = {"stream": True, "max_tokens": TOKENS, "ignore_eos": True, **fields}
    return chat("Tell me about tea.", **whole)


def events_of(lines: list[str]) -> list[tuple[str | None, Any]]:
    """The id and the JSON of each event, without what differs between two requests for an answer."""
    found, name = [], None
    for line in lines:
        if line.startswith("id: "):
            name = line.removeprefix("id: ")
        elif line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            for told in ("request_id", "prefix"):
                event.get("receipt", {}).pop(told, None)
            found.append((name, event))
            name = None
    return found


@asynccontextmanager
async def reading(url: str, body: dict[str, Any], **headers: str) -> AsyncIterator[Any]:
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", CHAT, json=body, headers={**NAMED, **headers}) as response,
    ):
        assert response.status_code == 200, await response.aread()
        yield response


async def whole(url: str, body: dict[str, Any], **headers: str) -> list[tuple[str | None, Any]]:
    async with reading(url, body, **headers) as response:
        lines = [line async for line in response.aiter_lines()]
    assert "data: [DONE]" in lines
    return events_of(lines)


async def begun(url: str, body: dict[str, Any], events: int, **headers: str) -> list[tuple[str | None, Any]]:
    """The first events of a stream, whose client then leaves."""
    lines: list[str] = []
    async with reading(url, body, **headers) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if len(events_of(lines)) >= events:
                break
    return events_of(lines)


@pytest.mark.parametrize("kind", ASKS)
async def test_an_answer_goes_on_at_another_ingress_and_is_computed_once(kind: str, tiny_llama: Path) -> None:
    body = asking(**ASKS[kind])
    async with tiny_replicas(tiny_llama) as (truth,), ingress([truth]) as (_, url):
        uninterrupted = await whole(url, body)
    names = [name for name, _ in uninterrupted]
    assert len(names) == len(set(names))
    assert None not in names
    async with tiny_replicas(tiny_llama) as (replica,):
        async with ingress([replica]) as (house, url):
            replica.allow(6)
            seen = await begun(url, body, len(uninterrupted) // 4 or 1)
            await until(lambda: house.service.concurrency.open_total == 0)  # this ingress is gone
        async with ingress([replica]) as (_, url):
            replica.allow(FREE)
            last = seen[-1][0]
            assert last is not None
            rest = await whole(url, body, **{"Last-Event-ID": last})
            assert at_one_time([*seen, *rest]) == at_one_time(uninterrupted)
            again = await whole(url, body)  # by its key alone: all of it
            assert again == [*seen, *rest]
        assert replica.generated == truth.generated


@pytest.mark.parametrize(("kind", "tokens"), [("several", 4), ("tools", 40)])
async def test_each_event_is_one_to_go_on_from(kind: str, tokens: int, tiny_llama: Path) -> None:
    body = asking(**ASKS[kind], max_tokens=tokens)
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica]) as (_, url):
        uninterrupted = await whole(url, body)
        for number, (name, _) in enumerate(uninterrupted):
            assert await whole(url, body, **{"Last-Event-ID": str(name)}) == uninterrupted[number + 1 :]
        assert replica.generated <= tokens * body.get("n", 1), "computed once"


@pytest.mark.parametrize("has_links", [True, False])
async def test_a_long_answer_is_told_again_in_pieces(
    has_links: bool, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_log, "PIECE_BYTES", 64)
    told: list[int] = []
    for kind in (EventSender, EventStream):

        def put_packed(self: Any, piece: bytes, put: Any = kind.put_packed) -> None:
            told.append(len(piece))
            put(self, piece)

        monkeypatch.setattr(kind, "put_packed", put_packed)
    body = asking(**ASKS["several"])
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica]) as (house, url):
        uninterrupted = await whole(url, body)
        house.replicas.has_links = has_links
        for last in (None, uninterrupted[len(uninterrupted) // 2][0]):
            told.clear()
            event = {} if last is None else {"Last-Event-ID": last}
            rest = await whole(url, body, **event)
            assert rest == uninterrupted[-len(rest) :]
            assert len(rest) == len(uninterrupted) - (0 if last is None else len(uninterrupted) // 2 + 1)
            assert len(told) > 5
        assert replica.generated == 3 * TOKENS


async def test_who_reads_slowly_is_waited_for_and_who_leaves_is_forgotten(tiny_llama: Path) -> None:
    """A reader that takes nothing: the rest is not sent, and the answer is not held for it."""
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica]) as (house, url):
        await whole(url, asking())
        (log,) = kept_by(replica)._logs.values()
        for number in range(40_000):
            log._packed += packed_delta(number)
        kept_by(replica)._nbytes = log.nbytes
        assert log.nbytes > 4 * LINKS.stream_bytes_max
        sent: list[int] = []
        request = replace(house.replicas.calls[-1], keep=replace(log.keep, is_attaching=True))
        asked = replace(request, model="", route=replace(request.route, ticket="a ticket"))
        call = await house.replicas.linked(replica, asked)
        box = boxes_of(house.replicas.inlet)["a ticket"]
        await until(lambda: box._is_paused)
        for _ in range(50):
            await asyncio.sleep(0)
            sent.append(bytes_in(box))
        assert log.followers == 1
        assert bytes_in(box) < log.nbytes - LINKS.stream_bytes_max, "all was sent to who reads nothing"
        call.close(is_over=False)
        await until(lambda: log.followers == 0)


async def test_a_replay_is_no_turn_of_its_session(tiny_llama: Path) -> None:
    body = asking(session_id="tea")
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica]) as (house, url):
        await whole(url, body)
        (row,) = house.directory.table
        assert row.turns == 1
        await whole(url, body)
        assert list(house.directory.table) == [row]
        async with ingress([replica]) as (other, other_url):  # who asked first died before it told anybody
            await whole(other_url, body)
            (known,) = other.directory.table
            assert (known.home, known.tokens, known.turns) == (row.home, row.tokens, 1)
            await whole(other_url, body)
            assert list(other.directory.table) == [known]


async def test_an_empty_event_id_is_none(tiny_llama: Path) -> None:
    """An EventSource whose last id was reset to nothing has seen no event."""
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica]) as (_, url):
        uninterrupted = await whole(url, asking())
        assert await whole(url, asking(), **{"Last-Event-ID": ""}) == uninterrupted
        assert replica.generated == TOKENS


async def test_the_event_alone_names_the_answer(tiny_llama: Path) -> None:
    body = asking()
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica]) as (_, url):
        uninterrupted = await whole(url, body)
        async with httpx.AsyncClient(base_url=url) as client:
            headers = {"Last-Event-ID": str(uninterrupted[2][0])}
            response = await client.post(CHAT, json=body, headers=headers)
        assert response.headers["idempotent-replayed"] == "true"
        assert events_of(response.text.splitlines()) == uninterrupted[3:]


async def test_an_answer_that_does_not_stream_is_had_again(tiny_llama: Path) -> None:
    body = asking(stream=False, temperature=1.0)
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica]) as (house, url):
        async with httpx.AsyncClient(base_url=url, headers=NAMED) as client:
            first, second = [(await client.post(CHAT, json=body)).json() for _ in range(2)]
            assert first["receipt"].pop("request_id") != second["receipt"].pop("request_id")
            assert first == second
            reordered = json.dumps(dict(reversed(body.items())), indent=1)
            third = await client.post(CHAT, content=reordered, headers={"content-type": "application/json"})
            assert third.json()["id"] == first["id"]
            other = await client.post(CHAT, json=body, headers={"Idempotency-Key": "another"})
            assert other.json()["id"] != first["id"]
        assert replica.generated == 2 * TOKENS
        assert house.service.usage.of("local").requests == 2


async def test_nothing_changes_for_who_names_nothing(tiny_llama: Path) -> None:
    body = asking()
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica]) as (house, url):
        async with httpx.AsyncClient(base_url=url) as client:
            plain = await client.post(CHAT, json=body)
            assert "id: " not in plain.text
            assert "idempotent-replayed" not in plain.headers
        assert len(kept_by(replica)) == 0
        replica.allow(2)
        async with (
            httpx.AsyncClient(base_url=url) as client,
            client.stream("POST", CHAT, json=body) as response,
        ):
            async for _ in response.aiter_lines():
                break
        await until(lambda: house.service.concurrency.open_total == 0)
        replica.allow(FREE)
        await until(lambda: not replica.engine.real.has_work)
        assert replica.generated < 2 * TOKENS  # who leaves cancels


async def test_who_asks_again_while_it_runs_reads_the_same(tiny_llama: Path) -> None:
    body = asking(temperature=1.0)
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica]) as (_, url):
        replica.allow(5)
        async with reading(url, body) as first:
            lines = first.aiter_lines()
            begin = [await anext(lines) for _ in range(4)]
            async with ingress([replica]) as (_, elsewhere), reading(elsewhere, body) as second:
                replica.allow(FREE)
                joined = events_of([line async for line in second.aiter_lines()])
            assert events_of([*begin, *[line async for line in lines]]) == joined
        assert replica.generated == TOKENS


async def test_an_answer_goes_on_on_another_replica_and_is_kept_there(tiny_llama: Path) -> None:
    body = asking(temperature=1.0)
    async with tiny_replicas(tiny_llama) as (truth,), ingress([truth]) as (_, url):
        uninterrupted = await whole(url, body)
    async with tiny_replicas(tiny_llama, 2) as (one, other):
        async with ingress([one, other]) as (house, url):
            one.allow(5)
            async with reading(url, body) as response:
                lines = response.aiter_lines()
                seen = [await anext(lines) for _ in range(6)]
                assert isinstance(house.replicas, TinyReplicaClient)
                replicas = house.replicas
                # What is on its way when a replica is lost is computed again: here nothing is.
                await until(lambda: one.engine.steps_left <= 0 and replicas.heard == one.generated)
                one.is_lost = True
                one.allow(1)  # it says one thing more, and is gone
                seen += [line async for line in lines]
            assert _texts(seen) == _texts_of(uninterrupted)
        async with ingress([one, other]) as (_, url):
            again = await whole(url, body)
        assert _texts_of(again) == _texts_of(uninterrupted)
        assert [name for name, _ in again] == [name for name, _ in uninterrupted]
        assert one.generated + other.generated <= TOKENS + 1


async def given_up_and_alive(model: Path, body: dict[str, Any]) -> list[str]:
    """Return the lines of a stream whose link is cut in the middle, while its replica lives on."""
    async with tiny_replicas(model) as (replica,), ingress([replica]) as (house, url):
        replica.allow(5)
        async with reading(url, body) as response:
            lines = response.aiter_lines()
            seen = [await anext(lines) for _ in range(4)]
            assert isinstance(house.replicas, TinyReplicaClient)
            house.replicas.cuts = 1
            replica.allow(FREE)
            return [*seen, *[line async for line in lines]]


@pytest.mark.parametrize("kind", ASKS)
async def test_a_replica_that_was_given_up_and_lives_says_nothing_twice(kind: str, tiny_llama: Path) -> None:
    """Its answer goes on without a reader, and the reader that comes back has its begin."""
    body = asking(**ASKS[kind])
    async with tiny_replicas(tiny_llama) as (truth,), ingress([truth]) as (_, url):
        uninterrupted = await whole(url, body)
    seen = await given_up_and_alive(tiny_llama, body)
    assert _words(events_of(seen)) == _words(uninterrupted)


async def test_choices_that_went_on_apart_are_not_asked_for_by_an_events_number(tiny_llama: Path) -> None:
    """The replica that was given up keeps them in another order: the client is told to ask for all."""
    body = asking(**ASKS["several"])
    seen = await given_up_and_alive(tiny_llama, body)
    ids = [line for line in seen if line.startswith("id:")]
    assert ids[0].startswith("id: ")
    assert ids[-1] == "id:", "an empty one takes the last one back"
    assert len(ids) == len(events_of(seen))


async def test_two_ingresses_that_lose_a_replica_read_on_at_the_next(tiny_llama: Path) -> None:
    body = asking(temperature=1.0)
    async with tiny_replicas(tiny_llama) as (truth,), ingress([truth]) as (_, url):
        uninterrupted = await whole(url, body)
    async with tiny_replicas(tiny_llama, 2) as (one, other), ingress([one, other]) as (_, url):
        one.allow(5)
        async with reading(url, body) as first, ingress([one, other]) as (_, elsewhere):
            lines = first.aiter_lines()
            seen = [await anext(lines) for _ in range(6)]
            async with reading(elsewhere, body) as second:
                more = second.aiter_lines()
                also = [await anext(more) for _ in range(6)]
                one.is_lost = True
                one.allow(1)
                seen += [line async for line in lines]
                also += [line async for line in more]
        assert _texts(seen) == _texts(also) == _texts_of(uninterrupted)


def _words(events: list[tuple[str | None, Any]]) -> dict[int, str]:
    """The text and the calls of each choice."""
    said: dict[int, str] = {}
    for _, event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            words = (delta.get("content") or "") + "".join(
                call["function"].get("arguments") or "" for call in delta.get("tool_calls") or ()
            )
            said[choice["index"]] = said.get(choice["index"], "") + words
    return said


def _texts(lines: list[str]) -> str:
    return _texts_of(events_of(lines))


def _texts_of(events: list[tuple[str | None, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for _, event in events for choice in event["choices"])


@pytest.mark.parametrize("has_changed", [False, True])
async def test_a_replay_is_remembered_as_the_answer_to_what_it_answered_only(
    has_changed: bool, tiny_llama: Path
) -> None:
    """What is put into a prompt may have changed since: the answer is not one to the prompt of now."""
    body, system = asking(), "Only rain is served."
    told = Told()
    async with tiny_replicas(tiny_llama) as (replica,):
        async with ingress([replica], stages=(told,)) as (_, url):
            said = _texts_of(await whole(url, body))
        async with ingress([replica], stages=(told,)) as (house, url):  # it has nothing in its memory
            told.system = system if has_changed else ""
            assert _texts_of(await whole(url, body)) == said
            remembered = len(house.prompts._memory)
            again = [*body["messages"], {"role": "assistant", "content": said}, *body["messages"]]
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                (await client.post(CHAT, json={**body, "messages": again})).raise_for_status()
            text = TOKENIZER.decode(house.replicas.calls[-1].prompt_token_ids)
            assert (system in text) is has_changed
            assert remembered == (0 if has_changed else 1)


class Told(PromptStage):
    """Puts a text into prompts, as knowledge does."""

    name = "told"
    system = ""

    async def place(self, turn: AskedTurn) -> tuple[AskedTurn, None]:
        told = (ChatMessage("system", self.system),) if self.system else ()
        return replace(turn, placed=replace(turn.placed, messages=(*told, *turn.placed.messages))), None


async def test_what_is_not_the_same_request_is_refused(tiny_llama: Path) -> None:
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica]) as (_, url):
        events = await whole(url, asking())
        async with httpx.AsyncClient(base_url=url) as client:

            async def refused(body: dict[str, Any], **headers: str) -> tuple[int, Any, Any]:
                response = await client.post(CHAT, json=body, headers=headers)
                error = error_of(response)
                return response.status_code, error["param"], error["code"]

            reused = (422, "idempotency-key", "idempotency_key_reused")
            assert await refused(asking(max_tokens=3), **NAMED) == reused
            assert await refused(asking(), **NAMED, **{"x-session-id": "another"}) == reused
            event = {"Last-Event-ID": str(events[0][0])}
            assert await refused(asking(n=2), **event) == (422, "last-event-id", "idempotency_key_reused")
            foreign = await refused(asking(), **event, **{"Idempotency-Key": "another"})
            assert foreign == (400, "last-event-id", "invalid_value")
            for bad in (b"", b"\xe9", b"x" * 5000, b"a\tb"):
                named = {b"Idempotency-Key": bad}
                response = await client.post(CHAT, json=asking(), headers=named)  # type: ignore[arg-type]
                assert (response.status_code, error_of(response)["param"]) == (400, "idempotency-key")
            for other in (
                "7",
                "0" * 32,
                f"{events[0][0]}, {events[1][0]}",
                "chatcmpl-1",
            ):  # of another service
                assert (await refused(asking(), **{"Last-Event-ID": other}))[:2] == (400, "last-event-id")
            unknown = {"Last-Event-ID": "0" * 32 + "-1"}
            assert await refused(asking(), **unknown) == (410, "last-event-id", "answer_not_kept")
            assert replica.generated == TOKENS  # only the first was computed


async def test_an_event_that_never_was_is_refused(tiny_llama: Path) -> None:
    """Of an answer that is over: 400, and no stream. Of one that goes on: its stream ends with that error."""
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica]) as (_, url):
        events = await whole(url, asking())
        ref, last = str(events[-1][0] or events[-2][0]).split("-")
        async with httpx.AsyncClient(base_url=url) as client:
            for number in (int(last) + 1, 999_999_999):
                response = await client.post(
                    CHAT, json=asking(), headers={"Last-Event-ID": f"{ref}-{number}"}
                )
                assert (response.status_code, error_of(response)["param"]) == (400, "last-event-id")
            response = await client.post(CHAT, json=asking(), headers={"Last-Event-ID": f"{ref}-{last}"})
            assert response.status_code == 200, "the last one was"
            assert response.text.endswith("data: [DONE]\n\n")
            replica.allow(3)
            other = {"Idempotency-Key": "goes on"}
            task = asyncio.create_task(client.post(CHAT, json=asking(max_tokens=9), headers=other))
            await until(lambda: len(kept_by(replica)) == 2)
            ref = next(log.keep.ref.hex() for log in kept_by(replica)._logs.values() if not log.is_over)
            late = asyncio.create_task(
                client.post(CHAT, json=asking(max_tokens=9), headers={"Last-Event-ID": f"{ref}-99999"})
            )
            await asyncio.sleep(0)
            replica.allow(FREE)
            assert (await task).status_code == 200
            told = await late
            assert "is not the id of an event" in told.text, told.text


async def test_a_replica_that_cannot_be_asked_may_have_it(tiny_llama: Path) -> None:
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica]) as (house, url):
        house.replicas.all_asked = False
        async with httpx.AsyncClient(base_url=url) as client:
            response = await client.post(CHAT, json=asking(), headers={"Last-Event-ID": "0" * 32 + "-1"})
            assert (response.status_code, error_of(response)["code"]) == (503, "answer_unknown")
            assert "retry-after" in response.headers


async def test_an_answer_is_its_tenants(tiny_llama: Path) -> None:
    settings = make_settings(keys={"one": [KEY], "two": [OTHER_KEY]})  # type: ignore[dict-item]
    body = asking()
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica], settings=settings) as (_, url):
        mine = await whole(url, body, Authorization=f"Bearer {KEY}")
        theirs = await whole(url, body, Authorization=f"Bearer {OTHER_KEY}")
        assert mine[0][1]["id"] != theirs[0][1]["id"]
        assert replica.generated == 2 * TOKENS
        async with httpx.AsyncClient(base_url=url) as client:
            headers = {"Authorization": f"Bearer {OTHER_KEY}", "Last-Event-ID": str(mine[0][0])}
            response = await client.post(CHAT, json=body, headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (410, "answer_not_kept")


@pytest.mark.parametrize("route", ["/v1/sessions/tea", "/v1/cache"])
@pytest.mark.parametrize("is_over", [True, False])
async def test_it_is_erased_with_its_session(route: str, is_over: bool, tiny_llama: Path) -> None:
    body = asking(session_id="tea")
    async with tiny_replicas(tiny_llama) as (replica,), ingress([replica]) as (house, url):
        replica.allow(FREE if is_over else 4)
        events = await begun(url, body, 2)
        await until(lambda: house.service.concurrency.open_total == 0)
        if is_over:
            events = await whole(url, body)
        async with httpx.AsyncClient(base_url=url) as client:
            (await client.delete(route)).raise_for_status()
            headers = {"Last-Event-ID": str(events[0][0])}
            response = await client.post(CHAT, json=body, headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (410, "answer_not_kept")
        assert len(kept_by(replica)) == 0
        replica.allow(FREE)
        await until(lambda: not replica.engine.real.has_work)
        assert is_over or replica.generated < TOKENS


async def test_an_answer_that_nobody_reads_ends_in_time(tiny_llama: Path) -> None:
    clock, body = Clock(), asking()
    answers = AnswerSettings(unread_s=5, kept_s=7)
    async with (
        tiny_replicas(tiny_llama, answers=answers, clock=clock) as (replica,),
        ingress([replica]) as (house, url),
    ):
        replica.allow(4)
        await begun(url, body, 2)
        await until(lambda: house.service.concurrency.open_total == 0)
        await until(lambda: not any(log.readers for log in replica._answer_logs.values()))
        clock.now_s += 5.1
        kept_by(replica).sweep()
        replica.allow(FREE)
        await until(lambda: not replica.engine.real.has_work)
        assert replica.generated < TOKENS
        await whole(url, body)
        assert len(kept_by(replica)) == 1
        clock.now_s += 7.1
        kept_by(replica).sweep()
        assert len(kept_by(replica)) == 0


async def test_without_room_the_header_is_ignored(tiny_llama: Path) -> None:
    settings = make_settings()
    object.__setattr__(settings, "answers", AnswerSettings(answers_max=0))
    answers = settings.answers
    async with tiny_replicas(tiny_llama, answers=answers) as (replica,):
        async with ingress([replica], settings=settings) as (_, url):
            assert {name for name, _ in await whole(url, asking())} == {None}
        assert replica.generated == TOKENS
