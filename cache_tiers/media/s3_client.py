"""Objects in one bucket through boto3; errors become `TierError`, `TierMiss` or `BadRecord`.

Methods block. A deadline bounds the wait for a connection and the reading of a body; in between, boto3 bounds
a connect and each read. The client is created at the first call, because finding credentials may use the
network. Error texts contain nothing from the server except its error code. boto3 is optional: it is imported
when a tier is made.

Extents have the keys `<prefix>/v1/<tenant>/<namespace>/<extent id>`, all in hex: one folder per tenant, so
that lifecycle rules and a manual `aws s3 rm` can select it. Clears are marked by
`<prefix>/clears/<tenant>/<all, or sessions>/<token>`, objects whose names carry all information.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from samovar.cache_tiers.blocks import (
    KEY_BYTES,
    TAG_BYTES,
    Address,
    BadRecord,
    Bytes,
    Clear,
    TenantRows,
    TierError,
    TierMiss,
    session_of,
)
from samovar.cache_tiers.media.tier import Deadline
from samovar.configs.extras import ExtraMissing, require
from samovar.configs.sections import S3TierSettings

if TYPE_CHECKING:
    from botocore.exceptions import ClientError
    from mypy_boto3_s3 import S3Client

CHUNK_BYTES = 256 * 1024
"""Maximum bytes read between two checks of the deadline."""

_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_CODE = re.compile(r"[A-Za-z0-9.]{1,64}")
# Error codes of servers that do not support conditional writes.
_UNCONDITIONAL = {"NotImplemented", "InvalidArgument", "InvalidRequest"}


NOT_SENT = -1


class S3Error(TierError):
    """A failed call. `code`, `status`: the server's answer; 0 if it did not answer, or `NOT_SENT`."""

    def __init__(self, operation: str, code: str, status: int = 0) -> None:
        super().__init__(f"{operation}: {code}")
        self.operation = operation
        self.code = code
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Return whether the call was certainly not done.

        Any other failure may have been done; a 503 may follow a try that was.
        """
        return 400 <= self.status < 500 or self.status in (501, NOT_SENT)


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing."""

    key: str
    nbytes: int
    modified_unix_s: float


