"""What the tests of the tiers through the real service share: a service with tiers, and people who chat.

Pools are small, so that `overrun` makes every block leave the GPU's; engines have one thread, so that a
busy machine slows a test down and does not stop it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from samovar.cache_tiers.blocks.extent import ExtentHeader, session_of
from samovar.cache_tiers.blocks.record import decode_header
from samovar.cache_tiers.node.transfer import verified
from samovar.cluster.serve.s3_demo import S3Demo
from samovar.configs.sections import S3TierSettings
from samovar.router.auth import LOCAL_TENANT
from samovar.router.routing.session import tags_of_id
from tests.support.services.guests import Conversation, Guests
from tests.support.services.service import MODEL, Service, for_served_dtype, is_moving, until

MIB = 1024 * 1024
SECRET = "a-secret-for-tests-only"
ADMIN_KEY = "admin-key-for-tests"
BLOCK_TOKENS = 16
SETTLE_S = 60.0

FLAGS = {
    "engine.threads": "1",
    # A machine that has other work is no fault of a tier. `HASTY` is how it really is.
    "tiers.lookup-s-max": "10",
    "tiers.lookup-share": "100",
    "tiers.lookup-idle-share": "1",
    "tiers.hedge-slack-s": "5",
    # Returning turns and their references are then the same tokens, whoever remembers the reply.
    "limits.reply-memory-bytes-max": "0",
}
HASTY = {"tiers.hedge-slack-s": "0.05"}
_numbers = itertools.count(1)


class TierService(Service, Guests):
    """A service whose tiers are looked at. `folder` has its output and, below `kv`, its nvme tier."""

    def __init__(
        self,
        folder: Path,
        flags: Mapping[str, object] | None = None,
        *,
        secret: str = SECRET,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.nvme_dir = folder / "kv"
        self.secret = secret.encode()
        step = str((flags or {}).get("engine.step", "")) or None
        pool, cpu = (for_served_dtype(mib * MIB, step) for mib in (24, 256))
        sizes = {"engine.pool-bytes-max": pool, "tiers.cpu.bytes-max": cpu}
        chosen = {**FLAGS, **sizes, "tiers.nvme.dir": self.nvme_dir, **(flags or {})}
        super().__init__(
            folder / f"out-{next(_numbers)}.txt",
            *(part for name, value in chosen.items() for part in (f"--{name}", str(value))),
            key=key,
            env={"SAMOVAR_AUTH__SERVER_SECRET": secret, **(env or {})},
        )

    def kill(self) -> None:
        """SIGKILL, as when memory ran out: nobody has time for anything. All of ours ends with it."""
        everybody = self.processes()
        ours = set(self.tier_pids() + self.replica_pids())
        self.process.kill()
        self.process.wait(30)
        _, alive = psutil.wait_procs(everybody, 10)
        for process in alive:  # two agents of Ray's do not notice
            process.kill()
        assert not ours & {process.pid for process in alive}, f"outlived the service: {alive}"

    # -- people ----------------------------------------------------------------------------

    def overrun(self, key: str | None = None) -> None:
        """One prompt as long as the whole pool: whatever was cached there is gone."""
        tokens = int(self.replica()["pages_total"]) * BLOCK_TOKENS
        ids = random.Random(time.monotonic_ns()).choices(range(1000, 40000), k=tokens - 1)
        self._client(key).completions.create(model=MODEL, prompt=ids, max_tokens=1, temperature=0)

    def calm(self, key: str | None = None) -> None:
        """After a storm: a replica that saw slow lookups waits for none until it saw quick ones."""
        for number in range(15):
            content = f"{number} {uuid.uuid4()}"
            self.ask([{"role": "system", "content": content}], key=key, max_tokens=1)

    # -- what it says about itself -----------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        with self.http() as client:
            answer: dict[str, Any] = client.get("/cache/stats").raise_for_status().json()
        return answer

    def node(self) -> dict[str, Any] | None:
        """None while the tier actor is away."""
        nodes = self.stats()["nodes"]
        return nodes[0] if nodes else None

    def replica(self) -> dict[str, Any]:
        (replica,) = self.stats()["replicas"]
        return dict(replica)

    def tier(self, name: str) -> dict[str, Any]:
        node = until("the tier actor answers", self.node, SETTLE_S)
        assert node is not None
        return next(dict(tier) for tier in node["tiers"] if tier["name"] == name)

    def is_settled(self) -> bool:
        """Nobody is served, and nothing is on its way from or to a tier."""
        stats = self.stats()
        if not stats["nodes"]:
            return False
        busy = [is_moving(stats["nodes"][0])]
        for replica in stats["replicas"]:
            busy += [replica[what] for what in ("running", "waiting", "loading", "staged_bytes")]
            busy.append(replica["pages_active"])
        return not any(busy)

    def settle(self) -> None:
        until("everything is stored and nobody is served", self.is_settled, SETTLE_S)

    def check_books(self) -> None:
        """At rest: no page is lost, nothing wrong was ever found."""
        self.settle()
        for replica in self.stats()["replicas"]:
            assert replica["pages_free"] + replica["pages_cached"] == replica["pages_total"]
            assert replica["integrity_failures"] == 0
            assert "mismatch" not in replica["audits"]

    def tier_up(self, name: str) -> bool:
        """What the metrics say."""
        return self.total("samovar_tier_up", tier=name) == 1

    def tier_pids(self) -> list[int]:
        """The tier actor's process, when it runs."""
        pids = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile
                if "ray::TierActor" in " ".join(process.cmdline()):
                    pids.append(process.pid)
        return pids

    # -- what lies in its files --------------------------------------------------------------

    def session_tags(self, conversation: Conversation, tenant: str = LOCAL_TENANT) -> set[bytes]:
        return set(tags_of_id(self.secret, tenant, conversation.session))

    def on_disk(self, conversation: Conversation, tenant: str = LOCAL_TENANT) -> int:
        """Tokens of a conversation that lie in files."""
        tags = self.session_tags(conversation, tenant)
        held = records(self.nvme_dir).values()
        return sum(header.tokens for header in held if session_of(header.session) in tags)


