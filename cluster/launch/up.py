"""Runs `samovar up` and `samovar down` on the user's machine: Ray's launcher around `samovar deploy`.

Puts the secrets where the nodes find them (SSM, or a directory copied by SSH), writes the cluster file
(rendered by `render.py`), and lets Ray do the rest.

It works from `~/.samovar/<cluster>/`, which holds `cluster.yaml` for Ray, and `node/`, which every node gets
as `~/samovar`: settings, the NVMe script and, for a rack, the secrets, which are drawn once and then kept.
All of it is for the owner only.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from samovar.cluster.launch.authority import new_authority
from samovar.cluster.launch.aws import (
    cloud_secrets,
    keep_in_cloud,
    leave_targets,
    live_instances,
    new_token,
    with_server_secret,
)
from samovar.cluster.launch.cluster_file import CONTAINER, ClusterFile
from samovar.cluster.launch.commands import DOCKER_MOUNTS, command
from samovar.cluster.launch.node_setup import RAY_TOKEN_FILE
from samovar.cluster.launch.render import header, render
from samovar.cluster.launch.settings import (
    AUTHORITY_FILE,
    CONFIG_FILE,
    MADE_TLS_DIR,
    NODE_HOME,
    NVME_SCRIPT,
    SECRETS_FILE,
    TOKEN_FILE,
    check_complete,
    node_settings,
)
from samovar.cluster.launch.terraform import CloudOutputs
from samovar.cluster.serve.secrets import DIR_OWNER_ONLY, write_private
from samovar.configs.cluster import LaunchSettings
from samovar.configs.fields import Tree, public_tree, secret_tree, setting_fields
from samovar.configs.settings import Settings
from samovar.configs.tls import tls_in

DRAWN = "auth.server_secret"
"""The secret that `samovar up` draws where none is given."""

LAST_OUTPUT_S = 2.0
"""A connection that ssh keeps for the next command holds the pipe open, so its end is not awaited."""

GRACE_S = 10.0


class CommandFailed(Exception):
    """A command failed or was ended; the message names the command and the cause."""


def ray_program() -> str:
    """Return the `ray` beside our Python, else the one on the PATH. Raises `CommandFailed`."""
    beside = Path(sys.executable).with_name("ray")
    found = str(beside) if beside.exists() else shutil.which("ray")
    if found is None:
        raise CommandFailed("there is no `ray` beside this Python or in PATH. Install Samovar's requirements")
    return found


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for foreign programs, without our secrets."""
    hidden = {field.env for field in setting_fields().values() if field.secret} | {"SAMOVAR_API_KEY"}
    return {name: value for name, value in env.items() if name not in hidden}


def run_shown(
    words: Sequence[str], env: Mapping[str, str], limit_s: float, show: Callable[[str], None]
) -> int:
    """Run a command, blocking, and return its exit code. Raises `CommandFailed` after `limit_s`.

    `show` gets each line of output, from another thread.
    """
    process = subprocess.Popen(
        list(words),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,  # Python ends with an error while a thread reads from a buffer
        start_new_session=True,
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            for part in line.decode(errors="replace").splitlines() or [""]:
                show(part)

    reader = threading.Thread(target=read, name="output", daemon=True)
    reader.start()
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"`{_name(words)}` did not finish within {limit_s:.0f} s and was ended") from None
    finally:
        _end(process)
        reader.join(LAST_OUTPUT_S)
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group if it still runs: after a timeout or Ctrl-C."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):  # background jobs of a shell ignore SIGINT
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _name(words: Sequence[str]) -> str:
    return " ".join([Path(words[0]).name, *words[1:2]])


CONNECT_S = 10
CLEAN_S_MAX = 90.0
UNREACHABLE = 255
"""The exit code of ssh itself; all others are the remote command's."""


def ssh_words(launch: LaunchSettings, host: str, remote: str) -> list[str]:
    """Return the command line that runs `remote` on `host` by ssh without prompting."""
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


