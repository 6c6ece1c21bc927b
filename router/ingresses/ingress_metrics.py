"""The metrics of all ingresses in one answer: whichever of them is asked. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "ingress"
NAME_CHARS = 8


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def merged(text: bytes, ingresses: Mapping[str, bytes]) -> bytes:
    """Return Prometheus text with each ingress's own metrics, told apart by the label `ingress`.

    `text`: all metrics of the one that was asked; those that are in `ingresses` (name -> its own metrics)
    replace what it says for itself. Without `ingresses` it stays as it is.
    """
    if not ingresses:
        return text
    local: dict[str, Metric] = {}
    for ingress, own in ingresses.items():
        for family in text_string_to_metric_families(own.decode()):
            if not family.samples:
                continue
            named = local.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            labelled = (
                sample._replace(labels={**sample.labels, LABEL: ingress[:NAME_CHARS]})
                for sample in family.samples
            )
            named.samples.extend(labelled)
    families = [local.pop(one.name, one) for one in text_string_to_metric_families(text.decode())]
    # A `CollectorRegistry` would refuse a family under two former names; all that is asked for is `collect`.
    return generate_latest(_Families([*families, *local.values()]))
