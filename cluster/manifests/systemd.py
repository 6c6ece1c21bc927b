"""Renders systemd units for `samovar serve` and `samovar tiers`: pure, of settings and their sources."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samovar.cluster.launch.settings import RenderFailed
from samovar.configs.fields import SettingField, setting_fields
from samovar.configs.loader import LoadedSettings, load
from samovar.configs.settings import Settings

USER = "samovar"
STATE = "samovar"
HOME = f"/var/lib/{STATE}"
SECRETS_FILE = "/etc/samovar/environment"
STOP_SPARE_S = 30
"""For what follows the drain and the flush: replicas and Ray end."""

PRIVILEGED_PORTS = 1024
HOMES = ("/home", "/root", "/run/user")
WRITTEN = (
    *("server.record", "model.cache_dir", "tiers.nvme.dir", "tiers.predictor.file", "tiers.socket"),
    *("auth.audit_file", "auth.keys_file", "knowledge.dir", "compaction.dir"),
)
"""Settings whose files the service writes."""

UNIT = """\
# Written by `samovar render --systemd`. It holds no secrets: those are variables in {secrets}
# (chmod 600), such as
#   SAMOVAR_AUTH__API_KEYS='{{"my-team": "..."}}'
# To install it:
#   useradd --system --home-dir {home} --shell /usr/sbin/nologin {user}
#   samovar render --systemd > /etc/systemd/system/samovar.service
#   systemctl daemon-reload && systemctl enable --now samovar
[Unit]
Description=Samovar: LLM chat that keeps conversations' KV caches
Wants=network-online.target
After=network-online.target
# A start that fails again and again: give up after the fifth time in half an hour.
StartLimitIntervalSec=1800
StartLimitBurst=5

[Service]
Type=exec
User={user}
Group={user}
ExecStart={start}
# SIGHUP: other settings or another model, under traffic.
ExecReload=/bin/kill -HUP $MAINPID
EnvironmentFile=-{secrets}
Environment=HOME={home}
WorkingDirectory={home}
StateDirectory={state}
StateDirectoryMode=0700
UMask=0077

# SIGTERM goes to `samovar serve` only: running answers finish, main memory is written to disk, and it ends
# Ray itself. What is left in the end is killed.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={stop_s}
# Stopped before it was ready.
SuccessExitStatus=130
Restart=on-failure
RestartSec=10
# Refused settings stay refused.
RestartPreventExitStatus=2
# Ray restarts a replica that ran out of memory; the others go on.
OOMPolicy=continue

{hardening}
# Not MemoryDenyWriteExecute: torch and oneDNN compile at run time.

[Install]
WantedBy=multi-user.target
"""

TIERS_UNIT = """\
# Written by `samovar render --systemd --tiers`. Engines that use these tiers run as user {user}, or as root.
# Secrets, such as S3's, are variables in {secrets} (chmod 600).
# To install it:
#   samovar render --systemd --tiers {socket} > /etc/systemd/system/samovar-tiers.service
#   systemctl daemon-reload && systemctl enable --now samovar-tiers
[Unit]
Description=Samovar: KV cache tiers for the engines on this machine
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=1800
StartLimitBurst=5

[Service]
Type=exec
User={user}
Group={user}
ExecStart={start}
EnvironmentFile=-{secrets}
Environment=HOME={home}
WorkingDirectory={home}
StateDirectory={state}
StateDirectoryMode=0700
RuntimeDirectory={state}
RuntimeDirectoryMode=0700
UMask=0077

# At SIGTERM main memory is written to disk.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={stop_s}
Restart=on-failure
RestartSec=10
# Refused settings stay refused.
RestartPreventExitStatus=2
# Engines compute what they had there.
OOMPolicy=stop

{hardening}

[Install]
WantedBy=multi-user.target
"""

HARDENING = """\
LimitNOFILE={files}
# Memory holds prompts.
LimitCORE=0
TasksMax=32768

NoNewPrivileges=yes
CapabilityBoundingSet={capabilities}
AmbientCapabilities={capabilities}
ProtectSystem=strict
ProtectHome={protect_home}
{writable}PrivateTmp=yes
{devices}
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
KeyringMode=private
LockPersonality=yes
RemoveIPC=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
"""
FILES_MAX, TIERS_FILES_MAX = 65536, 524288
"""Of `samovar tiers` each record in main memory is a file."""

NO_DEVICES = """\
PrivateDevices=yes
ProtectClock=yes"""

GPU_DEVICES = """\
# Not PrivateDevices and ProtectClock: they hide GPUs. With engine.device=cpu both are on."""


def render_unit(loaded: LoadedSettings, program: Path, config: str | None) -> str:
    """Return the unit that serves with these settings. Raises `RenderFailed`.

    `program`: the `samovar` to start; `config`: the preset's name or the file that `loaded` comes from.
    Variables of this shell are not in the unit: what they set is refused, except secrets.
    """
    settings = loaded.settings
    start, hardening = _service(
        loaded,
        [str(program), "serve"],
        config,
        files=FILES_MAX,
        capabilities="CAP_NET_BIND_SERVICE" if settings.server.port < PRIVILEGED_PORTS else "",
        devices=NO_DEVICES
        if all(one.engine.device == "cpu" for one in settings.of_models().values())
        else GPU_DEVICES,
    )
    return UNIT.format(
        user=USER,
        home=HOME,
        state=STATE,
        secrets=SECRETS_FILE,
        start=start,
        stop_s=stop_seconds(settings),
        hardening=hardening,
    )


