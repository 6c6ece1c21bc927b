"""Builds the state that an audience is shown, as JSON without null: what is unknown is left out. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from samovar.cache_tiers.blocks import PEER, SESSION_BYTES, TIERS, session_of
from samovar.cache_tiers.forecast import CALIBRATION_S
from samovar.cache_tiers.messages import LineageGlance, NodeGlance, NodeStats
from samovar.cache_tiers.sessions import SessionRow, SessionView
from samovar.configs.optional_sections import LiveSettings
from samovar.replicas.messages import EngineStats, ReplicaGlance, ReplicaInfo
from samovar.router.generation import EndedTurn, TenantUsage
from samovar.router.observe.live.feed import Audience, Json, encoded
from samovar.router.routing import Outcome, session_name

FORECAST_AT_S = (8.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0, 14400.0, 86400.0)
"""Idle times at which survival curves are shown."""
STEADY_S = 1.0
"""The start of an idle time, told by another clock, is the same if it differs by less."""
LEFT_OUT = "left_out"


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of the service at one time, before it is cut for an audience.

    `nodes`: None while the directory does not answer. `homes`: replica -> node. `routing`: requests by how
    they came to their replica. `names`: tenant's tag -> name. `advice`: see `advice_of`.
    """

    unix_s: float
    infos: Sequence[ReplicaInfo] = ()
    replicas: Sequence[ReplicaGlance] = ()
    nodes: Mapping[str, NodeGlance] | None = None
    homes: Mapping[str, str] = field(default_factory=dict)
    routing: Mapping[Outcome, int] = field(default_factory=dict)
    names: Mapping[bytes, str] = field(default_factory=dict)
    advice: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shown:
    """The sessions of an audience: the latest `views`, whether there are others, and its usage."""

    audience: Audience
    views: Sequence[SessionView]
    has_more: bool
    usage: TenantUsage
    since_unix_s: float


def rows_of(view: SessionView, lineages_max: int) -> list[SessionRow]:
    """Return the lineages of a session that are shown: the conversation, and the latest used others."""
    main = view.main
    others = [row for row in view.rows if row is not main]
    return [main, *others[: lineages_max - 1]]


def owner_of(row: SessionRow) -> bytes:
    """Return the name of a lineage in pools and nodes."""
    return row.tenant + row.session


def state_of(shown: Shown, seen: Seen, model: str, settings: LiveSettings, before: Json | None) -> Json:
    """Return the state for an audience. `model`: its served name; `before`: the audience's last state."""
    audience = shown.audience
    totals = {"since_unix_s": shown.since_unix_s, **totals_of(shown.usage)}
    state: Json = {
        "t": round(seen.unix_s, 3),
        "scope": "cluster" if audience.sees_all else "tenant",
        "totals": {name: value for name, value in totals.items() if value is not None},
        "sessions": _sessions(shown, seen, settings, before or {}),
        "forecast_at_s": list(FORECAST_AT_S),
        "model": {"name": model},
    }
    if audience.tenant is not None:
        state["tenant"] = audience.tenant
    if seen.infos:
        state["model"] |= _model(seen.infos)
    if audience.sees_all:
        state["replicas"] = {one.stats.replica_id: _replica(one.stats, seen.homes) for one in seen.replicas}
        state["routing"] = dict(seen.routing)
        if seen.nodes is not None:
            stats = {name: node.stats for name, node in seen.nodes.items()}
            state["nodes"] = {name: _node(one) for name, one in stats.items() if one is not None}
        state |= seen.advice
    if shown.has_more:
        state[LEFT_OUT] = ["sessions"]
    return fitted(state, settings.message_bytes_max)


