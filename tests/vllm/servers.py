"""`vllm serve` and `samovar-tiers` as people start them, from vLLM's own environment; stopped by pid."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from samovar.cache_tiers.messages import NodeStats
from samovar.cache_tiers.socket.client import SocketLink
from tests.support.services.service import free_port, until

MIB = 1 << 20
BLOCK_TOKENS, PAGES, MODEL_TOKENS = 32, 67, 2048
START_S, ANSWER_S, STOP_S = 400.0, 240.0, 60.0
OUTPUT_TOKENS = 12
SETTLE_S = 0.3
LOOKUP_S_MAX = 2.0  # on a machine where all wait for one core


@dataclass(frozen=True)
class Answer:
    """`hit_tokens`: of all caches, as vLLM's usage says; `by_tier`: of ours, as the receipt says."""

    text: str
    token_ids: tuple[int, ...]
    hit_tokens: int
    receipt: dict[str, Any] = field(default_factory=dict)

    @property
    def by_tier(self) -> dict[str, int]:
        return dict(self.receipt.get("tokens_by_tier", {}))


class Process:
    """A program of vLLM's environment, in a process group of its own. `log`: what it says."""

    def __init__(self, words: Sequence[object], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [str(word) for word in words],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=log.parent,
            )
        self.pid = self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def end(self, number: int = signal.SIGTERM) -> None:
        if not self.has_ended():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        self.send(signal.SIGKILL)  # what it has started and left
        self._process.wait(STOP_S)


