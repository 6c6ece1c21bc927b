"""Where ranks meet: a folder that goes away with its replica, however that ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samovar.replicas.ranks.meeting import MeetingFolder

HOLD = """
from samovar.replicas.ranks.meeting import MeetingFolder
folder = MeetingFolder()
(folder.path / "ranks.sock").touch()
print(folder.path, flush=True)
input()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_the_folder_of_a_killed_replica_is_removed_by_the_next_one(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        held = Path(other.stdout.readline().strip())
        try:
            first = MeetingFolder()
            assert {first.path, held} == set(temporary.iterdir()), "that of a living replica stays"
        finally:
            other.kill()
            other.wait()
    second = MeetingFolder()
    assert set(temporary.iterdir()) == {first.path, second.path}
    for folder in (first, second, second):
        folder.remove()
    assert list(temporary.iterdir()) == []
