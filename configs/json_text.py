"""JSON from a file or a peer: whatever is wrong with it is one kind of error.

Python's parser answers deep nesting with `RecursionError`, which is no `ValueError`: who forgets it dies of
a small file. So nothing else in the tree calls `json.loads` (a test looks). Knows no format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


class TooDeep(ValueError):
    """Nested so deeply that nobody who means well has written it."""


def parse_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """What a JSON text says. Raises `ValueError`; `TooDeep` is one. `pairs`: see `object_pairs_hook`."""
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise TooDeep("it is nested too deeply") from None
