"""A real `samovar serve` for tests: its own process, Ray cluster and port; stopped by pid."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import psutil
import torch
from prometheus_client.parser import text_string_to_metric_families

from samovar.configs.settings import ModelSettings
from samovar.replicas.model.device import choose_dtype
from samovar.replicas.native.native_step import NotNative
from tests.support.engines import native_steps

T = TypeVar("T")

MODEL = "SmolLM2-135M-Instruct"
START_S = 600.0
REPLICA = re.compile(r"ServeReplica:samovar-model-\w+:Replica")
READY = re.compile(r"^Samovar is ready: (https?://\S+)$", re.MULTILINE)


def free_port() -> int:
    """A free port where nobody else is given one by chance: Ray's processes take dozens while they start.

    Tests that run at the same time (xdist) draw from different ports.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = random.SystemRandom().randrange(20_000 + worker, 32_000, workers)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def for_served_dtype(nbytes: int, step: str | None = None) -> int:
    """A size meant for bfloat16's KV, in the dtype that is served here: as many tokens on any CPU.

    `step`: the service's `engine.step`; default: the environment's.
    """
    dtype = os.environ.get("SAMOVAR_MODEL__DTYPE", ModelSettings().dtype)
    step = step or os.environ.get("SAMOVAR_ENGINE__STEP", "auto")
    return nbytes * _served_dtype(dtype, step).itemsize // torch.bfloat16.itemsize


@cache
def _served_dtype(dtype: str, step: str) -> torch.dtype:
    settings, cpu = ModelSettings.model_validate({"dtype": dtype}), torch.device("cpu")
    return choose_dtype(settings, cpu, widens_weights=_is_native(step)).dtype


def _is_native(step: str) -> bool:
    try:
        native_steps.library(torch.bfloat16)
    except NotNative:
        return False
    return step in ("auto", "native-bf16", "native")


def until(what: str, poll: Callable[[], T], timeout_s: float = 20.0) -> T:
    """The first true value of `poll`; fails naming `what` and the last value."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = poll()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s, last {value!r}"
        time.sleep(0.05)


def is_moving(node: Mapping[str, Any]) -> bool:
    """Whether something waits for, or is on its way from or to a tier of a node, a row of `/cache/stats`."""
    moves = node["moves"]
    begun = sum(count for name, count in moves.items() if name.endswith(":planned"))
    over = sum(count for name, count in moves.items() if name.endswith((":done", ":failed")))
    return bool(node["queue"]) or begun != over


class Service:
    """`samovar serve` with some flags. `output` is a file with all it printed.

    `samovar`: the program; None: the one beside this Python.
    """

    def __init__(
        self,
        output: Path,
        *flags: str,
        key: str | None = None,
        admin_key: str | None = None,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        cwd: Path | None = None,
        samovar: Path | None = None,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = key
        self.admin_key = admin_key or key
        self.output = output
        if "--tiers.nvme.dir" not in flags:  # what an earlier run has told must not be remembered in this one
            flags = ("--tiers.nvme.dir", str(output.with_suffix(".kv")), *flags)
        program = samovar or Path(sys.executable).with_name("samovar")
        command = [str(program), "serve", "--port", str(self.port), *flags]
        self.process = subprocess.Popen(
            command,
            stdout=output.open("wb"),
            stderr=subprocess.STDOUT,
            # Who chats with a server of their own must not find this one.
            env={**os.environ, "XDG_STATE_HOME": str(output.with_suffix(".state")), **(env or {})},
            start_new_session=True,
            cwd=cwd,
        )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_ready(self) -> Service:
        def ready() -> bool:
            assert self.process.poll() is None, f"samovar serve ended: {self.text}"
            return READY.search(self.text) is not None

        until("samovar serve is ready", ready, START_S)
        return self

    def stop(self) -> int:
        """SIGTERM, as a supervisor does; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(90)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise

    # -- clients ---------------------------------------------------------------------------

    @property
    def headers(self) -> dict[str, str]:
        return _bearer(self.key)

    def openai(self, key: str | None = None) -> openai.OpenAI:
        api_key = key or self.key or "none"
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=120)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=120)

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """(name, labels) -> value."""
        with self.http() as client:
            text = client.get("/metrics", headers=_bearer(self.admin_key)).raise_for_status().text
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def total(self, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        samples = self.metrics().items()
        return sum(value for (sample, have), value in samples if sample == name and wanted <= have)

    def idle(self) -> bool:
        """No sequence runs or waits, and no page is held."""
        busy = (
            self.total("samovar_replica_running")
            + self.total("samovar_replica_waiting")
            + self.total("samovar_pages", state="active")
        )
        return busy == 0

    def says_exact(self) -> bool:
        """Whether the table at the start says that exact mode holds here."""
        return re.search(r"on:\s+bitwise", self.text) is not None

    def processes(self) -> list[psutil.Process]:
        """This service's process and all below it."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def replica_pids(self) -> list[int]:
        """Processes of this service's replicas."""
        return self.pids_of(REPLICA)

    def pids_of(self, title: re.Pattern[str] | str) -> list[int]:
        """Processes of this service with that in their title, as Ray gives its actors."""
        pids = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile
                if re.search(title, " ".join(process.cmdline())):
                    pids.append(process.pid)
        return pids


def _bearer(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@contextlib.contextmanager
def serving(
    output: Path,
    *flags: str,
    key: str | None = None,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    samovar: Path | None = None,
) -> Iterator[Service]:
    service = Service(output, *flags, key=key, env=env, cwd=cwd, samovar=samovar)
    try:
        yield service.wait_ready()
    finally:
        service.stop()
