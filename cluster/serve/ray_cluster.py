"""Starts a private Ray cluster or joins a running one, and ensures that it requires a token.

A Ray cluster without a token runs the code of any client that reaches one of its ports. Loopback is no
exception: Serve binds each replica's internal port to all interfaces and unpickles what arrives, guarded
only by Ray's token. The cluster itself is probed without a token: this process may require one in a cluster
that does not. The token's file must be readable by us only: Ray itself would write it readable for all, and
require no token if the user's shell says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import httpx
import ray
from ray._common.tls_utils import load_certs_from_env
from ray._private import node as ray_node
from ray._private import services as ray_services
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.ray_constants import (
    DASHBOARD_ADDRESS,
    KV_NAMESPACE_DASHBOARD,
    PROCESS_TYPE_DASHBOARD_AGENT,
    PROCESS_TYPE_RUNTIME_ENV_AGENT,
)
from ray._raylet import (  # type: ignore[attr-defined]  # compiled, and its stub does not have them
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)

from samovar import HOME
from samovar.cluster.errors import StartFailed
from samovar.cluster.serve.environment import TOKEN_MODE
from samovar.cluster.serve.secrets import DIR_OWNER_ONLY, OWNER_ONLY, make_private
from samovar.configs.cluster import ClusterSettings

logger = logging.getLogger(__name__)

PROBE_S_MAX = 10.0
PROBE_PATH = "/api/cluster_status"
PROBE_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
REFUSALS = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
NO_PROXY = (("grpc.enable_http_proxy", 0),)


def refuse_open_cluster(where: str, asks_for_token: bool) -> None:
    """Raise `StartFailed` if the cluster requires no token. `where`: its address, for the message."""
    if asks_for_token:
        return
    raise StartFailed(
        f"Ray at {where} requires no token: any program that reaches it or a replica (they listen on every "
        "interface) could run code there. Stop it, and start every node with RAY_AUTH_MODE=token and the "
        "same ~/.ray/auth_token, chmod 600 (`samovar up` does). `samovar serve` with "
        "cluster.ray_address=local starts a cluster that requires one"
    )


def refuse_open_cluster_here() -> None:
    """Raise `StartFailed` if the cluster that this process has joined requires no token."""
    address = str(ray.get_runtime_context().gcs_address)
    refuse_open_cluster(address, is_token_auth_enabled() and gcs_asks_for_token(address))


def gcs_asks_for_token(address: str) -> bool:
    """Whether Ray's GCS at `host:port` refuses calls without token. Raises `StartFailed` if unreachable."""
    with _channel(address) as channel:
        try:
            channel.unary_unary(PROBE_CALL)(b"", timeout=PROBE_S_MAX)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise StartFailed(
                    f"no Ray cluster answers at {address} ({error.details()}). Start it, or correct "
                    "cluster.ray_address"
                ) from error
            refused: bool = error.code() == grpc.StatusCode.UNAUTHENTICATED
            return refused
    return False


def asks_for_token(dashboard: str, client: httpx.Client) -> bool:
    """Whether Ray's dashboard refuses a request without a token. Raises `StartFailed` if unreachable."""
    try:
        answer = client.get(f"{dashboard}{PROBE_PATH}", timeout=PROBE_S_MAX)
    except httpx.TransportError as error:
        raise StartFailed(
            f"no Ray dashboard answers at {dashboard} ({error}). Run this on the head node, where `ray start "
            "--head` has started one, or name it with --cluster.dashboard"
        ) from error
    return answer.status_code in REFUSALS


def _channel(address: str) -> grpc.Channel:
    """Return a channel like Ray's own, but without the token."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address, options=NO_PROXY)
    chain, key, authority = load_certs_from_env()
    credentials = grpc.ssl_channel_credentials(authority, key, chain)
    return grpc.secure_channel(address, credentials, options=NO_PROXY)


TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"
TOKEN_FILE = Path("~/.ray/auth_token")
TOKEN_BYTES = 32

OTHERS = 0o077
OTHERS_WRITE = 0o022
ROOT = 0


def require_token() -> None:
    """Require a token in this process and those it starts, overriding the shell and Ray's default."""
    os.environ.update(TOKEN_MODE)
    ray._config.initialize("")  # Ray read the variable at import


