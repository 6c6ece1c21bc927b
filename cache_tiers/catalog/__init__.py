"""Where each extent is stored, how many bytes that takes, what is in flight, and what was cleared."""

from samovar.cache_tiers.catalog.catalog import Catalog, announced_catalog
from samovar.cache_tiers.catalog.gone import BlockMemory, Clears, ClearSet
from samovar.cache_tiers.catalog.index import TAILS_MAX
from samovar.cache_tiers.catalog.transfers import Reach, Source, Transfer, no_fault
from samovar.cache_tiers.catalog.types import Eviction, ExtentInfo, Held, Pin, ReservationRefused

__all__ = [
    "TAILS_MAX",
    "BlockMemory",
    "Catalog",
    "ClearSet",
    "Clears",
    "Eviction",
    "ExtentInfo",
    "Held",
    "Pin",
    "Reach",
    "ReservationRefused",
    "Source",
    "Transfer",
    "announced_catalog",
    "no_fault",
]
