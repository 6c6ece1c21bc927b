"""The first lookups after a restart, when S3 has all that is left and is cold and far away.

Real servers (rclone, moto), threads, time that passes, and a proxy that makes each answer late. Computing is
so dear that a busy machine changes nothing: what was stored is found, all of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from samovar.cache_tiers.blocks.extent import TAG_BYTES, Placement
from samovar.cache_tiers.media.s3 import S3Tier
from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.configs.sections import S3TierSettings, TierSettings
from samovar.replicas.messages import Admitted
from samovar.replicas.offload.tier_client import WorkerPools
from tests.infra.moto_process import moto_process
from tests.support.clock import Clock
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import Tiered, tiered
from tests.support.services.rclone import plain_client, s3_server
from tests.support.services.service import until
from tests.support.services.tcp_proxy import tcp_proxy

pytestmark = pytest.mark.timeout(300)

PRICE = PrefillPrice(0.0, 0.5, 0.0)
LENGTH, NEW = 200, 5
PEOPLE = 50


class Running(Clock):
    """Seconds that pass by themselves."""

    def __call__(self) -> float:
        return time.monotonic()


@contextmanager
def rclone(folder: Path) -> Iterator[S3TierSettings]:
    with s3_server(folder / "bucket") as settings:
        yield settings


@contextmanager
def moto(_: Path) -> Iterator[S3TierSettings]:
    with moto_process() as url:
        key = SecretStr("moto-key")
        settings = S3TierSettings(bucket="samovar", endpoint=url, access_key_id=key, secret_access_key=key)
        plain_client(settings).create_bucket(Bucket="samovar")
        yield settings


SERVERS = {"rclone": rclone, "moto": moto}


def engine_on(model: Path, folder: Path, settings: S3TierSettings, *, runs: bool) -> Tiered:
    """`runs`: threads, and time that passes; else all is done at once, when S3 has been listed."""
    engine = tiered(
        model,
        folder,
        tiers={"s3": S3Tier(settings, lambda: 1_700_000_000.0)},
        settings=TierSettings(audit_share=0.0, s3=settings, lookup_s_max=60.0, hedge_slack_s=20.0),
        prefill=PRICE,
        clock=Running() if runs else None,
        lanes=WorkerPools.of_threads(2, 4) if runs else None,
        pool_tokens=2048,
    )
    engine.placement = Placement("s3", (), "s3")
    return engine


def close(engine: Tiered) -> None:
    engine.lanes.close()
    engine.node.close()


def person(number: int) -> bytes:
    return number.to_bytes(TAG_BYTES, "little")


def tell(engine: Tiered, people: int) -> list[list[int]]:
    """A turn of each; the prompts of their next ones."""
    prompts = []
    for number in range(people):
        prompt = prompt_of(LENGTH, seed=1000 + number)
        answer = engine.run(prompt, session=person(number), max_tokens=2)
        prompts.append([*prompt, *answer.ids, *prompt_of(NEW, seed=number)])
    assert sum(row.extents for row in engine.node.stats().tiers) == people
    return prompts


def ask(engine: Tiered, prompt: list[int], number: int) -> Admitted:
    """One request, as the engine's thread serves it."""
    inner, wake = engine.built.engine, threading.Event()
    inner.on_wake(wake.set)
    key = engine.submit(prompt, session=person(number), max_tokens=2)
    while inner.requests.open_keys():
        if inner.has_work:
            engine.driver.step()
        else:
            wake.wait(inner.wake_in_s)
            wake.clear()
    admitted = engine.driver.answers[key].admitted
    assert admitted is not None
    return admitted


def check(admitted: Admitted) -> None:
    """All that was stored came from S3: the prompt, and the answer but its last token."""
    assert (admitted.receipt.miss, admitted.receipt.tokens["s3"]) == ("", LENGTH + 1), admitted


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("server", SERVERS)
def test_the_first_lookup_after_a_restart_is_a_hit(
    tiny_llama: Path, tmp_path: Path, server: str, delay_s: float
) -> None:
    with SERVERS[server](tmp_path) as settings:
        before = engine_on(tiny_llama, tmp_path, settings, runs=False)
        (prompt,) = tell(before, 1)
        close(before)
        with tcp_proxy(urlsplit(settings.endpoint or "").port or 0, delay_s) as proxy:
            far = settings.model_copy(update={"endpoint": f"http://127.0.0.1:{proxy.port}"})
            after = engine_on(tiny_llama, tmp_path, far, runs=True)
            check(ask(after, prompt, 0))
            assert after.built.engine.stats().slow_lookups == {}
            close(after)


def test_of_50_conversations_none_is_missed_for_a_slow_lookup(tiny_llama: Path, tmp_path: Path) -> None:
    """All of them return at once after a restart, one after another, with 50 ms added to each answer."""
    with rclone(tmp_path) as settings:
        before = engine_on(tiny_llama, tmp_path, settings, runs=False)
        prompts = tell(before, PEOPLE)
        close(before)
        with tcp_proxy(urlsplit(settings.endpoint or "").port or 0, 0.05) as proxy:
            far = settings.model_copy(update={"endpoint": f"http://127.0.0.1:{proxy.port}"})
            after = engine_on(tiny_llama, tmp_path, far, runs=True)
            for number, prompt in enumerate(prompts):
                check(ask(after, prompt, number))
            stats = after.built.engine.stats()
            assert stats.misses.get("slow lookup", 0) == 0
            assert stats.slow_lookups == {}
            (row,) = [row for row in after.node.stats().tiers if row.name == "s3"]
            assert row.listed_ago_s is not None
            close(after)


def test_s3_is_warmed_at_the_start_and_what_fails_of_it_delays_nothing(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """As many connections as are set are open before anybody asks; one that is gone delays nothing."""
    with rclone(tmp_path) as settings, tcp_proxy(urlsplit(settings.endpoint or "").port or 0, 0.2) as proxy:
        changes = {"endpoint": f"http://127.0.0.1:{proxy.port}", "warm_connections": 5}
        far = settings.model_copy(update=changes)
        engine = engine_on(tiny_llama, tmp_path, far, runs=False)
        until("the connections are open", lambda: proxy.accepted >= 5, 20)
        assert engine.node.stats().tiers[2].listed_ago_s is not None
        close(engine)
        proxy.cut("refused")
        engine = engine_on(tiny_llama, tmp_path, far, runs=True)
        admitted = ask(engine, prompt_of(20, seed=1), 0)
        assert admitted.receipt.tokens["compute"] == 20
        assert engine.node.stats().tiers[2].listed_ago_s is None
        close(engine)
