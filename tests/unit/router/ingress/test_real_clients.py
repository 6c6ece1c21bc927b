"""Prompts and ids in the shapes of real clients, through the route: what stays of a prefix, and what is said
of one that changed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from samovar.cache_tiers.blocks import session_of
from samovar.router.prompt import prompt as prompt_module
from tests.support.router import client_shapes as shapes
from tests.support.router.client_shapes import SHAPES, SYSTEM, SentRequest, Shape
from tests.support.router.fake_replica import say
from tests.support.router.router_harness import KEY, TOKENIZER, House, chat, make_settings

CHAT = "/v1/chat/completions"
SAID = ("How many files are there?", "Hello", "And how many lines?", "Hello", "Thanks.")


async def ask(client: httpx.AsyncClient, sent: SentRequest) -> dict[str, Any]:
    answer = await client.post(CHAT, json=sent.body, headers=sent.headers)
    assert answer.status_code == 200, answer.text
    receipt: dict[str, Any] = answer.json()["receipt"]
    return receipt


def same_tokens(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def ids_of(house: House) -> list[list[int]]:
    return [call.prompt_token_ids for call in house.replicas.calls]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
async def test_each_turn_extends_the_one_before_and_has_its_session(shape: Shape) -> None:
    house = House()
    async with house.client() as client:
        for turn in (1, 3, 5):
            receipt = await ask(client, shape("conversation-1", *SAID[:turn]))
            assert receipt["miss"] is None
        await ask(client, shape("conversation-2", SAID[0]))
    first, second, third, _ = ids_of(house)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    *keys, other = house.replicas.session_keys
    assert len(set(keys)) == 1
    assert other != keys[0]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
async def test_two_conversations_share_the_system_prompts_tokens(shape: Shape) -> None:
    house = House()
    async with house.client() as client:
        await ask(client, shape("conversation-1", "How many files are there?"))
        await ask(client, shape("two", "What is new?"))
    one, other = ids_of(house)
    assert same_tokens(one, other) >= len(TOKENIZER.encode(f"<|im_start|>system\n{SYSTEM}"))


@pytest.mark.parametrize(
    ("volatile", "prefix", "shared"),
    [("drop", ["dropped"], 80), ("behind", ["moved"], 80), ("keep", None, 0)],
)
async def test_the_billing_line_is_put_out_of_the_way_and_the_receipt_says_so(
    volatile: str, prefix: list[str] | None, shared: int
) -> None:
    house = House(settings=make_settings(router={"prefix": {"volatile": volatile}}))
    async with house.client() as client:
        receipts = [await ask(client, shapes.claude_code(name, "hi")) for name in ("a", "bc")]
    said = [[f"{word} x-anthropic-billing-header" for word in prefix] if prefix else None] * 2
    assert [receipt["prefix"] for receipt in receipts] == said
    one, other = ids_of(house)
    assert same_tokens(one, other) >= shared
    texts = [TOKENIZER.decode(ids) for ids in (one, other)]
    assert ["cc_version=2.1.1.a;" in texts[0], "cch=1;" in texts[1]] == [volatile != "drop"] * 2
    if volatile == "behind":
        assert texts[0].startswith(f"<|im_start|>system\n{SYSTEM}\nx-anthropic-billing-header: ")


async def test_a_conversation_without_id_is_known_although_its_billing_line_varies() -> None:
    for volatile in ("drop", "behind", "keep"):
        house = House(settings=make_settings(router={"prefix": {"volatile": volatile}}))
        async with house.client() as client:
            for turn in (1, 3):
                sent = shapes.claude_code("conversation", *SAID[:turn])
                await ask(client, SentRequest({}, {**sent.body, "metadata": {}}))
        assert len(set(house.replicas.session_keys)) == 1, volatile


@pytest.mark.parametrize("main", [shapes.opencode, shapes.open_webui, shapes.claude_code])
async def test_requests_beside_a_conversation_are_no_change_of_it(main: Shape) -> None:
    house = House()
    headers = main("s", *SAID).headers
    async with house.client() as client:
        for turn in (1, 3, 5):
            receipts = [await ask(client, main("s", *SAID[:turn]))]
            beside = [shapes.opencode_title("s", SAID[0]), *shapes.open_webui_tasks("s", *SAID[: turn + 1])]
            receipts += [await ask(client, SentRequest(headers, each.body)) for each in beside]
            assert [receipt["miss"] for receipt in receipts] == [None] * 5
    assert len(set(house.replicas.session_keys)) == 1


def messages_of(*said: str, system: str = SYSTEM) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, *shapes.turns(said)]


def clock(minute: int) -> str:
    return f"It is 10:{minute} o'clock. {SYSTEM}"


LONG = tuple(
    f"{word} {place} of them, and then some more of the same" for place, word in enumerate("abcdefgh")
)


@pytest.mark.parametrize(
    ("before", "now", "part"),
    [
        (messages_of(*LONG[:3], system=clock(30)), messages_of(*LONG[:5], system=clock(31)), "system"),
        (messages_of(*LONG[:3]), messages_of(LONG[0], "edited", *LONG[2:5]), "messages[2]"),
        (messages_of(*LONG[:3]), messages_of(LONG[0], LONG[1] + "!", *LONG[2:5]), "messages[2]"),
        (messages_of(*LONG[:3]), messages_of(*LONG[:2], "another question instead of it"), "messages[3]"),
        (messages_of(*LONG[:5]), [*messages_of()[:1], *messages_of(*LONG[:7])[3:]], "messages[1]"),
        (messages_of(*LONG[:3])[1:], messages_of(*LONG[:5]), "system"),
    ],
    ids=["clock", "edited", "longer", "asked-again", "cut", "system-added"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefix_changed_on_purpose_is_named_with_token_and_part(
    before: list[dict[str, Any]], now: list[dict[str, Any]], part: str, stream: bool
) -> None:
    house = House()
    async with house.client(**{"x-session-id": "s"}) as client:
        await ask(client, SentRequest({}, chat(messages=before)))
        answer = await client.post(CHAT, json=chat(messages=now, stream=stream))
        metrics = (await client.get("/metrics")).text
    same = same_tokens(*ids_of(house))
    said = "prompt changed at token "
    assert said in answer.text
    token, where = answer.text.partition(said)[2].partition('"')[0].split(" in ")
    assert where == part
    assert same - 16 < int(token) <= same
    assert f'samovar_prefixes_left_total{{part="{part.partition("[")[0]}"}} 1.0' in metrics


async def test_the_token_is_exact_where_a_message_begins() -> None:
    house = House()
    async with house.client(**{"x-session-id": "s"}) as client:
        await ask(client, SentRequest({}, chat(messages=messages_of(*LONG[:3]))))
        edited = messages_of(LONG[0], "Zero", *LONG[2:5])
        receipt = await ask(client, SentRequest({}, chat(messages=edited)))
    same = same_tokens(*ids_of(house))
    assert receipt["miss"] == f"prompt changed at token {same} in messages[2]"


async def test_a_change_that_cost_nothing_is_no_reason() -> None:
    """The conversation goes back to a branch that is still in the cache."""
    house = House()
    async with house.client(**{"x-session-id": "s"}) as client:
        await ask(client, SentRequest({}, chat(messages=messages_of(*LONG[:3]))))
        script = house.replicas.script
        house.replicas.script = lambda request: say(["x"], cached=len(request.prompt_token_ids) - 1)
        other = messages_of(*LONG[:2], "another question instead of it")
        receipt = await ask(client, SentRequest({}, chat(messages=other)))
        assert receipt["miss"] is None
        house.replicas.script = script
        receipt = await ask(client, SentRequest({}, chat(messages=messages_of(*LONG[:3]))))
        assert receipt["miss"].endswith("in messages[3]")


async def test_g12_nothing_is_compared_with_what_was_deleted() -> None:
    house = House()
    async with house.client(**{"x-session-id": "s"}) as client:
        for path in ("/v1/sessions/s", "/v1/cache"):
            await ask(client, SentRequest({}, chat(messages=messages_of(*LONG[:3], system=clock(30)))))
            assert (await client.delete(path)).status_code == 200
            changed = chat(messages=messages_of(*LONG[:5], system=clock(31)))
            assert (await ask(client, SentRequest({}, changed)))["miss"] is None
            await client.delete(path)


async def test_a_comparison_that_fails_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(prompt_module, "digest_of", broken)
    async with House().client() as client:
        assert (await ask(client, SentRequest({}, chat())))["miss"] is None
    assert "could not be compared" in caplog.text


async def test_a_memory_that_is_off_says_nothing() -> None:
    house = House(settings=make_settings(router={"prefix": {"prompts_max": 0}}))
    async with house.client(**{"x-session-id": "s"}) as client:
        for minute in (30, 31):
            body = chat(messages=messages_of(*LONG[:3], system=clock(minute)))
            assert (await ask(client, SentRequest({}, body)))["miss"] is None


async def test_a_message_as_text_and_as_parts_makes_the_same_tokens() -> None:
    house = House()
    text = "x-not-volatile: as it is;\nand more"
    async with house.client() as client:
        for content in (
            text,
            [shapes.text_part(text)],
            [shapes.text_part(text[:9]), shapes.text_part(text[9:])],
        ):
            for role in ("system", "user"):
                messages = [{"role": role, "content": content}, {"role": "user", "content": "go"}]
                await ask(client, SentRequest({}, chat(messages=messages)))
    systems, users = ids_of(house)[::2], ids_of(house)[1::2]
    assert systems[0] == systems[1] == systems[2]
    assert users[0] == users[1] == users[2]


# Places of ids --------------------------------------------------------------------------------------


async def test_ids_are_read_where_the_settings_say_and_deleted_from_everywhere() -> None:
    house = House(settings=make_settings(router={"session_ids": ["x-my-chat", "metadata.chat"]}))
    async with house.client() as client:
        for headers, fields in (
            ({"x-my-chat": "c", "x-session-id": "1"}, {}),
            ({"x-my-chat": "c", "x-session-id": "2"}, {"metadata": {"chat": "d"}}),
            ({}, {"metadata": {"chat": "c"}}),
            ({}, {"metadata": {"chat": '{"session_id": "c"}'}}),
        ):
            await ask(client, SentRequest(headers, chat("other" * len(headers), **fields)))
        first, again, third, fourth = house.replicas.session_keys
        assert first == again != third == fourth
        assert (await client.delete("/v1/sessions/c")).status_code == 200
    cleared = house.replicas.clears[0][1] or ()
    assert {session_of(call.session) for call in house.replicas.calls} <= set(cleared)
    assert len(cleared) == len(set(cleared)) == 12 + 2


@pytest.mark.parametrize(
    ("user_id", "is_id"),
    [
        ('{"session_id": "s"}', True),
        ('{"session_id": 5}', False),
        ('{"session_id": ', False),
        ('{"a":' * 2000, False),
        ("user_1234", False),  # a user of many conversations
        ("", False),
    ],
)
async def test_a_user_id_names_a_session_only_by_its_json(user_id: str, is_id: bool) -> None:
    house = House(settings=make_settings(limits={"metadata_bytes_max": 1 << 16}))
    async with house.client() as client:
        for text in ("one", "two"):
            await ask(client, SentRequest({}, chat(text, metadata={"user_id": user_id})))
    assert (len(set(house.replicas.session_keys)) == 1) is is_id


@pytest.mark.parametrize("inner", ["\\u0000", "\\ud800", "x" * 600])
async def test_f34_a_bad_id_in_metadata_is_a_400(inner: str) -> None:
    async with House().client() as client:
        body = chat(metadata={"user_id": f'{{"session_id": "{inner}"}}'})
        answer = await client.post(CHAT, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata.user_id")


@pytest.mark.parametrize(
    "header", ["x-affinity", "session_id", "x-acme-conversation-id", "Chat-Id", "x-thread", "my_session_key"]
)
async def test_a_header_whose_name_says_so_names_a_conversation(header: str) -> None:
    house = House()
    async with house.client() as client:
        for value, text in (("one", "hi"), ("one", "ho"), ("two", "hi")):
            await ask(client, SentRequest({header: value, "x-user-id": "ada"}, chat(text)))
        one, again, other = house.replicas.session_keys
        assert one == again != other
        await ask(client, SentRequest({header: "one", "x-session-id": "mine"}, chat("hi")))
        assert house.replicas.session_keys[-1] not in (one, other), "a name of the list goes first"


@pytest.mark.parametrize("header", ["x-session-token", "x-chatter", "mysession", "x-threads", "user-agent"])
async def test_other_headers_name_none(header: str) -> None:
    house = House()
    async with house.client() as client:
        for value in ("one", "two"):
            await ask(client, SentRequest({header: value}, chat("hi")))
    assert len(set(house.replicas.session_keys)) == 1


async def test_claude_codes_greeting_needs_no_key_and_a_list_of_models_may_end_with_a_slash() -> None:
    house = House(settings=make_settings(keys={"alpha": KEY}))
    async with house.client() as client:
        for method in ("HEAD", "GET"):
            greeted = await client.request(method, "/api/hello")
            assert (greeted.status_code, greeted.content) == (200, b"")
        assert (await client.get("/v1/models")).status_code == 401
        key = {"authorization": f"Bearer {KEY}"}
        listed = [(await client.get(path, headers=key)).json() for path in ("/v1/models", "/v1/models/")]
        assert listed[0] == listed[1]


async def test_a_compressed_body_is_refused_by_its_encoding() -> None:
    async with House().client() as client:
        for encoding, status in (("gzip", 415), ("br, gzip", 415), ("identity", 200), ("", 200)):
            headers = {"content-type": "application/json", "content-encoding": encoding}
            response = await client.post("/v1/chat/completions", headers=headers, json=chat("hi"))
            assert response.status_code == status
            if status == 415:
                assert response.json()["error"]["param"] == "content-encoding"
