"""What conversations keep of their context: those that begin alike, those that fill the window."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from samovar.router.context.knowledge import (
    Change,
    Content,
    KnowledgeBase,
    KnowledgeError,
    Provenance,
    SqliteStore,
)
from tests.support.router.router_harness import (
    CONTEXT,
    MODEL,
    TOKENIZER,
    House,
    chat,
    error_of,
    make_settings,
    spoken,
)

CHAT, ROUTE = "/v1/chat/completions", "/v1/knowledge"
ORDERS = {"kind": "schema", "title": "Orders", "text": "Table orders_raw has one row per order."}
ME = Provenance("me")


class Desk:
    """An ingress with a knowledge base; `say`: its next answers."""

    def __init__(self, folder: Path, **knowledge: Any) -> None:
        own = {"enabled": True, "dir": folder / "kb", "embedder": "none", "busy_s": 0.05, **knowledge}
        self.say = "Fine."
        self.house = House(lambda _: spoken(self.say), settings=make_settings(knowledge=own))
        self.file = folder / "kb" / "knowledge.sqlite"
        assert isinstance(self.house.service.stage("knowledge"), KnowledgeBase)
        self.base = self.house.service.stage("knowledge")

    async def ask(self, client: httpx.AsyncClient, messages: list[dict[str, str]], **fields: Any) -> Any:
        body = {"model": MODEL, "messages": messages, "knowledge": {"budget_tokens": 800}, **fields}
        answer = await client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["receipt"]["knowledge"]

    @property
    def prompt(self) -> str:
        return str(TOKENIZER.decode(self.house.replicas.calls[-1].prompt_token_ids))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def test_a_conversation_that_begins_as_another_does_not_change_what_that_got(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    async with desk.house.client() as client:
        entry = (await client.post(ROUTE, json=ORDERS)).json()["id"]
        opening = [user("What is in orders_raw?")]
        desk.say = "One thing."
        await desk.ask(client, opening)
        first = desk.prompt
        await client.post(f"{ROUTE}/{entry}", json={**ORDERS, "text": "Table orders_raw was dropped."})
        desk.say = "Another thing."
        await desk.ask(client, opening)
        second = desk.prompt
        assert ("row per order" in first, "was dropped" in second) == (True, True)
        await desk.ask(client, [*opening, assistant("One thing."), user("And now?")])
        assert desk.prompt.startswith(first), "what it got stays, whatever the other one got"
        await desk.ask(client, [*opening, assistant("Another thing."), user("And now?")])
        assert desk.prompt.startswith(second)
    desk.base.close()


async def test_who_retrieves_nothing_gets_nothing_of_a_conversation_that_began_alike(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    async with desk.house.client() as client:
        await client.post(ROUTE, json=ORDERS)
        opening = [user("What is in orders_raw?")]
        desk.say = "One thing."
        await desk.ask(client, opening)
        assert "row per order" in desk.prompt
        desk.say = "Another thing."
        told = await desk.ask(client, opening, knowledge={"retrieve": False})
        assert (told["entries"], "row per order" in desk.prompt) == ([], False)
        second = desk.prompt
        later = [*opening, assistant("Another thing."), user("And?")]
        await desk.ask(client, later, knowledge={"retrieve": False})
        assert desk.prompt.startswith(second), "not in later turns either"
    desk.base.close()


async def test_context_of_earlier_turns_leaves_a_window_that_has_no_room_for_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    async with desk.house.client() as client:
        for number in range(3):
            text = f"orders_raw {number} " + "is long " * 40
            await client.post(ROUTE, json={**ORDERS, "text": text, "title": f"Orders {number}"})
        messages = [user("What is in orders_raw?")]
        kept = await desk.ask(client, messages)
        assert kept["tokens"] > 100
        messages += [assistant("Fine."), user("x" * (CONTEXT - kept["tokens"]))]
        plain = await client.post(CHAT, json={"model": MODEL, "messages": messages})
        assert plain.status_code == 200, "the conversation itself has room"
        told = await desk.ask(client, messages)
        assert (told["dropped"], told["entries"]) == (len(kept["entries"]), [])
        assert "[reference" not in desk.prompt
        messages[-1] = user("And orders_raw?")
        again = await desk.ask(client, messages)
        ids = [{one["id"] for one in told["entries"]} for told in (kept, again)]
        assert (again["dropped"], ids[0] <= ids[1]) == (0, True), "none of it is forgotten"
        too_long = await client.post(CHAT, json=chat("y" * 2 * CONTEXT, knowledge={}))
        assert (too_long.status_code, error_of(too_long)["code"]) == (400, "context_length_exceeded")
    desk.base.close()


def change(text: str) -> Change:
    return Change(Content("gotcha", "", text), ME)


def test_others_write_while_the_questions_of_a_change_are_run(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    seen = []

    def approve(*given: Any) -> None:
        (changed,) = given
        seen.append({one.version.content.text for one in changed.search("tea", "red green blue")})
        if len(seen) == 1:
            other = SqliteStore(desk.file, busy_s=0.05)
            other.write("tea", [change("green")], desk.base.limits)
            other.close()

    desk.base.write("tea", [change("red")], approve)
    assert seen == [{"red"}, {"red", "green"}], "asked again, of what the others wrote too"
    assert {one.content.text for one in desk.base.store.heads("tea")} == {"red", "green"}
    desk.base.close()


def test_a_change_whose_questions_never_see_the_present_state_is_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    def approve(*_: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(desk.base.write, "tea", [change("green")]).result()

    with pytest.raises(KnowledgeError, match="others have changed"):
        desk.base.write("tea", [change("red")], approve)
    assert {one.content.text for one in desk.base.store.heads("tea")} == {"green"}
    desk.base.close()


async def test_a_change_that_others_overtake_is_a_503_that_says_to_try_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    excerpt = desk.base.excerpt

    def overtaken(*given: Any, **more: Any) -> Any:
        desk.base.write("local", [change("green")])
        return excerpt(*given, **more)

    desk.base.excerpt = overtaken  # type: ignore[method-assign]
    async with desk.house.client() as client:
        body = {"format": "jsonl", "text": '{"kind": "gotcha", "text": "red"}'}
        questions = [{"question": "q", "checks": [{"excludes": "y"}]}]
        refused = await client.post(f"{ROUTE}/import", json={**body, "questions": questions})
        assert (refused.status_code, error_of(refused)["code"]) == (503, "knowledge_busy")
        assert refused.headers["retry-after"]
    desk.base.close()


async def test_history_has_pages(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    async with desk.house.client() as client:
        entry = (await client.post(ROUTE, json=ORDERS)).json()["id"]
        for number in range(2, 6):
            await client.post(f"{ROUTE}/{entry}", json={**ORDERS, "text": f"number {number}"})
        path, pages = f"{ROUTE}/{entry}/history", []
        after: dict[str, int] = {}
        while True:
            page = (await client.get(path, params={"limit": 2, **after})).json()
            pages.append([one["version"] for one in page["data"]])
            if not page["has_more"]:
                break
            after = {"after": page["data"][-1]["version"]}
        assert pages == [[5, 4], [3, 2], [1]]
        assert (await client.get(path, params={"after": 1})).json()["data"] == []
        for name in ("limit", "after"):
            bad = await client.get(path, params={name: "0"})
            assert (bad.status_code, error_of(bad)["param"]) == (400, name)
        missing = await client.get(f"{ROUTE}/kb_{'0' * 20}/history", params={"after": 1})
        assert missing.status_code == 404
    desk.base.close()
