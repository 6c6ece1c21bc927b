"""What one API key may have open, and that no key's work holds up another's, at the ingress (S2, S13)."""

from __future__ import annotations

import asyncio
import threading

import pytest

from samovar.cache_tiers.sessions.session_table import SessionRow, SessionTable, SessionView
from samovar.configs.settings import AuthSettings, LimitsSettings, Settings
from samovar.router.openai.errors import TooManyRequests
from samovar.router.prompt.tokenizer import TokenizerThreads
from tests.support.router.router_harness import (
    KEY,
    MODEL,
    OTHER_KEY,
    House,
    bearer,
    error_of,
    make_settings,
    until,
)

KEYS = {"alice": KEY, "bob": OTHER_KEY}
COMPLETIONS = "/v1/completions"


def many(prompts: int, n: int, max_tokens: int | None = 10) -> dict[str, object]:
    body = {"model": MODEL, "prompt": [[7, 8, 9]] * prompts, "n": n}
    return body if max_tokens is None else {**body, "max_tokens": max_tokens}


@pytest.mark.guarantee("G10")
async def test_answers_of_a_key_are_counted_not_requests() -> None:
    """Two of eight prompts with n=8 are all that a key may have; the third is told so untokenised."""
    gate = asyncio.Event()
    house = House(lambda request: [gate], settings=make_settings(keys=KEYS))

    def never(*args: object) -> list[object]:
        raise AssertionError("it was tokenised")

    async with house.client() as client:
        busy = [
            asyncio.create_task(client.post(COMPLETIONS, json=many(8, 8), headers=bearer(KEY)))
            for _ in range(2)
        ]
        await until(lambda: house.replicas.open == 16)
        plain, house.prompts._plain = house.prompts._plain, never  # type: ignore[method-assign,assignment]
        refused = await client.post(COMPLETIONS, json=many(1, 1), headers=bearer(KEY))
        house.prompts._plain = plain  # type: ignore[method-assign]
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        error = error_of(refused)
        assert error["code"] == "concurrency_limit"
        assert "128" in error["message"]
        assert "limits.sequences_per_key" in error["message"]
        bobs = asyncio.create_task(client.post(COMPLETIONS, json=many(1, 1), headers=bearer(OTHER_KEY)))
        await until(lambda: house.replicas.open == 17)  # another key has its own
        for task in (*busy, bobs):
            task.cancel()
        await asyncio.gather(*busy, bobs, return_exceptions=True)
        await until(lambda: house.service.concurrency.open_total == 0)


@pytest.mark.parametrize(
    ("limits", "body", "param", "name"),
    [
        ({"sequences_per_key": 10}, many(2, 8), "n", "limits.sequences_per_key"),
        ({"sequences_per_key": 4}, many(5, 1), "prompt", "limits.sequences_per_key"),
        ({"tokens_per_key": 100}, many(2, 1, 60), "max_tokens", "limits.tokens_per_key"),
        ({"tokens_per_key": 100}, many(1, 1, -1), "max_tokens", "limits.tokens_per_key"),
    ],
)
async def test_what_can_never_fit_is_a_400_that_names_the_field(
    limits: dict[str, int], body: dict[str, object], param: str, name: str
) -> None:
    house = House(settings=make_settings(limits=limits, keys={"alpha": KEY}))
    async with house.client(**bearer(KEY)) as client:
        refused = await client.post(COMPLETIONS, json=body)
        assert refused.status_code == 400
        error = error_of(refused)
        assert error["param"] == param
        assert name in error["message"]
        assert param in error["message"]


async def test_tokens_of_a_key_are_counted_until_its_requests_end() -> None:
    gate = asyncio.Event()
    settings = make_settings(limits={"tokens_per_key": 1000}, keys={"alpha": KEY})
    house = House(lambda request: [gate], settings=settings)
    async with house.client(**bearer(KEY)) as client:
        busy = asyncio.create_task(client.post(COMPLETIONS, json=many(1, 8, 100)))
        await until(lambda: house.replicas.open == 1)
        refused = await client.post(COMPLETIONS, json=many(1, 2, 100))
        assert refused.status_code == 429
        assert "limits.tokens_per_key" in error_of(refused)["message"]
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        await until(lambda: house.service.concurrency.open_total == 0)
        again = asyncio.create_task(client.post(COMPLETIONS, json=many(1, 2, 100)))
        await until(lambda: house.replicas.open == 1)
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)
        await until(lambda: house.service.concurrency.open_total == 0)


# S13: the tokenizer's threads ------------------------------------------------------------------