def close_token(environ: Mapping[str, str], *, make: bool) -> str:
    """Make the token's file private before Ray reads it. `make`: create it if there is none.

    Returns a warning for the user if it was open to others, else "". Raises `StartFailed` if it must not be
    used.
    """
    path, named = token_file(environ), environ.get(PATH_VARIABLE)
    if path is None:
        return ""
    try:
        if make and not named and not _has_token(path):
            path.parent.mkdir(mode=DIR_OWNER_ONLY, parents=True, exist_ok=True)
            make_private(path, secrets.token_hex(TOKEN_BYTES))
        return _closed(path)
    except FileNotFoundError:
        raise StartFailed(
            f"there is no Ray token in {path}. Put the cluster's there (chmod 600), or name its file "
            f"with {PATH_VARIABLE}"
        ) from None
    except OSError as error:
        raise StartFailed(f"Ray's token in {path} cannot be made private: {error.strerror}") from error


def token_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file that Ray reads its token from; None: the token is a variable of the environment."""
    if environ.get(TOKEN_VARIABLE):
        return None
    named = environ.get(PATH_VARIABLE)
    return (Path(named) if named else TOKEN_FILE).expanduser()


def _has_token(path: Path) -> bool:
    try:
        if path.read_text().strip():
            return True
        path.unlink()  # Ray treats an empty file as no token
    except FileNotFoundError:
        return False
    return False


def _closed(path: Path) -> str:
    """Make the file private and return a warning if it was open to others, else ""."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would block
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise StartFailed(f"{path} is not a file. Move it away, or name Ray's token with {PATH_VARIABLE}")
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid():
            # Root's file, such as a mounted secret, may be readable by our group.
            if found.st_uid == ROOT and not mode & (OTHERS_WRITE | stat.S_IROTH):
                return ""
            raise StartFailed(
                f"{path} belongs to user {found.st_uid} (mode {mode:04o}), so other users may have Ray's "
                "token, which lets them run code here. Copy it to your own file with mode 0600 and name "
                f"that file with {PATH_VARIABLE}"
            )
        _keep_others_from_replacing(path)
        if not mode & OTHERS:
            return ""
        os.fchmod(file, OWNER_ONLY)
    finally:
        os.close(file)
    return (
        f"{path} was readable by other users (mode {mode:04o}) and is 0600 now. A user who has read it can "
        "run code in clusters with this token: if you share this machine, stop those clusters and delete "
        "the file to get a new token"
    )


def _keep_others_from_replacing(path: Path) -> None:
    found = path.parent.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == os.geteuid() and mode & OTHERS_WRITE and not mode & stat.S_ISVTX:
        path.parent.chmod(mode & ~OTHERS_WRITE)


PREFIX = "samovar-"
NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")
INNER = "ray"
"""Ray makes the directory it is given accessible to all, so it gets one inside ours."""

BASE_VARIABLE = "RAY_TMPDIR"
SOCKET_BYTES_MAX = 107
SOCKET_BELOW = "/samovar-12345678/ray/session_2026-11-22_12-24-25_775244_4194304/sockets/plasma_store"
DEAD_KEPT = 1


class RayFolder:
    """The private directory for our Ray cluster's sockets, logs and spilled objects; `path` is for Ray.

    Ray makes its own directories world-writable, so they lie below one of mode 0700. It is locked while its
    owner lives: the next start removes those whose owner died, except the last, whose logs may be needed.
    (Cleaners of /tmp also leave a locked directory alone.)
    """

    def __init__(self, base: Path) -> None:
        """Create and lock the directory below `base`. Raises `StartFailed` if that fails."""
        try:
            remove_dead(base)
            self._folder, self._lock = _made(base)
        except OSError as error:
            raise StartFailed(
                f"cannot make a directory for Ray in {base}: {error.strerror}. {BASE_VARIABLE} names "
                "another one"
            ) from error
        self.path = self._folder / INNER

    def keep_lock(self) -> None:
        """Leave it locked when this process becomes another program."""
        os.set_inheritable(self._lock, True)

    def close(self, *, keep: bool) -> None:
        """Unlock and remove it; with `keep` it stays until the next start but one. Ray must have ended."""
        if not keep:
            _remove(self._folder)
        os.close(self._lock)


