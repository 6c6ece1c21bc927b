"""Bodies of requests, kept in a proxy until their answers begin: so that it can repeat a request itself.

An ingress that dies takes its requests with it. Those of whose answer nothing was sent yet may go to
another, if they do no more than read or generate. The rest is the client's to repeat.
"""

from __future__ import annotations

from collections import deque

from starlette.types import Message, Receive, Scope

SAFE_METHODS = frozenset({"GET", "HEAD"})
GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
READING_PATHS = frozenset({"/v1/messages/count_tokens", "/tokenize", "/detokenize"})


class RetryBuffer:
    """The room for the bodies of a proxy's open requests. Use it from one event loop.

    `bytes_max`: of all together; a request whose body finds no room is not repeated. 0: none is.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self.repeated = 0
        """Requests that were sent again."""

    def of(self, scope: Scope, receive: Receive) -> RetryBody:
        """Return the ASGI `receive` of a request, which keeps what it gives. Call `drop` in the end."""
        path = scope["path"]
        is_safe = scope["method"] in SAFE_METHODS or (
            scope["method"] == "POST" and (path in GENERATION_PATHS or path in READING_PATHS)
        )
        return RetryBody(self, receive, is_kept=is_safe and self.bytes_max > 0)


class RetryBody:
    """ASGI `receive` of one request, which can begin again."""

    def __init__(self, room: RetryBuffer, receive: Receive, *, is_kept: bool) -> None:
        self._room = room
        self._receive = receive
        self._is_kept = is_kept
        self._given: list[Message] = []
        self._again: deque[Message] = deque()
        self._held_bytes = 0

    async def __call__(self) -> Message:
        if self._again:
            return self._again.popleft()
        message = await self._receive()
        if self._is_kept and message["type"] == "http.request":
            self._keep(message)
        return message

    def rewind(self) -> bool:
        """Begin again, once; return whether all that was given can be given again."""
        if not self._is_kept:
            return False
        self._again.extend(self._given)
        self._is_kept = False
        self._room.repeated += 1
        return True

    def drop(self) -> None:
        """Keep nothing from now on: the answer has begun. What is being given again is given to its end."""
        self._is_kept = False
        self._given.clear()
        self._room.held_bytes -= self._held_bytes
        self._held_bytes = 0

    def _keep(self, message: Message) -> None:
        size = len(message.get("body", b""))
        if self._room.held_bytes + size > self._room.bytes_max:
            self.drop()
            return
        self._given.append(message)
        self._room.held_bytes += size
        self._held_bytes += size
