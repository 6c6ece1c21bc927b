"""Runs `samovar deploy`: sends a running cluster's applications to Ray Serve and waits until they serve.

`serve/rollout.py` sets the order, as it does for `samovar serve`. Serve's configuration is a whole list of
applications, so each step sends one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import requests
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.serve.config import HTTPOptions
from rich.console import Console
from rich.table import Table

from samovar.cluster.deploy.builders import AppArgs, read_secrets, secrets_digest
from samovar.cluster.errors import StartFailed
from samovar.cluster.serve.environment import application_environment
from samovar.cluster.serve.graph import model_app_name, serve_logs
from samovar.cluster.serve.preflight import check_certificate, check_extras, enter_tls
from samovar.cluster.serve.ray_cluster import asks_for_token, close_token, refuse_open_cluster, require_token
from samovar.cluster.serve.rollout import (
    EVERY_INTERFACE,
    FRONT_APP,
    INGRESS_DEPLOYMENT,
    Patience,
    exchange,
    http_options,
    is_ours,
    not_running,
    unhealthy_here,
)
from samovar.configs.fields import public_tree, section_keys
from samovar.configs.settings import ServerSettings, Settings
from samovar.replicas.messages import REPLICA_DEPLOYMENT
from samovar.replicas.model import describe_model, ensure_model, pinned

NODES_PATH = "/nodes?view=summary"
Application = dict[str, Any]
"""An entry of Serve's configuration: name, import_path, args, ..."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """Serve's report. `applications`: by name, as they were deployed; `status`, `message`: by name.

    `replicas`: deployment -> node ids of the running ones; `proxies`: node id -> status; `addresses`: of the
    nodes with a proxy. `listens`: what proxies were told, else Serve's defaults hold; None: there are none.
    """

    applications: dict[str, Application]
    status: dict[str, str]
    message: dict[str, str]
    replicas: dict[str, list[str]]
    proxies: dict[str, str]
    addresses: dict[str, str]
    listens: dict[str, Any] | None


class ServeApi:
    """Calls Ray Serve's REST API at the dashboard. All methods raise `StartFailed`.

    `dashboard`: its URL. Ray's client finds the token itself.
    """

    def __init__(self, dashboard: str) -> None:
        with _named(dashboard):
            self._client = ServeSubmissionClient(dashboard)
        self._dashboard = dashboard

    def deployed(self) -> Deployed:
        with _named(self._dashboard):
            return deployed_of(self._client.get_serve_details())

    def deploy(self, config: dict[str, Any]) -> None:
        """Set everything that Serve serves: applications that are not listed end."""
        with _named(self._dashboard):
            self._client.deploy_applications(config)

    def nodes(self) -> dict[str, str]:
        """Return node id -> address of each node that is alive."""
        with _named(self._dashboard):
            answer = self._client._do_request("GET", NODES_PATH)
            answer.raise_for_status()
            rows = answer.json()["data"]["summary"]
        raylets = [row["raylet"] for row in rows if row["raylet"].get("state") == "ALIVE"]
        return {raylet["nodeId"]: raylet["nodeManagerAddress"] for raylet in raylets}


def deployed_of(details: dict[str, Any]) -> Deployed:
    """Parse the answer of GET /api/serve/applications/."""
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
        listens=details.get("http_options"),
    )


@contextlib.contextmanager
def _named(dashboard: str) -> Iterator[None]:
    try:
        yield
    except (requests.RequestException, ConnectionError) as error:
        raise StartFailed(f"Ray's dashboard at {dashboard} does not answer: {error}") from error
    except RuntimeError as error:  # Ray's client raises it for any status but 200
        raise StartFailed(f"Ray Serve at {dashboard} refuses: {error}") from error


def deploy(settings: Settings, secrets_file: Path, console: Console) -> str:
    """Deploy, block until it serves, and return the URL. Raises `StartFailed`, `ModelRefused`."""
    refuse_unfit(settings)
    check_extras(settings)
    check_certificate(settings.server)
    enter_tls(settings.cluster)
    dashboard = settings.cluster.dashboard
    require_token()
    with httpx.Client(trust_env=False) as stranger:
        refuse_open_cluster(dashboard, asks_for_token(dashboard, stranger))
    warning = close_token(os.environ, make=False)
    if warning:
        console.print(f"samovar: {warning}", style="yellow", highlight=False, soft_wrap=True)
    api = ServeApi(dashboard)
    secret = settings.auth.server_secret
    if secret is None:
        raise StartFailed(
            "auth.server_secret is empty: nodes that each generate one could not use each other's blocks. "
            f"Put one into {secrets_file} on every node (`openssl rand -hex 32` makes one)"
        )
    model_dir = ensure_model(settings.model)
    card = describe_model(settings, model_dir)
    # A node that joins next week gets the commit that is served now, whatever the branch is then.
    settings = settings.model_copy(update={"model": pinned(settings.model, model_dir)})
    wanted = applications(
        settings,
        model_app_name(settings, card.fingerprint),
        secrets_file,
        secrets_digest(read_secrets(secrets_file), secret.get_secret_value()),
    )
    patience = Patience(
        settings.launch.up_timeout_s,
        "launch.up_timeout_s",
        lambda what: console.print(f"waiting: {what}", highlight=False, soft_wrap=True),
    )
    running = api.deployed()
    refuse_other_address(running.listens, settings.server)
    now = running.applications
    if old := stale_tiers(now, wanted):
        console.print(f"samovar: {old}", style="yellow", highlight=False, soft_wrap=True)
    exchange(now, {**of_others(now), **wanted}, ServeRest(api, settings), patience.wait)
    patience.wait(lambda: unhealthy_here(settings.server))
    deployed = api.deployed()
    nodes = deployed.addresses | api.nodes()  # the dashboard's node list lags behind
    console.print(nodes_table(nodes, deployed))
    return url_of(settings, nodes, deployed)


LISTENS = {
    "host": "server.host",
    "port": "server.port",
    "ssl_certfile": "server.tls_certificate",
    "ssl_keyfile": "server.tls_key",
    "ssl_ca_certs": "server.tls_client_ca",
}
"""Serve's options that it reads once, and only warns of in its log when they change -> our setting."""


