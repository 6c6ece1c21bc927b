"""From single readings to rows, ratios and bars: nothing here runs anything."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WORKS = (
    *("start", "start_again", "cold", "warm", "return_overflow", "return_restart"),
    *("decode", "concurrent", "itl", "rss", "idle", "aiperf"),
)
OURS = "samovar"
RSS_POOL_MB = 512 * 1.048576  # the bar's pool: 512 MiB
RSS_MB_MAX = 1.5 * 1073.741824  # 1.5 GiB
TODAY_WARM_CPU_S = {1000: 0.265, 2000: 0.29, 4000: 0.445}
"""Another run: 2026-11-22 at 4ddee80 (the mean where it has a range), a 2-core Xeon with AVX-512 and bf16."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One work done once. `values`: seconds, counts and rates by name; `tokens`: of the prompt, 0 = none."""

    engine: str
    work: str
    tokens: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure must be. `ok`: None where it was not measured."""

    name: str
    value: float | None
    limit: str
    ok: bool | None


def rows_of(readings: Sequence[Reading], steps: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row of medians for each engine, work and length, with all that it is the median of.

    `steps`: what an engine says of its forward pass.
    """
    groups: dict[tuple[str, str, int], list[Reading]] = {}
    for reading in readings:
        groups.setdefault((reading.engine, reading.work, reading.tokens), []).append(reading)
    rows = []
    for (engine, work, tokens), group in sorted(groups.items(), key=lambda one: _place(one[0])):
        names = dict.fromkeys(name for reading in group for name in reading.values)
        raw = {name: [reading.values[name] for reading in group if name in reading.values] for name in names}
        row: dict[str, Any] = {"engine": engine, "work": work, "tokens": tokens, "n": len(group)}
        row |= {name: _rounded(statistics.median(values)) for name, values in raw.items()}
        if steps.get(engine):
            row["step"] = steps[engine]
        row["raw"] = {name: [_rounded(value) for value in values] for name, values in raw.items()}
        rows.append(row)
    return rows


def skipped(engine: str, reason: str, work: str = "all") -> dict[str, Any]:
    """Return the row of what was not measured, and why."""
    return {"engine": engine, "work": work, "tokens": 0, "n": 0, "skipped": reason}


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the table that is printed: a line for each work and length, a column for each engine.

    The last column says how ours compares with the best of the others, in the first figure of the cell.
    """
    engines = list(dict.fromkeys(row["engine"] for row in rows if row["n"]))
    lines = []
    for work, tokens in dict.fromkeys((row["work"], row["tokens"]) for row in rows if row["n"]):
        line = {"work": f"{work} {tokens}" if tokens else work}
        for engine in engines:
            found = _find(rows, engine, work, tokens)
            line[engine] = _cell(found) if found else "-"
        line["ours / best peer"] = _beside_best(rows, engines, work, tokens)
        lines.append(line)
    return lines


def bars(rows: Sequence[Mapping[str, Any]], pool_mb: float) -> list[Bar]:
    """Return what issue 16 asks of these figures; `pool_mb`: what each server's pool had here."""
    found = []
    for tokens in sorted({row["tokens"] for row in rows if row["work"] == "cold"}):
        ratio = _over(_value(rows, OURS, "cold", tokens), _value(rows, "vllm", "cold", tokens))
        found.append(_most(f"cold {tokens}: CPU-s of vllm's", ratio, 0.8))
        today = TODAY_WARM_CPU_S.get(tokens)
        ratio = _over(_value(rows, OURS, "warm", tokens), today)
        found.append(_most(f"warm {tokens}: CPU-s of 2026-11-22's (another run and CPU)", ratio, 0.6))
        back = _value(rows, OURS, "return_overflow", tokens)
        ratio = _over(back, _value(rows, OURS, "warm", tokens))
        found.append(_most(f"return_overflow {tokens}: CPU-s of warm's", ratio, 1.1))
    per_token = [_value_of(rows, name, "decode", "cpu_ms_per_token") for name in (OURS, "llama.cpp")]
    found.append(_most("decode: CPU a token of llama.cpp's", _over(*per_token), 0.9))
    per_cpu = [_value_of(rows, name, "concurrent", "tok_cpu_s") for name in (OURS, "vllm")]
    found.append(_least("concurrent: tokens a CPU-s of vllm's", _over(*per_cpu), 1.3))
    p99, p50 = (_value_of(rows, OURS, "itl", f"itl_{name}_ms") for name in ("p99", "p50"))
    found.append(_most("itl beside a prefill: p99 of p50", _over(p99, p50), 3.0))
    found.append(_most("start_again: CPU-s", _value_of(rows, OURS, "start_again", "cpu_s"), 15.0))
    found.append(_most("idle: share of a core", _value_of(rows, OURS, "idle", "cpu_share"), 0.05))
    rss_mb = _value_of(rows, OURS, "rss", "rss_mb")
    whole_mb = None if rss_mb is None else rss_mb + max(0.0, RSS_POOL_MB - pool_mb)
    found.append(_most("rss with a pool of 512 MiB (the rest of it added): MB", whole_mb, round(RSS_MB_MAX)))
    return found


