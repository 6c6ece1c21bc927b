"""Two raylets that speak TLS alone: blocks, sessions, deletions and a drain, as without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samovar.cluster.launch.authority import certify, new_authority
from samovar.cluster.launch.node_setup import own_address
from samovar.configs.tls import tls_in
from tests.house import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_that_speak_tls_alone(tmp_path: Path) -> None:
    """In processes of their own: Ray reads the variables once."""
    certify(new_authority("tea"), (own_address(), "127.0.0.1"), tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/e2e/test_two_nodes.py"],
        cwd=ROOT,
        env={**os.environ, **tls_in(tmp_path).environment()},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "5 passed, 1 skipped" in ended.stdout