def render_tiers_unit(loaded: LoadedSettings, program: Path, config: str | None, socket: Path) -> str:
    """Return the unit of `samovar tiers` at `socket`. See `render_unit`. Raises `RenderFailed`."""
    if not socket.is_absolute():
        raise RenderFailed(f"--tiers {socket} depends on where it is started. Give the whole path")
    start, hardening = _service(
        loaded,
        [str(program), "tiers", "--socket", str(socket)],
        config,
        files=TIERS_FILES_MAX,
        capabilities="",
        devices=NO_DEVICES,
        also_written=[] if socket.parent == Path("/run", STATE) else [str(socket.parent)],
    )
    return TIERS_UNIT.format(
        user=USER,
        home=HOME,
        state=STATE,
        secrets=SECRETS_FILE,
        socket=_quoted(str(socket)),
        start=start,
        stop_s=int(loaded.settings.tiers.flush_s) + STOP_SPARE_S,
        hardening=hardening,
    )


def _service(
    loaded: LoadedSettings,
    words: list[str],
    config: str | None,
    *,
    files: int,
    capabilities: str,
    devices: str,
    also_written: Sequence[str] = (),
) -> tuple[str, str]:
    """Return the line that starts it, `words` and the settings, and what it may do. Raises `RenderFailed`."""
    settings, fields = loaded.settings, setting_fields()
    _check(loaded, fields)
    if config is not None:
        words += ["--config", str(Path(config).absolute()) if Path(config).is_file() else config]
    words += [
        f"{field.flag}={_text(_value(settings, key))}"
        for key, field in fields.items()
        if loaded.source[key] == "flag"
    ]
    paths = [word for word in words if word.startswith("/")]
    paths += [str(path) for _, path in _given_paths(loaded, fields)]
    needs_home = any(path.startswith(f"{home}/") for path in paths for home in HOMES)
    written = dict.fromkeys([*_written(loaded, fields), *also_written])
    hardening = HARDENING.format(
        files=files,
        capabilities=capabilities,
        protect_home="read-only" if needs_home else "yes",
        writable="".join(f"ReadWritePaths={_quoted(path)}\n" for path in written),
        devices=devices,
    ).rstrip()
    return " ".join(_quoted(word).replace("$", "$$") for word in words), hardening


def stop_seconds(settings: Settings) -> int:
    """Return how long an orderly stop may take; systemd kills afterwards."""
    tiers = settings.tiers
    written_s = tiers.flush_s + tiers.settle_s if tiers.enabled else 0.0
    return int(settings.server.graceful_shutdown_s + written_s) + STOP_SPARE_S


def _check(loaded: LoadedSettings, fields: dict[str, SettingField]) -> None:
    for key, field in fields.items():
        if loaded.source[key] == "env" and not field.secret:
            raise RenderFailed(
                f"{field.env} is set in this shell, which the unit does not see. Give {field.flag} instead, "
                f"or put the variable into {SECRETS_FILE} and unset it here"
            )
        if loaded.source[key] == "flag" and field.secret:
            raise RenderFailed(
                f"{key} is a secret, and a unit is readable by all. Put {field.env} into {SECRETS_FILE}"
            )
    for key, path in _given_paths(loaded, fields):
        if not path.is_absolute() and (str(path).startswith("~") or path.exists()):
            raise RenderFailed(
                f"{key}={path} depends on who starts it and where, and systemd starts it elsewhere. Give the "
                "whole path"
            )


def _given_paths(loaded: LoadedSettings, fields: dict[str, SettingField]) -> Iterator[tuple[str, Path]]:
    """Yield the paths in the settings that were given, with their keys; `launch` is not served.

    Also those in a mapping, such as `engine.vllm.adapters`, and what further models have of their own.
    """
    models = loaded.settings.of_models()
    first = models.pop("")
    for key in fields:
        is_given = loaded.source[key] != "default" and not key.startswith("launch.")
        if is_given and (key != "auth.keys_file" or not first.auth.has_key_table):
            yield from _paths_in(_value(first, key), key)
    for name, one in models.items():
        for key in fields:
            if (value := _value(one, key)) != _value(first, key):
                yield from _paths_in(value, f"models.{name}.{key}")


def _paths_in(value: Any, key: str) -> Iterator[tuple[str, Path]]:
    if isinstance(value, Path):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _paths_in(inner, f"{key}.{name}")


def _written(loaded: LoadedSettings, fields: dict[str, SettingField]) -> list[str]:
    """Return the given directories to write in, outside of the state directory."""
    found = []
    for key, path in _given_paths(loaded, fields):
        if key in WRITTEN and not path.is_relative_to(HOME):
            found.append(str(path if key.endswith("dir") else path.parent))
    return list(dict.fromkeys(found))


def _value(settings: Settings, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _text(value: Any) -> str:
    """Spell a value as `--section.key=VALUE` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value, default=str)
    return "" if value is None else str(value)


def _quoted(word: str) -> str:
    """Quote one word of a unit: systemd expands `%` and splits at blanks. Raises `RenderFailed`."""
    if not word.isprintable():
        raise RenderFailed(f"{word!r} holds a character that a unit cannot hold")
    word = word.replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{word}"' if not word or set(word) & set(" '\";") or "\\" in word else word


def systemd_unit(
    config: str | None, env: Mapping[str, str], flags: Sequence[str], tiers: Path | None = None
) -> str:
    """Return the unit for this installation's `samovar`; `tiers`: of `samovar tiers`, at that socket.

    Raises `ConfigError`, `RenderFailed`.
    """
    program, loaded = Path(sys.executable).with_name("samovar"), load(config, env, flags)
    if tiers is not None:
        return render_tiers_unit(loaded, program, config, tiers)
    return render_unit(loaded, program, config)
