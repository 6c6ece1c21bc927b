"""The cluster file: what Ray and EC2 accept, and each trap of theirs that it must not fall into."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from pydantic import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

from samovar.cluster.launch.cluster_file import Ec2Node
from samovar.cluster.launch.render import render
from samovar.cluster.launch.settings import RenderFailed, check_complete, node_settings
from samovar.configs.fields import merged, public_tree, secret_tree
from samovar.configs.loader import load
from tests.support.launch_examples import (
    IMAGE,
    KEYS,
    NODE_DIR,
    aws,
    examples,
    outputs,
    pools_with,
    rack,
    rendered_aws,
    rendered_rack,
)

GIB = 1024**3
BOTH = pytest.mark.parametrize("rendered", [rendered_aws, rendered_rack], ids=["aws", "rack"])


def ray_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """As `ray up` sees it: with Ray's own defaults, checked against Ray's schema."""
    prepared: dict[str, Any] = prepare_config(json.loads(json.dumps(tree)))
    validate_config(prepared)
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(prepared, schema)
    return prepared


def starts(tree: dict[str, Any]) -> list[str]:
    """The commands that start Ray: the head's, the workers'."""
    names = ("head_start_ray_commands", "worker_start_ray_commands")
    return [line for name in names for line in tree[name] if "ray start" in line]


def environment(line: str) -> dict[str, str]:
    found = re.search(r"export (.*?);", line)
    assert found is not None
    return dict(word.split("=", 1) for word in shlex.split(found[1]))


@pytest.mark.parametrize("path", examples(), ids=lambda path: path.name)
def test_the_examples_are_as_rendered_today(path: Path) -> None:
    assert path.read_text() == examples()[path], "run `python -m tests.support.launch_examples`"


@BOTH
def test_ray_accepts_the_file(rendered: Any) -> None:
    tree = rendered().tree()
    assert yaml.safe_load(rendered().text("a\nb")) == tree
    assert ray_tree(tree)["cluster_name"] == tree["cluster_name"]


def test_rays_schema_would_have_noticed() -> None:
    tree = rendered_aws().tree()
    with pytest.raises(jsonschema.ValidationError):
        ray_tree(tree | {"max_wrokers": 3})
    with pytest.raises(ValueError, match="max_workers"):
        ray_tree(tree | {"max_workers": 0})


@BOTH
def test_no_command_of_rays_own_is_merged_in(rendered: Any) -> None:
    tree = rendered().tree()
    prepared = ray_tree(tree)
    assert prepared["head_setup_commands"] == tree["setup_commands"]
    assert prepared["worker_setup_commands"] == tree["setup_commands"]
    assert "pip install" not in json.dumps(prepared)
    del tree["setup_commands"]
    if tree["provider"]["type"] == "aws":  # what would have come otherwise
        assert "pip install" in json.dumps(ray_tree(tree))


@BOTH
def test_the_token_is_asked_for_on_every_node(rendered: Any) -> None:
    lines = starts(rendered().tree())
    assert len(lines) == 2
    for line in lines:
        assert environment(line)["RAY_AUTH_MODE"] == "token"


@BOTH
def test_a_silent_node_is_found_dead_as_soon_as_configured_on_all_nodes(rendered: Any) -> None:
    file = rendered("--launch.health.period-ms=500", "--launch.health.failures=3")
    for line in starts(file.tree()):
        found = environment(line)
        assert found["RAY_health_check_period_ms"] == "500"
        assert found["RAY_health_check_failure_threshold"] == "3"
        assert found["RAY_health_check_timeout_ms"] == "2000"
        assert found["RAY_health_check_initial_delay_ms"] == "5000"


@BOTH
def test_what_the_proxies_and_replicas_need_is_in_rays_environment(rendered: Any) -> None:
    file = rendered("--limits.body-bytes-max=5000")
    for line in starts(file.tree()):
        found = environment(line)
        assert found["SAMOVAR_PROXY_BODY_BYTES_MAX"] == "5000"
        assert found["HF_HUB_OFFLINE"] == "1"
        assert found["RAY_USAGE_STATS_ENABLED"] == "0"


@BOTH
def test_secrets_are_fetched_before_ray_starts(rendered: Any) -> None:
    tree = rendered().tree()
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        first, second, *_ = tree[name]
        assert first.startswith("samovar node-setup ")
        assert second == "ray stop"


@BOTH
def test_ports_and_the_dashboard_on_loopback(rendered: Any) -> None:
    tree = rendered("--launch.gcs-port=6400", "--launch.dashboard-port=8300").tree()
    head, worker = starts(tree)
    assert "--head --port=6400 --dashboard-host=127.0.0.1 --dashboard-port=8300 " in head
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head
    assert "--address=$RAY_HEAD_IP:6400 " in worker
    assert "dashboard" not in worker
    for line in (head, worker):
        assert "--object-manager-port=8076" in line
        assert "--node-manager-port=8077" in line
        assert "--metrics-export-port=8080" in line
        assert line.startswith("ulimit -n 65536; ")


@BOTH
def test_the_object_store_holds_the_cpu_tier(rendered: Any) -> None:
    file = rendered(f"--tiers.cpu.bytes-max={6 * GIB}")
    head, worker = (int(found) for found in re.findall(r"--object-store-memory=(\d+)", str(file.tree())))
    assert worker * 0.6 >= 6 * GIB
    assert head < GIB  # no replica there, no tier
    with pytest.raises(RenderFailed, match=r"launch\.object_store_bytes=1000000000 leaves"):
        rendered(f"--tiers.cpu.bytes-max={6 * GIB}", "--launch.object-store-bytes=1000000000")


@BOTH
def test_the_head_remembers_as_configured(rendered: Any) -> None:
    head, worker = starts(rendered().tree())
    assert "RAY_gcs_storage=rocksdb RAY_gcs_storage_path=~/samovar-gcs " in head
    assert "gcs_storage" not in worker
    commands = rendered().tree()["head_start_ray_commands"]
    assert commands[2] == "mkdir -p -m 0700 ~/samovar-gcs"
    assert commands[-1].startswith("setsid nohup samovar keep-gcs --port 6379 ")
    memory = rendered("--launch.gcs.storage=memory").tree()["head_start_ray_commands"]
    assert len(memory) == 3
    assert "gcs_storage" not in str(memory)
    redis = rendered("--launch.gcs.storage=redis", "--launch.gcs.redis-address=10.0.0.9:6379").tree()
    assert environment(starts(redis)[0])["RAY_REDIS_ADDRESS"] == "10.0.0.9:6379"


@BOTH
def test_file_mounts_are_directories(rendered: Any) -> None:
    assert rendered().tree()["file_mounts"] == {"~/samovar": NODE_DIR}


def test_docker_by_digest_with_what_shared_memory_and_disks_need() -> None:
    docker = rendered_aws().tree()["docker"]
    assert "@sha256:" in docker["image"]
    assert "--ulimit memlock=-1" in docker["run_options"]
    assert "-v /mnt/kv:/mnt/kv" in docker["run_options"]
    (shm,) = [option for option in docker["run_options"] if option.startswith("--shm-size=")]
    store = max(
        int(found) for found in re.findall(r"--object-store-memory=(\d+)", str(rendered_aws().tree()))
    )
    assert int(shm.removeprefix("--shm-size=").removesuffix("b")) > store
    assert ray_tree(rendered_rack().tree()).get("docker") == {}
    logins = [line for line in rendered_aws().tree()["initialization_commands"] if "docker login" in line]
    assert logins == [
        "aws ecr get-login-password --region us-east-1 | docker login --username AWS --password-stdin "
        "123456789012.dkr.ecr.us-east-1.amazonaws.com"
    ]


def test_the_nvme_script_is_found_on_the_host_with_docker_and_without() -> None:
    (first, *_) = rendered_aws().tree()["initialization_commands"]
    assert shlex.split(first) == [
        "bash",
        "/tmp/ray_tmp_mount/samovar-example/~/samovar/kv-nvme.sh",
        "--no-disks",
        "/mnt/kv",
    ]
    types = rendered_aws("--launch.image=", "--launch.kv-dir=/data/k v").tree()["available_node_types"]
    assert types["base"]["initialization_commands"] == ["bash ~/samovar/kv-nvme.sh '/data/k v'"]
    bare = rendered_aws(given=outputs(pools=pools_with("base", nvme_disks=0))).tree()
    assert "--no-disks" in bare["available_node_types"]["base"]["initialization_commands"][0]


@BOTH
def test_ray_is_in_the_path_of_login_shells(rendered: Any, tmp_path: Path) -> None:
    tree = rendered("--launch.venv=~/v env", '--launch.setup-commands=["touch done"]').tree()
    path_line, touch = tree["setup_commands"]
    assert touch == "touch done"
    for _ in range(2):
        subprocess.run(
            ["bash", "-c", path_line], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=True
        )
    assert (tmp_path / ".bashrc").read_text() == 'export PATH="$HOME/v env/bin:$PATH"\n'
    with pytest.raises(RenderFailed, match=r"launch\.venv"):
        rendered('--launch.venv=/x"; rm -rf /')


def test_the_wheel_is_installed_where_one_is_given() -> None:
    tree = rendered_rack("--launch.wheel=dist/samovar-0.1.0-py3-none-any.whl").tree()
    assert tree["setup_commands"][-1] == (
        "{ test -x ~/samovar-venv/bin/pip || python3 -m venv ~/samovar-venv; } && "
        "~/samovar-venv/bin/pip install --quiet ~/"
        "'samovar/samovar-0.1.0-py3-none-any.whl[documents,knowledge,nixl,otel,postgres,s3]' && "
        "~/samovar-venv/bin/pip install --quiet --force-reinstall --no-deps "
        "~/samovar/samovar-0.1.0-py3-none-any.whl"
    )
    for other in ("--launch.venv=", f"--launch.image={IMAGE}"):
        with pytest.raises(RenderFailed, match=r"launch\.wheel=x\.whl is installed into launch\.venv"):
            rendered_rack("--launch.wheel=x.whl", other)


def test_a_misspelled_key_of_ec2_is_refused() -> None:
    with pytest.raises(ValidationError, match="InstanceTpye"):
        Ec2Node.model_validate({"InstanceTpye": "g6.xlarge"})


@BOTH
def test_no_secret_is_in_the_file(rendered: Any) -> None:
    text = rendered("--auth.server-secret=a-server-secret-of-sixteen").text("")
    assert "a-key-of-sixteen-characters" not in text
    assert "a-server-secret-of-sixteen" not in text


ON_TWO_GPUS = ("--engine.tensor-parallel=2", "--engine.kv-groups=2")


def test_settings_of_the_nodes_are_completed_from_terraform() -> None:
    found = node_settings(aws(), outputs())
    assert found.server.host == "0.0.0.0"
    assert str(found.nvme_dir) == "/mnt/kv/blocks"
    assert (found.tiers.s3.bucket, found.tiers.s3.prefix) == ("samovar-example-kv", "kv")
    assert found.cluster.ray_address == "auto"
    assert found.cluster.replicas_per_node_max == 8
    assert found.launch.name == "samovar-example"
    kept = node_settings(aws("--tiers.s3.bucket=mine", "--cluster.replicas-per-node-max=2"), outputs())
    assert (kept.tiers.s3.bucket, kept.cluster.replicas_per_node_max) == ("mine", 2)
    on_two = node_settings(aws(*ON_TWO_GPUS), outputs())
    assert on_two.cluster.replicas_per_node_max == 4


def test_settings_reach_the_nodes_as_they_are(tmp_path: Path) -> None:
    """`samovar deploy` reads there what was written here."""
    given = node_settings(rack(), None)
    public, secrets = tmp_path / "config.yaml", tmp_path / "secrets.yaml"
    public.write_text(yaml.safe_dump(public_tree(given)))
    secrets.write_text(yaml.safe_dump(secret_tree(given)))
    assert load(public, {}, [], secrets).settings == given
    assert merged(public_tree(given), secret_tree(given)) == given


def test_an_open_endpoint_without_api_keys_is_refused_before_anything_starts() -> None:
    on_nodes = node_settings(
        load("rack", {}, ["--launch.rack.head=10.0.0.1", "--launch.rack.gpus=1"]).settings, None
    )
    with pytest.raises(RenderFailed, match=r"auth\.api_keys is empty"):
        check_complete(on_nodes, {})
    check_complete(on_nodes, secret_tree(rack()))
    with pytest.raises(RenderFailed) as failed:
        check_complete(on_nodes, {"auth": {"api_keys": {"my-team": "tooshort"}}})
    assert "tooshort" not in str(failed.value)


@pytest.mark.parametrize(
    ("settings", "given", "text"),
    [
        (aws, None, "needs --terraform FILE"),
        (rack, outputs(), "Leave out --terraform"),
        (lambda: aws("--launch.name=other"), outputs(), "launch.name=other"),
        (lambda: aws("--launch.ssh.private-key="), outputs(), "launch.ssh.private_key is empty"),
        (aws, outputs(key_name=None), "no key pair"),
        (aws, outputs(pools={"head": pools_with("base")["base"]}), "named `head`"),
        (aws, outputs(pools={"base": pools_with("base", gpus=0)["base"]}), "no pool in Terraform has any"),
        (lambda: aws("--engine.device=cpu"), outputs(), "cluster.replica_cpus=0"),
        (
            lambda: rack(*ON_TWO_GPUS, "--launch.rack.gpus=1"),
            None,
            "engine.tensor_parallel=2 needs as many GPUs in one node, and the largest has 1",
        ),
        (
            lambda: aws(*ON_TWO_GPUS, "--cluster.replicas-per-node-max=3"),
            outputs(),
            "cluster.replicas_per_node_max=3 cannot be kept with engine.tensor_parallel=2",
        ),
        (lambda: rack("--engine.device=cuda", "--launch.rack.gpus=0"), None, "launch.rack.gpus is 0"),
        (lambda: rack("--launch.rack.head="), None, "needs launch.rack.head"),
        (lambda: rack("--launch.rack.head=10.0.0.2"), None, "is also in launch.rack.workers"),
        (lambda: rack('--launch.rack.workers=["a", "a"]'), None, "names a machine twice"),
        (lambda: rack("--launch.rack.workers=[]"), None, "Name workers"),
        (lambda: rack("--launch.rack.workers-min=3"), None, "is more than launch.rack.workers has: 2"),
        (lambda: rack("--launch.rack.workers-min=0"), None, "Set it to 1 or more"),
        (
            lambda: rack("--launch.ssh.proxy-command=x", "--launch.ssh.proxy-by-id=true"),
            None,
            "its machines have no ids",
        ),
    ],
)
def test_what_makes_no_cluster_is_refused_with_the_fix(settings: Any, given: Any, text: str) -> None:
    with pytest.raises(RenderFailed, match=re.escape(text)):
        render(settings(), given, NODE_DIR)


def test_a_rack_in_which_the_head_works_too() -> None:
    file = rendered_rack("--launch.rack.spare-cpus-head=true", "--launch.rack.workers=[]", *KEYS_FLAGS)
    (head, _) = starts(file.tree())
    assert "--num-cpus" not in head
    assert int(re.findall(r"--object-store-memory=(\d+)", head)[0]) > 8 * GIB
    assert "--num-cpus=0" in starts(rendered_rack().tree())[0]
    assert ray_tree(file.tree())["max_workers"] == 0


KEYS_FLAGS = (f"--auth.api-keys={KEYS['SAMOVAR_AUTH__API_KEYS']}",)
