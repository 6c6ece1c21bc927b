"""`samovar keys`: the API keys in the file that `auth.keys_file` names.

A running service follows the file: no command here talks to it. Imports neither Ray nor anything heavy.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from samovar.cluster.cli.options import (
    ANY_SETTING,
    HELP_NAMES,
    Command,
    ConfigOption,
    Group,
    load_or_exit,
    print_table,
    refuse,
)

if TYPE_CHECKING:
    from samovar.router.identities import KeyRecord, KeyStore

Done = TypeVar("Done")

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

keys = typer.Typer(
    name="keys",
    cls=Group,
    context_settings=HELP_NAMES,
    help="API keys in a file (auth.keys_file), which a running service follows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

JsonOption = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]
IdArgument = Annotated[str, typer.Argument(help="of `samovar keys list`")]


@keys.command(cls=Command, context_settings=ANY_SETTING)
def create(
    ctx: typer.Context,
    tenant: Annotated[str | None, typer.Argument(help="whose key it is")] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="a key of the administrator's, of no tenant")
    ] = False,
    lasts: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="such as 90d, 12h or 30m; left out: until it is revoked"),
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Make a key and print it: once, as the file has its digest only. Also takes --section.key VALUE."""
    from pydantic import TypeAdapter, ValidationError

    from samovar.configs.settings import TenantName
    from samovar.router.identities import has_one_owner

    if not has_one_owner(tenant, admin):
        refuse("give the tenant whose key it is, or --admin")
    if tenant is not None:
        try:
            TypeAdapter(TenantName).validate_python(tenant)
        except ValidationError:
            refuse(f"{tenant[:64]!r} is no tenant: small letters, digits, - and _, 63 at most")
    lasts_s = None if lasts is None else seconds_of(lasts)
    record, key = _done(config, ctx.args, lambda file: file.create(tenant, lasts_s), "create")
    _print_made(record, key, as_json=as_json)


@keys.command("list", cls=Command, context_settings=ANY_SETTING)
def list_keys(ctx: typer.Context, as_json: JsonOption = False, config: ConfigOption = None) -> None:
    """Show all keys, without the keys themselves: tab-separated in a pipe. Also takes --section.key VALUE."""
    now_s = datetime.now(UTC).timestamp()
    found = _done(config, ctx.args, lambda file: file.read())
    if as_json:
        typer.echo(json.dumps([key.told(now_s) for key in found]))
        return
    lines = [
        (
            key.id,
            "administrator" if key.tenant is None else key.tenant,
            f"{key.shown}...",
            key.state(now_s),
            *(_day(at) for at in (key.created, key.expires, key.used)),
        )
        for key in found
    ]
    print_table(("id", "tenant", "key", "state", "created", "expires", "last used"), lines)


@keys.command(cls=Command, context_settings=ANY_SETTING)
def rotate(
    ctx: typer.Context,
    key: IdArgument,
    keep: Annotated[str, typer.Option(metavar="TIME", help="how long the old key stays good")] = "1d",
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Make a key in place of another, and print it once; both are good for a while.

    Also takes --section.key VALUE.
    """
    keep_s = seconds_of(keep)
    record, made = _done(config, ctx.args, lambda file: file.rotate(key, keep_s), "rotate")
    _print_made(record, made, as_json=as_json)


@keys.command(cls=Command, context_settings=ANY_SETTING)
def revoke(ctx: typer.Context, key: IdArgument, config: ConfigOption = None) -> None:
    """End a key: within seconds no ingress takes it any more. Also takes --section.key VALUE."""
    record = _done(config, ctx.args, lambda file: file.revoke(key), "revoke")
    typer.echo(f"{record.id} of {record.tenant or 'the administrator'} is revoked")


def seconds_of(text: str) -> int:
    """Return a time such as 90d in seconds; ends the command if it is none."""
    from samovar.router.identities import LASTS_S_MAX

    match = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if match is None:
        refuse(f"{text[:40]!r} is no time. Give a number and s, m, h or d, such as 90d")
    found = int(match[1]) * SECONDS[match[2]]
    if found > LASTS_S_MAX:
        refuse(f"{text} is more than ten years")
    return found


def _done(config: str | None, args: list[str], work: Callable[[KeyStore], Done], change: str = "") -> Done:
    """Return what `work` does with the keys that the settings name; ends the command if that fails.

    `change`: what it does to keys, for the audit log; empty: nothing.
    """
    from samovar.configs.extras import ExtraMissing
    from samovar.router.identities import KeysRefused, open_keys

    settings = load_or_exit(config, args).settings
    auth = settings.auth
    if auth.keys_file is None:
        refuse(
            "auth.keys_file is empty. Set it for the service and for this command, in its configuration "
            "(--config), or by SAMOVAR_AUTH__KEYS_FILE"
        )
    try:
        store = open_keys(settings)
        assert store is not None
        done = work(store)
    except (KeysRefused, ExtraMissing) as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{auth.keys_file}: {error.strerror}")
    if change and auth.audit_file is not None:
        _note(auth.audit_file, change, done[0] if isinstance(done, tuple) else done)
    return done


def _note(path: Path, change: str, record: object) -> None:
    """Write a change of a key into the audit log; what is changed stays so if that fails."""
    from samovar.router.identities import AuditLog

    user = {"user": getpass.getuser(), "uid": os.getuid()}
    line = {"event": "keys", "who": user, "what": f"samovar keys {change}", "from": socket.gethostname()}
    told = {name: getattr(record, name) for name in ("id", "tenant", "expires")}
    try:
        AuditLog(path).write({**line, "key": told})
    except OSError as error:
        typer.echo(f"samovar: it is done, but {path} cannot be written: {error.strerror}", err=True)


def _print_made(record: KeyRecord, key: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(
            json.dumps({"id": record.id, "tenant": record.tenant, "expires": record.expires, "key": key})
        )
        return
    until = "until it is revoked" if record.expires is None else f"until {_day(record.expires)}"
    typer.echo(f"{record.id} of {record.tenant or 'the administrator'}, good {until}", err=True)
    typer.echo(key)


def _day(at: int | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")
