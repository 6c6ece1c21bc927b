"""The truth: what K and V of a tenant's tokens are, by the tokens alone, and what each conversation says."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from samovar.cache_tiers.blocks import record as codec
from samovar.cache_tiers.blocks.extent import ROOT, BlockShape, Bytes, ExtentHeader, Placement, block_key

SHAPE = BlockShape(layers=2, layer_bytes=256, block_tokens=4)
TAG_BYTES = 16

Tokens = tuple[int, ...]


def tag(*names: object) -> bytes:
    return hashlib.sha256(repr(names).encode()).digest()[:TAG_BYTES]


def namespace_of(tenant: bytes, model: str = "") -> bytes:
    return hashlib.sha256(b"a model for " + tenant + model.encode()).digest()


def kv(tenant: bytes, prefix: Tokens, model: str = "") -> bytes:
    """K and V of a prefix's last block: a function of tenant, model, and every token up to its end."""
    said = tenant + model.encode() + np.asarray(prefix, dtype=np.int64).tobytes()
    return hashlib.shake_128(said).digest(SHAPE.block_bytes)


@dataclass(frozen=True)
class Extent:
    """What one turn has added, sealed as a replica seals it."""

    header: ExtentHeader
    record: Bytes
    payload: bytes
    chain: bytes
    """The keys of all blocks up to its end."""

    @property
    def first(self) -> int:
        return self.header.first_block

    @property
    def end(self) -> int:
        return self.first + self.header.blocks

    def kv_of(self, offset: int, blocks: int) -> bytes:
        return self.payload[offset * SHAPE.block_bytes : (offset + blocks) * SHAPE.block_bytes]


@dataclass
class Conversation:
    """One session between two erasures: what it says next depends on its number, so that no two say the same.

    `turns_max`: extents that it may have.
    """

    tenant: bytes
    session: bytes
    number: int
    sizes: tuple[int, ...]
    placement: Placement
    turns: int = 0
    looking: int = 0
    """Lookups under way: an erasure that is wished after them is answered after them."""
    is_closed: bool = False
    erased_s: float | None = None
    """When its erasure was acknowledged: from then on it is nowhere."""
    away: frozenset[str] = frozenset()
    """Nodes that had left by then. One that returns with its disk hears of it in the bucket."""
    goes_on: bool = False
    """A door has said that its erasure is not done, and goes on by itself."""
    made: dict[int, Extent] = field(default_factory=dict)
    model: str = ""
    others: dict[str, Conversation] = field(default_factory=dict)
    """What it is for other models, which have seen the same tokens."""

    @property
    def namespace(self) -> bytes:
        return namespace_of(self.tenant, self.model)

    def of(self, model: str) -> Conversation:
        """Return what it is for this model: the same turns, and other K and V."""
        if model == self.model:
            return self
        if model not in self.others:
            whose = (self.tenant, self.session, self.number, self.sizes, self.placement)
            self.others[model] = Conversation(*whose, model=model)
        other = self.others[model]
        other.turns = self.turns = max(self.turns, other.turns)
        return other

    @property
    def name(self) -> str:
        return f"{self.session.hex()[:4]}/{self.number}"

    def extent(self, turn: int) -> Extent:
        if turn not in self.made:
            self.made[turn] = self._sealed(turn)
        return self.made[turn]

    def chain(self, turns: int) -> bytes:
        return self.extent(turns - 1).chain if turns else b""

    def _sealed(self, turn: int) -> Extent:
        first, blocks = sum(self.sizes[:turn]), self.sizes[turn]
        before = self.chain(turn)
        parent = before[-len(ROOT) :] if before else ROOT
        tokens = _tokens(self.tenant, self.session, self.number, (first + blocks) * SHAPE.block_tokens)
        keys: list[bytes] = []
        payload = b""
        for block in range(first, first + blocks):
            at = block * SHAPE.block_tokens
            end = at + SHAPE.block_tokens
            keys.append(block_key(self.namespace, keys[-1] if keys else parent, tokens[at:end]))
            payload += kv(self.tenant, tokens[:end], self.model)
        record = np.zeros(codec.header_bytes(blocks, SHAPE.layers) + len(payload), dtype=np.uint8)
        record[-len(payload) :] = np.frombuffer(payload, dtype=np.uint8)
        header = codec.seal(
            record,
            namespace=self.namespace,
            tenant=self.tenant,
            session=self.session,
            shape=SHAPE,
            parent=parent,
            first_block=first,
            keys=keys,
            token_counts=[SHAPE.block_tokens] * blocks,
            placement=self.placement,
            created_unix_s=1.0,
        )
        return Extent(header, record, payload, before + b"".join(keys))


@lru_cache(maxsize=512)
def _tokens(tenant: bytes, session: bytes, number: int, count: int) -> Tokens:
    # The tenant has no part in it: two tenants that say the same have different K and V all the same.
    said = hashlib.shake_128(repr((session[:1], number)).encode()).digest(2 * count)
    return tuple(int(one) for one in np.frombuffer(said, dtype=np.uint16))
