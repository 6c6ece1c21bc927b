"""The servers that are compared: how each is started, and what its requests have of their own.

All get the same weights, cores, threads and a pool of as many tokens. A server is found in an environment of
its own under `build/` (`bench/peers-install.sh`); one that is not there is a row with the reason. The others
are measured at several settings each, as their manuals advise them: what is compared is the best in each row.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from bench._peers_model import PeerModel, has_bf16
from samovar.configs.settings import EngineSettings

KV_BYTES_PER_TOKEN = 23040  # of the default model in bfloat16
VLLM_BLOCK = 128  # its default on a CPU
LLAMA_CPP_GRID: Mapping[str, Mapping[str, object]] = {
    "": {},
    "no-flash": {"--flash-attn": "off"},  # a short turn over a long history is quicker without, on CPUs
    "16-slots": {"--parallel": 16},
    "ngram": {"--spec-type": "ngram-mod"},  # its drafts
    "small-batch": {"--batch-size": 64, "--ubatch-size": 64},  # short gaps beside a prompt
}
VLLM_GRID: Mapping[str, Mapping[str, object]] = {
    "": {},
    "block-32": {"--block-size": 32},
    "block-16": {"--block-size": 16},
    "chunk-512": {"--max-num-batched-tokens": 512},  # short gaps beside a prompt
}
"""What each has besides the same for all, by what is put behind its name."""
CHUNK_TOKENS = 128  # of LMCache; a multiple of the block
STEPS = ("native-bf16", "native", "lean", "transformers")
INSTALL = "bash bench/peers-install.sh"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server runs. `state`: a folder that a restart finds again. `ports`: free ones."""

    model: PeerModel
    build: Path
    state: Path
    ports: Sequence[int]
    cores: Sequence[int]
    pool_tokens: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def pool_bytes(self) -> int:
        return self.pool_tokens * KV_BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True)
class Launch:
    """One process of a server. `ready_port`: wait until it listens there before the next is started."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    ready_port: int | None = None


class Peer(Protocol):
    """A server under comparison, at one setting.

    `product`: whose it is, where it has several settings. `forgets`: why nothing is left after a restart;
    empty = it keeps it. `asked_step`: the forward pass it must run, or nothing is measured; empty = any.
    `environment`: its folder in `build`; its `.installed` has the versions; empty = this checkout.
    """

    name: str
    product: str
    forgets: str
    asked_step: str
    environment: str

    def missing(self, build: Path) -> str:
        """Return why it cannot run here; empty = it can."""

    def launches(self, place: Place) -> list[Launch]:
        """Return its processes in the order of their start; the last one answers `GET /health`."""

    def fields(self, session: str) -> dict[str, object]:
        """Return what a request to it has besides OpenAI's fields."""

    def step(self, output: str) -> str:
        """Return which forward pass it says that it runs, from its output; empty = it does not say."""


def _named(product: str, setting: str) -> str:
    return f"{product}-{setting}" if setting else product


class Samovar:
    """`samovar serve`. `asked_step`: as `engine.step` has it; empty = as it is by default."""

    forgets = ""
    environment = ""

    def __init__(self, name: str, asked_step: str = "", *, drafts: bool = True) -> None:
        self.name = self.product = name
        self.asked_step = asked_step
        self._drafts = drafts

    def missing(self, build: Path) -> str:
        if not self.asked_step:
            return ""
        if "step" not in EngineSettings.model_fields:
            return "this version has no setting engine.step"
        try:
            EngineSettings.model_validate({"step": self.asked_step})
        except ValidationError as error:
            return f"engine.step={self.asked_step}: {error.errors()[0]['msg']}"
        return ""

    def launches(self, place: Place) -> list[Launch]:
        flags = {
            "--port": place.ports[0],
            "--engine.threads": len(place.cores),
            "--engine.pool-bytes-max": place.pool_bytes,
            "--tiers.nvme.dir": place.state / "kv",
            "--limits.request-timeout-s": 1800,
            **({"--engine.step": self.asked_step} if self.asked_step else {}),
            **({} if self._drafts else {"--engine.draft-tokens-max": 0}),
        }
        program = str(Path(sys.executable).with_name("samovar"))
        env = {
            "SAMOVAR_AUTH__SERVER_SECRET": "bench-" * 6,  # what a restart finds is of the same tenant
            "XDG_STATE_HOME": str(place.state / "state"),
        }
        return [Launch((program, "serve", *_words(flags)), env)]

    def fields(self, session: str) -> dict[str, object]:
        return {"session_id": session}

    def step(self, output: str) -> str:
        return step_said(output)


class LlamaCpp:
    """llama.cpp's server: four slots that share the pool; what leaves it is kept in main memory."""

    product = "llama.cpp"
    environment = "llama.cpp"
    asked_step = ""
    forgets = "its slots are saved to disk only by calls of /slots by hand"

    def __init__(self, setting: str = "") -> None:
        self.name = _named(self.product, setting)
        self._setting = setting

    def missing(self, build: Path) -> str:
        return _absent(_llama_server(build))

    def launches(self, place: Place) -> list[Launch]:
        threads = len(place.cores)
        flags = {
            "--model": place.model.gguf,
            "--alias": place.model.name,
            "--host": "127.0.0.1",
            "--port": place.ports[0],
            "--threads": threads,
            "--threads-batch": threads,
            "--parallel": 4,
            "--ctx-size": place.pool_tokens,
            "--cache-ram": 2048,
            **LLAMA_CPP_GRID[self._setting],
        }
        command = (str(_llama_server(place.build)), *_words(flags))
        return [Launch((*command, "--kv-unified"), {})]

    def fields(self, session: str) -> dict[str, object]:
        return {"cache_prompt": True}

    def step(self, output: str) -> str:
        return ""


