"""Builds a node's media and link from its settings, and counts its lives. Without Ray."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from samovar.cache_tiers.blocks import CPU, NVME, S3, TIERS, TierError, TierName
from samovar.cache_tiers.media import FaultyTier, NvmeTier, Tier, measure_direct_io, open_medium
from samovar.cache_tiers.media import (
    s3 as s3_tier,
)
from samovar.cache_tiers.node.manager import NodeMedia
from samovar.cache_tiers.node.state import put_aside
from samovar.cache_tiers.transport import LazyLink, NixlLink, TlsLink
from samovar.configs.json_text import parse_json
from samovar.configs.sections import FaultSettings, FaultsSettings, PeerSettings, TierSettings
from samovar.configs.tls import node_tls

if TYPE_CHECKING:
    from samovar.cache_tiers.encryption import Keys

logger = logging.getLogger(__name__)

PENDING_FILE = "owed.json"
STARTS_FILE = "starts.json"
TICK_S = 1.0
"""So often a node's process has it tick."""


def build_tiers(
    settings: TierSettings,
    nvme_dir: Path,
    *,
    make_cpu: Callable[[int], Tier],
    wall_clock: Callable[[], float],
    keys: Keys | None = None,
) -> NodeMedia:
    """Build the configured tiers with their injected faults; a tier that cannot be opened is off.

    `nvme_dir`: where files go (`settings.nvme.dir`, or `kv` in the model cache). `make_cpu(bytes_max)`.
    `keys`: that records of tiers which outlive this process are encrypted with; None: they are not.
    Takes the directory's lock; while another service holds it, the `nvme` tier is off, and waits for it.
    """
    TIERS.take_up(settings.more)
    built = NodeMedia()
    if cpu_bytes := settings.cpu.bytes_planned:
        _add(built, make_cpu(cpu_bytes), cpu_bytes, settings.faults.cpu)
    else:
        built.off[CPU.name] = "bytes_max is 0"
    if settings.nvme.bytes_max:
        try:
            nvme = _nvme(settings, nvme_dir, wall_clock)
        except TierError as error:
            _leave_out(built, NVME.name, settings.nvme.bytes_max, error)
            built.unopened.add(NVME.name)
        else:
            _add(built, nvme, settings.nvme.bytes_max, settings.faults.nvme)
            if why := nvme.why_not_ours():
                logger.warning("nvme tier: off until its directory is free: %s", why)
                built.late_pending_path = nvme_dir / PENDING_FILE
            else:
                built.pending_path = nvme_dir / PENDING_FILE
    else:
        built.off[NVME.name] = "bytes_max is 0"
    if not settings.s3.bucket:
        built.off[S3.name] = "no bucket"
    elif not settings.s3.bytes_max:
        built.off[S3.name] = "bytes_max is 0"
    else:
        try:
            s3 = s3_tier.S3Tier(settings.s3, wall_clock)
        except (ValueError, TierError) as error:
            _leave_out(built, S3.name, settings.s3.bytes_max, error)
            built.unopened.add(S3.name)
        else:
            _add(built, s3, settings.s3.bytes_max, settings.faults.s3)
    if settings.more.medium is not None:
        try:
            more = open_medium(settings.more)
        except TierError as error:
            _leave_out(built, settings.more.name, settings.more.bytes_max, error)
            built.unopened.add(settings.more.name)
        else:
            _add(built, more, settings.more.bytes_max, FaultSettings())
    if keys is not None:
        _encrypt(built, keys)
    return built


def _encrypt(built: NodeMedia, keys: Keys) -> None:
    """Encrypt what outlives this process; a medium that is not ours is off rather than in the clear."""
    from samovar.cache_tiers.encryption import EncryptedTier

    built.keys = keys
    for name, tier in list(built.tiers.items()):
        if name in (NVME.name, S3.name):
            built.tiers[name] = EncryptedTier(tier, keys)
        elif TIERS.kind(name).survives_process:
            tier.close()
            del built.tiers[name]
            built.off[name] = "its records would not be encrypted (tiers.encryption_key_file)"
            built.unopened.add(name)  # those of before are plain: no destroyed key reaches them


