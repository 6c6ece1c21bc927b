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
from samovar.cache_tiers.encryption import (
    KEYS_FILE,
    LeasedKeys,
    OuterWrapper,
    Sealing,
    SessionKey,
    SessionKeyFile,
    Unwrapped,
    open_outer,
)
from samovar.cache_tiers.transport import PeerError

NAME, NAMESPACE = "keys", "samovar"
"""One for a Ray cluster, in whichever namespace it is made: the file has one owner."""
ON_HEAD = {"node:__internal_head__": 0.001}
"""Ray's head-node resource: other nodes may be drained, or fail, and their disk with them."""
THREADS = 8
CALL_S_MAX = 5.0


class KeyActor:
    """Serves a `SessionKeyFile` to the cluster, and wraps keys of tenants that lie elsewhere.

    `path`: of the file; `outer`: of the operator's key, see `open_outer`.
    """

    def __init__(self, path: Path, outer: Path) -> None:
        self._keys = SessionKeyFile(path, open_outer(outer, path), wall_clock=time.time)
        self._wrapper = OuterWrapper(open_outer(outer, path))

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

    def wrap(self, name: bytes, secret: bytes) -> tuple[bytes, bytes]:
        return self._wrapper.wrap(name, secret)

    def unwrap(self, name: bytes, wrapped: bytes, proof: bytes) -> Unwrapped | None:
        return self._wrapper.unwrap(name, wrapped, proof)


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
    """`Keys`, and `TenantWrapper`, of the cluster's actor.

    Each call waits `CALL_S_MAX` at most, and raises `TierError` then.
    """

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

    def wrap(self, name: bytes, secret: bytes) -> tuple[bytes, bytes]:
        wrapped: tuple[bytes, bytes] = self._call("wrap", name, secret)
        return wrapped

    def unwrap(self, name: bytes, wrapped: bytes, proof: bytes) -> Unwrapped | None:
        key: Unwrapped | None = self._call("unwrap", name, wrapped, proof)
        return key

    def _call(self, method: str, *args: object) -> Any:
        try:
            return self._actor.call(method, *args, timeout_s=CALL_S_MAX)
        except PeerError as error:
            cause = getattr(error.__cause__, "cause", None)  # what the actor has raised
            why = str(cause) if isinstance(cause, TierError) else f"the keys of records: {error}"
            raise TierError(why) from error


def cluster_keys(outer: Path, nvme_dir: Path, restart_backoff_s_max: float) -> LeasedKeys:
    """Return the keys of the cluster that this process is of: see `cluster_sealing`."""
    return cluster_sealing(outer, nvme_dir, restart_backoff_s_max).sessions


def cluster_sealing(outer: Path, nvme_dir: Path, restart_backoff_s_max: float) -> Sealing:
    """Return what the cluster that this process is of seals with, from its actor, which is made if needed.

    `outer`: the operator's key, see `open_outer`; `nvme_dir`: the settings', where the file of keys is on the
    head. `restart_backoff_s_max`: see `ActorRef`.
    """
    make = partial(key_actor, nvme_dir / KEYS_FILE, outer.expanduser())
    keys = RemoteKeys(rpc.ActorRef(make, restart_backoff_s_max=restart_backoff_s_max))
    return Sealing(LeasedKeys(keys, time.monotonic), keys)