def cleaning(launch: LaunchSettings, token: str | None = None) -> str:
    """Return the shell command that stops Ray, removes secrets and GCS's state, and lists what runs.

    `token`: Ray's, of this cluster: a machine that has another one is another cluster's, and left alone.
    """
    homes = [NODE_HOME]
    if launch.image is not None:  # Ray puts a container's files there, and leaves them
        homes.append(f"{DOCKER_MOUNTS}/{launch.name}/{NODE_HOME}")
    files = [f"{home}/{name}" for home in homes for name in (SECRETS_FILE, TOKEN_FILE, AUTHORITY_FILE)]
    made = str(tls_in(MADE_TLS_DIR).key)
    forget = [f"rm -f {command([*files, str(RAY_TOKEN_FILE), made])} || exit 1"]
    if launch.gcs.storage == "rocksdb":
        forget.append(f"rm -rf {command([str(launch.gcs.dir)])}")
    stop = "bash --login -ic 'ray stop --force' >/dev/null 2>&1 </dev/null || true"
    if launch.image is not None:  # of a machine that `ray down` does not know
        stop = f"docker stop {CONTAINER} >/dev/null 2>&1 || true"
    ours = []
    if token is not None:  # as `ClusterHome.write_secrets` writes it
        found = command([f"{home}/{TOKEN_FILE}" for home in homes])
        digest = hashlib.sha256(f"{token}\n".encode()).hexdigest()
        ours = [f"sha256sum {found} 2>/dev/null | grep -q '^{digest} ' || exit 0"]
    return "; ".join([*ours, stop, *forget, "pgrep -l 'raylet|gcs_server' || true"])


def clean(launch: LaunchSettings, host: str, env: Mapping[str, str], token: str | None = None) -> str:
    """Clean up a rack's machine by SSH after `ray down`, which stops the head only.

    `token`: as in `cleaning`. Returns "" if nothing is left, else what is, as text.
    """
    words = ssh_words(launch, host, cleaning(launch, token))
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


def rack_hosts(launch: LaunchSettings) -> list[str]:
    """Return the machines of the rack that the settings name, the head first."""
    return [host for host in (launch.rack.head, *launch.rack.workers) if host is not None]


READY = "Samovar is ready: "
DEPLOY_SPARE_S = 60.0
"""`samovar deploy` has the same limit, and gives the better message if it is the first to end."""

DOWN_S_MAX = 900.0
FOR_PEOPLE = ("--log-style=pretty", "--log-color=false")
"""Otherwise Ray logs every ssh command when it writes into a pipe."""


class UpFailed(Exception):
    """The cluster does not serve; the message says where to look and what may be left."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One cluster to bring up or down.

    `settings`: as given, secrets included; `outputs`: Terraform's, None for a rack; `sources`: names both in
    the file's header; `home` and `env`: the user's; `client`: makes a boto3 client from a service's name;
    `show`: prints a line.
    """

    settings: Settings
    outputs: CloudOutputs | None
    sources: list[str]
    home: Path
    env: Mapping[str, str]
    client: Callable[[str], Any]
    show: Callable[[str], None]

    @property
    def files(self) -> ClusterHome:
        name = self.settings.launch.name if self.outputs is None else self.outputs.cluster_name
        return cluster_home(name, self.home)

    @property
    def url(self) -> str:
        """Return the URL for users."""
        if self.outputs is not None:
            return self.outputs.endpoint_url
        return self.settings.server.url_at(str(self.settings.launch.rack.head))


