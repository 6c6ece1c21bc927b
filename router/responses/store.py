"""Keeps responses for `previous_response_id` and GET /v1/responses/{id}, bounded for each tenant. Pure.

Their items are listed as GET /v1/responses/{id}/input_items has them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from samovar.configs.json_text import parse_json
from samovar.router.prompt import ForgetCount

# Python's cost of an entry besides its texts: key, tag, object, dict slots.
ENTRY_OVERHEAD_BYTES = 700
ITEM_OVERHEAD_BYTES = 200

Items = Mapping[str, dict[str, Any]]
"""Of a response's output, by id."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation that it ends, each as JSON; `session`: the session's tag.

    `messages`: those of a chat request, without `instructions`, which hold for one response only.
    `items`: ids of its output, by which later requests name it. `began_unix_s`: when its request came; 0: not
    known here.
    """

    response: bytes
    messages: bytes
    session: bytes
    items: tuple[str, ...] = ()
    began_unix_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that are accounted for it."""
        items = sum(len(item) + ITEM_OVERHEAD_BYTES for item in self.items)
        return len(self.response) + len(self.messages) + items + ENTRY_OVERHEAD_BYTES


class ResponseStore:
    """Responses by tenant and id: at most `count_max` and `bytes_max` of each tenant. Not thread-safe."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._of: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._item_of: dict[tuple[str, str], str] = {}  # (tenant, item's id) -> response's id
        self._bytes_of: dict[str, int] = {}
        self._forgotten = ForgetCount()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    @property
    def forgets(self) -> int:
        """Return how often responses were forgotten on purpose: see `put`."""
        return self._forgotten.count

    def put(self, tenant: str, response_id: str, stored: StoredResponse, *, forgets: int) -> bool:
        """Keep a response; return whether it is kept.

        Not one that alone is over the bounds, nor one whose session was forgotten since `forgets` was read,
        when its request came: what was cleared in between stays cleared. May drop the least recently used.
        """
        is_forgotten = self._forgotten.since(forgets, tenant, stored.session)
        if is_forgotten or stored.nbytes > self._bytes_max or not self._count_max:
            return False
        self.delete(tenant, response_id)
        held = self._of.setdefault(tenant, OrderedDict())
        held[response_id] = stored
        self._item_of.update(((tenant, item), response_id) for item in stored.items)
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + stored.nbytes
        while len(held) > self._count_max or self._bytes_of[tenant] > self._bytes_max:
            self.delete(tenant, next(iter(held)))
        return True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a tenant's response, which is then its most recently used."""
        held = self._of.get(tenant)
        if held is None or response_id not in held:
            return None
        held.move_to_end(response_id)
        return held[response_id]

    def item(self, tenant: str, item_id: str, read: dict[str, Items]) -> dict[str, Any] | None:
        """Return an item of the output of one of a tenant's responses.

        `read`: the items of responses that were read for the same request, which may name a thousand of one.
        """
        response_id = self._item_of.get((tenant, item_id))
        stored = None if response_id is None else self.get(tenant, response_id)
        if response_id is None or stored is None:
            return None
        if response_id not in read:
            read[response_id] = {item["id"]: item for item in parse_json(stored.response)["output"]}
        return read[response_id][item_id]

    def delete(self, tenant: str, response_id: str) -> bool:
        """Drop a tenant's response; return whether there was one."""
        held = self._of.get(tenant)
        stored = None if held is None else held.pop(response_id, None)
        if held is None or stored is None:
            return False
        self._bytes_of[tenant] -= stored.nbytes
        for item in stored.items:
            del self._item_of[tenant, item]
        return True

    def forget(self, tenant: str, sessions: Collection[bytes] | None) -> int:
        """Drop a tenant's responses, of these sessions only, or (None) all; return how many."""
        self._forgotten.add(tenant, sessions)
        doomed = [
            response_id
            for response_id, stored in self._of.get(tenant, {}).items()
            if sessions is None or stored.session in sessions
        ]
        for response_id in doomed:
            self.delete(tenant, response_id)
        return len(doomed)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        self._forgotten.check_integrity()
        for tenant, held in self._of.items():
            assert len(held) <= self._count_max
            assert self._bytes_of[tenant] == sum(stored.nbytes for stored in held.values())
            assert self._bytes_of[tenant] <= self._bytes_max
        items = [
            (tenant, item) for tenant, held in self._of.items() for one in held.values() for item in one.items
        ]
        assert sorted(items) == sorted(self._item_of)


Json = dict[str, Any]


def input_items(response_id: str, stored: StoredResponse) -> list[Json]:
    """Return the items before a response's own output, oldest first; those of earlier responses, too."""
    items: list[Json] = []

    def add(prefix: str, **item: Any) -> None:
        digest = hashlib.sha256(f"{response_id}/input/{len(items)}".encode()).hexdigest()[:32]
        items.append({"id": f"{prefix}_{digest}", **item, "status": "completed"})

    for message in parse_json(stored.messages)["messages"][:-1]:  # the last is the answer
        role, content = message["role"], message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        if role == "tool":
            call_id = message.get("tool_call_id", "")
            add("fco", type="function_call_output", call_id=call_id, output="".join(texts))
            continue
        kind = "output_text" if role == "assistant" else "input_text"
        parts = [{"type": kind, "text": text} for text in texts if text or role != "assistant"]
        if parts:
            add("msg", type="message", role=role, content=parts)
        for call in message.get("tool_calls", ()):
            function = call["function"]
            add(
                "fc",
                type="function_call",
                call_id=call.get("id", ""),
                name=function["name"],
                arguments=function["arguments"],
            )
    return items