class Tiers:
    """`samovar-tiers` at a socket. `start` after `end` is another life, maybe with other flags."""

    def __init__(self, bin_dir: Path, folder: Path, socket: Path) -> None:
        self._bin_dir, self.folder, self.socket = bin_dir, folder, socket
        self.kv = folder / "kv"
        self._process: Process | None = None
        self._link = SocketLink(socket, "tests")

    def start(self, flags: Mapping[str, object] | None = None, env: Mapping[str, str] | None = None) -> None:
        words = {"tiers.nvme.dir": self.kv, "tiers.cpu.bytes-max": 512 * MIB}
        words |= {"tiers.nvme.bytes-max": 1024 * MIB} | dict(flags or {})
        self._process = Process(
            [self._bin_dir / "samovar-tiers", "--socket", self.socket]
            + [f"--{name}={value}" for name, value in words.items()],
            env or {},
            self.folder / "tiers.log",
        )
        until("the tiers' answer", self._is_ready, START_S)

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert not self._process.has_ended(), self._process.log.read_text()[-2000:]
        return self._link.ping() is not None

    def end(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.end(number)
            self._process = None

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send(number)

    def stats(self) -> NodeStats:
        return until("the tiers' counters", self._link.stats)

    def held(self, tier: str) -> int:
        """Blocks that a tier has now."""
        return next((one.blocks for one in self.stats().tiers if one.name == tier), 0)

    def until_settled(self) -> None:
        """Wait until what was offered has been taken."""
        before: list[tuple[int, dict[str, int]]] = []

        def is_settled() -> bool:
            stats = self.stats()
            now = (self.held("cpu"), dict(stats.stores))
            is_same = bool(before) and before[-1] == now and stats.queue == 0
            before.append(now)
            time.sleep(SETTLE_S)
            return is_same

        until("stores that are over", is_settled, 60.0)

    def until_held(self, blocks: int, tier: str = "cpu") -> None:
        until(f"{blocks} blocks in {tier}", lambda: self.held(tier) >= blocks, 60.0)


class Vllm:
    """`vllm serve` with float32 and a small pool. `socket`: None = without the connector.

    `ranks`: of tensor parallelism, all on the first core: they spin, and the tiers need one.
    """

    def __init__(self, bin_dir: Path, folder: Path, model: Path, socket: Path | None, ranks: int = 1) -> None:
        self._bin_dir, self._folder, self._model, self._socket = bin_dir, folder, model, socket
        self._ranks = ranks
        self._process: Process | None = None
        self._url = ""

    def start(self, **options: Any) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        words: list[object] = [self._bin_dir / "vllm", "serve", self._model, "--served-model-name", "m"]
        words += ["--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--enforce-eager"]
        words += ["--block-size", BLOCK_TOKENS, "--num-gpu-blocks-override", PAGES]
        words += ["--max-model-len", MODEL_TOKENS, "--enable-prompt-tokens-details"]
        words += ["--tensor-parallel-size", self._ranks]
        if self._socket is not None:
            config = {
                "kv_connector": "SamovarConnector",
                "kv_connector_module_path": "samovar.cache_tiers.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    **{"socket": str(self._socket), "trusts_clients": True},
                    "lookup_s_max": LOOKUP_S_MAX,
                },
            }
            words += ["--kv-transfer-config", json.dumps(config | options)]
        env = {
            "PYTHONPATH": "",  # it has the wheel
            "PATH": f"{self._bin_dir}:{os.environ['PATH']}",
            **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"},
            **{"VLLM_CPU_OMP_THREADS_BIND": "|".join("0" * self._ranks), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"},
            **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(self._bin_dir.parent / "cache")},
        }
        self._process = Process(words, env, self._folder / "vllm.log")

    def until_ready(self) -> None:
        until("vLLM's answer", self._is_ready, START_S)

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert not self._process.has_ended(), self._process.log.read_text()[-4000:]
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self._url}/health", timeout=5, trust_env=False).status_code == 200
        return False

    def end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def log(self) -> str:
        return (self._folder / "vllm.log").read_text(errors="replace")

    def ask(self, ids: Sequence[int], *, tokens: int = OUTPUT_TOKENS, **samovar: str) -> Answer:
        """Return the greedy answer. `samovar`: `tenant` and `session`."""
        reply = self._post("/v1/completions", self._body(ids, tokens, samovar)).json()
        choice, usage = reply["choices"][0], reply["usage"]
        hit = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        receipt = (reply.get("kv_transfer_params") or {}).get("samovar") or {}
        return Answer(choice["text"], tuple(choice["token_ids"]), hit, receipt)

    def leave(self, ids: Sequence[int], *, after_s: float | None = None, tokens: int = 200) -> None:
        """Ask, and hang up: after the first token, or after so many seconds without one."""
        body = self._body(ids, tokens, {}) | {"stream": True}
        wait = httpx.Timeout(ANSWER_S, read=after_s or ANSWER_S)
        with (
            suppress(httpx.ReadTimeout),
            httpx.Client(trust_env=False, timeout=wait) as client,
            client.stream("POST", f"{self._url}/v1/completions", json=body) as reply,
        ):
            next(reply.iter_lines(), None)

    def forget(self, *, external: bool = False) -> None:
        """Empty vLLM's own prefix cache; `external`: the connector's, too."""

        def is_done() -> bool:
            # It answers 200 also where pages were in use: asked again until stores have freed them.
            self._post(f"/reset_prefix_cache?reset_external={str(external).lower()}")
            return self.pages_used() == 0

        until("an empty prefix cache", is_done, 30.0)
        self._post("/reset_prefix_cache")

    def pages_used(self) -> float:
        found = [line for line in self.metrics() if line.startswith("vllm:kv_cache_usage_perc")]
        return float(found[0].split()[-1])

    def metrics(self) -> list[str]:
        return httpx.get(f"{self._url}/metrics", timeout=30, trust_env=False).text.splitlines()

    def _body(self, ids: Sequence[int], tokens: int, samovar: Mapping[str, str]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "prompt": list(ids), "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        return body | ({"kv_transfer_params": dict(samovar)} if samovar else {})

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        reply = httpx.post(f"{self._url}{path}", json=body, timeout=ANSWER_S, trust_env=False)
        assert reply.status_code == 200, (path, reply.status_code, reply.text[:500])
        return reply


def prompt(seed: object, tokens: int) -> list[int]:
    """Token ids that nobody else has asked."""
    rng = random.Random(f"prompt {seed}")
    return [rng.randrange(100, 40_000) for _ in range(tokens)]
