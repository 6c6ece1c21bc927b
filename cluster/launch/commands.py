"""Builds the shell commands that `ray up` runs to make a machine a node. Pure text.

In this order: initialization (on the host, before docker), setup (once), start (whenever Ray is started).
They hold no secrets: nodes fetch those themselves (`node_setup.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from samovar.cluster.launch.settings import CONFIG_FILE, NODE_HOME, NVME_SCRIPT, SECRETS_FILE, RenderFailed
from samovar.cluster.serve.environment import StoreTooSmall, plan_store, ray_environment
from samovar.configs.cluster import LaunchSettings
from samovar.configs.optional_sections import MonitoringSettings
from samovar.configs.sections import MIB
from samovar.configs.settings import Settings

OPEN_FILES = 65536
SHM_SPARE_BYTES = 64 * MIB
"""Room for what others put into a container's /dev/shm."""

DOCKER_MOUNTS = "/tmp/ray_tmp_mount"
"""Where Ray stores a container's file mounts on the host."""

KEEP_GCS_LOG = "~/samovar-gcs.log"
"""Not in our directory on the node: Ray would treat nodes as outdated whenever a line is added."""

MONITOR_LOG = "~/samovar-monitor.log"

NODE_EXTRAS = "documents,knowledge,nixl,otel,postgres,s3"
"""What nodes have that one machine may do without: blocks between nodes, traces, knowledge, S3 and SSM."""

BOOTSTRAP_FILE = "~/ray_bootstrap_config.yaml"


def worker_store_bytes(settings: Settings) -> int:
    """Return a replica node's object store size. Raises `RenderFailed` if the cpu tier does not fit."""
    tier_bytes = settings.tiers.cpu.bytes_planned if settings.tiers.enabled else 0
    wanted_bytes = settings.launch.object_store_bytes
    try:
        return plan_store(wanted_bytes, tier_bytes, None).store_bytes
    except StoreTooSmall as error:
        text = str(error).replace("cluster.object_store_bytes", "launch.object_store_bytes")
        raise RenderFailed(text) from error


def head_store_bytes(settings: Settings) -> int:
    """Return the object store size of a node without replicas: messages, no tier."""
    return plan_store(None, 0, None).store_bytes


def node_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of all Ray processes, equal on every node.

    The head's health checks apply to all nodes, and they wait for a head that is away.
    """
    health = settings.launch.health
    return {
        **ray_environment(settings),
        "RAY_health_check_initial_delay_ms": str(health.initial_delay_ms),
        "RAY_health_check_period_ms": str(health.period_ms),
        "RAY_health_check_timeout_ms": str(health.timeout_ms),
        "RAY_health_check_failure_threshold": str(health.failures),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(settings.launch.gcs.away_s_max),
    }


def gcs_environment(launch: LaunchSettings) -> dict[str, str]:
    """Return the head's extra environment: where GCS stores its state. `~` is left to the shell."""
    gcs = launch.gcs
    if gcs.storage == "rocksdb":
        return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(gcs.dir)}
    if gcs.storage == "redis":
        return {"RAY_REDIS_ADDRESS": str(gcs.redis_address)}
    return {}


def monitoring_environment(monitoring: MonitoringSettings) -> dict[str, str]:
    """Return the environment by which Ray's dashboard finds Prometheus and Grafana."""
    grafana = f"http://127.0.0.1:{monitoring.grafana_port}"
    return {
        "RAY_PROMETHEUS_HOST": f"http://127.0.0.1:{monitoring.prometheus_port}",
        "RAY_GRAFANA_HOST": grafana,
        "RAY_GRAFANA_IFRAME_HOST": grafana,
    }


def head_start(settings: Settings, node_setup: str, *, num_cpus: int | None, store_bytes: int) -> list[str]:
    """Return the commands that start Ray on the head. `num_cpus`: None: as Ray detects them."""
    launch = settings.launch
    flags = [
        "--head",
        f"--port={launch.gcs_port}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={launch.dashboard_port}",
        f"--autoscaling-config={BOOTSTRAP_FILE}",
        *([] if num_cpus is None else [f"--num-cpus={num_cpus}"]),
        *_common_flags(launch, store_bytes),
    ]
    found_at = monitoring_environment(launch.monitoring) if launch.monitoring.enabled else {}
    start = _ray_start(node_environment(settings) | gcs_environment(launch) | found_at, flags)
    monitor = _monitor() if launch.monitoring.enabled else []
    if launch.gcs.storage == "memory":
        return [node_setup, "ray stop", start, *monitor]
    make_dir = command(["mkdir", "-p", "-m", "0700", str(launch.gcs.dir)])
    gcs_dir = [make_dir] if launch.gcs.storage == "rocksdb" else []
    # Restarts the head's GCS if it dies.
    keep = f"setsid nohup samovar keep-gcs --port {launch.gcs_port} >> {KEEP_GCS_LOG} 2>&1 < /dev/null &"
    return [node_setup, "ray stop", *gcs_dir, start, keep, *monitor]


