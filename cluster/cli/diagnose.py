"""Defines `samovar diagnose` and `samovar doctor`: their options, exit codes, and asking a running server."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer

from samovar.cluster.cli.options import (
    ANY_SETTING,
    EXIT_FAILED,
    SPELLING,
    ApiKeyOption,
    Command,
    ConfigOption,
    UrlOption,
    load_or_exit,
    refuse,
)

if TYPE_CHECKING:
    from samovar.router.observe.diagnosis import Diagnosis, Snapshot

PIPE_COLUMNS = 120
PERIOD_S_MAX = 3600


def register(app: typer.Typer) -> None:
    """Add the two commands to `samovar`."""
    app.command("diagnose", cls=Command)(diagnose)
    app.command("doctor", cls=Command, context_settings=ANY_SETTING, epilog=SPELLING)(doctor)


def diagnose(
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    every: Annotated[bool, typer.Option("--all", help="also what is not wrong, with its numbers")] = False,
    over_s: Annotated[
        float | None,
        typer.Option(
            "--over",
            metavar="SECONDS",
            min=0.2,
            max=PERIOD_S_MAX,
            help="judge what happens in the next SECONDS; by default, since the server's start",
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="judge the last period again and again")] = False,
    every_s: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.2, max=PERIOD_S_MAX, help="of --watch")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Say what is wrong with a running server, the numbers that show it, and which setting would help.

    Exits with 0 if nothing is wrong, 1 if something is, 2 if the server cannot be asked. With API keys it
    needs the administrator's.
    """
    from samovar.cluster.cli.running import server_url
    from samovar.cluster.cli.status import StatusFailed

    address = server_url(url)
    try:
        if watch:
            _watch(address, api_key, every_s, every=every, as_json=as_json)
            return
        now, before = snapshot(address, api_key), None
        if over_s is not None:
            threading.Event().wait(over_s)
            now, before = snapshot(address, api_key), now
    except StatusFailed as error:
        refuse(str(error))
    from samovar.router.observe.diagnosis import diagnose as judge

    found = judge(now, before)
    _print(found, address, every=every, as_json=as_json)
    raise typer.Exit(EXIT_FAILED if found.holding else 0)


def snapshot(url: str, api_key: str | None, *, transport: httpx.BaseTransport | None = None) -> Snapshot:
    """Return what the server at `url` counts now. Raises `StatusFailed`."""
    from samovar.cluster.cli.status import StatusFailed, get, get_json, open_client
    from samovar.router.observe.diagnosis import NoSnapshot, snapshot_of

    with open_client(url, api_key, transport) as client:
        stats, metrics = get_json(client, "/cache/stats"), get(client, "/metrics").text
    try:
        return snapshot_of(stats, metrics, time.monotonic())
    except NoSnapshot as error:
        raise StatusFailed(f"{url}: {error}") from error


def _watch(url: str, api_key: str | None, every_s: float, *, every: bool, as_json: bool) -> None:
    from rich.console import RenderableType
    from rich.live import Live

    from samovar.cluster.cli.status import or_why_not
    from samovar.cluster.doctor.check import diagnosis_view
    from samovar.cluster.serve.stages import console_of
    from samovar.router.observe.diagnosis import diagnose as judge

    pause, before = threading.Event(), None

    def again() -> Diagnosis:
        nonlocal before
        now = snapshot(url, api_key)
        found = judge(now, before)
        before = now
        return found

    def view() -> RenderableType:
        return diagnosis_view(again(), url, every=every)

    try:
        while as_json:
            print(json.dumps(again().json(), ensure_ascii=False), flush=True)
            pause.wait(every_s)
        with Live(console=console_of(), auto_refresh=False, vertical_overflow="visible") as live:
            while True:
                live.update(or_why_not(view), refresh=True)
                pause.wait(every_s)
    except KeyboardInterrupt:
        return


def _print(found: Diagnosis, url: str, *, every: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.json(), indent=2, ensure_ascii=False))
        return
    from samovar.cluster.doctor.check import diagnosis_view

    _console().print(diagnosis_view(found, url, every=every))


def _console() -> Any:
    from samovar.cluster.serve.stages import console_of

    return console_of() if sys.stdout.isatty() else console_of(width=PIPE_COLUMNS)


def doctor(
    ctx: typer.Context,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
    vllm: Annotated[bool, typer.Option("--vllm", help="what a vLLM here needs to use the tiers")] = False,
    socket: Annotated[Path | None, typer.Option(metavar="PATH", help="with --vllm: of the tiers")] = None,
    kv_transfer_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="with --vllm: what vLLM is given")
    ] = None,
) -> None:
    """Check this machine before anything runs, with the settings that `samovar serve` would use.

    Each check says ok, warning or error, and what to do; each takes a bounded time, all about half a minute.
    Changes nothing. Exits with 0 if there is no error, 1 if there is one, 2 if the settings are refused. Also
    takes --section.key VALUE.
    """
    from dataclasses import asdict

    settings = load_or_exit(config, ctx.args).settings
    from samovar.cluster.cli.running import RunningServers
    from samovar.cluster.doctor.check import Checked, doctor_view, run_checks
    from samovar.cluster.doctor.doctor import checks_for_vllm, checks_of

    if vllm:
        checks = checks_for_vllm(socket, kv_transfer_config)
    elif socket is not None or kv_transfer_config is not None:
        refuse("--socket and --kv-transfer-config are for --vllm only")
    else:
        ours = [server.url for server in RunningServers.of_user(os.environ).living()]
        checks = checks_of(settings, running=ours)
    results: list[Checked] = []
    console = _console()
    with console.status("checking") as shown:
        for check in checks:
            if sys.stdout.isatty():
                shown.update(f"checking: {check.title}")
            results += run_checks([check])
    if as_json:
        print(json.dumps([asdict(one) for one in results], indent=2, ensure_ascii=False))
    else:
        console.print(doctor_view(results))
    raise typer.Exit(EXIT_FAILED if any(one.state == "error" for one in results) else 0)