def build_link(settings: PeerSettings, agent: str, host: str) -> LazyLink:
    """Return the link to other nodes' memory, not opened yet.

    `agent`: "node id:incarnation"; `host`: this node's address, on which TLS listens.
    """
    if settings.transport == "ray":
        return LazyLink(None, "as configured")
    tls = node_tls()
    if tls is not None:  # which UCX has not
        made = partial(TlsLink, agent, tls, host, bytes_max=settings.arena_bytes, lease_s=settings.lease_s)
        return LazyLink(made, way="tls")
    return LazyLink(
        lambda: NixlLink(
            agent, arena_bytes=settings.arena_bytes, lease_s=settings.lease_s, clock=time.monotonic
        )
    )


class KillPoint:
    """A `Reach` for tests that kills this process when a move reaches the state set in `settings`.

    `starts`: how often the actor was started, this time included.
    """

    def __init__(self, settings: FaultsSettings, starts: int, kill: Callable[[], None] | None = None) -> None:
        self._settings = settings
        self._is_armed = settings.kill_at is not None and starts <= settings.kill_starts
        self._seen: Counter[str] = Counter()
        self._kill = kill or (lambda: os.kill(os.getpid(), signal.SIGKILL))

    def __call__(self, state: str) -> None:
        if not self._is_armed or state != self._settings.kill_at:
            return
        self._seen[state] += 1
        if self._seen[state] == self._settings.kill_after:
            logger.warning("killed at %s, as configured", state)
            self._kill()


def _nvme(settings: TierSettings, nvme_dir: Path, wall_clock: Callable[[], float]) -> NvmeTier:
    nvme = settings.nvme

    def make(direct_io: bool) -> NvmeTier:
        return NvmeTier(
            nvme_dir,
            bytes_max=nvme.bytes_max,
            durability=nvme.durability,
            direct_io=direct_io,
            quarantine_bytes_max=nvme.quarantine_bytes_max,
            wall_clock=wall_clock,
            waits=True,
        )

    if nvme.direct_io is not None:
        return make(nvme.direct_io)
    tier = make(direct_io=False)  # take the lock first: never measure in a directory another process owns
    if tier.why_not_ours() or not measure_direct_io(nvme_dir):
        return tier
    tier.close()
    return make(direct_io=True)


def _add(built: NodeMedia, tier: Tier, bytes_max: int, faults: FaultSettings) -> None:
    name = tier.name
    built.tiers[name] = tier if faults == FaultSettings() else FaultyTier(tier, faults)
    built.bytes_max[name] = bytes_max


def _leave_out(built: NodeMedia, name: TierName, bytes_max: int, error: Exception) -> None:
    """Note why a tier that is set up does not work. Its size says that it should."""
    logger.warning("%s tier: off: %s", name, error)
    built.off[name] = str(error)
    built.bytes_max[name] = bytes_max


def count_start(path: Path, actor_id: str) -> tuple[int, int]:
    """Return how often this actor was started (this time included) and the number of bad files.

    The count is kept in a small file by actor id; it is informational only, and 1 if the file belongs to
    another actor or cannot be read. The second number is 1 if the file was malformed and was put aside.
    """
    starts, bad_files = 0, 0
    try:
        known = parse_json(path.read_text(encoding="ascii")) if path.exists() else {"actor": ""}
        if known["actor"] == actor_id:
            starts = int(known["starts"])
    except OSError as error:
        logger.warning("cannot read how often this actor was started: %s", error)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        logger.error("cannot read how often this actor was started (%s): %s", error, put_aside(path))
        bad_files = 1
    starts += 1
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            os.fchmod(fd, 0o600)  # it may come from an older version
            json.dump({"actor": actor_id, "starts": starts}, file)
    except OSError as error:
        logger.warning("cannot record that this actor was started: %s", error)
    return starts, bad_files
