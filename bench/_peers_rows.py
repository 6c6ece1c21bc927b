"""From single readings to rows, ratios and bars: nothing here runs anything."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WORKS = (
    *("start", "start_again", "cold", "warm", "return_overflow", "return_restart"),
    *("decode", "decode_repeats", "concurrent", "itl", "rss", "idle", "aiperf"),
)
OURS = "samovar"
LLAMA = "llama.cpp"


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


def table(rows: Sequence[Mapping[str, Any]], products: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the table that is printed: a line for each work and length, a column for each product.

    `products`: of each engine, whose it is. A product that was measured at several settings shows the best,
    and names it. The last column compares ours with the best of the others in the first figure of the cell:
    the ratio of medians, and in brackets the least and largest of the rounds, where there are several.
    """
    shown = list(dict.fromkeys(products.get(row["engine"], row["engine"]) for row in rows if row["n"]))
    lines = []
    for work, tokens in dict.fromkeys((row["work"], row["tokens"]) for row in rows if row["n"]):
        line = {"work": f"{work} {tokens}" if tokens else work}
        for product in shown:
            best = _best(rows, [product], work, tokens, products)
            line[product] = _cell(best) if best else "-"
            if best and best["engine"] != product:
                line[product] += f" [{best['engine'].removeprefix(product)[1:]}]"
        line["ours / best peer"] = _beside_best(rows, work, tokens, products)
        lines.append(line)
    return lines


def bars(rows: Sequence[Mapping[str, Any]], products: Mapping[str, str]) -> list[Bar]:
    """Return what is asked of these figures, beside llama.cpp at its best setting in each row."""

    def beside_llama(work: str, tokens: int = 0) -> float | None:
        ours, best = _find(rows, OURS, work, tokens), _best(rows, [LLAMA], work, tokens, products)
        name = _COMPARED.get(work, "cpu_s")
        return None if ours is None or best is None else _over(ours[name], best[name])

    found = []
    for tokens in sorted({row["tokens"] for row in rows if row["work"] == "cold"}):
        found.append(_most(f"cold {tokens}: of llama.cpp's", beside_llama("cold", tokens), 0.75))
        found.append(_most(f"warm {tokens}: of llama.cpp's", beside_llama("warm", tokens), 1.0))
        warm = _value(rows, OURS, "warm", tokens)
        for work, limit in (("return_overflow", 1.1), ("return_restart", 1.5)):
            ratio = _over(_value(rows, OURS, work, tokens), warm)
            found.append(_most(f"{work} {tokens}: of our warm", ratio, limit))
    found.append(_most("decode: of llama.cpp's", beside_llama("decode"), 0.85))
    drafts = [_value_of(rows, name, "decode", "cpu_ms_per_token") for name in (OURS, f"{OURS}-undrafted")]
    found.append(_most("decode: of ours without drafts", _over(*drafts), 1.03))
    p99, p50 = (_value_of(rows, OURS, "itl", f"itl_{name}_ms") for name in ("p99", "p50"))
    found.append(_most("itl beside a prefill: p99 of p50", _over(p99, p50), 3.0))
    found.append(_most("start_again: CPU-s", _value_of(rows, OURS, "start_again", "cpu_s"), 12.0))
    found.append(_most("idle: share of a core", _value_of(rows, OURS, "idle", "cpu_share"), 0.04))
    found.append(_most("pss at the end: MB", _value_of(rows, OURS, "rss", "pss_mb"), 1000.0))
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
        case "decode" | "decode_repeats":
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
    "decode_repeats": "cpu_ms_per_token",
    "concurrent": "tok_cpu_s",
    "itl": "itl_p99_ms",
    "rss": "rss_mb",
    "idle": "cpu_share",
    "aiperf": "ttft_s",
}
_MORE_IS_BETTER = ("concurrent",)


def _beside_best(
    rows: Sequence[Mapping[str, Any]], work: str, tokens: int, products: Mapping[str, str]
) -> str:
    ours = _find(rows, OURS, work, tokens)
    others = {product for product in products.values() if not product.startswith(OURS)}
    best = _best(rows, others, work, tokens, products)
    if ours is None or best is None:
        return "-"
    name = _COMPARED.get(work, "cpu_s")
    ratio = _over(ours[name], best[name])
    if ratio is None:
        return "-"
    by_round = [_over(*pair) for pair in zip(ours["raw"][name], best["raw"][name], strict=False)]
    each = [one for one in by_round if one is not None]
    spread = f" ({min(each):.2f}-{max(each):.2f})" if len(each) > 1 else ""
    return f"{ratio:.2f}{spread} x {best['engine']}"


def _best(
    rows: Sequence[Mapping[str, Any]],
    wanted: Collection[str],
    work: str,
    tokens: int,
    products: Mapping[str, str],
) -> Mapping[str, Any] | None:
    """Return the best row of these products, in the figure that is compared."""
    of_work = [row for row in rows if row["n"] and (row["work"], row["tokens"]) == (work, tokens)]
    here = [row for row in of_work if products.get(row["engine"], row["engine"]) in wanted]
    name = _COMPARED.get(work, "cpu_s")
    sign = -1 if work in _MORE_IS_BETTER else 1
    return min(here, key=lambda row: sign * float(row[name]), default=None)


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
