"""What rank 0 tells the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from samovar.replicas.ranks.ring import Words


class Order(IntEnum):
    """The kinds of messages: `OUT` and `IN` on the channel of moves, the others on that of steps.

    `READY`: nothing; done when the rank has loaded. `ATTENTION`: agree on a backend. `LEAST_MEMORY`: agree on
    the free memory. `POOL`: make a pool of so many pages. `COPY`: copy pages to others. `STEP`: compute, by a
    graph if the step's shape is a recorded one. `SAME`: compare slots of two page tables, and agree.
    `RECORD`: record the steps of a `GraphLimits`, and agree. `FORGET`: the graphs. `TRY`, `TRIED`: steps in
    between are computed without sums; agree whether they were. `OUT`, `IN`: copy pages to or from the staging
    memory.
    """

    READY = 1
    LEAST_MEMORY = 2
    POOL = 3
    COPY = 4
    STEP = 5
    SAME = 6
    OUT = 7
    IN = 8
    ATTENTION = 9
    RECORD = 10
    FORGET = 11
    TRY = 12
    TRIED = 13


def words_of(numbers: Sequence[int]) -> Words:
    return np.asarray(numbers, dtype=np.int32)
