"""Runs `samovar-tiers`, which serves tiers at a socket, `samovar-tiers status`, and `samovar-tiers doctor`.

Needs nothing but what the tiers need: no terminal library, no Ray.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from samovar.cache_tiers.command.doctor import SOCKET, Result, in_gib, vllm_checks
from samovar.cache_tiers.messages import NodeStats, as_json
from samovar.cache_tiers.socket.client import SocketLink
from samovar.cache_tiers.socket.process import main as serve

ASK_S = 5.0
LINE_CHARS = 110
FAILED = 1


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    given = list(sys.argv[1:] if words is None else words)
    match given[:1]:
        case ["doctor"]:
            return _doctor(given[1:])
        case ["status"]:
            return _status(given[1:])
    return serve(given, "samovar-tiers", "Also: samovar-tiers status, samovar-tiers doctor.")


def _doctor(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "samovar-tiers doctor",
        description="Check what a vLLM of this environment needs to use the tiers. Exits with 1 on an error.",
    )
    parser.add_argument("--socket", type=Path, help=f"of the tiers; default: as in the config, or {SOCKET}")
    parser.add_argument("--kv-transfer-config", metavar="JSON", help="what vLLM is given")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    given = parser.parse_args(words)
    rows: list[tuple[str, str, Result]] = []
    for check in vllm_checks(given.socket, given.kv_transfer_config):
        try:
            rows.append((check.name, check.title, check.run()))
        except Exception as error:  # noqa: BLE001 - any fault of a check is its result
            rows.append((check.name, check.title, ("warning", f"cannot be checked: {error}", "")))
        if not given.json:
            print(_lines(rows[-1][1], rows[-1][2]), flush=True)
    if given.json:
        keys = ("name", "title", "state", "says", "fix")
        print(json.dumps([dict(zip(keys, (*row[:2], *row[2]), strict=True)) for row in rows], indent=2))
    return FAILED if any(result[0] == "error" for _, _, result in rows) else 0


def _lines(title: str, result: Result) -> str:
    """Return a check's row; what is to be copied stays in one line."""
    state, says, fix = result
    head = f"{state:8} {title:21} "
    margin = " " * len(head)
    lines = textwrap.wrap(says, LINE_CHARS - len(head), break_long_words=False, break_on_hyphens=False) or [
        ""
    ]
    return "\n".join(
        [head + lines[0], *(margin + line for line in lines[1:]), *([f"{margin}-> {fix}"] if fix else [])]
    )


def _status(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("samovar-tiers status", description="Show what tiers hold and do.")
    parser.add_argument("--socket", type=Path, default=SOCKET, help=f"of the tiers; default: {SOCKET}")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    given = parser.parse_args(words)
    path = given.socket.expanduser()
    link = SocketLink(path, "samovar-tiers status", call_s=ASK_S)
    stats = link.stats()
    link.close()
    if stats is None:
        print(f"no tiers answer at {path}. Start them with `samovar-tiers --socket {path}`", file=sys.stderr)
        return FAILED
    print(json.dumps(as_json(stats), default=str, allow_nan=False) if given.json else table_of(stats))
    return 0


def table_of(stats: NodeStats) -> str:
    """Return the tiers as a table, and what became of offers."""
    rows = [("tier", "state", "held", "of", "tokens", "hit blocks", "errors", "bad")]
    rows += [
        (
            tier.name, tier.state, in_gib(tier.bytes_held), in_gib(tier.bytes_max), f"{tier.tokens:,}",
            f"{tier.hits_blocks:,}", f"{tier.read_errors + tier.write_errors:,}", f"{tier.quarantined:,}",
        )
        for tier in stats.tiers
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(one.ljust(width) for one, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    stored = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(stats.stores.items()))
    return "\n".join([*lines, f"offers: {stored or 'none yet'}"])
