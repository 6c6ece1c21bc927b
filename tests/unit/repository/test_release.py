"""The checklist of a release: what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.release import CheckFailed, Row, copy_of_commit, licence_of, locked, run, shipped, told_version

CHANGES = "## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n- Something.\n"


def part(name: str, version: str, licence: str = "MIT") -> dict[str, Any]:
    licences = [{"license": {"id": licence}}] if licence else []
    return {"name": name, "version": version, "bom-ref": f"{name}=={version}", "licenses": licences}


def bill(*parts: dict[str, Any]) -> dict[str, Any]:
    refs = [one["bom-ref"] for one in parts]
    return {
        "metadata": {"component": {"bom-ref": "root"}},
        "components": list(parts),
        "dependencies": [{"ref": "root", "dependsOn": refs}, *({"ref": ref} for ref in refs)],
    }


def test_a_version_needs_its_dated_section() -> None:
    assert told_version({"0.2.0"}, CHANGES) == "0.2.0"
    with pytest.raises(CheckFailed, match=r'no "## \[0\.3\.0\]'):
        told_version({"0.3.0"}, CHANGES)
    with pytest.raises(CheckFailed, match=r"of their own: 0\.2\.0, 0\.3\.0"):
        told_version({"0.3.0", "0.2.0"}, CHANGES)


def test_parts_are_those_that_users_install() -> None:
    kept = shipped(bill(part("Tea", "1.0"), part("pytest", "9")), {"tea": "1.0", "cuda-only": "13"})
    assert [one["name"] for one in kept["components"]] == ["Tea"]
    assert kept["dependencies"] == [
        {"ref": "root", "dependsOn": ["Tea==1.0"]},
        {"ref": "Tea==1.0", "dependsOn": []},
    ]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (part("tea", "1.1"), "tea is 1.1, locked 1.0"),
        (part("tea", "1.0", ""), "tea names no licence"),
        (part("tea", "1.0", "GPL-3.0-only"), "tea is under GPL-3.0-only"),
        (part("tea", "1.0", "AGPL-3.0"), "tea is under AGPL-3.0"),
    ],
)
def test_a_part_that_may_not_be_shipped_is_named(found: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckFailed, match=said):
        shipped(bill(found), {"tea": "1.0"})


def test_a_weak_copyleft_and_a_build_of_ones_own_are_no_hindrance() -> None:
    assert shipped(bill(part("psycopg", "3.3+cpu", "LGPL-3.0-only")), {"psycopg": "3.3"})["components"]
    assert (
        licence_of(
            {"name": "x", "licenses": [{"license": {"name": "License :: OSI Approved :: BSD License"}}]}
        )
        == "BSD License"
    )
    assert licence_of({"name": "Ray"}) == "Apache-2.0"


def test_locks_are_read_whole() -> None:
    found = locked()
    assert {"ray", "torch", "boto3"} <= found.keys()
    assert "pytest" not in found


def test_a_step_that_fails_is_a_row() -> None:
    def no() -> str:
        raise CheckFailed("why")

    assert run("it", no) == Row("it", False, "why")


def test_the_copy_has_gits_two_modes_and_nothing_else(tmp_path: Path) -> None:
    copy = copy_of_commit(tmp_path / "copy")
    assert (copy / "samovar/cluster").is_symlink()
    assert {path.stat().st_mode & 0o777 for path in copy.rglob("*") if path.is_file()} == {0o644, 0o755}
    assert not (tmp_path / "copy.tar").exists()
