"""Whatever happens to the tiers, a real vLLM answers, and the text is what it computes alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.services.service import until
from tests.vllm.conftest import Truth
from tests.vllm.servers import BLOCK_TOKENS, Answer, Tiers, Vllm, prompt
from tests.vllm.test_conversations import until_stored

TOKENS, HELD = 520, 512
"""A prompt, and what of it is stored in full blocks: two extents, of 11 and 5 blocks."""
SLOW_S = 3.0
FROZEN_S = 5.0
KILLS = 5
FROZEN_ANSWER_S = 30.0
"""A frozen node costs a lookup's wait once; the answer's computing takes seconds on one core."""


def keep(vllm: Vllm, tiers: Tiers, ids: list[int], **who: str) -> Answer:
    """Have a prompt's blocks in the tiers only."""
    answer = vllm.ask(ids, **who)
    assert answer.receipt["stored_blocks"] > 0
    until_stored(tiers, answer)
    vllm.forget()
    return answer


def records(tiers: Tiers) -> list[Path]:
    return sorted(tiers.kv.rglob("*.kv"), key=lambda path: (-path.stat().st_size, path))


def check(vllm: Vllm, truth: Truth, ids: list[int], **who: str) -> Answer:
    answer = vllm.ask(ids, **who)
    truth.check(ids, answer)
    return answer


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, cut])
def test_a_damaged_record_is_computed_put_aside_and_stored_again(
    vllm: Vllm, truth: Truth, tiers: Tiers, damage: Callable[[Path], None]
) -> None:
    ids = prompt(damage.__name__, TOKENS)
    tiers.start()
    keep(vllm, tiers, ids)
    tiers.end()
    damage(records(tiers)[0])
    tiers.start()
    answer = check(vllm, truth, ids)
    # By the receipt: vLLM counts a load's tokens when it begins, and again only if none of it came.
    assert sum(answer.by_tier.values()) < HELD
    until_stored(tiers, answer)
    nvme = next(tier for tier in tiers.stats().tiers if tier.name == "nvme")
    assert nvme.quarantined or nvme.verify_failures or list(tiers.kv.rglob("*.bad"))
    for _ in range(2):  # the second one finds what the first has stored again
        vllm.forget()
        answer = check(vllm, truth, ids)
        until_stored(tiers, answer)
    assert answer.hit_tokens == HELD


def test_a_record_of_another_under_its_name_is_not_believed(vllm: Vllm, truth: Truth, tiers: Tiers) -> None:
    """Two prompts of two tenants, whose files were changed for each other; and a model's folder, renamed."""
    mine, other = prompt("mine", TOKENS), prompt("other", TOKENS)
    tiers.start()
    keep(vllm, tiers, mine, tenant="red")
    keep(vllm, tiers, other, tenant="blue")
    assert check(vllm, truth, other, tenant="red").by_tier == {}  # blue's, and red asks
    tiers.end()
    one, two = [path for path in records(tiers) if path.stat().st_size == records(tiers)[0].stat().st_size][
        :2
    ]
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    for tenant in (tiers.kv / "v1").iterdir():
        (model,) = tenant.iterdir()
        model.rename(tenant / ("0" * len(model.name))) if tenant.name in str(one) else None
    tiers.start()
    vllm.forget()
    for ids, tenant in ((mine, "red"), (other, "blue")):
        check(vllm, truth, ids, tenant=tenant)


