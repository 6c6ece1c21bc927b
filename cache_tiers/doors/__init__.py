"""What front doors share, so that any of them may die: replies and responses, and the limits of tenants."""

from cache_tiers.doors.kept_shelf import KeptShelf, NotErased
from cache_tiers.doors.quotas import MANY, NO_USE, Quotas, Use
from cache_tiers.doors.shelf import Item, KeptBounds, Kind

__all__ = ["MANY", "NO_USE", "Item", "KeptBounds", "KeptShelf", "Kind", "NotErased", "Quotas", "Use"]
