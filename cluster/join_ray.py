"""Starts a private Ray cluster, or joins the one that runs: in either a stranger is asked for a token.

Knows nothing of what is served there.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import ray
from ray._private.services import canonicalize_bootstrap_address

from cluster.before_start import StartFailed
from cluster.open_cluster import gcs_asks_for_token, refuse_open_cluster, refuse_open_cluster_here
from cluster.ray_folder import RayFolder
from cluster.ray_token import close_token, require_token
from configs.cluster_settings import ClusterSettings


def address_of(cluster: ClusterSettings) -> str | None:
    """`host:port` of the cluster that runs; None: a private one. Raises `StartFailed`."""
    if cluster.ray_address == "local":
        return None
    try:
        found: str | None = canonicalize_bootstrap_address(cluster.ray_address)
    except (ConnectionError, ValueError) as error:
        raise StartFailed(f"cluster.ray_address={cluster.ray_address}: {error}") from error
    return found


def join_ray(cluster: ClusterSettings, address: str | None, folder: RayFolder | None) -> str:
    """A warning for people, or nothing. `folder`: of a private cluster. Raises `StartFailed`, and Ray's."""
    require_token()
    if address is not None:
        refuse_open_cluster(address, gcs_asks_for_token(address))  # before it is told our token
    warning = close_token(os.environ, make=address is None)
    # Ray's workers have the working directory of whoever starts it first on their path: a folder
    # `router` or `configs` that happens to be there must not shadow ours.
    with contextlib.chdir(Path(__file__).resolve().parent.parent):
        try:
            ray.init(
                address=address or "local",
                namespace="samovar",
                include_dashboard=False,
                object_store_memory=cluster.object_store_bytes if address is None else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder.path) if folder else None,
            )
        except ray.exceptions.AuthenticationError as error:
            raise StartFailed(f"Ray at {address} refuses the token that is here: {error}") from error
    refuse_open_cluster_here()
    return warning
