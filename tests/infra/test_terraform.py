"""terraform/ as it is shipped: format, schema, its own tests, and every environment's whole life offline."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samovar.cluster.launch.terraform import parse_outputs
from tests.infra.aws_facts import ENUMS, enum_values, machine, wrong_pools
from tests.infra.conftest import EVERYTHING, var_file
from tests.infra.mirror import ROOT, TREE, Bench
from tests.infra.needs import needs_infra
from tests.infra.secret_scan import secrets_in_state, secrets_in_text

pytestmark = [needs_infra, pytest.mark.timeout(170)]

ENVS = sorted(file.stem for file in (TREE / "envs").glob("*.tfvars"))
MET: dict[str, set[str]] = {}
"""Environment -> which values of ENUMS were met."""


def test_there_are_environments() -> None:
    assert {"dev", "prod"} <= set(ENVS)


def test_the_tree_is_formatted(stack: Bench) -> None:
    stack.run("fmt", "-check", "-recursive", "-diff")


def test_an_ugly_file_is_found(stack: Bench) -> None:
    ugly = stack.tree / "ugly.tf"
    ugly.write_text("locals {\n a=1\n}\n")
    stack.run("fmt", "-check", "-recursive", expect=3)
    ugly.unlink()


def test_the_tree_is_valid(stack: Bench) -> None:
    stack.run("validate")


def test_terraforms_own_tests_pass(stack: Bench) -> None:
    """`terraform test`, with mocks that follow the exact schema."""
    roots = {file.parent.parent for file in stack.tree.rglob("tests/*.tftest.hcl")}
    assert stack.tree in roots, "terraform/tests/*.tftest.hcl are missing"
    for root in sorted(roots):
        folder = str(root.relative_to(stack.tree))
        stack.run("init", folder=folder)
        said = stack.run("test", folder=folder).stdout
        assert re.search(r"Success! [1-9]\d* passed, 0 failed", said), said


@pytest.mark.parametrize("env", [*ENVS, EVERYTHING])
def test_an_environments_whole_life(stack: Bench, env: str) -> None:
    """Plan, apply, nothing left to do, destroy; no secret anywhere, and nothing AWS would refuse by name."""
    file = var_file(env)
    plan = stack.tree.parent / f"{env}.plan"
    said = stack.run("plan", "-detailed-exitcode", f"-out={plan}", file, expect=2).stdout
    said += stack.run("show", "-json", str(plan)).stdout
    said += stack.run("apply", str(plan)).stdout
    try:
        outputs, state = stack.outputs(), stack.state()
        again = stack.run("plan", "-detailed-exitcode", file)
        assert "No changes." in again.stdout
        assert secrets_in_state(state) == []
        assert secrets_in_text(said + json.dumps(outputs)) == []
        assert_contract(outputs)
        assert wrong_pools(outputs["samovar"]["value"]["pools"]) == []
        values = enum_values(state)
        assert [one for one in values if not one.allowed] == []
        MET[env] = {one.kind for one in values}
    finally:
        stack.run("destroy", "-auto-approve", file)
    assert stack.state()["resources"] == []


def test_every_name_list_was_used() -> None:
    """Else a renamed attribute would no longer be compared, and nobody would see it."""
    if EVERYTHING not in MET:
        pytest.skip("runs after test_an_environments_whole_life, in the same process")
    wanted = {f"{kind}.{path}" for kind, paths in ENUMS.items() for path in paths}
    assert wanted - set().union(*MET.values()) == set()


def assert_contract(outputs: dict[str, Any]) -> None:
    """What the cluster renderer is promised; its own model refuses what is missing, wrong or too much."""
    assert not any(one["sensitive"] for one in outputs.values())
    cloud = parse_outputs(outputs, "terraform output -json")
    assert cloud.ssm_prefix == f"/samovar/{cloud.cluster_name}"
    for name in ("head_policy", "worker_policy"):
        assert json.loads(outputs[name]["value"])["Statement"]


def test_the_bootstraps_whole_life(stack: Bench) -> None:
    """The module that makes the state bucket, applied once with local state."""
    region = "-var=region=us-east-1"
    stack.run("init", folder="bootstrap")
    stack.run("validate", folder="bootstrap")
    stack.run("apply", "-auto-approve", region, folder="bootstrap")
    stack.run("plan", "-detailed-exitcode", region, folder="bootstrap")
    bucket = stack.outputs("bootstrap")["state_bucket"]["value"]
    assert f'"{bucket}"' in (TREE / "envs" / "dev.s3.tfbackend").read_text()
    state = stack.state("bootstrap")
    assert secrets_in_state(state) == []
    assert [one for one in enum_values(state) if not one.allowed] == []
    stack.run("destroy", "-auto-approve", region, folder="bootstrap")
    assert stack.state("bootstrap")["resources"] == []


@pytest.fixture
def planted(stack: Bench) -> Iterator[Any]:
    """Plants into a file of the tree, which is as it was afterwards."""
    before: dict[Path, str] = {}

    def plant(name: str, old: str, new: str) -> None:
        file = stack.tree / name
        text = before.setdefault(file, file.read_text())
        assert re.search(old, text), f"nothing to plant into: {old} is not in {name}"
        file.write_text(re.sub(old, new, text, count=1))

    yield plant
    for file, text in before.items():
        file.write_text(text)


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("modules/compute/main.tf", r"http_tokens +=", "http_tokenz =", '"http_tokenz" is not expected'),
        ("modules/storage/main.tf", r"sse_algorithm +=", "sse_algoritm =", '"sse_algoritm" is not expected'),
        ("modules/network/main.tf", r"(aws_vpc\.\w+)\.id", r"\1.ident", "Unsupported attribute"),
    ],
)
def test_an_error_planted_into_the_tree_is_refused(
    stack: Bench, planted: Any, name: str, old: str, new: str, words: str
) -> None:
    planted(name, old, new)
    done = stack.run("validate", expect=1)
    assert words in " ".join(done.stderr.split())


def test_a_value_aws_would_refuse_is_found(stack: Bench, planted: Any) -> None:
    """The schema takes any text for an enum; the lists of botocore do not."""
    planted("modules/compute/main.tf", r'interface_type( +)= "efa"', r'interface_type\1= "eta"')
    stack.run("validate")
    stack.run("apply", "-auto-approve", var_file(EVERYTHING))
    wrong = {(one.kind, one.value) for one in enum_values(stack.state()) if not one.allowed}
    stack.run("destroy", "-auto-approve", var_file(EVERYTHING))
    assert wrong == {("aws_launch_template.network_interfaces.interface_type", "eta")}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpus": 2}, "base: gpus = 2, g6e.12xlarge has 4"),
        ({"nvme_disks": 0}, "base: nvme_disks = 0, g6e.12xlarge has 2"),
        ({"efa_interfaces": 4}, "base: efa_interfaces = 4, g6e.12xlarge has 1"),
        ({"instance_type": "g6e.huge"}, "base: no instance type g6e.huge"),
    ],
)
def test_a_pool_that_declares_what_its_type_has_not_is_found(change: dict[str, Any], said: str) -> None:
    right = {"instance_type": "g6e.12xlarge", "gpus": 4, "nvme_disks": 2, "efa_interfaces": 1}
    assert machine("g6e.12xlarge") == (4, 2, 1)
    assert wrong_pools({"base": right}) == []
    assert wrong_pools({"base": {**right, "efa_interfaces": 0}}) == []
    assert wrong_pools({"base": right | change}) == [said]


def test_the_modules_readmes_are_up_to_date() -> None:
    command = [sys.executable, "-m", "tests.infra.module_readme", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
