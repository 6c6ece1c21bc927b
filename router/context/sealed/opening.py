"""Opens the store of a knowledge base as the settings have it: sealed where records are encrypted."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from samovar.cache_tiers.encryption import Sealing, SessionSealer
from samovar.configs.optional_sections import KnowledgeSettings
from samovar.router.context.knowledge import KnowledgeStore
from samovar.router.context.sealed.keys import TenantKeys, TenantSealer
from samovar.router.context.sealed.store import SealedStore


def open_sealed(
    inner: KnowledgeStore,
    settings: KnowledgeSettings,
    embedder: str,
    *,
    sealing: Sealing,
    tag_of: Callable[[str], bytes],
) -> SealedStore:
    """Return a store that leaves no readable text in `inner`. `tag_of`: a tenant's tag."""
    keys = partial(TenantKeys, inner.records, wrapper=sealing.tenants, clock=time.monotonic)
    return SealedStore(
        inner,
        keys("knowledge"),
        SessionSealer(sealing.sessions),
        tag_of,
        beside=lambda name: TenantSealer(keys(name)),
        embedder=embedder,
        memory_bytes_max=settings.vectors_bytes_max,
    )
