"""A target that was asked for by name fails where something is missing, and says what installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.infra.needs import NEEDS, lacking, need
from tests.infra.netlab.lab import hidden_code

ROOT = Path(__file__).resolve().parents[3]


def test_what_is_missing_fails_and_one_line_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, one in NEEDS.items():
        monkeypatch.setitem(NEEDS, name, replace(one, is_there=lambda: True))
    assert lacking(*NEEDS) == ""
    need(*NEEDS)
    for name in ("sshd", "rsync", "unshare", "nsenter", "terraform"):
        monkeypatch.setitem(NEEDS, name, replace(NEEDS[name], is_there=lambda: False))
    with pytest.raises(pytest.fail.Exception) as failed:
        need(*NEEDS)
    said = str(failed.value)
    assert said.startswith("missing: program `sshd`, program `terraform`, program `unshare`")
    assert "developer.hashicorp.com" in said
    assert said.endswith("apt-get install openssh-server util-linux rsync")


def test_everything_that_is_needed_says_how_to_get_it() -> None:
    assert all(one.apt or one.pip or one.how for one in NEEDS.values())


def test_a_bare_machine_does_not_look_as_if_all_was_shown(tmp_path: Path) -> None:
    """As `make test-ray-up` runs it, with no program in PATH."""
    env = {**os.environ, "PATH": str(tmp_path), "TESTS_INFRA": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--confcutdir=tests/infra",  # quick: no models
        "tests/infra/test_ray_up_rack.py",
    ]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    assert "program `rsync`" in done.stdout
    assert "apt-get install" in done.stdout


def test_a_checkout_below_what_a_host_has_of_its_own_is_put_back() -> None:
    assert hidden_code("/work/samovar", "/usr", "/root/.pyenv/versions/3.12") == []
    places = ("/tmp/a/samovar", "/tmp/a/samovar/.venv", "/root/.pyenv/versions/3.12", "/root/code/.venv")
    assert hidden_code(*places) == ["/root/code/.venv", "/tmp/a/samovar"]
