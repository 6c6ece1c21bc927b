"""What keeps a vLLM from using the tiers: one check each, with the fix.

To be run in the environment that vLLM lives in, as the user that vLLM runs as. Changes nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from samovar.cache_tiers.blocks import CPU, TierError
from samovar.cache_tiers.media import MemoryFile
from samovar.cache_tiers.messages import NodeStats
from samovar.cache_tiers.socket.client import SocketLink, greeted
from samovar.cache_tiers.socket.messages import Welcome
from samovar.cache_tiers.socket.wire import SocketError
from samovar.cache_tiers.vllm.messages import ConnectorOptions
from samovar.cache_tiers.vllm.refusals import SERVED, TESTED, check_version
from samovar.configs.json_text import parse_json

SOCKET = Path("~/.samovar/tiers.sock")
CONNECTOR, MODULE = "SamovarConnector", "samovar.cache_tiers.vllm.connector"
IMPORT_S_MAX = 120.0
ASK_S = 5.0
FILES_MIN = 4096
"""Open files that a process of the tiers should be allowed: each record in main memory is one."""
FREE_SHARE = 0.05
AGAIN = "see what they have said; start them again"

Result = tuple[Literal["ok", "warning", "error"], str, str]
"""(state, what was found, what to do about it)"""

IMPORT = f"""
from {MODULE} import {CONNECTOR} as found
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as base
missing = sorted(getattr(found, "__abstractmethods__", ()))
assert issubclass(found, base) and not missing, f"it lacks {{', '.join(missing)}}"
print(found.__module__)
"""


@dataclass(frozen=True, slots=True)
class VllmCheck:
    """`run` may block for `s_max` seconds."""

    name: str
    title: str
    run: Callable[[], Result]
    s_max: float = 10.0


def vllm_checks(path: Path | None = None, config: str | None = None) -> list[VllmCheck]:
    """Return the checks. `path`: of the socket; None = as `config` says, or the page's. `config`: what vLLM
    is given as `--kv-transfer-config`.
    """
    where = (path or _socket_of(config) or SOCKET).expanduser()
    is_there = functools.cache(functools.partial(_welcome, where))
    return [
        VllmCheck("vllm", "vLLM", vllm),
        VllmCheck("connector", "connector", connector, IMPORT_S_MAX + 5),
        VllmCheck("config", "--kv-transfer-config", functools.partial(transfer_config, config, where)),
        VllmCheck("socket", "socket", functools.partial(tiers_socket, where, is_there)),
        VllmCheck("tiers", "tiers", functools.partial(tiers, where, is_there)),
        VllmCheck("memory_files", "memory files", memory_files),
    ]


def vllm(distributions: Callable[[], Mapping[str, list[str]]] = metadata.packages_distributions) -> Result:
    """Look for vLLM in this environment, and whether its minor is one of those that were tested."""
    if importlib.util.find_spec("vllm") is None and distributions is metadata.packages_distributions:
        return _no_vllm()
    names = distributions().get("vllm", [])
    versions = {metadata.version(name): name for name in names}
    if not versions:
        return _no_vllm()
    version, name = next(iter(versions.items()))
    served = [minor for minor, how in TESTED.items() if how == SERVED]
    install = f"pip install 'vllm=={served[-1]}.*'"
    try:
        check_version(version)
    except ValueError as error:
        return "error", f"{name} {version}", f"{error}: {install}"
    if ".".join(version.split(".")[:2]) not in served:
        return "warning", f"{name} {version}: its contract was read, it was not served with", install
    return "ok", f"{name} {version}; tested: {', '.join(TESTED)}", ""


def _no_vllm() -> Result:
    return (
        "error",
        f"there is no vLLM in {sys.prefix}",
        "run `samovar-tiers doctor` in the environment that vLLM lives in",
    )


def connector(run: Callable[[], subprocess.CompletedProcess[str]] | None = None) -> Result:
    """Import the connector as vLLM does, in a process of its own."""
    if run is None and importlib.util.find_spec("vllm") is None:
        return "warning", "not tried without vLLM", ""
    try:
        done = (run or _imported)()
    except subprocess.TimeoutExpired:
        return (
            "warning",
            f"its import did not end within {IMPORT_S_MAX:g} s",
            "try again when the machine is idle",
        )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return (
            "error",
            f"vLLM cannot import {MODULE}: {said}",
            "install the wheel of this checkout again: make wheel-vllm, and pip install it here",
        )
    return "ok", f"vLLM can import {CONNECTOR} from {MODULE}", ""


def _imported() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IMPORT], check=False, capture_output=True, text=True, timeout=IMPORT_S_MAX
    )


def transfer_config(config: str | None, where: Path) -> Result:
    """Read what vLLM is given as the connector does at its start."""
    if config is None:
        return "ok", "not given; a good one:", good_config(where)
    try:
        found = parse_json(config)
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        return (
            "error",
            f"it cannot be read: {error}",
            f"quote it for the shell: --kv-transfer-config '{good_config(where)}'",
        )
    wanted = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    wrong = [f'"{key}": "{value}"' for key, value in wanted.items() if found.get(key) != value]
    if wrong:
        said = ", ".join(
            f"{key} is {found.get(key)!r}" for key, value in wanted.items() if found.get(key) != value
        )
        return "error", said, f"say {', '.join(wrong)}"
    try:
        options = ConnectorOptions.of(found.get("kv_connector_extra_config") or {})
    except (ValueError, AttributeError) as error:
        return "error", str(error), f"see the options in docs/vllm.md; a good one: {good_config(where)}"
    if options.socket != where:
        return (
            "warning",
            f"it names {options.socket}; {where} is looked at here",
            "name one and the same socket",
        )
    return "ok", f"socket {options.socket}, tenant {options.tenant}", ""


def good_config(where: Path) -> str:
    """Return what to give to vLLM."""
    return (
        f'{{"kv_connector": "{CONNECTOR}", "kv_connector_module_path": "{MODULE}", "kv_role": "kv_both", '
        f'"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {{"socket": "{where}"}}}}'
    )


def _socket_of(config: str | None) -> Path | None:
    try:
        found: Any = parse_json(config or "{}")
        return Path(found["kv_connector_extra_config"]["socket"])
    except (ValueError, KeyError, TypeError):
        return None


def _welcome(where: Path) -> Welcome:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return greeted(sock, where, "samovar-tiers doctor", frozenset({0, os.getuid()}), ASK_S)


def tiers_socket(where: Path, greet: Callable[[], Welcome]) -> Result:
    """See whether tiers of this user answer there, and speak as this connector does."""
    start = f"start them, as user {os.getuid()}: samovar-tiers --socket {where}"
    try:
        found = where.stat()
    except FileNotFoundError:
        return "error", f"there is nothing at {where}", start
    except PermissionError:
        return "error", f"user {os.getuid()} cannot look into {where.parent}", _same_user(where)
    if not stat.S_ISSOCK(found.st_mode):
        return "error", f"{where} is no socket", f"move it away, and {start}"
    try:
        welcome = greet()
    except ConnectionRefusedError:
        return "error", f"no process listens at {where}: its tiers were killed", start
    except PermissionError:
        return (
            "error",
            f"user {os.getuid()} may not use {where}, which is user {found.st_uid}'s",
            _same_user(where),
        )
    except (OSError, SocketError) as error:
        if isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError):
            return "error", f"the tiers at {where} do not answer within {ASK_S:g} s", AGAIN
        if found.st_uid not in (0, os.getuid()):
            return "error", str(error), _same_user(where)
        is_other = "protocol" in str(error) or "version" in str(error)
        fix = "install the same wheel for the tiers and for vLLM" if is_other else AGAIN
        return "error", f"{where}: {error}", fix
    return (
        "ok",
        f"{where} answers: protocol {welcome.protocol}, records {', '.join(map(str, welcome.records))}",
        "",
    )


def _same_user(where: Path) -> str:
    return f"run vLLM and `samovar-tiers --socket {where}` as the same user"


def tiers(where: Path, greet: Callable[[], Welcome]) -> Result:
    """See which media the tiers have, whether they are up, and what room is left."""
    try:
        greet()
    except (OSError, SocketError):
        return "warning", "not asked: no answer at the socket", ""
    link = SocketLink(where, "samovar-tiers doctor", call_s=ASK_S)
    try:
        stats = link.stats()
    finally:
        link.close()
    return ("error", "they did not say", AGAIN) if stats is None else tiers_room(stats)


def tiers_room(stats: NodeStats) -> Result:
    """Judge a node's counters: a tier that is down, a disk that is full, nothing that survives."""
    used = [tier for tier in stats.tiers if not tier.is_off or tier.bytes_max]
    said = "; ".join(
        f"{tier.name} {tier.state}, {in_gib(tier.bytes_held)} of {in_gib(tier.bytes_max)}" for tier in used
    )
    if not used:
        return "error", "no tier is on", "give one room: --tiers.cpu.bytes_max, --tiers.nvme.bytes_max"
    for tier in used:
        if tier.state != "up":
            return (
                "error" if all(one.is_off for one in used) else "warning",
                said,
                f"{tier.name} is {tier.state}: the tiers' output says why; blocks wait elsewhere",
            )
        room_bytes = tier.bytes_max - tier.bytes_held
        if tier.medium_free_bytes is not None and tier.medium_free_bytes < FREE_SHARE * room_bytes:
            free = in_gib(tier.medium_free_bytes)
            return (
                "warning",
                f"{said}; its disk has {free} left",
                "free some room, or lower --tiers.nvme.bytes_max",
            )
    if all(tier.name == CPU.name for tier in used):
        return "warning", said, "nothing survives the tiers' end: give --tiers.nvme.bytes_max some room"
    return "ok", said, ""


def memory_files(limit: Callable[[], tuple[int, int]] | None = None) -> Result:
    """Make a sealed memory file, which is how blocks travel; see how many files may be open."""
    try:
        MemoryFile(4096).seal()
    except (TierError, OSError, AttributeError) as error:
        return (
            "error",
            f"no memory file can be made: {error}",
            "use a kernel and a sandbox that have memfd_create with seals",
        )
    _, hard = (limit or functools.partial(resource.getrlimit, resource.RLIMIT_NOFILE))()
    if hard != resource.RLIM_INFINITY and hard < FILES_MIN:
        return (
            "warning",
            f"{hard} files may be open",
            f"allow more (ulimit -Hn {FILES_MIN}): each record in RAM is one",
        )
    return (
        "ok",
        f"memory files can be sealed; {'any number of' if hard == -1 else hard} files may be open",
        "",
    )


def in_gib(nbytes: int) -> str:
    """Return bytes as people read them."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 / 10 else f"{nbytes / 2**20:.1f} MiB"