class S3Objects:
    """One bucket, `settings.connections` calls at a time. Thread-safe.

    No network access before the first call.
    """

    def __init__(self, settings: S3TierSettings) -> None:
        """Prepare calls for a bucket. Raises `TierError` if boto3 is not installed."""
        if settings.bucket is None:
            raise ValueError("tiers.s3.bucket is not set")
        try:
            require("boto3", "the s3 tier")
            import boto3  # noqa: F401  now: half a second, which the first call's deadline does not have
        except ExtraMissing as error:
            raise TierError(str(error)) from error
        self._settings = settings
        self._bucket = settings.bucket
        self._connections = threading.Semaphore(settings.connections)
        self._lock = threading.Lock()
        self._client: S3Client | None = None
        self._is_conditional = True

    def deadline(self) -> Deadline:
        """Return the deadline of a call that has no other: boto3 gives up before it."""
        settings = self._settings
        return Deadline(settings.attempts_max * (settings.connect_s + settings.read_s_max))

    def put(self, key: str, data: bytes, deadline: Deadline, *, only_new: bool) -> bool:
        """Put one object; False if `only_new` and it exists already (if the server supports the check)."""
        # The server rejects a torn body. MD5 rather than CRC trailers, which not every server understands.
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        if only_new and self._is_conditional:
            try:
                with self._connected("put", deadline) as client:
                    client.put_object(
                        Bucket=self._bucket, Key=key, Body=data, ContentMD5=digest, IfNoneMatch="*"
                    )
                return True
            except S3Error as error:
                if error.status == 412:
                    return False
                if error.code not in _UNCONDITIONAL:
                    raise
        with self._connected("put", deadline) as client:
            client.put_object(Bucket=self._bucket, Key=key, Body=data, ContentMD5=digest)
        if only_new:
            self._is_conditional = False  # the condition was unsupported: do not try it again
        return True

    def get(self, key: str, start: int, nbytes: int, deadline: Deadline) -> tuple[Bytes, int]:
        """Return exactly the bytes `[start, start + nbytes)` and the object's size.

        Raises `TierMiss`, `BadRecord`.
        """
        with self._connected("get", deadline) as client:
            stop = start + nbytes
            answer = client.get_object(Bucket=self._bucket, Key=key, Range=f"bytes={start}-{stop - 1}")
            with answer["Body"] as body:  # the urllib3 response; closed on exit if not read to its end
                found = _RANGE.fullmatch(answer.get("ContentRange", ""))
                if found is None:
                    raise S3Error("get", "no range in the answer", 206)
                first, last, total = map(int, found.groups())
                if first == start and total < stop:
                    raise BadRecord("truncated", f"an object of {total} bytes, {stop} were wanted")
                if (first, last) != (start, stop - 1):
                    raise S3Error("get", "another range than was asked for", 206)
                return _read(body, nbytes, deadline), total

    def put_at(self, key: str, deadline: Deadline) -> float:
        """Return when an object was put, by the server's clock, in Unix seconds. Raises `TierMiss`."""
        with self._connected("get", deadline) as client:
            answer = client.get_object(Bucket=self._bucket, Key=key, Range="bytes=0-0")
            answer["Body"].close()
            return answer["LastModified"].timestamp()

    def delete(self, key: str, deadline: Deadline) -> None:
        """Delete an object. Idempotent."""
        try:
            with self._connected("delete", deadline) as client:
                client.delete_object(Bucket=self._bucket, Key=key)
        except TierMiss:
            return

    def copy(self, key: str, to: str, deadline: Deadline) -> None:
        """Copy an object within the server. Raises `TierMiss`."""
        with self._connected("copy", deadline) as client:
            client.copy_object(Bucket=self._bucket, Key=to, CopySource={"Bucket": self._bucket, "Key": key})

    def page(self, prefix: str, token: str | None, deadline: Deadline) -> tuple[list[Listed], str | None]:
        """Return up to 1,000 objects and the token of the next page; None: this was the last."""
        with self._connected("list", deadline) as client:
            more: dict[str, Any] = {} if token is None else {"ContinuationToken": token}
            answer = client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, **more)
            objects = [
                Listed(item["Key"], int(item["Size"]), item["LastModified"].timestamp())
                for item in answer.get("Contents", [])
            ]
            if not answer.get("IsTruncated", False):
                return objects, None
            following = answer["NextContinuationToken"]
            if following == token:
                raise S3Error("list", "the listing does not go on", 200)
            return objects, following

    def close(self) -> None:
        """Close connections that are not in use."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    @contextmanager
    def _connected(self, operation: str, deadline: Deadline) -> Iterator[S3Client]:
        """Yield the client when a connection is free, and translate its errors."""
        from botocore.exceptions import ClientError, NoCredentialsError

        left_s = deadline.left_s()
        if not left_s or not self._connections.acquire(timeout=left_s):
            raise S3Error(operation, "no connection within the deadline", NOT_SENT)
        try:
            with self._lock:
                client = self._client = self._client or _connect(self._settings)
            yield client
        except (TierError, BadRecord):
            raise
        except ClientError as error:
            raise _said(operation, error) from error
        except Exception as error:  # sockets, urllib3, XML and date parsers have no common base
            if isinstance(error, NoCredentialsError):
                self.close()  # the next call looks for credentials again: a role may come late
            raise S3Error(operation, type(error).__name__) from error
        finally:
            self._connections.release()


def _connect(settings: S3TierSettings) -> S3Client:
    import boto3
    from botocore.config import Config

    key_id, secret = settings.access_key_id, settings.secret_access_key
    config = Config(
        connect_timeout=settings.connect_s,
        read_timeout=settings.read_s_max,
        retries={"mode": "standard", "total_max_attempts": settings.attempts_max},
        max_pool_connections=settings.connections,
        s3={"addressing_style": "path" if settings.endpoint else "auto"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        proxies={} if _is_loopback(settings.endpoint) else None,
    )
    # Its own session: boto3's default one is not thread-safe.
    return boto3.session.Session().client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region,
        aws_access_key_id=key_id.get_secret_value() if key_id else None,
        aws_secret_access_key=secret.get_secret_value() if secret else None,
        config=config,
    )


def _is_loopback(endpoint: str | None) -> bool:
    host = urlsplit(endpoint or "").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _said(operation: str, error: ClientError) -> TierError | BadRecord:
    """Translate an error answer."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "InvalidRange" or status == 416:
        return BadRecord("truncated", "the object ends before the range begins")
    # Not any 404: a missing bucket or a wrong endpoint answers that too, and is not a miss.
    if code == "NoSuchKey" and operation in {"get", "copy", "delete"}:
        return TierMiss(f"{operation}: not there")
    if code == "InvalidObjectState" and operation in {"get", "copy"}:  # the bucket is well
        return TierMiss(f"{operation}: archived")
    return S3Error(operation, code if _CODE.fullmatch(code) else f"status {status}", status)


