"""What is put into a chat's prompt, or left out of it: stages that a chat passes one behind the other."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from samovar.cache_tiers.blocks import Placement
from samovar.replicas.messages import Route
from samovar.router.openai import ChatMessage, Choice, ParsedChat, UnsupportedParameter

logger = logging.getLogger(__name__)

TELL_S = 1.0
"""How long the end of an answer may wait for a stage."""
NOT_SERVED = {
    "documents": "documents are not served here: knowledge.enabled is false. Leave them out.",
    "knowledge": "knowledge is not served here: knowledge.enabled is false. Leave it out.",
    "compaction": "compaction is not served here: compaction.enabled is false. Leave it out.",
}
"""A chat's fields that are wishes to a stage of that name, and what is said where there is none."""


class Context(Protocol):
    """What a stage did to one prompt."""

    def told(self, cached_tokens: int) -> dict[str, Any]:
        """Return what the receipt says of it; `cached_tokens`: of the prompt, from its first one on."""
        ...


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """A chat request on its way to its prompt, and whose it is.

    `session`: its tag, `key`: the session's key. `salt`: of its blocks. `forgets`: `ForgetCount.count` at
    its arrival. `request`: as it came. `placed`: as the stages so far have made it. `nodes`: where blocks of
    what they put into it were computed in advance.
    """

    tenant: str
    session: bytes
    key: str
    salt: bytes
    forgets: int
    placement: Placement | None
    request: ParsedChat
    placed: ParsedChat
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """The first answer to a chat. `sent`: as its client sends it back; None: its text alone.

    `home`: the replica that has its blocks. `is_replayed`: it was told before, perhaps to another ingress.
    `is_deleted`: whether the turn's session was deleted since it began; thread-safe.
    """

    choice: Choice
    sent: ChatMessage | None
    home: str
    is_replayed: bool
    is_deleted: Callable[[], bool]


class PromptStage(ABC):
    """Puts something into the prompts of chats, or leaves something out. Use it from one event loop.

    `name`: of its part of the receipt. `keeps`: what it keeps of sessions, in words, as deletions call it;
    empty: nothing. `is_shared`: all ingresses keep that in one place, and it is forgotten there at once.
    """

    name: str
    keeps = ""
    is_shared = False

    @abstractmethod
    async def place(self, turn: AskedTurn) -> tuple[AskedTurn, Context | None]:
        """Return a turn as it goes on, and what was done; as it came, and None, if nothing.

        Raises `ApiError`.
        """

    async def measured(self, context: Any, rendered: str | None) -> None:
        """Count the tokens of what was done in the rendered prompt; None: the prompt was cut."""
        return

    async def answered(self, turn: AskedTurn, context: Any, answer: AnsweredTurn) -> None:
        """Take note of the answer, before its receipt is told; `turn` as it came, `context` may be None."""
        return

    def demand(self) -> AbstractContextManager[None]:
        """Give way to a request for as long as it is served."""
        return nullcontext()

    def card(self, tenant: str, session: bytes) -> dict[str, Any]:
        """Return what a session's card says of it."""
        return {}

    async def forget(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        """Forget what it `keeps` of these sessions, or of all (None). Raises `ApiError`."""
        return

    async def forget_entries(self, tenant: str, entries: Collection[str] | None) -> None:
        """Erase what was made of prompts that had these entries of knowledge, or any (None).

        Raises `ApiError`.
        """
        return

    def start(self) -> None:
        """Begin work on the running event loop."""
        return

    async def stop(self) -> None:
        """End that work."""
        return

    def close(self) -> None:
        """Stop threads and close files. Blocks."""
        return


@dataclass(frozen=True, slots=True)
class Placing:
    """What one stage did to one chat: `turn` as it came to the stage, `context`: None if nothing."""

    stage: PromptStage
    turn: AskedTurn
    context: Context | None


async def staged(stages: Sequence[PromptStage], turn: AskedTurn) -> tuple[AskedTurn, tuple[Placing, ...]]:
    """Return a turn behind all stages, and what each did. Raises `ApiError`.

    `UnsupportedParameter` for a wish that no stage serves.
    """
    names = {stage.name for stage in stages}
    for field, message in NOT_SERVED.items():
        if field not in names and getattr(turn.request, field):
            raise UnsupportedParameter(field, message)
    placings = []
    for stage in stages:
        given = turn
        turn, context = await stage.place(given)
        placings.append(Placing(stage, given, context))
    return turn, tuple(placings)


async def measure(placings: Sequence[Placing], rendered: str | None) -> None:
    """Tell the stages that did something of the rendered prompt; None: it was cut."""
    for one in placings:
        if one.context is not None:
            await one.stage.measured(one.context, rendered)


async def tell(placings: Sequence[Placing], answer: AnsweredTurn, request_id: str) -> None:
    """Tell the stages of a chat the answer to it. Their failures are logged: the answer is whole."""
    for one in placings:
        try:
            async with asyncio.timeout(TELL_S):
                await one.stage.answered(one.turn, one.context, answer)
        except Exception as failed:  # noqa: BLE001 - the answer is whole; TimeoutError: it is busy
            reason = type(failed).__name__
            logger.info("request %s: %s, turn not kept by %s", request_id, reason, one.stage.name)


def asking(route: Route, nodes: Sequence[str]) -> Route:
    """Return a route whose request also asks these nodes for blocks, behind those that it names."""
    return replace(route, peers=tuple(dict.fromkeys((*route.peers, *nodes)))) if nodes else route
