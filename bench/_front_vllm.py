"""vLLM's server beside ours in `bench.front`: what its API process does for a streamed token.

vLLM computes in a process of its own (`EngineCore`) and speaks HTTP in another, so what a token costs outside
the engine is what all but that process take of the CPU. Its engine is a real one on the last core: compare it
with ours at the same rate (`--step-ms`). Tokens are those that vLLM itself counts. Needs
`bench/peers-install.sh vllm`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import httpx

from bench._peers_model import PeerModel
from bench._peers_servers import VLLM_BLOCK, Launch, Place, Vllm
from samovar.configs.settings import ModelSettings
from samovar.replicas.model import ensure_model

BUILD = Path("build")
MODEL = "SmolLM2-135M-Instruct"
CONTEXT_TOKENS, POOL_TOKENS = 8192, 40_960
_GENERATED = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def launch(port: int, streams: int) -> Launch:
    """Return how vLLM's server is started. Raises FileNotFoundError where it is not installed."""
    if missing := Vllm().missing(BUILD):
        raise FileNotFoundError(missing)
    model = PeerModel(MODEL, ensure_model(ModelSettings()), gguf=Path())
    last_core = [max(os.sched_getaffinity(0))]
    (own,) = Vllm().launches(Place(model, BUILD, BUILD, [port], last_core, CONTEXT_TOKENS))
    more = ("--max-num-seqs", str(streams), "--num-gpu-blocks-override", str(1 + POOL_TOKENS // VLLM_BLOCK))
    return Launch((*own.command, *more), own.env)


def tokens(port: int) -> int:
    """Return how many tokens the server has generated so far."""
    return counted(httpx.get(f"http://127.0.0.1:{port}/metrics").raise_for_status().text)


def counted(metrics: str) -> int:
    """Return the tokens of vLLM's metrics."""
    return sum(int(float(found)) for found in _GENERATED.findall(metrics))