COMPUTING_IS_DEAR: Mapping[str, object] = {"engine.step": "lean"}
"""For short prompts that are to come from a tier: the quickest step computes them sooner than S3 answers."""


@contextlib.contextmanager
def tier_service(
    folder: Path, flags: Mapping[str, object] | None = None, **more: Any
) -> Iterator[TierService]:
    """Ready; stopped by SIGTERM at the end, if nobody has killed it. It must say goodbye properly then."""
    service = TierService(folder, flags, **more)
    try:
        yield service.wait_ready()  # type: ignore[misc]
    finally:
        was_killed = service.process.poll() is not None
        code = service.stop()
    assert was_killed or code == 0, service.text


@contextlib.contextmanager
def s3_server(directory: Path, port: int) -> Iterator[S3Demo]:
    """Real, over `directory`. Whoever suspended it is forgiven."""
    demo = S3Demo(directory, port=port).start()
    try:
        yield demo
    finally:
        if demo.pid is not None:
            os.kill(demo.pid, signal.SIGCONT)
        demo.stop()


def s3_flags(demo: S3Demo) -> dict[str, object]:
    settings = demo.s3_settings(S3TierSettings())
    return {
        "tiers.s3.bucket": settings.bucket,
        "tiers.s3.endpoint": settings.endpoint,
        "tiers.s3.region": settings.region,
    }


def s3_env(demo: S3Demo) -> dict[str, str]:
    settings = demo.s3_settings(S3TierSettings())
    assert settings.access_key_id is not None
    assert settings.secret_access_key is not None
    return {
        "SAMOVAR_TIERS__S3__ACCESS_KEY_ID": settings.access_key_id.get_secret_value(),
        "SAMOVAR_TIERS__S3__SECRET_ACCESS_KEY": settings.secret_access_key.get_secret_value(),
    }


def records(directory: Path) -> dict[Path, ExtentHeader]:
    """All records in files below `directory`, of the nvme tier or of an S3 server. Each is whole and good.

    Raises `BadRecord` for one that is not.
    """
    found = {}
    for path in directory.glob("**/v1/**/*"):
        try:
            data = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:  # evicted meanwhile
            continue
        if path.suffix not in (".kv", "") or not data:
            continue
        record = np.frombuffer(data, dtype=np.uint8)
        header = decode_header(record, record_bytes=record.nbytes)
        found[path] = verified(record, header.address, record.nbytes)
    return found


def flag(value: Sequence[object] | Mapping[str, object]) -> str:
    """A list or an object as a flag takes it."""
    return json.dumps(value)
