"""Secrets and keys: who may read their files, what refuses them, how a tenant changes them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from samovar.cache_tiers.node.build import count_start
from samovar.cache_tiers.node.state import PendingDeletes
from samovar.cluster.cli.main import app
from samovar.configs.fields import merged, public_tree, secret_tree
from samovar.configs.loader import ConfigError, load
from samovar.configs.settings import AuthSettings, Settings
from samovar.router.auth import Authenticator, Caller
from samovar.router.openai.errors import AuthenticationFailed

OLD, NEW, OTHER = "old-key-of-sixteen", "new-key-of-sixteen", "other-key-of-sixteen"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def open_umask() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_the_file_of_starts_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "starts.json"
    assert count_start(path, "a") == (1, 0)
    assert mode(path) == 0o600
    path.chmod(0o644)  # an older version's
    assert count_start(path, "a") == (2, 0)
    assert mode(path) == 0o600


@pytest.mark.usefixtures("open_umask")
def test_pending_deletes_that_are_put_aside_are_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "owed.json"
    path.write_text("no list of deletes")
    PendingDeletes(path, 10)
    assert mode(tmp_path / "owed.bad") == 0o600


@pytest.mark.parametrize("endpoint", ["http://user:hushHUSH@minio:9000", "https://hushHUSH@minio"])
def test_credentials_in_the_endpoint_are_refused_and_not_shown(endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {"SAMOVAR_TIERS__S3__ENDPOINT": endpoint}, [])
    assert "tiers.s3.endpoint" in str(caught.value)
    assert "tiers.s3.secret_access_key" in str(caught.value)
    assert "hushHUSH" not in str(caught.value)
    shown = CliRunner().invoke(app, ["config", "--tiers.s3.endpoint", endpoint])
    assert shown.exit_code != 0
    assert "hushHUSH" not in shown.output


def asks(authenticator: Authenticator, key: str) -> Caller | None:
    headers = [(b"authorization", b"Bearer " + key.encode())]
    return authenticator.caller({"type": "http", "path": "/v1/models", "method": "GET", "headers": headers})


def test_a_tenant_changes_its_key_without_a_gap() -> None:
    keys = json.dumps({"team": [OLD, NEW], "other": OTHER})
    settings = load(None, {"SAMOVAR_AUTH__API_KEYS": keys}, []).settings
    authenticator = Authenticator(settings.auth)
    assert asks(authenticator, OLD) == asks(authenticator, NEW) == Caller("team")
    assert asks(authenticator, OTHER) == Caller("other")
    with pytest.raises(AuthenticationFailed):
        asks(authenticator, "neither-of-the-two")
    after = Authenticator(AuthSettings.model_validate({"api_keys": {"team": NEW}}))
    with pytest.raises(AuthenticationFailed):
        asks(after, OLD)


def test_several_keys_go_the_way_of_one() -> None:
    """To other nodes, and in what is shown."""
    settings = Settings.model_validate({"auth": {"api_keys": {"team": [OLD, NEW], "other": OTHER}}})
    assert OLD not in json.dumps(public_tree(settings))
    assert merged(public_tree(settings), secret_tree(settings)) == settings
    keys = json.dumps({"team": [OLD, NEW]})
    shown = CliRunner().invoke(app, ["config"], env={"SAMOVAR_AUTH__API_KEYS": keys})
    assert shown.exit_code == 0, shown.output
    assert OLD not in shown.output
    assert NEW not in shown.output


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"team": [OLD, NEW], "other": NEW}, "tenants team and other have the same API key"),
        ({"team": []}, "at least 1"),
        ({"team": [f"{OLD}-{number}" for number in range(5)]}, "at most 4"),
        ({"team": [OLD, "short"]}, "at least 16"),
    ],
)
def test_keys_that_cannot_be_are_refused(keys: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        AuthSettings.model_validate({"api_keys": keys})
    with pytest.raises(ConfigError) as caught:
        load(None, {"SAMOVAR_AUTH__API_KEYS": json.dumps(keys)}, [])
    assert OLD not in str(caught.value)
    assert NEW not in str(caught.value)


def test_the_administrators_key_is_none_of_a_tenants() -> None:
    with pytest.raises(ValidationError, match=r"auth\.admin_key is the API key of tenant team"):
        AuthSettings.model_validate({"api_keys": {"team": [OLD, NEW]}, "admin_key": NEW})


def test_plain_http_in_the_cloud_is_said_not_left_out() -> None:
    """And production's example has a certificate."""
    tree = Path(__file__).resolve().parents[3] / "terraform"
    (block,) = re.findall(
        r'variable "certificate_arn" \{(.*?)\n\}', (tree / "variables.tf").read_text(), re.S
    )
    assert "default" not in block
    said = {
        path.stem: re.findall(r"^certificate_arn\s*= (.*)$", path.read_text(), re.M)
        for path in (tree / "envs").glob("*.tfvars")
    }
    assert said["dev"] == ["null"]
    assert said["prod"][0].startswith('"arn:aws:acm:')
    assert all(len(values) == 1 for values in said.values())
