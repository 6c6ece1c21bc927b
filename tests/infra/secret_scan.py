"""Finds secrets in what Terraform keeps and prints. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.infra.awsschema.data_sources import SECRET_MARK

_NAMES = re.compile(r"(^|_)(password|secret|secret_string|token|private_key|auth_token|api_keys?|value)$")
_KEY = re.compile(r"AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY-----")
_KEPT = {"aws_ssm_parameter", "aws_secretsmanager_secret_version", "aws_iam_access_key", "tls_private_key"}


def secrets_in_state(state: dict[str, Any]) -> list[str]:
    """Where a state (`terraform state pull`) holds a secret: "aws_ssm_parameter.token: value"."""
    found = []
    for resource in state.get("resources", []):
        name = f"{resource['type']}.{resource['name']}"
        for instance in resource["instances"]:
            attributes = instance["attributes"]
            if resource["mode"] == "managed" and resource["type"] in _KEPT:
                held = [one for one, value in attributes.items() if value and _NAMES.search(one)]
                found += [f"{name}: {one}" for one in held]
            found += [f"{name}: {path}" for path in _marked(attributes)]
    outputs = state.get("outputs", {})
    return [*found, *(f"output {path}" for path in _marked(outputs))]


def secrets_in_text(text: str) -> list[str]:
    """The secrets of the stand-in, and what has the form of a key, in anything printed."""
    return [*re.findall(f"{SECRET_MARK}[0-9a-f]*", text), *_KEY.findall(text)]


def _marked(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _marked(one, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _marked(one, f"{path}[{number}]")
    elif secrets_in_text(json.dumps(value)):
        yield path
