"""`samovar up`, `down` and `render`: what they run and write, with a stand-in for the `ray` command."""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
import yaml
from typer.testing import CliRunner

from samovar.cluster.cli.main import register
from samovar.cluster.launch import up as up_module
from samovar.cluster.launch.settings import RenderFailed
from samovar.cluster.launch.terraform import CloudOutputs
from samovar.cluster.launch.up import (
    ClusterHome,
    CommandFailed,
    Launch,
    UpFailed,
    check_key,
    cleaning,
    cluster_home,
    deploy_command,
    down,
    run_shown,
    ssh_words,
    up,
    without_secrets,
)
from samovar.configs.settings import Settings
from tests.support.launch_examples import KEYS, OUTPUTS_FILE, aws, outputs, rack

PRETTY = "--log-style=pretty --log-color=false"
KEY = "a-key-of-sixteen-characters"
SCRIPT = """#!/bin/bash
echo "$RAY_UP_enable_autoscaler_v2 ray $*" >> {log}
env >> {log}.env
if [ "$1" = "{fails}" ]; then echo "it broke"; exit 3; fi
if [ "$1" = exec ] && [ "{silent}" != yes ]; then
  echo "waiting"
  echo "Samovar is ready: http://127.0.0.1:8000"
fi
"""


class World:
    """A home directory and a `ray` that writes down how it was called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self.key = self.home / "key.pem"
        self.key.write_text("a private key")
        self.key.chmod(0o600)
        self.log = folder / "log"
        self.program = folder / "ray"
        self.shown: list[str] = []
        self.cleaned: list[str] = []
        self.guarded: set[str] = set()
        self.parameters = Parameters()
        self.ray()
        monkeypatch.setattr(up_module, "ray_program", lambda: str(self.program))
        monkeypatch.setattr(up_module, "clean", self._clean)

    def _clean(self, launch: Any, host: str, env: Any, token: str | None = None) -> str:
        self.cleaned.append(host)
        self.guarded |= {host} if token is not None else set()
        return ""

    def ray(self, fails: str = "", silent: str = "no") -> None:
        self.log.write_text("")
        self.program.write_text(SCRIPT.format(log=self.log, fails=fails, silent=silent))
        self.program.chmod(0o755)

    def launch(self, settings: Settings, given: CloudOutputs | None = None) -> Launch:
        launch = settings.launch
        ssh = launch.ssh.model_copy(update={"private_key": self.key})
        settings = settings.model_copy(update={"launch": launch.model_copy(update={"ssh": ssh})})
        env = {"PATH": os.environ["PATH"], "HOME": str(self.home), **KEYS}
        return Launch(settings, given, ["aws"], self.home, env, self._client, self.shown.append)

    def _client(self, service: str) -> Any:
        return {"ssm": self.parameters, "ec2": Instances(), "elbv2": Targets()}[service]

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()

    def files(self, name: str) -> ClusterHome:
        return cluster_home(name, self.home)


class Parameters:
    """SSM, as far as it is used here."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def get_parameter(self, Name: str, WithDecryption: bool) -> Any:
        if Name not in self.values:
            from botocore.exceptions import ClientError

            raise ClientError({"Error": {"Code": "ParameterNotFound"}}, "GetParameter")
        return {"Parameter": {"Value": self.values[Name]}}

    def put_parameter(self, Name: str, Value: str, Type: str, Overwrite: bool, KeyId: str, Tier: str) -> None:
        assert (Type, Overwrite, KeyId) == ("SecureString", True, outputs().kms_key_arn)
        self.values[Name] = Value


class Instances:
    def get_paginator(self, name: str) -> Any:
        return self

    def paginate(self, **_: Any) -> list[Any]:
        return []


class Targets:
    def describe_target_health(self, **_: Any) -> Any:
        return {"TargetHealthDescriptions": []}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_up_on_a_rack(world: World) -> None:
    url = up(world.launch(rack()))
    files = world.files("samovar")
    assert url == "http://10.0.0.1:8000"
    ray_up, ray_exec = world.calls()
    assert ray_up == f"0 ray up {PRETTY} -y --no-config-cache --disable-usage-stats {files.cluster_file}"
    assert ray_exec == f"0 ray exec {PRETTY} --no-config-cache {files.cluster_file} {deploy_command()}"
    assert "waiting" in world.shown
    assert not any("127.0.0.1" in line for line in world.shown)  # the head's own address helps nobody
    secrets = yaml.safe_load((files.node_dir / "secrets.yaml").read_text())
    assert secrets["auth"]["api_keys"] == {"my-team": KEY}
    assert len(secrets["auth"]["server_secret"]) == 64
    config = yaml.safe_load((files.node_dir / "config.yaml").read_text())
    assert (config["server"]["host"], config["cluster"]["ray_address"]) == ("0.0.0.0", "auto")
    assert not {"api_keys", "admin_key", "server_secret"} & config["auth"].keys()
    assert yaml.safe_load(files.cluster_file.read_text())["file_mounts"] == {"~/samovar": str(files.node_dir)}


