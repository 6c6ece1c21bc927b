"""A medium whose records are all encrypted: what is put becomes so, what is read is plain again.

An encrypted record is an envelope, the plain record's own header in the clear, and its blocks under
AES-256-GCM. The envelope says which key it is, and holds random bytes that no other record has. The record's
key is made of the session's key and the digest of envelope and header, so whatever of them is changed opens
nothing; the digest is the associated data of each tag besides, and a block's index its nonce. See
`docs/adr/034-encryption-at-rest.md`.

`ENVELOPE_BYTES` | header as `blocks/record.py` encodes it | per block: ciphertext, then its tag
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from samovar.cache_tiers.blocks import (
    ENCRYPTED_MAGIC,
    HEADER_ALIGN,
    Address,
    BadRecord,
    Bytes,
    Clear,
    ExtentHeader,
    ForeignRecord,
    Record,
    TierMiss,
)
from samovar.cache_tiers.blocks import record as record_format
from samovar.cache_tiers.media import Deadline, Scanned, Tier, TierAround, aligned_empty

ID_BYTES = 8
NONCE_BYTES = 12
GCM_TAG_BYTES = 16


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A secret of 32 bytes, and the random id that records name it by.

    `after_unix_s`: when the one before it was destroyed; 0: there was none. What was made until then must
    not be encrypted with this one: it was on its way when its session was erased.
    """

    key_id: bytes
    secret: bytes = field(repr=False)
    after_unix_s: float = 0.0


class Keys(Protocol):
    """The keys of all sessions. Thread-safe. A lineage's tag stands for its session.

    Every method may block, and raises `TierError` where the keys cannot be had at the moment.
    """

    def key_for(self, tenant: bytes, session: bytes) -> SessionKey:
        """Return the key that a session's records are encrypted with now; it is made if there is none."""

    def find(self, tenant: bytes, session: bytes, key_id: bytes) -> SessionKey | None:
        """Return a session's key by its id; None: destroyed, of another outer key, or never ours."""

    def live(self) -> frozenset[bytes]:
        """Return the ids of all keys that are not destroyed, also those of another outer key."""

    def destroy(self, clears: Sequence[Clear]) -> int:
        """Destroy keys for good, and return how many. On return no restart brings them back."""

    def check(self) -> None:
        """Raise `TierError` if keys cannot be had."""


VERSION = 1
SALT_BYTES = 32
# magic, version, bytes in front of the blocks, id of the key, random bytes; then the tag of all of it
_ENVELOPE = struct.Struct(f"<8sHxxI{ID_BYTES}s{SALT_BYTES}s")
_TAG_AT = _ENVELOPE.size
ENVELOPE_BYTES = 128
HEADER_NONCE = b"\xff" * NONCE_BYTES


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where things lie in an encrypted record and in the plain one."""

    plain_head: int
    block_bytes: int
    blocks: int

    @property
    def head(self) -> int:
        """The bytes in front of the first block."""
        return ENVELOPE_BYTES + self.plain_head

    @property
    def stride(self) -> int:
        return self.block_bytes + GCM_TAG_BYTES

    @property
    def plain_bytes(self) -> int:
        return self.plain_head + self.blocks * self.block_bytes

    @property
    def nbytes(self) -> int:
        return self.head + self.blocks * self.stride

    def at(self, block: int) -> int:
        """Return where a block's ciphertext begins."""
        return self.head + block * self.stride


@dataclass(frozen=True, slots=True, eq=False)
class EncryptedHeader(ExtentHeader):
    """The header of a plain record, as an encrypted one says it in the clear, and the id of the key."""

    plain: ExtentHeader
    key_id: bytes

    @property
    def geometry(self) -> Geometry:
        return geometry_of(self.plain)


class EncryptedFormat:
    """How a medium reads what its records say in the clear (`RecordFormat`)."""

    @staticmethod
    def read_header_bytes(prefix: Bytes, /) -> int:
        """Return the bytes in front of the blocks, from a record's first bytes. Raises `BadRecord`."""
        return _envelope(prefix)[0]

    @staticmethod
    def decode_header(data: Bytes, /, *, record_bytes: int | None = None) -> ExtentHeader:
        """Decode what is in front of the blocks: see `decode_front`."""
        return decode_front(data, record_bytes=record_bytes)


