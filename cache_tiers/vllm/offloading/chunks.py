"""Chunks of vLLM's main memory in Samovar's tiers: found, stored and loaded, each checked when it arrives.

A chunk has a key of vLLM's, which commits to the prefix, and a place in its request's chain. No vLLM.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samovar.cache_tiers.blocks import (
    KEY_BYTES,
    BadRecord,
    BlockShape,
    Bytes,
    Clear,
    Placement,
    TierError,
    header_bytes,
    namespace_digest,
    record_bytes,
    seal,
    tenant_tag,
)
from samovar.cache_tiers.media import MemoryFile, SharedRecord
from samovar.cache_tiers.messages import (
    BadReport,
    BlockRange,
    FetchFailed,
    LoadReport,
    Lookup,
    LookupResult,
)
from samovar.cache_tiers.socket.client import SocketLink
from samovar.cache_tiers.socket.messages import Offer
from samovar.cache_tiers.vllm.messages import EXTENT_BYTES_MAX, ConnectorOptions
from samovar.cache_tiers.vllm.scheduler import fetch_of

logger = logging.getLogger("vllm.samovar")

NOWHERE = bytes(KEY_BYTES)
"""Stands in a lookup's chain where nothing is asked for: no block has this key."""
PLACES_MAX = 65536
"""Chunks of one chain."""


@dataclass(frozen=True, slots=True)
class HostChunk:
    """`key`: vLLM's; `group`: of layers; `place`: in the request's chain of that group; `tokens`: in it."""

    key: bytes
    group: int
    place: int
    tokens: int


