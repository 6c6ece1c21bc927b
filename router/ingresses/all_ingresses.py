"""How many ingresses there are to be, what one asks of all, itself included, and their metrics in one answer.

See `ray_ingresses.py` for the calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from samovar.configs.settings import Settings


@dataclass(frozen=True, slots=True)
class IngressesCleared:
    """How many replies were forgotten; how many ingresses did not answer, and how many go on forgetting."""

    replies: int
    silent: int = 0
    unfinished: int = 0


class Ingresses(Protocol):
    """All ingresses of the service."""

    async def forget(self, tenant: str, sessions: Sequence[bytes] | None) -> IngressesCleared:
        """Forget a tenant's replies, responses and summaries."""

    async def forget_entries(self, tenant: str, entries: Sequence[str] | None) -> int:
        """Erase what was made of these entries of knowledge, or of any; return how many did not answer."""

    async def discard(self, tenant: str, response_id: str) -> int:
        """Delete a stored response; return how many ingresses did not answer."""

    async def metrics(self) -> dict[str, bytes]:
        """Return ingress -> its own metrics, as text; without those that do not answer."""


def ingress_count(settings: Settings) -> int | None:
    """Return the number of ingresses; None: one on each node.

    One where something is written by one ingress only: a recording, a knowledge base in a file.
    """
    wanted = settings.server.ingress_replicas
    if wanted is not None:
        return wanted
    if settings.server.record is not None or settings.knowledge.is_one_file:
        return 1
    if settings.cluster.ray_address != "local":
        return None
    return OF_A_GPU if settings.engine.device == "cuda" else 1


OF_A_GPU = 2
"""On one machine that is told to compute on a GPU. With one, 8,400 to 9,400 tokens a second came from an
H200, whatever the number of streams; it computes more for 64 of an 8B model."""


NAME_CHARS = 8
"""Of an ingress's name in a label."""


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def merged(text: bytes, parts: Mapping[str, bytes], label: str = "ingress") -> bytes:
    """Return Prometheus text with each ingress's own metrics, told apart by the label `ingress`.

    `text`: all metrics of the one that was asked; those that are in `parts` (name -> its own metrics)
    replace what it says for itself. Without `parts` it stays as it is. `label`: what else tells parts apart.
    """
    if not parts:
        return text
    local: dict[str, Metric] = {}
    for part, own in parts.items():
        name = part[:NAME_CHARS] if label == "ingress" else part
        for family in text_string_to_metric_families(own.decode()):
            if not family.samples:
                continue
            named = local.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            labelled = (sample._replace(labels={**sample.labels, label: name}) for sample in family.samples)
            named.samples.extend(labelled)
    families = [local.pop(one.name, one) for one in text_string_to_metric_families(text.decode())]
    # A `CollectorRegistry` would refuse a family under two former names; all that is asked for is `collect`.
    return generate_latest(_Families([*families, *local.values()]))
