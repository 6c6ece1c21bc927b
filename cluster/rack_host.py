"""What is left on a machine of a rack after `ray down`, and its removal. Ray stops the head only.

By SSH, as `ray up` reaches it. Knows nothing of what ran there but its names.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from cluster.node_commands import command
from cluster.node_settings import NODE_HOME, SECRETS_FILE, TOKEN_FILE
from cluster.node_setup import RAY_TOKEN_FILE
from configs.launch_settings import LaunchSettings

CONNECT_S = 10
CLEAN_S_MAX = 90.0
UNREACHABLE = 255
"""ssh's own exit code; all others are the remote command's."""


def ssh_words(launch: LaunchSettings, host: str, remote: str) -> list[str]:
    """A command line that runs `remote` on `host` and asks nothing."""
    options = {
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_S),
    }
    if launch.ssh.proxy_command is not None:
        options["ProxyCommand"] = launch.ssh.proxy_command
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    key = [] if launch.ssh.private_key is None else ["-i", str(launch.ssh.private_key)]
    return ["ssh", *key, *flags, f"{launch.ssh.user}@{host}", remote]


def cleaning(launch: LaunchSettings) -> str:
    """Stops what still runs, removes secrets and what Ray's head remembered, and names what is left."""
    files = [f"{NODE_HOME}/{SECRETS_FILE}", f"{NODE_HOME}/{TOKEN_FILE}", str(RAY_TOKEN_FILE)]
    forget = [f"rm -f {command(files)}"]
    if launch.gcs.storage == "rocksdb":
        forget.append(f"rm -rf {command([str(launch.gcs.dir)])}")
    stop = "bash --login -ic 'ray stop --force' >/dev/null 2>&1 </dev/null || true"
    stops = [] if launch.image else [stop]
    return "; ".join([*stops, *forget, "pgrep -l 'raylet|gcs_server' || true"])


def clean(launch: LaunchSettings, host: str, env: Mapping[str, str]) -> str:
    """Empty when nothing is left, else what, in words."""
    words = ssh_words(launch, host, cleaning(launch))
    try:
        done = subprocess.run(
            words,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CLEAN_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{host}: no answer within {CLEAN_S_MAX:.0f} s"
    if done.returncode == UNREACHABLE:
        return f"{host}: cannot be reached ({done.stderr.strip()})"
    if done.returncode != 0:
        return f"{host}: {done.stderr.strip() or f'ssh ended with {done.returncode}'}"
    left = ", ".join(done.stdout.split("\n")).strip(", ")
    return f"{host}: still runs {left}" if left else ""
