"""Is this node to go away, and when? Pure: it is told what the cluster says."""

from __future__ import annotations

from collections.abc import Collection, Mapping

DEADLINE_SHARE = 0.9
"""As much of the time that is left goes to saving blocks: the last ones need to arrive, too."""


class DrainNotice:
    """`drain_s`: how long a drain may take when the notice has no deadline."""

    def __init__(self, node_id: str, drain_s: float) -> None:
        self._node_id = node_id
        self._drain_s = drain_s
        self.is_draining = False

    def heard(self, deadlines_ms: Mapping[str, int], now_unix_s: float) -> float | None:
        """`deadlines_ms`: nodes that are to go -> unix milliseconds, 0: none. Seconds for a drain that is to
        begin now; None: nothing is to begin. A notice that was taken back may come again.
        """
        was_draining, self.is_draining = self.is_draining, self._node_id in deadlines_ms
        if not self.is_draining or was_draining:
            return None
        deadline_ms = deadlines_ms[self._node_id]
        if deadline_ms <= 0:
            return self._drain_s
        return max(0.0, (deadline_ms / 1000 - now_unix_s) * DEADLINE_SHARE)


def takers(node_id: str, alive: Collection[str], draining: Collection[str]) -> tuple[str, ...]:
    """Nodes that blocks may be pushed to; in another order for each giver, so that not all begin with one."""
    others = sorted(node for node in alive if node != node_id and node not in draining)
    turn = int(node_id[:8], 16) % len(others) if others and _is_hex(node_id[:8]) else 0
    return tuple(others[turn:] + others[:turn])


def _is_hex(text: str) -> bool:
    return bool(text) and all(letter in "0123456789abcdef" for letter in text.lower())
