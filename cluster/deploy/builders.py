"""Builds `serve/graph.py`'s applications on a running cluster, from the arguments that `deploy.py` sends.

The arguments are part of Serve's configuration, which any holder of Ray's token may read: so secrets are not
among them but in a file on every node. The arguments name that file and a digest of its contents: a node
with other contents would salt its blocks and authenticate its callers differently.
"""

# No `from __future__ import annotations`: Serve needs the class of a builder's argument, not its name.

import hashlib
import hmac
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError
from ray import serve

from samovar.cluster.errors import StartFailed
from samovar.cluster.serve.graph import build_front_app, build_model_app
from samovar.cluster.serve.ray_cluster import refuse_open_cluster_here
from samovar.configs.fields import Tree, merged
from samovar.configs.sections import Section
from samovar.configs.settings import Settings

DIGEST_PURPOSE = b"samovar secrets"


class AppArgs(Section):
    """The builders' arguments. `settings`: without secrets (`configs/fields.py`).

    `model_app`: the application whose replicas the ingress uses.
    """

    settings: Tree
    secrets_file: Path
    secrets_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    model_app: str = Field(min_length=1, max_length=128)


def model_app(args: AppArgs) -> serve.Application:
    """Return the application of the replicas. Raises `StartFailed`."""
    settings = _checked(args)
    return build_model_app(settings, None, settings.cluster.replicas)


def front_app(args: AppArgs) -> serve.Application:
    """Return the ingress application; if replicas are required, it admits nothing before it sees one."""
    settings = _checked(args)
    scaling = settings.cluster.autoscaling
    waits = not scaling.enabled or scaling.replicas_min > 0
    replicas = settings.cluster.replicas
    return build_front_app(settings, None, args.model_app, replicas, is_update=waits)


def secrets_digest(secrets: Tree, server_secret: str) -> str:
    """Return a digest of the secrets, keyed: API keys can be tried on it only with the server's secret."""
    text = yaml.safe_dump(secrets, sort_keys=True)
    return hmac.new(server_secret.encode(), DIGEST_PURPOSE + text.encode(), hashlib.sha256).hexdigest()


def read_secrets(path: Path) -> Tree:
    """Return the tree in a file of secrets; {} if it is empty. Raises `StartFailed`."""
    path = path.expanduser()
    try:
        if path.stat().st_mode & 0o077:
            raise StartFailed(f"{path} is readable by other users: chmod 600 it on every node")
        found: Any = yaml.safe_load(path.read_text())
    except OSError as error:
        raise StartFailed(f"the secrets in {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError:
        raise StartFailed(f"{path} is no YAML") from None  # the error quotes the file
    if found is not None and not isinstance(found, dict):
        raise StartFailed(f"{path} does not hold settings")
    return found or {}


def _checked(args: AppArgs) -> Settings:
    refuse_open_cluster_here()
    secrets = read_secrets(args.secrets_file)
    try:
        settings = merged(args.settings, secrets)
    except ValidationError as error:
        wrong = ", ".join(".".join(map(str, detail["loc"])) or detail["type"] for detail in error.errors())
        raise StartFailed(f"the settings are refused on this node: {wrong}") from None  # it quotes secrets
    secret = settings.auth.server_secret
    found = secrets_digest(secrets, secret.get_secret_value()) if secret else ""
    if not hmac.compare_digest(found, args.secrets_digest):
        raise StartFailed(f"{args.secrets_file} on this node differs from the file used by the deployment")
    return settings
