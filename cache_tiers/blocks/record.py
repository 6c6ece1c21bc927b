"""The byte format of an extent's record, header then payload: encoding, decoding and verification.

Everything is little endian. The header is a fixed part, then per block its key, its token count and its
checksums, zero-padded to a multiple of `HEADER_ALIGN`, so that the payload starts on a page. Nothing read is
trusted before its header checksum, bounds and internal consistency are checked. The checksums protect
against accidents, not against an attacker who can write to the medium.

A block has a checksum of each of its layers (`layer_sums`, `docs/adr/020-checksums-of-pieces.md`). All of
an extent's are computed in one call, which leaves the interpreter to other threads, and tell which layer of a
bad block is wrong.

Versions 1 and 2 are still read. Their checksums are xxh3's, of each layer; in version 2 the first one covers
the whole block instead, and alone is computed on the way back (`docs/adr/010-one-checksum-a-block.md`).
"""

from __future__ import annotations

import logging
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest, xxh3_128

from samovar.cache_tiers.blocks.extent import (
    KEY_BYTES,
    ROOT,
    TAG_BYTES,
    BlockShape,
    Bytes,
    Checksums,
    ExtentHeader,
    Placement,
)
from samovar.cache_tiers.blocks.tiers import PLACED

if TYPE_CHECKING:
    from samovar.configs.settings import Settings

logger = logging.getLogger(__name__)


class TierError(Exception):
    """A tier operation failed: a miss for the caller, a failure for the breaker."""


class TierFull(TierError):
    """No room (ENOSPC, quota, object store full). Evicting and retrying once may help."""


class TierMiss(TierError):
    """The extent is not, or no longer, in the tier. Not a failure of the tier."""


