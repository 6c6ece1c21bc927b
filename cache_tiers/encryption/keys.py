"""The keys of sessions: made at random, kept wrapped in one file, destroyed by overwriting.

The outer key, which the operator keeps (`outer.py`), wraps a key per tenant; that wraps a key per session.
Nothing derives them, so what is overwritten cannot be had again, with the outer key and a copy of the
records. Wrapping is AES-256-GCM with everything else in the slot as associated data.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from samovar.cache_tiers.blocks import TAG_BYTES, Clear, TierError, session_of
from samovar.cache_tiers.encryption.outer import SECRET_BYTES, Outer
from samovar.cache_tiers.encryption.tier import GCM_TAG_BYTES, ID_BYTES, NONCE_BYTES, Keys, SessionKey
from samovar.cache_tiers.media import Syscalls
from samovar.configs.atomic_file import sync_dir

logger = logging.getLogger(__name__)

KEYS_FILE = "session-keys"
SLOTS_MAX = 131_072
"""Keys of tenants and sessions that are kept, 16 MiB; then the session unused for longest loses its own."""
LOG_BYTES_MAX = 4 * 1024 * 1024
UNTOLD_MAX = 1024
ERASED_MAX = 65_536
"""Erasures that are remembered until their sessions have a key again, or this process ends."""

NO_SESSION = bytes(TAG_BYTES)


FREE, OF_TENANT, OF_SESSION = 0, 1, 2
# kind, tenant, session, ids of the key and of what wraps it; nonce, wrapped key; created, after (Unix s)
_NAMES = struct.Struct(f"<B3x{TAG_BYTES}s{TAG_BYTES}s{ID_BYTES}s{ID_BYTES}s")
_REST = struct.Struct(f"<{NONCE_BYTES}s{SECRET_BYTES + GCM_TAG_BYTES}sdd")
SLOT_BYTES = _NAMES.size + _REST.size
"""128: never across two sectors of a disk."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A wrapped key, as it lies in the file."""

    kind: int
    tenant: bytes
    session: bytes
    key_id: bytes
    wrapper_id: bytes
    nonce: bytes
    wrapped: bytes
    created_unix_s: float
    after_unix_s: float

    @classmethod
    def read(cls, data: bytes) -> _Slot | None:
        """Decode a slot; None if it is free or was torn."""
        kind, *names = _NAMES.unpack_from(data)
        if kind not in (OF_TENANT, OF_SESSION):
            return None
        return cls(kind, *names, *_REST.unpack_from(data, _NAMES.size))

    def written(self) -> bytes:
        return self.names + _REST.pack(self.nonce, self.wrapped, self.created_unix_s, self.after_unix_s)

    @property
    def names(self) -> bytes:
        """What goes with the wrapped key: its associated data."""
        return _NAMES.pack(self.kind, self.tenant, self.session, self.key_id, self.wrapper_id)

    def opened(self, wrapper: bytes) -> bytes | None:
        """Return the key; None if the slot was torn or changed."""
        try:
            return AESGCM(wrapper).decrypt(self.nonce, self.wrapped, self.names)
        except InvalidTag:
            return None


def _wrapped(kind: int, tenant: bytes, session: bytes, key: SessionKey, by: SessionKey, at_s: float) -> _Slot:
    nonce = secrets.token_bytes(NONCE_BYTES)
    names = _NAMES.pack(kind, tenant, session, key.key_id, by.key_id)
    wrapped = AESGCM(by.secret).encrypt(nonce, key.secret, names)
    return _Slot(kind, tenant, session, key.key_id, by.key_id, nonce, wrapped, at_s, key.after_unix_s)


