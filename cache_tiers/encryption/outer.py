"""The operator's key, by which tenants' keys are wrapped: in a file, or of AWS KMS."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from samovar.cache_tiers.blocks import TierError
from samovar.cache_tiers.encryption.sealer import BadSeal, key_id_of, open_row, seal_row
from samovar.cache_tiers.encryption.tier import ID_BYTES, SessionKey
from samovar.configs.atomic_file import sync_dir

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
OUTER_BYTES_MAX = 64 * 1024


class Outer(Protocol):
    """Outer keys: the one in use wraps, others still open what they wrapped. Raises `TierError`."""

    def refresh(self) -> bool:
        """Have the keys as they are now; return whether they are others than before."""

    @property
    def current(self) -> SessionKey:
        """The one that wraps. Requires a `refresh` before."""

    def get(self, key_id: bytes, proof: bytes = b"") -> bytes | None:
        """Return a key by its id; None: it is not there. `proof`: what `proof` says of it."""

    def is_current(self, key_id: bytes) -> bool:
        """Return whether what a key has wrapped is to stay so: it is of what the operator names now."""

    def proof(self, key_id: bytes) -> bytes:
        """Return what another process needs besides: of KMS the key's ciphertext, of a file nothing."""


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A key of a tenant. `is_current`: what has wrapped it is what the operator names now."""

    secret: bytes = field(repr=False)
    is_current: bool


class TenantWrapper(Protocol):
    """Wraps keys that lie with what they open. Thread-safe; may block, and raises `TierError`."""

    def wrap(self, name: bytes, secret: bytes) -> tuple[bytes, bytes]:
        """Return a key wrapped under its name, and what `unwrap` needs besides."""

    def unwrap(self, name: bytes, wrapped: bytes, proof: bytes) -> Unwrapped | None:
        """Return a key; None: the operator's keys that are there do not open it."""


class OuterWrapper:
    """See `TenantWrapper`: with outer keys that this process has."""

    def __init__(self, outer: Outer) -> None:
        self._outer = outer
        self._lock = Lock()

    def wrap(self, name: bytes, secret: bytes) -> tuple[bytes, bytes]:
        with self._lock:
            self._outer.refresh()
            outer = self._outer.current
            return seal_row(outer, name, secret), self._outer.proof(outer.key_id)

    def unwrap(self, name: bytes, wrapped: bytes, proof: bytes) -> Unwrapped | None:
        outer_id = key_id_of(wrapped) or b""
        with self._lock:
            self._outer.refresh()
            secret = self._outer.get(outer_id, proof)
            if secret is None:
                return None
            is_current = self._outer.is_current(outer_id)
        try:
            return Unwrapped(open_row(SessionKey(outer_id, secret), name, wrapped), is_current)
        except BadSeal as error:
            raise TierError("a key of a tenant was changed") from error


def open_outer(setting: Path, keys: Path) -> Outer:
    """Return the outer keys that `tiers.encryption_key_file` names: a file, or kms:ARN.

    `keys`: the file of sessions' keys. Those of KMS are beside it, as KMS has encrypted them.
    """
    found = re.fullmatch("kms:/{0,2}(arn:.+)", str(setting))
    if found:
        return KmsOuterKeys(found[1], keys.with_suffix(".kms"))
    return OuterKeys(setting.expanduser())