def up(launch: Launch, *, restart: bool = False) -> str:
    """Start or update the cluster, block until it serves, and return its URL.

    If it already runs, and neither Ray's part nor the secrets have changed, Ray is not restarted and only
    Samovar is redeployed; `restart`: restart Ray anyway.

    Raises `UpFailed`, `RenderFailed`, `AwsRefused`, `CommandFailed`.
    """
    check_key(launch.settings)
    check_wheel(launch.settings)
    file = render(launch.settings, launch.outputs, str(launch.files.node_dir))  # first: it refuses bad input
    secrets = _secrets(launch)
    on_nodes = node_settings(launch.settings, launch.outputs)
    check_complete(on_nodes, secrets)  # before any is written: what is refused leaves those kept as they are
    if (outputs := launch.outputs) is not None:
        if outputs.kms_key_arn is None:
            raise UpFailed(
                "Terraform's outputs have no kms_key_arn, the key of secrets: apply the terraform/ of this "
                "version, and read them again (of ami_id, see terraform/modules/compute/README.md before)"
            )
        launch.files.forget_secrets()
        keep_in_cloud(launch.client("ssm"), outputs.ssm_prefix, outputs.kms_key_arn, secrets)
    launch.files.write_node_files(on_nodes)
    if launch.outputs is None:
        launch.files.write_secrets(launch.files.token(), secrets)
        launch.files.write_authority(is_wanted=on_nodes.cluster.tls_dir == MADE_TLS_DIR)
        launch.files.note_left(_cleaned(launch))
    launch.files.write_cluster_file(file, header(file, launch.sources))
    launch.show(f"cluster file: {launch.files.cluster_file}")
    limit_s = launch.settings.launch.up_timeout_s
    goes_on = not restart and launch.files.runs(file, secrets)
    launch.files.forget_running()
    flags = ["-y", "--no-config-cache", "--disable-usage-stats", *(["--no-restart"] if goes_on else [])]
    code = _ray(launch, ["up", *flags, str(launch.files.cluster_file)], limit_s, launch.show)
    if code != 0:
        raise UpFailed(
            f"`ray up` ended with code {code}: see above. Machines may be up and cost money: `samovar down` "
            "with the same flags ends them"
        )
    _deploy(launch, limit_s + DEPLOY_SPARE_S)
    launch.files.note_running(file, secrets)
    return launch.url


def down(launch: Launch) -> list[str]:
    """Stop the cluster and return what is left, as text; empty if all went well.

    Raises `RenderFailed`, `AwsRefused`, `CommandFailed`.
    """
    files = launch.files
    if not files.cluster_file.exists():  # it was brought up elsewhere
        file = render(launch.settings, launch.outputs, str(files.node_dir))
        files.node_dir.mkdir(parents=True, exist_ok=True)
        files.write_cluster_file(file, header(file, launch.sources))
    files.forget_running()
    code = _ray(launch, ["down", "-y", str(files.cluster_file)], DOWN_S_MAX, launch.show)
    left = [] if code == 0 else [f"`ray down` ended with code {code}: see above"]
    if launch.outputs is None:
        kept, env = _cleaned(launch), without_secrets(launch.env)
        found = [clean(launch.settings.launch, host, env) for host in rack_hosts(launch.settings.launch)]
        left += [text for text in [*kept.values(), *found] if text]
        files.note_left(kept)
        if not left:  # another `samovar up` must not stop what these machines do then
            files.cluster_file.unlink()
        return left
    left += live_instances(launch.client("ec2"), launch.outputs.cluster_name)
    if launch.outputs.target_group_arn is not None:
        leave_targets(launch.client("elbv2"), launch.outputs.target_group_arn)
    return left


def _cleaned(launch: Launch) -> dict[str, str]:
    """Clean the machines that were of a rack and are not in its settings; return what is left, by machine."""
    settings, env, left = launch.settings.launch, without_secrets(launch.env), dict[str, str]()
    for host in launch.files.rack_hosts():  # of the `up` before: they still run, with its secrets
        if host in rack_hosts(settings):
            continue
        if text := clean(settings, host, env, launch.files.token()):
            left[host] = text
        done = f"{host}: if it was still this cluster's, it is stopped and its secrets are removed"
        launch.show(f"no longer of this rack: {text or done}")
    return left


def check_key(settings: Settings) -> None:
    """Raise `UpFailed` for a key that ssh would refuse only after minutes, on the first machine."""
    path = settings.launch.ssh.private_key
    if path is None:
        return
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UpFailed(f"launch.ssh.private_key={path}: {error.strerror}") from error
    if mode & 0o077:
        raise UpFailed(
            f"launch.ssh.private_key={path} is readable by other users, and ssh refuses it: chmod 600 {path}"
        )


