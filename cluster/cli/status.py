"""Runs `samovar status`: a running server's replicas and cache tiers, in short or as tables.

Asks the server over HTTP. Imports neither Ray nor anything heavy, so that it does not load a busy machine.
"""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import ByteSize
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from samovar.cache_tiers.blocks import TIERS
from samovar.cache_tiers.messages import as_json as in_json
from samovar.cluster.cli.conversation import error_message
from samovar.cluster.cli.options import print_table
from samovar.cluster.cli.running import AccessRefused, client_of
from samovar.cluster.serve.stages import console_of
from samovar.cluster.serve.startup_table import TIER_WORDS, WELL, state_in_words
from samovar.configs.json_text import parse_json

TIMEOUT_S = 10.0
COLUMNS_MAX = 10_000
"""A terminal so wide that every table fits: to find out how wide a table is."""
NOT_SET_UP = "not set up"

REPLICA_HEAD = (
    *("replica", "running", "waiting", "loading", "pages used", "cached", "free", "total", "KV", "tokens"),
)
TIER_HEAD = (
    *("node", "tier", "state", "held / max", "extents", "tokens", "hit blocks", "read / written"),
    *("latency ms", "GB/s", "failures", "breaker", "listed s ago"),
)

RETURNS_HEAD = (
    *("node", "predictor", "sessions", "turns", "log loss (fallback)", "failures"),
    *("prefetched", "of guesses", "guessing", "regret (demand / pause)"),
)
LRU_HEAD = (
    *("node", "against LRU", "gained tokens", "regretted tokens", "of asked", "turns"),
    *("found by tier", "LRU by tier", "calibration error", "hints"),
)
SHORT_HEAD = ("where", "used", "of", "tokens kept", "read back", "state")
PEER_HEAD = ("node", "from node", "state", "pulled by", "bytes", "GB/s", "failures", "bad")

NOT_CONFIGURED = ("off: no bucket", "off: bytes_max is 0", "off: not configured")
"""States of tiers that are not configured: see `build_tiers`."""

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
    with open_client(url, api_key, transport) as client:
        health = get_json(client, "/health")
        stats = get_json(client, "/cache/stats")
    return Status(health, stats.get("replicas", []), stats.get("nodes", []))


def open_client(url: str, api_key: str | None, transport: httpx.BaseTransport | None = None) -> httpx.Client:
    """Return a client of the server at `url`. Raises `StatusFailed` if that, or the key, cannot be used."""
    try:
        return client_of(url, api_key, TIMEOUT_S, transport)
    except AccessRefused as error:
        raise StatusFailed(str(error)) from error


def get_json(client: httpx.Client, path: str) -> dict[str, Any]:
    """Return the JSON object that a path answers with. Raises `StatusFailed`."""
    body = json_of(get(client, path))
    if not isinstance(body, dict):
        raise StatusFailed(f"{_place(client, path)} does not answer in JSON: is this a Samovar server?")
    return body


def _place(client: httpx.Client, path: str) -> str:
    return f"{client.base_url}".rstrip("/") + path


def get(client: httpx.Client, path: str) -> httpx.Response:
    """Return the server's answer, of /health also one that it does not serve yet. Raises `StatusFailed`."""
    place = _place(client, path)
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
    if reply.status_code == 503 and (said := error_message(json_of(reply))):  # it starts, or stops
        raise StatusFailed(f"{place}: {said}")
    if reply.status_code != 200 and path != "/health":
        raise StatusFailed(f"{place} answered {reply.status_code}: is this a Samovar server?")
    return reply


def json_of(reply: httpx.Response) -> Any:
    """Return the JSON of an answer; None: it is something else."""
    try:
        return parse_json(reply.content)
    except ValueError:
        return None


