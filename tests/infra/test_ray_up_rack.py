"""`samovar up` and `down` on machines of one's own, over real SSH: a head and two workers, one of them spare.

It takes minutes, and prints a table of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest

from tests.infra.needs import LAB, need, needs_infra
from tests.infra.netlab import Host, Lab
from tests.infra.netlab.sshd import start_sshd
from tests.infra.ray_up import (
    LAUNCH,
    MIB,
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

CLUSTER = "rack"
FLAGS = "--config ~/samovar.yaml"
UP = f"samovar up {FLAGS} --secrets ~/secrets.yaml"
OURS = r"raylet|gcs_server|ray::|samovar|dashboard|monitor"


class Rack:
    """The machines, the laptop and the users."""

    def __init__(self, lab: Lab) -> None:
        self.timings = Timings("samovar up, a rack")
        self.laptop = Laptop(lab)
        self.head, self.one, self.two = (
            lab.boot(name, nvme_bytes=512 * MIB) for name in ("head", "one", "two")
        )
        self.machines = (self.head, self.one, self.two)
        for machine in self.machines:
            start_sshd(machine, self.laptop.key.public)
        self.laptop.write("samovar.yaml", self._config())
        self.laptop.write("secrets.yaml", SECRETS, 0o600)

    def _config(self) -> dict[str, object]:
        rack = {"head": self.head.ip, "workers": [self.one.ip, self.two.ip], "workers_min": 1}
        launch = {
            "name": CLUSTER,
            "provider": "rack",
            "rack": rack,
            "ssh": {"user": "root", "private_key": "~/.ssh/samovar"},
            "idle_timeout_min": 0.25,
        }
        # One replica to a machine: the second one needs the second machine, and leaves the first one alone.
        cluster = {"ray_address": "auto", "replicas": 1, "replica_cpus": 2, "replicas_per_node_max": 1}
        return SERVICE | {"launch": LAUNCH | launch, "cluster": cluster}

    def workers(self) -> list[Host]:
        """Those on which Ray runs."""
        return [machine for machine in (self.one, self.two) if machine.processes("raylet/raylet")]

    def raylets(self) -> set[int]:
        """Their process ids, on all machines."""
        return {process.pid for machine in self.machines for process in machine.processes("raylet/raylet")}


@pytest.fixture
def rack() -> Iterator[Rack]:
    need(*LAB, "sshd", "ssh", "rsync")
    with Lab("rack") as lab:
        rack = Rack(lab)
        yield rack
        rack.timings.show()


def test_from_bare_machines_to_a_chat_and_back(rack: Rack) -> None:
    timings = rack.timings
    with timings.measured("samovar up: ready"):
        said = rack.laptop.run(UP)
    assert f"Samovar is ready: http://{rack.head.ip}:" in said
    assert rack.workers() == [rack.one], "one is always up, the other is spare"
    raylets = rack.raylets()
    url = rack.laptop.url_of(rack.head.ip)
    with timings.measured("first chat turn"):
        turn(url, "Who are you?")
    with pytest.raises(openai.AuthenticationError):
        turn(url, "And who am I?", api_key="somebody-elses-key-here")

    # Two replicas do not fit: the spare machine joins.
    began_s = time.monotonic()
    rack.laptop.run(f"{UP} --cluster.replicas 2")
    assert rack.workers() == [rack.one, rack.two]
    assert raylets < rack.raylets(), "Ray went on where it ran"
    timings.add("two replicas serve, on two machines", time.monotonic() - began_s)
    turn(url, "Is it busy?")

    # One is enough again: a machine is idle, and let go.
    began_s = time.monotonic()
    rack.laptop.run(UP)
    until("the idle machine is let go", lambda: len(rack.workers()) == 1, STEP_S)
    timings.add("one replica again, and the idle machine is let go", time.monotonic() - began_s)
    next_turn(url, "Is it quiet?")

    with timings.measured("samovar down"):
        said = rack.laptop.run(f"samovar down {FLAGS}")
    assert "All machines and processes of the cluster have ended" in said
    for machine in rack.machines:
        assert [process.cmdline() for process in machine.processes(OURS)] == []
        for secret in (".ray/auth_token", "samovar/secrets.yaml", "samovar/ray-token"):
            assert not machine.file(f"/root/{secret}").exists()
