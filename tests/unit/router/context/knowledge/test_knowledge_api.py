"""/v1/knowledge and the context of chats, over the whole ingress with scripted replicas."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from samovar.configs.optional_sections import KnowledgeSettings
from samovar.router.context.knowledge import fenced
from tests.house import ROOT
from tests.support.constants import move
from tests.support.engines.tiny_models import EOS_TOKEN
from tests.support.router.router_harness import (
    KEY,
    MODEL,
    OTHER_KEY,
    TOKENIZER,
    House,
    chat,
    error_of,
    make_settings,
    spoken,
)

ROUTE = "/v1/knowledge"
ORDERS = {
    "kind": "schema",
    "title": "Orders",
    "text": "Table orders_raw has one row per order.",
    "topics": ["sales"],
}
GOTCHA = {"kind": "gotcha", "text": "Refunds in orders_raw are negative rows.", "why": "asked twice"}
CHUNK = {"kind": "document_chunk", "title": "Manual", "text": "The samovar boils at ninety-six degrees."}


def house(folder: Path, keys: dict[str, str] | None = None, **knowledge: Any) -> House:
    own = {"enabled": True, "dir": folder / "kb", "embedder": "none", **knowledge}
    return House(lambda _: spoken("Fine.", cached=64), settings=make_settings(knowledge=own, keys=keys))


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    made = house(tmp_path)
    async with made.client() as client:
        client.house = made  # type: ignore[attr-defined]
        yield client
    assert made.service.stage("knowledge") is not None
    made.service.stage("knowledge").close()


async def add(client: httpx.AsyncClient, *bodies: dict[str, Any], **options: Any) -> list[str]:
    answers = [await client.post(ROUTE, json=body, **options) for body in bodies]
    assert [answer.status_code for answer in answers] == [201] * len(bodies), answers[0].text
    return [answer.json()["id"] for answer in answers]


async def test_an_entry_is_created_changed_compared_reverted_and_erased(client: httpx.AsyncClient) -> None:
    (entry,) = await add(client, ORDERS)
    path = f"{ROUTE}/{entry}"
    card = (await client.get(path)).json()
    assert {name: card[name] for name in ORDERS} == ORDERS
    assert (card["version"], card["operation"], card["who"]) == (1, "create", "local")
    changed = {
        **ORDERS,
        "text": "Table orders_raw has one row per item.",
        "why": "wrong",
        "turn": "t1",
        "base": 1,
    }
    assert (await client.post(path, json=changed)).json()["version"] == 2
    stale = await client.post(path, json=changed)
    assert (stale.status_code, error_of(stale)["param"], error_of(stale)["code"]) == (
        409,
        "base",
        "version_conflict",
    )
    history = (await client.get(f"{path}/history")).json()["data"]
    assert [(one["version"], one["why"], one["turn"]) for one in history] == [
        (2, "wrong", "t1"),
        (1, "", None),
    ]
    assert "+Table orders_raw has one row per item." in (await client.get(f"{path}/diff")).json()["diff"]
    reverted = (await client.post(f"{path}/revert", json={"version": 1, "why": "was right"})).json()
    assert (reverted["version"], reverted["operation"], reverted["of_version"]) == (3, "revert", 1)
    assert (await client.get(path, params={"version": 2})).json()["text"] == changed["text"]
    assert (await client.get(ROUTE, params={"kind": "schema"})).json()["data"] == [reverted]
    assert (await client.get(ROUTE, params={"kind": "gotcha"})).json()["data"] == []
    assert (await client.delete(path)).json()["deleted"] is True
    for gone in (await client.get(path), await client.delete(path), await client.get(f"{path}/history")):
        assert (gone.status_code, error_of(gone)["code"]) == (404, "entry_not_found")


async def test_pages_of_entries_follow_each_other(client: httpx.AsyncClient) -> None:
    ids = await add(client, *({**GOTCHA, "text": f"number {number}"} for number in range(5)))
    first = (await client.get(ROUTE, params={"limit": 3})).json()
    rest = (await client.get(ROUTE, params={"limit": 3, "after": first["data"][-1]["id"]})).json()
    assert [one["id"] for one in (*first["data"], *rest["data"])] == sorted(ids)
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert (await client.delete(f"{ROUTE}/{ids[0]}")).status_code == 200
    for unknown in (ids[0], "kb_nobody", "zzz"):
        refused = await client.get(ROUTE, params={"after": unknown})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "after")


MARKDOWN = """\
# Orders
kind: schema
topics: sales, money

