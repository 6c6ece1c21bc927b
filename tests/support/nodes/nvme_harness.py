"""What the tests of the `nvme` tier share: records from a seed, a replica's checks, sick system calls."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samovar.cache_tiers.blocks.extent import (
    ROOT,
    Address,
    BlockShape,
    Bytes,
    ExtentHeader,
    Placement,
    block_key,
    namespace_digest,
)
from samovar.cache_tiers.blocks.record import (
    BadRecord,
    Record,
    TierError,
    check_belongs,
    decode_header,
    good_blocks,
    header_bytes,
    seal,
)
from samovar.cache_tiers.media.files import Syscalls
from samovar.cache_tiers.media.nvme import NvmeTier
from samovar.cache_tiers.media.tier import Deadline

SHAPE = BlockShape(layers=3, layer_bytes=500, block_tokens=16)  # no multiple of a page anywhere
MIB = 1024 * 1024
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Sealed:
    """A record and what it says of itself."""

    header: ExtentHeader
    record: Record

    @property
    def address(self) -> Address:
        return self.header.address

    @property
    def data(self) -> Bytes:
        return self.record.data


def make(seed: int, *, blocks: int = 4, tenant: int = 1, shape: BlockShape = SHAPE) -> Sealed:
    """An extent of its own at the beginning of a chain, its payload random."""
    rng = np.random.default_rng(seed)
    namespace = namespace_digest(b"tenant", bytes([tenant]))
    keys: list[bytes] = []
    for block in range(blocks):
        ids = [seed, *range(block, block + 15)]
        keys.append(block_key(namespace, keys[-1] if keys else ROOT, ids))
    data = rng.integers(
        0, 256, header_bytes(blocks, shape.layers) + blocks * shape.block_bytes, dtype=np.uint8
    )
    header = seal(
        data,
        namespace=namespace,
        tenant=bytes([tenant]) * 16,
        session=seed.to_bytes(16, "little"),
        shape=shape,
        parent=ROOT,
        first_block=0,
        keys=keys,
        token_counts=[shape.block_tokens] * (blocks - 1) + [5],
        placement=Placement(),
        created_unix_s=1_700_000_000.0 + seed,
    )
    data.flags.writeable = False
    return Sealed(header, Record(data))


@contextmanager
def memory_dir() -> Iterator[Path]:
    """A directory in memory if there is one: thousands of flushes cost nothing there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="nvme", dir=memory if memory.is_dir() else None) as dir:
        yield Path(dir)


def open_tier(dir: Path, calls: Syscalls | None = None, **changed: Any) -> NvmeTier:
    """A tier with room for everything, unless the test says otherwise."""
    settings: dict[str, Any] = {
        "bytes_max": 1024 * MIB,
        "durability": "crash",
        "direct_io": False,
        "quarantine_bytes_max": 16 * MIB,
        "wall_clock": lambda: 2_000_000_000.0,
    }
    return NvmeTier(dir, calls=calls, **(settings | changed))


def path_of(tier: NvmeTier, address: Address) -> Path:
    """The layout, said once more: a test that a path is made of nothing but these."""
    name = address.extent_id.hex()
    folder = tier.dir / "v1" / address.tenant.hex() / address.namespace.hex() / name[:2]
    return folder / f"{name}.kv"


def read_all(tier: NvmeTier, sealed: Sealed) -> Bytes:
    return tier.read(sealed.address, 0, sealed.record.nbytes, deadline=Deadline(DEADLINE_S))


def check_as_replica(sealed: Sealed, data: Bytes) -> None:
    """What a replica does before it uses a block. Raises `BadRecord` unless all are the wanted ones."""
    header = decode_header(data, record_bytes=len(data))
    wanted = sealed.header
    check_belongs(header, wanted.namespace, wanted.shape, 0, wanted.first_block, wanted.keys)
    payload = data[header_bytes(header.blocks, header.shape.layers) :]
    if good_blocks(header, payload, 0) != wanted.blocks:
        raise BadRecord("checksum", "rotten")


def why_bad(tier: NvmeTier, sealed: Sealed) -> str | None:
    """The kind of badness that reading and checking finds; None when the record is good."""
    try:
        check_as_replica(sealed, read_all(tier, sealed))
    except BadRecord as error:
        return error.kind
    return None


def check(tier: NvmeTier) -> None:
    """The accounts hold, and they are what lies there."""
    tier.check_integrity()
    assert tier.bytes_held() == tier.measure()


def temporaries(dir: Path) -> list[Path]:
    return sorted(dir.rglob("*.tmp"))


Fault = Callable[["SickCalls", str, tuple[Any, ...]], Any]


class SickCalls(Syscalls):
    """Counts system calls; from the `first` to the `last` of them `fault` happens instead."""

    NAMES = (
        *("open", "close", "pwrite", "preadv", "ftruncate", "fsync", "fchmod", "fstat", "lstat"),
        *("rename", "unlink", "mkdir", "rmdir", "listdir", "utime"),
    )

    def __init__(self) -> None:
        self.count = 0
        self.first = self.last = 0
        self.fault: Fault = lambda calls, name, args: calls.really(name, *args)
        self.seen: list[str] = []

    def arm(self, fault: Fault, first: int, last: int | None = None) -> None:
        """The next call is number 1."""
        self.count, self.seen = 0, []
        self.fault, self.first, self.last = fault, first, first if last is None else last

    def heal(self) -> bool:
        """No more faults. Did one happen?"""
        self.last = 0
        return self.count >= self.first > 0

    def really(self, name: str, *args: Any) -> Any:
        return getattr(Syscalls, name)(self, *args)


def _counted(name: str) -> Callable[..., Any]:
    def call(self: SickCalls, *args: Any) -> Any:
        self.count += 1
        self.seen.append(name)
        if self.first <= self.count <= self.last:
            return self.fault(self, name, args)
        return self.really(name, *args)

    return call


for _name in SickCalls.NAMES:
    setattr(SickCalls, _name, _counted(_name))


def fails(number: int) -> Fault:
    """The call fails with this errno; a file is closed all the same, as Linux does."""

    def fault(calls: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
        if name == "close":
            calls.really(name, *args)
        raise OSError(number, os.strerror(number))

    return fault


def comes_short(calls: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
    """A read or write does a part of what it was asked for."""
    if name in ("pwrite", "preadv"):
        fd, data, offset = args
        part = max(len(data) // 3, 1)
        if len(data) % 4096 == 0:  # perhaps past the page cache: by sectors, and beyond a page
            part = min(max(part // 512 * 512, 4096 + 512), len(data))
        return calls.really(name, fd, data[:part], offset)
    return calls.really(name, *args)


FAULTS: dict[str, Fault] = {
    "EIO": fails(errno.EIO),
    "ENOSPC": fails(errno.ENOSPC),
    "EINTR": fails(errno.EINTR),
    "short": comes_short,
}


def outcome(action: Callable[[], object]) -> str:
    """The name of what a tier may raise, or "done". Anything else comes out."""
    try:
        action()
    except (TierError, BadRecord) as error:
        return type(error).__name__
    return "done"


class Killed(BaseException):
    """The process is dead at this step."""


def die(calls: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
    raise Killed


def halfway(calls: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
    """Dies in the middle of a write."""
    if name == "pwrite":
        fd, data, offset = args
        calls.really(name, fd, data[: len(data) // 2], offset)
    raise Killed
