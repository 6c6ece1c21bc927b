"""Refuses a Ray cluster that anybody on the network could use: whoever reaches its ports runs code on it.

Ray asks for a token if it was started so (`RAY_AUTH_MODE=token` on every node). Without one it may only be
where nobody else can reach it: on loopback. Knows nothing of Samovar's own API keys.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import httpx
import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled

from cluster.before_start import StartFailed

PROBE_S_MAX = 10.0
PROBE_PATH = "/api/cluster_status"
REFUSALS = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


def refuse_open_cluster(addresses: Sequence[str], asks_for_token: bool) -> None:
    """`addresses`: of the nodes. Raises `StartFailed` when others reach them and no token is asked for."""
    reachable = [address for address in addresses if not is_loopback(address)]
    if asks_for_token or (addresses and not reachable):
        return
    where = ", ".join(reachable[:3]) or "an unknown address"
    raise StartFailed(
        f"Ray listens on {where} and asks nobody for a token: anybody on that network could run code there. "
        "Start every node with RAY_AUTH_MODE=token and the same ~/.ray/auth_token (`samovar up` does), or "
        "with --node-ip-address 127.0.0.1"
    )


def is_loopback(address: str) -> bool:
    """A name may resolve to anything, so only `localhost` is one."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def cluster_here() -> tuple[list[str], bool]:
    """Of the cluster that this process has joined: its nodes' addresses, and whether it asks for a token."""
    addresses = [row["NodeManagerAddress"] for row in ray.nodes() if row["Alive"]]
    return addresses, is_token_auth_enabled()


def asks_for_token(dashboard: str, client: httpx.Client) -> bool:
    """Whether a stranger is refused at Ray's dashboard. Raises `StartFailed` when nobody answers there."""
    try:
        answer = client.get(f"{dashboard}{PROBE_PATH}", timeout=PROBE_S_MAX)
    except httpx.TransportError as error:
        raise StartFailed(
            f"no Ray dashboard answers at {dashboard} ({error}). Run this on the head node, where `ray start "
            "--head` has started one, or name it with --cluster.dashboard"
        ) from error
    return answer.status_code in REFUSALS
