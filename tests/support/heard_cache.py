"""What a router believes of a cache, learned from its KV events alone: written from vLLM's public schema.

Strict where a router is not: a block is stored where it is not yet, and removed from where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

STORED = {
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name"),
    *("medium", "group_idx", "locality", "ownership", "extra_keys"),
}
REMOVED = {"type", "block_hashes", "medium", "group_idx", "locality", "ownership"}


class Believed(NamedTuple):
    parent: int | None
    token_ids: tuple[int, ...]
    salt: str | None


@dataclass
class HeardCache:
    """Blocks by place (medium, locality), as messages tell them.

    `is_late`: came after an erasure, whose blocks were never stored as far as it knows, and are removed.
    """

    is_late: bool = False
    next_number: int = 0
    blocks: dict[tuple[str, str | None], dict[int, Believed]] = field(default_factory=dict)

    def hear(self, number: int, payload: bytes) -> None:
        assert number == self.next_number, "a message is missing, or twice there"
        self.next_number += 1
        unix_s, events, rank = msgpack.unpackb(payload)
        assert unix_s > 0
        assert rank == 0
        for event in events:
            self.take(event)

    def hear_all(self, messages: Iterable[tuple[int, bytes]]) -> None:
        for number, payload in messages:
            self.hear(number, payload)

    def take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            assert event.keys() == {"type"}
            self.blocks.clear()
            return
        place = event["medium"], event.get("locality")
        there = self.blocks.setdefault(place, {})
        if event["type"] == "BlockRemoved":
            assert event.keys() <= REMOVED
            for one in event["block_hashes"]:
                assert one in there or self.is_late, "removed from where it is not"
                there.pop(one, None)
            return
        assert event["type"] == "BlockStored"
        assert event.keys() <= STORED
        size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
        salts = event.get("extra_keys") or [None] * len(event["block_hashes"])
        assert len(tokens) in (0, size * len(event["block_hashes"]))
        assert len(salts) == len(event["block_hashes"])
        for at, one in enumerate(event["block_hashes"]):
            assert one not in there, "told twice"
            salt = None if salts[at] is None else salts[at][0]
            there[one] = Believed(parent, tuple(tokens[at * size : (at + 1) * size]), salt)
            parent = one

    def at(self, medium: str, locality: str | None = "LOCAL") -> set[int]:
        """The hashes that are believed to be at a place."""
        return set(self.blocks.get((medium, locality), ()))
