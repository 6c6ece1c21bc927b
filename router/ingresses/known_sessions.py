"""Sessions that another ingress has served: replies and places are asked for when the next turn comes.

And what a turn leaves here is told to the session directory before its answer ends, so that the next turn may
come to any ingress. Whatever fails costs speed: the reply is tokenised again, the session has no home.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from samovar.cache_tiers.blocks import Placement
from samovar.cache_tiers.sessions import Item, SessionRow
from samovar.configs.optional_sections import IngressSettings
from samovar.router.openai import ParsedChat
from samovar.router.prompt import Owner, SharedReplies
from samovar.router.routing import DirectoryLost, SessionDirectory

BYTES_MAX = 1 << 20
"""A call that carries more takes up no further turn."""


class KeepLink(Protocol):
    """The part of the directory's link that keeps items. Raises `DirectoryLost`."""

    async def keep(self, items: tuple[Item, ...], rows: tuple[SessionRow, ...]) -> int: ...


@dataclass(slots=True)
class _Bundle:
    """What a call carries that has not begun. `over`: what it failed by, or None."""

    over: asyncio.Future[DirectoryLost | None]
    items: list[Item] = field(default_factory=list)
    rows: list[SessionRow] = field(default_factory=list)
    nbytes: int = 0


class TurnBatcher:
    """Groups the calls of `keep`: one at a time, for all turns that ended meanwhile. For one event loop.

    A call costs about a CPU-millisecond at both ends, whatever it carries. An idle ingress tells each turn at
    once; a busy one, whose call is still under way, tells those that end until then with the next.
    """

    def __init__(self) -> None:
        self.calls = 0
        """Calls that were made."""
        self._is_calling = asyncio.Lock()
        self._next: _Bundle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def keep(self, link: KeepLink, items: Sequence[Item], rows: Sequence[SessionRow]) -> None:
        """Tell of a turn; return when the directory knows it. Raises `DirectoryLost`."""
        call = self._next
        if call is None or call.nbytes > BYTES_MAX:
            loop = asyncio.get_running_loop()
            call = self._next = _Bundle(loop.create_future())
            task = loop.create_task(self._make(link, call))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        call.items += items
        call.rows += rows
        call.nbytes += sum(item.nbytes for item in items)
        lost = await asyncio.shield(call.over)  # one that waits no longer ends it for no other
        if lost is not None:
            raise lost

    async def _make(self, link: KeepLink, call: _Bundle) -> None:
        lost: DirectoryLost | None = DirectoryLost("the call has failed")
        try:
            async with self._is_calling:
                if self._next is call:
                    self._next = None  # what ends from now on goes with another
                self.calls += 1
                await link.keep(tuple(call.items), tuple(call.rows))
                lost = None
        except DirectoryLost as failed:
            lost = failed
        finally:
            call.over.set_result(lost)


logger = logging.getLogger(__name__)

SILENT_S = 1.0
"""After a failed call the directory is asked nothing for this long: each request would wait in vain."""


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """Whose turn it is. `tenant`: the tag; `salt`: of its replies; `began_unix_s`: when its request came."""

    tenant: bytes
    owner: Owner
    salt: bytes
    forgets: int
    began_unix_s: float


class KnownSessions:
    """Asks for sessions, and tells of them. Use it from one event loop. `wall_clock`: unix seconds."""

    def __init__(
        self,
        replies: SharedReplies,
        directory: SessionDirectory,
        settings: IngressSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replies = replies
        self._directory = directory
        self._settings = settings
        self._clock = clock
        self._asks_again_s = 0.0
        self._told = TurnBatcher()
        self.recalled = 0
        """Replies that were taken over."""
        self.refused = 0
        """Replies that were not packed for their tenant, or had changed."""

    async def recall(self, turn: SessionTurn, request: ParsedChat) -> None:
        """Take over what other ingresses know of a session, if its last reply is not known here."""
        link = self._directory.link
        if link is None or not self._is_on or self._replies.knows_last(turn.salt, turn.owner, request):
            return
        try:
            async with asyncio.timeout(self._settings.wait_s):
                found = await link.recall(turn.tenant, turn.owner.session)
        except (DirectoryLost, TimeoutError) as lost:
            self._pause(lost)
            return
        self._directory.table.merge(found.rows)
        taken, refused = self._replies.take(
            turn.salt, turn.owner, [item.body for item in found.replies], forgets=turn.forgets
        )
        self.recalled += taken
        self.refused += refused  # another salt's, too: a session may be continued under another

    async def keep(
        self, turn: SessionTurn, replies: int, lineages: Sequence[bytes], placement: Placement | None
    ) -> None:
        """Tell of a turn: of its newest `replies`, and of where its lineages are now.

        `placement`: of its blocks, which says how long a reply is kept, and whether on disk.
        """
        link = self._directory.link
        if link is None or not self._is_on:
            return
        lives_s = self._settings.kept_s_max
        if placement is not None:
            lives_s = min(lives_s, placement.ttl_s)
        items = [
            Item(
                turn.tenant,
                turn.owner.session,
                "reply",
                name,
                body,
                turn.began_unix_s,
                turn.began_unix_s + lives_s,
                is_durable=placement is not None and placement.is_durable,
            )
            for name, body in self._replies.newest(turn.salt, turn.owner, replies)
        ]
        known = (self._directory.table.get(turn.tenant, lineage) for lineage in lineages)
        rows: list[SessionRow] = [row for row in known if row is not None]
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await self._told.keep(link, items, rows)
        except (DirectoryLost, TimeoutError) as lost:
            self._pause(lost)

    @property
    def _is_on(self) -> bool:
        return self._settings.kept_bytes_max > 0 and self._clock() >= self._asks_again_s

    def _pause(self, lost: Exception) -> None:
        logger.info("the session directory is not asked for %g s: %s", SILENT_S, lost or "it was late")
        self._asks_again_s = self._clock() + SILENT_S