def test_what_is_drawn_once_is_kept(world: World) -> None:
    def drawn() -> tuple[str, str]:
        folder = world.files("samovar").node_dir
        return (folder / "ray-token").read_text(), (folder / "secrets.yaml").read_text()

    up(world.launch(rack()))
    first = drawn()
    down(world.launch(rack()))
    up(world.launch(rack()))
    assert drawn() == first


def test_files_are_for_the_owner_and_hold_no_secret_but_those_that_must(world: World) -> None:
    up(world.launch(rack()))
    root = world.files("samovar").root
    for path in (root, *root.rglob("*")):
        mode = path.stat().st_mode
        assert not mode & 0o077 or path.name == "config.yaml", path
        assert stat.S_ISDIR(mode) or KEY not in path.read_text() or path.name == "secrets.yaml"


def test_rays_launcher_gets_none_of_our_secrets(world: World) -> None:
    up(world.launch(rack()))
    assert KEY not in (world.log.parent / "log.env").read_text()
    assert KEY not in "".join(world.calls())
    assert KEY not in "".join(world.shown)
    assert "HOME" in without_secrets(os.environ)


def test_up_on_aws(world: World) -> None:
    given = aws(f"--auth.api-keys={KEYS['SAMOVAR_AUTH__API_KEYS']}")
    assert up(world.launch(given, outputs())) == "http://samovar-example.internal"
    assert all(line.startswith("1 ray ") for line in world.calls())
    values = world.parameters.values
    assert set(values) == {"/samovar/samovar-example/ray-token", "/samovar/samovar-example/secrets"}
    assert KEY in values["/samovar/samovar-example/secrets"]
    root = world.files("samovar-example").root
    assert not any(KEY in path.read_text() for path in root.rglob("*") if path.is_file())
    assert not (root / "node/ray-token").exists()
    up(world.launch(aws(), outputs()))  # the secrets are there already


def test_up_again_lets_ray_go_on_unless_something_of_its_has_changed(world: World) -> None:
    def flags(*words: str, restart: bool = False) -> bool:
        world.ray()
        up(world.launch(rack(*words)), restart=restart)
        return "--no-restart" in world.calls()[0]

    assert not flags()
    assert flags()
    assert flags("--engine.sequences-max=20")
    assert not flags(restart=True)
    assert not flags("--launch.gcs-port=6380")
    assert not flags("--launch.gcs-port=6380", '--auth.api-keys={"other": "another-key-of-sixteen"}')
    assert flags("--launch.gcs-port=6380", '--auth.api-keys={"other": "another-key-of-sixteen"}')
    down(world.launch(rack()))
    assert not flags("--launch.gcs-port=6380", '--auth.api-keys={"other": "another-key-of-sixteen"}')


def test_what_was_not_brought_up_is_started_anew(world: World) -> None:
    up(world.launch(rack()))
    world.ray(fails="exec")
    with pytest.raises(UpFailed, match=r"the nodes are up, and Samovar does not serve \(.* code 3\)"):
        up(world.launch(rack()))
    assert "it broke" in world.shown
    world.ray()
    up(world.launch(rack()))
    assert "--no-restart" not in world.calls()[0]


def test_failures_say_what_may_be_left(world: World) -> None:
    world.ray(fails="up")
    with pytest.raises(UpFailed, match=r"`ray up` ended with code 3: .* `samovar down`"):
        up(world.launch(rack()))
    world.ray(silent="yes")
    with pytest.raises(UpFailed, match="does not serve"):
        up(world.launch(rack()))
    world.ray(fails="down")
    assert down(world.launch(rack())) == ["`ray down` ended with code 3: see above"]


def test_nothing_is_started_with_settings_that_the_nodes_would_refuse(world: World) -> None:
    bare = rack().model_copy(update={"auth": Settings().auth})
    with pytest.raises(RenderFailed, match=r"auth\.api_keys is empty"):
        up(world.launch(bare))
    with pytest.raises(RenderFailed, match="no secrets yet"):
        up(world.launch(aws(), outputs()))
    assert world.calls() == []


