"""The policies of head and workers, as Terraform makes them, enforced by moto and read by parliament.

moto knows no Conditions and asks for resource "*" everywhere but in S3, so outside S3 only the actions are
put to the test here; which resources and conditions stand beside them is checked by terraform/tests.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pytest
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

from tests.infra import iam_probes as iam
from tests.infra.conftest import var_file
from tests.infra.lint_venv import LintMissing, lint_python
from tests.infra.mirror import Bench
from tests.infra.moto_process import enforce_iam
from tests.infra.needs import cannot_run, needs_infra

pytestmark = [needs_infra, pytest.mark.timeout(170)]

Policy = dict[str, Any]
KNOWN_FINDINGS = {("RESOURCE_MISMATCH", "ec2:RunInstances")}
"""parliament wants all the resources of RunInstances in one statement; AWS advises to split them."""

PARLIAMENT = """
import json, sys
from parliament import analyze_policy_string
found = analyze_policy_string(sys.stdin.read()).findings
print(json.dumps([[one.issue, one.detail] for one in found]))
"""


@pytest.fixture(scope="module")
def outputs(stack: Bench) -> Iterator[dict[str, Any]]:
    """Of the environment prod, applied."""
    stack.run("apply", "-auto-approve", var_file("prod"))
    yield {name: one["value"] for name, one in stack.outputs().items()}
    stack.run("destroy", "-auto-approve", var_file("prod"))


def for_moto(policy: Policy) -> Policy:
    """Resource "*" but in S3 statements, and no conditional denial: moto would deny always."""
    statements = []
    for one in policy["Statement"]:
        if one["Effect"] == "Deny" and "Condition" in one:
            continue
        in_s3 = all(action.startswith("s3:") for action in actions_of(one))
        statements.append(one if in_s3 else {**one, "Resource": "*"})
    return {**policy, "Statement": statements}


def actions_of(statement: Policy) -> list[str]:
    found = statement.get("Action", [])
    return [found] if isinstance(found, str) else found


def allows(policy: Policy, action: str) -> bool:
    return any(
        fnmatchcase(action, pattern)
        for one in policy["Statement"]
        if one["Effect"] == "Allow"
        for pattern in actions_of(one)
    )


@dataclass(frozen=True, slots=True)
class Someone:
    """Who holds a role; `give` changes its policy."""

    url: str
    world: iam.World
    keys: iam.Keys
    client: iam.Client
    give: Callable[[Policy], None]

    def refused(self, policy: Policy, which: Callable[[iam.Client, iam.World], Any]) -> set[str]:
        """Which calls are refused under `policy`."""
        with_policy = for_moto(policy)
        self.give(with_policy)
        enforce_iam(self.url, True)
        try:
            return iam.refused(which(self.client, self.world))
        finally:
            enforce_iam(self.url, False)


@pytest.fixture(scope="module")
def someone(moto_url: str, outputs: dict[str, Any]) -> Someone:
    value = outputs["samovar"]
    setup = iam.clients(moto_url, iam.NOBODY)
    world = iam.build(setup, value["kv"]["bucket"], value["kv"]["prefix"], f"{value['ssm_prefix']}/ray-token")
    keys, give = iam.role_with(setup, "someone")
    return Someone(moto_url, world, keys, iam.clients(moto_url, keys), give)


def policy_of(outputs: dict[str, Any], name: str) -> Policy:
    return json.loads(outputs[name])


def test_the_head_may_do_its_work_and_nothing_more(someone: Someone, outputs: dict[str, Any]) -> None:
    head = policy_of(outputs, "head_policy")
    assert someone.refused(head, iam.probes) == set()
    never = set(iam.never_allowed(someone.client, someone.world))
    assert someone.refused(head, iam.never_allowed) == never


def test_a_worker_moves_kv_blocks_and_launches_nothing(someone: Someone, outputs: dict[str, Any]) -> None:
    worker = policy_of(outputs, "worker_policy")
    of_the_head = {name for name in iam.probes(someone.client, someone.world) if name.startswith("ec2:")}
    assert someone.refused(worker, iam.probes) == of_the_head
    never = set(iam.never_allowed(someone.client, someone.world))
    assert someone.refused(worker, iam.never_allowed) == never


def test_with_no_policy_everything_is_refused(someone: Someone) -> None:
    """Else the tests above would prove nothing."""
    nothing = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "a:B", "Resource": "*"}]}
    assert someone.refused(nothing, iam.probes) == set(iam.probes(someone.client, someone.world))


def test_without_a_statement_exactly_its_calls_fail(someone: Someone, outputs: dict[str, Any]) -> None:
    head = policy_of(outputs, "head_policy")
    names = set(iam.probes(someone.client, someone.world))
    fired = 0
    for dropped in head["Statement"]:
        less = {**head, "Statement": [one for one in head["Statement"] if one is not dropped]}
        expected = {name for name in names if not allows(less, name)}
        assert someone.refused(less, iam.probes) == expected, dropped["Sid"]
        fired += bool(expected)
    assert fired >= 5


def test_without_an_action_exactly_its_call_fails(someone: Someone, outputs: dict[str, Any]) -> None:
    """Also where several statements allow it, each for other resources."""
    head = policy_of(outputs, "head_policy")
    for name in iam.probes(someone.client, someone.world):
        statements = [
            {**one, "Action": [action for action in actions_of(one) if action != name] or ["a:B"]}
            for one in head["Statement"]
        ]
        assert someone.refused({**head, "Statement": statements}, iam.probes) == {name}


def test_rays_own_node_provider_works_under_it(
    someone: Someone, outputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Create, list, tag, terminate: what the autoscaler on the head does."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", someone.url)
    someone.give(for_moto(policy_of(outputs, "head_policy")))
    config = {"region": iam.REGION, "cache_stopped_nodes": False, "aws_credentials": someone.keys}
    provider = AWSNodeProvider(config, outputs["samovar"]["cluster_name"])
    world = someone.world
    node = {"ImageId": world.image, "InstanceType": "g6.xlarge", "SubnetIds": [world.subnet]}
    enforce_iam(someone.url, True)
    try:
        tags = {"ray-node-type": "worker", "ray-node-status": "uninitialized"}
        (made,) = provider.create_node(node, tags, 1)
        assert provider.non_terminated_nodes({}) == [made]
        provider.set_node_tags(made, {"ray-node-status": "up-to-date"})
        assert provider.non_terminated_nodes({"ray-node-status": "up-to-date"}) == [made]
        provider.terminate_node(made)
        assert provider.non_terminated_nodes({}) == []
    finally:
        enforce_iam(someone.url, False)


def findings(policy: str) -> list[tuple[str, str]]:
    """(issue, action or detail) of parliament, without those known."""
    try:
        python = lint_python()
    except LintMissing as problem:
        cannot_run(f"parliament is not there and cannot be installed: {problem}")
    done = subprocess.run(
        [str(python), "-c", PARLIAMENT], input=policy, capture_output=True, text=True, timeout=60, check=True
    )
    found = []
    for issue, detail in json.loads(done.stdout):
        about = detail
        if isinstance(detail, list) and detail and isinstance(detail[0], dict):
            about = detail[0].get("action", str(detail))
        found.append((issue, str(about)))
    return [one for one in found if one not in KNOWN_FINDINGS]


@pytest.mark.timeout(590)
@pytest.mark.parametrize("name", ["head_policy", "worker_policy"])
def test_parliament_finds_nothing(outputs: dict[str, Any], name: str) -> None:
    assert findings(outputs[name]) == []


@pytest.mark.timeout(590)
@pytest.mark.parametrize(
    ("old", "new", "issue"),
    [
        ("ec2:TerminateInstances", "ec2:EndInstances", "UNKNOWN_ACTION"),
        ("/kv/*", "", "RESOURCE_MISMATCH"),
    ],
)
def test_a_planted_mistake_is_found(outputs: dict[str, Any], old: str, new: str, issue: str) -> None:
    policy = outputs["head_policy"]
    assert old in policy
    assert issue in {one for one, _ in findings(policy.replace(old, new))}
