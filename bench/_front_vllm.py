"""vLLM behind our front door, and vLLM's own server alone, in `bench.front`: the same model and arguments.

vLLM computes in a process of its own (`EngineCore`) and speaks HTTP in another, so what a token costs outside
the engine is what all but that process take of the CPU. The engine is a real one on one thread, of the
default model with two of its layers: so small that the rate is one that a GPU has. Tokens are those that it
counts.
Needs `samovar engines add vllm`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save_file

from samovar.cluster.engines.interpreter import chosen_python
from samovar.configs.loader import load
from samovar.configs.settings import ModelSettings, Settings
from samovar.replicas.model import ensure_model
from samovar.replicas.vllm.source import engine_arguments, process_environment

CONTEXT_TOKENS = 8192
LAYERS = 2
TOY = Path("build/front-toy")
NAME = "SmolLM2-135M-Instruct"
FLAGS: Mapping[str, str] = {
    "--engine.kind": "vllm",
    "--engine.vllm.options": json.dumps({"enforce_eager": True}),
    "--engine.threads": "1",
    "--engine.device": "cpu",
    "--engine.sequences-max": "64",
    "--engine.pool-bytes-max": str(1 << 30),
    "--model.dtype": "float32",
    "--model.served-name": NAME,
    "--model.context-tokens-max": str(CONTEXT_TOKENS),
    "--tiers.enabled": "false",
    "--server.start-timeout-s": "600",
}
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_GENERATED = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def toy(folder: Path) -> Path:
    """Write the default model with `LAYERS` of its layers, if it is not there yet; return its directory."""
    if not folder.exists():
        whole, fresh = ensure_model(ModelSettings()), folder.with_suffix(".new")
        fresh.mkdir(parents=True, exist_ok=True)
        for file in whole.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, fresh)
        config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
        (fresh / "config.json").write_text(json.dumps(config))
        tensors = {
            name: tensor
            for file in whole.glob("*.safetensors")
            for name, tensor in load_file(file).items()
            if (layer := _LAYER.search(name)) is None or int(layer[1]) < LAYERS
        }
        save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
        fresh.rename(folder)
    return folder


def behind_samovar(port: int, flags: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
    """Return how our service with a replica of vLLM's is started."""
    words = [*(word for pair in FLAGS.items() for word in pair), "--model.path", str(toy(TOY))]
    return [sys.executable, "-m", "samovar", "serve", "--port", str(port), *words, *flags], {}


def alone(port: int, flags: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
    """Return how vLLM's own server is started as that replica starts vLLM. `flags`: ours, for both.

    Raises `StartFailed` where it is not installed.
    """
    given = [*(word for pair in FLAGS.items() for word in pair), "--model.path", str(toy(TOY))]
    settings: Settings = load(None, os.environ, [*given, *flags]).settings
    vllm = chosen_python(settings).parent / "vllm"
    model, pool_bytes = ensure_model(settings.model), settings.engine.pool_bytes_max
    arguments = engine_arguments(settings, model, CONTEXT_TOKENS, "float32", pool_bytes, {}, on_cpu=True)
    command = [str(vllm), "serve", str(arguments.pop("model")), "--host", "127.0.0.1", "--port", str(port)]
    env = process_environment(settings.engine.threads) | {"HF_HUB_OFFLINE": "1"}
    env["PATH"] = os.pathsep.join([str(vllm.parent), os.environ.get("PATH", "")])
    return [*command, *words_of(arguments)], env


def words_of(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield arguments of vLLM's engine as its command takes them."""
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, dict):
            yield f"--{flag}={json.dumps(value)}"
        elif isinstance(value, list):
            yield from (f"--{flag}", *map(str, value))
        else:
            yield f"--{flag}={value}"


def tokens_alone(port: int) -> int:
    """Return how many tokens vLLM's server has generated so far."""
    return counted(httpx.get(f"http://127.0.0.1:{port}/metrics").raise_for_status().text)


def counted(metrics: str) -> int:
    """Return the tokens of vLLM's metrics."""
    return sum(int(float(found)) for found in _GENERATED.findall(metrics))


def tokens_behind(port: int) -> int:
    """Return how many tokens our replicas have generated so far."""
    stats = httpx.get(f"http://127.0.0.1:{port}/cache/stats").raise_for_status().json()
    return sum(int(replica["generated_tokens"]) for replica in stats["replicas"])
