"""Which extent is where, how many bytes that takes, what is being moved, and what was cleared."""

from cache_tiers.directory.directory import Directory
from cache_tiers.directory.index import TAILS_MAX
from cache_tiers.directory.tombstones import ClearSet, RecentClears
from cache_tiers.directory.transfers import Move, Mover, Reach, Source, no_fault
from cache_tiers.directory.types import Eviction, ExtentInfo, Held, Pin, Refused, Reservation

__all__ = [
    "TAILS_MAX",
    "ClearSet",
    "Directory",
    "Eviction",
    "ExtentInfo",
    "Held",
    "Move",
    "Mover",
    "Pin",
    "Reach",
    "RecentClears",
    "Refused",
    "Reservation",
    "Source",
    "no_fault",
]
