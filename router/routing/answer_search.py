"""Asks replicas for an answer that one of them keeps, and waits no longer than it must."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence

from samovar.replicas.messages import LoggedAnswer

logger = logging.getLogger(__name__)

Told = tuple[str, LoggedAnswer | None]
"""Which replica says it, and what it keeps."""

SILENT_S = 10.0
"""A replica that did not answer in time is not waited for again for so long: each request would."""


class AnswerSearch:
    """The first answer that is kept, of replicas that are asked together. Use it from one event loop.

    `wait_s`: how long replicas are waited for. `clock`: monotonic seconds.
    """

    def __init__(self, wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._wait_s = wait_s
        self._clock = clock
        self._silent: dict[str, float] = {}  # replica -> until when it is not waited for

    async def find(
        self, asked: Sequence[Awaitable[Told]], replicas: Collection[str]
    ) -> tuple[LoggedAnswer | None, bool]:
        """Return what is kept, one that is over before one that is not, and whether all have answered.

        `replicas`: those that exist now, as far as is known. Waits for none that has just been silent once
        the others have answered, and for none once an answer is found.
        """
        now_s = self._clock()
        self._silent = {name: until_s for name, until_s in self._silent.items() if until_s > now_s}
        pending = {asyncio.ensure_future(one) for one in asked}
        wanted, heard, found = set(replicas) - self._silent.keys(), set[str](), list[LoggedAnswer]()
        is_whole, ends_s = bool(pending), asyncio.get_running_loop().time() + self._wait_s
        try:
            while pending and not found and not (wanted and wanted <= heard):
                wait_s = max(0.0, ends_s - asyncio.get_running_loop().time())
                done, pending = await asyncio.wait(
                    pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in done:
                    if task.cancelled() or task.exception() is not None:
                        is_whole = False
                        continue
                    name, kept = task.result()
                    heard.add(name)
                    found += [] if kept is None else [kept]
            else:
                wanted = heard  # none was too late
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        for name in heard:
            self._silent.pop(name, None)
        for name in wanted - heard:
            logger.warning("replica %s does not say what it keeps: not waited for for %g s", name, SILENT_S)
            self._silent[name] = self._clock() + SILENT_S
        return max(found, key=lambda one: one.is_over, default=None), is_whole and not pending