async def test_the_tokenizer_takes_turns() -> None:
    """Alice's hundred long prompts wait; Bob's is done after the one under way and one more."""
    threads = TokenizerThreads(LimitsSettings(tokenizer_threads=1, tokenizer_queue_max=200))
    gate, done = threading.Event(), list[str]()

    def work(name: str) -> str:
        gate.wait(10)
        done.append(name)
        return name

    hers = [
        asyncio.create_task(threads.run("alice", [(lambda: work("alice"), 100_000)] * 8)) for _ in range(12)
    ]
    await asyncio.sleep(0)
    his = asyncio.create_task(threads.run("bob", [(lambda: work("bob"), 100)]))
    await asyncio.sleep(0)
    gate.set()
    assert await his == ["bob"]
    assert done.index("bob") <= 2
    assert [len(names) for names in await asyncio.gather(*hers)] == [8] * 12
    threads.check_integrity()
    threads.close()


async def test_one_tenant_does_not_fill_the_tokenizers_queue() -> None:
    limits = LimitsSettings(tokenizer_threads=1, tokenizer_queue_max=9)
    threads = TokenizerThreads(limits, tenant_share=0.5)
    gate = threading.Event()
    hers = [asyncio.create_task(threads.run("alice", [(gate.wait, 10)])) for _ in range(6)]
    his = asyncio.create_task(threads.run("bob", [(gate.wait, 10)]))
    refused, *_ = await asyncio.wait(hers, return_when=asyncio.FIRST_COMPLETED)
    (error,) = (task.exception() for task in refused)
    assert isinstance(error, TooManyRequests)
    assert "limits.tenant_share" in error.message
    hers[1].cancel()  # who goes leaves the queue
    await asyncio.gather(hers[1], return_exceptions=True)
    threads.check_integrity()
    gate.set()
    assert await his == [True]
    await asyncio.gather(*hers, return_exceptions=True)
    threads.check_integrity()
    threads.close()


# S13: lists and figures -------------------------------------------------------------------------


async def test_lists_and_figures_are_bounded_per_key() -> None:
    house = House(settings=make_settings(keys=KEYS, limits={"reads_per_key": 1}))
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with house.client() as client:
        await client.post("/v1/chat/completions", json=chat, headers=bearer(KEY) | {"x-session-id": "mine"})
        with house.service.reads.lease("alice"):
            for path in ("/v1/sessions", "/metrics"):
                refused = await client.get(path, headers=bearer(KEY))
                assert refused.status_code in (403, 429)
                assert (await client.get(path, headers=bearer(OTHER_KEY))).status_code in (200, 403)
            assert (await client.get("/v1/sessions", headers=bearer(KEY))).status_code == 429
            assert (await client.get("/v1/sessions/mine", headers=bearer(KEY))).status_code == 429
            hint = await client.post("/v1/sessions/mine/hint", json={"event": "typing"}, headers=bearer(KEY))
            assert hint.status_code == 429
        assert (await client.get("/v1/sessions", headers=bearer(KEY))).status_code == 200


def test_a_page_of_sessions_is_what_sorting_gives_and_looks_at_no_others() -> None:
    table, count = SessionTable(100_000), 20_000
    tenant = b"t" * 16
    for number in range(count):
        session = number.to_bytes(8, "big") + bytes(8)
        table.turn(tenant, session, home="", node="", tokens=1, now_unix_s=float(number * 7919 % 1000))

    def place(row: SessionRow) -> tuple[float, bytes]:
        return row.used_unix_s, row.session

    whole = sorted(table.of(tenant), key=place, reverse=True)
    looked, view = 0, table.view

    def counted(tenant: bytes, session: bytes) -> SessionView | None:
        nonlocal looked
        looked += 1
        return view(tenant, session)

    table.view = counted  # type: ignore[method-assign]
    first = table.page(tenant, 101)
    assert [view.main for view in first] == whole[:101]
    assert [view.main for view in table.page(tenant, 101, first[99])] == whole[100:201]
    assert table.page(tenant, 5, SessionView((whole[-1],))) == []
    assert [view.main for view in table.page(None, 5)] == whole[:5]
    assert looked == 101 + 101 + 5


# Settings -----------------------------------------------------------------------------------------


def test_a_tenants_share_is_half_where_there_are_others() -> None:
    alone, several = Settings(), make_settings(keys=KEYS)
    one = Settings(auth=AuthSettings.model_validate({"api_keys": {"alice": KEY}}))
    assert [s.share_of_tenant(s.tiers.tenant_share) for s in (alone, one, several)] == [1.0, 1.0, 0.5]
    assert several.share_of_tenant(0.3) == 0.3
