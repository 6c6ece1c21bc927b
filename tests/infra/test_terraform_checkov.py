"""checkov over terraform/: nothing fails, and what is skipped says why."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.infra.lint_venv import LintMissing, lint_python
from tests.infra.mirror import TREE
from tests.infra.needs import cannot_run, needs_infra

pytestmark = [needs_infra, pytest.mark.timeout(590)]  # the first time, checkov is installed

REASON_WORDS_MIN = 3


@pytest.fixture(scope="module")
def checkov() -> Path:
    try:
        return lint_python().with_name("checkov")
    except LintMissing as problem:
        cannot_run(f"checkov is not there and cannot be installed: {problem}")


def report(checkov: Path, tree: Path) -> dict[str, Any]:
    command = [str(checkov), "-d", str(tree), "--framework", "terraform", "--compact", "--skip-download"]
    done = subprocess.run(
        [*command, "-o", "json"], capture_output=True, text=True, timeout=150, check=False, cwd=tree
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return json.loads(done.stdout)


def failed(found: dict[str, Any]) -> list[str]:
    return [
        f"{one['check_id']} {one['resource']} ({one['file_path'].lstrip('/')}): {one['check_name']}"
        for one in found["results"]["failed_checks"]
    ]


def skips_without_reason(tree: Path) -> list[str]:
    """ "file:line" of each skip comment that does not say why in words."""
    found = []
    for file in sorted(tree.rglob("*.tf")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if "checkov:skip" not in line:
                continue
            told = re.search(r"#\s*checkov:skip=CKV2?_[A-Z]+_\d+:(.*)$", line)
            if not told or len(told[1].split()) < REASON_WORDS_MIN:
                found.append(f"{file.relative_to(tree)}:{number}")
    return found


def test_nothing_fails_and_every_skip_has_a_reason(checkov: Path) -> None:
    found = report(checkov, TREE)
    assert failed(found) == []
    assert found["results"]["parsing_errors"] == []
    assert found["summary"]["passed"] > 100, "checkov did not see the tree"
    skipped = found["results"]["skipped_checks"]
    silent = [one["resource"] for one in skipped if not one["check_result"]["suppress_comment"].strip()]
    assert silent == []
    assert skips_without_reason(TREE) == []


def test_an_open_bucket_is_found(checkov: Path, tmp_path: Path) -> None:
    (tmp_path / "main.tf").write_text('resource "aws_s3_bucket" "open" {\n  bucket = "open"\n}\n')
    assert any("aws_s3_bucket.open" in one for one in failed(report(checkov, tmp_path)))


def test_a_skip_without_a_reason_is_found(tmp_path: Path) -> None:
    lines = ["#checkov:skip=CKV_AWS_18:", "# checkov:skip=CKV_AWS_19", "#checkov:skip=CKV2_AWS_6:later"]
    (tmp_path / "main.tf").write_text(
        "\n".join([*lines, "#checkov:skip=CKV_AWS_144:a cache: computed again"])
    )
    assert skips_without_reason(tmp_path) == ["main.tf:1", "main.tf:2", "main.tf:3"]
