"""Where each extent is stored, how many bytes that takes, what is in flight, and what was cleared."""

from samovar.cache_tiers.directory.directory import Directory
from samovar.cache_tiers.directory.gone import BlockMemory, Clears, ClearSet
from samovar.cache_tiers.directory.index import TAILS_MAX
from samovar.cache_tiers.directory.transfers import Reach, Source, Transfer, no_fault
from samovar.cache_tiers.directory.types import Eviction, ExtentInfo, Held, Pin, ReservationRefused

__all__ = [
    "TAILS_MAX",
    "BlockMemory",
    "ClearSet",
    "Clears",
    "Directory",
    "Eviction",
    "ExtentInfo",
    "Held",
    "Pin",
    "Reach",
    "ReservationRefused",
    "Source",
    "Transfer",
    "no_fault",
]
