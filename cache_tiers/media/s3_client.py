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
import threading
from collections.abc import Iterator, Sequence
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
    TierError,
    TierMiss,
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
            yield self._made()
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

    def _made(self) -> S3Client:
        with self._lock:
            if self._client is None:
                self._client = _connect(self._settings)
            return self._client


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
        return self.records + _name(address)

    def bad(self, address: Address) -> str:
        """Return the key under which its bad record is kept for inspection."""
        return self.quarantine + _name(address)

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


def _name(address: Address) -> str:
    return f"{address.tenant.hex()}/{address.namespace.hex()}/{address.extent_id.hex()}"


def _parse(key: str, root: str) -> Address | None:
    found = _NAME.fullmatch(key, len(root)) if key.startswith(root) else None
    return Address(*map(bytes.fromhex, found.groups())) if found else None