def base_folder(environ: Mapping[str, str]) -> Path:
    """Return where Ray would put its directory. Raises `StartFailed` if socket paths would be too long."""
    longest = SOCKET_BYTES_MAX - len(SOCKET_BELOW)
    if named := environ.get(BASE_VARIABLE):
        if len(os.fsencode(named)) > longest:
            raise StartFailed(
                f"{BASE_VARIABLE}={named} is too long: Ray creates sockets below it, whose path length is "
                f"limited. Name a directory of at most {longest} characters"
            )
        return Path(named)
    usual = environ.get("TMPDIR") or "/tmp"
    return Path(usual if len(os.fsencode(usual)) <= longest else "/tmp")


def remove_dead(base: Path) -> None:
    """Remove our directories whose owner died, except the most recent. Raises `OSError`."""
    with contextlib.ExitStack() as locks:
        dead = [folder for folder in _ours(base) if locks.enter_context(_locked(folder)) is not None]
        dead.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in dead[DEAD_KEPT:]:
            _remove(folder)


def _ours(base: Path) -> Iterator[Path]:
    for entry in os.scandir(base):
        if NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                if set(os.listdir(entry.path)) <= {INNER}:
                    yield Path(entry.path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int | None]:
    """Lock the directory; yields None if another process has the lock or the directory is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield lock if _is_at(folder, lock) else None
    finally:
        os.close(lock)


def _made(base: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # 0700
        with contextlib.suppress(FileNotFoundError):  # another start removed it before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_at(folder, lock):
                return folder, lock
            os.close(lock)


def _is_at(folder: Path, lock: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(folder), os.fstat(lock))
    return False


def _remove(folder: Path) -> None:
    """Remove the directory; what cannot be removed now is left to a later start."""
    shutil.rmtree(
        folder,
        onerror=lambda _function, path, error: logger.info("%s could not be removed: %s", path, error[1]),
    )


def address_of(cluster: ClusterSettings) -> str | None:
    """Return `host:port` of the running cluster; None: start a private one. Raises `StartFailed`."""
    if cluster.ray_address == "local":
        return None
    try:
        found: str | None = ray_services.canonicalize_bootstrap_address(cluster.ray_address)
    except (ConnectionError, ValueError) as error:
        raise StartFailed(f"cluster.ray_address={cluster.ray_address}: {error}") from error
    return found


NO_DASHBOARD = b"127.0.0.1:9"
"""In the place of the dashboard's address, for which Ray's agent would ask again every second."""

NO_PORT, NOBODYS_PORT = -1, 9
"""What Ray's agents say of a service that they do not offer; and a port at which none answers."""
AGENT_PORTS = {
    METRICS_AGENT_PORT_NAME: NO_PORT,
    METRICS_EXPORT_PORT_NAME: NO_PORT,
    DASHBOARD_AGENT_LISTEN_PORT_NAME: NO_PORT,
}
WAIT_FOR_RAYLET = [sys.executable, "-I", "-S", "-c", "open(0).read()"]
"""Waits for the end of its standard input, which the raylet holds. No blanks: Ray makes one string of it."""
AGENTS_HOLD_A_PIPE = "RAY_enable_pipe_based_agent_to_parent_health_check"