def _read(body: Any, nbytes: int, deadline: Deadline) -> Bytes:
    """Read the whole body, which must be `nbytes` long, into a new buffer."""
    data = np.empty(nbytes, dtype=np.uint8)
    view = data.data
    at = 0
    while at < nbytes:
        deadline.check()
        # Not `readinto`, which waits for everything: a trickle would hold the thread for ever.
        chunk = body.read1(min(CHUNK_BYTES, nbytes - at))
        if not chunk:
            raise S3Error("get", f"the answer ended after {at} of {nbytes} bytes", 206)
        view[at : at + len(chunk)] = chunk
        at += len(chunk)
    if body.read(1):  # at the end this also returns the connection for reuse
        raise S3Error("get", f"the answer goes on after {nbytes} bytes", 206)
    return data


_TAG = f"([0-9a-f]{{{2 * TAG_BYTES}}})"
_DIGEST = f"([0-9a-f]{{{2 * KEY_BYTES}}})"
_NAME = re.compile(f"{_TAG}/{_DIGEST}/{_DIGEST}")
SESSIONS_MAX = 7
"""Maximum sessions per mark: servers that keep keys as files allow a part of a key 255 bytes."""

_READ_MAX = 16
"""Sessions of a mark that is read: so many were put into one before."""

_ALL = "all"
_SESSION = f"[0-9a-f]{{{2 * TAG_BYTES}}}"
_MARK = re.compile(f"{_TAG}/({_ALL}|{_SESSION}(?:-{_SESSION}){{0,{_READ_MAX - 1}}})/[0-9a-f]{{1,64}}")


class S3Keys:
    """Keys under one prefix. Raises `ValueError` for a prefix with `.` or `..`."""

    def __init__(self, prefix: str) -> None:
        parts = [part for part in prefix.split("/") if part]
        if {".", ".."} & set(parts):
            raise ValueError(f"an object key must not climb: {prefix!r}")
        root = "".join(f"{part}/" for part in parts)
        self.records = f"{root}v1/"
        self.quarantine = f"{root}bad/"
        self.probes = f"{root}probe/"
        self.clears = f"{root}clears/"

    def record(self, address: Address) -> str:
        return f"{self.records}{address.tenant.hex()}/{address.namespace.hex()}/{address.extent_id.hex()}"

    def bad(self, address: Address) -> str:
        """Return the key under which its bad record is kept for inspection."""
        return self.quarantine + self.record(address).removeprefix(self.records)

    def records_of(self, tenant: bytes) -> str:
        """Return the prefix of a tenant's records; the next two: of its bad records and marks."""
        return f"{self.records}{tenant.hex()}/"

    def quarantine_of(self, tenant: bytes) -> str:
        return f"{self.quarantine}{tenant.hex()}/"

    def clears_of(self, tenant: bytes) -> str:
        return f"{self.clears}{tenant.hex()}/"

    def mark(self, tenant: bytes, sessions: Sequence[bytes | None], token: str) -> str:
        """Return a mark's key for at most `SESSIONS_MAX` sessions; None: the whole tenant."""
        names = [_ALL if session is None else session.hex() for session in sessions]
        return f"{self.clears_of(tenant)}{_ALL if None in sessions else '-'.join(names)}/{token}"

    def parse_mark(self, key: str) -> tuple[Clear, ...]:
        """Return what a mark clears; empty if the key is not a mark of ours."""
        found = _MARK.fullmatch(key, len(self.clears)) if key.startswith(self.clears) else None
        if found is None:
            return ()
        tenant, names = bytes.fromhex(found[1]), found[2]
        if names == _ALL:
            return (Clear(tenant),)
        return tuple(Clear(tenant, bytes.fromhex(name)) for name in names.split("-"))

    def parse(self, key: str) -> Address | None:
        """Return the address whose `record` this key is; None if it is not a key of ours."""
        return _parse(key, self.records)

    def parse_bad(self, key: str) -> Address | None:
        """Return the address whose `bad` this key is; None if it is not a key of ours."""
        return _parse(key, self.quarantine)