def decode_front(data: Bytes, *, record_bytes: int | None = None) -> EncryptedHeader:
    """Decode what is in front of the blocks, which only a key can prove. Raises `BadRecord`.

    `record_bytes`: the size of the encrypted record, if known.
    """
    head, key_id = _envelope(data)
    if len(data) < head:
        raise BadRecord("truncated", f"{len(data)} bytes of a front of {head}")
    plain = record_format.decode_header(data[ENVELOPE_BYTES:head])
    geometry = geometry_of(plain)
    if geometry.head != head:
        raise BadRecord("header", "the envelope is around another header")
    if record_bytes is not None and record_bytes != geometry.nbytes:
        kind = "truncated" if record_bytes < geometry.nbytes else "oversized"
        raise BadRecord(kind, f"{record_bytes} bytes of an encrypted record of {geometry.nbytes}")
    said: dict[str, Any] = {one.name: getattr(plain, one.name) for one in fields(ExtentHeader)}
    return EncryptedHeader(plain=plain, key_id=key_id, **said)


def geometry_of(header: ExtentHeader) -> Geometry:
    """Return where things lie in a record with this header."""
    plain_head = record_format.header_bytes(header.blocks, header.shape.layers)
    return Geometry(plain_head, header.shape.block_bytes, header.blocks)


def encrypt(plain: Bytes, geometry: Geometry, key: SessionKey) -> Bytes:
    """Return a plain record, of this geometry, encrypted under a key that no other record has."""
    sealed = np.empty(geometry.nbytes, np.uint8)
    front = sealed[: geometry.head]
    front[:ENVELOPE_BYTES] = 0
    _ENVELOPE.pack_into(
        front.data, 0, ENCRYPTED_MAGIC, VERSION, geometry.head, key.key_id, secrets.token_bytes(SALT_BYTES)
    )
    front[ENVELOPE_BYTES:] = plain[: geometry.plain_head]
    cipher, names = _cipher(front, key)
    tag = cipher.encrypt(HEADER_NONCE, b"", names)
    front[_TAG_AT : _TAG_AT + GCM_TAG_BYTES] = np.frombuffer(tag, np.uint8)
    for block in range(geometry.blocks):
        start, at = geometry.plain_head + block * geometry.block_bytes, geometry.at(block)
        whole = plain[start : start + geometry.block_bytes]
        cipher.encrypt_into(_nonce(block), whole.data, names, sealed[at : at + geometry.stride].data)
    return sealed


class Opened:
    """A record whose front a key has proved. `front`: its bytes before the blocks. Raises `BadRecord`."""

    def __init__(self, front: Bytes, key: SessionKey) -> None:
        self._cipher, self._names = _cipher(front, key)
        try:
            self._cipher.decrypt(
                HEADER_NONCE, front[_TAG_AT : _TAG_AT + GCM_TAG_BYTES].tobytes(), self._names
            )
        except InvalidTag:
            raise BadRecord("header", "it is not what its key has sealed") from None

    def open(self, block: int, sealed: Bytes, plain: Bytes) -> None:
        """Decrypt one block with its tag into `plain`. Raises `BadRecord`; then `plain` is not to be used."""
        try:
            self._cipher.decrypt_into(_nonce(block), sealed.data, self._names, plain.data)
        except InvalidTag:
            raise BadRecord("checksum", f"block {block} is not what its key has sealed") from None


def _envelope(view: Bytes) -> tuple[int, bytes]:
    """Return the bytes in front of the blocks, and the key's id."""
    start = view[: len(ENCRYPTED_MAGIC)].tobytes()
    if len(view) < _ENVELOPE.size:
        raise BadRecord("truncated", f"{len(view)} bytes, not even an envelope")
    if start != ENCRYPTED_MAGIC:
        raise ForeignRecord("magic", "not encrypted")
    _, version, head, key_id, _ = _ENVELOPE.unpack_from(view.data)
    if version != VERSION:
        raise BadRecord("version", f"an envelope of version {version}; {VERSION} is understood")
    return head, key_id


