"""Checks the media of the tiers: the disk's room and speed, the bucket, and whether loading pays at all."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from samovar.cache_tiers.blocks import CPU, NVME
from samovar.cache_tiers.pricing import TierPrice
from samovar.cluster.doctor.check import Result, existing
from samovar.cluster.plan.sizing import in_seconds, in_tokens
from samovar.cluster.serve import preflight
from samovar.cluster.serve.startup_table import TIER_WORDS
from samovar.configs.sections import MIB
from samovar.configs.settings import Settings
from samovar.replicas.start.machine_prices import MachinePrices, kept_prices, measurements_dir
from samovar.router.observe.diagnosis import (
    computing_in_words,
    in_bytes,
    load_prices,
    loading_in_words,
    wins_in_words,
)

MEASURED_BYTES, MEASURE_REPEATS, MEASURE_S = 16 * MIB, 3, 5.0
RAM_BYTES = 64 * MIB
DISK_SLOW_BYTES_S = 50e6
SKEW_WARNING_S, SKEW_ERROR_S = 60.0, 600.0
"""S3 refuses requests whose clock differs by a quarter of an hour."""
ASK_S = 5.0
CONTEXTS = (2048, 8192, 32768)


def disk_tier(
    settings: Settings,
    price: Callable[[], TierPrice | None],
    free: Callable[[Path], int] = lambda place: shutil.disk_usage(place).free,
    running: Sequence[str] = (),
) -> Result:
    """See who uses the directory of the nvme tier, whether its disk has the room, and how fast it is."""
    most = settings.tiers.nvme.bytes_max
    if not settings.tiers.enabled or not most:
        return "ok", "off (tiers.enabled, tiers.nvme.bytes_max)", ""
    where = settings.nvme_dir
    warnings = preflight.disk_warnings(settings)
    left = free(existing(where))
    measured = price()
    said = f"{where}, {in_bytes(left)} free"
    if measured is None:
        return "warning", f"{said}; its speed cannot be measured", "see whether it can be written"
    said += f", reads {measured.bytes_per_s / 1e9:.3g} GB/s after {in_seconds(measured.latency_s)}"
    if warnings and serves_here(settings, running):
        said += "; used by the service that runs"
    elif warnings:
        text, _, fix = warnings[0].partition(". ")
        return "warning", f"{said}; {text}", fix
    held = _held(where)
    if left + held < most:
        return (
            "warning",
            f"{said}; the tier may take {in_bytes(most)}, of which it has {in_bytes(held)}",
            f"lower tiers.nvme.bytes_max to {round(0.9 * (left + held)):,}, or choose another tiers.nvme.dir",
        )
    if measured.bytes_per_s < DISK_SLOW_BYTES_S:
        fix = "use a local SSD or NVMe for tiers.nvme.dir: loads will often be dearer than computing"
        return "warning", said, fix
    return "ok", said, ""


def serves_here(settings: Settings, running: Sequence[str]) -> str:
    """Return the URL of the service that runs on the port of these settings; "" if none of `running` does."""
    return next((url for url in running if url.rstrip("/").endswith(f":{settings.server.port}")), "")


FILES_MAX = 100_000


def _held(where: Path) -> int:
    """Return the bytes of the tier's files, of `FILES_MAX` at most."""
    total = 0
    for count, path in enumerate((where / "v1").rglob("*")):
        if count >= FILES_MAX:
            break
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue  # moved or deleted meanwhile: a service may run
    return total


def disk_price(settings: Settings) -> TierPrice | None:
    """Measure the disk of the nvme tier, in a directory of its own beside the tier's; None: it failed."""
    from samovar.cache_tiers.blocks import TierError
    from samovar.cache_tiers.media import NvmeTier, measure_tier

    try:
        with tempfile.TemporaryDirectory(
            dir=existing(settings.nvme_dir), prefix=".samovar-doctor-"
        ) as folder:
            tier = NvmeTier(
                Path(folder) / "kv",
                bytes_max=4 * MEASURED_BYTES,
                durability="none",
                direct_io=bool(settings.tiers.nvme.direct_io),
                quarantine_bytes_max=0,
                wall_clock=time.time,
            )
            try:
                found = measure_tier(
                    tier,
                    MEASURED_BYTES,
                    MEASURE_REPEATS,
                    time.perf_counter,
                    budget_s=MEASURE_S,
                    drop_cache=tier.drop_cache,
                )
            finally:
                tier.close()
    except (OSError, TierError):
        return None
    return None if found is None else TierPrice(*found)


