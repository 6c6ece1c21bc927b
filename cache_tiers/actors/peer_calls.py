"""`PeerCalls` over Ray: finds other nodes' tier actors by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray

from samovar.cache_tiers.actors import rpc
from samovar.cache_tiers.blocks import Bytes
from samovar.cache_tiers.messages import (
    ExtentRequest,
    Fetched,
    FetchFailed,
    Lookup,
    LookupResult,
    PushRequest,
)
from samovar.cache_tiers.transport import Export, PeerLost


class PeerActors:
    """Calls other nodes' tier actors. `name_of`: node id -> name of its actor."""

    def __init__(self, name_of: Callable[[str], str]) -> None:
        self._name_of = name_of
        self._lock = threading.Lock()
        self._actors: dict[str, rpc.ActorRef] = {}

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
        data: Bytes = rpc.answer(reply.ref[0], ends_s - time.monotonic())
        return data

    def check(self, node: str, ask: ExtentRequest) -> None:
        self._tell(node, "peer_check", ask)

    def take(self, node: str, take: PushRequest, timeout_s: float) -> str:
        outcome: str = self._call(node, "peer_take", timeout_s, take)
        return outcome

    def _call(self, node: str, method: str, timeout_s: float, *args: object) -> Any:
        with self._lock:
            actor = self._actors.setdefault(node, rpc.ActorRef(partial(ray.get_actor, self._name_of(node))))
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