def fitted(state: Json, bytes_max: int) -> Json:
    """Return the state within `bytes_max`, without the sessions used longest ago, then replicas, then nodes.

    Then without the advice. `left_out` names the parts that are not whole.
    """
    for part in ("sessions", "replicas", "nodes"):
        while part in state and state[part] and len(encoded(state)) > bytes_max:
            kept = list(state[part].items())[: len(state[part]) // 2]
            state = {**state, part: dict(kept), LEFT_OUT: _left_out(state, part)}
    for part in ("diagnosis", "memory"):
        if part in state and len(encoded(state)) > bytes_max:
            state = {name: value for name, value in state.items() if name != part}
            state[LEFT_OUT] = _left_out(state, part)
    return state


def _left_out(state: Json, part: str) -> list[str]:
    return sorted({*state.get(LEFT_OUT, ()), part})


def totals_of(usage: TenantUsage) -> Json:
    """Return a usage as JSON; `hit_rate` is None before the first prompt."""
    rate = usage.hit_rate
    return {
        "requests": usage.requests,
        "output_tokens": usage.output_tokens,
        "tokens": dict(usage.tokens),
        "hit_rate": None if rate is None else round(rate, 4),
        "saved_s": round(usage.saved_s, 3),
    }


def turn_of(turn: EndedTurn, audience: Audience) -> Json:
    """Return an ended turn as JSON, without what is unknown."""
    receipt = turn.receipt
    told = {
        "t": round(turn.ended_unix_s, 3),
        "session": session_name(session_of(turn.lineage)),
        "lineage": turn.lineage[SESSION_BYTES:].hex(),
        "tenant": turn.tenant if audience.sees_all else None,
        "request_id": turn.request_id,
        "prompt_tokens": turn.prompt_tokens,
        "output_tokens": turn.output_tokens,
        "tokens": dict(receipt.tokens),
        "ttft_ms": _ms(turn.ttft_s),
        "recompute_ms": _ms(turn.recompute_s),
        "saved_ms": _ms(turn.saved_s),
        "e2e_ms": _ms(turn.e2e_s),
        "decision": receipt.decision,
        "load_ms": _ms(receipt.load_s),
        "miss": receipt.miss or None,
        "replica": list(receipt.replica_ids),
        "finish": turn.finish,
    }
    return {name: value for name, value in told.items() if value is not None}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _model(infos: Sequence[ReplicaInfo]) -> Json:
    info = infos[0]
    own = [one for one in infos if one.model_name == info.model_name]  # others are of further models
    return {
        "context_tokens": min(one.context_tokens_max for one in own),
        "block_tokens": info.block_tokens,
        "bytes_per_token": info.bytes_per_token,
        "kv_dtype": info.kv_dtype,
        "device": info.device,
    }


def _sessions(shown: Shown, seen: Seen, settings: LiveSettings, before: Json) -> Json:
    """Return the sessions by name, the latest used first."""
    pools = _pooled(seen.replicas, seen.infos)

    def of_pools(row: SessionRow) -> tuple[int, int] | None:
        return None if pools is None else (pools[0][owner_of(row)], pools[1][owner_of(row)])

    found: Json = {}
    for view in shown.views:
        name = session_name(view.session)
        old = before.get("sessions", {}).get(name, {}).get("lineages", {})
        session: Json = {
            "last_used_unix_s": round(view.used_unix_s, 3),
            "lineages": {
                (tag := row.session[SESSION_BYTES:].hex()): {
                    "main": row is view.main,
                    **_row(row),
                    **_places(row, seen, of_pools(row), old.get(tag, {})),
                }
                for row in rows_of(view, settings.lineages_max)
            },
        }
        if shown.audience.sees_all and view.tenant in seen.names:
            session["tenant"] = seen.names[view.tenant]
        found[name] = session
    return found


def _row(row: SessionRow) -> Json:
    told = {
        "tokens": row.tokens,
        "turns": row.turns,
        "state": row.state,
        "last_used_unix_s": round(row.used_unix_s, 3),
        "created_unix_s": round(row.created_unix_s, 3),
        "home": row.home or None,
        "node": row.nodes[0] if row.nodes else None,
        "expected_return_unix_s": None if row.returns_unix_s is None else round(row.returns_unix_s, 3),
    }
    return {name: value for name, value in told.items() if value is not None}


def _pooled(
    replicas: Iterable[ReplicaGlance], infos: Sequence[ReplicaInfo]
) -> tuple[Counter[bytes], Counter[bytes]] | None:
    """Return the blocks and bytes of each lineage in all pools; None: an engine does not say whose pages are.

    A replica without an `infos` entry yet counts as the first: most services have one model.
    """
    sizes = {info.replica_id: info.block_tokens * info.bytes_per_token for info in infos}
    first = next(iter(sizes.values()), 0)
    held, nbytes = Counter[bytes](), Counter[bytes]()
    for replica in replicas:
        if replica.blocks is None:
            return None
        held.update(replica.blocks)
        size = sizes.get(replica.stats.replica_id, first)
        nbytes.update({owner: blocks * size for owner, blocks in replica.blocks.items()})
    return held, nbytes


def _places(row: SessionRow, seen: Seen, pooled: tuple[int, int] | None, before: Json) -> Json:
    """Return where a lineage's blocks are, and when it is expected; nothing while the directory is silent.

    `pooled`: its blocks and bytes in the pools, None where it is not known.
    """
    if seen.nodes is None:
        return {"running": False}
    glances = {name: node.lineages[owner_of(row)] for name, node in _in_order(row, seen.nodes)}
    home = _home(row, glances)
    blocks, nbytes = Counter[str](), Counter[str]()
    for name, glance in glances.items():
        for tier in glance.blocks.keys() | glance.nbytes.keys():
            place = _place(tier, is_home=name == home)
            more, size = glance.blocks.get(tier, 0), glance.nbytes.get(tier, 0)
            blocks[place] = max(blocks[place], more) if tier in TIERS.shared else blocks[place] + more
            nbytes[place] = max(nbytes[place], size) if tier in TIERS.shared else nbytes[place] + size
    places = (*TIERS, PEER)
    in_pools, pool_bytes = (None, None) if pooled is None else pooled
    told: Json = {
        "running": any(glance.is_running for glance in glances.values()),
        "blocks": {"gpu": in_pools} | {place: blocks[place] for place in places},
        "bytes": {"gpu": pool_bytes} | {place: nbytes[place] for place in places},
        "runs": _runs(glances, row),
    }
    expected = next((glance for glance in glances.values() if glance.survival), None)
    if expected is not None:
        since = round(seen.unix_s - expected.since_ago_s, 3)
        was = before.get("forecast", {}).get("since_unix_s", -math.inf)
        told["forecast"] = {
            "since_unix_s": was if abs(since - was) < STEADY_S else since,
            "survival": list(expected.survival),
        }
    return told


def _in_order(row: SessionRow, nodes: Mapping[str, NodeGlance]) -> list[tuple[str, NodeGlance]]:
    """Return the nodes that know a lineage, the one where it lives first."""
    known = [(name, node) for name, node in nodes.items() if owner_of(row) in node.lineages]
    order = {name: place for place, name in enumerate(row.nodes)}
    return sorted(known, key=lambda one: (order.get(one[0], len(order)), one[0]))


def _home(row: SessionRow, known: Iterable[str]) -> str:
    """Return the node where a lineage lives; the first that knows it if no turn of it was seen."""
    return row.nodes[0] if row.nodes else next(iter(known), "")


def _place(tier: str, *, is_home: bool) -> str:
    return tier if is_home or tier in TIERS.shared else PEER


def _runs(glances: Mapping[str, LineageGlance], row: SessionRow) -> list[list[str | int]]:
    """Return the runs of the node that holds the most of the chain, from the view of where it lives."""
    at = max(glances, key=lambda name: sum(blocks for _, blocks in glances[name].runs), default="")
    if not at:
        return []
    is_home = at == _home(row, glances)
    return [
        [place if place == "none" else _place(place, is_home=is_home), blocks]
        for place, blocks in glances[at].runs
    ]


def _replica(stats: EngineStats, homes: Mapping[str, str]) -> Json:
    step_s, token_s, pair_s = stats.prefill_price
    told: Json = {
        "running": stats.running,
        "waiting": stats.waiting,
        "loading": stats.loading,
        "pages": {
            "active": stats.pages_active,
            "cached": stats.pages_cached,
            "free": stats.pages_free,
            "total": stats.pages_total,
        },
        "prefill_tokens": stats.prefill_tokens,
        "generated_tokens": stats.generated_tokens,
        "preemptions": stats.preemptions,
        "evictions": stats.evictions,
        "prefill_price": {"step_s": step_s, "token_s": token_s, "pair_s": pair_s},
    }
    if stats.replica_id in homes:
        told["node"] = homes[stats.replica_id]
    return told


def _node(stats: NodeStats) -> Json:
    returns, prefetch = stats.returns, stats.returns.prefetch
    regret = {"demand": prefetch.regret_demand, "pause": prefetch.regret_pause}
    predictor: Json = {
        "state": returns.predictor,
        "sessions": returns.sessions,
        "turns": returns.turns,
        **_finite({"log_loss": returns.model_loss, "fallback_log_loss": returns.fallback_loss}),
    }
    if returns.hints:
        predictor["hints"] = dict(returns.hints)
    if returns.calibration:
        points = [[round(said, 3), round(true, 3), turns] for said, true, turns in returns.calibration]
        predictor["calibration"] = {"horizon_s": CALIBRATION_S, "points": points}
    return {
        "draining": stats.draining,
        "queue": stats.queue,
        "transport": stats.transport,
        "tiers": {
            tier.name: {
                "state": tier.state,
                "used_bytes": tier.bytes_held,
                "limit_bytes": tier.bytes_max,
                "tokens": tier.tokens,
                "hit_blocks": tier.hits_blocks,
            }
            for tier in stats.tiers
        },
        "predictor": predictor,
        "lru": {
            "lookups": returns.lru.lookups,
            "asked_tokens": returns.lru.asked_tokens,
            "gained_tokens": returns.lru.gained_tokens,
            "regretted_tokens": returns.lru.regretted_tokens,
        },
        "prefetch": {
            "started_bytes": sum(prefetch.started.values()),
            "used_bytes": prefetch.used,
            "late_bytes": prefetch.late,
            "wasted_bytes": prefetch.wasted,
            "moving_bytes": prefetch.moving,
            "regret": _finite(regret),
        },
    }


def _finite(numbers: Mapping[str, float | None]) -> Json:
    """Return the numbers that are known and that JSON can hold, rounded."""
    known = {name: value for name, value in numbers.items() if value is not None}
    return {name: round(value, 4) for name, value in known.items() if math.isfinite(value)}
