"""Builds the tables of `samovar status`: a running server's replicas and cache tiers.

Asks the server over HTTP. Imports neither Ray nor anything heavy, so that it does not load a busy machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import ByteSize

TIMEOUT_S = 10.0

REPLICA_HEAD = ("replica", "running", "waiting", "loading", "pages used", "cached", "free", "total", "tokens")
TIER_HEAD = (
    *("node", "tier", "state", "held / max", "extents", "tokens", "hit blocks", "read / written"),
    *("latency ms", "GB/s", "failures", "breaker", "listed s ago"),
)

RETURNS_HEAD = (
    *("node", "predictor", "sessions", "turns", "log loss (fallback)", "failures"),
    *("prefetched", "of guesses", "guessing", "regret (demand / pause)"),
)
PEER_HEAD = ("node", "from node", "state", "pulled by", "bytes", "GB/s", "failures", "bad")

Row = tuple[str, ...]


class StatusFailed(Exception):
    """The server's status could not be read; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Status:
    """The server's answers: `health` from /health, `replicas` and `nodes` from /cache/stats."""

    health: dict[str, Any]
    replicas: Sequence[dict[str, Any]]
    nodes: Sequence[dict[str, Any]]

    def json(self) -> dict[str, Any]:
        """Return the whole status as plain JSON."""
        return {"health": self.health, "replicas": list(self.replicas), "nodes": list(self.nodes)}


def ask(url: str, api_key: str | None, *, transport: httpx.BaseTransport | None = None) -> Status:
    """Return the status of the server at `url`. Raises `StatusFailed`."""
    base = url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise StatusFailed(f"--url {url} is not a URL. Write it like http://127.0.0.1:8000")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    # trust_env: a proxy for external addresses cannot reach this machine.
    with httpx.Client(
        base_url=base, headers=headers, timeout=TIMEOUT_S, trust_env=False, transport=transport
    ) as client:
        health = _get(client, "/health")
        stats = _get(client, "/cache/stats")
    return Status(health, stats.get("replicas", []), stats.get("nodes", []))


def _get(client: httpx.Client, path: str) -> dict[str, Any]:
    place = f"{client.base_url}".rstrip("/") + path
    try:
        reply = client.get(path)
    except httpx.ConnectError as error:
        raise StatusFailed(
            f"nothing answers at {client.base_url} ({error}). Start it with `samovar serve`, "
            "or name another address with --url"
        ) from error
    except httpx.HTTPError as error:
        raise StatusFailed(f"{place} does not answer: {type(error).__name__}") from error
    if reply.status_code in (401, 403):
        raise StatusFailed(
            f"{place} needs the administrator's key (auth.admin_key): set SAMOVAR_API_KEY to it. "
            f"The server says {reply.status_code}"
        )
    if reply.status_code != 200 and path != "/health":
        raise StatusFailed(f"{place} answered {reply.status_code}: is this a Samovar server?")
    try:
        body = reply.json()
    except ValueError as error:
        raise StatusFailed(f"{place} does not answer in JSON: is this a Samovar server?") from error
    if not isinstance(body, dict):
        raise StatusFailed(f"{place} answers with something else: is this a Samovar server?")
    return body


def replica_rows(status: Status) -> list[Row]:
    """Return one row per replica, with the columns of `REPLICA_HEAD`."""
    return [
        (
            str(replica["replica_id"]),
            *(_count(replica[name]) for name in ("running", "waiting", "loading")),
            *(_count(replica[f"pages_{name}"]) for name in ("active", "cached", "free", "total")),
            _sources(replica["tokens_by_source"]),
        )
        for replica in status.replicas
    ]


def tier_rows(status: Status) -> list[Row]:
    """Return one row per node and tier, with the columns of `TIER_HEAD`."""
    return [_tier_row(node, tier) for node in status.nodes for tier in node["tiers"]]


def _tier_row(node: dict[str, Any], tier: dict[str, Any]) -> Row:
    price = tier["price"] or {}
    latency_s, bytes_per_s = price.get("latency_s"), price.get("bytes_per_s")
    return (
        str(node["node_id"])[:8],
        str(tier["name"]),
        str(tier["state"]),
        f"{_size(tier['bytes_held'])} / {_size(tier['bytes_max'])}",
        *(_count(tier[name]) for name in ("extents", "tokens", "hits_blocks")),
        f"{_size(tier['read_bytes'])} / {_size(tier['written_bytes'])}",
        "-" if latency_s is None else f"{latency_s * 1000:.2f}",
        "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f}",
        _failures(tier["read_errors"] + tier["write_errors"], sum(tier["verify_failures"].values())),
        _count(tier["breaker_opened"]),
        "-" if tier.get("listed_ago_s") is None else f"{tier['listed_ago_s']:.0f}",
    )


def peer_rows(status: Status) -> list[Row]:
    """Return one row per node and peer it pulled blocks from, with the columns of `PEER_HEAD`."""
    return [
        _peer_row(node, name, peer) for node in status.nodes for name, peer in node.get("peers", {}).items()
    ]


def _peer_row(node: dict[str, Any], name: str, peer: dict[str, Any]) -> Row:
    nbytes, seconds = sum(peer["nbytes"].values()), sum(peer["seconds"].values())
    return (
        str(node["node_id"])[:8],
        name[:8],
        str(peer["state"]),
        _sources(peer["pulls"]),
        _size(nbytes),
        f"{nbytes / seconds / 1e9:.2f}" if seconds > 0 else "-",
        _sources(peer["failures"]),
        _sources(peer["bad"]),
    )


def returns_rows(status: Status) -> list[Row]:
    """Return one row per node that has seen turns, with the columns of `RETURNS_HEAD`."""
    return [
        _returns_row(node, node["returns"])
        for node in status.nodes
        if node.get("returns", {}).get("sessions") or node.get("returns", {}).get("turns")
    ]


def _returns_row(node: dict[str, Any], returns: dict[str, Any]) -> Row:
    prefetch = returns["prefetch"]
    outcomes = {name: prefetch[name] for name in ("used", "late", "wasted") if prefetch[name]}
    on = [why for why, is_on in prefetch["is_on"].items() if is_on]
    regrets = [prefetch["regret_demand"], prefetch["regret_pause"]]
    return (
        str(node["node_id"])[:8],
        str(returns["predictor"]),
        _count(returns["sessions"]),
        _count(returns["turns"]),
        f"{returns['model_loss']:.3f} ({returns['fallback_loss']:.3f})",
        _count(returns["failures"]),
        " ".join(f"{why}={_size(nbytes)}" for why, nbytes in prefetch["started"].items() if nbytes) or "-",
        " ".join(f"{name}={_size(nbytes)}" for name, nbytes in outcomes.items()) or "-",
        " ".join(on) or "off",
        " / ".join("-" if regret is None else f"{regret:+.3f}" for regret in regrets),
    )


def draining_lines(status: Status) -> list[str]:
    """Return a sentence for each draining node."""
    return [
        f"node {str(node['node_id'])[:8]} is draining: {_sources(node['drained'])}"
        for node in status.nodes
        if node.get("draining")
    ]


def _failures(errors: int, bad: int) -> str:
    """Format the number of failed calls and of records that failed verification."""
    return f"{errors:,}, {bad:,} bad" if bad else _count(errors)


def _sources(tokens: dict[str, int]) -> str:
    """Format counts by name, without zeros."""
    return " ".join(f"{source}={count:,}" for source, count in tokens.items() if count) or "-"


def _count(number: int) -> str:
    return f"{number:,}"


def _size(nbytes: float) -> str:
    return ByteSize(nbytes).human_readable(separator=" ")
