"""A cluster's secrets in AWS, as whoever brings it up leaves them in SSM for the nodes.

Given once, they stay there: the next `samovar up` needs none. Knows no files.
"""

from __future__ import annotations

import secrets as random_secrets
from collections.abc import Callable
from typing import Any

import yaml

from cluster.node_settings import RenderFailed
from cluster.ssm_parameters import SECRETS, TOKEN, get_parameter, put_parameter
from configs.split import Tree

TOKEN_BYTES = 32


def new_token() -> str:
    """256 bits, in hex."""
    return random_secrets.token_hex(TOKEN_BYTES)


def keep_in_cloud(ssm: Any, prefix: str, given: Tree) -> Tree:
    """What the nodes will read: `given` if it is anything, else what is there. Writes what is new.

    `ssm`: a client of boto3's. Raises `RenderFailed` when there is nothing, `AwsRefused`.
    """
    token_name, secrets_name = f"{prefix}/{TOKEN}", f"{prefix}/{SECRETS}"
    text = get_parameter(ssm, secrets_name)
    kept = {} if text is None else _parsed(text, secrets_name)
    if not given and not kept:
        raise RenderFailed(
            f"the cluster has no secrets yet: there is no SSM parameter {secrets_name}. Give them once, with "
            "--secrets FILE (YAML: `auth:`, below it `api_keys:`, below it `my-team: <a key>`)"
        )
    old_secret = str(kept.get("auth", {}).get("server_secret") or "")
    secrets = with_server_secret(given or kept, lambda: old_secret or new_token())
    if secrets != kept:
        put_parameter(ssm, secrets_name, yaml.safe_dump(secrets, sort_keys=True))
    if get_parameter(ssm, token_name) is None:
        put_parameter(ssm, token_name, new_token())
    return secrets


def with_server_secret(secrets: Tree, draw: Callable[[], str]) -> Tree:
    """All nodes must salt alike: with what is given, else with what is drawn."""
    auth = secrets.get("auth", {})
    if auth.get("server_secret"):
        return secrets
    return secrets | {"auth": auth | {"server_secret": draw()}}


def _parsed(text: str, name: str) -> Tree:
    try:
        found: Any = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RenderFailed(f"the SSM parameter {name} is no YAML") from None  # its text quotes secrets
    auth = found.get("auth", {}) if isinstance(found, dict) else None
    if not isinstance(auth, dict):
        raise RenderFailed(
            f"the SSM parameter {name} does not hold settings such as `auth:`. Delete it, and write it anew "
            "with --secrets FILE"
        )
    return dict(found)
