"""Calls Ray actors: within a time limit, in an empty context, and looks an actor up again after it died.

Ray's exceptions do not leave this module: a call raises `PeerError`, `PeerLate` or `PeerLost`. `PeerActors`
calls other nodes' tier actors.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from samovar.cache_tiers.blocks import Bytes
from samovar.cache_tiers.media import Breaker
from samovar.cache_tiers.messages import (
    ExtentRequest,
    Fetched,
    FetchFailed,
    Lookup,
    LookupResult,
    PushRequest,
)
from samovar.cache_tiers.transport import Export, PeerError, PeerLate, PeerLost

logger = logging.getLogger(__name__)


FIND_S = 1.0
"""An actor that died is made again after this pause; it doubles for each that dies before it answers."""


def start(method: Any, *args: object) -> Any:
    """Start a remote call; return its reference, or the stream of a Serve handle. Raises `PeerError`.

    In an empty context: a call made for one HTTP request must not count as part of it (docs/adr/001).
    """
    with _translated(0.0):
        return contextvars.Context().run(method.remote, *args)


def answer(ref: Any, timeout_s: float) -> Any:
    """Return the value of a reference. Raises `PeerError`."""
    with _translated(timeout_s):
        return ray.get(ref, timeout=max(0.0, timeout_s))


def ask_all(actors: Mapping[str, Any], method: str, *args: object, timeout_s: float) -> dict[str, Any]:
    """Call all actors (node -> handle) at the same time; return the answers, without failed and late ones."""
    calls = {node: start(getattr(actor, method), *args) for node, actor in actors.items()}
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
    answers = {}
    for node, call in calls.items():
        try:
            answers[node] = answer(call, 0.0)
        except PeerLate:
            logger.warning("%s: the tiers of node %s did not answer", method, node[:8])
        except PeerError as error:
            logger.warning("%s: the tiers of node %s failed: %s", method, node[:8], error)
    return answers


class ActorRef:
    """An actor that is looked up at the first call, and again after it died. Thread-safe.

    `find`: returns the handle; `ValueError`: there is no such actor. It runs in its own thread, because GCS
    may hang. `handle`: if it is known already. `restart_backoff_s_max`: for a `find` that creates the actor:
    Ray does not restart one whose start failed, and without pauses (of up to this long) every call would
    create one.
    """

    def __init__(
        self,
        find: Callable[[], Any],
        *,
        handle: Any = None,
        restart_backoff_s_max: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._handle = handle
        self._search: Future[Any] | None = None
        backoff_s_max = restart_backoff_s_max
        self._pauses = None if backoff_s_max is None else Breaker(1, FIND_S, backoff_s_max, clock)

    def call(self, method: str, *args: object, timeout_s: float) -> Any:
        """Return the answer. Blocks, for `timeout_s` with the look-up. Raises `PeerError`."""
        ends_s = time.monotonic() + timeout_s
        was_known = self._handle is not None
        try:
            return self._call(method, args, ends_s)
        except PeerLost:
            if not was_known:
                raise
            return self._call(method, args, ends_s)  # the actor may be back: the handle was the old one's

    async def call_async(self, method: str, *args: object, timeout_s: float) -> Any:
        """Await the answer; a call to an actor that died is not repeated. Raises `PeerError`."""
        ends_s = time.monotonic() + timeout_s
        handle = self._handle or await asyncio.to_thread(self._found, ends_s)
        with self._watched(handle), _translated(timeout_s):
            return await asyncio.wait_for(
                start(getattr(handle, method), *args), max(0.0, ends_s - time.monotonic())
            )

    def tell(self, method: str, *args: object) -> None:
        """Send a call to an actor that is known, without waiting; whether it arrives is not learned."""
        handle = self._handle
        if handle is not None:
            try:
                start(getattr(handle, method), *args)
            except PeerError as error:
                logger.info("an actor was not told %s: %s", method, error)

    def _call(self, method: str, args: tuple[object, ...], ends_s: float) -> Any:
        handle = self._found(ends_s)
        with self._watched(handle):
            return answer(start(getattr(handle, method), *args), ends_s - time.monotonic())

    @contextmanager
    def _watched(self, handle: Any) -> Iterator[None]:
        """Forget the handle if the call shows that the actor is dead."""
        try:
            yield
        except PeerLost:
            with self._lock:
                if self._handle is handle:  # else a late call to the previous actor
                    self._handle = None
                    if self._pauses is not None:
                        self._pauses.failed()
            raise
        if self._pauses is not None and self._pauses.state != "closed":
            with self._lock:
                if self._handle is handle:
                    self._pauses.succeeded()

    def _found(self, ends_s: float) -> Any:
        """Return the handle. Raises `PeerLost`, `PeerLate`, `PeerError`."""
        with self._lock:
            if self._handle is not None:
                return self._handle
            if self._search is None:
                if self._pauses is not None and not self._pauses.allows():
                    raise PeerLost("its actor is dead, and the next one is not made yet")
                search: Future[Any] = Future()
                threading.Thread(target=self._look_up, args=(search,), name="find-actor", daemon=True).start()
                self._search = search
            search = self._search
        try:
            return search.result(max(0.0, ends_s - time.monotonic()))
        except TimeoutError:
            raise PeerLate("its actor was not found in time") from None

    def _look_up(self, search: Future[Any]) -> None:
        handle = None
        why: PeerError = PeerLost("it has no actor")
        try:
            handle = self._find()
        except ValueError as error:  # Ray's answer when there is no such actor
            logger.info("no actor: %s", error)
        except Exception as error:  # any failure (GCS unavailable, Ray shutting down) must end the wait
            logger.exception("an actor could not be looked for")
            why = PeerError(type(error).__name__)
        with self._lock:
            self._handle, self._search = handle, None
            if handle is None and self._pauses is not None:
                self._pauses.failed()
        if handle is None:
            search.set_exception(why)
        else:
            search.set_result(handle)


@contextmanager
def _translated(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:  # Ray's, too
        raise PeerLate(f"no answer within {timeout_s:.3g} s") from None
    except ActorDiedError:
        raise PeerLost("its actor is dead") from None
    except RayError as error:
        raise PeerError(type(error).__name__) from error


class PeerActors:
    """Calls other nodes' tier actors. `name_of`: node id -> name of its actor."""

    def __init__(self, name_of: Callable[[str], str]) -> None:
        self._name_of = name_of
        self._lock = threading.Lock()
        self._actors: dict[str, ActorRef] = {}

    def lookup(self, node: str, lookup: Lookup, timeout_s: float) -> LookupResult:
        found: LookupResult = self._call(node, "peer_lookup", timeout_s, lookup)
        return found

    def export(self, node: str, ask: ExtentRequest, timeout_s: float) -> Export | FetchFailed:
        reply: Export | FetchFailed = self._call(node, "peer_export", timeout_s, ask)
        return reply

    def release(self, node: str, export: Export) -> None:
        self._tell(node, "peer_release", export)

    def read(self, node: str, ask: ExtentRequest, timeout_s: float) -> Bytes | FetchFailed:
        ends_s = time.monotonic() + timeout_s
        reply: Fetched | FetchFailed = self._call(node, "peer_read", timeout_s, ask)
        if isinstance(reply, FetchFailed) or reply.data is not None:
            return reply if isinstance(reply, FetchFailed) else reply.data  # type: ignore[return-value]
        data: Bytes = answer(reply.ref[0], ends_s - time.monotonic())
        return data

    def check(self, node: str, ask: ExtentRequest) -> None:
        self._tell(node, "peer_check", ask)

    def learned(self, node: str, timeout_s: float) -> bytes:
        model: bytes = self._call(node, "peer_learned", timeout_s)
        return model

    def take(self, node: str, take: PushRequest, timeout_s: float) -> str:
        outcome: str = self._call(node, "peer_take", timeout_s, take)
        return outcome

    def _call(self, node: str, method: str, timeout_s: float, *args: object) -> Any:
        with self._lock:
            actor = self._actors.setdefault(node, ActorRef(partial(ray.get_actor, self._name_of(node))))
        try:
            return actor.call(method, *args, timeout_s=timeout_s)
        except PeerLost:
            with self._lock:
                self._actors.pop(node, None)  # it may never come back
            raise

    def _tell(self, node: str, method: str, *args: object) -> None:
        with self._lock:
            actor = self._actors.get(node)
        if actor is not None:
            actor.tell(method, *args)
