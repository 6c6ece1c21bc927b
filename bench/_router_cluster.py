"""A look into the Ray cluster of a running `samovar serve`, and a replica more or less.

There is no command for either yet, so this attaches to the cluster as a driver of its own:
`python -m bench._router_cluster ADDRESS` reads one command a line and answers each with a line of JSON, the
replicas that serve by their pids. `scale N` says first how many there should be from now on; `pids` nothing.
Deploying the application again with another number would restart every replica and the ingress (Serve gives
each deployment a new code version), so this calls what Serve's own scaling endpoint calls behind its opt-in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.services.service import Service

REPLICAS = "Replica"
"""The deployment's name, in whichever application it is."""

GCS_FLAG = "--gcs-address="
ANSWER_S = 30.0


def address_of(service: Service) -> str:
    """`host:port` of the cluster that this service has started."""
    for process in service.processes():
        for argument in process.cmdline():
            if argument.startswith(GCS_FLAG):
                return argument.removeprefix(GCS_FLAG)
    raise RuntimeError("the service has no raylet")


class Cluster:
    """Commands to the cluster of a service, through a process that stays attached to it."""

    def __init__(self, service: Service) -> None:
        command = [sys.executable, "-m", "bench._router_cluster", address_of(service)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
            env={
                **os.environ,
                "RAY_AUTH_MODE": "token",  # which a cluster that `ray.init` starts has by default
                # Else Ray looks for 127.0.0.1 at this machine's other address, where nobody listens.
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            },
        )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # it holds nothing that somebody needs
        self._process.communicate()

    def pids(self) -> dict[str, int]:
        """Replica id -> pid, of those that serve."""
        return dict(self._ask("pids"))

    def scale(self, replicas: int) -> None:
        self._ask(f"scale {replicas}")

    def _ask(self, command: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the attached process ended at `{command}`: its reason is above")
        return json.loads(line)


def _replicas(controller: Any) -> tuple[str, list[dict[str, Any]]]:
    """The application that the replicas are in, and what Serve knows of each."""
    import ray

    details = ray.get(controller.get_serve_instance_details.remote(), timeout=ANSWER_S)
    for name, application in details["applications"].items():
        if REPLICAS in application["deployments"]:
            return name, application["deployments"][REPLICAS]["replicas"]
    raise RuntimeError("no application has replicas")


def _pids(controller: Any) -> dict[str, int]:
    _, replicas = _replicas(controller)
    return {replica["replica_id"]: replica["pid"] for replica in replicas if replica["state"] == "RUNNING"}


def _scale(controller: Any, replicas: int) -> None:
    import ray
    from ray.serve._private.common import DeploymentID

    application, _ = _replicas(controller)
    deployment = DeploymentID(name=REPLICAS, app_name=application)

    def set_target(own: Any) -> None:  # by value: the controller does not know this module
        own.deployment_state_manager.set_target_num_replicas(deployment, replicas)

    ray.get(controller.__ray_call__.remote(set_target), timeout=ANSWER_S)


def main(argv: list[str]) -> int:
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    (address,) = argv
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    for line in sys.stdin:
        name, *numbers = line.split()
        if name == "scale":
            _scale(controller, int(numbers[0]))
        print(json.dumps(_pids(controller)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
