"""Sessions that another ingress has served: replies and places are asked for when the next turn comes.

And what a turn leaves here is told to the session directory before its answer ends, so that the next turn may
come to any ingress. Whatever fails costs speed: the reply is tokenised again, the session has no home.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache_tiers.blocks import Placement
from cache_tiers.sessions import Item, SessionRow
from configs.optional_sections import IngressSettings
from router.ingresses.told_together import ToldTogether
from router.openai import ParsedChat
from router.prompt import Owner, SharedReplies
from router.routing import DirectoryLost, SessionDirectory

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
        self._told = ToldTogether()
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
