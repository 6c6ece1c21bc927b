"""The one-machine EC2 itself: what it says runs, does, and knows its own metadata; and nothing else runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.infra.fake_ec2 import CLOUD_IP, FakeEc2, write_aws_config
from tests.infra.fake_ec2_account import BUCKET, KEY_NAME, Pool, make_account
from tests.infra.fake_ec2_metadata import ADDRESS
from tests.infra.needs import LAB, need, needs_infra
from tests.infra.netlab import Host, Lab
from tests.infra.netlab.sshd import Key
from tests.support.services.service import until

pytestmark = needs_infra

PORT = 8000
REPOSITORY = Path(__file__).parents[2]
BOOT_S = 20.0
WHO = "import boto3; print([b['Name'] for b in boto3.client('s3').list_buckets()['Buckets']])"
NOTICE = f"""
import json, time
from samovar.cache_tiers.actors.cluster_watch import SpotMetadata
notice = SpotMetadata("http://{ADDRESS}", 2.0).notice(time.time())
print(json.dumps(notice and [notice.action, notice.left_s]))
"""


@dataclass
class Cloud:
    lab: Lab
    ec2: FakeEc2
    outputs: dict[str, Any]

    def launch(self) -> Host:
        """A spot instance, seen up."""
        pool = self.outputs["pools"]["spot"]
        launched = self.ec2.client("ec2").run_instances(
            MinCount=1,
            MaxCount=1,
            KeyName=KEY_NAME,
            LaunchTemplate={"LaunchTemplateId": pool["launch_template_id"]},
            SubnetId=pool["subnet_ids"][0],
            IamInstanceProfile={"Arn": self.outputs["worker_instance_profile_arn"]},
            InstanceMarketOptions={"MarketType": "spot"},
        )
        instance_id = launched["Instances"][0]["InstanceId"]
        return until("its host is up", lambda: self.ec2.hosts.get(instance_id), BOOT_S)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    need(*LAB, "sshd", "ssh", "moto")
    with Lab("ec2") as lab, FakeEc2(lab) as ec2:
        key = Key.make(lab.shared / "key")
        pools = {"spot": Pool("c6i.large", "spot", 0, 2)}
        outputs = make_account(ec2, "demo", key.public, pools, port=PORT)["samovar"]["value"]
        yield Cloud(lab, ec2, outputs)


def test_an_instance_is_a_host_that_its_key_opens_and_that_knows_aws(cloud: Cloud) -> None:
    host = cloud.launch()
    ssh = f"ssh -o BatchMode=yes -o StrictHostKeyChecking=no -i /mnt/lab/key root@{host.ip} hostname"
    outside = cloud.lab.boot("outside")
    assert outside.run(ssh).stdout.splitlines()[-1] == host.name
    assert BUCKET in host.run(["python", "-c", WHO]).stdout, "by the credentials in its metadata"
    (instance,) = cloud.ec2.instances()
    assert (instance.id, instance.ip, instance.is_spot) == (host.name, host.ip, True)
    cloud.ec2.terminate(instance.id)
    assert not host.is_up
    assert not cloud.ec2.instances()
    outside.kill()


def test_a_spot_notice_is_seen_on_its_instance_before_the_end(cloud: Cloud) -> None:
    host = cloud.launch()
    see = ["env", f"PYTHONPATH={REPOSITORY}", "python", "-c", NOTICE]
    assert json.loads(host.run(see).stdout) is None
    cloud.ec2.interrupt(host.name, after_s=6)
    action, left_s = json.loads(host.run(see).stdout)
    assert action == "terminate"
    assert 0 < left_s <= 6
    until("it is taken away", lambda: not host.is_up, BOOT_S)


def test_metadata_want_a_token_and_know_only_instances(cloud: Cloud) -> None:
    host, stranger = cloud.launch(), cloud.lab.boot("stranger")
    ask = f"curl -sS -m 5 -o /dev/null -w '%{{http_code}}' http://{ADDRESS}/latest/meta-data/instance-id"
    assert host.run(ask).stdout == "401"
    assert stranger.run(ask).stdout == "404"
    cloud.ec2.terminate(host.name)
    stranger.kill()


def test_the_balancer_sends_to_a_target_that_is_healthy(cloud: Cloud) -> None:
    laptop = cloud.lab.boot("laptop")
    write_aws_config(laptop)
    url = f"http://127.0.0.1:{cloud.lab.forward(laptop, PORT, to=CLOUD_IP)}/health"
    with pytest.raises(httpx.TransportError):
        httpx.get(url, trust_env=False, timeout=10)
    sick, well = cloud.lab.boot("sick"), cloud.lab.boot("well")
    well.run("mkdir srv && echo I am well >srv/health")
    sick.run("mkdir srv")
    for host in (sick, well):
        host.popen(f"cd srv && exec python -m http.server {PORT} >/dev/null 2>&1")
    cloud.ec2.client("elbv2").register_targets(
        TargetGroupArn=cloud.outputs["target_group_arn"],
        Targets=[{"Id": h.ip, "Port": PORT} for h in (sick, well)],
    )

    def answer() -> str:
        try:
            return httpx.get(url, trust_env=False, timeout=10).text
        except httpx.TransportError:  # not yet
            return ""

    assert until("a target is healthy", answer, BOOT_S) == "I am well\n"
