"""Ray Serve's REST API at the dashboard: what is deployed, and what is to be.

A thin shell round Ray's client. Knows nothing of what the applications are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import requests
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from cluster.before_start import StartFailed

NODES_PATH = "/nodes?view=summary"
Application = dict[str, Any]
"""As in Serve's configuration: name, import_path, args, ..."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """What Serve says. `applications`: by name as they were deployed; `status`, `message`: by name as well.

    `replicas`: deployment -> the node ids of those that run; `proxies`: node id -> status; `addresses`: of
    the nodes with a proxy.
    """

    applications: dict[str, Application]
    status: dict[str, str]
    message: dict[str, str]
    replicas: dict[str, list[str]]
    proxies: dict[str, str]
    addresses: dict[str, str]


class ServeApi:
    """`dashboard`: its URL. Ray's client finds the token itself. All methods raise `StartFailed`."""

    def __init__(self, dashboard: str) -> None:
        with _named(dashboard):
            self._client = ServeSubmissionClient(dashboard)
        self._dashboard = dashboard

    def deployed(self) -> Deployed:
        with _named(self._dashboard):
            return deployed_of(self._client.get_serve_details())

    def deploy(self, config: dict[str, Any]) -> None:
        """All that Serve is to serve: applications that are not named end."""
        with _named(self._dashboard):
            self._client.deploy_applications(config)

    def nodes(self) -> dict[str, str]:
        """Node id -> address of each node that is alive."""
        with _named(self._dashboard):
            answer = self._client._do_request("GET", NODES_PATH)
            answer.raise_for_status()
            rows = answer.json()["data"]["summary"]
        raylets = [row["raylet"] for row in rows if row["raylet"].get("state") == "ALIVE"]
        return {raylet["nodeId"]: raylet["nodeManagerAddress"] for raylet in raylets}


def deployed_of(details: dict[str, Any]) -> Deployed:
    """From the answer of GET /api/serve/applications/."""
    rows, proxies = details.get("applications", {}), details.get("proxies", {})
    replicas: dict[str, list[str]] = {}
    for row in rows.values():
        for name, deployment in row.get("deployments", {}).items():
            running = [one for one in deployment.get("replicas", []) if one.get("state") == "RUNNING"]
            replicas.setdefault(name, []).extend(str(one.get("node_id")) for one in running)
    configs = {name: row.get("deployed_app_config") for name, row in rows.items()}
    return Deployed(
        applications={
            name: config for name, config in configs.items() if config and rows[name]["status"] != "DELETING"
        },
        status={name: row["status"] for name, row in rows.items()},
        message={name: row.get("message", "") for name, row in rows.items()},
        replicas=replicas,
        proxies={node: proxy.get("status", "") for node, proxy in proxies.items()},
        addresses={node: str(proxy["node_ip"]) for node, proxy in proxies.items() if proxy.get("node_ip")},
    )


@contextlib.contextmanager
def _named(dashboard: str) -> Iterator[None]:
    try:
        yield
    except (requests.RequestException, ConnectionError) as error:
        raise StartFailed(f"Ray's dashboard at {dashboard} does not answer: {error}") from error
    except RuntimeError as error:  # Ray's client, of any answer but 200
        raise StartFailed(f"Ray Serve at {dashboard} refuses: {error}") from error