class BadRecord(Exception):
    """Bytes that are not a valid record. `kind` is one of `KINDS`; never contains prompt text."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class ForeignRecord(BadRecord):
    """Bytes of a good record for who has another setting: encrypted where we are not, or the other way."""


@dataclass(frozen=True, slots=True)
class Record:
    """A sealed extent in flight. `data`: u8 `[record bytes]`, never written to again.

    `owned`: the same bytes as an object in Ray's object store owned by the tier actor, if there is one.
    """

    data: Bytes
    owned: object | None = None

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


KINDS = ("magic", "version", "header", "truncated", "oversized", "namespace", "key", "checksum", "unreadable")
"""Why a record is bad. `truncated`, `oversized`: wrong size; `header`: an inconsistent header;
`unreadable`: the disk fails at its place."""

HEADER_ALIGN = 4096
PREFIX_BYTES = 64
"""How much of a record `read_header_bytes` needs."""

HEADER_BYTES_MAX = 64 * 1024 * 1024
BLOCK_TOKENS_MAX = 65536
U32_MAX = 2**32 - 1

MAGIC = b"\x89SMVRKV\n"  # the high bit and the newline reveal a transfer that treated it as text
ENCRYPTED_MAGIC = b"\x89SMVREN\n"  # of a record in an envelope: `encryption/tier.py`
SEALED_MAGIC = b"\x89SMVRRW\n"  # of a row of a table: `encryption/sealer.py`
SEALED_TEXT = "\x01sealed:"  # in a column of text. None that people write begins so: controls are taken out
VERSION = 3
READABLE = (1, 2, 3)
LAYER_SUMS_SINCE = 3

# magic, version, flags (0), header bytes, blocks, layers, layer_bytes, block_tokens, first_block
_PREFIX = struct.Struct("<8sHHIIIIII")
# namespace, tenant, session, parent, created, first, write_behind, lowest, min_ttl_s, ttl_s
_NAMES = struct.Struct(f"<{KEY_BYTES}s{TAG_BYTES}s{TAG_BYTES}s{KEY_BYTES}sdBBBxdd")
_CHECKSUM_BYTES = 16
_CHECKSUM_AT = _PREFIX.size + _NAMES.size
_FIXED_BYTES = _CHECKSUM_AT + _CHECKSUM_BYTES
_U64 = struct.Struct("<Q")


def header_bytes(blocks: int, layers: int) -> int:
    """Return the length of the encoded header: a multiple of `HEADER_ALIGN`."""
    return -(-_used_bytes(blocks, layers) // HEADER_ALIGN) * HEADER_ALIGN


def record_bytes(blocks: int, shape: BlockShape) -> int:
    """Return the length of a record of `blocks` blocks: header and payload."""
    return header_bytes(blocks, shape.layers) + blocks * shape.block_bytes


def seal(
    record: Bytes,
    *,
    namespace: bytes,
    tenant: bytes,
    session: bytes,
    shape: BlockShape,
    parent: bytes,
    first_block: int,
    keys: Sequence[bytes],
    token_counts: Sequence[int],
    placement: Placement,
    created_unix_s: float,
) -> ExtentHeader:
    """Write the header in front of the payload already in `record`; return it as it will be decoded.

    `record`: writable u8 `[record_bytes(blocks, shape)]`. `placement.write_behind` is returned in the order
    of `PLACED`. Raises `ValueError` if the arguments are inconsistent.
    """
    problem = _count_problem(len(keys), shape, first_block)
    if problem:
        raise ValueError(problem)
    header = ExtentHeader(
        namespace=namespace,
        tenant=tenant,
        session=session,
        shape=shape,
        parent=parent,
        first_block=first_block,
        keys=tuple(keys),
        token_counts=tuple(token_counts),
        checksums=np.empty((len(keys), shape.layers), dtype=np.uint64),
        placement=replace(
            placement, write_behind=tuple(tier for tier in PLACED if tier in placement.write_behind)
        ),
        created_unix_s=float(created_unix_s),
        version=VERSION,
    )
    problem = _problem(header)
    if problem:
        raise ValueError(problem)
    length = header_bytes(header.blocks, shape.layers)
    view = _view(record)
    if len(view) != length + header.payload_bytes or view.readonly:
        raise ValueError(f"a record of {length + header.payload_bytes} writable bytes, not of {len(view)}")
    header.checksums[:] = layer_sums(record[length:], header.keys, shape)
    header.checksums.flags.writeable = False
    _encode(header, view[:length])
    return header


def read_header_bytes(prefix: Bytes) -> int:
    """Return the encoded header's length, from the record's first `PREFIX_BYTES` (or more).

    At most `HEADER_BYTES_MAX`; not yet covered by the header's checksum. Raises `BadRecord`.
    """
    return _counts(_view(prefix))[0]


def decode_header(data: Bytes, *, record_bytes: int | None = None) -> ExtentHeader:
    """Decode the header at the start of `data`, which may continue after it. Raises `BadRecord`.

    `record_bytes`: the size of the whole record, if known; it must be exactly what the header says.
    """
    view = _view(data)
    length, blocks, shape, first_block = _counts(view)
    if len(view) < length:
        raise BadRecord("truncated", f"{len(view)} bytes of a header of {length}")
    view = view[:length]
    if view[_CHECKSUM_AT:_FIXED_BYTES] != _header_checksum(view):
        raise BadRecord("header", "its checksum is another one")
    used = _used_bytes(blocks, shape.layers)
    if view[used:] != bytes(length - used):
        raise BadRecord("header", "its padding is not empty")
    header = _parse(view, blocks, shape, first_block)
    problem = _problem(header)
    if problem:
        raise BadRecord("header", problem)
    if record_bytes is not None:
        expected = length + header.payload_bytes
        if record_bytes != expected:
            kind = "truncated" if record_bytes < expected else "oversized"
            raise BadRecord(kind, f"{record_bytes} bytes of a record of {expected}")
    return header


def check_belongs(
    header: ExtentHeader,
    namespace: bytes,
    shape: BlockShape,
    offset: int,
    first_block: int,
    keys: Sequence[bytes],
) -> None:
    """Check that the extent's blocks from `offset` on are `keys`, at chain index `first_block`.

    Raises `BadRecord("namespace")` if namespace or shape differs, `BadRecord("key")` if the blocks do.
    """
    if header.namespace != namespace:
        raise BadRecord("namespace", "of another namespace")
    if header.shape != shape:
        raise BadRecord("namespace", f"blocks of {header.shape}, not of {shape}")
    if offset < 0 or offset + len(keys) > header.blocks:
        raise BadRecord("key", f"blocks {offset}..{offset + len(keys)} of an extent of {header.blocks}")
    if header.first_block + offset != first_block:
        raise BadRecord("key", f"at chain index {header.first_block + offset}, not {first_block}")
    if header.keys[offset : offset + len(keys)] != tuple(keys):
        raise BadRecord("key", "of other blocks")


def good_blocks(header: ExtentHeader, payload: Bytes, first: int) -> int:
    """Return how many blocks at the front of `payload` (u8; blocks `[first, ...)`) have valid checksums."""
    view = _view(payload)
    shape = header.shape
    if first < 0:
        raise ValueError(f"blocks are counted from 0, not from {first}")
    whole = min(len(view) // shape.block_bytes, max(header.blocks - first, 0))
    if header.version < LAYER_SUMS_SINCE:
        starts = range(0, whole * shape.block_bytes, shape.block_bytes)
        good = (_is_good(header, first + at, view, start) for at, start in enumerate(starts))
        return next((at for at, is_good in enumerate(good) if not is_good), whole)
    sums = layer_sums(payload[: whole * shape.block_bytes], header.keys[first : first + whole], shape)
    bad = (sums != header.checksums[first : first + whole]).any(axis=1)
    return int(bad.argmax()) if bad.any() else whole


def bad_layers(header: ExtentHeader, payload: Bytes, index: int, first: int = 0) -> list[int]:
    """Return which layers of block `index`, which is not good, are wrong.

    `payload`: u8, of blocks `[first, ...)`. Of version 2 a first layer that is wrong beside others is not
    told.
    """
    shape, key, known = header.shape, header.keys[index], header.checksums[index]
    start = (index - first) * shape.block_bytes
    if header.version >= LAYER_SUMS_SINCE:
        sums = layer_sums(payload[start : start + shape.block_bytes], [key], shape)
        return [int(layer) for layer in np.flatnonzero(sums[0] != known)]
    view = _view(payload)
    wrong = [
        layer
        for layer in range(header.version - 1, shape.layers)
        if _xxh3_of_layer(key, view, start, shape, layer) != int(known[layer])
    ]
    return wrong or [0]


def _view(data: Bytes) -> memoryview:
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError(f"one run of bytes, not {data.dtype} of shape {data.shape}")
    return data.data


def _used_bytes(blocks: int, layers: int) -> int:
    return _FIXED_BYTES + blocks * (KEY_BYTES + 4 + 8 * layers)


def _is_good(header: ExtentHeader, index: int, view: memoryview, start: int) -> bool:
    """Return whether the bytes from `start` on are what was sealed as block `index` in version 1 or 2."""
    key, shape, known = header.keys[index], header.shape, header.checksums[index]
    if header.version == 2:
        return xxh3_64_intdigest(view[start : start + shape.block_bytes], _seed(key)) == int(known[0])
    layers = range(shape.layers)
    return all(_xxh3_of_layer(key, view, start, shape, layer) == int(known[layer]) for layer in layers)


def _xxh3_of_layer(key: bytes, view: memoryview, start: int, shape: BlockShape, layer: int) -> int:
    step = shape.layer_bytes
    return xxh3_64_intdigest(view[start + layer * step : start + (layer + 1) * step], _seed(key) ^ layer)


def _seed(key: bytes) -> int:
    seed: int = _U64.unpack_from(key)[0]
    return seed


def _header_checksum(view: memoryview) -> bytes:
    digest = xxh3_128(view[:_CHECKSUM_AT])
    digest.update(bytes(_CHECKSUM_BYTES))
    digest.update(view[_FIXED_BYTES:])
    return digest.digest()


def _encode(header: ExtentHeader, view: memoryview) -> None:
    shape, placement = header.shape, header.placement
    view[:] = bytes(len(view))
    _PREFIX.pack_into(
        view, 0, MAGIC, header.version, 0, len(view), header.blocks, shape.layers,
        shape.layer_bytes, shape.block_tokens, header.first_block,
    )  # fmt: skip
    _NAMES.pack_into(
        view, _PREFIX.size, header.namespace, header.tenant, header.session, header.parent,
        header.created_unix_s, PLACED.index(placement.first),
        sum(1 << PLACED.index(tier) for tier in placement.write_behind), PLACED.index(placement.lowest),
        placement.min_ttl_s, placement.ttl_s,
    )  # fmt: skip
    counts = np.array(header.token_counts, dtype="<u4").tobytes()
    tables = b"".join(header.keys) + counts + header.checksums.astype("<u8").tobytes()
    view[_FIXED_BYTES : _FIXED_BYTES + len(tables)] = tables
    view[_CHECKSUM_AT:_FIXED_BYTES] = _header_checksum(view)


def _counts(view: memoryview) -> tuple[int, int, BlockShape, int]:
    """Return header bytes, blocks, shape, first_block: within bounds, not yet covered by a checksum."""
    if bytes(view[: len(MAGIC)]) != MAGIC[: len(view)]:
        if view[: len(MAGIC)] == ENCRYPTED_MAGIC:
            raise ForeignRecord("magic", "encrypted, and tiers.encryption_key_file is not set")
        raise BadRecord("magic", "not a record of this format")
    if len(view) < PREFIX_BYTES:
        raise BadRecord("truncated", f"{len(view)} bytes, not even the beginning of a header")
    _, version, flags, length, blocks, layers, layer_bytes, block_tokens, first_block = _PREFIX.unpack_from(
        view
    )
    if version not in READABLE or flags != 0:
        understood = " or ".join(map(str, READABLE))
        raise BadRecord(
            "version", f"version {version}, flags {flags}; version {understood}, flags 0 are understood"
        )
    shape = BlockShape(layers, layer_bytes, block_tokens)
    problem = _count_problem(blocks, shape, first_block)
    if problem:
        raise BadRecord("header", problem)
    if length != header_bytes(blocks, layers):
        raise BadRecord("header", f"a header of {length} bytes for {blocks} blocks of {layers} layers")
    return length, blocks, shape, first_block


def _parse(view: memoryview, blocks: int, shape: BlockShape, first_block: int) -> ExtentHeader:
    """Parse bytes whose checksum is valid. Raises `BadRecord` if a tier number is out of range."""
    names = _NAMES.unpack_from(view, _PREFIX.size)
    namespace, tenant, session, parent, created, first, write_behind, lowest, min_ttl_s, ttl_s = names
    if max(first, lowest) >= len(PLACED) or write_behind >> len(PLACED):
        raise BadRecord("header", "a placement in a tier that does not exist")
    keys_end = _FIXED_BYTES + blocks * KEY_BYTES
    counts_end = keys_end + blocks * 4
    all_keys = bytes(view[_FIXED_BYTES:keys_end])
    counts = np.frombuffer(view[keys_end:counts_end], dtype="<u4")
    checksums = np.frombuffer(view, dtype="<u8", count=blocks * shape.layers, offset=counts_end).astype(
        np.uint64
    )
    checksums.flags.writeable = False
    return ExtentHeader(
        namespace=namespace,
        tenant=tenant,
        session=session,
        shape=shape,
        parent=parent,
        first_block=first_block,
        keys=tuple(all_keys[at : at + KEY_BYTES] for at in range(0, len(all_keys), KEY_BYTES)),
        token_counts=tuple(counts.tolist()),
        checksums=checksums.reshape(blocks, shape.layers),
        placement=Placement(
            first=PLACED[first],
            write_behind=tuple(tier for number, tier in enumerate(PLACED) if write_behind >> number & 1),
            lowest=PLACED[lowest],
            min_ttl_s=min_ttl_s,
            ttl_s=ttl_s,
        ),
        created_unix_s=created,
        version=_PREFIX.unpack_from(view)[1],
    )


def _count_problem(blocks: int, shape: BlockShape, first_block: int) -> str:
    """Return what is wrong with these counts, or ""; cheap, run before they size any allocation."""
    if not (0 < blocks <= U32_MAX and 0 < shape.layers <= U32_MAX and 0 < shape.layer_bytes <= U32_MAX):
        return f"{blocks} blocks of {shape}"
    if not 0 < shape.block_tokens <= BLOCK_TOKENS_MAX:
        return f"blocks of {shape.block_tokens} tokens"
    if not 0 <= first_block <= U32_MAX - blocks:
        return f"blocks from chain index {first_block} on"
    if header_bytes(blocks, shape.layers) > HEADER_BYTES_MAX:
        return f"{blocks} blocks of {shape.layers} layers: a header of more than {HEADER_BYTES_MAX} bytes"
    return ""


def _problem(header: ExtentHeader) -> str:
    """Return what is inconsistent in a header whose counts are within bounds, or ""."""
    lengths = [len(header.namespace), len(header.parent), len(header.tenant), len(header.session)]
    if lengths != [KEY_BYTES, KEY_BYTES, TAG_BYTES, TAG_BYTES]:
        return f"namespace, parent, tenant, session of {lengths} bytes"
    if {len(key) for key in header.keys} != {KEY_BYTES}:
        return f"a block key has {KEY_BYTES} bytes"
    if len({*header.keys, header.parent, ROOT}) != header.blocks + 1 + (header.parent != ROOT):
        return "a block key occurs twice"
    if (header.first_block == 0) != (header.parent == ROOT):
        return f"chain index {header.first_block} does not go with its parent"
    counts = header.token_counts
    full = header.shape.block_tokens
    if (
        len(counts) != header.blocks
        or any(count != full for count in counts[:-1])
        or not 0 < counts[-1] <= full
    ):
        return f"blocks of {full} tokens, of which only the last may hold fewer, and not none"
    times = (header.created_unix_s, header.placement.min_ttl_s, header.placement.ttl_s)
    if not all(math.isfinite(time) and time >= 0 for time in times):
        return f"a time is no time: {times}"
    return ""


WORD_BYTES = 8
PIECE_WORDS = 512
PIECE_BYTES = PIECE_WORDS * WORD_BYTES
STEP = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Of a mixing step: by how much a word is shifted, and what the two are multiplied by."""

