"""/v1/sessions: who sees which, how they are named, what a hint does, and that a DELETE is a DELETE."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from samovar.cache_tiers.blocks import session_of, tenant_tag
from samovar.cache_tiers.messages import Cleared
from samovar.cache_tiers.sessions.session_table import SessionRow
from samovar.replicas.messages import Admitted, Delta
from samovar.router.ingress.operator_routes import LATE_S, SOON_S, move_of
from samovar.router.openai.parse import PAGE_MAX
from tests.support.router.fake_directory import FakeLink
from tests.support.router.fake_replica import INFO, Script, say
from tests.support.router.router_harness import (
    ADMIN_KEY,
    KEY,
    NODE,
    OTHER_KEY,
    SENT,
    House,
    bearer,
    chat,
    error_of,
    make_settings,
    until,
)

CHAT = "/v1/chat/completions"
SESSIONS = "/v1/sessions"
SECRET = b"secret"


def house(link: FakeLink | None = None, **more: Any) -> House:
    """Two tenants, `a` and `b`, and an administrator."""
    keys = {"a": KEY, "b": OTHER_KEY}
    return House(settings=make_settings(keys=keys, admin_key=ADMIN_KEY, **more), link=link)


async def say_hi(client: httpx.AsyncClient, session: str, key: str = KEY, **fields: Any) -> None:
    answer = await client.post(CHAT, json=chat(session_id=session, **fields), headers=bearer(key))
    assert answer.status_code == 200, answer.text


async def listed(client: httpx.AsyncClient, key: str = KEY, **params: Any) -> list[dict[str, Any]]:
    answer = await client.get(SESSIONS, params=params, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["data"]
    return rows


def row_of(home: House, name: str) -> SessionRow:
    (row,) = [row for row in home.directory.table if f"sess_{session_of(row.session).hex()}" == name]
    return row


# What is shown ---------------------------------------------------------------------------------


async def test_a_session_is_shown_with_its_home_and_its_bytes() -> None:
    link = FakeLink()
    home = house(link)
    async with home.client() as client:
        for _ in range(2):
            await say_hi(client, "s")
        (card,) = await listed(client)
        link.holds[(tenant_tag(SECRET, "a"), bytes.fromhex(card["id"].removeprefix("sess_")))] = {
            "cpu": 10,
            "s3": 7,
        }
        one = (await client.get(f"{SESSIONS}/{card['id']}", headers=bearer(KEY))).json()
        by_raw_id = (await client.get(f"{SESSIONS}/s", headers=bearer(KEY))).json()
    tokens = len(home.replicas.calls[-1].prompt_token_ids) + 2
    expected = {"object": "session", "home": INFO.replica_id, "node": NODE, "turns": 2, "tokens": tokens}
    assert expected.items() <= card.items()
    assert (card["state"], card["expected_return"]) == ("idle", None)
    assert card["last_used"] >= card["created"] > 0
    assert "tenant" not in card
    (lineage,) = one.pop("lineages")
    assert by_raw_id.pop("lineages") == [lineage]
    assert one == by_raw_id == {**card, "bytes": {"gpu": 4096, "cpu": 10, "nvme": 0, "s3": 7}}
    assert lineage["is_main"]
    assert {key: lineage[key] for key in ("home", "turns", "tokens")} == {
        key: card[key] for key in ("home", "turns", "tokens")
    }
    assert lineage["bytes"] == {"gpu": 4096, "cpu": 0, "nvme": 0, "s3": 0}


async def test_bytes_are_unknown_while_the_directory_is_lost() -> None:
    link = FakeLink()
    home = house(link)
    async with home.client() as client:
        await say_hi(client, "s")
        link.is_lost = True
        one = await client.get(f"{SESSIONS}/s", headers=bearer(KEY))
    assert (one.status_code, one.json()["bytes"]) == (200, None)


async def test_without_a_directory_only_the_pools_tell() -> None:
    home = house()
    async with home.client() as client:
        await say_hi(client, "s")
        one = await client.get(f"{SESSIONS}/s", headers=bearer(KEY))
    assert one.json()["bytes"] == {"gpu": 4096, "cpu": 0, "nvme": 0, "s3": 0}


@pytest.mark.parametrize(("fields", "headers"), SENT)
async def test_a_session_is_found_by_the_id_its_client_sent(
    fields: dict[str, Any], headers: dict[str, str]
) -> None:
    home = House()
    raw = {name: value.encode() for name, value in headers.items()}
    async with home.client() as client:
        assert (await client.post(CHAT, json=chat(**fields), headers=raw)).status_code == 200  # type: ignore[arg-type]
        path = f"{SESSIONS}/id%2F%C3%A9%20%3F"
        one = await client.get(path)
        hinted = await client.post(f"{path}/hint", json={"event": "typing"})
        assert (one.status_code, hinted.status_code) == (200, 200)
        assert (await client.delete(path)).status_code == 200
        assert (await client.get(path)).status_code == 404
    assert "id/" not in one.text + hinted.text, "a raw id is kept nowhere"


@pytest.mark.parametrize(
    "name", ["sess_", "sess_xyz", "sess_" + "zz" * 16, "sess_" + "00" * 16, "0" * 32, "x"]
)
async def test_names_that_nobody_has_are_404(name: str) -> None:
    home = house()
    async with home.client() as client:
        await say_hi(client, "s")
        for method, path in (("GET", f"{SESSIONS}/{name}"), ("POST", f"{SESSIONS}/{name}/hint")):
            answer = await client.request(method, path, json={"event": "typing"}, headers=bearer(KEY))
            assert (answer.status_code, error_of(answer)["code"]) == (404, "session_not_found")


# Whose it is -----------------------------------------------------------------------------------


@pytest.mark.guarantee("G2", "F14")
async def test_f14_a_tenant_sees_its_own_only() -> None:
    home = house(FakeLink())
    async with home.client() as client:
        await say_hi(client, "mine", KEY)
        await say_hi(client, "theirs", OTHER_KEY)
        (mine,), (theirs,) = await listed(client, KEY), await listed(client, OTHER_KEY)
        assert mine["id"] != theirs["id"]
        for name in (theirs["id"], "theirs"):
            path = f"{SESSIONS}/{name}"
            seen = await client.get(path, headers=bearer(KEY))
            hinted = await client.post(f"{path}/hint", json={"event": "closed"}, headers=bearer(KEY))
            assert (seen.status_code, hinted.status_code) == (404, 404)
            await client.delete(path, headers=bearer(KEY))
        unknown = await client.get(f"{SESSIONS}/never", headers=bearer(KEY))
        assert unknown.json() == seen.json(), "whether others have such a session is not told"
        after = await client.get(SESSIONS, params={"after": theirs["id"]}, headers=bearer(KEY))
        assert (after.status_code, error_of(after)["param"]) == (404, "after")
        assert await listed(client, OTHER_KEY) == [theirs]
        assert (await client.get(SESSIONS)).status_code == 401
    assert {tenant for tenant, _ in home.replicas.clears} == {tenant_tag(SECRET, "a")}
    assert not home.replicas.cooled


async def test_the_administrator_sees_everybodys() -> None:
    home = house(FakeLink())
    async with home.client() as client:
        await say_hi(client, "s", KEY)
        await say_hi(client, "s", OTHER_KEY)
        rows = await listed(client, ADMIN_KEY)
        assert [row["tenant"] for row in rows] == ["b", "a"]
        for row in rows:
            one = (await client.get(f"{SESSIONS}/{row['id']}", headers=bearer(ADMIN_KEY))).json()
            assert one["tenant"] == row["tenant"]
        by_raw_id = (await client.get(f"{SESSIONS}/s", headers=bearer(ADMIN_KEY))).json()
        assert by_raw_id["tenant"] == "b", "of two with that id the one used last"


# Pages -----------------------------------------------------------------------------------------


async def test_pages_follow_each_other_and_end() -> None:
    home = house()
    async with home.client() as client:
        for number in range(5):
            await say_hi(client, f"s{number}")
        whole = [row["id"] for row in await listed(client)]
        seen: list[str] = []
        more: dict[str, Any] = {"limit": 2}
        for _ in range(3):
            page = (await client.get(SESSIONS, params=more, headers=bearer(KEY))).json()
            assert page["object"] == "list"
            seen += [row["id"] for row in page["data"]]
            more["after"] = seen[-1]
            assert page["has_more"] == (len(seen) < 5)
        assert seen == whole
        assert await listed(client, after=whole[-1]) == []
        exact = (await client.get(SESSIONS, params={"limit": 5}, headers=bearer(KEY))).json()
        assert (len(exact["data"]), exact["has_more"]) == (5, False)
        first = (await client.get(f"{SESSIONS}/s4", headers=bearer(KEY))).json()
    assert whole[0] == first["id"], "the last used comes first"


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1.5", str(PAGE_MAX + 1), "9" * 5000, "٣"])
async def test_bad_limits_are_refused(limit: str) -> None:
    async with house().client() as client:
        answer = await client.get(SESSIONS, params={"limit": limit}, headers=bearer(KEY))
    assert (answer.status_code, error_of(answer)["param"]) == (400, "limit")


async def test_a_page_after_nobody_is_404() -> None:
    async with house().client() as client:
        answer = await client.get(SESSIONS, params={"after": "sess_x"}, headers=bearer(KEY))
    assert (answer.status_code, error_of(answer)["code"]) == (404, "session_not_found")


# Hints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "state", "action"),
    [
        ({"event": "typing"}, "typing", "promote"),
        ({"event": "tool_started"}, "tool", "none"),
        ({"event": "tool_started", "expected_return_s": 5}, "tool", "promote"),
        ({"event": "tool_started", "expected_return_s": 3600}, "tool", "demote"),
        ({"event": "tool_finished"}, "idle", "promote"),
        ({"event": "closed"}, "closed", "demote"),
        ({"event": "closed", "expected_return_s": 1}, "closed", "demote"),
        ({"expected_return_s": SOON_S}, "idle", "promote"),
        ({"expected_return_s": SOON_S + 1}, "idle", "none"),
        ({"expected_return_s": LATE_S}, "idle", "none"),
        ({"expected_return_s": LATE_S + 1}, "idle", "demote"),
    ],
)
async def test_a_hint_is_acted_upon_at_once(body: dict[str, Any], state: str, action: str) -> None:
    link = FakeLink()
    home = house(link)
    async with home.client() as client:
        await say_hi(client, "s")
        answer = await client.post(f"{SESSIONS}/s/hint", json=body, headers=bearer(KEY))
        assert answer.status_code == 200, answer.text
        card = answer.json()
        assert (card["state"], card["action"]) == (state, action)
        row = row_of(home, card["id"])
        expected = [] if action == "none" else [(row.tenant, row.session, action)]
        assert link.moves == expected
        told = (row.tenant, row.session, body.get("event"), body.get("expected_return_s"))
        assert link.hints == [told], "the predictor hears of each"
        assert card["extents_moving"] == 3 * len(expected)
        assert home.replicas.cooled == ([row.tenant + row.session] if action == "demote" else [])
        assert home.replicas.hinted == [(told[0] + told[1], *told[2:])], "and so do the pools"
        assert (card["expected_return"] is not None) == ("expected_return_s" in body)
        await say_hi(client, "s")
        (after,) = await listed(client)
        assert (after["state"], after["expected_return"]) == ("idle", None), "a turn ends it"


async def test_a_title_is_a_lineage_of_its_own_and_hints_are_for_the_conversation() -> None:
    link = FakeLink()
    home = house(link)
    async with home.client() as client:
        talk = [{"role": "user", "content": "What is a samovar?"}]
        for _ in range(2):
            await say_hi(client, "s", messages=talk)
            title = [{"role": "user", "content": f"Name this conversation: {talk}"}]
            await say_hi(client, "s", messages=title)
            talk += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And then?"}]
        one = (await client.get(f"{SESSIONS}/s", headers=bearer(KEY))).json()
        main = one["lineages"][1]
        turns = [(row["turns"], row["is_main"]) for row in one["lineages"]]
        assert turns == [(1, False), (2, True), (1, False)]
        assert (one["turns"], one["tokens"]) == (4, main["tokens"])
        for event, lineages in (("typing", 1), ("closed", 3)):
            link.hints.clear()
            body = {"event": event}
            await client.post(f"{SESSIONS}/s/hint", json=body, headers=bearer(KEY))
            assert len(link.hints) == lineages
            assert main["id"] in {session[8:].hex() for _, session, *_ in link.hints}
        calls = home.replicas.calls
        assert len({session_of(call.session) for call in calls}) == 1
        assert calls[0].session == calls[2].session
        assert len({call.session for call in calls}) == 3
        await client.delete(f"{SESSIONS}/s", headers=bearer(KEY))
        assert await listed(client) == [], "all lineages are deleted with their session"


def test_every_event_is_decided() -> None:
    assert move_of(None, None) is None
    assert {move_of(None, 0.0), move_of("typing", 10 * LATE_S)} == {"promote", "demote"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("", None),
        ("[]", None),
        ("{}", "event"),
        ("{", None),
        ('{"event": "leaving"}', "event"),
        ('{"event": "typing", "soon": true}', "soon"),
        ('{"event": 5}', "event"),
        ('{"expected_return_s": NaN}', None),
        ('{"expected_return_s": Infinity}', None),
        ('{"expected_return_s": 1e999}', "expected_return_s"),
        ('{"expected_return_s": -1}', "expected_return_s"),
        ('{"expected_return_s": 1e10}', "expected_return_s"),
        ('{"expected_return_s": "5"}', "expected_return_s"),
        ('{"expected_return_s": true}', "expected_return_s"),
    ],
)
async def test_a_bad_hint_is_refused_and_changes_nothing(body: str, param: str | None) -> None:
    link = FakeLink()
    home = house(link)
    async with home.client() as client:
        await say_hi(client, "s")
        before = await listed(client)
        answer = await client.post(f"{SESSIONS}/s/hint", content=body, headers=bearer(KEY))
        assert answer.status_code == 400, answer.text
        assert param is None or error_of(answer)["param"] == param
        assert await listed(client) == before
    assert link.moves == []


async def test_a_hint_needs_a_session() -> None:
    link = FakeLink()
    async with house(link).client() as client:
        answer = await client.post(f"{SESSIONS}/s/hint", json={"event": "closed"}, headers=bearer(KEY))
        assert (answer.status_code, error_of(answer)["code"]) == (404, "session_not_found")
        nobody = await client.post(f"{SESSIONS}//hint", json={"event": "closed"}, headers=bearer(KEY))
        assert (nobody.status_code, error_of(nobody)["param"]) == (400, "session_id")
        wrong = await client.put(f"{SESSIONS}/s", headers=bearer(KEY))
        assert wrong.status_code == 405
        text = (await client.get("/metrics", headers=bearer(ADMIN_KEY))).text
    assert link.moves == []
    assert 'route="/v1/sessions/{session_id:path}/hint",status="404"' in text


@pytest.mark.parametrize("event", ["typing", "closed"])
async def test_a_hint_is_but_a_hint_where_the_directory_is_lost(event: str) -> None:
    link = FakeLink()
    home = house(link)
    async with home.client() as client:
        await say_hi(client, "s")
        link.is_lost = True
        answer = await client.post(f"{SESSIONS}/s/hint", json={"event": event}, headers=bearer(KEY))
    assert answer.status_code == 200
    assert (answer.json()["action"], answer.json()["extents_moving"]) == ("none", 0)
    assert answer.json()["state"] == event


# DELETE ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by_name", "key"), [(True, KEY), (False, KEY), (True, ADMIN_KEY)])
async def test_g12_a_deleted_session_is_gone_everywhere(by_name: bool, key: str) -> None:
    link = FakeLink()
    link.nodes = {"n1": Cleared(2, 50), "n2": Cleared(1, 20)}
    home = house(link)
    async with home.client() as client:
        await say_hi(client, "s")
        await say_hi(client, "other")
        _, name = [row["id"] for row in await listed(client)]  # the last used first
        await home.directory.sync(link)
        assert link.actor.check_integrity() == 2
        path = f"{SESSIONS}/{name if by_name else 's'}"
        answer = await client.delete(path, headers=bearer(key))
        assert answer.status_code == 200, answer.text
        assert (await client.get(f"{SESSIONS}/{name}", headers=bearer(KEY))).status_code == 404
        assert len(await listed(client)) == 1
        await home.directory.sync(link)
        assert link.actor.check_integrity() == 1, "the directory has forgotten it, too"
        again = await client.delete(f"{SESSIONS}/{name}", headers=bearer(ADMIN_KEY))
        assert (again.status_code, error_of(again)["code"]) == (404, "session_not_found")
    ((tenant, sessions),) = home.replicas.clears
    session = bytes.fromhex(name.removeprefix("sess_"))
    assert tenant == tenant_tag(SECRET, "a")
    assert sessions is not None
    assert session in sessions
    ((asked, also),) = [((clear.tenant, clear.session), clear.also) for clear in link.clears]
    assert [asked[1], *also] == list(sessions), "all tags in one call"
    assert asked[0] == tenant
    # What the replicas' own tiers said, and what the directory found elsewhere.
    cleared = answer.json()["cleared"]
    assert (cleared["extents"], cleared["bytes"]) == (2 + 3, 100 + 70)


@pytest.mark.parametrize("is_lost", [True, False])
async def test_g12_a_delete_that_did_not_reach_every_node_is_an_error(is_lost: bool) -> None:
    link = FakeLink()
    link.nodes = {"n1": Cleared(2, 50), "n2": None}
    link.is_lost = is_lost
    home = house(link)
    async with home.client() as client:
        await say_hi(client, "s")
        for method, path in (("DELETE", f"{SESSIONS}/s"), ("DELETE", "/v1/cache")):
            answer = await client.request(method, path, headers=bearer(KEY))
            assert (answer.status_code, error_of(answer)["code"]) == (503, "clear_incomplete")
            assert "the tiers of some nodes" in error_of(answer)["message"]
        link.is_lost, link.nodes = False, {"n1": Cleared(0, 0, ("s3",))}
        unreachable = await client.delete(f"{SESSIONS}/s", headers=bearer(KEY))
        assert "s3" in error_of(unreachable)["message"]
        left = home.service.clears.unfinished
        assert not [what for what in left if what.names], "the node goes on with it"
        link.nodes = {"n1": Cleared(0, 0, ("s3",)), "n2": Cleared(0, 0, ("nvme",), is_noted=False)}
        assert (await client.delete(f"{SESSIONS}/s", headers=bearer(KEY))).status_code == 503
        left = home.service.clears.unfinished
        told = [places for what, places in left.items() if what.names]
        assert told == [("tiers",)], "a node would forget it at a restart"
        link.nodes = {"n1": Cleared(0, 0)}
        assert (await client.delete(f"{SESSIONS}/s", headers=bearer(KEY))).status_code == 200
        assert await listed(client) == []


# A turn ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_the_home_is_known_before_the_last_byte_and_noted_once(stream: bool) -> None:
    home = House()
    await home.service.readiness.poll()
    turns_at_byte: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            turns_at_byte.append(sum(row.turns for row in home.directory.table))

    body = json.dumps(chat(stream=stream)).encode()
    read = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        for message in read:
            return message
        return await asyncio.Future()

    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
    await home.app(scope, receive, send)
    assert turns_at_byte == [1]
    assert [(row.turns, row.home) for row in home.directory.table] == [(1, INFO.replica_id)]
    home.check()


async def test_who_leaves_in_mid_stream_may_come_back() -> None:
    steps: Script = [Admitted(INFO.replica_id, 0, 0.0), Delta(0, "a", (1,)), asyncio.Event()]
    home = House(lambda request: steps)
    async with home.server() as url:
        async with httpx.AsyncClient() as client:
            asking = client.stream("POST", url + CHAT, json=chat(stream=True))
            async with asking as response:
                async for line in response.aiter_lines():
                    if '"a"' in line:
                        break
        await until(lambda: len(home.directory.table) == 1)
        await until(lambda: home.service.concurrency.open_total == 0)
    (row,) = home.directory.table
    assert (row.home, row.turns) == (INFO.replica_id, 1)
    assert row.tokens == len(home.replicas.calls[0].prompt_token_ids) + 1


async def test_a_request_that_nobody_took_has_no_home() -> None:
    home = House(lambda request: [asyncio.Event()])
    async with home.server() as url, httpx.AsyncClient() as client:
        asking = asyncio.create_task(client.post(url + CHAT, json=chat()))
        await home.replicas.began.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: home.service.concurrency.open_total == 0)
    assert len(home.directory.table) == 0


async def test_the_next_turn_is_asked_for_with_what_is_known() -> None:
    home = House(lambda request: say(["Hel", "lo"], ids=[5, 6]))
    async with home.client() as client:
        for _ in range(2):
            await client.post(CHAT, json=chat(session_id="s"))
    first, second = (call.route for call in home.replicas.calls)
    assert (first.home, first.node, first.cached_tokens) == ("", "", 0)
    assert (second.home, second.node, second.peers) == (INFO.replica_id, NODE, (NODE,))
    assert second.cached_tokens == len(home.replicas.calls[0].prompt_token_ids) + 2
