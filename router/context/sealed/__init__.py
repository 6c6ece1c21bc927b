"""A knowledge base whose texts only a key opens: they are sealed where they are kept, and searched in memory.

Nothing imports it unless `tiers.encryption_key_file` is set.
"""

from samovar.router.context.sealed.store import (
    SealedStore,
    SealedSummaries,
    TenantKeys,
    open_sealed,
)

__all__ = ["SealedStore", "SealedSummaries", "TenantKeys", "open_sealed"]
