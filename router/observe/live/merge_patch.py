"""JSON merge patches (RFC 7386) between states that hold no null. Pure."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def diff(old: Json, new: Json) -> Json:
    """Return the patch that makes `new` of `old`; empty if they are equal. Neither may hold null."""
    patch: Json = dict.fromkeys(old.keys() - new.keys())
    for key, value in new.items():
        was = old.get(key)
        if isinstance(value, dict) and isinstance(was, dict):
            inner = diff(was, value)
            if inner:
                patch[key] = inner
        elif was != value or type(was) is not type(value):
            patch[key] = value
    return patch
