"""`PeerCalls` over Ray: finds other nodes' tier actors by name.

Every call has a time limit, including the actor look-up: GCS may hang, so each node being looked up gets its
own thread.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from cache_tiers.blocks import Bytes
from cache_tiers.messages import ExtentRequest, Fetched, FetchFailed, Lookup, LookupResult, PushRequest
from cache_tiers.transport import Export, PeerError, PeerLate, PeerLost

logger = logging.getLogger(__name__)


class _Search:
    """A look-up of one node's actor in flight.

    `handle`: None if there is no actor; `error`: why the look-up failed.
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        self.handle: Any = None
        self.error = ""


class PeerActors:
    """Calls other nodes' tier actors. `name_of`: node id -> name of its actor."""

    def __init__(self, name_of: Callable[[str], str]) -> None:
        self._name_of = name_of
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}
        self._searches: dict[str, _Search] = {}

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
        data: Bytes = self._get(node, reply.ref[0], ends_s - time.monotonic())
        return data

    def check(self, node: str, ask: ExtentRequest) -> None:
        self._tell(node, "peer_check", ask)

    def take(self, node: str, take: PushRequest, timeout_s: float) -> str:
        outcome: str = self._call(node, "peer_take", timeout_s, take)
        return outcome

    def _call(self, node: str, method: str, timeout_s: float, *args: object) -> Any:
        ends_s = time.monotonic() + timeout_s
        with self._lock:
            was_known = node in self._handles
        try:
            return self._call_once(node, method, ends_s, *args)
        except PeerLost:
            if not was_known:
                raise
            # The node's tiers may have left and returned with its next replica: the handle was the old
            # actor's.
            return self._call_once(node, method, ends_s, *args)

    def _call_once(self, node: str, method: str, ends_s: float, *args: object) -> Any:
        handle = self._handle(node, ends_s - time.monotonic())
        # Empty context: this call must not pass as a part of the current request (docs/adr/001).
        ref = contextvars.Context().run(lambda: getattr(handle, method).remote(*args))
        return self._get(node, ref, ends_s - time.monotonic())

    def _get(self, node: str, ref: Any, timeout_s: float) -> Any:
        try:
            return ray.get(ref, timeout=max(0.0, timeout_s))
        except GetTimeoutError:
            raise PeerLate(f"no answer within {timeout_s:.3f} s") from None
        except ActorDiedError:
            with self._lock:
                self._handles.pop(node, None)
            raise PeerLost("its tier actor is dead") from None
        except RayError as error:
            raise PeerError(type(error).__name__) from error

    def _tell(self, node: str, method: str, *args: object) -> None:
        """Send a call without waiting for it or learning whether it arrived."""
        with self._lock:
            handle = self._handles.get(node)
        if handle is None:
            return
        try:
            contextvars.Context().run(lambda: getattr(handle, method).remote(*args))
        except RayError as error:
            logger.info("node %s was not told %s: %s", node[:8], method, type(error).__name__)

    def _handle(self, node: str, timeout_s: float) -> Any:
        """Return the node's actor handle. Raises `PeerLost`, `PeerLate`, `PeerError`."""
        with self._lock:
            if node in self._handles:
                return self._handles[node]
            search = self._searches.get(node)
            if search is None:
                search = self._searches[node] = _Search()
                threading.Thread(
                    target=self._find, args=(node, search), name="find-peer", daemon=True
                ).start()
        if not search.done.wait(max(0.0, timeout_s)):
            raise PeerLate(f"its actor was not found within {timeout_s:.3f} s")
        if search.error:
            raise PeerError(search.error)
        if search.handle is None:
            raise PeerLost("it has no tier actor")
        return search.handle

    def _find(self, node: str, search: _Search) -> None:
        try:
            search.handle = ray.get_actor(self._name_of(node))
        except ValueError:  # Ray's answer when there is no such actor
            search.handle = None
        except Exception as error:  # any failure (GCS unavailable, Ray shutting down) must end the wait
            logger.exception("the actor of node %s could not be looked for", node[:8])
            search.error = type(error).__name__
        with self._lock:
            del self._searches[node]
            if search.handle is not None:
                self._handles[node] = search.handle
        search.done.set()
