"""Refuses a Ray cluster that asks nobody for a token: whoever reaches one of its ports runs code on it.

Loopback is no exception: Serve binds each replica's internal port to all interfaces and unpickles what comes,
and Ray's token is all that guards it. What counts is what a stranger is told at the cluster itself: this
process may ask for a token in a cluster that does not. Knows nothing of Samovar's own API keys.
"""

from __future__ import annotations

import os

import grpc
import httpx
import ray
from ray._common.tls_utils import load_certs_from_env
from ray._private.authentication.authentication_utils import is_token_auth_enabled

from cluster.before_start import StartFailed

PROBE_S_MAX = 10.0
PROBE_PATH = "/api/cluster_status"
PROBE_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
REFUSALS = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
NO_PROXY = (("grpc.enable_http_proxy", 0),)


def refuse_open_cluster(where: str, asks_for_token: bool) -> None:
    """`where`: an address of it, for people. Raises `StartFailed` when no token is asked for."""
    if asks_for_token:
        return
    raise StartFailed(
        f"Ray at {where} asks nobody for a token: whoever reaches it, or a replica (these listen on every "
        "interface), could run code there. Stop it, and start every node with RAY_AUTH_MODE=token and the "
        "same ~/.ray/auth_token, chmod 600 (`samovar up` does). `samovar serve` with "
        "cluster.ray_address=local starts one that asks"
    )


def refuse_open_cluster_here() -> None:
    """Of the cluster that this process has joined. Raises `StartFailed`."""
    address = str(ray.get_runtime_context().gcs_address)
    refuse_open_cluster(address, is_token_auth_enabled() and gcs_asks_for_token(address))


def gcs_asks_for_token(address: str) -> bool:
    """Whether a stranger is refused at `host:port` of Ray's GCS. Raises `StartFailed` when nobody answers."""
    with _channel(address) as channel:
        try:
            channel.unary_unary(PROBE_CALL)(b"", timeout=PROBE_S_MAX)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise StartFailed(
                    f"no Ray cluster answers at {address} ({error.details()}). Start it, or correct "
                    "cluster.ray_address"
                ) from error
            refused: bool = error.code() == grpc.StatusCode.UNAUTHENTICATED
            return refused
    return False


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


def _channel(address: str) -> grpc.Channel:
    """As Ray's own, but for the token."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address, options=NO_PROXY)
    chain, key, authority = load_certs_from_env()
    credentials = grpc.ssl_channel_credentials(authority, key, chain)
    return grpc.secure_channel(address, credentials, options=NO_PROXY)