def start_slow(tiers: Tiers) -> None:
    """Start a node whose disk takes seconds to read, and wait until it knows what is there."""
    tiers.start({"tiers.faults.nvme.delay-s": SLOW_S})
    tiers.until_held(HELD // BLOCK_TOKENS, "nvme")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.mark.parametrize("state", ["fetch", "store"])
def test_a_node_that_is_killed_costs_a_recompute(
    vllm: Vllm, truth: Truth, tiers: Tiers, pool: ThreadPoolExecutor, state: str
) -> None:
    ids, flags = prompt(f"killed in {state}", TOKENS), {"tiers.faults.cpu.delay-s": SLOW_S}
    tiers.start({} if state == "fetch" else flags)
    if state == "fetch":
        keep(vllm, tiers, ids)
        tiers.end()
        start_slow(tiers)
        asked: Future[Answer] = pool.submit(vllm.ask, ids)
        time.sleep(SLOW_S / 2)
        assert not asked.done()
        tiers.end(signal.SIGKILL)
        answer = asked.result()
    else:
        answer = vllm.ask(ids)
        assert answer.receipt["stored_blocks"] > 0
        tiers.end(signal.SIGKILL)
    truth.check(ids, answer)
    vllm.forget()  # no page is kept by what is over
    check(vllm, truth, ids)
    tiers.start()
    vllm.forget()
    time.sleep(1.5)  # a failed connection is not tried again for a second
    until_stored(tiers, check(vllm, truth, ids))
    vllm.forget()
    assert check(vllm, truth, ids).hit_tokens == HELD


def test_kills_at_any_time_cost_no_request(
    vllm: Vllm, truth: Truth, tiers: Tiers, pool: ThreadPoolExecutor
) -> None:
    asked = [prompt(("killed", number), 200 + 40 * number) for number in range(5)]
    over = threading.Event()
    tiers.start()

    def serve() -> list[tuple[int, Answer]]:
        found = []
        while not over.is_set():
            found += list(enumerate(pool.map(vllm.ask, asked)))
        return found

    with ThreadPoolExecutor(1) as one:
        serving = one.submit(serve)
        try:
            for number in range(KILLS):
                time.sleep(0.3 + 0.4 * number)
                tiers.end(signal.SIGKILL)
                tiers.start()
        finally:
            over.set()
        answers = serving.result()
    for number, answer in answers:
        truth.check(asked[number], answer)


@pytest.mark.parametrize("seconds", [FROZEN_S, pytest.param(60.0, marks=pytest.mark.slow)])
def test_a_frozen_node_holds_nobody_up(
    vllm: Vllm, truth: Truth, tiers: Tiers, pool: ThreadPoolExecutor, seconds: float
) -> None:
    tiers.start()
    ids = prompt("frozen", TOKENS)
    keep(vllm, tiers, ids)
    tiers.send(signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        asked = [ids, *(prompt(("beside", number), 100) for number in range(3))]
        answers = list(pool.map(vllm.ask, asked))
        assert time.monotonic() - began_s < FROZEN_ANSWER_S
        time.sleep(max(0.0, began_s + seconds - time.monotonic()))
    finally:
        tiers.send(signal.SIGCONT)
    for one, answer in zip(asked, answers, strict=True):
        truth.check(one, answer)
    vllm.forget()
    until("hits again", lambda: hits_again(vllm, truth, ids), 30.0)


def hits_again(vllm: Vllm, truth: Truth, ids: list[int]) -> bool:
    vllm.forget()
    return check(vllm, truth, ids).hit_tokens == HELD


@pytest.mark.parametrize(
    "flags",
    [
        {"tiers.cpu.bytes-max": 24 << 20, "tiers.nvme.bytes-max": 24 << 20},
        {"tiers.cpu.bytes-max": 24 << 20, "tiers.faults.nvme.full-rate": 1},
    ],
    ids=["bounded", "no room"],
)
def test_a_full_disk_is_a_miss(vllm: Vllm, truth: Truth, tiers: Tiers, flags: dict[str, object]) -> None:
    tiers.start(flags)
    asked = [prompt(("full", number), TOKENS) for number in range(3)]
    for ids in asked * 2:
        until_stored(tiers, check(vllm, truth, ids))
    for tier in tiers.stats().tiers:
        assert tier.bytes_held <= tier.bytes_max
    files = sum(path.stat().st_size for path in tiers.kv.rglob("*.kv"))
    assert files <= 25 << 20


@pytest.mark.parametrize("after_s", [None, 0.5], ids=["decoding", "loading"])
def test_clients_that_hang_up(
    vllm: Vllm, truth: Truth, tiers: Tiers, pool: ThreadPoolExecutor, after_s: float | None
) -> None:
    ids = prompt(("hung up", after_s), TOKENS)
    tiers.start()
    if after_s is not None:
        keep(vllm, tiers, ids)
        tiers.end()
        start_slow(tiers)
    longer = [ids, ids + prompt("more", 64), ids + prompt("else", 200)]
    for left in [pool.submit(vllm.leave, one, after_s=after_s) for one in longer]:
        left.result()
    vllm.forget()  # their pages are free again
    for one in longer:
        answer = check(vllm, truth, one)
        until_stored(tiers, answer)
    vllm.forget()
    for one in longer:
        assert check(vllm, truth, one).hit_tokens >= HELD // BLOCK_TOKENS * BLOCK_TOKENS
