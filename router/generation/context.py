"""Context that is put into a chat request before its prompt is built, and what the receipt says of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cache_tiers.blocks import Placement
from replicas.messages import Route
from router.openai import ChatMessage, ParsedChat, UnsupportedParameter


class Context(Protocol):
    """What was put into one prompt."""

    def told(self, cached_tokens: int) -> dict[str, Any]:
        """Return what the receipt says of it; `cached_tokens`: of the prompt, from its first one on."""
        ...


class Placer(Protocol):
    """What puts a text into a chat."""

    async def place(
        self, request: ParsedChat, tenant: str, session: bytes
    ) -> tuple[ParsedChat, Context | None]:
        """Return the request with its context; as it came, and None, if it wants none. Raises `ApiError`."""
        ...

    async def measure(self, context: Any, rendered: str | None) -> None:
        """Count the tokens of a context in its rendered prompt; None: the prompt was cut."""
        ...


class DocumentContext(Context, Protocol):
    """The documents in one prompt."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where their blocks were computed in advance."""
        ...


class DocumentSource(Protocol):
    """Documents that chats name (`router/context/documents`), worked on in the background. See `Placer`."""

    async def place(
        self, request: ParsedChat, tenant: str, session: bytes
    ) -> tuple[ParsedChat, DocumentContext | None]:
        """Return the request with its documents; as it came, and None, if it names none."""
        ...

    async def measure(self, context: Any, rendered: str | None) -> None:
        """Count the tokens of the documents in a rendered prompt; None: the prompt was cut."""
        ...

    def start(self) -> None:
        """Begin that work on the running event loop."""
        ...

    async def stop(self) -> None:
        """End that work."""
        ...

    def close(self) -> None:
        """Close files."""
        ...


class ContextSource(Placer, Protocol):
    """Where context comes from: a knowledge base (`router/context/knowledge`), where one is switched on."""

    async def answered(self, context: Any, said: ChatMessage, is_deleted: Callable[[], bool]) -> None:
        """Take note of the answer to a prompt with a context, before the receipt is told.

        `is_deleted`: whether the turn's session was deleted since it began; thread-safe.
        """
        ...

    async def forget(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        """Forget what was put into these sessions, or into all (None)."""
        ...

    def close(self) -> None:
        """Stop threads and close files."""
        ...


def asking(route: Route, nodes: Sequence[str]) -> Route:
    """Return a route whose request also asks these nodes for blocks, behind those that it names."""
    return replace(route, peers=tuple(dict.fromkeys((*route.peers, *nodes)))) if nodes else route


async def with_documents(
    source: DocumentSource | None, request: ParsedChat, tenant: str, session: bytes
) -> tuple[ParsedChat, DocumentContext | None]:
    """Return a chat with the documents that it names in front, where documents are served.

    `source`: the documents (`router/context/documents`). Raises `UnsupportedParameter` where there are none.
    """
    if source is not None:
        return await source.place(request, tenant, session)
    if request.documents:
        message = "documents are not served here: knowledge.enabled is false. Leave them out."
        raise UnsupportedParameter("documents", message)
    return request, None


async def in_context(
    source: ContextSource | None, request: ParsedChat, tenant: str, session: bytes
) -> tuple[ParsedChat, Context | None]:
    """Return a chat with its context. Raises `UnsupportedParameter` for a wish that is not served here."""
    if source is not None:
        return await source.place(request, tenant, session)
    if request.knowledge is not None:
        message = "knowledge is not served here: knowledge.enabled is false. Leave it out."
        raise UnsupportedParameter("knowledge", message)
    return request, None


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """A chat request on its way to its prompt, and whose it is.

    `session`: its tag, `key`: the session's key. `salt`: of its blocks. `forgets`: the tenant's forget
    counter at its arrival. `request`: as it came. `placed`: with its context.
    """

    tenant: str
    session: bytes
    key: str
    salt: bytes
    forgets: int
    placement: Placement | None
    request: ParsedChat
    placed: ParsedChat


class WindowKeeper(Protocol):
    """What makes a long conversation fit the window: `router/context/compaction`, where it is switched on."""

    def demand(self) -> AbstractContextManager[None]:
        """Give way to a request for as long as it is served."""
        ...

    async def fit(self, asked: AskedTurn) -> tuple[ParsedChat, Context | None]:
        """Return the request as it fits, and what was done; as it was placed, and None, if nothing.

        Raises `ApiError`.
        """
        ...

    def over(self, asked: AskedTurn, home: str, reply: ChatMessage) -> None:
        """Prepare the next turn of a conversation; `home`: the replica that has its blocks."""
        ...

    def told(self, tenant: str, session: bytes) -> dict[str, Any] | None:
        """Return where a session is cut; None: nowhere."""
        ...

    async def forget(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        """Forget all of these sessions, or of all (None)."""
        ...

    async def forget_entries(self, tenant: str, entries: Collection[str] | None) -> None:
        """Erase what was made of prompts that had these entries of knowledge, or any (None).

        Raises `ApiError`.
        """
        ...

    async def close(self) -> None:
        """Stop work and close files."""
        ...


async def in_window(keeper: WindowKeeper | None, asked: AskedTurn) -> tuple[ParsedChat, Context | None]:
    """Return a chat as it fits. Raises `UnsupportedParameter` for a wish that is not served here."""
    if keeper is not None:
        return await keeper.fit(asked)
    if asked.request.compaction is not None:
        message = "compaction is not served here: compaction.enabled is false. Leave it out."
        raise UnsupportedParameter("compaction", message)
    return asked.placed, None