def check_wheel(settings: Settings) -> None:
    """Raise `UpFailed` if `launch.wheel` does not exist."""
    wheel = settings.launch.wheel
    if wheel is not None and not wheel.is_file():
        raise UpFailed(f"launch.wheel={wheel}: there is no such file. `pip wheel --no-deps .` makes it")


def deploy_command() -> str:
    """Return the command that runs on the head, in a login shell."""
    words = ["samovar", "deploy"]
    words += ["--config", f"{NODE_HOME}/{CONFIG_FILE}", "--secrets", f"{NODE_HOME}/{SECRETS_FILE}"]
    return f"RAY_AUTH_MODE=token {command(words)}"


def _secrets(launch: Launch) -> Tree:
    given = secret_tree(launch.settings)
    if launch.outputs is None:
        return with_server_secret(given, launch.files.server_secret)
    secrets = cloud_secrets(launch.client("ssm"), launch.outputs.ssm_prefix, given)
    names = [key for key, field in setting_fields().items() if field.secret]
    stay = [key for key in names if _has(secrets, key) and not _has(given, key) and key != DRAWN]
    if given and stay:  # who left one out to take it away must see that this does not
        launch.show(f"not given, and kept as it is in SSM: {', '.join(stay)}")
    return secrets


def _has(tree: Tree, key: str) -> bool:
    under: Any = tree
    for name in key.split("."):
        under = under.get(name) if isinstance(under, Mapping) else None
    return under is not None


def _deploy(launch: Launch, limit_s: float) -> None:
    ready: list[str] = []

    def show(line: str) -> None:
        if line.startswith(READY):  # with the head's address; the public one is printed at the end
            ready.append(line)
        else:
            launch.show(line)

    words = ["exec", "--no-config-cache", str(launch.files.cluster_file), deploy_command()]
    code = _ray(launch, words, limit_s, show)
    if code != 0 or not ready:
        raise UpFailed(
            f"the nodes are up, and Samovar does not serve (`samovar deploy` ended with code {code}): see "
            "above. Correct it and run `samovar up` again, or end the nodes with `samovar down`"
        )