def replica_rows(status: Status) -> list[Row]:
    """Return one row per replica, with the columns of `REPLICA_HEAD`."""
    return [
        (
            str(replica["replica_id"]),
            *(_count(replica[name]) for name in ("running", "waiting", "loading")),
            *(_count(replica[f"pages_{name}"]) for name in ("active", "cached", "free", "total")),
            str(replica.get("kv_dtype") or "-"),
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
        "-" if not latency_s else f"{latency_s * 1000:.2f}",
        "-" if bytes_per_s is None or math.isinf(bytes_per_s) else f"{bytes_per_s / 1e9:.2f}",
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


def lru_rows(status: Status) -> list[Row]:
    """Return one row per node whose lookups were compared, with the columns of `LRU_HEAD`."""
    told = [(node, node.get("returns", {}).get("lru", {})) for node in status.nodes]
    return [_lru_row(node, lru) for node, lru in told if lru.get("asked_tokens")]


def _lru_row(node: dict[str, Any], lru: dict[str, Any]) -> Row:
    gained, regretted, asked = (lru[f"{name}_tokens"] for name in ("gained", "regretted", "asked"))
    points = node.get("returns", {}).get("calibration", ())
    turns = sum(one[2] for one in points)
    error = sum(abs(said - true) * n for said, true, n in points) / turns if turns else None
    return (
        str(node["node_id"])[:8],
        f"{(gained - regretted) / asked:+.2%}",
        *(_count(number) for number in (gained, regretted, asked, lru["lookups"])),
        *(_sources(lru[name]) for name in ("found_tokens", "lru_tokens")),
        "-" if error is None else f"{error:.3f}",
        _sources(node.get("returns", {}).get("hints", {})),
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


def show(
    url: str,
    api_key: str | None,
    *,
    as_json: bool = False,
    every: bool = False,
    watch_s: float | None = None,
) -> None:
    """Print the status of the server at `url`; with `watch_s`, again after each such pause until Ctrl-C.

    `every`: all tables instead of the short form. Raises `StatusFailed`; while watching it is shown instead.
    """
    if watch_s is None:
        _print(ask(url, api_key), url, as_json=as_json, every=every)
        return
    pause = threading.Event()
    try:
        if as_json:
            while True:
                print(json.dumps(ask(url, api_key).json(), ensure_ascii=False), flush=True)
                pause.wait(watch_s)
        view = all_of if every else short
        with Live(console=console_of(), auto_refresh=False, vertical_overflow="visible") as live:
            while True:
                live.update(or_why_not(lambda: view(ask(url, api_key), url)), refresh=True)
                pause.wait(watch_s)
    except KeyboardInterrupt:
        return


def show_tiers(path: Path, *, as_json: bool) -> None:
    """Print the tiers that `samovar tiers` serves at a socket. Raises `StatusFailed`."""
    from samovar.cache_tiers.socket.client import SocketLink

    link = SocketLink(path, "samovar status", call_s=TIMEOUT_S)
    stats = link.stats()
    link.close()
    if stats is None:
        raise StatusFailed(f"no tiers answer at {path}. Start them with `samovar tiers --socket {path}`")
    status = Status({}, (), (asdict(stats),))
    if as_json:
        print(json.dumps(in_json(stats), default=str, allow_nan=False))
        return
    console = console_of()
    for head, rows in all_tables(status)[1:]:
        console.print(_fitting(head, rows, console))


def or_why_not(build: Callable[[], RenderableType]) -> RenderableType:
    """Return what `build` shows, or why the server could not be asked."""
    try:
        return build()
    except StatusFailed as error:
        return Text(str(error), style="yellow")


def _print(status: Status, url: str, *, as_json: bool, every: bool) -> None:
    if as_json:
        print(json.dumps(status.json(), indent=2, ensure_ascii=False))
    elif every and not sys.stdout.isatty():  # for `grep` and `cut`
        print(f"{_head(status, url)}\n")
        for number, (head, rows) in enumerate(all_tables(status)):
            if number:
                print()
            print_table(head, rows)
        for line in draining_lines(status):
            print(f"\n{line}")
    else:
        console_of().print(all_of(status, url) if every else short(status, url))


def _head(status: Status, url: str) -> str:
    detail = status.health.get("detail")
    return f"{url}: {status.health.get('status', 'unknown')}{f' ({detail})' if detail else ''}"


def all_tables(status: Status) -> list[tuple[Row, list[Row]]]:
    """Return the tables that have something to say, each as its head and rows."""
    tables: list[tuple[Row, list[Row]]] = [
        (REPLICA_HEAD, replica_rows(status)),
        (TIER_HEAD, tier_rows(status)),
    ]
    others: list[tuple[Row, list[Row]]] = [
        (PEER_HEAD, peer_rows(status)),
        (RETURNS_HEAD, returns_rows(status)),
        (LRU_HEAD, lru_rows(status)),
    ]
    return tables + [(head, rows) for head, rows in others if rows]


def all_of(status: Status, url: str) -> RenderableType:
    """Return all tables; a row too wide for the terminal is a block of lines, one for each column."""
    console = console_of()
    parts: list[RenderableType] = [Text(_head(status, url)), Text("")]
    parts += [_fitting(head, rows, console) for head, rows in all_tables(status)]
    parts += [Text(line, style="yellow") for line in draining_lines(status)]
    return Group(*parts)


def _fitting(head: Row, rows: Sequence[Row], console: Console) -> RenderableType:
    table = _table(head, rows)
    wanted = console.measure(table, options=console.options.update(width=COLUMNS_MAX)).maximum
    if wanted > console.width:
        return Group(*(_upright(head, row) for row in rows))
    return Group(table, Text(""))


def _table(head: Row, rows: Sequence[Row]) -> Table:
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _upright(head: Row, row: Row) -> RenderableType:
    """Return a row as lines `column  value`, without the columns that have nothing to say."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, cell in zip(head, row, strict=True):
        if cell not in ("0", "-"):
            table.add_row(name, Text(cell))
    return Group(table, Text(""))


def short(status: Status, url: str) -> RenderableType:
    """Return the short form: what is asked now, where prompts' tokens came from, and each place of blocks."""
    replicas = status.replicas
    asked = ", ".join(
        f"{sum(replica[name] for replica in replicas):,} {name}" for name in ("running", "waiting", "loading")
    )
    table = Table(*SHORT_HEAD, box=None, pad_edge=False)
    for column in table.columns[1:5]:
        column.justify = "right"
    for row in short_rows(status):
        table.add_row(*(Text(cell) for cell in row), style=_style(row[-1]))
    parts: list[RenderableType] = [
        Text(_head(status, url)),
        Text(
            f"{_several(len(replicas), 'replica')}, {_several(len(status.nodes), 'node')}; requests: {asked}"
        ),
        *_of_models(status.health.get("models", {})),
        Text(f"prompt tokens so far: {sources_in_words(replicas)}"),
        Text(""),
        table,
    ]
    trouble = [*troubles(status), *draining_lines(status)]
    parts += [Text(""), *(Text(line, style="yellow") for line in trouble)] if trouble else []
    return Group(*parts)


def _of_models(replicas: Mapping[str, int]) -> list[Text]:
    """Return a line with the replicas of each model, if there are several models."""
    told = ", ".join(f"{name} ({count})" for name, count in replicas.items())
    return [Text(f"models: {told}")] if told else []


def _style(state: str) -> str:
    if state == NOT_SET_UP:
        return "dim"
    return "" if state in ("", *WELL) else "yellow"


def sources_in_words(replicas: Sequence[dict[str, Any]]) -> str:
    """Return how many prompt tokens there were, and the share of each source."""
    tokens: dict[str, int] = {}
    for replica in replicas:
        for source, count in replica["tokens_by_source"].items():
            tokens[source] = tokens.get(source, 0) + count
    total = sum(tokens.values())
    if not total:
        return "none"
    words = {"compute": "computed", **TIER_WORDS}
    shares = [
        f"{words.get(source, source)} {count / total:.0%}"
        for source, count in sorted(tokens.items(), key=lambda item: -item[1])
        if count
    ]
    return f"{total:,} ({', '.join(shares)})"


def short_rows(status: Status) -> list[Row]:
    """Return one row for the pools, and one per tier over all nodes, with the columns of `SHORT_HEAD`."""
    used, total = (
        sum(sum(replica[name] for name in names) for replica in status.replicas)
        for names in (("pages_active", "pages_cached"), ("pages_total",))
    )
    rows: list[Row] = [(TIER_WORDS["gpu"], f"{used:,} pages", f"{total:,}", "", "", "")]
    by_name: dict[str, list[dict[str, Any]]] = {}
    for node in status.nodes:
        for tier in node["tiers"]:
            by_name.setdefault(str(tier["name"]), []).append(tier)
    for name, tiers in by_name.items():
        held, room, tokens = (
            _together([tier[key] for tier in tiers], is_shared=name in TIERS.shared)
            for key in ("bytes_held", "bytes_max", "tokens")
        )
        rows.append(
            (
                TIER_WORDS.get(name, name),
                _size(held),
                _size(room),
                _count(tokens),
                _size(sum(tier["read_bytes"] for tier in tiers)),
                _states([str(tier["state"]) for tier in tiers]),
            )
        )
    pulled = sum(
        sum(peer["nbytes"].values()) for node in status.nodes for peer in node.get("peers", {}).values()
    )
    if len(status.nodes) > 1:
        rows.append((TIER_WORDS["peer"], "", "", "", _size(pulled), ""))
    return rows


def _together(counts: Sequence[int], *, is_shared: bool) -> int:
    """Return what all nodes hold: all see the same bucket, what else they hold adds up."""
    return max(counts) if is_shared else sum(counts)


def _states(states: Sequence[str]) -> str:
    """Return the first word of the state that all have, or how many are up."""
    words = {NOT_SET_UP if state in NOT_CONFIGURED else state.partition(":")[0] for state in states}
    if len(words) == 1:
        return words.pop()
    return f"{sum(state in WELL for state in states)} of {len(states)} up"


def troubles(status: Status) -> list[str]:
    """Return a sentence for each tier that does not serve, unless it is not configured."""
    lines = []
    for node in status.nodes:
        where = f" (node {str(node['node_id'])[:8]})" if len(status.nodes) > 1 else ""
        for tier in node["tiers"]:
            state = str(tier["state"])
            if state not in WELL and state not in NOT_CONFIGURED:
                lines.append(f"{TIER_WORDS.get(tier['name'], tier['name'])}{where}: {state_in_words(state)}")
    return lines


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
