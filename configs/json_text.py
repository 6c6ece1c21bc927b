"""Parses JSON from a file or a peer; every parse error is a `ValueError`.

Python's parser raises `RecursionError` on deep nesting, which is not a `ValueError`: a caller that does not
catch it is crashed by a small file. So nothing else in the tree calls `json.loads` (a test checks).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


class TooDeep(ValueError):
    """The JSON is nested more deeply than any legitimate input."""


def parse_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse a JSON text. Raises `ValueError`, or its subclass `TooDeep`. `pairs`: see `object_pairs_hook`."""
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise TooDeep("it is nested too deeply") from None
