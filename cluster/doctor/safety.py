"""Checks the ways between processes: NIXL to other nodes, Ray's token, open ports, who may read secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from samovar import HOME
from samovar.cluster.doctor.check import Result
from samovar.cluster.errors import StartFailed
from samovar.cluster.serve.preflight import enter_tls
from samovar.cluster.serve.secrets import FILE_NAME, SecretRefused, kept_secret
from samovar.configs.extras import missing
from samovar.configs.settings import Settings
from samovar.configs.tls import NodeTls

CHILD_S_MAX = 20.0
OTHERS = 0o077
RAY_SERVERS = ("gcs_server", "raylet")
OPEN_ADDRESSES = ("0.0.0.0", "::")

# In a process of its own: UCX may end it, and its libraries stay loaded.
NIXL_CODE = """
import json, os, time
from samovar.cache_tiers.transport import LinkError, NixlLink
try:
    NixlLink("doctor:0", arena_bytes=1 << 20, lease_s=1.0, clock=time.monotonic)
    found = {"ok": True}
except LinkError as error:
    found = {"ok": False, "why": str(error)}
print(json.dumps(found), flush=True)
os._exit(0)
"""


def nixl(settings: Settings, run: Callable[[], Mapping[str, object]] | None = None) -> Result:
    """Start NIXL with its UCX plugin, as a node's tier actor does, where other nodes may be asked."""
    peer = settings.tiers.peer
    if not settings.tiers.enabled or not peer.enabled or peer.transport != "nixl":
        return "ok", "not used (tiers.peer)", ""
    if settings.cluster.ray_address == "local":
        return "ok", "not needed on one machine (cluster.ray_address is local)", ""
    if settings.cluster.tls is not None:
        return _tls_between_nodes(settings.cluster.tls)
    found = (run or _run_nixl)()
    if found.get("ok"):
        devices = Path("/dev/infiniband")
        return "ok", "UCX starts" + (", with InfiniBand" if devices.exists() else ", over TCP"), ""
    why = str(found.get("why", "no answer"))
    fix = f"{missing('nixl', 'peer transport')}; without it blocks of other nodes come by Ray, slower"
    return "warning", why, fix


def _tls_between_nodes(tls: NodeTls) -> Result:
    """Listen for a moment as a node does whose blocks other nodes pull."""
    from samovar.cache_tiers.transport import LinkDown, TlsLink

    try:
        TlsLink("doctor:0", tls, "127.0.0.1", bytes_max=1, lease_s=1.0).close()
    except LinkDown as error:
        fix = "see docs/configuration.md, TLS between nodes; so blocks of other nodes come by Ray, slower"
        return "warning", str(error), fix
    return "ok", "not used: blocks between nodes go over TLS (cluster.tls_dir)", ""


def _run_nixl() -> Mapping[str, object]:
    from samovar.configs.json_text import parse_json

    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", NIXL_CODE],
        check=False,
        capture_output=True,
        text=True,
        env=env,
        timeout=CHILD_S_MAX,
    )
    lines = done.stdout.strip().splitlines()
    try:
        found: Mapping[str, object] = parse_json(lines[-1])
    except (IndexError, ValueError):
        told = done.stderr.strip().splitlines()
        return {"ok": False, "why": f"NIXL ended its process ({done.returncode}): {told[-1] if told else ''}"}
    return found


