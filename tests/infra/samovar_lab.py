"""A Samovar cluster on the hosts of a lab: a head, workers with one replica each, an S3 server.

What `samovar up` runs on a machine runs here on a host: the same variables, the same `samovar deploy`.
Knows no faults: those are the tests'.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml

from samovar.cluster.cli.main import SECRETS_FILE
from samovar.cluster.launch.commands import gcs_environment, node_environment
from samovar.configs.loader import load
from samovar.configs.sections import MIB
from samovar.configs.settings import Settings
from tests.infra.netlab import Host, Lab, LabError
from tests.support.services.guests import Guests
from tests.support.services.service import for_served_dtype, is_moving, until

KEY = "a-key-of-the-team-in-the-lab"
ADMIN_KEY = "an-admin-key-in-the-lab"
TOKEN = "0123456789abcdef" * 4
S3_KEYS = ("lab-access-key", "lab-secret-key")
SECRETS = {
    "auth": {"api_keys": {"team": KEY}, "admin_key": ADMIN_KEY, "server_secret": "a-secret-of-the-lab-only"},
    "tiers": {"s3": {"access_key_id": S3_KEYS[0], "secret_access_key": S3_KEYS[1]}},
}
S3_PORT, GCS_PORT, HTTP_PORT = 9000, 6379, 8000
BUCKET = "kv"
REPLICAS = 2
START_S = 300.0
STORE_BYTES = 448 * MIB
VOLUME = "/mnt/lab/gcs"
"""Where GCS keeps its state: as a network volume that another machine can have when the head's is lost."""
MARK = "FOUND "
NODES_SCRIPT = f"""
import json, ray
ray.init(address="auto", log_to_driver=False)
alive = {{row["NodeManagerAddress"]: row["NodeID"] for row in ray.nodes() if row["Alive"]}}
print("{MARK}" + json.dumps(alive))
"""
REPLICAS_SCRIPT = f"""
import json
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
details = ServeSubmissionClient("http://127.0.0.1:8265").get_serve_details()
rows = [
    row
    for app in details["applications"].values()
    for row in app["deployments"].get("Replica", {{}}).get("replicas", ())
]
print("{MARK}" + json.dumps({{row["replica_id"]: row["node_id"] for row in rows}}))
"""


def settings_tree(store_ip: str, **cluster: object) -> dict[str, Any]:
    """Small enough for many replicas on two cores. Chat goes to all tiers, so that S3 is soon up to date."""
    everywhere = {"write_behind": ["nvme", "s3"]}
    return {
        "server": {"host": "0.0.0.0", "port": HTTP_PORT, "start_timeout_s": START_S},
        # The slower step: the native one computes short prompts sooner than a peer is thought to bring them.
        "engine": {
            "threads": 1,
            "device": "cpu",
            "step": "lean",
            "pool_bytes_max": for_served_dtype(64 * MIB, "lean"),
        },
        "cluster": {
            "ray_address": "auto",
            "replicas": REPLICAS,
            "replicas_per_node_max": 1,
            "replica_cpus": 1,
            **cluster,
        },
        "limits": {"reply_memory_bytes_max": 0},
        "tiers": {
            "cpu": {"bytes_max": for_served_dtype(192 * MIB, "lean")},
            "nvme": {"dir": "/mnt/kv/samovar", "bytes_max": for_served_dtype(192 * MIB, "lean")},
            "s3": {"bucket": BUCKET, "endpoint": f"http://{store_ip}:{S3_PORT}", "region": "lab"},
            "profiles": {"chat": everywhere},
            "audit_share": 0,
            # Two cores for all of it: what is late here is not what is tested. A lookup has time for peers
            # that do not answer, and for a look at S3 after that.
            **{"lookup_s_max": 10, "lookup_share": 100, "lookup_idle_share": 1},
            "hedge_slack_s": 5,
            "peer": {"lookup_s_max": 2, "pull_s_max": 30},
        },
        "launch": {
            "up_timeout_s": START_S,
            "health": {"initial_delay_ms": 1000, "period_ms": 500, "timeout_ms": 1000, "failures": 3},
            "gcs": {"storage": "rocksdb", "dir": VOLUME},
        },
    }


