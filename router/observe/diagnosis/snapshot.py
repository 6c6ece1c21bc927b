"""What a running service counts, at one moment, as typed numbers; and what was added between two moments.

Read from what the service says over HTTP (`snapshot_of`), or built from the same objects inside an ingress.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from samovar.cache_tiers.messages import NodeStats, TierStats
from samovar.cache_tiers.pricing import PrefillPrice
from samovar.configs.settings import Settings
from samovar.replicas.messages import EngineStats, ReplicaInfo

SETTINGS = (
    "cluster.autoscaling.enabled",
    "cluster.autoscaling.replicas_max",
    "cluster.replicas",
    "engine.kv_dtype",
    "engine.pool_bytes_max",
    "engine.pool_memory_fraction",
    "engine.preemption",
    "engine.prefix_reuse",
    "engine.sequences_max",
    "engine.step_tokens_max",
    "router.affinity_penalty_s",
    "router.prefix.tools",
    "tiers.cpu.bytes_max",
    "tiers.enabled",
    "tiers.load_s_max",
    "tiers.lookup_s_max",
    "tiers.lookup_share",
    "tiers.nvme.bytes_max",
    "tiers.policy.name",
    "tiers.s3.bytes_max",
    "tiers.staged_bytes_max",
    "tiers.store_queue_max",
    "tiers.swap_bytes_max",
    "tiers.tenant_share",
)
"""The settings that a diagnosis reads or proposes to change. None of them is a secret."""

# (field of IngressCounts, metric, the label that counts are kept by)
_BY_LABEL = (
    ("prefixes_left", "samovar_prefixes_left_total", "part"),
    ("prefix_shared", "samovar_prefix_shared_tokens_total", "part"),
    ("prefix_lost", "samovar_prefix_lost_tokens_total", "part"),
    ("returning", "samovar_returning_tokens_total", "outcome"),
    ("affinity", "samovar_affinity_total", "outcome"),
    ("sessions", "samovar_sessions", "state"),
)
_PLAIN = (
    ("queue_s", "samovar_queue_seconds_sum"),
    ("queued", "samovar_queue_seconds_count"),
    ("salts_changed", "samovar_salts_changed_total"),
)
_TIERS_UP = "samovar_tier_actor_up"


class NoSnapshot(Exception):
    """What a server says is not what this version reads; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class IngressCounts:
    """An ingress's own counts since its start; `sessions` is a gauge. Mappings are by the metric's label.

    `prefix_shared`, `prefix_lost`: tokens before the change, and behind it, of prompts that left a prefix.
    `returning`: tokens that a conversation's last turn had left in the cache, by what became of them.
    `queue_s`: the wait of all `queued` prompts together.
    """

    prefixes_left: Mapping[str, float] = field(default_factory=dict)
    prefix_shared: Mapping[str, float] = field(default_factory=dict)
    prefix_lost: Mapping[str, float] = field(default_factory=dict)
    returning: Mapping[str, float] = field(default_factory=dict)
    affinity: Mapping[str, float] = field(default_factory=dict)
    sessions: Mapping[str, float] = field(default_factory=dict)
    queue_s: float = 0.0
    queued: float = 0.0
    salts_changed: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A service at one moment. `at_s`: on the clock of the process that asked.

    `settings`: the values of `SETTINGS` that it serves with. `silent_nodes`: nodes with replicas whose tier
    actor does not answer.
    """

    at_s: float
    replicas: tuple[EngineStats, ...] = ()
    nodes: tuple[NodeStats, ...] = ()
    serving: tuple[ReplicaInfo, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    front: IngressCounts = IngressCounts()
    silent_nodes: tuple[str, ...] = ()

    @property
    def of_each_model(self) -> list[Snapshot]:
        """The same with the replicas of one model, for each model that is served; tiers and front are of all.

        A replica whose model is not told is in each.
        """
        found = []
        for name in dict.fromkeys(one.model_name for one in self.serving):
            others = {one.replica_id for one in self.serving if one.model_name != name}
            replicas = tuple(one for one in self.replicas if one.replica_id not in others)
            serving = tuple(one for one in self.serving if one.model_name == name)
            found.append(replace(self, replicas=replicas, serving=serving))
        return found or [self]


def settings_told(settings: Settings) -> dict[str, Any]:
    """Return the values of `SETTINGS`."""
    return {key: functools.reduce(getattr, key.split("."), settings) for key in SETTINGS}


def snapshot_of(stats: Mapping[str, Any], metrics: str, at_s: float) -> Snapshot:
    """Return the snapshot in the answers of /cache/stats and /metrics. Raises `NoSnapshot`."""
    try:
        front, silent = ingress_counts(text_string_to_metric_families(metrics))
        return Snapshot(
            at_s,
            tuple(_REPLICAS.validate_python(_known(stats.get("replicas", [])))),
            tuple(_NODES.validate_python(_known(stats.get("nodes", [])))),
            tuple(_SERVING.validate_python(_known(stats.get("serving", [])))),
            dict(stats.get("settings", {})),
            front,
            silent,
        )
    except (ValueError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise NoSnapshot(
            f"the server's statistics cannot be read ({first}): is it of another version?"
        ) from error


_REPLICAS = TypeAdapter(list[EngineStats])
_NODES = TypeAdapter(list[NodeStats])
_SERVING = TypeAdapter(list[ReplicaInfo])


def _known(value: Any) -> Any:
    """Return JSON without its nulls, for which the defaults hold; an infinite bandwidth is told as null."""
    if isinstance(value, dict):
        kept = {key: _known(item) for key, item in value.items() if item is not None}
        if value.keys() >= {"latency_s", "bytes_per_s"}:
            kept.setdefault("bytes_per_s", math.inf)
        return kept
    return [_known(item) for item in value] if isinstance(value, list) else value


def ingress_counts(families: Iterable[Metric]) -> tuple[IngressCounts, tuple[str, ...]]:
    """Return the ingress's counts in some of Prometheus' metrics, and the nodes whose tiers are silent."""
    counts: dict[str, Any] = {name: {} for name, _, _ in _BY_LABEL}
    counts |= dict.fromkeys((name for name, _ in _PLAIN), 0.0)
    labelled = {metric: (name, label) for name, metric, label in _BY_LABEL}
    unlabelled = {metric: name for name, metric in _PLAIN}
    silent = []
    for family in families:
        for sample in family.samples:
            if sample.name in labelled:
                name, label = labelled[sample.name]
                word = sample.labels.get(label, "")
                counts[name][word] = counts[name].get(word, 0.0) + sample.value
            elif sample.name in unlabelled:
                counts[unlabelled[sample.name]] += sample.value
            elif sample.name == _TIERS_UP and sample.value == 0:
                silent.append(sample.labels.get("node", ""))
    return IngressCounts(**counts), tuple(silent)


class Window:
    """What a service counted up to `now`: since `before`, or without it since each process's start.

    A counter that is lower than before belongs to a process that was restarted, and counts as it is.
    """

    def __init__(self, now: Snapshot, before: Snapshot | None = None) -> None:
        self.now = now
        self.period_s = None if before is None else max(now.at_s - before.at_s, 0.0)
        self._replicas = {} if before is None else {one.replica_id: one for one in before.replicas}
        self._nodes = {} if before is None else {(one.node_id, one.incarnation): one for one in before.nodes}
        self._front = None if before is None else before.front

    def count(self, name: str) -> int:
        """Return a counter of `EngineStats` over all replicas."""
        return sum(
            _grown(getattr(one, name), getattr(self._replicas.get(one.replica_id), name, 0))
            for one in self.now.replicas
        )

    def words(self, name: str) -> Counter[str]:
        """Return a counter by word (`decisions`, `stores`, ...) of `EngineStats` over all replicas."""
        found: Counter[str] = Counter()
        for one in self.now.replicas:
            before = getattr(self._replicas.get(one.replica_id), name, {})
            found.update({word: _grown(n, before.get(word, 0)) for word, n in getattr(one, name).items()})
        return +found

    def tiers(self) -> Iterator[tuple[NodeStats, TierStats]]:
        """Yield the tiers of all nodes that are set up, with their nodes; some may be off."""
        for node in self.now.nodes:
            for tier in node.tiers:
                if not tier.is_off or tier.bytes_max:
                    yield node, tier

    def of_tier(self, node: NodeStats, tier: TierStats, name: str) -> int:
        """Return a counter of one tier."""
        before = self._nodes.get((node.node_id, node.incarnation))
        then = next((one for one in before.tiers if one.name == tier.name), None) if before else None
        return int(_grown(getattr(tier, name), getattr(then, name, 0)))

    def front(self, name: str) -> dict[str, float]:
        """Return a counter by label of the ingress."""
        before = {} if self._front is None else getattr(self._front, name)
        return {
            label: grown
            for label, count in getattr(self.now.front, name).items()
            if (grown := _grown(count, before.get(label, 0.0)))
        }

    def front_count(self, name: str) -> float:
        """Return a plain counter of the ingress."""
        return float(_grown(getattr(self.now.front, name), getattr(self._front, name, 0.0)))

    def of_lru(self, name: str) -> int:
        """Return a counter of `LruStats` over all nodes."""
        found = 0
        for node in self.now.nodes:
            before = self._nodes.get((node.node_id, node.incarnation))
            found += _grown(
                getattr(node.returns.lru, name), getattr(before.returns.lru, name) if before else 0
            )
        return found

    def predictor_failures(self, node: NodeStats) -> int:
        """Return how often a node's predictor failed."""
        before = self._nodes.get((node.node_id, node.incarnation))
        return int(_grown(node.returns.failures, before.returns.failures if before else 0))

    @property
    def turns(self) -> int:
        """Answers that ended, as the replicas count them."""
        return sum(self.words("finished").values())

    @property
    def prompts(self) -> int:
        """Admitted requests, as the ingress counts them: of what it counts, the whole.

        Replicas come and go: `turns` may begin later than its counts.
        """
        return round(self.front_count("queued"))

    @property
    def prefill(self) -> PrefillPrice | None:
        """What computing a prompt takes, as the replicas of the first model learned it; None: none has told.

        Of several replicas the price in the middle.
        """
        replicas = self.now.of_each_model[0].replicas
        prices = sorted(one.prefill_price for one in replicas if any(one.prefill_price))
        if not prices:
            return None
        return PrefillPrice(*prices[len(prices) // 2], self.setting("engine.step_tokens_max") or math.inf)

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of KV per token of the first model; None: not told."""
        return self.now.serving[0].bytes_per_token if self.now.serving else None

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the first model."""
        return self.now.serving[0].block_tokens if self.now.serving else 16

    def setting(self, key: str) -> Any:
        """Return the value that the service runs with; None: it is not set, or was not told."""
        return self.now.settings.get(key)

    @property
    def replicas_setting(self) -> tuple[str, Any]:
        """The setting that says how many replicas there may be, and its value."""
        key = "cluster.replicas"
        if self.setting("cluster.autoscaling.enabled"):
            key = "cluster.autoscaling.replicas_max"
        return key, self.setting(key)

    @property
    def mean_prompt_tokens(self) -> float:
        """Tokens of a prompt on average."""
        return ratio(self.count("prompt_tokens"), max(self.turns, 1))


def _grown(now: Any, before: Any) -> Any:
    return now - before if now >= before else now


def ratio(part: float, whole: float) -> float:
    """Return `part / whole`, 0 of nothing."""
    return part / whole if whole else 0.0


def most(counts: Mapping[str, float], words: Sequence[str] | None = None) -> str:
    """Return the word that is counted most, of `words` if given; "" if none is."""
    some = {word: n for word, n in counts.items() if words is None or word in words}
    return max(some, key=lambda word: some[word], default="")