def ray_cluster(
    settings: Settings,
    environ: Mapping[str, str],
    asks: Callable[[str], bool] | None = None,
) -> Result:
    """See who may read Ray's token, and whether a cluster that is joined requires one."""
    from samovar.cluster.serve.ray_cluster import (
        PATH_VARIABLE,
        TOKEN_VARIABLE,
        address_of,
        gcs_asks_for_token,
        token_file,
    )

    try:
        enter_tls(settings.cluster)  # a cluster that speaks TLS answers nothing else
    except StartFailed as error:
        text, _, fix = str(error).partition(". ")
        return "error", text, fix
    is_private = settings.cluster.ray_address == "local"
    path = token_file(environ)
    if path is None:
        said = f"the token is in {TOKEN_VARIABLE}"
    elif not path.exists():
        if not is_private:
            return (
                "error",
                f"there is no Ray token in {path}",
                f"put the cluster's there (chmod 600), or set {PATH_VARIABLE}",
            )
        said = f"no token yet: the first start makes {path}"
    else:
        found = path.stat()
        if found.st_uid != os.geteuid():
            return (
                "warning",
                f"{path} belongs to user {found.st_uid}",
                "copy it to a file of your own with mode 0600",
            )
        if found.st_mode & OTHERS:
            mode = found.st_mode & 0o777
            return (
                "warning",
                f"{path} can be read by other users (mode {mode:04o})",
                f"chmod 600 {path}, and renew it",
            )
        said = f"the token in {path} is private"
    if is_private:
        return "ok", f"{said}; a cluster of its own", ""
    try:
        address = address_of(settings.cluster)
        assert address is not None, "a cluster that is not local has an address"
        if not (asks or gcs_asks_for_token)(address):
            fix = "start every node with RAY_AUTH_MODE=token: who reaches Ray without it can run code"
            return "error", f"Ray at {address} requires no token", fix
    except StartFailed as error:
        text, _, fix = str(error).partition(". ")
        return "error", text, fix
    return "ok", f"{said}; Ray at {address} requires it", ""


def open_binds(
    settings: Settings,
    listening: Callable[[], Iterable[tuple[str, str, int, bool]]] | None = None,
) -> Result:
    """Look for Ray's servers that listen on every interface without asking for a token.

    `listening`: yields (program, address, port, whether it requires a token).
    """
    found = list((listening or _ray_listening)())
    bad = [f"{name} on {address}:{number}" for name, address, number, has_token in found if not has_token]
    if bad:
        return (
            "error",
            f"open to the network without a token: {', '.join(dict.fromkeys(bad))}",
            "stop that Ray (`ray stop`), and start it with RAY_AUTH_MODE=token, or bound to 127.0.0.1",
        )
    said = (
        f"{len(found)} ports of Ray are open, all ask for a token"
        if found
        else "no Ray is open to the network"
    )
    if not settings.server.is_loopback and settings.server.tls is None:
        return (
            "warning",
            f"{said}; the API will listen on {settings.server.host} without TLS",
            "put a proxy with TLS in front, or listen on 127.0.0.1 (server.host)",
        )
    with_tls = "" if settings.server.tls is None else " with TLS"
    return "ok", f"{said}; the API listens on {settings.server.host}{with_tls}", ""


def _ray_listening() -> Iterable[tuple[str, str, int, bool]]:
    for process in psutil.process_iter(["name"]):
        if process.info["name"] not in RAY_SERVERS:
            continue
        try:
            has_token = process.environ().get("RAY_AUTH_MODE") == "token"
            places = process.net_connections(kind="tcp")
        except psutil.Error:  # it has ended, or is another user's
            continue
        for place in places:
            if place.status == psutil.CONN_LISTEN and place.laddr.ip in OPEN_ADDRESSES:
                yield process.info["name"], place.laddr.ip, place.laddr.port, has_token


def secrets_files(settings: Settings, others: Iterable[Path] = ()) -> Result:
    """See who may read the server's secret and the file of API keys. `others`: more files, for tests."""
    said = []
    path = settings.model.cache_dir.expanduser() / FILE_NAME
    if settings.auth.server_secret is not None:
        said.append("the server's secret is configured")
    elif path.exists():
        try:
            kept_secret(settings.model.cache_dir)
        except SecretRefused as error:
            text, _, fix = str(error).partition(". ")
            return "error", text, fix
        said.append(f"{path} is private")
    else:
        said.append(f"the first start makes {path}")
    for file in (Path("~/samovar/secrets.yaml").expanduser(), *others):
        if file.exists():
            if file.stat().st_mode & OTHERS:
                mode = file.stat().st_mode & 0o777
                return (
                    "error",
                    f"{file} can be read by other users (mode {mode:04o})",
                    f"chmod 600 {file}, and renew its keys",
                )
            said.append(f"{file} is private")
    return "ok", "; ".join(said), ""
