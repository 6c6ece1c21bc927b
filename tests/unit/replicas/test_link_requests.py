"""Requests over links come out as they went in, nothing else is taken for one, and places are counted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.cache_tiers.blocks import Placement
from samovar.replicas.messages import (
    Admitted,
    Delta,
    GenerateRequest,
    Grammar,
    Keep,
    Receipt,
    ReplyTo,
    Resume,
    Route,
    SamplingParams,
    TurnContext,
)
from samovar.replicas.reply import ReplyReading
from samovar.replicas.reply.formats import format_named
from samovar.replicas.serving.served import (
    BadRequestBytes,
    Places,
    pack_request,
    request_form,
    unpack_request,
)
from tests.support.router.router_harness import until

KEEP = Keep(
    b"r" * 16, b"\xff\x00", 3, before=(Admitted("r", 1, 0.5, Receipt({"cpu": 1})), Delta(0, "x", (1,)))
)
FULL = GenerateRequest(
    "é \u2028",
    [0, 1, 2**32 - 1],
    SamplingParams(
        max_tokens=3,
        stop=("a", "naïve"),
        stop_token_ids=(1, 2),
        logit_bias=((3, -1.5),),
        seed=2**63 - 1,
        grammar=Grammar("regex", "a+", "guided_regex"),
    ),
    n=2,
    salt=b"\x00\xff",
    tenant=b"t" * 16,
    session=b"\xfe" * 16,
    placement=Placement(write_behind=("nvme", "s3"), ttl_s=1.5),
    model="m",
    resume=Resume(1, (1, 2)),
    route=Route("h", "n", 3, ("x",), ("y", "z"), "t", "d", "o"),
    turn=TurnContext("tool", "agent"),
    trace="00-1",
    reply_to=ReplyTo("127.0.0.1", 1, "0" * 64),
    keep=KEEP,
    stores_all=True,
)


def packed(fields: Any, ids: Any = b"", said: Any = ()) -> bytes:
    data: bytes = msgpack.packb([fields, ids, list(said)])
    return data


def fields_of(request: GenerateRequest) -> dict[str, Any]:
    fields: dict[str, Any] = msgpack.unpackb(pack_request(request))[0]
    return fields


def test_a_request_comes_out_as_it_went_in() -> None:
    assert unpack_request(pack_request(FULL)) == FULL
    least = GenerateRequest("r", [], SamplingParams())
    assert unpack_request(pack_request(least)) == least
    half = replace(FULL, request_id="half of a pair: \ud83d")
    assert unpack_request(pack_request(half)) == half
    assert len(pack_request(least)) < 100  # what is as always is not said


@pytest.mark.parametrize("name", [None, "hermes", "llama3_json", "mistral", "deepseek_v3"])
def test_every_way_to_read_an_answer_crosses(name: str | None) -> None:
    reading = ReplyReading(format_named(name, None), "<think>", ("f", "g"), "{}", is_parallel=False)
    request = replace(FULL, reading=reading)
    assert unpack_request(pack_request(request)) == request


@given(st.builds(SamplingParams), st.lists(st.integers(0, 2**32 - 1)), st.text(), st.binary(max_size=32))
def test_whatever_is_asked_crosses(
    sampling: SamplingParams, token_ids: list[int], name: str, salt: bytes
) -> None:
    request = GenerateRequest(name, token_ids, sampling, salt=salt)
    found = unpack_request(pack_request(request))
    # NaN is not equal to itself.
    assert repr(found) == repr(request)


@pytest.mark.parametrize("ids", [[-1], [2**32], ["1"], [None]])
def test_what_is_no_token_is_not_sent(ids: list[Any]) -> None:
    with pytest.raises(ValueError, match="no plain data"):
        pack_request(replace(FULL, prompt_token_ids=ids))


@pytest.mark.parametrize(
    "data",
    [
        None,
        7,
        "text",
        b"",
        b"\xc1",
        msgpack.packb({}),
        msgpack.packb([{}, b""]),
        packed({}),
        packed([]),
        packed(fields_of(FULL), b"\x00"),  # not whole tokens
        packed(fields_of(FULL), "text"),
        packed({**fields_of(FULL), "n": "many"}),
        packed({**fields_of(FULL), "n": None}),
        packed({**fields_of(FULL), "sampling": {"max_tokens": "x"}}),
        packed({**fields_of(FULL), "route": {"avoid": 3}}),
        packed({**fields_of(FULL), "reply_to": ["127.0.0.1"]}),
        packed({**fields_of(FULL), "placement": {"first": "tape"}}),
        packed({**fields_of(FULL), "request_id": {"a": 1}}),
        packed({**fields_of(FULL), "keep": None}, said=[["failed", {"message": "x"}]]),
        packed(fields_of(FULL), said=[["unknown", {}]]),
        packed(fields_of(FULL), said=[[0, 1, 2, 3]]),
        b"\x91" * 100_000,
        pack_request(FULL)[:-1],
        pack_request(FULL) + b"\x00",
    ],
)
def test_what_is_no_request_is_refused(data: Any) -> None:
    with pytest.raises(BadRequestBytes):
        unpack_request(data)


@given(st.binary(max_size=64))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    with pytest.raises(BadRequestBytes):
        unpack_request(data)


def test_a_refusal_quotes_nothing_of_what_was_asked() -> None:
    with pytest.raises(BadRequestBytes) as refused:
        unpack_request(packed({**fields_of(FULL), "n": "a secret"}))
    assert "a secret" not in str(refused.value)
    assert "n" in str(refused.value)
    assert refused.value.__cause__ is None


def test_every_field_of_a_request_crosses() -> None:
    """A field that is added later is in the form: none is named there."""
    assert set(fields_of(FULL)) >= {"request_id", "sampling", "route", "keep", "reply_to", "resume"}
    assert request_form().validate_python(fields_of(FULL)).tenant == FULL.tenant


async def test_places_are_given_in_turn_and_calls_over_links_take_none_that_is_waited_for() -> None:
    places, order = Places(2, 2), []

    async def ask(name: str) -> None:
        await places.take()
        order.append(name)

    assert places.take_now()
    assert places.take_now()
    assert not places.take_now()
    first, second = asyncio.create_task(ask("first")), asyncio.create_task(ask("second"))
    await asyncio.sleep(0)
    assert not order
    third = asyncio.create_task(ask("third"))  # more than may wait: the engine refuses it
    await until(lambda: order == ["third"])
    assert places.taken == 3
    places.leave()
    assert places.taken == 2
    places.leave()
    await until(lambda: order == ["third", "first"])
    assert not places.take_now()
    places.leave()
    await until(lambda: order == ["third", "first", "second"])
    for _ in range(2):
        places.leave()
    assert places.taken == 0
    await asyncio.gather(first, second, third)


@pytest.mark.parametrize("has_turn", [False, True])
async def test_who_gives_up_waiting_keeps_no_place(has_turn: bool) -> None:
    places = Places(1, 4)
    assert places.take_now()
    waiting = asyncio.create_task(places.take())
    await asyncio.sleep(0)
    if has_turn:
        places.leave()
        assert places.taken == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not has_turn:
        places.leave()
    assert places.taken == 0
    assert places.take_now()
