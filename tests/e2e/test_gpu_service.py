"""`bench.gpu_service` as a whole, in a small shape on a CPU: nothing but CUDA and vLLM is untried."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bare_machine import ROOT

pytestmark = pytest.mark.timeout(600)


def test_a_service_is_started_overrun_restarted_and_loads_what_pays(tmp_path: Path) -> None:
    """No price is given to it: that it stores and loads is its own finding."""
    out = tmp_path / "gpu_service.json"
    command = ["-m", "bench.gpu_service", "--tiny", "--device", "cpu", "--vllm", "", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, *command, "--limit-s", "3600", "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    document = json.loads(out.read_text())
    assert document["errors"] == {}, done.stdout[-3000:]
    values = {row["name"].removeprefix("samovar: "): row["value"] for row in document["rows"]}
    assert values["extents stored"] > 0

    def came(name: str) -> str:
        """Return where returns came from."""
        return " ".join(row["shape"] for row in document["rows"] if row["name"] == f"samovar: {name}")

    assert "cpu" in came("return after an overrun")
    assert "nvme" in came("return after a restart")
    assert values["gap p50"] >= 0
    assert values["disk, read"] > 0