def _monitor() -> list[str]:
    """Return the command that runs Prometheus and Grafana beside Ray; the cluster serves without them."""
    words = ["samovar", "monitor", "--config", f"{NODE_HOME}/{CONFIG_FILE}"]
    words += ["--secrets", f"{NODE_HOME}/{SECRETS_FILE}"]
    return [f"setsid nohup {command(words)} >> {MONITOR_LOG} 2>&1 < /dev/null &"]


def worker_start(settings: Settings, node_setup: str, *, store_bytes: int) -> list[str]:
    """Return the commands that start Ray on a worker. `RAY_HEAD_IP` is set by `ray up`."""
    launch = settings.launch
    flags = [f"--address=$RAY_HEAD_IP:{launch.gcs_port}", *_common_flags(launch, store_bytes)]
    return [node_setup, "ray stop", _ray_start(node_environment(settings), flags)]


def setup_commands(launch: LaunchSettings) -> list[str]:
    """Return the setup commands, run in the container if there is one.

    Login shells must find `ray`, `ray down`'s too. Raises `RenderFailed`.
    """
    if launch.wheel is not None and (launch.venv is None or launch.image is not None):
        raise RenderFailed(
            f"launch.wheel={launch.wheel} is installed into launch.venv, and not into an image: set "
            "launch.venv and leave launch.image empty, or leave launch.wheel empty"
        )
    if launch.venv is None:
        return list(launch.setup_commands)
    line = f'export PATH="{_home_spelled(launch.venv)}/bin:$PATH"'
    commands = [_once(line, "~/.bashrc"), *launch.setup_commands]
    return commands if launch.wheel is None else [*commands, _install(launch.venv, launch.wheel.name)]


def nvme_command(launch: LaunchSettings, cluster_name: str, *, disks: bool) -> str:
    """Return the host command that makes `launch.kv_dir`, on the machine's own disks if it has any."""
    home = NODE_HOME if launch.image is None else f"{DOCKER_MOUNTS}/{cluster_name}/{NODE_HOME}"
    flag = "" if disks else "--no-disks "
    return f"bash {_quoted(f'{home}/{NVME_SCRIPT}')} {flag}{_quoted(str(launch.kv_dir))}"


def docker_options(launch: LaunchSettings, store_bytes: int) -> list[str]:
    """Return the options of `docker run` on every node."""
    kv_dir = shlex.quote(str(launch.kv_dir))
    return [
        "--ulimit memlock=-1",
        f"--ulimit nofile={OPEN_FILES}:{OPEN_FILES}",
        f"--shm-size={store_bytes + SHM_SPARE_BYTES}b",
        f"-v {kv_dir}:{kv_dir}",
    ]


EFA_DOCKER_OPTIONS = ("--device=/dev/infiniband", "--cap-add=IPC_LOCK")


def command(words: Sequence[str]) -> str:
    """Return one quoted command line; `~` at the start of a word is left to the shell."""
    return " ".join(_quoted(word) for word in words)


def _common_flags(launch: LaunchSettings, store_bytes: int) -> list[str]:
    return [
        f"--node-manager-port={launch.node_manager_port}",
        f"--object-manager-port={launch.object_manager_port}",
        f"--metrics-export-port={launch.metrics_port}",
        f"--object-store-memory={store_bytes}",
        "--disable-usage-stats",
    ]


def _ray_start(environment: Mapping[str, str], flags: Sequence[str]) -> str:
    return f"ulimit -n {OPEN_FILES}; {_exports(environment)} ray start {' '.join(flags)}"


def _exports(environment: Mapping[str, str]) -> str:
    pairs = [f"{name}={_quoted(value)}" for name, value in sorted(environment.items())]
    return f"export {' '.join(pairs)};"


def _quoted(word: str) -> str:
    """Quote a word; `~/x y` becomes `~/'x y'`, so that the shell still expands the home directory."""
    home, slash, rest = word.partition("/")
    if home == "~" and slash:
        return f"~/{shlex.quote(rest)}" if rest else "~/"
    return shlex.quote(word)


def _home_spelled(path: str) -> str:
    """Spell `~` as `$HOME`, because `~` is not expanded within double quotes. Raises `RenderFailed`."""
    if any(letter in path for letter in '"$`\\\n'):
        raise RenderFailed(f"launch.venv={path!r} holds a character that a shell would act on. Rename it")
    return f"$HOME/{path[2:]}" if path.startswith("~/") else path


def _install(venv: str, wheel: str) -> str:
    """Return the command that installs the wheel, over any other build of it, and what a node requires."""
    wanted = command([f"{NODE_HOME}/{wheel}[{NODE_EXTRAS}]"])
    pip, file = command([f"{venv}/bin/pip", "install", "--quiet"]), command([f"{NODE_HOME}/{wheel}"])
    make = f"test -x {command([f'{venv}/bin/pip'])} || {command(['python3', '-m', 'venv', venv])}"
    return f"{{ {make}; }} && {pip} {wanted} && {pip} --force-reinstall --no-deps {file}"


def _once(line: str, file: str) -> str:
    return f"grep -qsxF {shlex.quote(line)} {file} || echo {shlex.quote(line)} >> {file}"
