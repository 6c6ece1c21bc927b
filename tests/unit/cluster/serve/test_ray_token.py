"""F37, S1, S5: Ray asks for its token, here and at the cluster; the token's file is ours alone.

A stranger's answers come from a real GCS of Ray's, run alone; a whole cluster is looked at in `tests/e2e`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled

from samovar.cluster.deploy.builders import AppArgs, front_app, model_app
from samovar.cluster.serve import ray_cluster as join_ray
from samovar.cluster.serve import ray_cluster as open_cluster
from samovar.cluster.serve import ray_cluster as ray_token
from samovar.cluster.serve import secrets as private_file
from samovar.cluster.serve.environment import ray_environment
from samovar.cluster.serve.preflight import StartFailed
from samovar.cluster.serve.ray_cluster import address_of, close_token, gcs_asks_for_token, require_token
from samovar.configs.cluster import ClusterSettings
from samovar.configs.settings import Settings
from tests.support.services.service import free_port, until

GCS = Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"
TOKEN = "5a" * 32


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def token_file(home: Path, mode: int = 0o600, text: str = TOKEN, directory_mode: int = 0o755) -> Path:
    path = home / ".ray" / "auth_token"
    path.parent.mkdir(exist_ok=True)
    path.parent.chmod(directory_mode)
    path.write_text(text)
    path.chmod(mode)
    return path


class TestTheTokensFile:
    def test_it_is_made_for_us_alone_before_ray_reads_it(self, home: Path) -> None:
        assert close_token({}, make=True) == ""
        path = home / ".ray" / "auth_token"
        assert (mode(path), mode(path.parent)) == (0o600, 0o700)
        made = path.read_text()
        assert len(made) == 64
        assert close_token({}, make=True) == ""
        assert path.read_text() == made
        assert os.listdir(path.parent) == ["auth_token"]

    def test_of_many_who_make_it_at_once_all_have_the_same(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        together, make = threading.Barrier(8), private_file.make_private

        def at_once(path: Path, text: str) -> None:
            together.wait(10)
            make(path, text)

        monkeypatch.setattr(ray_token, "make_private", at_once)

        def made(_number: int) -> str:
            close_token({}, make=True)
            return (home / ".ray" / "auth_token").read_text()

        with ThreadPoolExecutor(8) as threads:
            assert len(set(threads.map(made, range(8)))) == 1

    @pytest.mark.parametrize("open_mode", [0o644, 0o640, 0o666, 0o604])
    def test_one_that_ray_has_made_is_closed_and_that_is_said(self, home: Path, open_mode: int) -> None:
        path = token_file(home, open_mode, directory_mode=0o775)
        warning = close_token({}, make=True)
        assert f"{path} was readable by other users (mode {open_mode:04o})" in warning
        assert TOKEN not in warning
        assert (mode(path), path.read_text(), mode(path.parent)) == (0o600, TOKEN, 0o755)
        assert close_token({}, make=True) == "", "it is said once"

    def test_an_empty_one_is_none(self, home: Path) -> None:
        path = token_file(home, text="\n")
        close_token({}, make=True)
        assert len(path.read_text()) == 64

    def test_one_with_a_name_is_closed_and_never_made(self, home: Path, tmp_path: Path) -> None:
        path = tmp_path / "mine"
        with pytest.raises(StartFailed, match=f"there is no Ray token in {path}"):
            close_token({"RAY_AUTH_TOKEN_PATH": str(path)}, make=True)
        path.write_text(TOKEN)
        path.chmod(0o644)
        assert "is 0600 now" in close_token({"RAY_AUTH_TOKEN_PATH": str(path)}, make=True)
        assert not (home / ".ray").exists()

    def test_a_token_of_the_environment_needs_no_file(self, home: Path) -> None:
        assert close_token({"RAY_AUTH_TOKEN": TOKEN}, make=True) == ""
        assert not (home / ".ray").exists()

    def test_for_somebody_elses_cluster_it_is_not_made_up(self, home: Path) -> None:
        with pytest.raises(StartFailed, match="Put the cluster's there"):
            close_token({}, make=False)
        assert not (home / ".ray").exists()

    @pytest.mark.parametrize(("open_mode", "owner", "is_refused"), [
        (0o644, 4321, True), (0o600, 4321, True), (0o644, 0, True), (0o660, 0, True), (0o640, 0, False),
    ])  # fmt: skip
    def test_one_that_is_not_ours_is_refused(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, open_mode: int, owner: int, is_refused: bool
    ) -> None:
        path = token_file(home, open_mode)
        monkeypatch.setattr(ray_token, "ROOT", os.geteuid() if owner == 0 else -1)
        monkeypatch.setattr(ray_token.os, "geteuid", lambda: os.getuid() + 1)
        refused = pytest.raises(StartFailed, match="belongs to user")
        with refused if is_refused else contextlib.nullcontext():
            close_token({}, make=True)
        assert mode(path) == open_mode

    def test_what_is_no_file_is_refused(self, home: Path) -> None:
        (home / "pipe").touch()
        (home / "pipe").unlink()
        os.mkfifo(home / "pipe", 0o600)
        with pytest.raises(StartFailed, match="is not a file"):
            close_token({"RAY_AUTH_TOKEN_PATH": str(home / "pipe")}, make=True)


@contextlib.contextmanager
def gcs(folder: Path, auth_mode: str) -> Iterator[str]:
    """A real one, without the rest of a cluster; its address."""
    address = f"127.0.0.1:{free_port()}"
    (folder / "logs").mkdir()
    words = [
        *(str(GCS), "--config_list=e30=", f"--gcs_server_port={address.rpartition(':')[2]}"),
        *("--node-ip-address=127.0.0.1", "--metrics-agent-port=0", f"--node-id={'0' * 56}", "--ray-commit=x"),
        *("--session-name=test", f"--session-dir={folder}", f"--log_dir={folder / 'logs'}"),
    ]
    environ = os.environ | {"RAY_AUTH_MODE": auth_mode, "RAY_AUTH_TOKEN": TOKEN}
    with (folder / "out.txt").open("wb") as out:
        process = subprocess.Popen(words, env=environ, stdout=out, stderr=subprocess.STDOUT)
    try:

        def answers() -> bool:
            assert process.poll() is None, (folder / "out.txt").read_text()
            with contextlib.suppress(StartFailed):
                gcs_asks_for_token(address)
                return True
            return False

        until("GCS answers", answers)
        yield address
    finally:
        process.kill()
        process.wait()


def test_a_node_that_is_late_is_no_traceback(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def late(**arguments: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(join_ray, "require_token", lambda: None)
    monkeypatch.setattr(join_ray.ray, "init", late)
    with pytest.raises(StartFailed, match="did not start within 30 s"):
        join_ray.join_ray(ClusterSettings(), None, None)


@pytest.mark.guarantee("F37")
class TestAClusterWithoutAToken:
    def test_a_cluster_that_runs_on_loopback_without_a_token_is_not_joined(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        joined: list[object] = []
        monkeypatch.setattr(join_ray, "require_token", lambda: None)  # of this process, once and for all
        monkeypatch.setattr(join_ray.ray, "init", lambda **arguments: joined.append(arguments))
        with gcs(tmp_path, "disabled") as address:
            cluster = ClusterSettings(ray_address=address)
            with pytest.raises(StartFailed, match=f"Ray at {address} requires no token"):
                join_ray.join_ray(cluster, address, None)
        assert joined == []

    def test_one_with_a_token_is_joined_with_the_one_that_is_here(
        self, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        joined: list[dict[str, object]] = []
        monkeypatch.setattr(join_ray, "require_token", lambda: None)
        monkeypatch.setattr(join_ray.ray, "init", lambda **arguments: joined.append(arguments))
        monkeypatch.setattr(join_ray, "refuse_open_cluster_here", lambda: None)
        with gcs(tmp_path, "token") as address:
            cluster = ClusterSettings(ray_address=address, object_store_bytes=1 << 30)
            with pytest.raises(StartFailed, match="Put the cluster's there"):
                join_ray.join_ray(cluster, address, None)
            path = token_file(home, 0o644)
            assert str(path) in join_ray.join_ray(cluster, address, None)
        assert [one["address"] for one in joined] == [address]
        assert joined[0]["object_store_memory"] is None, "Ray refuses it for a cluster that runs"

    @pytest.mark.parametrize("build", [model_app, front_app])
    @pytest.mark.parametrize(
        ("says", "auth_mode", "why"),
        [
            (True, "disabled", "requires no token"),
            (False, "token", "requires no token"),
            (True, "token", "none cannot be read"),  # that is the next thing
        ],
    )
    def test_what_this_process_believes_is_not_what_counts(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        says: bool,
        auth_mode: str,
        why: str,
        build: Callable[[AppArgs], object],
    ) -> None:
        """Serve starts our builders with the variable that we send, in whatever cluster."""

        class Context:
            gcs_address = ""

        monkeypatch.setattr(open_cluster, "is_token_auth_enabled", lambda: says)
        monkeypatch.setattr(open_cluster.ray, "get_runtime_context", Context)
        with gcs(tmp_path, auth_mode) as address:
            monkeypatch.setattr(Context, "gcs_address", address)
            with pytest.raises(StartFailed, match=why):
                build(AppArgs(settings={}, secrets_file=Path("none"), secrets_digest="0" * 64, model_app="m"))

    def test_nobody_there_is_said_so(self) -> None:
        with pytest.raises(StartFailed, match=r"cluster\.ray_address"):
            gcs_asks_for_token(f"127.0.0.1:{free_port()}")

    def test_addresses(self) -> None:
        assert address_of(ClusterSettings()) is None
        assert address_of(ClusterSettings(ray_address="10.1.2.3:6379")) == "10.1.2.3:6379"

    @pytest.mark.parametrize("shell", ["disabled", "token", None])
    def test_the_shell_does_not_switch_it_off(
        self, monkeypatch: pytest.MonkeyPatch, shell: str | None
    ) -> None:
        with monkeypatch.context() as patch:
            if shell is None:
                patch.delenv("RAY_AUTH_MODE", raising=False)
            else:
                patch.setenv("RAY_AUTH_MODE", shell)
            ray._config.initialize("")  # as when it is imported
            assert is_token_auth_enabled() == (shell == "token")
            require_token()
            assert is_token_auth_enabled()
            assert os.environ["RAY_AUTH_MODE"] == "token"
        ray._config.initialize("")

    def test_whatever_ray_starts_asks_and_is_not_nice(self) -> None:
        environment = ray_environment(Settings())
        assert environment["RAY_AUTH_MODE"] == "token"
        assert environment["RAY_worker_niceness"] == "0"
