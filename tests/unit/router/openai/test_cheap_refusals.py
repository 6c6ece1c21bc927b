"""A small body costs little, whatever is in it: memory and steps grow with its size, and no faster."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from samovar.configs.json_text import parse_json
from samovar.configs.settings import LimitsSettings
from samovar.router.openai import InvalidValue, RequestParser, place_here
from samovar.router.openai.messages import ChatMessage, split_front
from samovar.router.responses import store as responses
from samovar.router.responses.store import ResponseStore, StoredResponse

MIB = 1 << 20
pytestmark = pytest.mark.guarantee("F32")


def refused(body: bytes) -> InvalidValue:
    with pytest.raises(InvalidValue) as error:
        RequestParser(LimitsSettings(), context_tokens_max=64).chat(body)
    return error.value


def test_f32_a_long_key_above_many_items_takes_no_more_memory_than_the_body() -> None:
    """Where half a character is said to be is told of that place alone."""
    body = b'{"a": "\\ud800", "' + b"k" * 65536 + b'": [' + b"1," * 4096 + b"1]}"
    tracemalloc.start()
    try:
        error = refused(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.param == "a"
    assert most < 8 * MIB, "all items' places, each behind the key, are 256 MiB"


def test_f32_a_field_below_a_long_key_is_named_shortly() -> None:
    error = refused(b'{"' + b"k" * 65536 + b'": [1, {"b": "\\ud800"}]}')
    assert error.param == "k" * 64 + "[1].b"
    assert len(error.message) < 500


def longest(param: str, places: Mapping[str, str]) -> str:
    """What `place_here` has to say, looked for in all places."""
    fitting = (place for place in places if param == place or param.startswith((f"{place}.", f"{place}[")))
    place = max(fitting, key=len, default=None)
    return param if place is None else places[place] + param[len(place) :]


class Uncounted(dict[str, str]):
    """Places that may be asked for, and not gone through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("each name of a field goes through all places of the body")


def test_f32_a_translated_fields_name_is_looked_up() -> None:
    rng = random.Random(1)

    def name() -> str:
        parts = [rng.choice(("messages", "a", "b", "[0]", "[1]")) for _ in range(rng.randrange(1, 5))]
        return ".".join(parts).replace(".[", "[")

    for _ in range(3000):
        places = {name(): f"here{number}" for number in range(rng.randrange(6))}
        param = name()
        assert place_here(param, Uncounted(places)) == longest(param, places)


class Counted(tuple[int, ...]):
    """Counts how many of its items were looked at."""

    looked = 0

    def __getitem__(self, at: Any) -> Any:
        Counted.looked += 1
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[int]:
        for item in super().__iter__():
            Counted.looked += 1
            yield item


def test_f32_many_parts_of_a_system_message_are_gone_through_once() -> None:
    part, parts = "x-volatile:\n", 2000
    cuts = Counted(len(part) * number for number in range(1, parts))
    Counted.looked = 0
    front = split_front(ChatMessage("system", part * parts, cuts), ("x-volatile",))
    assert len(front.lines) == parts
    assert Counted.looked < 40 * parts


def test_f32_a_thousand_items_of_one_response_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(text: bytes) -> Any:
        read.append(len(text))
        return parse_json(text)

    monkeypatch.setattr(responses, "parse_json", counted)
    ids = tuple(f"i{number}" for number in range(50))
    store = ResponseStore(3, MIB)
    output = ",".join(f'{{"id": "{one}"}}' for one in ids)
    stored = StoredResponse(f'{{"output": [{output}]}}'.encode(), b"{}", bytes(16), ids)
    assert store.put("tea", "r", stored, forgets=store.forgets)
    of_request: dict[str, Any] = {}
    assert [store.item("tea", one, of_request) for one in ids] == [{"id": one} for one in ids]
    assert len(read) == 1


@pytest.mark.parametrize("results_first", [False, True])
def test_f32_results_find_their_calls_in_the_order_of_the_calls(results_first: bool) -> None:
    """Results that name no call: the first open one, of that tool's if they name a tool."""
    parse: Callable[[bytes], Any] = RequestParser(LimitsSettings(), context_tokens_max=4096).chat
    calls = ",".join(
        f'{{"id": "c{at}", "type": "function", "function": {{"name": "{name}", "arguments": "{{}}"}}}}'
        for at, name in enumerate(("tea", "milk", "tea"))
    )
    named = '{"role": "function", "name": "tea", "content": "%d"}'
    plain = '{"role": "tool", "tool_call_id": "%s", "content": "%d"}'
    results = [named % 0, named % 1, plain % ("unknown", 2)]
    if results_first:
        results = [plain % ("unknown", 0), named % 1, plain % ("c1", 2)]
    said = f'{{"role": "user", "content": "hi"}}, {{"role": "assistant", "tool_calls": [{calls}]}}'
    chat = parse(f'{{"model": "m", "messages": [{said}, {", ".join(results)}]}}'.encode())
    found = [message.call_id for message in chat.messages if message.role == "tool"]
    assert found == (["c0", "c2", "c1"])
