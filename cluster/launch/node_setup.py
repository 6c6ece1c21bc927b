"""Prepares a node before `ray start`: fetches its secrets and joins the load balancer's targets.

In AWS secrets come from SSM; in a rack `samovar up` has copied them with its files. Writes Ray's token to
`~/.ray/auth_token` and the secret settings to `~/samovar/secrets.yaml`, both for the owner only; with TLS
between nodes also this node's certificate.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import yaml

from samovar.cluster.launch.authority import certify
from samovar.cluster.launch.aws import SECRETS, TOKEN, asked, get_parameter
from samovar.cluster.launch.settings import AUTHORITY_FILE, MADE_TLS_DIR, NODE_HOME, SECRETS_FILE
from samovar.cluster.serve.secrets import OWNER_ONLY, write_private
from samovar.configs.tls import CertificateRefused, tls_in

RAY_TOKEN_FILE = Path("~/.ray/auth_token")
SOMEWHERE = ("8.8.8.8", 80)
"""An address on the default route. No packet is sent."""


class NodeSetupFailed(Exception):
    """Ray must not be started on this node; the message says why."""


def setup_from_ssm(ssm: Any, prefix: str, home: Path) -> None:
    """Fetch the secrets from SSM and write them below `home`, the user's.

    `ssm`: a boto3 client; `prefix`: such as `/samovar/NAME`. Raises `NodeSetupFailed` or `AwsRefused`.
    """
    token = _parameter(ssm, f"{prefix}/{TOKEN}")
    secrets = _parameter(ssm, f"{prefix}/{SECRETS}")
    _check_secrets(secrets, f"SSM parameter {prefix}/{SECRETS}")
    _write(home, RAY_TOKEN_FILE, _checked_token(token, f"SSM parameter {prefix}/{TOKEN}"))
    _write(home, Path(NODE_HOME) / SECRETS_FILE, secrets)


def setup_from_file(token_file: Path, home: Path) -> None:
    """Install `token_file`, and protect it and the secrets beside it, as `samovar up` copied them.

    Raises `NodeSetupFailed`.
    """
    secrets_file = token_file.parent / SECRETS_FILE
    try:
        token = token_file.read_text()
        secrets_file.chmod(OWNER_ONLY)
        token_file.chmod(OWNER_ONLY)
    except OSError as error:
        raise NodeSetupFailed(f"{error.filename}: {error.strerror}. Run `samovar up` again") from error
    _write(home, RAY_TOKEN_FILE, _checked_token(token, str(token_file)))


def set_up_tls(folder: Path, home: Path) -> None:
    """Certify this node, where `samovar up` has brought the authority; check its certificate in any case.

    `folder`: `cluster.tls_dir`. Raises `NodeSetupFailed`.
    """
    authority, files = home / Path(NODE_HOME).relative_to("~") / AUTHORITY_FILE, tls_in(folder)
    address = own_address()
    try:
        if folder == home / MADE_TLS_DIR.relative_to("~"):
            certify(authority.read_text(), (address, "127.0.0.1", socket.gethostname(), "localhost"), folder)
            authority.chmod(OWNER_ONLY)
        files.check(address)
    except OSError as error:
        raise NodeSetupFailed(f"{error.filename}: {error.strerror}. Run `samovar up` again") from error
    except (ValueError, CertificateRefused) as error:
        raise NodeSetupFailed(
            f"cluster.tls_dir={folder} has no certificate for this node, at {address}: {error}"
        ) from error


def join_targets(elb: Any, target_group_arn: str, port: int, address: str | None = None) -> None:
    """Register this node with the load balancer. Registering twice is harmless. Raises `AwsRefused`."""
    target = {"Id": address or own_address(), "Port": port}
    asked(
        lambda: elb.register_targets(TargetGroupArn=target_group_arn, Targets=[target]),
        f"register {target['Id']}:{port} with the load balancer's {target_group_arn}",
        "elasticloadbalancing:RegisterTargets on it",
    )


def own_address() -> str:
    """Return this node's address for other nodes, found as Ray does. Raises `NodeSetupFailed`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(SOMEWHERE)
        except OSError as error:
            raise NodeSetupFailed(
                f"this node has no default route ({error.strerror}), so neither Samovar nor Ray finds its "
                "address. Add one, even to an unreachable gateway"
            ) from error
        return str(probe.getsockname()[0])


def _parameter(ssm: Any, name: str) -> str:
    value = get_parameter(ssm, name)
    if value is None:
        raise NodeSetupFailed(
            f"there is no SSM parameter {name}. `samovar up --secrets FILE` writes the token and the secrets"
        )
    return value


def _checked_token(token: str, place: str) -> str:
    token = token.strip()
    if len(token) < 32 or not token.isascii() or not token.isprintable() or " " in token:
        raise NodeSetupFailed(f"{place} is not a token: 32 or more visible ASCII characters on one line")
    return token


def _check_secrets(text: str, place: str) -> None:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        raise NodeSetupFailed(f"{place} is no YAML") from None  # the error quotes secrets
    if not isinstance(found, dict):
        raise NodeSetupFailed(f"{place} does not hold settings such as `auth:` and below it `api_keys:`")


def _write(home: Path, path: Path, text: str) -> None:
    target = home / path.relative_to("~")
    try:
        write_private(target, text)
    except OSError as error:
        raise NodeSetupFailed(f"cannot write {target}: {os.strerror(error.errno or 0)}") from error
