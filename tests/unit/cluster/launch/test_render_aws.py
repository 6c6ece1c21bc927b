"""The cluster file for EC2: its node types against the API's own description, and Ray's bootstrap."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator
from moto.ec2.models.instance_types import INSTANCE_TYPES

from samovar.cluster.launch.terraform import OutputsRefused, parse_outputs, read_outputs
from tests.support.launch_examples import OUTPUTS_FILE, aws, outputs, outputs_tree, pools_with, rendered_aws


def node_types(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = rendered_aws(given=outputs(**changes)).tree()["available_node_types"]
    return found


def run_instances(node_config: dict[str, Any]) -> dict[str, Any]:
    """As Ray turns it into a call."""
    call = copy.deepcopy(node_config)
    subnets = call.pop("SubnetIds", None)
    return call | ({"SubnetId": subnets[0]} if subnets else {}) | {"MinCount": 1, "MaxCount": 1}


@cache
def run_instances_shape() -> Any:
    service = botocore.session.get_session().get_service_model("ec2")
    return service.operation_model("RunInstances").input_shape


def complaints(node_config: dict[str, Any]) -> str:
    report = ParamValidator().validate(run_instances(node_config), run_instances_shape())
    return str(report.generate_report())


@pytest.mark.parametrize("name", node_types())
def test_ec2_knows_every_key(name: str) -> None:
    config = node_types()[name]["node_config"]
    assert complaints(config) == ""
    assert "InstanceTpye" in complaints(config | {"InstanceTpye": "x"})


@pytest.mark.parametrize("name", ["base", "spot", "efa"])
def test_pools_are_what_their_instance_types_are(name: str) -> None:
    pool = outputs().pools[name]
    facts = INSTANCE_TYPES[pool.instance_type]
    disks = facts.get("InstanceStorageInfo", {}).get("Disks", [])
    assert sum(disk["Count"] for disk in disks) == pool.nvme_disks
    assert sum(gpu["Count"] for gpu in facts["GpuInfo"]["Gpus"]) == pool.gpus


def test_ray_makes_nothing_by_itself() -> None:
    """Role, key pair and security group: one that is missing Ray would create, open to the world."""
    for name, kind in node_types().items():
        config = kind["node_config"]
        assert config["IamInstanceProfile"]["Arn"], name
        assert config["KeyName"] == "samovar-example", name
        if name != "efa":
            assert config["SubnetIds"], name
            assert config["SecurityGroupIds"] == ["sg-0123456789abcdef0"], name
    assert rendered_aws().tree()["auth"]["ssh_private_key"]


def test_roles_are_separate() -> None:
    types = node_types()
    assert types["head"]["node_config"]["IamInstanceProfile"]["Arn"].endswith("-head")
    assert types["base"]["node_config"]["IamInstanceProfile"]["Arn"].endswith("-worker")


def test_a_pool_with_its_own_network_names_no_subnet_beside_it() -> None:
    """Ray refuses both together."""
    efa = node_types()["efa"]
    assert "SubnetIds" not in efa["node_config"]
    assert "SecurityGroupIds" not in efa["node_config"]
    assert efa["node_config"]["LaunchTemplate"] == {
        "LaunchTemplateId": "lt-0cccccccccccccccc",
        "Version": "3",
    }
    assert efa["docker"]["worker_run_options"] == ["--device=/dev/infiniband", "--cap-add=IPC_LOCK"]
    assert "docker" not in node_types()["base"]


def test_user_data_is_never_given() -> None:
    assert "UserData" not in json.dumps(rendered_aws().tree())


@pytest.mark.parametrize("name", ["base", "spot", "efa"])
def test_what_ec2_adds_to_a_template_does_not_come_back_to_it(name: str) -> None:
    """Ray copies what a pool does not say from the template, as DescribeLaunchTemplateVersions tells it."""
    template = {"MetadataOptions": {"State": "applied", "HttpTokens": "required"}}
    assert "State" in complaints(template)
    assert complaints(template | node_types()[name]["node_config"]) == ""


def test_nothing_runs_on_the_head() -> None:
    head = node_types()["head"]
    assert head["resources"] == {"CPU": 0}
    assert (head["min_workers"], head["max_workers"]) == (0, 0)
    disk = head["node_config"]["BlockDeviceMappings"][0]
    assert disk["DeviceName"] == "/dev/sda1"
    assert disk["Ebs"]["Encrypted"] is True
    assert head["node_config"]["MetadataOptions"]["HttpTokens"] == "required"
    amazon = rendered_aws("--launch.ssh.user=ec2-user").tree()["available_node_types"]["head"]
    assert amazon["node_config"]["BlockDeviceMappings"][0]["DeviceName"] == "/dev/xvda"


def test_marks_limits_and_idle_times_of_pools() -> None:
    types = node_types()
    assert types["base"]["resources"] == {"kv_nvme": 1}
    assert types["spot"]["resources"] == {"kv_nvme": 4, "kv_spot": 1}
    assert types["efa"]["resources"] == {"kv_nvme": 8, "kv_efa": 32}
    assert types["spot"]["labels"] == {"kv/market": "spot"}
    assert types["spot"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in types["base"]["node_config"]
    assert types["spot"]["idle_timeout_s"] < types["base"]["idle_timeout_s"]
    assert (types["base"]["min_workers"], types["base"]["max_workers"]) == (1, 4)
    assert rendered_aws().max_workers == 10


def test_nodes_are_ended_not_stopped_and_reached_inside() -> None:
    provider = rendered_aws().tree()["provider"]
    assert provider == {
        "type": "aws",
        "region": "us-east-1",
        "cache_stopped_nodes": False,
        "use_internal_ips": True,
    }


def test_a_proxy_over_session_manager() -> None:
    flags = ("--launch.ssh.proxy-command=aws ssm start-session --target %h", "--launch.ssh.proxy-by-id=true")
    auth = rendered_aws(*flags).tree()["auth"]
    assert auth["ssh_proxy_use_node_id"] is True
    assert auth["ssh_proxy_command"].endswith("%h")
    assert "ssh_proxy_use_node_id" not in rendered_aws().tree()["auth"]


def test_the_nodes_join_the_load_balancer_where_there_is_one() -> None:
    first = rendered_aws("--server.port=9000").tree()["worker_start_ray_commands"][0]
    assert "--target-group=arn:aws:elasticloadbalancing:" in first
    assert first.endswith(" --port=9000")
    without = rendered_aws(given=outputs(target_group_arn=None)).tree()["worker_start_ray_commands"][0]
    assert without == "samovar node-setup --region=us-east-1 --ssm-prefix=/samovar/samovar-example"


def test_spot_notices_are_asked_for() -> None:
    assert aws().tiers.node.spot_notice == "aws"


def test_outputs_that_are_none_are_refused(tmp_path: Any) -> None:
    assert read_outputs(OUTPUTS_FILE) == outputs()
    with pytest.raises(OutputsRefused, match="cannot be read"):
        read_outputs(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("Error: no state")
    with pytest.raises(OutputsRefused, match="is no JSON"):
        read_outputs(tmp_path / "text.json")
    with pytest.raises(OutputsRefused, match="has no output `samovar`"):
        parse_outputs({"other": {"value": 1}}, "x.json")
    tree = outputs_tree()
    tree["samovar"]["value"]["pools"] = pools_with("base", market="Spot")
    del tree["samovar"]["value"]["kv"]
    with pytest.raises(OutputsRefused) as refused:
        parse_outputs(tree, "x.json")
    assert "pools.base.market" in str(refused.value)
    assert "kv: Field required" in str(refused.value)
