"""EC2 on one machine: moto is the API, and every instance that it says runs is a host of a lab with sshd.

    with Lab("ec2") as lab, FakeEc2(lab) as ec2:
        ec2.client("ec2").run_instances(...)      # seconds later a host is up at its private address
        ec2.interrupt(instance_id, after_s=30)    # a spot notice, and then the end
        ec2.terminate(instance_id)                # behind somebody's back

Images are all alike: the machine's own file system, and a `~/.aws/config` that leads to moto; credentials
come from the instance metadata. SSM, S3 and the load balancer are moto's, too. GPUs are numbers only.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError

from tests.infra.fake_ec2_balancer import balancing
from tests.infra.fake_ec2_metadata import Known, Metadata, serving
from tests.infra.netlab import Host, Lab, LabError
from tests.infra.netlab.shell import BIN, wait_for
from tests.infra.netlab.sshd import start_sshd

logger = logging.getLogger(__name__)

REGION = "eu-central-1"
CLOUD_IP = "10.77.0.2"
PORT = 5000
ENDPOINT = f"http://{CLOUD_IP}:{PORT}"
POLL_S = 0.5
READY_S = 60.0
GONE = ("shutting-down", "terminated", "stopping", "stopped")
MIB = 1024 * 1024


@dataclass(frozen=True)
class Instance:
    """Of what DescribeInstances says, what tests ask. `pool`: the node type with which Ray has tagged it."""

    id: str
    ip: str
    state: str
    kind: str
    zone: str
    is_spot: bool
    profile: str
    key_name: str | None
    cluster: str
    pool: str

    @property
    def is_up(self) -> bool:
        return self.state not in GONE


class FakeEc2:
    """Runs while it is entered. `hosts`: of the instances that are up, by their id."""

    def __init__(self, lab: Lab, nvme_bytes: int = 512 * MIB) -> None:
        self._lab = lab
        self._nvme_bytes = nvme_bytes
        self._metadata = Metadata()
        self._stopped = threading.Event()
        self._cleanup = contextlib.ExitStack()
        self.failure: BaseException | None = None
        self.hosts: dict[str, Host] = {}
        self.booted_s: dict[str, float] = {}

    def __enter__(self) -> FakeEc2:
        with contextlib.ExitStack() as cleanup:
            cloud = self._cloud = self._lab.boot("cloud", ip=CLOUD_IP)
            log = (self._lab.shared / "moto.log").open("w")
            cleanup.callback(log.close)
            moto = [str(BIN / "moto_server"), "-H", "0.0.0.0", "-p", str(PORT)]
            server = cloud.popen(moto, stdout=log, stderr=subprocess.STDOUT)
            self._port = self._lab.forward(cloud, PORT)
            cleanup.enter_context(serving(self._metadata, cloud))
            wait_for("moto answers", lambda: self._answers(server), READY_S)
            self._poller = threading.Thread(target=self._watch, name="fake-ec2", daemon=True)
            self._poller.start()
            cleanup.callback(self._stop)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()
        if self.failure is not None and error is None:
            raise LabError(f"the one-machine EC2 failed: {self.failure}") from self.failure

    # -- what tests do -------------------------------------------------------------------------

    def client(self, service: str, endpoint: str = "") -> Any:
        """boto3's, from the machine; allowed everything. `endpoint`: as seen from somewhere else."""
        return boto3.client(
            service,
            region_name=REGION,
            endpoint_url=endpoint or f"http://127.0.0.1:{self._port}",
            aws_access_key_id="tests",
            aws_secret_access_key="tests",
        )

    def balance(self, target_group_arn: str, port: int) -> None:
        """A load balancer at CLOUD_IP:`port` before that target group, which moto only keeps a list of."""
        elb = self.client("elbv2", ENDPOINT)  # used by a thread in the cloud's network

        def targets() -> list[tuple[str, int]]:
            health = elb.describe_target_health(TargetGroupArn=target_group_arn)
            found = [row["Target"] for row in health["TargetHealthDescriptions"]]
            return [(target["Id"], target["Port"]) for target in found]

        self._cleanup.enter_context(balancing(self._cloud, port, targets))

    def instances(self, *, up: bool = True) -> list[Instance]:
        """Oldest first; `up`: only those that are."""
        reservations = self.client("ec2").describe_instances()["Reservations"]
        rows = [row for reservation in reservations for row in reservation["Instances"]]
        found = [_instance(row) for row in sorted(rows, key=lambda row: row["LaunchTime"])]
        return [one for one in found if one.is_up or not up]

    def terminate(self, instance_id: str) -> None:
        """Ray is told nothing; the host is gone when this returns."""
        self.client("ec2").terminate_instances(InstanceIds=[instance_id])
        wait_for(f"{instance_id} is off", lambda: instance_id not in self.hosts, READY_S)

    def interrupt(self, instance_id: str, after_s: float = 120.0) -> None:
        """AWS wants it back: a notice in its metadata now, its end after so long."""
        known = next(one for one in self._metadata.by_ip.values() if one.instance_id == instance_id)
        known.ends_at = datetime.now(UTC) + timedelta(seconds=after_s)

    # -- the machines behind the API -----------------------------------------------------------

    def _answers(self, server: subprocess.Popen[str]) -> bool:
        if server.poll() is not None:
            raise LabError(f"moto ended: {(self._lab.shared / 'moto.log').read_text()}")
        try:
            self.client("ec2").describe_regions(RegionNames=[REGION])
        except BotoCoreError:  # it is still starting
            return False
        return True

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                self._look()
            except Exception as error:  # whoever waits for a host is told
                if not self._stopped.is_set():
                    logger.exception("the one-machine EC2 stops")
                    self.failure = error
                return

    def _look(self) -> None:
        now = datetime.now(UTC)
        due = [one.instance_id for one in self._metadata.by_ip.values() if one.ends_at and one.ends_at <= now]
        if due:
            self.client("ec2").terminate_instances(InstanceIds=due)
        there = {one.id: one for one in self.instances()}
        for instance_id in [one for one in self.hosts if one not in there]:
            self._metadata.by_ip.pop(self.hosts[instance_id].ip, None)
            self.hosts.pop(instance_id).kill()
        for instance in there.values():
            if instance.id not in self.hosts:
                self._boot(instance)

    def _boot(self, instance: Instance) -> None:
        role = instance.profile.rpartition("/")[2] or "none"
        self._metadata.by_ip[instance.ip] = Known(
            instance.id, instance.kind, REGION, instance.zone, instance.ip, role
        )
        host = self._lab.boot(instance.id, ip=instance.ip, nvme_bytes=self._nvme_bytes)
        write_aws_config(host)
        start_sshd(host, self._public_key(instance.key_name))
        self.hosts[instance.id] = host
        self.booted_s[instance.id] = time.monotonic()

    def _public_key(self, name: str | None) -> str:
        if name is None:
            raise LabError("an instance was launched without a key pair: nobody could log in")
        pairs = self.client("ec2").describe_key_pairs(KeyNames=[name], IncludePublicKey=True)["KeyPairs"]
        return str(pairs[0]["PublicKey"])

    def _stop(self) -> None:
        self._stopped.set()
        self._poller.join()


def write_aws_config(host: Host, credentials: Mapping[str, str] | None = None) -> None:
    """AWS is here. `credentials`: of a person; instances get theirs from the metadata."""
    lines = ["[default]", f"region = {REGION}", f"endpoint_url = {ENDPOINT}"]
    lines += [f"{name} = {value}" for name, value in (credentials or {}).items()]
    host.run("mkdir -p ~/.aws && cat >~/.aws/config", stdin="\n".join(lines) + "\n")


def _instance(row: Mapping[str, Any]) -> Instance:
    tags = {tag["Key"]: tag["Value"] for tag in row.get("Tags", ())}
    return Instance(
        id=row["InstanceId"],
        ip=row["PrivateIpAddress"],
        state=row["State"]["Name"],
        kind=row["InstanceType"],
        zone=row["Placement"]["AvailabilityZone"],
        is_spot=row.get("InstanceLifecycle") == "spot",
        profile=row.get("IamInstanceProfile", {}).get("Arn", ""),
        key_name=row.get("KeyName"),
        cluster=tags.get("ray-cluster-name", ""),
        pool=tags.get("ray-user-node-type", ""),
    )