class SamovarLab(Guests):
    """`head` has the ingress; `workers` by name. Requests come in by the head's proxy at first."""

    def __init__(self, lab: Lab, **cluster: object) -> None:
        self.lab = lab
        # All that both workers write behind, in whichever dtype: it holds what nobody evicts.
        self.store = lab.boot("store", nvme_bytes=for_served_dtype(2048 * MIB, "lean"))
        self._start_s3()
        self._tree = settings_tree(self.store.ip, **cluster)
        self.settings = self._settings()
        self.head = lab.boot("head")
        self.workers: dict[str, Host] = {}
        self.enter_at(self.head)

    # -- what runs -------------------------------------------------------------------------------

    def start_head(self) -> None:
        self.prepare(self.head)
        gcs_dir = self.settings.launch.gcs.dir
        self.head.run(f"mkdir -p -m 0700 {gcs_dir}")
        flags = f"--head --port={GCS_PORT} --num-cpus=0 --dashboard-host=127.0.0.1"
        environment = node_environment(self.settings) | gcs_environment(self.settings.launch)
        self._ray(self.head, flags, environment)

    def start_worker(self, name: str) -> Host:
        """A new host, or Ray on one that is up."""
        host = self.workers.get(name)
        if host is None or not host.is_up:
            host = self.workers[name] = self.lab.boot(name, nvme_bytes=512 * MIB)
            self.prepare(host)
        self._ray(host, f"--address={self.head.ip}:{GCS_PORT} --num-cpus=1", node_environment(self.settings))
        return host

    def restart_worker(self, name: str) -> None:
        """Ray anew on a host that is up, as a supervisor does. Its files are what they were."""
        self.workers[name].run("ray stop --force", self._driver(), timeout_s=90)
        self.start_worker(name)

    def lose(self, name: str) -> None:
        """Power off."""
        self.workers.pop(name).kill()

    def replace_head(self) -> None:
        """Another machine with the lost head's address and volume, and Ray on it."""
        self.head = self.lab.boot("head", self.head.ip)
        self.start_head()

    def enter_at(self, host: Host) -> None:
        """From now on requests come in by that host's proxy."""
        self.url = f"http://127.0.0.1:{self.lab.forward(host, HTTP_PORT)}"
        self._clients.clear()

    def deploy(self, **settings: object) -> str:
        """What `samovar deploy` says. Raises LabError with it, when it fails."""
        flags = [f"--{name.replace('__', '.')}={value}" for name, value in settings.items()]
        command = ["samovar", "deploy", "--config=/root/samovar/config.yaml", *flags]
        return self.head.run(shlex.join(command), self._driver(), timeout_s=START_S + 60).stdout

    def ray(self, command: str, timeout_s: float = 60.0) -> str:
        """A command of Ray's, or any, on the head."""
        return self.head.run(command, self._driver(), timeout_s=timeout_s).stdout

    def drain(self, node_id: str, seconds: float) -> None:
        """As a spot notice does: it is to go away, in so many seconds."""
        self.ray(
            f"ray drain-node --address={self.head.ip}:{GCS_PORT} --node-id={node_id} "
            "--reason=DRAIN_NODE_REASON_PREEMPTION --reason-message=test "
            f"--deadline-remaining-seconds={int(seconds)}"
        )

    # -- what it says about itself ---------------------------------------------------------------

    def openai(self, key: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or KEY, max_retries=0, timeout=60)

    def stats(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False) as client:
            found: dict[str, Any] = client.get("/cache/stats").raise_for_status().json()
        return found

    def node_ids(self) -> dict[str, str]:
        """Worker's name -> its node's id, of nodes that are alive."""
        said = self.ray(shlex.join(["python", "-c", NODES_SCRIPT]))
        by_ip = json.loads(said.rpartition(MARK)[2])
        return {name: by_ip[host.ip] for name, host in self.workers.items() if host.ip in by_ip}

    def replica_nodes(self) -> dict[str, str]:
        """Replica's id -> the id of its node."""
        said = self.ray(shlex.join(["python", "-c", REPLICAS_SCRIPT]))
        found: dict[str, str] = json.loads(said.rpartition(MARK)[2])
        return found

    def replicas(self) -> list[str]:
        """Ids of the replicas that answer."""
        return [row["replica_id"] for row in self.stats()["replicas"]]

    def wait_for_replicas(self, count: int) -> None:
        def are_up() -> bool:
            with contextlib.suppress(httpx.HTTPError):  # the ingress may be starting
                return len(self.replicas()) == count
            return False

        until(f"{count} replicas answer", are_up, START_S)

    def is_settled(self) -> bool:
        """Nothing is on its way from or to a tier of a node. All have to have answered."""
        stats = self.stats()
        if min(len(stats["nodes"]), len(stats["replicas"])) < REPLICAS:
            return False
        if any(is_moving(node) for node in stats["nodes"]):
            return False
        return not any(row["staged_bytes"] or row["running"] for row in stats["replicas"])

    def settle(self) -> None:
        until("all is stored", self.is_settled, 60)

    # -- hosts -----------------------------------------------------------------------------------

    def _settings(self) -> Settings:
        path = self.lab.shared / "config.yaml"
        path.write_text(yaml.safe_dump(self._tree))
        secrets = self.lab.shared / "secrets.yaml"
        secrets.touch(mode=0o600)
        secrets.write_text(yaml.safe_dump(SECRETS))
        return load(path, {}, [], secrets).settings

    def prepare(self, host: Host) -> None:
        """What `samovar node-setup` leaves on a node."""
        secrets = Path("/root") / SECRETS_FILE.relative_to("~")
        host.run(
            f"mkdir -p {secrets.parent} /root/.ray && umask 077 && printf %s {TOKEN} >/root/.ray/auth_token "
            f"&& cp /mnt/lab/config.yaml /mnt/lab/secrets.yaml {secrets.parent} && chmod 600 {secrets}"
        )

    def _ray(self, host: Host, flags: str, environment: dict[str, str]) -> None:
        host_flags = f"--node-ip-address={host.ip} --object-store-memory={STORE_BYTES} --disable-usage-stats"
        command = f"ray start {flags} {host_flags}"
        try:
            host.run(command, environment, timeout_s=120)
        except LabError as error:
            # Ray gives a raylet 30 s, whatever runs beside it. A supervisor starts it again.
            if "timed out during startup" not in str(error):
                raise
            host.run("ray stop --force", environment, timeout_s=90)
            host.run(command, environment, timeout_s=120)

    def _driver(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token"}

    def _start_s3(self) -> None:
        self.store.run(f"mkdir -p /mnt/kv/s3/{BUCKET}")
        self._s3 = self.store.popen(
            f"rclone serve s3 --addr {self.store.ip}:{S3_PORT} --auth-key {','.join(S3_KEYS)} /mnt/kv/s3",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port = self.lab.forward(self.store, S3_PORT, to=self.store.ip)

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://127.0.0.1:{port}", trust_env=False).status_code > 0
            return False

        until("the S3 server answers", answers)


@contextlib.contextmanager
def samovar_lab(name: str, workers: int, **cluster: object) -> Iterator[SamovarLab]:
    """Ready: a replica on each worker. Prints how long that took."""
    with Lab(name) as lab:
        began_s = time.monotonic()
        samovar = SamovarLab(lab, replicas=workers, **cluster)
        samovar.start_head()
        for number in range(1, workers + 1):
            samovar.start_worker(f"w{number}")
        up_s = time.monotonic() - began_s
        print(samovar.deploy())
        print(f"hosts and Ray {up_s:.1f} s, deployed {time.monotonic() - began_s - up_s:.1f} s")
        yield samovar
