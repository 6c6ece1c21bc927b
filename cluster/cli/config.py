"""Runs `samovar config`: what is set differently from the defaults, one value, or everything."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samovar.cluster.cli.options import (
    ConfigOption,
    HostOption,
    ModelOption,
    PortOption,
    ReplicasOption,
    load_or_exit,
    print_table,
    refuse,
    short_flags,
)

if TYPE_CHECKING:
    from samovar.configs.loader import LoadedSettings

HIDDEN = "***"
HEAD = ("setting", "value", "set by (empty = default)", "what it is")
GET = "get"

# What a person wants to do, and what the settings for it begin with; the longest beginning counts.
GROUPS: dict[str, tuple[str, ...]] = {
    "Choose the model and how it answers": ("model.", "models", "grammar."),
    "Open it to clients: address, keys, pages": ("server.", "auth.", "live."),
    "Fit it to the machine: processors, GPUs, memory": (
        "engine.",
        "cluster.object_store_bytes",
        "tiers.staged_bytes_max",
        "tiers.swap_bytes_max",
    ),
    "Bound what a request or a tenant may take": ("limits.",),
    "Keep what was computed: RAM, disk, S3": ("tiers.",),
    "Say what is kept where, for how long and for whom": (
        "tiers.profiles.",
        "tiers.policy.",
        "tiers.predictor.",
        "tiers.prefetch.",
        "tiers.tenant_share",
    ),
    "Tell conversations apart, and send each where its blocks are": ("router.",),
    "Go on when a process dies": (
        "answers.",
        "ingress.",
        "router.resume",
        "router.heartbeat_s",
        "router.stall_s",
    ),
    "Scale over replicas and nodes": ("cluster.", "tiers.peer.", "tiers.node."),
    "Start a cluster on machines, in a rack or a cloud": ("launch.",),
    "Give answers knowledge, documents and long conversations": ("knowledge.", "documents.", "compaction."),
    "Watch it: traces, logs, dashboards": ("telemetry.", "launch.monitoring."),
    "See what faults do": ("tiers.faults.",),
}

Row = tuple[str, ...]


def group_of(key: str) -> str:
    """Return the heading of a setting: what a person who sets it wants to do."""
    fits = [
        (len(begin), group) for group, begins in GROUPS.items() for begin in begins if key.startswith(begin)
    ]
    return max(fits)[1]


def show_config(
    ctx: typer.Context,
    config: ConfigOption = None,
    host: HostOption = None,
    port: PortOption = None,
    replicas: ReplicasOption = None,
    model: ModelOption = None,
    every: Annotated[bool, typer.Option("--all", help="every setting, not only what differs")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON, for programs: every setting, or with `get` one")
    ] = False,
    keys: Annotated[
        bool, typer.Option("--keys", help="list every setting: flag, variable, what is allowed")
    ] = False,
) -> None:
    """Print which settings differ from the defaults, and why. Also takes --section.key VALUE.

    samovar config get KEY: the value of one setting, such as server.port.
    """
    if keys:
        _print_keys(as_json)
        return
    wanted, rest = asked_for(ctx.args)
    loaded = load_or_exit(config, [*short_flags(host, port, replicas, model), *rest])
    rows = config_rows(loaded)
    if wanted is not None:
        _print_one(wanted, rows, as_json)
    elif as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        _print_rows(rows, every)


def asked_for(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the key after `get`, if that is what was asked, and the flags; exits if there is no key."""
    if not args or args[0] != GET:
        return None, list(args)
    if len(args) < 2 or args[1].startswith("--"):
        refuse("config get: which setting? Write it like `samovar config get server.port`")
    return args[1], list(args[2:])


def config_rows(loaded: LoadedSettings) -> dict[str, dict[str, Any]]:
    """Return `value` (plain JSON), `source`, `origin`, `description` by dotted key. Hides secrets."""
    from samovar.configs.fields import setting_fields

    tree = loaded.settings.model_dump(mode="json")
    rows = {}
    for key, field in setting_fields().items():
        value: Any = tree
        for part in key.split("."):
            value = value[part]
        rows[key] = {
            "value": _hidden(value) if field.secret else value,
            "source": loaded.source[key],
            "origin": loaded.origin[key],
            "description": field.description,
        }
    return rows


def _print_one(key: str, rows: dict[str, dict[str, Any]], as_json: bool) -> None:
    from samovar.configs.loader import did_you_mean

    row = rows.get(key.replace("-", "_"))
    if row is None:
        guess = did_you_mean(key, rows)
        hint = f" Did you mean {guess}?" if guess else ""
        refuse(f"there is no setting {key!r}.{hint} `samovar config --keys` lists all")
    if as_json:
        typer.echo(json.dumps(row["value"], ensure_ascii=False))
    else:
        typer.echo("" if row["value"] is None else in_words(row["value"]))


def _print_rows(rows: dict[str, dict[str, Any]], every: bool) -> None:
    """Print all rows, a heading a group, or those that do not come from the defaults."""
    shown = {key: row for key, row in rows.items() if every or row["source"] != "default"}
    groups = {group: {k: row for k, row in shown.items() if group_of(k) == group} for group in GROUPS}
    headed = groups if every else {"": shown}
    if sys.stdout.isatty():
        _show(headed)
    else:
        lines = [
            [(f"# {group}",)] * bool(group) + [_cells(key, row) for key, row in one.items()]
            for group, one in headed.items()
        ]
        print_table(HEAD, [line for group in lines for line in group])
    if not every:
        others = len(rows) - len(shown)
        typer.echo(
            f"{others} settings have their defaults: `samovar config --all` shows them, "
            "`samovar config get KEY` one",
            err=True,
        )


def _show(headed: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print each setting in lines of its own, so that keys and values can be copied; long lists are paged."""
    from rich.text import Text

    from samovar.cluster.serve.stages import console_of

    console = console_of()
    lines = []
    for group, rows in headed.items():
        lines += [Text(""), Text(group, style="bold underline")] if group else []
        for key, row in rows.items():
            _, value, origin, description = _cells(key, row)
            line = Text.assemble((key, "bold"), " = ", value)
            if origin:
                line.append(f"   ({origin})", style="cyan")
            lines += [line, Text(f"    {description}", style="dim")]
    if len(lines) <= console.height:
        console.print(*lines, sep="\n", soft_wrap=False)
        return
    with console.pager(styles="r" in os.environ.get("LESS", "").lower()):  # else `less` shows their codes
        console.print(*lines, sep="\n")


def _cells(key: str, row: dict[str, Any]) -> Row:
    origin = row["origin"] if row["source"] != "default" else ""
    return key, in_words(row["value"]), origin, row["description"]


def _print_keys(as_json: bool) -> None:
    from samovar.configs.fields import setting_fields

    if as_json:
        spelled = {
            key: {
                "flag": field.flag,
                "env": field.env,
                "allowed": field.allowed,
                "description": field.description,
            }
            for key, field in setting_fields().items()
        }
        typer.echo(json.dumps(spelled, indent=2, ensure_ascii=False))
        return
    lines = [(field.flag, field.env, field.allowed, field.description) for field in setting_fields().values()]
    print_table(("flag", "variable", "allowed", "what it is"), lines)


def _hidden(value: Any) -> Any:
    """Return a secret's shape only: which tenants there are, or whether there is a secret."""
    if isinstance(value, dict):
        return dict.fromkeys(value, HIDDEN)
    return value if value is None else HIDDEN


def in_words(value: Any) -> str:
    """Return a setting's value as text."""
    if value is None:
        return "(empty)"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (bool, dict, list)) else str(value)
