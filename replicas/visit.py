"""One request's dealings with the cache tiers: what they had, what they were offered. Plain data.

Shared by all choices of the request. Knows nothing of how the tiers are reached.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_tiers.extent import Placement
from cache_tiers.messages import Found


@dataclass(slots=True, eq=False)
class Visit:
    """`waits`: the request is not admitted before the tiers have said what they have, or `deadline_s`.

    `found` may still come after that; it then only tells what need not be stored. `offered`: keys of the
    blocks that one of the choices has handed over already.
    """

    placement: Placement
    deadline_s: float
    waits: bool = True
    found: Found | None = None
    miss: str = ""
    is_over: bool = False  # a choice of it has ended: nobody waits for an answer any more
    offered: set[bytes] = field(default_factory=set)
