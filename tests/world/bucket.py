"""A bucket as boto3's client shows it: late, refusing, throttling, lying, and with listings that lag."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError, ReadTimeoutError

from tests.world.faults import Faults
from tests.world.scheduler import Scheduler
from tests.world.threads import WALL_S

PAGE_KEYS = 20
LAG_S = 20.0
RECORDS = "/v1/"


@dataclass(slots=True)
class Stored:
    data: bytes
    at_s: float  # of the bucket's clock, which has whole seconds


class Bucket:
    """The server, and the client that each node has of it."""

    def __init__(self, here: Scheduler, faults: Faults) -> None:
        self._here = here
        self._faults = faults
        self.objects: dict[str, Stored] = {}
        self._put_s: dict[str, float] = {}
        self._gone: dict[str, tuple[Stored, float]] = {}

    def put_object(self, **asked: Any) -> dict[str, Any]:
        key, data = asked["Key"], bytes(asked["Body"])
        self._before("PutObject")
        assert hashlib.md5(data, usedforsecurity=False).digest()
        if asked.get("IfNoneMatch") == "*" and key in self.objects:
            raise _refusal("PutObject", "PreconditionFailed", 412)
        self._keep(key, data)
        self._after("PutObject")
        return {}

    def get_object(self, **asked: Any) -> dict[str, Any]:
        self._before("GetObject")
        stored = self.objects.get(asked["Key"])
        if stored is None:
            raise _refusal("GetObject", "NoSuchKey", 404)
        first, last = map(int, asked["Range"].removeprefix("bytes=").split("-"))
        if first >= len(stored.data):
            raise _refusal("GetObject", "InvalidRange", 416)
        part = bytearray(stored.data[first : last + 1])
        if self._faults.strikes("bucket lies"):
            at = self._faults.below(len(part) * 8)
            part[at // 8] ^= 1 << at % 8
        self._after("GetObject")
        ranged = f"bytes {first}-{first + len(part) - 1}/{len(stored.data)}"
        put_at = datetime.datetime.fromtimestamp(stored.at_s, datetime.UTC)
        return {"Body": _Body(bytes(part)), "ContentRange": ranged, "LastModified": put_at}

    def delete_object(self, **asked: Any) -> dict[str, Any]:
        self._before("DeleteObject")
        self._drop(asked["Key"])
        self._after("DeleteObject")
        return {}

    def copy_object(self, **asked: Any) -> dict[str, Any]:
        self._before("CopyObject")
        stored = self.objects.get(asked["CopySource"]["Key"])
        if stored is None:
            raise _refusal("CopyObject", "NoSuchKey", 404)
        self._keep(asked["Key"], stored.data)
        self._after("CopyObject")
        return {}

    def list_objects_v2(self, **asked: Any) -> dict[str, Any]:
        self._before("ListObjectsV2")
        there = {key: one for key, one in self.objects.items() if key.startswith(asked["Prefix"])}
        if self._faults.strikes("bucket list lags"):
            old_s = self._here.now_s - LAG_S
            there = {key: one for key, one in there.items() if RECORDS not in key or self._put_s[key] < old_s}
            there |= {
                key: one
                for key, (one, gone_s) in self._gone.items()
                if gone_s > old_s and RECORDS in key and key.startswith(asked["Prefix"])
            }
        keys = sorted(key for key in there if key > asked.get("ContinuationToken", ""))
        page = keys[:PAGE_KEYS]
        self._after("ListObjectsV2")
        rows = [
            {
                "Key": key,
                "Size": len(there[key].data),
                "LastModified": datetime.datetime.fromtimestamp(there[key].at_s, datetime.UTC),
            }
            for key in page
        ]
        return {
            "Contents": rows,
            "IsTruncated": len(keys) > len(page),
            "NextContinuationToken": page[-1] if page else "",
        }

    def close(self) -> None:
        """Nothing is open."""

    def _keep(self, key: str, data: bytes) -> None:
        self.objects[key] = Stored(data, float(int(WALL_S + self._here.now_s)))
        self._put_s[key] = self._here.now_s
        self._gone.pop(key, None)

    def _drop(self, key: str) -> None:
        stored = self.objects.pop(key, None)
        if stored is not None:
            self._gone[key] = (stored, self._here.now_s)

    def _before(self, operation: str) -> None:
        slow_s = 8.0 if self._faults.strikes("bucket slow") else 0.02
        self._here.sleep(self._faults.uniform(0.0, slow_s))
        if self._faults.strikes("bucket 5xx"):
            raise _refusal(operation, "InternalError", 500)
        if self._faults.strikes("bucket throttles"):
            raise _refusal(operation, "SlowDown", 503)

    def _after(self, operation: str) -> None:
        """What was asked for is done; the answer may not come."""
        self._here.sleep(self._faults.uniform(0.0, 0.02))
        if self._faults.strikes("bucket late"):
            self._here.sleep(self._faults.uniform(0.0, 12.0))
            raise ReadTimeoutError(endpoint_url=operation)


class _Body:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __enter__(self) -> _Body:
        return self

    def __exit__(self, *_: object) -> None:
        self._data = b""

    def close(self) -> None:
        self._data = b""

    def read1(self, nbytes: int) -> bytes:
        part, self._data = self._data[:nbytes], self._data[nbytes:]
        return part

    read = read1


def _refusal(operation: str, code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, operation)  # type: ignore[typeddict-item]
