"""A replica whose engine costs nothing: it says one token for every open answer at a set rate.

All else is the product's: deployment, engine thread, routes, ingress, proxy. A token's text is the time at
which it was made, so that a client on the same machine knows how long it was on its way.

As a program: `samovar serve` with such a replica, `python -m bench._front_engine --step-ms 20 FLAGS`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from samovar.cache_tiers.pricing import PrefillPrice
from samovar.replicas.messages import (
    Admitted,
    Delta,
    EngineStats,
    Event,
    GenerateRequest,
    Receipt,
    Refused,
    ReplicaInfo,
)
from samovar.replicas.serving.deployment import Replica
from samovar.replicas.serving.served_engine import OwnEngine

STEP_VARIABLE = "BENCH_STEP_MS"
PRICE = PrefillPrice(c0_s=0.0, a_s=0.0, b_s=0.0, step_tokens=512)


class ScriptedEngine:
    """What the engine thread needs of an engine. Its first text also says when it was asked."""

    def __init__(self, replica_id: str, step_s: float) -> None:
        self.runner = SimpleNamespace(check=lambda: None, close=lambda: None)
        self.sampler = None
        self.requests = self
        self.offload = None
        self.meter = SimpleNamespace(price=PRICE)
        self.is_settled = True
        self.has_arrivals = False
        self.wake_in_s = None
        self.hold_s = 0.0
        self._replica_id = replica_id
        self._step_s = step_s
        self._next_s = 0.0
        self._left: dict[int, int] = {}
        self._asked_s: dict[int, float] = {}
        self._pause = threading.Event()
        self._generated = 0

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Nothing arrives between steps."""

    def open_keys(self) -> list[int]:
        return list(self._left)

    def add(self, key: int, request: GenerateRequest) -> Refused | None:
        self._left[key] = request.sampling.max_tokens
        self._asked_s[key] = time.monotonic()
        return None

    def abort(self, key: int) -> bool:
        self._asked_s.pop(key, None)
        return self._left.pop(key, None) is not None

    def forget(self, tags: Collection[bytes]) -> int:
        return 0

    def step(self) -> list[tuple[int, Event]]:
        """Return a token for each answer, `step_s` after the last ones."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._pause.wait(self._next_s - now_s)
            now_s = time.monotonic()
        self._next_s = max(now_s, self._next_s + self._step_s)
        text, events = f"{now_s:.6f} ", []
        for key, left in list(self._left.items()):
            said = text
            if key in self._asked_s:
                said = f"{self._asked_s.pop(key):.6f} {text}"
                events.append((key, Admitted(self._replica_id, 0, 0.0, Receipt())))
            events.append((key, Delta(0, said, (11,), (), "length" if left == 1 else None)))
            if left == 1:
                del self._left[key]
            else:
                self._left[key] = left - 1
        self._generated += len(events)
        return events

    def stats(self) -> EngineStats:
        return EngineStats(self._replica_id, running=len(self._left), generated_tokens=self._generated)

    def check_integrity(self) -> None:
        """There is nothing to be wrong."""


class ScriptedReplica(Replica):
    """The Serve deployment with a scripted engine."""

    def build(self, settings: Any, model_dir: Path, replica_id: str, notes: Any) -> Any:
        """Return the engine, as ours is served."""
        from samovar.replicas.model import inspect_model

        spec = inspect_model(model_dir)
        info = ReplicaInfo(
            replica_id=replica_id,
            model_name=spec.name,
            context_tokens_max=spec.context_tokens_max,
            device="none",
            dtype="none",
            threads=1,
            exact=True,
            exactness="a script computes nothing",
            attention="none",
            step="a script",
            dtype_sentence="none",
            block_tokens=settings.engine.block_tokens,
            kv_dtype="none",
            bytes_per_token=1,
            pages=1,
            pool_bytes=1,
            load_s=0.0,
            model=spec.fingerprint.hex(),
        )
        step_s = float(os.environ[STEP_VARIABLE]) / 1000
        return OwnEngine(ScriptedEngine(replica_id, step_s), info, settings.engine)  # type: ignore[arg-type]


def main() -> int:
    """Serve until SIGTERM."""
    from bench._front_engine import ScriptedReplica as Kind  # Ray's workers find it by its module
    from samovar.cluster.serve.app import serve_forever
    from samovar.configs.loader import load

    _, step_ms, *flags = sys.argv[1:]
    os.environ[STEP_VARIABLE] = step_ms
    return serve_forever(load(None, os.environ, flags).settings, kind=Kind)


if __name__ == "__main__":
    sys.exit(main())