def _parse(key: str, root: str) -> Address | None:
    found = _NAME.fullmatch(key, len(root)) if key.startswith(root) else None
    return Address(*map(bytes.fromhex, found.groups())) if found else None


Pages = Callable[[str], Iterator[Listed]]

MARK = b"cleared\n"
SLACK_S = 1.0
"""Clock slack: servers report whole seconds and many servers serve one bucket.

What is newer than a mark by less than this counts as older.
"""

LOOKS_MAX = 32
"""Maximum number of remembered looks, which bound the age of marks from below."""


class S3Clears:
    """Marks what was cleared in the bucket itself, so that no node's later listing takes it in.

    A mark is a small object with its own key (`S3Keys`). What is older than it, by the bucket's own clock,
    was cleared; what is newer was put there afterwards. So nodes need not agree on the time, nor outlive each
    other. A mark is deleted when a whole listing has been judged by it, some time after it was put.

    Of one bucket prefix. `pages`: lists a key prefix. `clock`: monotonic seconds.

    `mark` is thread-safe; one thread at a time may `look`.
    """

    def __init__(
        self,
        objects: S3Objects,
        keys: S3Keys,
        pages: Pages,
        settings: S3TierSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects = objects
        self._keys = keys
        self._pages = pages
        self._settings = settings
        self._clock = clock
        self._sessions: TenantRows[float] = TenantRows(settings.clears_max)
        self._whole: dict[bytes, float] = {}
        self._wanted: dict[bytes, None] = {}  # tenants of `whole` that were cleared explicitly
        self._own: dict[bytes, float] = {}  # whole tenants marked here and not asked for since
        self._oldest_unix_s = float("inf")
        self._looks: deque[tuple[float, float]] = deque()  # when, and the time of the newest mark then

    def mark(self, clears: Sequence[Clear], deadline: Deadline) -> None:
        """Put marks for `clears`, all of one tenant, and read them back. Raises `TierError`."""
        sessions = [clear.session for clear in clears]
        for at in range(0, len(sessions), SESSIONS_MAX):
            key = self._keys.mark(clears[0].tenant, sessions[at : at + SESSIONS_MAX], secrets.token_hex(8))
            self._put(key, deadline)
            if None in sessions:
                self._own[clears[0].tenant] = self._objects.put_at(key, deadline)

    def look(self) -> list[Clear]:
        """List the marks and return what they clear. Raises `TierError`."""
        sessions: TenantRows[float] = TenantRows(self._settings.clears_max)
        whole: dict[bytes, float] = {}
        crowded: dict[bytes, float] = {}
        oldest_unix_s, newest_unix_s = float("inf"), -float("inf")
        now_s = self._clock()
        for item in self._pages(self._keys.clears):
            at_unix_s = item.modified_unix_s
            for clear in self._keys.parse_mark(item.key):
                oldest_unix_s, newest_unix_s = min(oldest_unix_s, at_unix_s), max(newest_unix_s, at_unix_s)
                if clear.session is None:
                    whole[clear.tenant] = max(whole.get(clear.tenant, at_unix_s), at_unix_s)
                    continue
                before = sessions.get(clear.tenant, clear.session)
                lost = sessions.put(clear.tenant, clear.session, max(before or at_unix_s, at_unix_s))
                if lost is not None:  # too many: clear the largest tenant as a whole
                    crowded[lost[0]] = max(crowded.get(lost[0], lost[1]), lost[1])
        self._wanted = dict.fromkeys(whole)
        for tenant, at_unix_s in crowded.items():
            whole[tenant] = max(whole.get(tenant, at_unix_s), at_unix_s)
        self._sessions, self._whole, self._oldest_unix_s = sessions, whole, oldest_unix_s
        self._looked(now_s, newest_unix_s)
        clears = [Clear(tenant) for tenant in self._wanted]
        return clears + [
            Clear(tenant, session) for tenant in sessions.tenants() for session in sessions.names(tenant)
        ]

    @property
    def whole(self) -> dict[bytes, float]:
        """Return the tenants cleared as a whole, as of the last look, and when."""
        return dict(self._whole)

    def whole_at(self, tenant: bytes) -> float | None:
        """Return when a tenant was last cleared as a whole: as just marked here, else as the bucket lists it.

        A listing may not show the newest mark yet. Raises `TierError`.
        """
        if (own_unix_s := self._own.pop(tenant, None)) is not None:
            return own_unix_s
        return self._newest(self._pages(self._keys.clears_of(tenant)), {Clear(tenant)})

    def is_marked(self, tenant: bytes, session: bytes, put_unix_s: float, marks: Iterable[Listed]) -> bool:
        """Return whether what was put then is cleared. `marks`: the tenant's, as they are listed."""
        at_unix_s = self._newest(marks, {Clear(tenant), Clear(tenant, session)})
        return at_unix_s is not None and put_unix_s <= at_unix_s + SLACK_S

    def _newest(self, marks: Iterable[Listed], clears: set[Clear]) -> float | None:
        """Return when the newest of the marks was put that mark one of `clears`."""
        fitting = (item for item in marks if not clears.isdisjoint(self._keys.parse_mark(item.key)))
        return max((item.modified_unix_s for item in fitting), default=None)

    def latest(self, tenant: bytes) -> float:
        """Return when, as of the last look, the tenant or a session of it was last cleared; -inf: never."""
        return max((*self._sessions.values(tenant), self._whole.get(tenant, -float("inf"))))

    def is_cleared(self, tenant: bytes, session: bytes | None, put_unix_s: float) -> bool:
        """Return whether it is cleared as of the last look; `session` None: the tenant as a whole."""
        times = [self._whole.get(tenant)]
        if session is not None:
            times.append(self._sessions.get(tenant, session_of(session)))
        return any(at_unix_s is not None and put_unix_s <= at_unix_s + SLACK_S for at_unix_s in times)

    def settle(self, unsettled: Collection[bytes]) -> int:
        """Delete old marks and return how many. Raises `TierError`.

        Precondition: the last look has judged everything except the tenants in `unsettled`.
        """
        before_unix_s = self._old_unix_s()
        if self._oldest_unix_s > before_unix_s:
            return 0
        gone = 0
        for item in self._pages(self._keys.clears):
            clears = self._keys.parse_mark(item.key)
            if clears and item.modified_unix_s <= before_unix_s and clears[0].tenant not in unsettled:
                self._objects.delete(item.key, self._objects.deadline())
                gone += 1
        return gone

    def _looked(self, now_s: float, newest_unix_s: float) -> None:
        """Remember this look: marks as old as its newest one are from before now."""
        keep_s = self._settings.clears_retention_s
        while len(self._looks) > 1 and self._looks[1][0] <= now_s - keep_s:
            self._looks.popleft()
        if not self._looks or now_s - self._looks[-1][0] >= keep_s / LOOKS_MAX:
            self._looks.append((now_s, newest_unix_s))

    def _old_unix_s(self) -> float:
        """Return the time up to which marks were seen `clears_retention_s` ago."""
        now_s = self._clock()
        seen = [newest for at_s, newest in self._looks if now_s - at_s >= self._settings.clears_retention_s]
        return max(seen, default=-float("inf"))

    def _put(self, key: str, deadline: Deadline) -> None:
        self._objects.put(key, MARK, deadline, only_new=False)
        try:
            found, total = self._objects.get(key, 0, len(MARK), deadline)
        except (TierMiss, BadRecord) as error:
            raise TierError(f"mark: not there: {error}") from None
        if total != len(MARK) or not np.array_equal(found, np.frombuffer(MARK, dtype=np.uint8)):
            raise TierError("mark: other bytes were read back")
