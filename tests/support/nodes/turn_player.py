"""Plays the turns of a trace to a node, as a replica without a pool does: lookup, store, end of the turn."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from samovar.cache_tiers.blocks import (
    CPU,
    ROOT,
    BlockShape,
    Bytes,
    ExtentHeader,
    Placement,
    header_bytes,
    marks_of,
)
from samovar.cache_tiers.blocks import record as codec
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.messages import Lookup, LookupResult, StoreRequest, TurnEnded
from samovar.cache_tiers.policy.shadow import ShadowedCopy
from samovar.cluster.plan.traces.replay import events
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import PolicyName, PolicySettings, TierSettings
from tests.support.nodes.node_harness import NAMESPACE, TENANT, Bench, bench

IN_MEMORY = Placement(CPU.name, (), CPU.name, min_ttl_s=0.0)


@cache
def key_of(block: int) -> bytes:
    """Stand-in for a block's key: as random as a real one."""
    return hashlib.sha256(b"%d" % block).digest()


@dataclass(frozen=True)
class StoredRun:
    """An extent, as far as the shadow looks at it."""

    keys: bytes
    placement: Placement = IN_MEMORY
    shape: BlockShape = BlockShape(1, 1024, 16)  # noqa: RUF009 - frozen
    last_used_s: float = 0.0
    copies: Mapping[str, ShadowedCopy] = field(default_factory=dict)


def tag_of(number: int) -> bytes:
    return hashlib.sha256(b"session %d" % number).digest()[:16]


def found_blocks(found: LookupResult) -> int:
    """Blocks of a prompt from the first on without a gap."""
    end = 0
    for span in found.spans:
        if span.first > end:
            break
        end = span.first + span.blocks
    return end


@dataclass
class TurnPlayer:
    """A node with main memory for `room_blocks`, without a pool before it. `found`: blocks of all prompts."""

    policy: PolicyName
    shape: BlockShape
    room_blocks: int
    placement: Placement = IN_MEMORY
    found: int = 0
    node: Bench = field(init=False)

    def __post_init__(self) -> None:
        room = self.room_blocks * self.shape.block_bytes
        settings = TierSettings(policy=PolicySettings(name=self.policy))
        self.node = bench([HeapTier(room)], bytes_max=room, settings=settings)

    def play(self, turns: Sequence[TraceTurn]) -> None:
        """Each turn is over when it begins: a replica computes what it did not find, and stores it."""
        for event in events(turns, takes_time=False):
            if event.is_end:
                continue
            self.node.clock.now_s = 1000.0 + event.at_s
            keys = [key_of(block) for block in event.turn.blocks]
            found = self.begin(keys, tag_of(event.turn.key))
            self.found += found_blocks(found)
            self.end(event.turn, keys, found)

    def begin(self, keys: Sequence[bytes], session: bytes) -> LookupResult:
        return self.node.node.lookup(Lookup(NAMESPACE, b"".join(keys), TENANT, session, starts_turn=True))

    def end(self, turn: TraceTurn, keys: Sequence[bytes], found: LookupResult) -> None:
        node, session = self.node.node, tag_of(turn.key)
        node.resumption.work()
        self.store(keys, session, found)
        node.resumption.turn_over(
            TurnEnded(
                TENANT,
                session,
                1.0,
                turn.input_tokens,
                turn.output_tokens,
                marks_of(keys),
                self.shape.block_tokens,
                turn.stop,
                turn.role,
                turn.tool,
                turn.profile,
            )
        )
        node.tick()

    def store(self, keys: Sequence[bytes], session: bytes, found: LookupResult) -> None:
        first = found_blocks(found)
        if first == len(keys):
            return
        header, record = self._sealed(keys, first, session)
        ticket = self.node.outbox.put(record)
        assert ticket is not None
        offer = StoreRequest(ticket, header, record.nbytes, found.incarnation, found.clear_seq)
        if self.node.node.offer([offer], self.node.outbox).outcomes[0] != "taken":
            self.node.outbox.drop(ticket)
        while self.node.node.work():
            pass

    def _sealed(self, keys: Sequence[bytes], first: int, session: bytes) -> tuple[ExtentHeader, Bytes]:
        new = list(keys[first:])
        nbytes = header_bytes(len(new), self.shape.layers) + len(new) * self.shape.block_bytes
        record = np.zeros(nbytes, dtype=np.uint8)
        header = codec.seal(
            record,
            namespace=NAMESPACE,
            tenant=TENANT,
            session=session,
            shape=self.shape,
            parent=keys[first - 1] if first else ROOT,
            first_block=first,
            keys=new,
            token_counts=[self.shape.block_tokens] * len(new),
            placement=self.placement,
            created_unix_s=1.0,
        )
        return header, record
