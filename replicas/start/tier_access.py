"""Connects a replica to the cache tiers of its node, which know no tenants but their tags and shares."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from samovar.cache_tiers.actors import StagingBuffer, open_outbox
from samovar.cache_tiers.blocks import SumsSetup, tenant_tag
from samovar.configs.sections import TierSettings
from samovar.configs.settings import AuthSettings, Settings
from samovar.replicas.offload import TierAccess, WorkerPools

Value = TypeVar("Value")


def by_tag(auth: AuthSettings, of_tenant: Mapping[str, Value]) -> dict[bytes, Value]:
    """Map each tenant's tag to its value; empty without the server secret that tags are derived from."""
    if auth.server_secret is None:
        return {}
    key = auth.server_secret.get_secret_value().encode()
    return {tenant_tag(key, tenant): value for tenant, value in of_tenant.items()}


def shared_tiers(settings: Settings) -> TierSettings:
    """Return the tier settings with one tenant's share filled in: the tiers know no API keys."""
    share = settings.share_of_tenant(settings.tiers.tenant_share)
    return settings.tiers.model_copy(update={"tenant_share": share, "socket": tiers_socket(settings)})


def tiers_socket(settings: Settings) -> Path | None:
    """Return where the node's tiers listen for vLLM: where vLLM is the engine, always."""
    if settings.tiers.socket is not None or settings.engine.kind != "vllm":
        return settings.tiers.socket
    return settings.vllm_socket


def open_tiers(settings: Settings) -> TierAccess:
    """Connect to this node's tier actor, creating it if there is none yet."""
    import ray  # here, as an engine without tiers runs where Ray is not installed

    from samovar.cache_tiers.actors import tier_actor
    from samovar.replicas.offload import ray_link

    tiers = shared_tiers(settings)
    shares = by_tag(settings.auth, tiers.tenant_shares)
    context = ray.get_runtime_context()
    find = partial(
        tier_actor,
        tiers,
        context.get_node_id(),
        settings.nvme_dir,
        shares,
        settings.telemetry,
        SumsSetup.of(settings),
    )
    outbox = StagingBuffer(tiers.staged_bytes_max, keep_s=2 * tiers.store_s_max)
    open_outbox(outbox)
    lanes = WorkerPools.of_threads(tiers.lookup_threads, tiers.io_threads)
    return TierAccess(ray_link.RayLink(find, context.current_actor, tiers), outbox, lanes)
