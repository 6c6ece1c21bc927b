"""Counts what each ingress has sent to a replica, for the others: none must take it for idle. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samovar.cache_tiers.pricing import PrefillPrice
from samovar.replicas.messages import GenerateRequest

INGRESSES_MAX = 64
"""Ingresses in a report, those with most open first."""
PARTS = 2


@dataclass(slots=True)
class _Call:
    ingress: str
    new_tokens: int
    cached_tokens: int
    is_waiting: bool = True


@dataclass(frozen=True, slots=True)
class IngressLoad:
    """What an ingress has open at a replica; `wait_s`: of its prompts that are not computed yet."""

    open_requests: int = 0
    wait_s: float = 0.0


class IngressLoads:
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
        self._calls[key] = _Call(request.route.ingress, tokens - cached, cached)

    def computed(self, key: int) -> None:
        """Record that a call's prompt is computed. Does nothing if the call is over."""
        if key in self._calls:
            self._calls[key].is_waiting = False

    def ended(self, key: int) -> None:
        """Record that a call is over."""
        self._calls.pop(key, None)

    def report(self, price: PrefillPrice) -> dict[str, object]:
        """Return the loads by ingress as plain data, numbered: an older report is told apart."""
        self._reports += 1
        loads: dict[str, list[float]] = {}
        for call in self._calls.values():
            load = loads.setdefault(call.ingress, [0, 0.0])
            load[0] += 1
            load[1] += price.seconds(call.new_tokens, call.cached_tokens) if call.is_waiting else 0.0
        most = sorted(loads, key=lambda ingress: -loads[ingress][0])[:INGRESSES_MAX]
        return {"number": self._reports, "ingresses": {ingress: loads[ingress] for ingress in most}}


def others_load(report: object, own: str) -> tuple[int, IngressLoad]:
    """Return a report's number, and what ingresses other than `own` have open; (0, nothing): no report."""
    if not isinstance(report, Mapping) or not isinstance(ingresses := report.get("ingresses"), Mapping):
        return 0, IngressLoad()
    number, others = report.get("number"), IngressLoad()
    for ingress, load in ingresses.items():
        if ingress == own or not isinstance(load, list | tuple) or len(load) != PARTS:
            continue
        if all(isinstance(part, int | float) and 0 <= part < float("inf") for part in load):
            others = IngressLoad(others.open_requests + int(load[0]), others.wait_s + float(load[1]))
    return number if isinstance(number, int) else 0, others
