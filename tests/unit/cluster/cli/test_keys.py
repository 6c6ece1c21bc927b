"""`samovar keys`: what it prints, what it refuses, and that a key is seen once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samovar.cluster.cli.main import app
from samovar.cluster.errors import StartFailed
from samovar.cluster.serve.preflight import check_keys_file
from samovar.configs.settings import Settings
from samovar.router.identities import KeyFile


class Shell:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, *words: str, code: int = 0) -> str:
        env = {"SAMOVAR_AUTH__KEYS_FILE": str(self.path)}
        done = CliRunner().invoke(app, ["keys", *words], env=env)
        assert done.exit_code == code, done.output
        return done.output if code else done.stdout


@pytest.fixture
def run(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "keys.json")


def test_a_key_is_made_shown_once_rotated_and_revoked(run: Shell) -> None:
    key = run("create", "kitchen", "--lasts", "90d").strip()
    (record,) = KeyFile(run.path).read()
    assert record.expires == record.created + 90 * 86400
    listed = run("list")
    assert listed.splitlines()[0].split("\t") == [
        "id", "tenant", "key", "state", "created", "expires", "last used",
    ]  # fmt: skip
    row = listed.splitlines()[1].split("\t")
    assert row[:4] == [record.id, "kitchen", f"{key[:12]}...", "valid"]
    assert row[-1] == "-"
    assert key not in listed
    made = json.loads(run("rotate", record.id, "--keep", "1h", "--json"))
    assert made["tenant"] == "kitchen"
    assert made["key"] not in run("list", "--json")
    assert "is revoked" in run("revoke", record.id)
    states = {one["id"]: one["state"] for one in json.loads(run("list", "--json"))}
    assert states == {record.id: "revoked", made["id"]: "valid"}
    admin = json.loads(run("create", "--admin", "--json"))
    assert admin["tenant"] is None
    assert "administrator" in run("list")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("create",), "give the tenant"),
        (("create", "kitchen", "--admin"), "give the tenant"),
        (("create", "Kitchen"), "is no tenant"),
        (("create", "../kitchen"), "is no tenant"),
        (("create", "kitchen", "--lasts", "soon"), "is no time"),
        (("create", "kitchen", "--lasts", "3651d"), "more than ten years"),
        (("rotate", "key_000000000000"), "there is no key"),
        (("revoke", "key_000000000000"), "there is no key"),
        (("list", "--auth.keys-file", "/proc/nothing/keys.json"), "No such file"),
    ],
)
def test_what_cannot_be_is_refused(run: Shell, words: tuple[str, ...], why: str) -> None:
    assert why in run(*words, code=2)
    assert not run.path.exists()


def test_without_a_file_it_says_how_to_name_one() -> None:
    done = CliRunner().invoke(app, ["keys", "list"], env={"SAMOVAR_AUTH__KEYS_FILE": ""})
    assert done.exit_code == 2
    assert "SAMOVAR_AUTH__KEYS_FILE" in done.output


def test_a_service_does_not_start_without_its_file(run: Shell) -> None:
    settings = Settings.model_validate({"auth": {"keys_file": run.path}})
    with pytest.raises(StartFailed, match="samovar keys create"):
        check_keys_file(settings)
    run("create", "kitchen")
    check_keys_file(settings)
    run.path.chmod(0o666)
    with pytest.raises(StartFailed, match="others may write"):
        check_keys_file(settings)
    check_keys_file(Settings())