class Vllm:
    """vLLM on a CPU, in float32 where that has no bfloat16 (it emulates it, at three times the time)."""

    product = "vllm"
    asked_step = ""
    forgets = "it keeps nothing outside its process"
    environment = "vllm"

    def __init__(self, setting: str = "") -> None:
        self.name = _named(self.product, setting)
        self._setting = setting

    def missing(self, build: Path) -> str:
        return _absent(build / self.environment / "bin" / "vllm")

    def launches(self, place: Place) -> list[Launch]:
        return [Launch((*self._command(place), *self._more(place)), self._env(place))]

    def fields(self, session: str) -> dict[str, object]:
        return {}

    def step(self, output: str) -> str:
        return ""

    def _command(self, place: Place) -> tuple[str, ...]:
        flags: dict[str, object] = {
            "--served-model-name": place.model.name,
            "--host": "127.0.0.1",
            "--port": place.ports[0],
            "--dtype": "bfloat16" if has_bf16() else "float32",
            "--block-size": VLLM_BLOCK,
            **VLLM_GRID[self._setting],
        }
        block = int(str(flags["--block-size"]))
        flags |= {
            "--num-gpu-blocks-override": 1 + place.pool_tokens // block,  # one is vLLM's own
            "--max-model-len": place.pool_tokens // block * block,
        }
        program = str(place.build / self.environment / "bin" / "vllm")
        return (
            program,
            "serve",
            str(place.model.directory),
            *_words(flags),
            "--enable-prompt-tokens-details",
        )

    def _more(self, place: Place) -> tuple[str, ...]:
        return ()

    def _env(self, place: Place) -> dict[str, str]:
        return {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in place.cores),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CACHE_ROOT": str(place.build / "peers" / "vllm-cache"),  # compiled once
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": os.pathsep.join(
                [str(place.build / self.environment / "bin"), os.environ.get("PATH", "")]
            ),
        }


class VllmLmcache(Vllm):
    """vLLM with LMCache's server beside it: main memory over files."""

    product = "vllm+lmcache"
    forgets = ""
    environment = "lmcache"

    def missing(self, build: Path) -> str:
        return super().missing(build) or _absent(build / self.environment / "bin" / "lmcache")

    def launches(self, place: Place) -> list[Launch]:
        files = place.state / "lmcache"
        files.mkdir(parents=True, exist_ok=True)
        flags = {
            "--host": "127.0.0.1",
            "--port": place.ports[1],
            "--http-port": place.ports[2],
            "--l1-size-gb": 2,
            "--chunk-size": CHUNK_TOKENS,
            "--eviction-policy": "LRU",
            "--supported-transfer-mode": "engine_driven",  # the only one of a worker on a CPU
            "--shm-name": f"lmcache-{place.ports[1]}",  # its bytes would pass a socket, pickled
            "--l2-adapter": json.dumps({"type": "fs", "base_path": str(files)}),
        }
        program = str(place.build / self.environment / "bin" / "lmcache")
        command = (program, "server", *_words(flags))
        return [Launch(command, self._env(place), ready_port=place.ports[1]), *super().launches(place)]

    def _more(self, place: Place) -> tuple[str, ...]:
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": place.ports[1],
                "lmcache.mp.eager_prefetch": True,
            },
        }
        return ("--kv-transfer-config", json.dumps(connector))

    def _env(self, place: Place) -> dict[str, str]:
        return {**super()._env(place), "PYTHONHASHSEED": "0"}


PEERS: tuple[Peer, ...] = (
    Samovar("samovar"),
    Samovar("samovar-undrafted", drafts=False),
    Samovar("samovar-native-bf16", "native-bf16"),
    Samovar("samovar-native", "native"),
    Samovar("samovar-lean", "lean"),
    Samovar("samovar-transformers", "transformers"),
    *(LlamaCpp(setting) for setting in LLAMA_CPP_GRID),
    *(Vllm(setting) for setting in VLLM_GRID),
    VllmLmcache(),
)
PRODUCTS: Mapping[str, str] = {peer.name: peer.product for peer in PEERS}


def versions(peers: Sequence[Peer], build: Path) -> dict[str, str]:
    """Return what is installed of each peer."""
    files = {peer.name: build / peer.environment / ".installed" for peer in peers if peer.environment}
    return {name: file.read_text().strip() for name, file in files.items() if file.exists()}


def step_said(output: str) -> str:
    """Return the step that `samovar serve` says it runs."""
    for line in output.splitlines():
        words: list[str] = re.findall(r"[a-z0-9.-]+", line.lower())
        kinds = [word for word in words[words.index("step") :] if word in STEPS] if "step" in words else []
        if kinds:
            return kinds[0]
    return ""


def _llama_server(build: Path) -> Path:
    return build / "llama.cpp" / "llama-server"


def _words(flags: Mapping[str, object]) -> Iterator[str]:
    """Yield flags and their values as a command has them."""
    return (str(one) for pair in flags.items() for one in pair)


def _absent(path: Path) -> str:
    return "" if path.exists() else f"{path} is not there: {INSTALL}"