class ServingNode(ray_node.Node):  # type: ignore[misc]  # Ray has no types
    """A Ray node with the processes that requests need, for a private cluster.

    Left out are three that have no use there: the dashboard, which serves no page without `include_dashboard`
    but runs; the monitor of an autoscaler that has no machines to start; and the log monitor, which reads
    every log file for drivers with `log_to_driver`. Together they were 300 MB and 2.7 CPU-seconds of a start
    (ray 2.60). Ray itself starts nodes without them, by private parameters that `ray.init` does not pass on.

    The raylet does not run without its two agents, so processes of 10 MB wait in their place: one gathers for
    the dashboard and exports metrics, which `PRIVATE_ENVIRONMENT` switches off; the other makes runtime
    environments, which only replicas of another engine have (`EnvironmentNode`). They were 215 MB and
    1.5 CPU-seconds of a start.
    """

    ports = AGENT_PORTS | {RUNTIME_ENV_AGENT_PORT_NAME: NOBODYS_PORT}
    waiting: tuple[str, ...] = (PROCESS_TYPE_DASHBOARD_AGENT, PROCESS_TYPE_RUNTIME_ENV_AGENT)

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Note that there is no dashboard."""
        self._webui_url = ""
        put = self.get_gcs_client().internal_kv_put
        put(b"webui:url", b"", True, KV_NAMESPACE_DASHBOARD)
        put(DASHBOARD_ADDRESS.encode(), NO_DASHBOARD, True, KV_NAMESPACE_DASHBOARD)

    def start_monitor(self) -> None:
        """Start nothing."""

    def start_log_monitor(self) -> None:
        """Start nothing: logs are in their files."""

    def start_raylet(self, *args: object, **options: object) -> None:
        """Start the raylet with agents that only wait; it reads from files at which ports they listen."""
        os.environ[AGENTS_HOLD_A_PIPE] = "1"
        for name, port in self.ports.items():
            persist_port(self._session_dir, self._node_id, name, port)
        python_command = ray_services._build_python_executable_command_memory_profileable

        def command(component: str, *of: object, **more: object) -> list[str]:
            if component in self.waiting:
                return list(WAIT_FOR_RAYLET)
            made: list[str] = python_command(component, *of, **more)
            return made

        ray_services._build_python_executable_command_memory_profileable = command
        try:
            super().start_raylet(*args, **options)
        finally:
            ray_services._build_python_executable_command_memory_profileable = python_command


class EnvironmentNode(ServingNode):
    """A node with Ray's agent for runtime environments: replicas may have another interpreter."""

    ports = AGENT_PORTS
    waiting = (PROCESS_TYPE_DASHBOARD_AGENT,)


@contextlib.contextmanager
def serving_node(node: type[ServingNode]) -> Iterator[None]:
    """Have `ray.init` start such a node; it takes the class from Ray's module, and knows no other way."""
    whole = ray_node.Node
    ray_node.Node = node
    try:
        yield
    finally:
        ray_node.Node = whole


def join_ray(
    cluster: ClusterSettings, address: str | None, folder: RayFolder | None, *, environments: bool = False
) -> str:
    """Start or join a Ray cluster and return a warning for the user, or "".

    `folder`: for a private cluster. `environments`: it makes runtime environments, as others do. Raises
    `StartFailed` and Ray's own errors.
    """
    require_token()
    if address is not None:
        refuse_open_cluster(address, gcs_asks_for_token(address))  # before it sees our token
    warning = close_token(os.environ, make=address is None)
    # The working directory of the process that starts Ray comes first on the workers' path: a folder
    # `samovar` there must not shadow ours.
    with (
        contextlib.chdir(HOME),
        serving_node(EnvironmentNode if environments else ServingNode)
        if address is None
        else contextlib.nullcontext(),
    ):
        try:
            ray.init(
                address=address or "local",
                namespace="samovar",
                include_dashboard=False,
                object_store_memory=cluster.object_store_bytes if address is None else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder.path) if folder else None,
            )
        except ray.exceptions.AuthenticationError as error:
            raise StartFailed(f"Ray at {address} refuses the token on this machine: {error}") from error
        except Exception as error:  # Ray has no kind of its own for it
            if "timed out during startup" not in str(error):
                raise
            raise StartFailed(
                "Ray's processes did not start within 30 s (a limit of Ray): the machine is too busy, or one "
                "of them fails. Try again when it is less busy"
                + (f"; Ray's logs are in {folder.path}" if folder else "")
            ) from error
    refuse_open_cluster_here()
    return warning
