"""The keys of encrypted records as a detached Ray actor on the head, and how other processes call it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray

from samovar.cache_tiers.actors import rpc
from samovar.cache_tiers.blocks import Clear, TierError
from samovar.cache_tiers.encryption import KEYS_FILE, LeasedKeys, OuterKeys, SessionKey, SessionKeyFile
from samovar.cache_tiers.transport import PeerError

NAME, NAMESPACE = "keys", "samovar"
"""One for a Ray cluster, in whichever namespace it is made: the file has one owner."""
ON_HEAD = {"node:__internal_head__": 0.001}
"""Ray's head-node resource: other nodes may be drained, or fail, and their disk with them."""
THREADS = 8
CALL_S_MAX = 5.0


class KeyActor:
    """Serves a `SessionKeyFile` to the cluster. `path`: of the file; `outer`: of the operator's key."""

    def __init__(self, path: Path, outer: Path) -> None:
        self._keys = SessionKeyFile(path, OuterKeys(outer), wall_clock=time.time)

    def key_for(self, tenant: bytes, session: bytes) -> SessionKey:
        return self._keys.key_for(tenant, session)

    def find(self, tenant: bytes, session: bytes, key_id: bytes) -> SessionKey | None:
        return self._keys.find(tenant, session, key_id)

    def live(self) -> frozenset[bytes]:
        return self._keys.live()

    def destroy(self, clears: Sequence[Clear]) -> int:
        return self._keys.destroy(clears)

    def check(self) -> None:
        self._keys.check()


def key_actor(path: Path, outer: Path) -> Any:
    """Return the handle of the cluster's actor, creating it if needed; does not wait for it to be ready.

    The arguments only count when it is created.
    """
    actor = ray.remote(
        max_concurrency=THREADS, num_cpus=0, resources=ON_HEAD, max_restarts=-1, max_task_retries=0
    )(KeyActor)
    return actor.options(name=NAME, namespace=NAMESPACE, lifetime="detached", get_if_exists=True).remote(
        path, outer
    )


class RemoteKeys:
    """`Keys` of the cluster's actor: each call waits `CALL_S_MAX` at most, and raises `TierError` then."""

    def __init__(self, actor: rpc.ActorRef) -> None:
        self._actor = actor

    def key_for(self, tenant: bytes, session: bytes) -> SessionKey:
        key: SessionKey = self._call("key_for", tenant, session)
        return key

    def find(self, tenant: bytes, session: bytes, key_id: bytes) -> SessionKey | None:
        key: SessionKey | None = self._call("find", tenant, session, key_id)
        return key

    def live(self) -> frozenset[bytes]:
        ids: frozenset[bytes] = self._call("live")
        return ids

    def destroy(self, clears: Sequence[Clear]) -> int:
        count: int = self._call("destroy", tuple(clears))
        return count

    def check(self) -> None:
        self._call("check")

    def _call(self, method: str, *args: object) -> Any:
        try:
            return self._actor.call(method, *args, timeout_s=CALL_S_MAX)
        except PeerError as error:
            cause = getattr(error.__cause__, "cause", None)  # what the actor has raised
            why = str(cause) if isinstance(cause, TierError) else f"the keys of records: {error}"
            raise TierError(why) from error


def cluster_keys(outer: Path, nvme_dir: Path, restart_backoff_s_max: float) -> LeasedKeys:
    """Return the keys of the cluster that this process is of, from their actor, which is made if needed.

    `outer`: the operator's file; `nvme_dir`: the settings', where the file of keys is on the head.
    `restart_backoff_s_max`: see `ActorRef`.
    """
    make = partial(key_actor, nvme_dir / KEYS_FILE, outer.expanduser())
    actor = rpc.ActorRef(make, restart_backoff_s_max=restart_backoff_s_max)
    return LeasedKeys(RemoteKeys(actor), time.monotonic)
