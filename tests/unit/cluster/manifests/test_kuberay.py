"""`samovar render --kuberay`: what the operator, Ray Serve and our own pods accept; no secret in it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import Result
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from samovar.cluster.cli.main import app
from samovar.cluster.deploy.builders import AppArgs, read_secrets, secrets_digest
from samovar.cluster.launch.commands import node_environment
from samovar.configs.cluster import ClusterSettings
from samovar.configs.fields import merged
from samovar.configs.settings import Settings
from tests.support.launch_examples import DIGEST
from tests.unit.cluster.manifests.rayservice_schema import RAY_SERVICE

IMAGE = f"registry.example/samovar@{DIGEST}"
API_KEY, SERVER_SECRET = "a-key-of-sixteen-characters", "5e" * 32
SECRETS = {"auth": {"api_keys": {"my-team": API_KEY}, "server_secret": SERVER_SECRET}}
GIB = 1024**3

Render = Callable[..., Result]


def write_secrets(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tree))
    path.chmod(0o600)
    return path


@pytest.fixture
def render(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Render:
    monkeypatch.chdir(tmp_path)
    secrets = write_secrets(tmp_path / "secrets.yaml", SECRETS)
    words = ["render", "--kuberay", "--secrets", str(secrets), "--launch.image", IMAGE]
    return lambda *flags: CliRunner().invoke(app, [*words, *flags])


def tree_of(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    jsonschema.validate(found, RAY_SERVICE, cls=jsonschema.Draft202012Validator)
    return found


def pods(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """The head's pod, the worker's."""
    cluster = tree["spec"]["rayClusterConfig"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


EXAMPLES = pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--launch.kube.worker-gpus=2", "--launch.kube.model-claim=weights", "--model.path=/models/qwen"),
        ("--cluster.autoscaling.enabled=true", "--launch.kube.workers-min=0", "--tiers.s3.bucket=tea"),
        ("--launch.gcs.storage=redis", "--launch.gcs.redis-address=redis:6379", "--tiers.enabled=false"),
        ("--config", "aws", "--launch.kube.worker-gpus=1"),
    ],
    ids=["plain", "gpus", "autoscaling", "redis", "preset"],
)


@EXAMPLES
def test_the_operator_and_ray_serve_accept_it(render: Render, flags: tuple[str, ...]) -> None:
    flags += ("--cluster.replica-cpus=1",)
    tree = tree_of(render(*flags))
    serve = ServeDeploySchema.model_validate(yaml.safe_load(tree["spec"]["serveConfigV2"]))
    assert [one.import_path for one in serve.applications] == [
        "samovar.cluster.deploy.builders:model_app",
        "samovar.cluster.deploy.builders:front_app",
    ]
    assert (serve.http_options.host, serve.http_options.port) == ("0.0.0.0", 8000)
    assert tree["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_the_schema_would_have_noticed(render: Render) -> None:
    tree = tree_of(render("--cluster.replica-cpus=1"))
    for change in ({"rayClusterConfg": {}}, {"serveConfigV2": {}}, {"upgradeStrategy": {"type": "Rolling"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(tree | {"spec": tree["spec"] | change}, RAY_SERVICE)


def test_the_pods_accept_the_arguments_and_the_secret(render: Render, tmp_path: Path) -> None:
    """The digest is that of the file which the command in the head of the text makes the Secret of."""
    done = render("--cluster.replica-cpus=1")
    for app_config in yaml.safe_load(tree_of(done)["spec"]["serveConfigV2"])["applications"]:
        args = AppArgs.model_validate(app_config["args"])
        settings = merged(args.settings, SECRETS)
        assert isinstance(settings, Settings)
        assert args.secrets_digest == secrets_digest(read_secrets(tmp_path / "secrets.yaml"), SERVER_SECRET)
    (command,) = re.findall(r"^#   kubectl (create secret .*)$", done.stdout, re.M)
    assert shlex.split(command)[-1] == f"--from-file=secrets.yaml={tmp_path}/secrets.yaml"
    for pod in pods(tree_of(done)):
        (copy,) = pod["initContainers"]
        assert copy["command"] == [
            "install",
            "-m",
            "0600",
            "/run/samovar-secret/secrets.yaml",
            str(args.secrets_file),
        ]
        mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
        assert mounts["secrets"] == str(args.secrets_file.parent)
        assert mounts.keys() <= {one["name"] for one in pod["volumes"]}
        assert "secret" not in mounts, "readable by its group"


def test_no_secret_is_in_it_and_no_pod_runs_as_root(render: Render) -> None:
    done = render("--cluster.replica-cpus=1")
    assert API_KEY not in done.stdout
    assert SERVER_SECRET not in done.stdout
    for pod in pods(tree_of(done)):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        for container in (*pod["containers"], *pod["initContainers"]):
            assert container["image"] == IMAGE
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert not container["securityContext"]["allowPrivilegeEscalation"]


def test_a_pod_is_what_the_settings_say(render: Render) -> None:
    flags = ("--launch.kube.worker-gpus=2", "--launch.kube.worker-memory-bytes", str(32 * GIB))
    tree = tree_of(render(*flags, "--tiers.cpu.bytes-max", str(12 * GIB), "--server.port=9000"))
    head, worker = pods(tree)
    limits = worker["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "4000m", "memory": "32768Mi", "nvidia.com/gpu": "2"}
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]
    groups = tree["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    store_bytes = int(groups[0]["rayStartParams"]["object-store-memory"])
    (shm,) = (one for one in worker["volumes"] if one["name"] == "shm")
    assert 12 * GIB / 0.6 <= store_bytes < int(shm["emptyDir"]["sizeLimit"]) < 32 * GIB
    for pod in (head, worker):
        ports = {one["name"]: one["containerPort"] for one in pod["containers"][0]["ports"]}
        assert ports["serve"] == 9000
    environment = {one["name"]: one["value"] for one in worker["containers"][0]["env"]}
    assert environment == {
        name: value
        for name, value in node_environment(Settings(cluster=ClusterSettings(ray_address="auto"))).items()
        if name != "RAY_AUTH_MODE"  # the operator sets it, with the token
    }


def test_another_model_or_other_secrets_make_another_cluster(render: Render, tmp_path: Path) -> None:
    """The operator would exchange a model in one step, under answers that are on their way."""

    def annotations(*flags: str) -> dict[str, str]:
        cluster = tree_of(render("--cluster.replica-cpus=1", *flags))["spec"]["rayClusterConfig"]
        found: dict[str, str] = cluster["headGroupSpec"]["template"]["metadata"]["annotations"]
        assert found == cluster["workerGroupSpecs"][0]["template"]["metadata"]["annotations"]
        return found

    first = annotations()
    assert annotations("--limits.n-max=4") == first
    assert annotations("--model.path=/models/qwen") != first
    write_secrets(
        tmp_path / "secrets.yaml", {"auth": SECRETS["auth"] | {"admin_key": "another-key-of-sixteen"}}
    )
    assert annotations() != first


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--cluster.replica-cpus=1", "--launch.image="], "launch.image is empty"),
        (["--cluster.replica-cpus=0"], "cluster.replica_cpus=0"),
        (["--engine.device=cuda"], "engine.device=cuda needs GPUs, and launch.kube.worker_gpus is 0"),
        (
            ["--cluster.replica-cpus=5"],
            "replica_cpus=5 is more than a worker pod has (launch.kube.worker_cpus=4)",
        ),
        (
            [
                "--cluster.replica-cpus=3",
                "--engine.device=cpu",
                "--engine.tensor-parallel=2",
                "--engine.kv-groups=2",
            ],
            "replica_cpus=3, for each of engine.tensor_parallel=2, is more than a worker pod has",
        ),
        (
            ["--cluster.replica-cpus=1", '--cluster.replica-resources={"kv_nvme": 1}'],
            "cluster.replica_resources has kv_nvme, which no worker pod has",
        ),
        (
            ["--config=rack", "--launch.rack.spare-cpus-head=true", "--cluster.replica-cpus=0"],
            "cluster.replica_cpus=0",
        ),
        (["--cluster.replica-cpus=1", "--launch.kube.worker-memory-bytes", str(3 * GIB)], "is too little"),
        (["--launch.kube.workers-min=9"], "launch.kube.workers_min=9 is more than"),
        (["--systemd"], "three different files"),
        (["--secrets", "none.yaml"], "none.yaml"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(render: Render, flags: list[str], text: str) -> None:
    done = render(*flags)
    assert done.exit_code == 2
    assert done.stderr.startswith("samovar: ")
    assert text in done.stderr
    assert API_KEY not in done.output


@pytest.mark.parametrize("missing", ["server_secret", "api_keys"])
def test_secrets_that_pods_would_refuse_are_refused_here(
    render: Render, tmp_path: Path, missing: str
) -> None:
    auth = {name: value for name, value in SECRETS["auth"].items() if name != missing}
    write_secrets(tmp_path / "secrets.yaml", {"auth": auth})
    done = render("--cluster.replica-cpus=1")
    assert done.exit_code == 2
    assert f"auth.{missing}" in done.stderr


def test_without_secrets_it_says_what_they_are_for() -> None:
    done = CliRunner().invoke(app, ["render", "--kuberay"])
    assert (done.exit_code, "--kuberay needs --secrets FILE" in done.stderr) == (2, True)
