"""How much of a random search the gate does: a third. `make prove` and `make mutants` do all of it."""

from __future__ import annotations

import os
from typing import Any

import pytest

GATE_SHARE = 3


def examples(count: int) -> int:
    """How many of `count` examples a search tries in this run."""
    return count if os.environ.get("TESTS_SLOW") else max(1, count // GATE_SHARE)


def seeds(count: int) -> list[Any]:
    """Parameters from 0 on, of which the gate runs the first third."""
    first = max(1, count // GATE_SHARE)
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(first, count)]
    return [*range(first), *slow]