def refuse_other_address(now: Mapping[str, Any] | None, server: ServerSettings) -> None:
    """Raise `StartFailed` if the proxies that run listen otherwise: it would be waited for in vain.

    `now`: see `Deployed.listens`.
    """
    if now is None:
        return
    wanted, own = http_options(server), HTTPOptions()
    for option, key in LISTENS.items():
        runs = now.get(option, getattr(own, option))
        if runs != wanted.get(option):
            raise StartFailed(
                f"{key}={wanted.get(option)} would not be used: the HTTP proxies that run were started with "
                f"{runs}. Leave it as it was, or start Ray again on every node (`samovar down` "
                "and `samovar up`)"
            )


def url_of(settings: Settings, nodes: Mapping[str, str], deployed: Deployed) -> str:
    """Return the public URL: any node's proxy would do; the one on the ingress's node is the nearest."""
    server = settings.server
    ingresses = [nodes[node] for node in deployed.replicas.get(INGRESS_DEPLOYMENT, ()) if node in nodes]
    host = ingresses[0] if ingresses and server.host in EVERY_INTERFACE else server.host
    return server.url_at(host)


def refuse_unfit(settings: Settings) -> None:
    """Raise `StartFailed` for settings that apply to a single machine only."""
    if settings.cluster.ray_address == "local":
        raise StartFailed(
            "cluster.ray_address is `local`, which is for `samovar serve`. To deploy to a running cluster "
            "set it to `auto` (the presets aws and rack do)"
        )
    if settings.models:
        raise StartFailed(
            f"models has {', '.join(settings.models)}: `samovar deploy` deploys one model. Leave them out, "
            "or serve several by `samovar serve` with cluster.ray_address=auto"
        )
    if settings.engine.device == "auto":
        raise StartFailed(
            "engine.device is `auto`, but other nodes may have GPUs that this node does not. Give "
            "--engine.device cuda or cpu"
        )


def applications(
    settings: Settings, model_app: str, secrets_file: Path, digest: str
) -> dict[str, Application]:
    """Return Serve's configuration of both applications, in the order in which they start.

    The number of replicas is outside the builders' arguments, so that changing it restarts none. The launch
    section is not passed at all.
    """
    tree = {name: part for name, part in public_tree(settings).items() if name != "launch"}
    scaling, cluster = settings.cluster.autoscaling, settings.cluster
    is_count = cluster.replicas_per_node_max is not None or cluster.replica_cpus > 0
    if is_count and not scaling.enabled:  # else it says how many share a node, or is the initial number
        tree["cluster"] = tree["cluster"] | {"replicas": 1}
    args = AppArgs(settings=tree, secrets_file=secrets_file, secrets_digest=digest, model_app=model_app)
    count = scaling.replicas_min if scaling.enabled else cluster.replicas
    replica: dict[str, Any] = {"name": REPLICA_DEPLOYMENT} | (
        {} if scaling.enabled else {"num_replicas": count}
    )
    common = {"args": args.model_dump(mode="json"), "runtime_env": {"env_vars": application_environment()}}
    return {
        model_app: {
            "name": model_app,
            "route_prefix": None,
            "import_path": "samovar.cluster.deploy.builders:model_app",
            "deployments": [replica],
            **common,
        },
        FRONT_APP: {
            "name": FRONT_APP,
            "route_prefix": "/",
            "import_path": "samovar.cluster.deploy.builders:front_app",
            "deployments": [{"name": INGRESS_DEPLOYMENT, "user_config": {"replicas": count}}],
            **common,
        },
    }