BATCH_BYTES = 1024 * 1024
"""How much numpy computes at a time: its steps in between are several times as large."""

Words = npt.NDArray[np.uint64]


def layer_sums(payload: Bytes, keys: Sequence[bytes], shape: BlockShape) -> Checksums:
    """Return the checksums, u64 `[blocks, layers]`, of the blocks with these `keys`, each of independent
    pieces.

    All of them at once, in one call that does not hold the interpreter, where `layer_sums.cpp` is compiled;
    else by numpy, and on a GPU by a kernel (`replicas/kv/page_sums.py`): the same bits. Part of the record's
    format since version 3, so it never changes.

    A word is 64 bits, little endian, `low` and `high` its halves; a layer's last word is filled up with
    zeros. A piece is 512 words, the last one of a layer what is left. `mix(z)` is SplitMix64's last step;
    `step` is 0x9e3779b97f4a7c15; `key[i] = mix((i + 1) * step)`, i < 1024, halves likewise. All sums are
    modulo 2^64, those of halves modulo 2^32::

        first   = sum over words i of (low[i] + key.low[i]) * (high[i] + key.high[i])
        second  = the same with key[i + 512]
        seed    = mix(the block key's first 8 bytes ^ mix(layer << 32 | layer_bytes))
        of piece p = mix(mix(first ^ (seed + (p + 1) * step)) + second)
        checksum   = sum over pieces

    `first` and `second` are NH (Black et al., UMAC, CRYPTO 1999) with two sets of keys: two pieces that
    differ, whatever the difference, agree in both for one in 2^64 sets of keys, and no two that differ in
    half a word alone do. What is folded behind them tells pieces, layers, blocks and sizes apart. The keys
    are known to all: like the rest of a record, this is against accidents.

    `payload`: u8 `[blocks * block_bytes]`, in one run. Raises `ValueError` if it is not.
    """
    blocks = len(keys)
    if payload.dtype != np.uint8 or payload.shape != (blocks * shape.block_bytes,):
        raise ValueError(f"{payload.dtype} of {payload.shape} for {blocks} blocks of {shape}")
    if not payload.flags.c_contiguous:
        raise ValueError("the blocks are not in one run")
    seeds = np.frombuffer(b"".join(key[:WORD_BYTES] for key in keys), "<u8")
    sums = np.empty((blocks, shape.layers), np.uint64)
    _here[0](payload, seeds, shape, sums)
    return sums


