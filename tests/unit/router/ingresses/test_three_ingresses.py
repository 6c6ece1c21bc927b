"""Three ingresses over scripted replicas, one session directory; any of them dies, and so does that."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from samovar.cache_tiers.sessions import Item
from samovar.replicas.messages import GenerateRequest
from samovar.router.ingress.places import forget_entries_here, forget_here
from samovar.router.ingresses import IngressesCleared
from samovar.router.routing import load_tracker
from tests.support.amounts import examples
from tests.support.engines.tiny_models import EOS_ID
from tests.support.router.fake_directory import FakeLink
from tests.support.router.fake_replica import Script, say
from tests.support.router.router_harness import KEY, MODEL, OTHER_KEY, TOKENIZER, House, make_settings

KEYS = {"t": KEY, "u": OTHER_KEY}
AUTH = {"authorization": f"Bearer {KEY}"}


def letters(text: str) -> Script:
    """The text in tokens of one letter each, as no tokenizer would write it."""
    ids = [one for letter in text for one in TOKENIZER.encode(letter, add_special_tokens=False)]
    return say([*text, ""], ids=[*ids, EOS_ID])


class Street:
    """Ingresses with one directory. They are each other's `Ingresses`, as far as they live."""

    def __init__(self, ingresses: int = 3, **settings: Any) -> None:
        self.link = FakeLink()
        self.settings = make_settings(
            keys=KEYS, ingress_replicas=ingresses, **{"limits": {"retry_after_s": 0}, **settings}
        )
        self.asked: list[GenerateRequest] = []
        self.reply = "hello"
        self.silent = 0
        self.houses = [self._house() for _ in range(ingresses)]

    def _house(self) -> House:
        def script(request: GenerateRequest) -> Script:
            self.asked.append(request)
            return letters(self.reply)

        return House(script, settings=self.settings, link=self.link, ingresses=self)

    def die(self, number: int) -> None:
        """Another begins in its place."""
        self.houses[number] = self._house()

    async def forget(self, tenant: str, sessions: Sequence[bytes] | None) -> IngressesCleared:
        told = [await forget_here(house.service, tenant, sessions) for house in self.houses]
        return IngressesCleared(
            sum(replies for replies, _ in told), self.silent, sum(not whole for _, whole in told)
        )

    async def forget_entries(self, tenant: str, entries: Sequence[str] | None) -> int:
        told = [await forget_entries_here(house.service, tenant, entries) for house in self.houses]
        return self.silent + told.count(False)

    async def discard(self, tenant: str, response_id: str) -> int:
        for house in self.houses:
            house.service.responses.discard_here(tenant, response_id)
        return self.silent

    async def metrics(self) -> dict[str, bytes]:
        return {f"house-{n}": house.service.metrics.own_text() for n, house in enumerate(self.houses)}

    async def sync(self) -> None:
        for house in self.houses:
            await house.directory.sync(self.link)

    async def post(self, number: int, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        async with self.houses[number].client(**AUTH, **headers) as client:
            return await client.post(path, json={"model": MODEL, **body})

    async def turn(self, number: int, messages: list[dict[str, str]], **headers: str) -> list[dict[str, str]]:
        answer = await self.post(number, "/v1/chat/completions", {"messages": messages}, **headers)
        assert answer.status_code == 200, answer.text
        said = answer.json()["choices"][0]["message"]["content"]
        return [*messages, {"role": "assistant", "content": said}]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chain(request: GenerateRequest, reply: str) -> list[int]:
    """What the replica has after a turn."""
    ids = [one for letter in reply for one in TOKENIZER.encode(letter, add_special_tokens=False)]
    return [*request.prompt_token_ids, *ids]


async def test_a_second_turn_repeats_what_was_sampled_wherever_it_comes() -> None:
    street = Street()
    first = await street.turn(0, [user("hi")])
    kept = chain(street.asked[-1], "hello")
    await street.turn(1, [*first, user("and?")])
    assert street.asked[-1].prompt_token_ids[: len(kept)] == kept
    assert street.houses[1].service.known.recalled > 0
    assert street.asked[-1].route.home, "and it knows where the session lives, before any synchronisation"
    street.die(0)
    await street.turn(0, [*first, user("then?")])
    assert street.asked[-1].prompt_token_ids[: len(kept)] == kept


async def test_who_knows_the_reply_asks_nobody() -> None:
    street = Street()
    messages = [user("hi")]
    for _ in range(3):
        messages = [*await street.turn(0, messages), user("and?")]
    assert street.link.recalls == 0


async def test_without_the_shelf_it_is_tokenised_again() -> None:
    """The check of the tests above can fail."""
    street = Street()
    street.settings = street.settings.model_copy(
        update={"ingress": street.settings.ingress.model_copy(update={"kept_bytes_max": 0})}
    )
    for number in range(3):
        street.die(number)
    first = await street.turn(0, [user("hi")])
    kept = chain(street.asked[-1], "hello")
    await street.turn(1, [*first, user("and?")])
    assert street.asked[-1].prompt_token_ids[: len(kept)] != kept


async def test_another_tenant_and_another_salt_find_nothing() -> None:
    street = Street()
    first = await street.turn(0, [user("hi")])
    kept = chain(street.asked[-1], "hello")
    async with street.houses[1].client(authorization=f"Bearer {OTHER_KEY}") as client:
        body = {"model": MODEL, "messages": [*first, user("and?")]}
        await client.post("/v1/chat/completions", json=body)
    assert street.asked[-1].prompt_token_ids[: len(kept)] != kept
    await street.post(
        1, "/v1/chat/completions", {"messages": [*first, user("and?")], "cache_salt": "another"}
    )
    assert street.asked[-1].prompt_token_ids[: len(kept)] != kept
    assert street.houses[1].service.known.refused > 0


async def test_a_lost_directory_costs_speed_only() -> None:
    street = Street()
    first = await street.turn(0, [user("hi")])
    street.link.is_lost = True
    second = await street.turn(1, [*first, user("and?")])
    assert second[-1]["content"] == "hello"


async def test_what_is_deleted_at_one_is_forgotten_at_all_and_in_the_directory() -> None:
    street = Street()
    first = await street.turn(0, [user("hi")], **{"x-session-id": "s"})
    kept = chain(street.asked[-1], "hello")
    await street.turn(1, [*first, user("and?")], **{"x-session-id": "s"})
    async with street.houses[2].client(**AUTH) as client:
        answer = await client.delete("/v1/sessions/s")
        assert answer.json()["cleared"]["replies"] >= 2, answer.text
    for number in range(3):
        await street.turn(number, [*first, user("now?")], **{"x-session-id": "s"})
        assert street.asked[-1].prompt_token_ids[: len(kept)] != kept


@pytest.mark.parametrize("fault", ["directory", "ingress"])
async def test_a_clear_that_did_not_reach_all_says_so(fault: str) -> None:
    street = Street()
    if fault == "directory":
        street.link.is_lost = True
    else:
        street.silent = 1
    async with street.houses[0].client(**AUTH) as client:
        answer = await client.delete("/v1/sessions/s")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "clear_incomplete"


async def test_a_stored_response_is_found_at_any_and_deleted_at_all() -> None:
    street = Street()
    made = (await street.post(0, "/v1/responses", {"input": "hi"})).json()
    more = await street.post(1, "/v1/responses", {"input": "and?", "previous_response_id": made["id"]})
    assert more.status_code == 200, more.text
    item = {"type": "item_reference", "id": made["output"][0]["id"]}
    named = await street.post(2, "/v1/responses", {"input": [item, {"role": "user", "content": "so?"}]})
    assert named.status_code == 200, named.text
    async with street.houses[2].client(**AUTH) as client:
        assert (await client.get(f"/v1/responses/{made['id']}")).json() == made
    async with street.houses[2].client(authorization=f"Bearer {OTHER_KEY}") as client:
        assert (await client.get(f"/v1/responses/{made['id']}")).status_code == 404
    async with street.houses[1].client(**AUTH) as client:
        assert (await client.delete(f"/v1/responses/{made['id']}")).status_code == 200
        assert (await client.delete(f"/v1/responses/{made['id']}")).status_code == 404
    for house in street.houses:
        async with house.client(**AUTH) as client:
            assert (await client.get(f"/v1/responses/{made['id']}")).status_code == 404


@pytest.mark.guarantee("G12")
@pytest.mark.parametrize("at", [0, 40, -1])
async def test_a_stored_response_whose_bytes_have_changed_is_not_used(at: int) -> None:
    """In the digest, in the body, at its end."""
    street = Street()
    made = (await street.post(0, "/v1/responses", {"input": "hi"})).json()
    kept = street.link.kept

    async def changed(*asked: Any) -> Item | None:
        item = await kept(*asked)
        if item is None:
            return None
        body = bytearray(item.body)
        body[at] ^= 1
        return replace(item, body=bytes(body))

    street.link.kept = changed  # type: ignore[method-assign,assignment]
    async with street.houses[1].client(**AUTH) as client:
        assert (await client.get(f"/v1/responses/{made['id']}")).status_code == 404
        street.link.kept = kept  # type: ignore[method-assign]
        assert (await client.get(f"/v1/responses/{made['id']}")).json() == made


@pytest.mark.guarantee("G12")
@pytest.mark.parametrize(
    ("house", "path"), [(2, "/v1/cache"), (2, "/v1/responses/{id}"), (1, "/v1/responses/{id}")]
)
async def test_a_response_that_is_fetched_while_it_is_deleted_is_not_stored_again(
    house: int, path: str
) -> None:
    street = Street()
    made = (await street.post(0, "/v1/responses", {"input": "hi"})).json()
    kept, fetched, cleared = street.link.kept, asyncio.Event(), asyncio.Event()

    async def slow(*asked: Any) -> Item | None:
        item = await kept(*asked)
        fetched.set()
        await cleared.wait()
        return item

    street.link.kept = slow  # type: ignore[method-assign,assignment]
    async with street.houses[1].client(**AUTH) as client, street.houses[house].client(**AUTH) as other:
        reading = asyncio.create_task(client.get(f"/v1/responses/{made['id']}"))
        await fetched.wait()
        assert (await other.delete(path.format(id=made["id"]))).status_code == 200
        cleared.set()
        assert (await reading).status_code == 404
        street.link.kept = kept  # type: ignore[method-assign]
        assert (await client.get(f"/v1/responses/{made['id']}")).status_code == 404


@pytest.mark.guarantee("G12")
async def test_what_an_ingress_stores_that_is_not_asked_any_more_is_deleted_by_its_time() -> None:
    """It ends in a rollout, behind its last answer: deletions do not reach it."""
    street = Street()
    made = (await street.post(1, "/v1/responses", {"input": "hi"}, **{"x-session-id": "s"})).json()
    ending, responses = street.houses[1], street.houses[1].service.responses
    stored, forgets = responses.get("t", made["id"]), responses.forgets
    assert stored is not None
    began_unix_s = time.time()
    street.houses.remove(ending)
    async with street.houses[0].client(**AUTH) as client:
        assert (await client.delete("/v1/sessions/s")).status_code == 200
        later_unix_s = time.time() + 1.0
        for name, unix_s in (("resp_late", began_unix_s), ("resp_new", later_unix_s)):
            assert responses.put("t", name, replace(stored, began_unix_s=unix_s), forgets=forgets)
            await responses.tell()
        assert (await client.get("/v1/responses/resp_late")).status_code == 404
        assert (await client.get("/v1/responses/resp_new")).status_code == 200


async def test_it_is_not_said_that_nothing_is_stored_while_nobody_knows() -> None:
    street = Street()
    street.link.is_lost = True
    async with street.houses[0].client(**AUTH) as client:
        answer = await client.get("/v1/responses/resp_x")
    assert answer.status_code == 503


async def test_the_metrics_of_all_are_told_by_any() -> None:
    street = Street()
    await street.turn(0, [user("hi")])
    await street.turn(1, [user("hi")])
    street.settings = make_settings(ingress_replicas=3)
    open_house = House(settings=street.settings, link=street.link, ingresses=street)
    async with open_house.client() as client:
        text = (await client.get("/metrics")).text
    rows = [line for line in text.splitlines() if line.startswith("samovar_requests_total{")]
    assert any('ingress="house-0"' in row for row in rows), rows
    assert any('ingress="house-1"' in row for row in rows), rows
    assert all("ingress=" in row for row in rows), rows
    assert text.count("# TYPE samovar_requests_total counter") == 1


async def test_counters_keep_their_label_where_no_ingress_can_be_asked(monkeypatch: Any) -> None:
    street = Street()

    async def none() -> dict[str, bytes]:
        return {}

    monkeypatch.setattr(street, "metrics", none)
    await street.turn(0, [user("hi")])
    open_house = House(settings=make_settings(ingress_replicas=3), link=street.link, ingresses=street)
    async with open_house.client() as client:
        await client.get("/v1/models")
        text = (await client.get("/metrics")).text
    rows = [line for line in text.splitlines() if line.startswith("samovar_requests_total{")]
    assert rows
    assert all(f'ingress="{load_tracker.BOOK.ingress[:8]}"' in row for row in rows), rows


async def test_conversations_go_on_whatever_dies() -> None:
    """A random history: turns at random ingresses, which die, as does the directory."""
    for seed in range(examples(6)):
        rng, street = random.Random(seed), Street()
        talks: list[tuple[list[dict[str, str]], list[int]]] = [([], []) for _ in range(3)]
        hits = 0
        for _ in range(24):
            event = rng.random()
            if event < 0.2:
                street.die(rng.randrange(3))
            elif event < 0.3:
                street.link.restart()
                talks = [(messages, []) for messages, _ in talks]  # now a miss is no fault
            number = rng.randrange(3)
            messages, kept = talks[number]
            street.reply = rng.choice(["hello", "the tea is hot", "no"])
            asked = [*messages, user(f"talk {number}, turn {len(messages)}")]
            answered = await street.turn(rng.randrange(3), asked)
            ids = street.asked[-1].prompt_token_ids
            assert ids[: len(kept)] == kept, (seed, messages)
            assert TOKENIZER.decode(ids) == TOKENIZER.apply_chat_template(
                asked, tokenize=False, add_generation_prompt=True
            )
            hits += bool(kept)
            talks[number] = answered, chain(street.asked[-1], street.reply)
            await street.sync()
        assert hits, "no turn could have hit: nothing was shown"