class OuterKeys:
    """See `Outer`. The operator's file: a line of 64 hexadecimal digits for each key, the one in use first.

    Others in it still open what they wrapped. Empty lines, and what begins with #, are skipped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._by_id: dict[bytes, bytes] = {}

    def refresh(self) -> bool:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                seen = (found.st_ino, found.st_mtime_ns, found.st_size)
                if seen == self._seen:
                    return False
                if found.st_mode & 0o022:
                    raise TierError(f"tiers.encryption_key_file: others may write to {self._path}")
                text = file.read(OUTER_BYTES_MAX).decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise TierError(f"tiers.encryption_key_file: {self._path} cannot be read: {error}") from error
        lines = [line.strip() for line in text.splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys or not all(re.fullmatch(f"[0-9a-fA-F]{{{2 * SECRET_BYTES}}}", line) for line in keys):
            raise TierError(
                f"tiers.encryption_key_file: {self._path} must have a line of {2 * SECRET_BYTES} hexadecimal "
                "digits for each key, the one in use first (openssl rand -hex 32)"
            )
        self._by_id = {outer_id(bytes.fromhex(line)): bytes.fromhex(line) for line in keys}
        self._seen = seen
        return True

    @property
    def current(self) -> SessionKey:
        return SessionKey(*next(iter(self._by_id.items())))

    def get(self, key_id: bytes, proof: bytes = b"") -> bytes | None:
        return self._by_id.get(key_id)

    def is_current(self, key_id: bytes) -> bool:
        return next(iter(self._by_id)) == key_id

    def proof(self, key_id: bytes) -> bytes:
        return b""


def outer_id(outer: bytes) -> bytes:
    """Return the id of an outer key."""
    return hashlib.sha256(b"samovar outer key\0" + outer).digest()[:ID_BYTES]


CONTEXT = {"samovar": "outer key"}
"""Encryption context: what KMS has encrypted for others is no outer key, and its log says what it was for."""
LEASE_S = 300.0
"""So long a data key is used without KMS being asked whether it may still be."""
AGAIN_S = 5.0
"""After a failure KMS is not asked for so long: who needs a key need not wait for an answer that is late."""
CALL_S_MAX = 2.0
KEYS_MAX = 64


class KmsOuterKeys:
    """See `Outer`: data keys that KMS makes, kept as it has encrypted them, opened by it at each lease.

    Thread-safe. `arn`: of the key, or of an alias of one; its region is asked. `beside`: a file of the data
    keys as KMS has encrypted them, a line each. `client`: makes that of a region; `clock`: monotonic.
    """

    def __init__(
        self,
        arn: str,
        beside: Path,
        *,
        client: Callable[[str], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arn = arn
        self._beside = beside
        self._make_client = client or _client
        self._clients: dict[str, Any] = {}  # by region
        self._clock = clock
        self._lock = Lock()
        self._by_id: dict[bytes, tuple[bytes, str]] = {}  # the key, and its line
        self._refused: dict[str, float] = {}  # lines that KMS did not open, and until when they are not tried
        self._until_s = self._again_s = float("-inf")
        self._why = ""

    def refresh(self) -> bool:
        with self._lock:
            if self._clock() < self._until_s:
                return False
            if self._clock() < self._again_s:
                raise TierError(self._why)
            before, self._by_id = self._by_id, {}
            try:
                self._ask_all(dict.fromkeys([*self._lines(), *(line for _, line in before.values())]))
            except TierError:
                self._by_id = before  # not given out until KMS has answered
                raise
            self._until_s = self._clock() + LEASE_S
            return self._by_id.keys() != before.keys()

    def _ask_all(self, known: Iterable[str]) -> None:
        """Have all data keys opened by KMS, the newest of the key in use first; made if there is none."""
        mine = [line for line in known if self._is_mine(line)]
        for line in reversed(mine):
            self._decrypt(line)
        for line in known:
            if line not in mine:
                self._decrypt_older(line)
        if not mine:
            self._generate()

    @property
    def current(self) -> SessionKey:
        with self._lock:
            mine = (one for one, (_, line) in self._by_id.items() if self._is_mine(line))
            key_id = next(mine)
            return SessionKey(key_id, self._by_id[key_id][0])

    def get(self, key_id: bytes, proof: bytes = b"") -> bytes | None:
        with self._lock:
            if key_id not in self._by_id and proof and self._clock() >= self._again_s:
                self._decrypt_older(proof.decode("ascii"))
            found = self._by_id.get(key_id)
            return None if found is None else found[0]

    def is_current(self, key_id: bytes) -> bool:
        with self._lock:
            return key_id in self._by_id and self._is_mine(self._by_id[key_id][1])

    def proof(self, key_id: bytes) -> bytes:
        with self._lock:
            return self._by_id[key_id][1].encode("ascii")

    def _is_mine(self, line: str) -> bool:
        return line.startswith(f"{self._arn} ")

    def _lines(self) -> list[str]:
        try:
            text = self._beside.read_bytes()[:OUTER_BYTES_MAX].decode("ascii")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise TierError(f"tiers.encryption_key_file: {self._beside} cannot be read: {error}") from error
        return [line for line in text.splitlines() if line.count(" ") == 2]

    def _generate(self) -> None:
        answer = self._ask("generate_data_key", KeyId=self._arn, NumberOfBytes=SECRET_BYTES)
        # The key's own name, too: an alias may be another's tomorrow.
        line = f"{self._arn} {answer['KeyId']} {b64encode(answer['CiphertextBlob']).decode('ascii')}"
        self._note(line)
        self._by_id[outer_id(answer["Plaintext"])] = (answer["Plaintext"], line)

    def _note(self, line: str) -> None:
        """Write a data key down before it is used: what it wraps would be lost with this process."""
        try:
            self._beside.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._beside, flags, 0o600)
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(f"{line}\n")
                file.flush()
                os.fsync(file.fileno())
            sync_dir(os, str(self._beside.parent))
        except OSError as error:
            raise TierError(f"tiers.encryption_key_file: {self._beside}: {error.strerror}") from error

    def _decrypt(self, line: str) -> None:
        try:
            _, arn, blob = line.split(" ")
            data = b64decode(blob, validate=True)
        except ValueError as error:
            raise TierError(f"tiers.encryption_key_file: no data key of KMS: {error}") from error
        key: bytes = self._ask("decrypt", CiphertextBlob=data, KeyId=arn)["Plaintext"]
        while len(self._by_id) >= KEYS_MAX:
            del self._by_id[next(reversed(self._by_id))]
        self._by_id[outer_id(key)] = (key, line)

    def _decrypt_older(self, line: str) -> None:
        """Open a data key of a KMS key that may be gone: what it has wrapped is not found then."""
        if self._clock() < self._refused.get(line, self._clock()):
            return
        try:
            self._decrypt(line)
        except TierError as error:
            self._again_s = float("-inf")  # the one in use is another matter
            self._refused[line] = self._clock() + LEASE_S  # each request would ask for it
            while len(self._refused) > KEYS_MAX:
                del self._refused[next(iter(self._refused))]
            logger.warning("an older outer key is not there: %s", error)

    def _ask(self, call: str, **given: Any) -> Any:
        try:
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise TierError(f"tiers.encryption_key_file=kms:... needs boto3: {error}") from error
        try:
            region = given["KeyId"].split(":")[3]
            if region not in self._clients:
                self._clients[region] = self._make_client(region)
            return getattr(self._clients[region], call)(EncryptionContext=CONTEXT, **given)
        except (BotoCoreError, ClientError) as error:
            self._why = f"tiers.encryption_key_file: KMS does not give the key {given['KeyId']}: {error}"
            self._again_s = self._clock() + AGAIN_S
            raise TierError(self._why) from error


def _client(region: str) -> Any:
    import boto3
    from botocore.config import Config

    settings = Config(
        connect_timeout=CALL_S_MAX,
        read_timeout=CALL_S_MAX,
        retries={"mode": "standard", "total_max_attempts": 2},
    )
    return boto3.session.Session().client("kms", region_name=region, config=settings)