def s3_tier(
    settings: Settings,
    probe: Callable[[Settings], None] | None = None,
    server_time: Callable[[str], float] | None = None,
    clock: Callable[[], float] = time.time,
) -> Result:
    """Put, read and delete a small object, and compare the bucket's clock with ours."""
    s3 = settings.tiers.s3
    if not settings.tiers.enabled or not s3.bucket or not s3.bytes_max:
        return "ok", "off (tiers.s3.bucket)", ""
    preflight.check_extras(settings)
    url = s3.endpoint or f"https://s3.{s3.region}.amazonaws.com"
    try:
        skew_s = abs(clock() - (server_time or _server_time)(url))
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return (
            "error",
            f"{url} does not answer ({type(error).__name__})",
            "see to the network and tiers.s3.endpoint",
        )
    if skew_s >= SKEW_ERROR_S:
        return (
            "error",
            f"this clock and that of {url} differ by {skew_s:,.0f} s",
            "set this clock: run NTP (chrony)",
        )
    try:
        (probe or _probe_s3)(settings)
    except Exception as error:  # noqa: BLE001 - boto3's errors are many, and each is the answer
        code = str(error).splitlines()[0] if str(error) else type(error).__name__
        return (
            "error",
            f"bucket {s3.bucket}: {code}",
            "allow s3:PutObject, GetObject, DeleteObject and ListBucket below "
            f"{s3.prefix}, and see to the credentials (tiers.s3.access_key_id, or AWS's own chain)",
        )
    said = f"bucket {s3.bucket} at {url}: put, read and deleted; clocks differ by {skew_s:.0f} s"
    if skew_s >= SKEW_WARNING_S:
        return "warning", said, "set this clock: run NTP (chrony)"
    return "ok", said, ""


def _server_time(url: str) -> float:
    """Return the Unix time in an answer of the server, whatever it answers."""
    answer = httpx.head(url, timeout=ASK_S)
    return parsedate_to_datetime(answer.headers["date"]).timestamp()


def _probe_s3(settings: Settings) -> None:
    from samovar.cache_tiers.media import s3

    tier = s3.S3Tier(settings.tiers.s3, time.time)
    try:
        tier.probe()
        next(iter(tier.scan()), None)
    finally:
        tier.close()


def prices(
    settings: Settings,
    disk: Callable[[], TierPrice | None],
    kept: Callable[[Path], MachinePrices | None] = kept_prices,
    memory: Callable[[], TierPrice] | None = None,
) -> Result:
    """Compare loading with computing on this machine, by what the last start has measured."""
    known = kept(measurements_dir(settings))
    if known is None:
        return "ok", "not known before the first start: `samovar serve` measures what computing takes", ""
    found = {CPU.name: (memory or memory_price)()}
    is_wanted = settings.tiers.enabled and settings.tiers.nvme.bytes_max
    if is_wanted and (measured := disk()) is not None:
        found[NVME.name] = measured
    tiers = load_prices(found, known.prefill, known.bytes_per_token, CONTEXTS)
    lines = [
        f"{known.model_name} on {known.device}, {known.bytes_per_token:,} bytes of KV a token "
        f"({known.kv_dtype})",
        f"computing, {computing_in_words(known.prefill)}: "
        + _of_contexts([known.prefill.seconds(tokens, 0) for tokens in CONTEXTS]),
    ]
    for tier in tiers:
        name, each = TIER_WORDS[tier.name], loading_in_words(found[tier.name], known.bytes_per_token)
        lines.append(
            f"{name}, {tier.bytes_per_s / 1e9:.3g} GB/s, {each}: {_of_contexts(tier.load_s)}; "
            f"wins {wins_in_words(tier.wins_from)}"
        )
    slow = [
        TIER_WORDS[tier.name] for tier in tiers if tier.wins_from is None or tier.wins_from > CONTEXTS[-1]
    ]
    if slow:
        fix = f"{' and '.join(slow)}: computing is quicker; choose a faster medium, or switch the tier off"
        return "warning", "\n".join(lines), fix
    return "ok", "\n".join(lines), ""


def _of_contexts(seconds: Sequence[float]) -> str:
    return ", ".join(f"{in_tokens(n)} {in_seconds(s)}" for n, s in zip(CONTEXTS, seconds, strict=True))


def memory_price(clock: Callable[[], float] = time.perf_counter) -> TierPrice:
    """Measure a copy in main memory: no load from the cpu tier is faster."""
    import numpy as np

    source, target = np.ones(RAM_BYTES, np.uint8), np.empty(RAM_BYTES, np.uint8)
    target[:] = source  # its pages exist from now on
    took = []
    for _ in range(MEASURE_REPEATS):
        began_s = clock()
        target[:] = source
        took.append(clock() - began_s)
    return TierPrice(1e-6, RAM_BYTES / max(min(took), 1e-9))