class SumsSetup(NamedTuple):
    """Where a process finds the compiled library, and how it uses it.

    `wait_s`: what one call of the compiler may take. `threads_max`: for one extent, and no more than half of
    the cores.
    """

    folder: Path
    wait_s: float
    threads_max: int

    @staticmethod
    def of(settings: Settings) -> SumsSetup:
        """Read it from the settings."""
        wait_s, threads_max = settings.engine.native_build_s_max, settings.tiers.check_threads
        return SumsSetup(settings.native_dir, wait_s, threads_max)


class Sums(Protocol):
    """Computes `sums`, u64 `[blocks, layers]`, of a payload; `seeds`: u64 `[blocks]`."""

    def __call__(self, payload: Bytes, seeds: Words, shape: BlockShape, sums: Checksums) -> None: ...


def compile_sums(setup: SumsSetup) -> Path | None:
    """Have this process compute checksums by the compiled library, which is returned.

    It is compiled if it is not there yet. Where that cannot be, numpy goes on, and the log says why.
    """
    from samovar.cache_tiers.blocks import (
        compiled_sums,  # here, as most processes have records of others only
    )
    from samovar.configs.compiled import NotCompiled

    threads = max(1, min(setup.threads_max, len(os.sched_getaffinity(0)) // 2))
    try:
        library = compiled_sums.sums_library(setup.folder, setup.wait_s)
        _here[0] = compiled_sums.CompiledSums(library, threads)
    except NotCompiled as why:
        logger.warning("checksums are computed by numpy, ten times as slowly: %s", why)
        return None
    return library


def plain_sums(payload: Bytes, seeds: Words, shape: BlockShape, sums: Checksums) -> None:
    """Compute `sums`, u64 `[blocks, layers]`, by numpy."""
    size = shape.layer_bytes
    places = np.arange(shape.layers, dtype=np.uint64) << np.uint64(32) | np.uint64(size)
    of_rows = mixed(seeds[:, None] ^ mixed(places)[None, :]).ravel()
    rows, out = payload.reshape(-1, size), sums.reshape(-1)
    batch = max(1, BATCH_BYTES // size)
    for start in range(0, len(rows), batch):
        part = slice(start, start + batch)
        out[part] = _sums_of_rows(rows[part], of_rows[part])


_here: list[Sums] = [plain_sums]
"""How this process computes them: one way."""


def mixed(words: Words) -> Words:
    """Return SplitMix64's last step of each word."""
    for shift, factor in MIX:
        words = (words ^ words >> np.uint64(shift)) * np.uint64(factor)
    return words


@cache
def piece_keys() -> npt.NDArray[np.uint32]:
    """Return the keys' halves, u32 `[2, PIECE_WORDS, 2]`: of both sums, of each word, low and high."""
    keys = mixed(np.arange(1, 2 * PIECE_WORDS + 1, dtype=np.uint64) * np.uint64(STEP))
    return keys.astype("<u8").view("<u4").reshape(2, PIECE_WORDS, 2)


def _sums_of_rows(rows: Bytes, seeds: Words) -> Words:
    """Return the checksums of layers, u8 `[rows, layer_bytes]`; `seeds`: u64 `[rows]`."""
    count, size = rows.shape
    if size % WORD_BYTES:
        rows = np.pad(rows, ((0, 0), (0, -size % WORD_BYTES)))
    halves = rows.view("<u4").reshape(count, -1, 2)
    whole = halves.shape[1] // PIECE_WORDS * PIECE_WORDS
    parts = [halves[:, :whole].reshape(count, -1, PIECE_WORDS, 2), halves[:, None, whole:]]
    first, second = (np.concatenate([_nh(part, keys) for part in parts], axis=1) for keys in piece_keys())
    pieces = -(-size // PIECE_BYTES)
    numbers = np.arange(1, pieces + 1, dtype=np.uint64) * np.uint64(STEP)
    tagged = first[:, :pieces] ^ (seeds[:, None] + numbers)
    sums: Words = mixed(mixed(tagged) + second[:, :pieces]).sum(axis=1, dtype=np.uint64)
    return sums


def _nh(halves: npt.NDArray[np.uint32], keys: npt.NDArray[np.uint32]) -> Words:
    """Return u64 `[rows, pieces]` of u32 `[rows, pieces, words, 2]`."""
    keyed = (halves + keys[: halves.shape[2]]).astype(np.uint64)
    sums: Words = (keyed[..., 0] * keyed[..., 1]).sum(axis=2, dtype=np.uint64)
    return sums