class SessionKeyFile:
    """`Keys` in one file of slots that are overwritten in place. One process has it at a time, by a lock.

    Opened at the first call, and tried again at the next one where that fails. `wall_clock`: Unix seconds.
    """

    def __init__(
        self,
        path: Path,
        outer: Outer,
        *,
        wall_clock: Callable[[], float],
        slots_max: int = SLOTS_MAX,
        calls: Syscalls | None = None,
    ) -> None:
        self._path = path
        self._outer = outer
        self._wall_clock = wall_clock
        self._slots_max = slots_max
        self._calls = calls or Syscalls()
        self._lock = threading.Lock()
        self._fd = -1
        self._is_unwrapped = False
        self._slots: dict[int, _Slot] = {}
        self._free: list[int] = []
        self._doomed: set[int] = set()
        """Slots of destroyed keys that could not be overwritten yet; none of them is in `_slots`."""
        self._unflushed: set[int] = set()
        """Slots wrapped again that may not be on the disk: after a failed flush only another write is."""
        self._erased: OrderedDict[tuple[bytes, bytes | None], float] = OrderedDict()  # when, the latest last
        self._untold: list[tuple[Clear, int]] = []  # what is not in the log yet, and how many keys
        self._tenants: dict[bytes, SessionKey] = {}
        self._current: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()  # last used last

    def key_for(self, tenant: bytes, session: bytes) -> SessionKey:
        name = (tenant, session_of(session))
        with self._lock:
            self._open()
            number = self._current.get(name)
            if number is not None:
                key = self._session_key(self._slots[number])
                if key is not None:
                    self._current.move_to_end(name)
                    return key
                self._forget(number)  # torn: its records are lost
                self._free.append(number)
            try:
                return self._made(*name)
            except OSError as error:
                raise TierError(f"a key cannot be written down: {error.strerror}") from error

    def find(self, tenant: bytes, session: bytes, key_id: bytes) -> SessionKey | None:
        name = (tenant, session_of(session))
        with self._lock:
            self._open()
            number = self._current.get(name)
            if number is None or self._slots[number].key_id != key_id:
                return None
            self._current.move_to_end(name)
            return self._session_key(self._slots[number])

    def live(self) -> frozenset[bytes]:
        with self._lock:
            self._open()
            return frozenset(slot.key_id for slot in self._slots.values() if slot.kind == OF_SESSION)

    def destroy(self, clears: Sequence[Clear]) -> int:
        wanted = [one for clear in clears for one in clear.each()]
        whole = {clear.tenant for clear in wanted if clear.session is None}
        named = {(clear.tenant, clear.session) for clear in wanted}
        with self._lock:
            self._have_file()  # also without the operator's key
            doomed = [
                number
                for number, slot in self._slots.items()
                if slot.tenant in whole or (slot.kind == OF_SESSION and (slot.tenant, slot.session) in named)
            ]
            for clear in wanted:
                self._erased.pop((clear.tenant, clear.session), None)
                self._erased[clear.tenant, clear.session] = self._wall_clock()
            while len(self._erased) > ERASED_MAX:
                self._erased.popitem(last=False)
            told = Counter(
                Clear(slot.tenant, None if slot.tenant in whole else slot.session)
                for slot in map(self._slots.__getitem__, doomed)
            )
            for number in doomed:
                self._forget(number)  # at once: it is given out no more, whatever the disk says
            self._doomed.update(doomed)
            self._untold += list(told.items())[: UNTOLD_MAX - len(self._untold)]
            self._overwrite()
            return len(doomed)

    def check(self) -> None:
        with self._lock:
            self._open()

    def close(self) -> None:
        """Leave the file to another process."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._is_unwrapped = -1, False

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        with self._lock:
            assert not self._slots.keys() & {*self._free, *self._doomed}, "a key's slot is free"
            assert len(self._slots) <= self._slots_max, f"{len(self._slots)} keys"
            for name, number in self._current.items():
                slot = self._slots[number]
                assert (slot.tenant, slot.session) == name, "a session has another's key"

    def _open(self) -> None:
        """Have the file, and the operator's keys as they are now. Raises `TierError`."""
        if self._outer.refresh():
            self._is_unwrapped = False
        self._have_file()
        if not self._is_unwrapped:
            try:
                self._unwrap()
            except OSError as error:
                raise TierError(f"keys cannot be wrapped again: {error.strerror}") from error
            self._is_unwrapped = True

    def _have_file(self) -> None:
        """Have the slots, for which no outer key is needed, and go on with what was destroyed."""
        try:
            if self._fd < 0:
                self._take()
            if self._doomed:
                self._overwrite()
        except OSError as error:
            raise TierError(f"the file of keys {self._path}: {error.strerror}") from error

    def _take(self) -> None:
        """Lock the file and read it. Raises `TierError`, `OSError`."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sync_dir(os, str(self._path.parent))
            data = os.pread(fd, self._slots_max * SLOT_BYTES, 0)
        except BlockingIOError as error:
            os.close(fd)
            raise TierError(f"another process has the file of keys {self._path}") from error
        except OSError:
            os.close(fd)
            raise
        read = {at // SLOT_BYTES: data[at : at + SLOT_BYTES] for at in range(0, len(data), SLOT_BYTES)}
        found = {number: _Slot.read(one.ljust(SLOT_BYTES, b"\0")) for number, one in read.items()}
        self._slots = {number: slot for number, slot in found.items() if slot and number not in self._doomed}
        self._free = [number for number in found if number not in {*self._slots, *self._doomed}]
        self._fd = fd

    def _unwrap(self) -> None:
        """Open the tenants' keys; those that an older outer key wraps are wrapped by the one in use."""
        self._tenants.clear()
        current = self._outer.current
        for number, slot in list(self._slots.items()):
            wrapper = self._outer.get(slot.wrapper_id)
            secret = slot.opened(wrapper) if slot.kind == OF_TENANT and wrapper else None
            if secret is None:
                continue
            key = SessionKey(slot.key_id, secret)
            self._tenants[slot.tenant] = key
            if slot.wrapper_id != current.key_id or number in self._unflushed:
                again = _wrapped(OF_TENANT, slot.tenant, NO_SESSION, key, current, slot.created_unix_s)
                self._unflushed.add(number)
                self._pwrite(number, again.written())  # where that fails, the slot stays as it is known
                self._slots[number] = again
        self._calls.fsync(self._fd)  # the older outer key may be thrown away from now on
        self._unflushed.clear()
        self._current.clear()
        for number, slot in sorted(self._slots.items(), key=lambda item: item[1].created_unix_s):
            tenant = self._tenants.get(slot.tenant)
            if slot.kind == OF_SESSION and tenant is not None and slot.wrapper_id == tenant.key_id:
                self._current[slot.tenant, slot.session] = number

    def _session_key(self, slot: _Slot) -> SessionKey | None:
        tenant = self._tenants.get(slot.tenant)
        if tenant is None or tenant.key_id != slot.wrapper_id:
            return None
        secret = slot.opened(tenant.secret)
        return None if secret is None else SessionKey(slot.key_id, secret, slot.after_unix_s)

    def _made(self, tenant: bytes, session: bytes) -> SessionKey:
        """Make a session's key, and its tenant's if there is none. Raises `OSError`.

        Not flushed: after a power cut without it, its records are lost with it.
        """
        now_s = self._wall_clock()
        if tenant not in self._tenants:
            own, outer = random_key(), self._outer.current
            self._write(self._room(), _wrapped(OF_TENANT, tenant, NO_SESSION, own, outer, now_s))
            self._tenants[tenant] = own
        erased_s = max(self._erased.get((tenant, session), 0.0), self._erased.get((tenant, None), 0.0))
        key, number = replace(random_key(), after_unix_s=erased_s), self._room()
        self._write(number, _wrapped(OF_SESSION, tenant, session, key, self._tenants[tenant], now_s))
        self._current[tenant, session] = number
        return key

    def _room(self) -> int:
        """Return the number of a slot that may be written over."""
        if self._free:
            return self._free.pop()
        end = 1 + max((*self._slots, *self._doomed), default=-1)
        if end < self._slots_max:
            return end
        for number in self._current.values():
            self._forget(number)
            return number
        oldest = min(self._slots, key=lambda number: self._slots[number].created_unix_s)  # of no key we have
        self._forget(oldest)
        return oldest

    def _write(self, number: int, slot: _Slot) -> None:
        try:
            self._pwrite(number, slot.written())
        except OSError:
            self._slots.pop(number, None)
            self._doomed.add(number)  # half of it may be there
            raise
        self._slots[number] = slot

    def _overwrite(self) -> None:
        """Overwrite the slots of destroyed keys and flush. Raises `TierError`: they are tried again."""
        try:
            for number in sorted(self._doomed):
                self._pwrite(number, bytes(SLOT_BYTES))
            self._calls.fsync(self._fd)
        except OSError as error:
            raise TierError(f"keys could not be destroyed yet: {error.strerror}") from error
        self._free += sorted(self._doomed)
        self._doomed.clear()
        if self._untold:
            self._tell(self._untold)
            self._untold.clear()

    def _pwrite(self, number: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            done += self._calls.pwrite(self._fd, memoryview(data)[done:], number * SLOT_BYTES + done)

    def _forget(self, number: int) -> None:
        slot = self._slots.pop(number)
        name = (slot.tenant, slot.session)
        if self._current.get(name) == number:
            del self._current[name]
        if slot.kind == OF_TENANT and self._tenants.get(slot.tenant, _NONE).key_id == slot.key_id:
            del self._tenants[slot.tenant]

    def _tell(self, destroyed: Sequence[tuple[Clear, int]]) -> None:
        """Write down when which keys were destroyed. A log that cannot be written undoes no erasure."""
        now = datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(timespec="milliseconds")
        log = self._path.with_suffix(".log")
        lines = [
            {"time": now, "destroyed": "session" if clear.session else "tenant", "tenant": clear.tenant.hex()}
            | ({"session": clear.session.hex()} if clear.session else {})
            | {"keys": count}
            for clear, count in destroyed
        ]
        try:
            with suppress(FileNotFoundError):
                if log.stat().st_size > LOG_BYTES_MAX:
                    log.replace(f"{log}.1")
            fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            logger.warning("%d erasures cannot be logged: %s", len(lines), error.strerror)


_NONE = SessionKey(b"", b"")


def random_key() -> SessionKey:
    """Return a key that nothing derives."""
    return SessionKey(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))


