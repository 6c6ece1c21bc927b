"""Random histories of one engine with tiers under faults, against the same turns without any cache.

Many conversations on few pages, with shared beginnings, forks, hang-ups, loads that come late, in any
order, wrong or never, stores that wait, swaps, audits and clears: every answer is the uncached one, and what
its session has computed before and computes again has a reason in its receipt.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.blocks.extent import TAG_BYTES, Clear, Placement
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.media.faults import FaultyTier
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.tier import Tier
from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.configs.sections import FaultSettings, TierSettings
from tests.support.amounts import seeds
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import MIB, InlineExecutor, Tiered, nvme, tiered

TENANT = b"t" * TAG_BYTES
PRICES = (
    PrefillPrice(0.0, 1.0, 0.0),  # loading always pays
    PrefillPrice(0.0, 5e-5, 1e-9),  # about what a slow tier takes: meet
    PrefillPrice(0.01, 1e-3, 1e-7),
)


@cache
def bare(model: Path, kv_dtype: str) -> Tiered:
    return tiered(model, model, tiers={}, prefix_reuse=False, kv_dtype=kv_dtype)


_truths: dict[tuple[str, tuple[int, ...]], list[int]] = {}


def truth(model: Path, kv_dtype: str, prompt: list[int], max_tokens: int) -> list[int]:
    key = kv_dtype, (*prompt, -max_tokens)
    if key not in _truths:
        _truths[key] = bare(model, kv_dtype).run(prompt, max_tokens=max_tokens).ids
    return _truths[key]


class History:
    """`copies`: the order in which a simulated device copies blocks; then there is much to copy."""

    def __init__(self, model: Path, folder: Path, seed: int, copies: random.Random | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.model = model
        self.copies = copies
        self.kv_dtype = "int8" if seed % 4 == 3 else "auto"
        faults = FaultSettings(seed=seed, error_rate=0.05, flip_rate=0.05, truncate_rate=0.03, full_rate=0.05)
        cpu: Tier = HeapTier(MIB)
        disk: Tier = nvme(folder)
        tiers: dict[TierName, Tier] = {
            "cpu": FaultyTier(cpu, faults) if rng.random() < 0.5 else cpu,
            "nvme": FaultyTier(disk, faults),
        }
        self.engine = tiered(
            model,
            folder,
            tiers=tiers,
            settings=TierSettings(
                audit_share=rng.choice([0.0, 0.5, 1.0]),
                extent_bytes_max=rng.choice([64 * 1024, MIB]),
                swap_bytes_max=rng.choice([0, 100_000, MIB] if copies is None else [MIB]),
                lookup_s_max=0.25,
                lookup_idle_share=(0.0, 0.2, 1.0)[seed % 3],
            ),
            prefill=rng.choice(PRICES if copies is None else PRICES[:1]),
            pool_tokens=rng.choice([512, 768, 2048] if copies is None else [352, 400, 512]),
            step_tokens_max=rng.choice([16, 32, 64]),
            preemption=rng.choice(["drop", "swap", "price"] if copies is None else ["swap"]),
            kv_dtype=self.kv_dtype,
            node={"bytes_max": rng.choice([100_000, MIB])},
            copies=copies,
        )
        self.engine.driver.check = rng.random() < 0.3
        self.beside_steps()
        self.engine.placement = rng.choice(
            [
                Placement("cpu", ("nvme",), "s3"),
                Placement("nvme", ("cpu",), "s3"),
                Placement("cpu", (), "cpu"),
            ]
        )
        system = prompt_of(rng.choice([0, 10, 33]), seed=seed)
        self.talks = [[*system, *prompt_of(rng.randint(5, 60), seed=seed + 1 + i)] for i in range(6)]
        self.open: dict[int, tuple[int, list[int], int]] = {}  # key -> (talk, prompt, max_tokens)
        self.checked = 0
        self.computed: dict[int, set[bytes]] = {talk: set() for talk in range(len(self.talks))}
        self.begun: set[bytes] = set()  # by answers that ended before their prompt was computed
        self.known: dict[int, tuple[int, bool]] = {}  # key -> (tokens, whether any session knew one)
        self.reasons: Counter[str] = Counter()

    def beside_steps(self) -> None:
        """Let loads come between a step's plan and its computing, and before it is taken in."""
        runner = self.engine.built.engine.runner
        run = runner.run

        def arrive() -> None:
            lane = self.rng.choice([self.engine.lanes.fetch, self.engine.lanes.moves])
            assert isinstance(lane, InlineExecutor)
            lane.shuffle(self.rng)
            lane.release(self.rng.randint(0, 3))
            if self.engine.device is not None:
                self.engine.device.happen()

        def run_beside(*args: Any) -> Any:
            arrive()
            rows = run(*args)
            arrive()
            return rows

        runner.run = run_beside  # type: ignore[method-assign]

    def lanes(self) -> list[InlineExecutor]:
        lanes = self.engine.lanes
        some = [lanes.fetch, lanes.store, lanes.offer, lanes.moves]
        some += [lanes.lookup] if self.copies is None else []
        return [lane for lane in some if isinstance(lane, InlineExecutor)]

    def session(self, talk: int) -> bytes:
        return bytes([talk]) * TAG_BYTES

    def ask(self) -> None:
        busy = {talk for talk, _, _ in self.open.values()}
        idle = [talk for talk in range(len(self.talks)) if talk not in busy]
        if not idle:
            return
        talk = self.rng.choice(idle)
        if len(self.talks[talk]) > 300:
            self.talks[talk] = self.talks[talk][:20]  # edited: back to the beginning
        prompt, max_tokens = list(self.talks[talk]), self.rng.randint(1, 20)
        key = self.engine.submit(
            prompt,
            n=self.rng.choice([1, 1, 1, 2]),
            max_tokens=max_tokens,
            tenant=TENANT,
            session=self.session(talk),
        )
        self.open[key] = (talk, prompt, max_tokens)
        of_prompt = self.blocks(prompt)
        known = itertools.takewhile(self.computed[talk].__contains__, of_prompt)
        is_any = any(one in some for one in of_prompt for some in (self.begun, *self.computed.values()))
        self.known[key] = (len(list(known)) * self.block_tokens, is_any)

    @property
    def block_tokens(self) -> int:
        return self.engine.built.info.block_tokens

    def blocks(self, tokens: list[int]) -> list[bytes]:
        """The full blocks that a prompt of these tokens could find: each by all that it commits to."""
        ids, step = array("I", tokens), self.block_tokens
        return [ids[: end + step].tobytes() for end in range(0, len(tokens) - step, step)]

    def explained(self, key: int, talk: int, prompt: list[int], answer: list[int] | None) -> None:
        """No block of a known session is computed again without a reason (issue 43, 6)."""
        admitted = self.engine.driver.answers[key].admitted
        if admitted is None:
            self.begun.update(self.blocks(prompt))
            return
        receipt, (known, is_any) = admitted.receipt, self.known.pop(key)
        again = known - (len(prompt) - receipt.tokens["compute"])
        assert sum(receipt.missed.values()) >= again, f"{again} tokens without a reason: {receipt}"
        assert sum(receipt.missed.values()) <= receipt.tokens["compute"]
        assert receipt.miss or not receipt.missed, f"no reason: {receipt}"
        assert is_any or not receipt.missed, f"nothing was known: {receipt}"
        self.reasons.update(receipt.missed)
        self.computed[talk].update(self.blocks([*prompt, *(answer or ())]))

    def turn(self) -> None:
        rng, engine = self.rng, self.engine.built.engine
        for lane in self.lanes():
            lane.held = rng.random() < 0.6
        action = rng.random()
        if action < 0.25:
            self.ask()
        elif action < 0.35:
            self.engine.node.work()
        elif action < 0.45:
            lane = rng.choice(self.lanes())
            lane.shuffle(rng)
            lane.release(rng.randint(0, 3))
        elif action < 0.5:
            self.engine.clock.now_s += rng.choice([0.01, 0.3, 1.0])
        elif action < 0.53 and self.open:
            key = rng.choice(list(self.open))
            engine.requests.abort(key)
            talk, prompt, _ = self.open.pop(key)
            self.explained(key, talk, prompt, None)
        elif action < 0.545:
            talk = rng.randrange(len(self.talks))
            engine.requests.forget({TENANT + self.session(talk)})
            self.engine.node.clear(Clear(TENANT, self.session(talk)))
        elif action < 0.56:
            engine.scheduler.pool.clear_cache()
        elif self.engine.has_work:
            self.engine.driver.step()
        self.collect()

    def collect(self) -> None:
        for key in [key for key in self.open if key not in self.engine.built.engine.requests.open_keys()]:
            talk, prompt, max_tokens = self.open.pop(key)
            answer = self.engine.driver.answers[key]
            assert answer.refused is None
            assert answer.failed is None
            expected = truth(self.model, self.kv_dtype, prompt, max_tokens)
            for ids in answer.token_ids.values():
                assert ids == expected, f"wrong tokens: {answer.admitted}"
            assert answer.admitted is not None
            assert sum(answer.admitted.receipt.tokens.values()) == len(prompt)
            self.explained(key, talk, prompt, expected)
            self.checked += 1
            self.talks[talk] = [*prompt, *expected, *prompt_of(self.rng.randint(1, 12), seed=key)]

    def end(self) -> None:
        """Everything comes to its end; nothing is held by anybody then."""
        engine = self.engine.built.engine
        for _ in range(5000):
            for lane in self.lanes():
                lane.held = False
                lane.release()
            self.engine.clock.now_s += 0.1
            if not self.engine.has_work:
                break
            self.engine.driver.step()
        self.collect()
        assert not self.open, "a request never ended"
        while self.engine.node.work():
            pass
        self.engine.clock.now_s += 1000.0  # what nobody called for expires
        engine.check_integrity()
        self.engine.node.check_integrity()
        stats = engine.stats()
        assert (stats.pages_active, stats.loading) == (0, 0)
        assert stats.audits.get("mismatch", 0) == 0
        assert "no record" not in self.reasons, "of one replica and its node, all is known"


@pytest.mark.parametrize("seed", seeds(12))
def test_l14_g7_g9_every_answer_of_a_random_history_is_the_uncached_one(
    tiny_llama: Path, tmp_path: Path, seed: int
) -> None:
    history = History(tiny_llama, tmp_path, seed)
    for _ in range(400):
        history.turn()
    history.end()
    assert history.checked > 10


@pytest.mark.parametrize("seed", range(12, 18))
def test_l14_g6_so_it_is_with_copies_in_any_order_beside_the_steps(
    tiny_llama: Path, tmp_path: Path, seed: int
) -> None:
    """Moves take any time, in parts; a page that is used too early or too late gives other tokens."""
    history = History(tiny_llama, tmp_path, seed, random.Random(seed))
    for _ in range(400):
        history.turn()
    history.end()
    assert history.checked > 10
