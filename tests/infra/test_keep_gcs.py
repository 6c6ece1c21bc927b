"""A real head with its GCS in RocksDB: killed twice, back each time, and over with its raylet."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infra.needs import need, needs_infra
from tests.support.services.service import free_port

pytestmark = [needs_infra, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, as Ray makes sockets in it."""
    made = Path(tempfile.mkdtemp(prefix="sg", dir="/tmp"))
    yield made
    shutil.rmtree(made)


def test_a_gcs_that_is_killed_comes_back(folder: Path) -> None:
    need("root", "unshare")
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    words = [
        # All of it ends with the first process: nothing of it is left, whatever happens.
        *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *(sys.executable, "-m", "tests.infra.gcs_killed", str(folder), str(free_port())),
    ]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    log = folder / "keep_gcs.log"
    assert done.returncode == 0, done.stderr[-4000:] + (log.read_text() if log.exists() else "")
    said = json.loads(done.stdout.splitlines()[-1])
    print(f"\nGCS killed: the next call was through after {said['back_s']} s")
    assert said["status"] == 0
    assert said["restarts"] == len(said["back_s"]) == 2
    assert max(said["back_s"]) < 60, "raylets give up then"