LEASE_S = 60.0
"""So long a process that is cut off from the keys goes on with what it has, also with a destroyed one."""
LEASES_MAX = 16_384


class LeasedKeys:
    """`Keys` of `source`, each kept for `LEASE_S`. Destroying forgets them at once. `clock`: monotonic."""

    def __init__(self, source: Keys, clock: Callable[[], float]) -> None:
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: OrderedDict[tuple[bytes, bytes], tuple[SessionKey, float]] = OrderedDict()
        self._destroyed = 0

    def key_for(self, tenant: bytes, session: bytes) -> SessionKey:
        key, seen = self._leased(tenant, session)
        if key is None:
            key = self._source.key_for(tenant, session)
            self._keep(tenant, session, key, seen)
        return key

    def find(self, tenant: bytes, session: bytes, key_id: bytes) -> SessionKey | None:
        key, seen = self._leased(tenant, session)
        if key is not None and key.key_id == key_id:
            return key
        found = self._source.find(tenant, session, key_id)
        if found is not None:
            self._keep(tenant, session, found, seen)
        return found

    def live(self) -> frozenset[bytes]:
        return self._source.live()

    def destroy(self, clears: Sequence[Clear]) -> int:
        self.forget(clears)
        try:
            return self._source.destroy(clears)
        finally:
            self.forget(clears)  # again: who asked meanwhile may have got the old one

    def check(self) -> None:
        self._source.check()

    def _leased(self, tenant: bytes, session: bytes) -> tuple[SessionKey | None, int]:
        """Return the key if it is kept, and how often keys were destroyed until now."""
        name = (tenant, session_of(session))
        with self._lock:
            key, until_s = self._leases.get(name, (None, 0.0))
            if key is not None and self._clock() >= until_s:
                del self._leases[name]
                key = None
            return key, self._destroyed

    def _keep(self, tenant: bytes, session: bytes, key: SessionKey, seen: int) -> None:
        with self._lock:
            if seen != self._destroyed:
                return  # it may be one of them
            self._leases[tenant, session_of(session)] = (key, self._clock() + LEASE_S)
            while len(self._leases) > LEASES_MAX:
                self._leases.popitem(last=False)

    def forget(self, clears: Sequence[Clear]) -> None:
        """Forget what is kept of keys that another process has destroyed."""
        with self._lock:
            self._destroyed += 1
            gone = {(one.tenant, one.session) for clear in clears for one in clear.each()}
            for tenant, session in list(self._leases):
                if not gone.isdisjoint(((tenant, None), (tenant, session))):
                    del self._leases[tenant, session]
