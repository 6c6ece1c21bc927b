"""A knowledge base whose texts only a key opens: they are sealed where they are kept, and searched in memory.

Nothing imports it unless `tiers.encryption_key_file` is set.
"""

from samovar.router.context.sealed.keys import TenantKeys
from samovar.router.context.sealed.opening import open_sealed
from samovar.router.context.sealed.store import SealedStore

__all__ = ["SealedStore", "TenantKeys", "open_sealed"]
