"""The session directory: lineages and where their blocks may be, and what ingresses share with it.

So that any of them may die: replies and responses, and the limits of tenants. The actor needs Ray, so it is
imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samovar.cache_tiers.sessions.quotas import MANY, NO_USE, Quotas, Use
from samovar.cache_tiers.sessions.session_table import (
    Move,
    Recalled,
    SessionRow,
    SessionsCleared,
    SessionState,
    SessionTable,
    SessionView,
    Sync,
    Synced,
)
from samovar.cache_tiers.sessions.shelf import Item, ItemBounds, ItemStore, Kind, NotErased

if TYPE_CHECKING:
    from samovar.cache_tiers.sessions.actor import ON_HEAD, session_actor

__all__ = [
    "MANY",
    "NO_USE",
    "ON_HEAD",
    "Item",
    "ItemBounds",
    "ItemStore",
    "Kind",
    "Move",
    "NotErased",
    "Quotas",
    "Recalled",
    "SessionRow",
    "SessionState",
    "SessionTable",
    "SessionView",
    "SessionsCleared",
    "Sync",
    "Synced",
    "Use",
    "session_actor",
]

_NEEDS_RAY = ("ON_HEAD", "session_actor")


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_RAY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.actor"), name)