class ChunkStore:
    """Calls block: they run on threads of the tier's. Thread-safe.

    `link`, `ask`: to the node; a request waits for what `ask` asks. `rows`: u8
    `[slots, chunk bytes]`, vLLM's main memory. `namespace`: of the model as it runs.
    """

    def __init__(
        self,
        link: SocketLink,
        ask: SocketLink,
        rows: Bytes,
        namespace: bytes,
        options: ConnectorOptions,
    ) -> None:
        self._link = link
        self._ask = ask
        self._rows = rows
        self._namespace = namespace
        self._tenant = tenant_tag(options.secret.encode(), options.tenant)
        self._chunk_bytes = int(rows.shape[1])
        self._load_s_max = options.load_s_max

    def held(self, chunks: Sequence[HostChunk]) -> list[bool]:
        """Return of each chunk whether a tier has it."""
        found: set[HostChunk] = set()
        for group, some in _by_group(chunks).items():
            for span, wanted in self._spans(self._ask, group, some):
                found.update(wanted[place] for place in range(span.first, span.first + span.blocks))
        return [chunk in found for chunk in chunks]

    def load(self, chunks: Mapping[HostChunk, int]) -> list[HostChunk]:
        """Load chunks, each into its slot; return those that are there now, and are what they should be."""
        loaded: list[HostChunk] = []
        for group, some in _by_group(list(chunks)).items():
            for span, wanted in self._spans(self._link, group, some):
                loaded += self._load_span(group, span, wanted, chunks)
        return loaded

    def store(self, chunks: Mapping[HostChunk, int]) -> bool:
        """Store what no tier has yet of chunks in their slots; return whether the tiers have all of them."""
        is_whole = True
        for group, some in _by_group(list(chunks)).items():
            found = self._look(self._link, group, some)
            if found is None:
                return False
            held = {place for span in found.spans for place in range(span.first, span.first + span.blocks)}
            for run in _runs([one for one in some if one.place not in held], self._chunk_bytes):
                try:
                    record = self._record(group, run, [chunks[one] for one in run])
                except TierError as error:
                    logger.info("samovar: not stored: %s", error)
                    return False
                offer = Offer(record.nbytes, found.incarnation, found.clear_seq)
                (outcome,) = self._link.offer([(offer, record)])
                is_whole &= outcome in ("taken", "held")
        return is_whole

    def clear(self, within_s: float) -> bool:
        """Forget what this tenant has in any tier; return whether all of it is gone for sure."""
        try:
            cleared = self._link.clear(Clear(self._tenant), within_s)
        except TimeoutError:
            return False
        return cleared.is_noted and not cleared.unreachable

    def _spans(
        self, link: SocketLink, group: int, some: Sequence[HostChunk]
    ) -> list[tuple[BlockRange, dict[int, HostChunk]]]:
        found = self._look(link, group, some)
        wanted = {one.place: one for one in some}
        return [] if found is None else [(span, wanted) for span in found.spans]

    def _look(self, link: SocketLink, group: int, some: Sequence[HostChunk]) -> LookupResult | None:
        keys = [NOWHERE] * (1 + max(one.place for one in some))
        for one in some:
            keys[one.place] = _key_of(one)
        session = _key_of(some[0])[: len(self._tenant)]
        return link.lookup(Lookup(self._of_group(group), b"".join(keys), self._tenant, session))

    def _shape(self, chunk: HostChunk) -> BlockShape:
        return BlockShape(1, self._chunk_bytes, chunk.tokens)

    def _of_group(self, group: int) -> bytes:
        return namespace_digest(self._namespace, group.to_bytes(4, "little"))

    def _load_span(
        self, group: int, span: BlockRange, wanted: Mapping[int, HostChunk], slots: Mapping[HostChunk, int]
    ) -> list[HostChunk]:
        namespace, began_s = self._of_group(group), time.monotonic()
        some = [wanted[place] for place in range(span.first, span.first + span.blocks)]
        reply = self._link.fetch(fetch_of(namespace, span, self._load_s_max))
        if isinstance(reply, FetchFailed):
            return []
        tier, kind, keys = reply.found.tier or span.tier, "checksum", [_key_of(one) for one in some]
        try:
            payload, good = reply.checked(namespace, self._shape(some[0]), span.offset, span.first, keys)
        except BadRecord as error:
            good, kind = 0, error.kind
        for number, one in enumerate(some[:good]):
            self._rows[slots[one]] = payload[number * self._chunk_bytes : (number + 1) * self._chunk_bytes]
        if good < span.blocks:
            logger.warning("samovar: a record from %s is bad (%s): its blocks are computed", tier, kind)
            self._link.report([BadReport(namespace, span.tenant, span.extent_id, tier, kind)], [])
        else:
            self._link.report([], [LoadReport(tier, payload.nbytes, time.monotonic() - began_s)])
        return some[:good]

    def _record(self, group: int, run: Sequence[HostChunk], slots: Sequence[int]) -> SharedRecord:
        """Copy chunks out of their slots and seal them. Raises `TierError`."""
        shape = self._shape(run[0])
        file = MemoryFile(record_bytes(len(run), shape))
        start = header_bytes(len(run), 1)
        payload = file.data[start:].reshape(len(run), self._chunk_bytes)
        for row, slot in zip(payload, slots, strict=True):
            row[:] = self._rows[slot]
        del payload, row
        keys = [_key_of(one) for one in run]
        seal(
            file.data,
            namespace=self._of_group(group),
            tenant=self._tenant,
            session=keys[0][: len(self._tenant)],
            shape=shape,
            parent=_parent_of(run[0]),
            first_block=run[0].place,
            keys=keys,
            token_counts=[shape.block_tokens] * len(run),
            placement=Placement(),
            created_unix_s=time.time(),
        )
        return file.seal()


def _key_of(chunk: HostChunk) -> bytes:
    return hashlib.sha256(b"samovar chunk\0" + chunk.key).digest()


def _parent_of(chunk: HostChunk) -> bytes:
    """Return what stands for the chunk before: its key is not known here, and nothing asks for it."""
    return hashlib.sha256(b"samovar before\0" + chunk.key).digest() if chunk.place else NOWHERE


def _by_group(chunks: Sequence[HostChunk]) -> dict[int, list[HostChunk]]:
    found: dict[int, list[HostChunk]] = {}
    for one in sorted(set(chunks), key=lambda chunk: chunk.place):
        if one.place < PLACES_MAX:
            found.setdefault(one.group, []).append(one)
    return found


def _runs(chunks: Sequence[HostChunk], chunk_bytes: int) -> list[list[HostChunk]]:
    """Return chunks in runs of one behind the other, none larger than an extent. `chunks`: by place."""
    most = max(1, EXTENT_BYTES_MAX // chunk_bytes)
    found: list[list[HostChunk]] = []
    for one in chunks:
        if found and len(found[-1]) < most and found[-1][-1].place + 1 == one.place:
            found[-1].append(one)
        else:
            found.append([one])
    return found
