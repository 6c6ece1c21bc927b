"""`samovar up` and `down` on AWS, for real but for the cloud: EC2, SSM, S3 and the load balancer are moto's.

One story, as each part needs the one before. It takes minutes, and prints a table of them.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator

import openai
import pytest

from tests.infra.fake_ec2 import CLOUD_IP, FakeEc2, Instance, write_aws_config
from tests.infra.fake_ec2_account import Pool, make_account
from tests.infra.needs import LAB, need, needs_infra
from tests.infra.netlab import Lab
from tests.infra.ray_up import (
    LAUNCH,
    PORT,
    SECRETS,
    SERVICE,
    STEP_S,
    Laptop,
    Timings,
    next_turn,
    turn,
)
from tests.support.services.service import until

pytestmark = [needs_infra, pytest.mark.timeout(1500)]

CLUSTER = "demo"
FLAGS = "--config ~/samovar.yaml --terraform ~/outputs.json"
POOLS = {
    "steady": Pool("c6i.large", "on-demand", min_workers=1, max_workers=1),
    "spot": Pool("c6i.large", "spot", min_workers=0, max_workers=2, idle_timeout_min=0.25),
}
CONFIG = SERVICE | {
    "launch": LAUNCH | {"ssh": {"user": "root", "private_key": "~/.ssh/samovar"}},
    # One replica to a node: the second one needs a second node, and leaves the first one alone.
    "tiers": SERVICE["tiers"] | {"node": {"idle_timeout_s": 5, "spot_notice": "aws", "spot_poll_s": 1}},
    "cluster": {"ray_address": "auto", "replicas": 1, "replica_cpus": 2, "replicas_per_node_max": 1},
}
SPOT_TASK = """
import ray
ray.init(address="auto", log_to_driver=False)
where = ray.remote(num_cpus=0, resources={"kv_spot": 1})(ray.util.get_node_ip_address)
print(ray.get(where.remote()))
"""
NOTICE_S = 40.0
PERSON = {"aws_access_key_id": "a-person", "aws_secret_access_key": "of-that-person"}


class Story:
    """The cloud, the laptop and the users."""

    def __init__(self, lab: Lab, ec2: FakeEc2) -> None:
        self.lab, self.ec2 = lab, ec2
        self.timings = Timings("samovar up, EC2 on one machine")
        self.laptop = Laptop(lab)
        write_aws_config(self.laptop.host, PERSON)
        outputs = make_account(ec2, CLUSTER, self.laptop.key.public, POOLS, port=PORT)
        self.targets_arn = outputs["samovar"]["value"]["target_group_arn"]
        self.laptop.write("outputs.json", outputs)
        self.laptop.write("samovar.yaml", CONFIG)
        self.laptop.write("secrets.yaml", SECRETS, 0o600)

    def nodes(self, pool: str) -> list[Instance]:
        return [one for one in self.ec2.instances() if one.pool == pool]

    def booted_s(self, instance: Instance) -> float:
        """When its host was up, of the monotonic clock."""
        return until("its host is up", lambda: self.ec2.booted_s.get(instance.id)) or 0.0

    def targets(self) -> list[str]:
        """Addresses that the load balancer knows."""
        health = self.ec2.client("elbv2").describe_target_health(TargetGroupArn=self.targets_arn)
        return [row["Target"]["Id"] for row in health["TargetHealthDescriptions"]]

    def up(self) -> None:
        began_s = time.monotonic()
        said = self.laptop.run(f"samovar up {FLAGS} --secrets ~/secrets.yaml")
        up_s = time.monotonic() - began_s
        assert f"Samovar is ready: http://{CLOUD_IP}:{PORT}" in said, "the load balancer"
        ((head,), (worker,)) = self.nodes("head"), self.nodes("steady")
        for name, one in (("head", head), ("on-demand worker", worker)):
            self.timings.add(f"{name}'s instance is up", self.booted_s(one) - began_s)
        self.timings.add("samovar up: ready", up_s)

    def check_no_secrets_lie_about(self) -> None:
        """What everybody may read, on the laptop and on a node."""
        (head,) = self.nodes("head")
        token = self.ec2.hosts[head.id].file("/root/.ray/auth_token").read_text().strip()
        assert len(token) >= 32
        key = SECRETS["auth"]["api_keys"]["team"]
        seen = self.laptop.host.run(
            f"cat ~/.samovar/{CLUSTER}/cluster.yaml ~/.samovar/{CLUSTER}/node/*"
        ).stdout
        for instance in self.ec2.instances():
            node = self.ec2.hosts[instance.id]
            seen += node.run(
                "cat ~/samovar/config.yaml ~/ray_bootstrap_config.yaml; ps axe", check=False
            ).stdout
            assert (
                node.run("stat -c %a ~/samovar/secrets.yaml ~/.ray/auth_token").stdout.split() == ["600"] * 2
            )
        assert "samovar" in seen
        assert token not in seen
        assert key not in seen

    def check_pool_follows_demand(self) -> None:
        """Work that only the spot pool can do, and then none."""
        (head,) = self.nodes("head")
        began_s = time.monotonic()
        task = ["bash", "--login", "-c", f"RAY_AUTH_MODE=token python -c {shlex.quote(SPOT_TASK)}"]
        said = self.ec2.hosts[head.id].run(task, timeout_s=STEP_S).stdout
        ended_s = time.monotonic()
        (spot,) = self.nodes("spot")
        assert spot.is_spot
        assert spot.ip in said
        self.timings.add("a task wants spot: its instance is up", self.booted_s(spot) - began_s)
        self.timings.add("... and the task is done", ended_s - began_s)
        until("the idle spot instance is gone", lambda: not self.nodes("spot"), STEP_S)
        self.timings.add("... and the idle instance is gone", time.monotonic() - ended_s)

    def check_load_buys_spot(self) -> None:
        """Two replicas do not fit on the on-demand pool."""
        began_s = time.monotonic()
        self.laptop.run(f"samovar up {FLAGS} --cluster.replicas 2")
        (spot,), (steady,) = self.nodes("spot"), self.nodes("steady")
        assert spot.is_spot
        assert not steady.is_spot
        self.timings.add("two replicas: a spot instance is up", self.booted_s(spot) - began_s)
        self.timings.add("... and both serve", time.monotonic() - began_s)

    def check_spot_notice(self, url: str) -> None:
        """AWS wants it back: nobody's turn fails until it is gone, and there is another one."""
        (before,) = self.nodes("spot")
        began_s = time.monotonic()
        self.ec2.interrupt(before.id, NOTICE_S)
        turns = 0
        while before.id in {one.id for one in self.nodes("spot")}:
            turn(url, f"Is it {turns} already?")
            turns += 1
            assert time.monotonic() - began_s < STEP_S
        self.timings.add(
            f"spot notice of {NOTICE_S:.0f} s: gone, {turns} turns meanwhile", time.monotonic() - began_s
        )
        until("there is another one", lambda: self.nodes("spot"), STEP_S)
        (after,) = self.nodes("spot")
        self.timings.add("... and the instance that replaces it is up", self.booted_s(after) - began_s)

    def check_lost_instance(self, url: str) -> None:
        """Somebody ends it behind Ray's back."""
        (before,) = self.nodes("steady")
        began_s = time.monotonic()
        self.ec2.terminate(before.id)
        next_turn(url, "Is anybody there?")
        self.timings.add("instance terminated: the next turn is answered", time.monotonic() - began_s)
        until("another one is launched", lambda: self.nodes("steady"), STEP_S)
        (after,) = self.nodes("steady")
        assert after.id != before.id
        self.timings.add("... and the instance that replaces it is up", self.booted_s(after) - began_s)


@pytest.fixture
def story() -> Iterator[Story]:
    need(*LAB, "sshd", "ssh", "rsync", "moto")
    with Lab("aws") as lab, FakeEc2(lab) as ec2:
        story = Story(lab, ec2)
        yield story
        story.timings.show()


def test_from_an_empty_account_to_a_chat_and_back(story: Story) -> None:
    ec2, timings = story.ec2, story.timings
    story.up()
    url = story.laptop.url_of(CLOUD_IP)
    with timings.measured("first chat turn"):
        turn(url, "Who are you?")
    with pytest.raises(openai.AuthenticationError):
        turn(url, "And who am I?", api_key="somebody-elses-key-here")
    story.check_no_secrets_lie_about()
    story.check_pool_follows_demand()
    story.check_load_buys_spot()
    turn(url, "Is it busy?")
    story.check_spot_notice(url)
    story.check_lost_instance(url)

    with timings.measured("samovar down"):
        said = story.laptop.run(f"samovar down {FLAGS}")
    assert "All machines and processes of the cluster have ended" in said
    assert not ec2.instances()
    until("their machines are off", lambda: not ec2.hosts, 10)
    assert not story.targets()
    assert [process.cmdline() for process in story.laptop.host.processes()] == []