def _place(key: tuple[str, str, int]) -> tuple[int, int]:
    return WORKS.index(key[1]), key[2]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _cell(row: Mapping[str, Any]) -> str:
    """Say the figures of a row, the one that is compared first."""
    first = f"{row['cpu_s']:.3g}" if "cpu_s" in row else ""
    match row["work"]:
        case "start" | "start_again":
            return f"{first} ({row['wall_s']:.3g})"
        case "decode":
            return f"{row['cpu_ms_per_token']:.3g} ms, {row['tok_s']:.3g}/s"
        case "concurrent":
            return f"{row['tok_cpu_s']:.3g} a CPU-s, {row['tok_s']:.3g}/s"
        case "itl":
            return f"{row['itl_p99_ms']:.4g} / {row['itl_p50_ms']:.3g}, {row['itl_alone_p50_ms']:.3g} ms"
        case "rss":
            return f"{row['rss_mb']:.4g} ({row['pss_mb']:.4g}) MB"
        case "idle":
            return f"{100 * row['cpu_share']:.3g} %"
        case "aiperf":
            return f"{row['ttft_s']:.3g} s, {row['tok_s']:.3g}/s"
    cached = f" {row['cached_tokens']:.0f} c" if row["cached_tokens"] else ""
    return f"{first} ({row['ttft_s']:.3g}){cached}"


_COMPARED = {
    "decode": "cpu_ms_per_token",
    "concurrent": "tok_cpu_s",
    "itl": "itl_p99_ms",
    "rss": "rss_mb",
    "idle": "cpu_share",
    "aiperf": "ttft_s",
}
_MORE_IS_BETTER = ("concurrent",)


def _beside_best(rows: Sequence[Mapping[str, Any]], engines: Sequence[str], work: str, tokens: int) -> str:
    name = _COMPARED.get(work, "cpu_s")
    ours = _find(rows, OURS, work, tokens)
    others = {
        engine: row[name]
        for engine in engines
        if not engine.startswith(OURS) and (row := _find(rows, engine, work, tokens))
    }
    if ours is None or not others:
        return "-"
    best = (max if work in _MORE_IS_BETTER else min)(others, key=lambda engine: others[engine])
    ratio = _over(ours[name], others[best])
    return "-" if ratio is None else f"{ratio:.2f} x {best}"


def _find(rows: Sequence[Mapping[str, Any]], engine: str, work: str, tokens: int) -> Mapping[str, Any] | None:
    wanted = (engine, work, tokens)
    return next(
        (row for row in rows if row["n"] and (row["engine"], row["work"], row["tokens"]) == wanted), None
    )


def _value(rows: Sequence[Mapping[str, Any]], engine: str, work: str, tokens: int) -> float | None:
    row = _find(rows, engine, work, tokens)
    return None if row is None else float(row["cpu_s"])


def _value_of(rows: Sequence[Mapping[str, Any]], engine: str, work: str, name: str) -> float | None:
    for row in rows:
        if row["n"] and row["engine"] == engine and row["work"] == work:
            return float(row[name])
    return None


def _over(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other


def _most(name: str, value: float | None, limit: float) -> Bar:
    return Bar(name, value, f"<= {limit:g}", None if value is None else value <= limit)


def _least(name: str, value: float | None, limit: float) -> Bar:
    return Bar(name, value, f">= {limit:g}", None if value is None else value >= limit)
