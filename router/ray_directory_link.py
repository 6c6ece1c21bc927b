"""The session directory's actor, as an ingress calls it. The only place between them that knows Ray."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

from ray.exceptions import RayError

from cache_tiers.messages import Clear, Cleared
from cache_tiers.session_actor import Move, Sync, Synced
from cache_tiers.turns import HintEvent
from router.session_directory import DirectoryLost


class RayDirectoryLink:
    """`DirectoryLink` over the actor's handle. `timeout_s`, `clear_timeout_s`: of one call."""

    def __init__(self, actor: Any, *, timeout_s: float = 5.0, clear_timeout_s: float = 60.0) -> None:
        self._actor = actor
        self._timeout_s = timeout_s
        self._clear_timeout_s = clear_timeout_s

    async def sync(self, sync: Sync) -> Synced:
        reply: Synced = await self._ask("sync", self._timeout_s, sync)
        return reply

    async def held(self, tenant: bytes, sessions: tuple[bytes, ...]) -> dict[bytes, dict[str, int]]:
        held: dict[bytes, dict[str, int]] = await self._ask("held", self._timeout_s, tenant, sessions)
        return held

    async def move(self, tenant: bytes, session: bytes, how: Move) -> int:
        moved: int = await self._ask("move", self._timeout_s, tenant, session, how)
        return moved

    async def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> int:
        told: int = await self._ask("hint", self._timeout_s, tenant, session, event, expected_return_s)
        return told

    async def clear(self, clear: Clear) -> dict[str, Cleared | None]:
        cleared: dict[str, Cleared | None] = await self._ask("clear", self._clear_timeout_s, clear)
        return cleared

    async def _ask(self, method: str, timeout_s: float, *args: object) -> Any:
        # In an empty context: a call made beside a request must not pass as a part of it (docs/adr/001).
        call = contextvars.Context().run(getattr(self._actor, method).remote, *args)
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise DirectoryLost(f"{method}: no answer within {timeout_s:g} s") from None
        except RayError as error:
            raise DirectoryLost(f"{method}: {type(error).__name__}") from error
