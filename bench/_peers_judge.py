"""aiperf (PyPI) as an outside judge: conversations of several turns, its own client, its own figures."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench._peers_model import PeerModel
from bench._peers_servers import Place

TIMEOUT_S = 600.0
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""With these aiperf 0.13 asks the hub for a tokenizer that is a local path, and ends."""
_FIGURES = {
    "ttft_s": ("time_to_first_token", "p50", 1e-3),
    "ttft_p99_s": ("time_to_first_token", "p99", 1e-3),
    "itl_avg_ms": ("inter_token_latency", "avg", 1.0),
    "request_p50_s": ("request_latency", "p50", 1e-3),
    "tok_s": ("output_token_throughput", "avg", 1.0),
    "requests": ("request_count", "avg", 1.0),
}


class Aiperf:
    """`program`: its executable, in an environment of its own. `folder`: for what it writes."""

    def __init__(self, program: Path, model: PeerModel, folder: Path) -> None:
        self._program = program
        self._model = model
        self._folder = folder

    def measure(self, place: Place) -> dict[str, float]:
        """Let it measure the server that runs at `place`. Raises `RuntimeError` if it fails."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="aiperf-", dir=self._folder) as folder:
            done = subprocess.run(
                self.command(place.url, Path(folder)),
                env={key: value for key, value in os.environ.items() if key not in _OFFLINE},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            exports = sorted(Path(folder).rglob("profile_export_aiperf.json"))
            if done.returncode or not exports:
                raise RuntimeError(f"aiperf ended with {done.returncode}: {done.stdout[-300:]}")
            return figures(json.loads(exports[0].read_text()))

    def command(self, url: str, folder: Path) -> list[str]:
        """Return its command line: 6 conversations of 3 turns, two at a time."""
        flags = {
            "--model": self._model.name,
            "--url": url,
            "--endpoint-type": "chat",
            "--tokenizer": self._model.directory,
            "--conversation-num": 6,
            "--conversation-turn-mean": 3,
            "--conversation-turn-stddev": 0,
            "--synthetic-input-tokens-mean": 200,
            "--synthetic-input-tokens-stddev": 0,
            "--output-tokens-mean": 24,
            "--output-tokens-stddev": 0,
            "--concurrency": 2,
            "--extra-inputs": "ignore_eos:true",
            "--random-seed": 1,
            "--artifact-dir": folder,
            "--ui": "none",
        }
        said = (str(one) for pair in flags.items() for one in pair)
        return [str(self._program), "profile", *said, "--streaming", "--use-server-token-count"]


def figures(export: Mapping[str, Any]) -> dict[str, float]:
    """Return what we take of its JSON export: times in milliseconds there."""
    found = {}
    for name, (metric, statistic, scale) in _FIGURES.items():
        value = (export.get(metric) or {}).get(statistic)
        if value is not None:
            found[name] = float(value) * scale
    if "ttft_s" not in found or "tok_s" not in found:
        raise RuntimeError(f"aiperf's export has no {', '.join(_FIGURES.keys() - found)}")
    return found