def _cipher(front: Bytes, key: SessionKey) -> tuple[AESGCM, bytes]:
    """Return the record's cipher, and the digest of all of its front but the tag."""
    digest = hashlib.sha256(front[:_TAG_AT].data)
    digest.update(front[_TAG_AT + GCM_TAG_BYTES :].data)
    names = digest.digest()
    return AESGCM(hmac.digest(key.secret, b"samovar record\0" + names, "sha256")), names


def _nonce(block: int) -> bytes:
    return block.to_bytes(NONCE_BYTES, "little")


PIECE_BYTES = 4 * 1024 * 1024
"""Of a record that is read from a local medium, so much at a time: it is still in the CPU's cache then."""
SCRATCH_BYTES = PIECE_BYTES + 4 * HEADER_ALIGN
SCRATCHES_MAX = 8
REMEMBERED_MAX = 65_536


class EncryptedTier(TierAround):
    """Wraps `inner`, whose records are all encrypted with `keys`; sizes and places outside are plain ones.

    A record whose key is not there is a miss: its session was erased, or the file of keys is another one.
    What is not encrypted is none of this tier's. From now on `inner` reads records in their format.
    """

    def __init__(self, inner: Tier, keys: Keys) -> None:
        super().__init__(inner)
        self._keys = keys
        self._lock = threading.Lock()
        self._geometries: OrderedDict[Address, Geometry] = OrderedDict()
        self._foreign: OrderedDict[Address, None] = OrderedDict()  # of a shared medium: looked at once
        self._scratches: deque[Bytes] = deque(maxlen=SCRATCHES_MAX)
        medium: Tier | None = inner
        while medium is not None:
            medium.format, medium = EncryptedFormat, getattr(medium, "inner", None)

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        header = record_format.decode_header(record.data, record_bytes=record.nbytes)
        geometry = geometry_of(header)
        key = self._keys.key_for(header.tenant, header.session)
        if header.created_unix_s <= key.after_unix_s:
            raise TierMiss("it was on its way when its session was erased")
        sealed = encrypt(record.data, geometry, key)
        deadline.check()
        self.inner.put(address, Record(sealed), deadline=deadline)
        self._remember(address, geometry)

    def read(
        self, address: Address, start: int, nbytes: int, *, deadline: Deadline, room: Bytes | None = None
    ) -> Bytes:
        with self._lock:
            geometry = self._geometries.get(address)
        if geometry is None:
            geometry = self._look(address, deadline)
        if min(start, nbytes) < 0 or start + nbytes > geometry.plain_bytes:
            raise BadRecord("truncated", f"no bytes [{start}, {start + nbytes}) in {geometry.plain_bytes}")
        first = max(0, start - geometry.plain_head) // geometry.block_bytes
        end = max(first, -(-(start + nbytes - geometry.plain_head) // geometry.block_bytes))
        front, sealed_blocks = self._read(address, geometry, first, end, deadline)
        opened = self._opened(address, front)
        out = np.empty(nbytes, np.uint8) if room is None else room[:nbytes]
        of_header = front[ENVELOPE_BYTES:][start : start + nbytes]
        out[: len(of_header)] = of_header
        for block, sealed in enumerate(sealed_blocks, first):
            at = geometry.plain_head + block * geometry.block_bytes - start
            low, high = max(at, 0), min(at + geometry.block_bytes, nbytes)
            if high - low == geometry.block_bytes:
                opened.open(block, sealed, out[low:high])
                continue
            plain = np.empty(geometry.block_bytes, np.uint8)
            opened.open(block, sealed, plain)
            out[low:high] = plain[low - at : high - at]
        return out

    def scan(self) -> Iterator[Scanned]:
        return self._readable(self.inner.scan())

    def rescan(self, is_known: Callable[[Address], bool]) -> Iterator[Scanned]:
        def is_seen(address: Address) -> bool:
            with self._lock:
                return address in self._foreign

        return self._readable(self.inner.rescan(lambda address: is_known(address) or is_seen(address)))

    def probe(self) -> None:
        self._keys.check()
        self.inner.probe()

    def _readable(self, found: Iterator[Scanned]) -> Iterator[Scanned]:
        """Yield the records whose key is there; of a local medium the others are deleted."""
        live = self._keys.live()
        for scanned in found:
            header = scanned.header
            assert isinstance(header, EncryptedHeader), "a medium that reads records its own way"
            address = header.address
            is_dead = header.key_id not in live and not self._keys.find(
                header.tenant, header.session, header.key_id
            )
            if not is_dead:
                geometry = self._remember(address, header.geometry)
                yield replace(scanned, header=header.plain, nbytes=geometry.plain_bytes)
            elif self.is_shared:  # another cluster's, or of a session that was erased: marks see to those
                with self._lock:
                    _put(self._foreign, address, None)
            else:
                self.inner.delete(address)

    def _look(self, address: Address, deadline: Deadline) -> Geometry:
        """Return where things lie in a record that this process has neither put nor scanned."""
        start = self.inner.read(address, 0, HEADER_ALIGN, deadline=deadline)
        try:
            front = self.inner.read(address, 0, EncryptedFormat.read_header_bytes(start), deadline=deadline)
            return self._remember(address, decode_front(front).geometry)
        except ForeignRecord as error:
            raise TierMiss(str(error)) from error

    def _opened(self, address: Address, front: Bytes) -> Opened:
        try:
            header = decode_front(front)
        except ForeignRecord as error:
            raise TierMiss(str(error)) from error
        if header.address != address:
            kind = "key" if header.namespace == address.namespace else "namespace"
            raise BadRecord(kind, "a record of another extent")
        key = self._keys.find(header.tenant, header.session, header.key_id)
        if key is None:
            raise TierMiss("its key is not there")
        return Opened(front, key)

    def _read(
        self, address: Address, geometry: Geometry, first: int, end: int, deadline: Deadline
    ) -> tuple[Bytes, Iterator[Bytes]]:
        """Return a record's front and the ciphertext of its blocks `[first, end)`, with their tags.

        In one call where that costs a round trip, in pieces that stay in the CPU's cache where it does not.
        """
        if self.takes_room:
            front = self.inner.read(address, 0, geometry.head, deadline=deadline)
            return front, self._in_pieces(address, geometry, first, end, deadline)
        if first:
            front = self.inner.read(address, 0, geometry.head, deadline=deadline)
            start = geometry.at(first)
            payload = self.inner.read(address, start, geometry.at(end) - start, deadline=deadline)
        else:
            data = self.inner.read(address, 0, geometry.at(end), deadline=deadline)
            front, payload = data[: geometry.head], data[geometry.head :]
        return front, _each(payload, geometry.stride)

    def _in_pieces(
        self, address: Address, geometry: Geometry, first: int, end: int, deadline: Deadline
    ) -> Iterator[Bytes]:
        step = max(1, PIECE_BYTES // geometry.stride)
        room = self._scratch(min(step, end - first) * geometry.stride + 2 * HEADER_ALIGN)
        read = partial(self.inner.read, address, deadline=deadline, room=room)  # type: ignore[call-arg]
        try:
            for start in range(first, end, step):
                nbytes = (min(start + step, end) - start) * geometry.stride
                yield from _each(read(geometry.at(start), nbytes), geometry.stride)
        finally:
            if room.nbytes == SCRATCH_BYTES:
                self._scratches.append(room)

    def _scratch(self, nbytes: int) -> Bytes:
        """Return memory for pieces; the usual size is used again."""
        if nbytes > SCRATCH_BYTES:
            return aligned_empty(-(-nbytes // HEADER_ALIGN) * HEADER_ALIGN, HEADER_ALIGN)
        try:
            return self._scratches.pop()
        except IndexError:
            return aligned_empty(SCRATCH_BYTES, HEADER_ALIGN)

    def _remember(self, address: Address, geometry: Geometry) -> Geometry:
        with self._lock:
            self._foreign.pop(address, None)
            _put(self._geometries, address, geometry)
        return geometry


def _each(payload: Bytes, stride: int) -> Iterator[Bytes]:
    return (payload[at : at + stride] for at in range(0, len(payload), stride))


T = TypeVar("T")


def _put(book: OrderedDict[Address, T], address: Address, value: T) -> None:
    book[address] = value
    if len(book) > REMEMBERED_MAX:
        book.popitem(last=False)