def _ray(launch: Launch, words: list[str], limit_s: float, show: Callable[[str], None]) -> int:
    env = without_secrets(launch.env) | {
        # Ray's newer autoscaler starts no worker of a rack: the provider never reports the head to it.
        "RAY_UP_enable_autoscaler_v2": "0" if launch.outputs is None else "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    name, *rest = words
    return run_shown([ray_program(), name, *FOR_PEOPLE, *rest], env, limit_s, show)


CLUSTER_FILE = "cluster.yaml"
SERVER_SECRET_FILE = "server-secret"
NODE_DIR = "node"
RUNNING_FILE = "running"
LEFT_FILE = "left-hosts"
PUBLIC = 0o644
HEADER = "# Written by `samovar up`. All settings that hold on this cluster but the secrets.\n"


@dataclass(frozen=True, slots=True)
class ClusterHome:
    """Files of one cluster, in the directory `root` on the machine that runs `samovar up`."""

    root: Path

    @property
    def cluster_file(self) -> Path:
        return self.root / CLUSTER_FILE

    @property
    def node_dir(self) -> Path:
        return self.root / NODE_DIR

    def write_cluster_file(self, file: ClusterFile, header: str) -> None:
        write_private(self.cluster_file, file.text(header))

    def rack_hosts(self) -> list[str]:
        """Return the machines in the cluster file, the head first, and those that `note_left` noted."""
        found: list[str] = []
        if self.cluster_file.exists():
            provider = yaml.safe_load(self.cluster_file.read_text())["provider"]
            found = [provider["head_ip"], *provider["worker_ips"]] if provider["type"] == "local" else []
        left = self.root / LEFT_FILE
        return list(dict.fromkeys([*found, *(left.read_text().split() if left.exists() else ())]))

    def note_left(self, hosts: Iterable[str]) -> None:
        """Note machines that are no longer of the rack, and could not be cleaned."""
        text = "\n".join(hosts)
        if text:
            write_private(self.root / LEFT_FILE, text + "\n")
        else:
            (self.root / LEFT_FILE).unlink(missing_ok=True)

    def write_node_files(self, on_nodes: Settings) -> None:
        """Write `node/`, without secrets. `on_nodes`: its settings. Raises `OSError` without the wheel."""
        self._make()
        for old in self.node_dir.glob("*.whl"):
            old.unlink()
        if (wheel := on_nodes.launch.wheel) is not None:
            shutil.copyfile(wheel, self.node_dir / wheel.name)
        config = self.node_dir / CONFIG_FILE
        write_private(config, HEADER + yaml.safe_dump(public_tree(on_nodes), sort_keys=False))
        config.chmod(PUBLIC)
        write_private(self.node_dir / NVME_SCRIPT, nvme_script())

    def write_secrets(self, token: str, secrets: Tree) -> None:
        """Write the secrets for a rack, whose nodes get them by SSH."""
        self._make()
        write_private(self.node_dir / TOKEN_FILE, token + "\n")
        write_private(self.node_dir / SECRETS_FILE, yaml.safe_dump(secrets, sort_keys=True))

    def write_authority(self, *, is_wanted: bool) -> None:
        """Write the authority by which nodes of a rack certify themselves, drawn at the first call."""
        if is_wanted:
            drawn = self._drawn(AUTHORITY_FILE, lambda: new_authority(self.root.name))
            write_private(self.node_dir / AUTHORITY_FILE, drawn + "\n")
        else:
            (self.node_dir / AUTHORITY_FILE).unlink(missing_ok=True)

    def forget_secrets(self) -> None:
        """Delete secrets left by an earlier rack of this name: in AWS they come from SSM."""
        for name in (TOKEN_FILE, SECRETS_FILE, AUTHORITY_FILE):
            (self.node_dir / name).unlink(missing_ok=True)

    def runs(self, file: ClusterFile, secrets: Tree) -> bool:
        """Whether the last `samovar up` succeeded with these, and no `samovar down` has run since."""
        try:
            return hmac.compare_digest(self._running.read_text().strip(), self._digest(file, secrets))
        except FileNotFoundError:
            return False

    def note_running(self, file: ClusterFile, secrets: Tree) -> None:
        write_private(self._running, self._digest(file, secrets) + "\n")

    def forget_running(self) -> None:
        self._running.unlink(missing_ok=True)

    @property
    def _running(self) -> Path:
        return self.root / RUNNING_FILE

    def _digest(self, file: ClusterFile, secrets: Tree) -> str:
        """Return a digest of all that nodes must restart for. Keyed: API keys cannot be tried on it."""
        key = str(secrets.get("auth", {}).get("server_secret", "")).encode()
        authority = self.node_dir / AUTHORITY_FILE
        text = file.text("") + yaml.safe_dump(secrets, sort_keys=True)
        text += authority.read_text() if authority.exists() else ""
        for wheel in self.node_dir.glob("*.whl"):  # one that was built again may have the same name
            text += hashlib.sha256(wheel.read_bytes()).hexdigest()
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()

    def token(self) -> str:
        """Return Ray's token, drawn at the first call."""
        return self._drawn(TOKEN_FILE)

    def server_secret(self) -> str:
        """Return `auth.server_secret`, drawn at the first call: blocks survive a new `samovar up`."""
        return self._drawn(SERVER_SECRET_FILE)

    def _drawn(self, name: str, draw: Callable[[], str] = new_token) -> str:
        path = self.root / name
        self._make()
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            write_private(path, draw() + "\n")
            return path.read_text().strip()

    def _make(self) -> None:
        for path in (self.root, self.node_dir):
            path.mkdir(mode=DIR_OWNER_ONLY, parents=True, exist_ok=True)
            path.chmod(DIR_OWNER_ONLY)


def cluster_home(name: str, home: Path) -> ClusterHome:
    """Return the directory of cluster `name`. `home`: the user's."""
    return ClusterHome(home / ".samovar" / name)


def nvme_script() -> str:
    return (resources.files("samovar.cluster") / "scripts" / NVME_SCRIPT).read_text()
