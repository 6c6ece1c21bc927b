"""Marks of cleared data in the bucket itself, so that no node's later listing takes it in.

A mark is a small object with its own key (`s3_keys.py`). What is older than it, by the bucket's own clock,
was cleared; what is newer was put there afterwards. So nodes need not agree on the time, nor outlive each
other. A mark is deleted when a whole listing has been judged by it, some time after it was put.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from samovar.cache_tiers.blocks import BadRecord, Clear, TenantRows, TierError, TierMiss, session_of
from samovar.cache_tiers.media.s3_client import Listed, S3Objects
from samovar.cache_tiers.media.s3_keys import SESSIONS_MAX, S3Keys
from samovar.cache_tiers.media.tier import Deadline
from samovar.configs.sections import S3TierSettings

MARK = b"cleared\n"
SLACK_S = 1.0
"""Clock slack: servers report whole seconds and many servers serve one bucket.

What is newer than a mark by less than this counts as older.
"""

LOOKS_MAX = 32
"""Maximum number of remembered looks, which bound the age of marks from below."""

Pages = Callable[[str], Iterator[Listed]]


class S3Clears:
    """Marks of one bucket prefix. `pages`: lists a key prefix. `clock`: monotonic seconds.

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
        self._oldest_unix_s = float("inf")
        self._looks: deque[tuple[float, float]] = deque()  # when, and the time of the newest mark then

    def mark(self, clears: Sequence[Clear], deadline: Deadline) -> None:
        """Put marks for `clears`, all of one tenant, and read them back. Raises `TierError`."""
        sessions = [clear.session for clear in clears]
        for at in range(0, len(sessions), SESSIONS_MAX):
            key = self._keys.mark(clears[0].tenant, sessions[at : at + SESSIONS_MAX], secrets.token_hex(8))
            self._put(key, deadline)

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
        """Ask the bucket when a tenant was last cleared as a whole. Raises `TierError`."""
        marks = self._pages(self._keys.clears_of(tenant))
        times = [item.modified_unix_s for item in marks if Clear(tenant) in self._keys.parse_mark(item.key)]
        return max(times, default=None)

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
