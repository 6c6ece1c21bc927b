"""Keeps a prompt's beginning as it was the turn before: volatile lines, tools' order, JSON's spelling. Pure.

Clients build their JSON for each request again: the same tool comes with its keys in another order,
`required` and `enum` as sets, 1 as 1.0, other escapes. It is then written as the session's first request
wrote it.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from samovar.configs.json_text import parse_json
from samovar.configs.sections import PrefixSettings
from samovar.router.openai import ChatMessage, ParsedChat, Tool, ToolCall, split_front
from samovar.router.prompt.prompt_parts import DIGEST_BYTES
from samovar.router.prompt.reply_memory import Owner

SETS = frozenset({"required", "enum", "type"})
"""Keys of a JSON Schema whose lists are sets."""
DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""Keys of a JSON Schema whose values are no schemas."""
NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keys of a JSON Schema whose values are objects of schemas: the names in them are no keys of a schema."""
ROW_OVERHEAD_BYTES = 600
TEXT_OVERHEAD_BYTES = 150
ARGUMENTS_CHARS_MIN = 8
"""Shorter arguments of calls have at most one key: they are as they came."""

_Row = tuple[str, bytes]
"""(salt, session's tag)"""


def canonical_json(value: Any) -> str:
    """Return one text for all spellings of a JSON value."""
    if isinstance(value, dict):
        texts = [f"{json.dumps(key)}:{canonical_json(value[key])}" for key in sorted(value)]
        return f"{{{','.join(texts)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(canonical_json, value))}]"
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_MAX:
        value = int(value)
    return json.dumps(value)


EXACT_MAX = float(2**53)
"""Up to here a float is the whole number that it spells."""


def canonical_schema(schema: Any, *, in_order: bool = False) -> str:
    """Return one text for all spellings of a JSON Schema, in which some lists are sets.

    `in_order`: properties in another order are another schema, as an answer that follows it has that order.
    """
    if isinstance(schema, list):
        return f"[{','.join(canonical_schema(one, in_order=in_order) for one in schema)}]"
    if not isinstance(schema, dict):
        return canonical_json(schema)
    texts = []
    for key in sorted(schema):
        value = schema[key]
        if key in NAMES and isinstance(value, dict):
            names = list(value) if in_order and key == "properties" else sorted(value)
            inner = (f"{json.dumps(one)}:{canonical_schema(value[one], in_order=in_order)}" for one in names)
            text = f"{{{','.join(inner)}}}"
        elif key in SETS and isinstance(value, list):
            text = f"[{','.join(sorted(map(canonical_json, value)))}]"
        else:
            text = canonical_json(value) if key in DATA else canonical_schema(value, in_order=in_order)
        texts.append(f"{json.dumps(key)}:{text}")
    return f"{{{','.join(texts)}}}"


def tool_digest(tool: Tool, key: bytes, *, is_promised: bool = False) -> bytes:
    """Return a tool's keyed digest, the same for every spelling of its JSON that means the same.

    `is_promised`: its calls follow its schema.
    """
    parameters = tool.spec["function"].get("parameters")
    told = {name: value for name, value in tool.spec["function"].items() if name != "parameters"}
    is_promised = is_promised or tool.is_strict
    text = f"{canonical_json(told)}{canonical_schema(parameters, in_order=is_promised)}{is_promised:d}"
    return blake2b(text.encode(), key=key, digest_size=DIGEST_BYTES).digest()


class JsonSpellings:
    """LRU memory of how sessions' requests first wrote their tools and calls, compressed; in `bytes_max`.

    Salt and owner as in `ReplyMemory`. Not thread-safe.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes_used = 0
        self._rows: OrderedDict[_Row, tuple[Owner, dict[bytes, bytes]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def spell(self, salt: str, owner: Owner, texts: Sequence[tuple[bytes, str]]) -> list[str]:
        """Return each text as the session wrote it first, given its digest; remember those that are new."""
        row = salt, owner.session
        _, held = self._rows.setdefault(row, (owner, {}))
        self._rows.move_to_end(row)
        self._bytes_used += ROW_OVERHEAD_BYTES if not held else 0
        spelled = []
        for digest, text in texts:
            before = held.get(digest)
            if before is None:
                held[digest] = before = zlib.compress(text.encode("utf-8", "surrogatepass"), 1)
                self._bytes_used += len(before) + TEXT_OVERHEAD_BYTES
                spelled.append(text)
            else:
                spelled.append(zlib.decompress(before).decode("utf-8", "surrogatepass"))
        if not held:
            self._drop(row)
        while self._bytes_used > self._bytes_max:
            self._drop(next(iter(self._rows)))
        return spelled

    def forget(self, tenant: str | None = None, sessions: Collection[bytes] | None = None) -> None:
        """Drop the sessions of `tenant`, only these of it, or (None) all."""
        for row in [row for row, (owner, _) in self._rows.items() if owner.is_of(tenant, sessions)]:
            self._drop(row)

    def _drop(self, row: _Row) -> None:
        _, held = self._rows.pop(row)
        self._bytes_used -= _cost(held)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        assert self._bytes_used == sum(_cost(held) for _, held in self._rows.values())
        assert self._bytes_used <= self._bytes_max or not self._rows
        assert all(owner.session == row[1] for row, (owner, _) in self._rows.items())


def _cost(held: dict[bytes, bytes]) -> int:
    return ROW_OVERHEAD_BYTES + sum(len(text) + TEXT_OVERHEAD_BYTES for text in held.values())


Spell = Callable[[Sequence[tuple[bytes, str]]], list[str]]
"""`JsonSpellings.spell` of a session."""


def as_before(
    request: ParsedChat, digests: Sequence[bytes], spell: Spell, key: bytes
) -> tuple[ParsedChat, bool]:
    """Return the request with its tools and calls written as the session wrote them; whether any differs.

    `digests`: of its tools, which stay the same.
    """
    tools = request.tools
    calls = [
        call
        for message in request.messages
        for call in message.calls
        if len(call.arguments) >= ARGUMENTS_CHARS_MIN
    ]
    if not tools and not calls:
        return request, False
    if request.offer is not None and request.offer.must_call:  # the order of properties is the answer's, too
        digests = [tool_digest(tool, key, is_promised=True) for tool in tools]
    given = [(digest, tool.text) for digest, tool in zip(digests, tools, strict=True)]
    given += [(_call_digest(call, key), call.arguments) for call in calls]
    spelled = spell(given)
    if all(text == now for (_, text), now in zip(given, spelled, strict=True)):
        return request, False
    offer = request.offer
    if offer is not None:
        pairs = zip(tools, spelled, strict=False)
        offer = replace(offer, tools=tuple(_spelled(tool, text) for tool, text in pairs))
    of = dict(zip((call.arguments for call in calls), spelled[len(tools) :], strict=True))
    messages = tuple(
        replace(
            one,
            calls=tuple(
                replace(call, arguments=of.get(call.arguments, call.arguments)) for call in one.calls
            ),
        )
        for one in request.messages
    )
    return replace(request, offer=offer, messages=messages), True


def _call_digest(call: ToolCall, key: bytes) -> bytes:
    try:
        text = canonical_json(parse_json(call.arguments))
    except RecursionError:  # deeper than Python follows: it counts as it came
        text = call.arguments
    return blake2b(text.encode(), key=key, digest_size=DIGEST_BYTES).digest()


def _spelled(tool: Tool, text: str) -> Tool:
    return tool if text == tool.text else replace(tool, text=text, spec=parse_json(text))


def in_order(request: ParsedChat, tools: Sequence[bytes], before: Sequence[bytes]) -> ParsedChat:
    """Return the request with its tools, of these digests, in the order that they had before."""
    assert request.offer is not None
    of = dict(zip(tools, request.offer.tools, strict=True))
    return replace(request, offer=replace(request.offer, tools=tuple(of[digest] for digest in before)))


def without_volatile(request: ParsedChat, settings: PrefixSettings) -> tuple[ParsedChat, tuple[str, ...]]:
    """Return the request with known volatile lines out of its prefix, and what was done, in words."""
    first = request.messages[0]
    if settings.volatile == "keep" or first.role != "system":
        return request, ()
    front = split_front(first, settings.volatile_lines)
    if not front.names:
        return request, ()
    messages = [ChatMessage("system", front.rest), *request.messages[1:]]
    if settings.volatile == "behind":
        last = sum(1 for _ in takewhile(lambda message: message.role == "system", messages)) - 1
        messages[last] = ChatMessage("system", "\n".join([messages[last].content, *front.lines]))
    done = "dropped" if settings.volatile == "drop" else "moved"
    return replace(request, messages=tuple(messages)), tuple(f"{done} {name}" for name in front.names)
