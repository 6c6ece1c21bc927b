"""The builders that a running cluster calls: `serve/graph.py`'s applications, from what `deploy.py` has sent.

Their arguments stand in Serve's configuration, which anybody with Ray's token may read: so the secrets are
not among them but in a file on every node. Whoever deploys says which file, and a digest of what must be in
it: a node with another one would salt its blocks and judge its callers differently.
"""

# No `from __future__ import annotations`: Serve looks at the class of a builder's argument, not at its name.

import hashlib
import hmac
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError
from ray import serve

from cluster.serve.graph import build_front_app, build_model_app
from cluster.serve.preflight import StartFailed
from cluster.serve.ray_cluster import refuse_open_cluster_here
from configs.fields import Tree, merged
from configs.sections import Section
from configs.settings import Settings

DIGEST_PURPOSE = b"samovar secrets"


class AppArgs(Section):
    """`settings`: all that is no secret (`configs/fields.py`); `model_app`: of the front door's replicas."""

    settings: Tree
    secrets_file: Path
    secrets_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    model_app: str = Field(min_length=1, max_length=128)


def model_app(args: AppArgs) -> serve.Application:
    """The replicas. Raises `StartFailed`."""
    settings = _checked(args)
    return build_model_app(settings, None, settings.cluster.replicas)


def front_app(args: AppArgs) -> serve.Application:
    """The front door. It lets nobody in before it has seen a replica, unless there may be none."""
    settings = _checked(args)
    scaling = settings.cluster.autoscaling
    waits = not scaling.enabled or scaling.replicas_min > 0
    replicas = settings.cluster.replicas
    return build_front_app(settings, None, args.model_app, replicas, is_update=waits)


def secrets_digest(secrets: Tree, server_secret: str) -> str:
    """Tells whether two files hold the same; nobody can try keys with it who has not the server's secret."""
    text = yaml.safe_dump(secrets, sort_keys=True)
    return hmac.new(server_secret.encode(), DIGEST_PURPOSE + text.encode(), hashlib.sha256).hexdigest()


def read_secrets(path: Path) -> Tree:
    """The tree in a file of secrets; nothing if it is empty. Raises `StartFailed`."""
    path = path.expanduser()
    try:
        if path.stat().st_mode & 0o077:
            raise StartFailed(f"{path} is open to others: chmod 600 it on every node")
        found: Any = yaml.safe_load(path.read_text())
    except OSError as error:
        raise StartFailed(f"the secrets in {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError:
        raise StartFailed(f"{path} is no YAML") from None  # its text quotes the file
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
        raise StartFailed(f"the settings are refused on this node: {wrong}") from None  # its text has secrets
    secret = settings.auth.server_secret
    found = secrets_digest(secrets, secret.get_secret_value()) if secret else ""
    if not hmac.compare_digest(found, args.secrets_digest):
        raise StartFailed(f"{args.secrets_file} on this node is not the file that was deployed with")
    return settings