def test_what_is_refused_on_aws_leaves_the_secrets_that_are_kept(world: World) -> None:
    kept = {"/samovar/samovar-example/secrets": "auth: {server_secret: one-that-was-put-there-by-hand}"}
    world.parameters.values |= kept
    with pytest.raises(RenderFailed, match=r"auth\.api_keys is empty"):
        up(world.launch(aws("--auth.admin-key=an-admin-key-of-sixteen"), outputs()))
    assert world.parameters.values == kept


def test_one_secret_alone_is_added_to_those_that_are_kept(world: World) -> None:
    up(world.launch(aws(f"--auth.api-keys={KEYS['SAMOVAR_AUTH__API_KEYS']}"), outputs()))
    name = "/samovar/samovar-example/secrets"
    before = yaml.safe_load(world.parameters.values[name])
    up(world.launch(aws("--auth.admin-key=an-admin-key-of-sixteen"), outputs()))
    after = yaml.safe_load(world.parameters.values[name])
    assert after["auth"] == before["auth"] | {"admin_key": "an-admin-key-of-sixteen"}
    assert "not given, and kept as it is in SSM: auth.api_keys" in world.shown
    up(world.launch(aws('--auth.api-keys={"other": "another-key-of-sixteen"}'), outputs()))
    last = yaml.safe_load(world.parameters.values[name])
    assert last["auth"] == after["auth"] | {"api_keys": {"other": "another-key-of-sixteen"}}  # the first ends


def test_a_key_that_ssh_would_refuse_is_refused_at_once(world: World) -> None:
    world.key.chmod(0o644)
    with pytest.raises(UpFailed, match=f"chmod 600 {world.key}"):
        check_key(world.launch(rack()).settings)
    world.key.unlink()
    with pytest.raises(UpFailed, match="No such file"):
        check_key(world.launch(rack()).settings)


def test_the_wheel_goes_along(world: World, tmp_path: Path) -> None:
    wheel = tmp_path / "samovar-0.1.0-py3-none-any.whl"
    with pytest.raises(UpFailed, match="`pip wheel --no-deps"):
        up(world.launch(rack(f"--launch.wheel={wheel}")))
    wheel.write_bytes(b"PK")
    up(world.launch(rack(f"--launch.wheel={wheel}")))
    node_dir = world.files("samovar").node_dir
    assert (node_dir / wheel.name).read_bytes() == b"PK"
    up(world.launch(rack(f"--launch.wheel={wheel}")))
    assert "--no-restart" in world.calls()[-2], "the same wheel again"
    wheel.write_bytes(b"PK2")
    up(world.launch(rack(f"--launch.wheel={wheel}")))
    assert "--no-restart" not in world.calls()[-2], "processes that run have what it was"
    up(world.launch(rack()))
    assert not list(node_dir.glob("*.whl"))


def test_outputs_of_before_the_clusters_key_end_a_cluster_and_start_none(world: World) -> None:
    old = outputs().model_copy(update={"kms_key_arn": None})
    with pytest.raises(UpFailed, match="no kms_key_arn"):
        up(world.launch(aws(f"--auth.api-keys={KEYS['SAMOVAR_AUTH__API_KEYS']}"), old))
    assert world.parameters.values == {}
    assert down(world.launch(aws(), old)) == []


def test_down_cleans_every_machine_of_a_rack(world: World) -> None:
    launch = world.launch(rack())
    assert down(launch) == []
    assert world.calls() == [f"0 ray down {PRETTY} -y {world.files('samovar').cluster_file}"]
    assert world.cleaned == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_a_machine_that_left_the_settings_is_cleaned_all_the_same(world: World) -> None:
    up(world.launch(rack()))
    fewer = rack('--launch.rack.workers=["10.0.0.2"]')
    assert down(world.launch(fewer)) == []
    assert world.cleaned == ["10.0.0.3", "10.0.0.1", "10.0.0.2"]
    up(world.launch(fewer))
    up(world.launch(rack('--launch.rack.workers=["10.0.0.4"]')))
    assert world.cleaned[3:] == ["10.0.0.2"], "what is down already may do other work by now"
    assert world.guarded == {"10.0.0.2", "10.0.0.3"}, "those may be another cluster's by now"
    assert any(line.startswith("no longer of this rack: 10.0.0.2: if it was still") for line in world.shown)