def stale_tiers(now: Mapping[str, Application], wanted: Mapping[str, Application]) -> str:
    """Return which settings of tiers will not be what is wanted, as their actors outlive a deployment.

    Empty: none. Raises `StartFailed` for the key of encryption at rest, which must not seem to be in use.
    """
    sections = section_keys()
    before, after = (dict(_leaves(_tiers_of(apps), "tiers", sections)) for apps in (now, wanted))
    changed = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
    how = "Ray has to be started again on every node (`samovar down` and `samovar up`)"
    if (key := "tiers.encryption_key_file") in changed:
        raise StartFailed(
            f"{key}={after[key]} would not be used: tiers and keys outlive a deployment, and go on with "
            f"{before[key]}. {how}"
        )
    if not changed:
        return ""
    return f"the tiers that run keep what they have of {', '.join(changed)}: for the new ones {how}"


def _tiers_of(apps: Mapping[str, Application]) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = apps.get(FRONT_APP, {}).get("args", {}).get("settings", {})
    tiers: Mapping[str, Any] = settings.get("tiers", {})
    return tiers


def _leaves(tree: Mapping[str, Any], name: str, sections: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield each setting below `name`; one that is a mapping as a whole, so that an empty one counts, too."""
    for key, value in tree.items():
        if (at := f"{name}.{key}") in sections:
            yield from _leaves(value, at, sections)
        else:
            yield at, value


def of_others(apps: Mapping[str, Application]) -> dict[str, Application]:
    """Return the applications that are not ours: they stay as they are."""
    return {name: app for name, app in apps.items() if not is_ours(name)}


KEEP_ALIVE_S = 4010
"""For how long a proxy keeps an idle connection. Longer than the load balancer does (4,000 s at most, as
`terraform/` checks): who closes first must be the one that sends, or a request meets a closing end."""


def serve_config(settings: Settings, apps: Mapping[str, Application]) -> dict[str, Any]:
    """Return Serve's whole configuration."""
    return {
        "proxy_location": "EveryNode",
        "http_options": http_options(settings.server) | {"keep_alive_timeout_s": KEEP_ALIVE_S},
        "logging_config": serve_logs(settings).model_dump(mode="json", exclude_unset=True),
        "applications": list(apps.values()),
    }


class ServeRest:
    """Ray Serve over REST, a `Target`."""

    def __init__(self, api: ServeApi, settings: Settings) -> None:
        self._api = api
        self._settings = settings

    def put(self, apps: Mapping[str, Application], begun: Collection[str], gone: Collection[str]) -> None:
        """See `Target`."""
        self._api.deploy(serve_config(self._settings, apps))

    def missing(self, names: Collection[str]) -> str | None:
        """See `Target`; with the number of replicas that run."""
        deployed = self._api.deployed()
        states = not_running(names, deployed.status, deployed.message)
        running = len(deployed.replicas.get(REPLICA_DEPLOYMENT, ()))
        nodes = len(deployed.proxies)
        return states and f"{states}; {running} model replicas run on {nodes} nodes"


def nodes_table(nodes: Mapping[str, str], deployed: Deployed) -> Table:
    """Return a table with one row per node: what runs there."""
    table = Table("node", "address", "replicas", "ingress", "HTTP", box=None, pad_edge=False)
    replicas = deployed.replicas.get(REPLICA_DEPLOYMENT, [])
    ingresses = deployed.replicas.get(INGRESS_DEPLOYMENT, [])
    for node, address in sorted(nodes.items(), key=lambda row: row[1]):
        proxy = deployed.proxies.get(node, "-").lower()
        table.add_row(node[:8], address, str(replicas.count(node)), str(ingresses.count(node) or "-"), proxy)
    return table
