"""Counts what each front door has sent to a replica, for the others: none must take it for idle. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cache_tiers.pricing import PrefillPrice
from replicas.messages import GenerateRequest

DOORS_MAX = 64
"""Front doors in a report, those with most open first."""
PARTS = 2


@dataclass(slots=True)
class _Call:
    door: str
    new_tokens: int
    cached_tokens: int
    is_waiting: bool = True


@dataclass(frozen=True, slots=True)
class DoorLoad:
    """What a front door has open at a replica; `wait_s`: of its prompts that are not computed yet."""

    open_requests: int = 0
    wait_s: float = 0.0


class DoorLoads:
    """Calls by the key that the replica gave them. For one event loop. `replica_id`: the replica's own."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._calls: dict[int, _Call] = {}
        self._reports = 0

    def began(self, key: int, request: GenerateRequest) -> None:
        """Record a call. What its last turn left counts as cached at that turn's replica only."""
        tokens = len(request.prompt_token_ids)
        at_home = request.route.home == self._replica_id
        cached = min(request.route.cached_tokens, tokens - 1) if at_home else 0
        self._calls[key] = _Call(request.route.door, tokens - cached, cached)

    def computed(self, key: int) -> None:
        """Record that a call's prompt is computed. Does nothing if the call is over."""
        if key in self._calls:
            self._calls[key].is_waiting = False

    def ended(self, key: int) -> None:
        """Record that a call is over."""
        self._calls.pop(key, None)

    def report(self, price: PrefillPrice) -> dict[str, object]:
        """Return the loads by front door as plain data, numbered: an older report is told apart."""
        self._reports += 1
        loads: dict[str, list[float]] = {}
        for call in self._calls.values():
            load = loads.setdefault(call.door, [0, 0.0])
            load[0] += 1
            load[1] += price.seconds(call.new_tokens, call.cached_tokens) if call.is_waiting else 0.0
        most = sorted(loads, key=lambda door: -loads[door][0])[:DOORS_MAX]
        return {"number": self._reports, "doors": {door: loads[door] for door in most}}


def others_load(report: object, own: str) -> tuple[int, DoorLoad]:
    """Return a report's number, and what front doors other than `own` have open; (0, nothing): no report."""
    if not isinstance(report, Mapping) or not isinstance(doors := report.get("doors"), Mapping):
        return 0, DoorLoad()
    number, others = report.get("number"), DoorLoad()
    for door, load in doors.items():
        if door == own or not isinstance(load, list | tuple) or len(load) != PARTS:
            continue
        if all(isinstance(part, int | float) and 0 <= part < float("inf") for part in load):
            others = DoorLoad(others.open_requests + int(load[0]), others.wait_s + float(load[1]))
    return number if isinstance(number, int) else 0, others
