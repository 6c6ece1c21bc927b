"""The engines of `bench.vllm`: a real vLLM, alone and over tiers, each asked through one `Server`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench import _report as report
from bench._peers_client import Client, Reply
from bench._peers_processes import Running, until_ready
from bench._peers_servers import Launch, Peer, Place, Vllm, VllmLmcache
from tests.support.services.rclone import s3_server

BLOCK_TOKENS, PAGES, MODEL_TOKENS = 32, 135, 4224
POOL_TOKENS = BLOCK_TOKENS * PAGES
RAM_BYTES = 4 << 30
START_S = 600.0
FLOAT32 = (
    *("--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--max-model-len", str(MODEL_TOKENS)),
    *("--num-gpu-blocks-override", str(PAGES)),
)


class VllmSamovar(Vllm):
    """vLLM with `samovar-tiers` beside it: main memory over files, as it is by default."""

    name = "vllm+samovar"
    forgets = ""

    def missing(self, build: Path) -> str:
        program = build / self.environment / "bin" / "samovar-tiers"
        return super().missing(build) or (
            "" if program.exists() else f"{program} is not there: make vllm-env"
        )

    def launches(self, place: Place) -> list[Launch]:
        program = str(place.build / self.environment / "bin" / "samovar-tiers")
        flags = {
            "--socket": place.state / "tiers.sock",
            "--metrics-port": place.ports[1],
            **self._tiers(place),
        }
        words = tuple(str(word) for pair in flags.items() for word in pair)
        env = {**self._env(place), **self._secrets()}
        return [Launch((program, *words), env, ready_port=place.ports[1]), *super().launches(place)]

    def _tiers(self, place: Place) -> Mapping[str, object]:
        return {"--tiers.nvme.dir": place.state / "kv", "--tiers.cpu.bytes-max": RAM_BYTES}

    def _secrets(self) -> Mapping[str, str]:
        return {}

    def _more(self, place: Place) -> tuple[str, ...]:
        return ("--kv-transfer-config", json.dumps(connector(place.state / "tiers.sock")))


class VllmSamovarS3(VllmSamovar):
    """The same with a bucket instead of files. Its S3 server's CPU is not counted."""

    name = "vllm+samovar-s3"

    def __init__(self, bucket: Mapping[str, str], secrets: Mapping[str, str]) -> None:
        self._bucket, self._keys = bucket, secrets

    def _tiers(self, place: Place) -> Mapping[str, object]:
        return {"--tiers.cpu.bytes-max": RAM_BYTES, "--tiers.nvme.bytes-max": 0, **self._bucket}

    def _secrets(self) -> Mapping[str, str]:
        return self._keys


PEERS: tuple[Peer, ...] = (Vllm(), VllmSamovar(), VllmLmcache())


@contextmanager
def over_s3(folder: Path) -> Iterator[VllmSamovarS3]:
    """Run an S3 server over `folder` while the context is open; yield the engine over it."""
    with s3_server(folder) as s3:
        assert s3.access_key_id is not None
        assert s3.secret_access_key is not None
        bucket = {
            "--tiers.s3.bucket": str(s3.bucket),
            "--tiers.s3.endpoint": str(s3.endpoint),
            "--tiers.s3.region": str(s3.region),
        }
        secrets = {
            "SAMOVAR_TIERS__S3__ACCESS_KEY_ID": s3.access_key_id.get_secret_value(),
            "SAMOVAR_TIERS__S3__SECRET_ACCESS_KEY": s3.secret_access_key.get_secret_value(),
        }
        yield VllmSamovarS3(bucket, secrets)


def connector(socket: Path) -> dict[str, Any]:
    """Return what vLLM is told of the connector."""
    return {
        "kv_connector": "SamovarConnector",
        "kv_connector_module_path": "samovar.cache_tiers.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket)},
    }


@dataclass(frozen=True, slots=True)
class Reading:
    """What one request took, or several at once. `cpu_s`: of all processes of the engine.

    Of one token: until it came; `after_cpu_s` is what was still done then (stores). Of a longer answer:
    until its end, `ttft_s` of its slowest, `gap_s` the median between tokens.
    """

    engine: str
    work: str
    tokens: int
    ttft_s: float
    cpu_s: float
    after_cpu_s: float
    cached: int
    gap_s: float = 0.0


@dataclass
class Server:
    """One engine with all its processes. `start` after `stop` finds its files again."""

    peer: Peer
    place: Place
    output: Path = field(init=False)

    def __post_init__(self) -> None:
        self._running = Running(self.place.cores)
        self.output = report.OUT_DIR / f"vllm-{self.peer.name}.txt"
        self.output.write_bytes(b"")
        self._client = Client(self.place.url, self.place.model.name, self._running.cpu_s, self.peer.fields)

    def start(self) -> None:
        *before, own = self.peer.launches(self.place)
        for launch in (*before, replace(own, command=(*own.command, *FLOAT32))):
            self._running.start(launch.command, launch.env, self.output)

    def until_ready(self) -> None:
        until_ready(self._running, self._is_ready, self.output, START_S)
        for _ in range(2):  # the first requests of a process pay for what is made once
            self._client.ask(prompt(f"first {random.random()}", 300), "first")
        self._running.processes()
        self._running.settle()

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.place.url}/health", timeout=5).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def ask(self, work: str, prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> Reading:
        """Ask for `max_tokens` behind each of the prompts, all at once; wait until all is done."""
        self._running.processes()
        began_cpu_s = self._running.cpu_s()
        if len(prompts) == 1:
            replies = [self._client.ask(prompts[0], work, max_tokens=max_tokens)]
        else:
            replies = self._client.ask_at_once(prompts, work, max_tokens)
        whole_cpu_s = self._running.cpu_s() - began_cpu_s
        cpu_s = replies[0].first_cpu_s if max_tokens == 1 else whole_cpu_s
        return Reading(
            self.peer.name,
            work,
            len(prompts[0]),
            max(reply.ttft_s for reply in replies),
            cpu_s,
            whole_cpu_s - cpu_s + self._running.settle(),
            min(reply.cached_tokens for reply in replies),
            _gap_s(replies),
        )

    def stop(self) -> None:
        self._running.stop()


def _gap_s(replies: Sequence[Reply]) -> float:
    gaps_s = [gap for reply in replies for gap in reply.gaps_s]
    return median(gaps_s) if gaps_s else 0.0


def prompt(seed: object, tokens: int) -> list[int]:
    rng = random.Random(f"vllm {seed}")
    return [rng.randrange(100, 40_000) for _ in range(tokens)]