def test_a_machine_that_could_not_be_cleaned_is_not_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    up(world.launch(rack()))
    with monkeypatch.context() as away:
        away.setattr(up_module, "clean", lambda launch, host, env, token=None: f"{host}: cannot be reached")
        down(world.launch(rack()))
        up(world.launch(rack('--launch.rack.workers=["10.0.0.2"]')))
        up(world.launch(rack('--launch.rack.workers=["10.0.0.2"]')))
    assert down(world.launch(rack('--launch.rack.workers=["10.0.0.2"]'))) == []
    assert world.cleaned == ["10.0.0.3", "10.0.0.1", "10.0.0.2"]
    assert down(world.launch(rack('--launch.rack.workers=["10.0.0.2"]'))) == []
    assert world.cleaned[3:] == ["10.0.0.1", "10.0.0.2"], "it is cleaned, and forgotten"


def test_cleaning_removes_secrets_and_what_the_head_remembers() -> None:
    text = cleaning(rack().launch)
    secrets = "secrets.yaml", "ray-token", "authority.pem"
    gone = " ".join(
        (*(f"~/samovar/{name}" for name in secrets), "~/.ray/auth_token", "~/samovar-tls/tls.key")
    )
    assert f"rm -f {gone} || exit 1; rm -rf ~/samovar-gcs;" in text
    assert text.startswith("bash --login -ic 'ray stop --force'")
    guarded = cleaning(rack().launch, "t" * 64)
    digest = hashlib.sha256(b"t" * 64 + b"\n").hexdigest()
    assert guarded == f"sha256sum ~/samovar/ray-token 2>/dev/null | grep -q '^{digest} ' || exit 0; {text}"
    assert "samovar-gcs" not in cleaning(rack("--launch.gcs.storage=memory").launch)
    image = rack(f"--launch.image=docker.io/me/samovar@sha256:{'0' * 64}").launch
    mounted = f"/tmp/ray_tmp_mount/{image.name}/~/samovar"
    assert cleaning(image).startswith("docker stop samovar ")
    for name in secrets:
        assert f"{mounted}/{name}" in shlex.split(cleaning(image).replace(";", " ;"))
    words = ssh_words(rack("--launch.ssh.proxy-command=nc %h %p").launch, "10.0.0.2", "true")
    assert words[-2:] == ["ubuntu@10.0.0.2", "true"]
    assert "ProxyCommand=nc %h %p" in words
    assert words[words.index("-i") + 1] == "/home/me/.ssh/rack.pem"


def ended(pid: int) -> bool:
    """Within a while; a zombie has ended, too."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    shown: list[str] = []
    begin = time.monotonic()
    pid_file = tmp_path / "pid"
    words = ["bash", "-c", f"sleep 60 & echo $! > {pid_file}; echo begun; wait"]
    with pytest.raises(CommandFailed, match=r"`bash -c` did not finish within 1 s"):
        run_shown(words, os.environ, 1.0, shown.append)
    assert time.monotonic() - begin < 20
    assert shown == ["begun"]
    assert ended(int(pid_file.read_text()))


def test_a_pipe_that_somebody_keeps_open_is_not_waited_for() -> None:
    """ssh keeps a connection for the next command, and with it our pipe."""
    shown: list[str] = []
    begin = time.monotonic()
    assert run_shown(["bash", "-c", "sleep 8 & echo done; exit 4"], os.environ, 20.0, shown.append) == 4
    assert time.monotonic() - begin < 7
    assert shown == ["done"]


@pytest.fixture
def samovar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("HOME", str(tmp_path))
    app = typer.Typer()
    register(app)
    return lambda *words: CliRunner().invoke(app, list(words))


def test_the_command_prints_the_file_and_makes_nothing(samovar: Callable[..., Any], tmp_path: Path) -> None:
    key = "--launch.ssh.private-key=~/key.pem"
    done = samovar("render", "--config", "aws", "--terraform", str(OUTPUTS_FILE), key)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("# samovar-example: written by `samovar render` from aws and terraform-")
    tree = yaml.safe_load(done.stdout)
    assert tree["auth"]["ssh_private_key"] == f"{tmp_path}/key.pem"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["render", "--config", "aws"], "needs --terraform FILE"),
        (["render", "--config", "no-such-file"], "no-such-file"),
        (["up", "--config", "aws", "--terraform", "none.json"], "none.json cannot be read"),
        (["down", "--config", "rack"], "needs launch.rack.head"),
        (["node-setup", "--region", "us-east-1"], "needs --region and --ssm-prefix"),
        (["node-setup", "--token-file", "/no/such/file"], "Run `samovar up` again"),
    ],
)
def test_known_errors_are_one_message(samovar: Callable[..., Any], words: list[str], text: str) -> None:
    done = samovar(*words)
    assert done.exit_code in (1, 2)
    assert done.stderr.startswith("samovar: ")
    assert text in done.stderr
    assert "Traceback" not in done.output