One row per order.

```
# no heading
```
## Refunds
They are negative.
"""


async def test_imports_are_whole_or_not_at_all(client: httpx.AsyncClient) -> None:
    made = (await client.post(f"{ROUTE}/import", json={"format": "markdown", "text": MARKDOWN})).json()[
        "data"
    ]
    assert [(one["kind"], one["title"], one["topics"]) for one in made] == [
        ("schema", "Orders", ["sales", "money"]),
        ("document_chunk", "Refunds", []),
    ]
    assert "# no heading" in made[0]["text"]
    lines = "\n".join(json.dumps(one) for one in (*made, GOTCHA))
    again = await client.post(f"{ROUTE}/import", json={"format": "jsonl", "text": lines, "why": "a copy"})
    assert [one["why"] for one in again.json()["data"]] == ["a copy", "a copy", "asked twice"]
    before = (await client.get(ROUTE)).json()
    misnamed = '{"kind": "gotcha", "text": "x", "titel": "y"}'
    for bad in ('{"kind": "poem", "text": "x"}', "[]", "{", '{"kind": "gotcha"}', misnamed, "\n"):
        text = bad if bad == "\n" else f"{lines}\n{bad}"
        refused = await client.post(f"{ROUTE}/import", json={"format": "jsonl", "text": text})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "text")
        assert bad == "\n" or "line 4" in error_of(refused)["message"]
    assert (await client.get(ROUTE)).json() == before


async def test_a_state_has_a_name_and_comes_back_with_the_same_results(client: httpx.AsyncClient) -> None:
    orders, gotcha, chunk = await add(client, ORDERS, GOTCHA, CHUNK)

    async def found() -> list[Any]:
        asked = {"query": "What is in orders_raw, and when does the samovar boil?"}
        data = (await client.post(f"{ROUTE}/search", json=asked)).json()["data"]
        return [(one["id"], one["text"], one["score"], one["ranks"]) for one in data]

    before = await found()
    assert {one[0] for one in before} == {orders, gotcha, chunk}
    assert (await client.post(f"{ROUTE}/tags", json={"name": "good"})).status_code == 201
    await client.post(f"{ROUTE}/{orders}", json={**ORDERS, "text": "Nothing about it."})
    await add(client, {**GOTCHA, "text": "The samovar never boils orders_raw."})
    assert await found() != before
    assert (await client.get(f"{ROUTE}/tags")).json()["data"] == [{"name": "good"}]
    back = await client.post(f"{ROUTE}/revert", json={"tag": "good", "why": "it was better"})
    assert sorted(one["operation"] for one in back.json()["data"]) == ["retire", "revert"]
    assert await found() == before
    assert (await client.post(f"{ROUTE}/revert", json={"tag": "good"})).json()["data"] == []
    unknown = await client.post(f"{ROUTE}/revert", json={"tag": "never"})
    assert unknown.status_code == 404


QUESTIONS = [
    {
        "question": "What are refunds in orders_raw?",
        "checks": [{"contains": "negative"}, {"regex": r"rows?\."}],
    },
    {"question": "What has orders_raw?", "checks": [{"retrieves": "Orders"}, {"excludes": "positive"}]},
]


async def test_a_planted_bad_entry_is_caught_before_it_lands(client: httpx.AsyncClient) -> None:
    await add(client, ORDERS, GOTCHA)
    told = (await client.post(f"{ROUTE}/test", json={"questions": QUESTIONS})).json()
    assert (told["passed"], told["failed"]) == (2, 0)
    bad = json.dumps(
        {"kind": "gotcha", "title": "Orders", "text": "What has orders_raw? Refunds are positive."}
    )
    body = {"format": "jsonl", "text": bad, "questions": QUESTIONS}
    refused = await client.post(f"{ROUTE}/import", json=body)
    assert (refused.status_code, error_of(refused)["code"]) == (409, "questions_broken")
    assert "excludes 'positive'" in error_of(refused)["message"]
    assert len((await client.get(ROUTE)).json()["data"]) == 2
    good = {**body, "text": json.dumps({"kind": "gotcha", "text": "orders_raw is loaded at night."})}
    report = (await client.post(f"{ROUTE}/import", json=good)).json()["test"]
    assert (report["passed_before"], report["passed_after"], report["broken"]) == (2, 2, 0)
    assert report["questions"][1]["entries_new"]


async def test_tenants_share_nothing(tmp_path: Path) -> None:
    made = house(tmp_path, keys={"tea": KEY, "coffee": OTHER_KEY})
    tea, coffee = ({"authorization": f"Bearer {key}"} for key in (KEY, OTHER_KEY))
    async with made.client() as client:
        (entry,) = await add(client, ORDERS, headers=tea)
        path = f"{ROUTE}/{entry}"
        for method, url in (
            ("GET", path),
            ("GET", f"{path}/history"),
            ("GET", f"{path}/diff"),
            ("DELETE", path),
        ):
            assert (await client.request(method, url, headers=coffee)).status_code == 404
        for url, body in ((path, GOTCHA), (f"{path}/revert", {"version": 1})):
            assert (await client.post(url, json=body, headers=coffee)).status_code == 404
        asked = {"query": "orders_raw Orders sales"}
        assert (await client.post(f"{ROUTE}/search", json=asked, headers=coffee)).json()["data"] == []
        assert (await client.get(ROUTE, headers=coffee)).json()["data"] == []
        await client.delete(ROUTE, headers=coffee)
        body = chat("What is in orders_raw?", knowledge={})
        told = (await client.post("/v1/chat/completions", json=body, headers=coffee)).json()["receipt"][
            "knowledge"
        ]
        assert (told["entries"], told["tokens"]) == ([], 0)
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers=tea)).status_code == 200
    made.service.stage("knowledge").close()  # type: ignore[union-attr]


def prompt_of(made: House) -> str:
    return TOKENIZER.decode(made.replicas.calls[-1].prompt_token_ids)


async def test_context_stays_where_it_was_placed_and_the_receipt_says_what_it_is(
    client: httpx.AsyncClient,
) -> None:
    made: House = client.house  # type: ignore[attr-defined]
    orders, gotcha, chunk = await add(client, ORDERS, GOTCHA, CHUNK)
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    prompts, receipts = [], []
    for question in ("What is in orders_raw?", "When does the samovar boil?", "And refunds in orders_raw?"):
        messages.append({"role": "user", "content": question})
        body = {"model": MODEL, "messages": messages, "knowledge": {"budget_tokens": 800}}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        prompts.append(prompt_of(made))
        receipts.append(answer["receipt"]["knowledge"])
    assert all(later.startswith(before) for before, later in pairwise(prompts))
    assert (
        prompts[0].index("Be brief.") < prompts[0].index("one row per order") < prompts[0].index("What is in")
    )
    assert prompts[1].index("boils at") > prompts[1].index("Fine.")
    told = [(one["id"], one["place"], one["turn"], one["is_new"]) for one in receipts[1]["entries"]]
    assert told == [*((entry, "front", 1, False) for entry in (orders, gotcha)), (chunk, "beside", 2, True)]
    assert [one["version"] for one in receipts[1]["entries"]] == [1, 1, 1]
    assert receipts[2]["entries"][-1]["is_new"] is False
    assert receipts[2]["entries"][0]["score"] is not None
    context = len(TOKENIZER.encode(prompts[0][prompts[0].index("[reference") : prompts[0].index(EOS_TOKEN)]))
    assert abs(receipts[0]["tokens"] - context) <= 2
    assert 0 < receipts[0]["cached_tokens"] < 64 < receipts[0]["tokens"]


async def test_a_changed_entry_changes_later_turns_only_and_an_erased_one_all(
    client: httpx.AsyncClient,
) -> None:
    made: House = client.house  # type: ignore[attr-defined]
    (orders,) = await add(client, ORDERS)
    asked = [{"role": "user", "content": "What is in orders_raw?"}]

    async def ask() -> str:
        body = {"model": MODEL, "messages": asked, "knowledge": {"budget_tokens": 800}, "session_id": "s"}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        return prompt_of(made)

    first = await ask()
    await client.post(f"{ROUTE}/{orders}", json={**ORDERS, "text": "Table orders_raw was dropped."})
    asked += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": "Is orders_raw there?"}]
    second = await ask()
    assert second.startswith(first)
    assert "was dropped" in second
    await client.delete(f"{ROUTE}/{orders}")
    third = await ask()
    assert "row per order" not in third
    assert "was dropped" not in third
    await client.delete("/v1/sessions/s")


async def test_who_does_not_ask_gets_the_prompt_of_before(client: httpx.AsyncClient, tmp_path: Path) -> None:
    made: House = client.house  # type: ignore[attr-defined]
    await add(client, ORDERS)
    answer = (await client.post("/v1/chat/completions", json=chat("What is in orders_raw?"))).json()
    assert "knowledge" not in answer["receipt"]
    assert "[reference" not in prompt_of(made)
    kept = {"retrieve": False}
    told = (await client.post("/v1/chat/completions", json=chat("orders_raw?", knowledge=kept))).json()[
        "receipt"
    ]
    assert told["knowledge"]["entries"] == []
    always = house(tmp_path, always_of=["local"])
    async with always.client() as other:
        await other.post("/v1/chat/completions", json=chat("What is in orders_raw?"))
        assert "[reference" in prompt_of(always)
        small = chat("What is in orders_raw? " + "x" * 1900, max_tokens=60)
        assert (await other.post("/v1/chat/completions", json=small)).status_code == 200
        assert "[reference" not in prompt_of(always), "what does not fit is left out"
    always.service.stage("knowledge").close()  # type: ignore[union-attr]


async def test_a_tools_result_gets_nothing_new(client: httpx.AsyncClient) -> None:
    await add(client, ORDERS)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What is in it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "orders_raw Orders"},
    ]
    body = {"model": MODEL, "messages": messages, "knowledge": {}}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["receipt"]["knowledge"]["entries"] == []


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("", {"kind": "poem", "text": "x"}, "kind"),
        ("", {"kind": "gotcha"}, "text"),
        ("", {"kind": "gotcha", "text": "\u200b\u202e"}, "text"),
        ("", {"kind": "gotcha", "text": "x" * 20_000}, "text"),
        ("", {"kind": "gotcha", "text": "x", "topics": ["t"] * 99 + ["u"] * 9}, None),
        ("", {"kind": "gotcha", "text": "x", "topics": [str(number) for number in range(99)]}, "topics"),
        ("", {"kind": "gotcha", "text": "x", "titel": "x"}, "titel"),
        ("", {"kind": "gotcha", "text": "x", "base": 1}, "base"),
        ("/search", {"query": ""}, "query"),
        ("/search", {"query": "x", "kinds": ["poem"]}, "kinds[0]"),
        ("/tags", {"name": "../x"}, "name"),
        ("/test", {"questions": [{"question": "x", "checks": [{}]}]}, "questions[0].checks[0]"),
        ("/kb_0/revert", {"version": 0}, "version"),
        ("/import", {"format": "xml", "text": "x"}, "format"),
    ],
)
async def test_errors_name_the_field(
    client: httpx.AsyncClient, url: str, body: Any, param: str | None
) -> None:
    answer = await client.post(f"{ROUTE}{url}", json=body)
    if param is None:
        assert answer.status_code == 201
    else:
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)


async def test_what_is_not_found_or_has_no_room_names_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(monkeypatch, KnowledgeSettings, tags_max=1)
    made = house(tmp_path)
    async with made.client() as client:
        (entry,) = await add(client, ORDERS)
        assert (await client.post(f"{ROUTE}/tags", json={"name": "one"})).status_code == 201
        for url, body, told in (
            ("/tags", {"name": "two"}, (400, "name", "quota_exceeded")),
            ("/revert", {"tag": "two"}, (404, "tag", "entry_not_found")),
            (f"/{entry}/revert", {"version": 9}, (404, "version", "entry_not_found")),
        ):
            answer = await client.post(f"{ROUTE}{url}", json=body)
            error = error_of(answer)
            assert (answer.status_code, error["param"], error["code"]) == told
    assert made.service.stage("knowledge") is not None
    made.service.stage("knowledge").close()


async def test_wishes_that_cannot_be_served_are_refused(client: httpx.AsyncClient, tmp_path: Path) -> None:
    for wish, param in (
        ({"kinds": ["poem"]}, "knowledge.kinds[0]"),
        ({"budget": 3}, "knowledge.budget"),
        ({"entries": 0}, "knowledge.entries"),
        ({"query": ""}, "knowledge.query"),
        ([], "knowledge"),
    ):
        answer = await client.post("/v1/chat/completions", json=chat(knowledge=wish))
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    async with House().client() as other:
        answer = await other.post("/v1/chat/completions", json=chat(knowledge={}))
        assert (answer.status_code, error_of(answer)["code"]) == (400, "unsupported_parameter")
        assert "knowledge.enabled" in error_of(answer)["message"]
        assert (await other.get(ROUTE)).status_code == 404


def malformed(rng: random.Random, depth: int = 0) -> Any:
    leaves: list[Any] = [
        *(
            None,
            True,
            -1,
            2**70,
            1e308,
            "",
            "x",
            "\ud800",
            "\x00",
            "kb_" + "0" * 20,
            "a" * 300,
            "\u202e",
            "{",
            "| ",
        ),
        *(
            "gotcha",
            "schema",
            "jsonl",
            "markdown",
            "(a+)+$",
            "[",
            "# h\nkind: poem\nx",
            '{"kind": "gotcha", "text": "x"}',
        ),
    ]
    if depth > 2 or rng.random() < 0.5:
        return rng.choice(leaves)
    if rng.random() < 0.4:
        return [malformed(rng, depth + 1) for _ in range(rng.randrange(3))]
    names = (
        "kind text title topics why turn base query limit kinds format version tag name questions question"
    )
    more = [
        "contains",
        "regex",
        "exact",
        "retrieves",
        "json_schema",
        "of",
        "budget_tokens",
        "text",
        "kind",
        "query",
    ]
    return {
        name: malformed(rng, depth + 1) for name in rng.sample([*names.split(), *more], rng.randrange(1, 6))
    }


async def test_a_thousand_malformed_bodies_are_no_internal_error(client: httpx.AsyncClient) -> None:
    rng = random.Random(18)
    (entry,) = await add(client, ORDERS)
    urls = ["", "/search", "/import", "/test", "/revert", "/tags", f"/{entry}", f"/{entry}/revert", "/kb_x"]
    seen: dict[int, int] = {}
    for _ in range(1000):
        body = malformed(rng)
        raw = json.dumps(body).encode()
        if rng.random() < 0.1:
            raw = raw[: rng.randrange(len(raw) + 1)]
        if rng.random() < 0.1:
            raw = json.dumps(chat("orders_raw", knowledge=body)).encode()
            answer = await client.post("/v1/chat/completions", content=raw)
        else:
            answer = await client.post(ROUTE + rng.choice(urls), content=raw)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        if answer.status_code >= 400:
            error_of(answer)
    assert max(seen) < 500, seen
    assert seen[400] > 500
    client.house.service.stage("knowledge").store.check_integrity()  # type: ignore[attr-defined]


def test_an_ingress_without_it_imports_nothing_of_it() -> None:
    code = (
        "import sys\nfrom tests.support.router.router_harness import House\nHouse()\n"
        "print([name for name in sys.modules if name.startswith(('router.kn', 'router.le')) or name in"
        " ('sqlite3', 'wordllama', 'samovar.router.ingress.knowledge_routes')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_fence_of_nothing_is_nothing() -> None:
    assert fenced([], ()) == ""
