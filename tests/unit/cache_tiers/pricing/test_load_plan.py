"""Load, compute, or both: the plan against the plain enumeration of all there is to choose from."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks.tiers import TIERS, TierName
from samovar.cache_tiers.pricing.load_plan import MEET_COST_SHARE, LoadPiece, LoadPlan, plan_load
from samovar.cache_tiers.pricing.meters import PrefillPrice, TierPrice

CPU = PrefillPrice(0.04, 1.1e-3, 4.5e-7)
H200 = PrefillPrice(2e-3, 1e-5, 1e-10)
BYTES_PER_TOKEN = 23_040
PRICES: dict[TierName, TierPrice] = {
    "cpu": TierPrice(1e-3, 8e9),
    "nvme": TierPrice(3e-3, 1.5e9),
    "s3": TierPrice(0.05, 200e6),
}


def _run(*parts: tuple[int, TierName], start: int = 0) -> list[LoadPiece]:
    """Pieces of so many tokens each, one behind the other."""
    pieces: list[LoadPiece] = []
    for tokens, tier in parts:
        pieces.append(LoadPiece(start, tokens, tokens * BYTES_PER_TOKEN, tier))
        start += tokens
    return pieces


def _plan(
    prompt_tokens: int,
    pieces: list[LoadPiece],
    prefill: PrefillPrice,
    prices: dict[TierName, TierPrice] = PRICES,
    *,
    resident_tokens: int = 0,
    parallel: int = 4,
) -> LoadPlan:
    return plan_load(
        prompt_tokens=prompt_tokens,
        resident_tokens=resident_tokens,
        pieces=pieces,
        prices=prices,
        prefill=prefill,
        parallel=parallel,
        hedge_factor=1.5,
        hedge_slack_s=0.05,
    )


def _throttled(bytes_per_s: float) -> dict[TierName, TierPrice]:
    return {"s3": TierPrice(0.01, bytes_per_s)}


CASES: dict[str, tuple[int, list[LoadPiece], PrefillPrice, dict[TierName, TierPrice], str, int]] = {
    # name: prompt, pieces, prefill, prices, decision, pieces loaded
    "nothing there": (1000, [], CPU, PRICES, "none", 0),
    "cpu machine, ram": (2080, _run((2048, "cpu")), CPU, PRICES, "load", 1),
    "cpu machine, disk": (2080, _run((2048, "nvme")), CPU, PRICES, "load", 1),
    "cpu machine, s3": (2080, _run((2048, "s3")), CPU, PRICES, "load", 1),
    "cpu machine, s3, long": (8064, _run(*[(672, "s3")] * 12), CPU, PRICES, "load", 12),
    "cpu machine, all three": (
        4100, _run((2048, "cpu"), (1024, "nvme"), (512, "s3")), CPU, PRICES, "load", 3,
    ),
    "h200, s3, small": (544, _run((512, "s3")), H200, PRICES, "recompute", 0),
    "h200, s3, 4k": (4128, _run((4096, "s3")), H200, PRICES, "recompute", 0),
    "h200, ram": (4128, _run((4096, "cpu")), H200, PRICES, "load", 1),
    "h200, ram then s3": (4128, _run((2048, "cpu"), (2048, "s3")), H200, PRICES, "load", 1),
    "throttled to the price of computing": (
        8064, _run(*[(672, "s3")] * 12), CPU, _throttled(5e6), "meet", 5,
    ),
    "throttled to nothing": (8064, _run(*[(672, "s3")] * 12), CPU, _throttled(5e4), "recompute", 0),
    "down": (2080, _run((2048, "s3")), CPU, {"s3": TierPrice(0.05, 200e6, is_up=False)}, "none", 0),
    "no price": (2080, _run((2048, "s3")), CPU, {}, "none", 0),
    "down behind ram": (
        2080, _run((1024, "cpu"), (1024, "s3")), CPU, {"cpu": PRICES["cpu"]}, "load", 1,
    ),
    "the whole prompt": (2048, _run((2048, "cpu")), CPU, PRICES, "load", 1),
    "beyond the prompt": (2047, _run((2048, "cpu")), CPU, PRICES, "none", 0),
    "a gap": (2080, [*_run((512, "cpu")), *_run((512, "cpu"), start=528)], CPU, PRICES, "load", 1),
    "an empty piece": (2080, [LoadPiece(0, 0, 0, "cpu"), *_run((512, "cpu"))], CPU, PRICES, "none", 0),
    "negative bytes": (2080, [LoadPiece(0, 512, -1, "cpu")], CPU, PRICES, "none", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_table(name: str) -> None:
    prompt_tokens, pieces, prefill, prices, decision, loaded = CASES[name]
    plan = _plan(prompt_tokens, pieces, prefill, prices)
    assert plan.decision == decision, plan
    assert len(plan.pieces) == loaded, plan


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("tokens", [64, 128, 512, 2048, 8000])
def test_a_cpu_machine_loads_from_everywhere(tokens: int, tier: TierName) -> None:
    assert _plan(tokens + 32, _run((tokens, tier)), CPU).decision == "load"


@pytest.mark.parametrize("tokens", [16, 128, 512, 2048])
def test_an_h200_computes_what_is_in_s3(tokens: int) -> None:
    plan = _plan(tokens + 32, _run((tokens, "s3")), H200)
    assert plan.decision == "recompute"
    assert plan.pieces == ()
    assert plan.hedge_after_s == 0.0
    # The two prices it was decided on are told all the same.
    assert plan.load_s == pytest.approx(PRICES["s3"].seconds(tokens * BYTES_PER_TOKEN))
    assert plan.recompute_s == pytest.approx(H200.added_seconds(tokens, 0))
    assert plan.load_s > plan.recompute_s


def test_the_numbers_of_a_plain_load() -> None:
    pieces = _run((512, "cpu"), (512, "s3"), start=256)
    plan = _plan(1400, pieces, CPU, resident_tokens=256)
    assert plan.decision == "load"
    assert plan.pieces == tuple(pieces)
    assert plan.load_s == pytest.approx(PRICES["s3"].seconds(512 * BYTES_PER_TOKEN))
    assert plan.recompute_s == pytest.approx(CPU.added_seconds(1024, 256))
    assert plan.total_s == pytest.approx(plan.load_s + CPU.seconds(1400 - 1280, 1280))
    assert plan.hedge_after_s == pytest.approx(1.5 * plan.load_s + 0.05)


@pytest.mark.parametrize(
    "price",
    [
        TierPrice(0.0, math.inf, is_proved=False),  # nothing is known: free, until a load has said more
        TierPrice(0.001, 5e9, is_proved=False),
        TierPrice(0.001, 5e9, proved_bytes=BYTES_PER_TOKEN),
    ],
)
def test_at_a_price_that_no_load_has_proved_none_is_late_before_computing_would_be_done(
    price: TierPrice,
) -> None:
    pieces = _run((512, "cpu"), (512, "nvme"))
    plan = _plan(1100, pieces, CPU, {"cpu": PRICES["cpu"], "nvme": price})
    assert plan.decision == "load"
    assert plan.hedge_after_s == plan.recompute_s > 1.5 * plan.load_s + 0.05


def test_latencies_overlap_and_bandwidth_is_shared() -> None:
    pieces = _run(*[(64, "s3")] * 9)
    dear = PrefillPrice(0.0, 1.0, 0.0)
    moved_s = 9 * 64 * BYTES_PER_TOKEN / 200e6
    for parallel, rounds in ((1, 9), (4, 3), (9, 1), (100, 1)):
        plan = _plan(700, pieces, dear, parallel=parallel)
        assert plan.load_s == pytest.approx(rounds * 0.05 + moved_s)


@pytest.mark.parametrize("new_tokens", [0, 30])
@pytest.mark.parametrize(
    ("tokens", "decision"), [(1, "recompute"), (4, "recompute"), (6, "load"), (15, "load")]
)
def test_a_partial_block_is_loaded_only_where_computing_it_too_takes_longer(
    tokens: int, decision: str, new_tokens: int
) -> None:
    """The step of what is new runs anyway, if only for the prompt's last token: it is as dear with both."""
    tail = [LoadPiece(992, tokens, 16 * BYTES_PER_TOKEN, "cpu")]
    prefill, ram = PrefillPrice(0.023, 2e-3, 0.0), {"cpu": TierPrice(9e-3, 2e9)}
    plan = plan_load(
        prompt_tokens=992 + tokens + 1 + new_tokens,
        resident_tokens=992,
        pieces=tail,
        prices=ram,
        prefill=prefill,
        parallel=4,
        hedge_factor=1.5,
        hedge_slack_s=0.05,
    )
    assert plan.decision == decision
    assert plan.load_s == pytest.approx(9e-3, rel=0.05)
    assert plan.recompute_s == pytest.approx(2e-3 * tokens)
    assert plan.pieces == (tuple(tail) if decision == "load" else ())


def test_in_the_fetch_of_the_blocks_before_it_a_partial_block_is_loaded_too() -> None:
    pieces = [LoadPiece(0, 1003, 1008 * BYTES_PER_TOKEN, "cpu")]
    plan = _plan(1030, pieces, CPU)
    assert (plan.decision, plan.pieces) == ("load", tuple(pieces))


def test_a_slow_end_is_left_out() -> None:
    pieces = _run((4096, "cpu"), (16, "s3"))
    plan = _plan(4200, pieces, H200)
    assert plan.decision == "load"
    assert plan.pieces == tuple(pieces[:1])


def test_a_prompt_that_is_all_there_still_computes_a_token() -> None:
    plan = _plan(2048, _run((2048, "cpu")), CPU)
    assert plan.total_s == pytest.approx(plan.load_s + CPU.seconds(1, 2047))


def test_meeting_comes_from_the_back_and_meets() -> None:
    pieces = _run(*[(672, "s3")] * 12)
    plan = _plan(8100, pieces, CPU, _throttled(5e6))
    assert plan.decision == "meet"
    assert plan.pieces == tuple(reversed(pieces[12 - len(plan.pieces) :]))
    until_met_s = max(CPU.seconds(plan.pieces[-1].first_token, 0), plan.load_s)
    surcharge_s = MEET_COST_SHARE * CPU.seconds(8100, 0)
    assert plan.total_s == pytest.approx(until_met_s + surcharge_s + CPU.seconds(8100 - 8064, 8064))
    assert plan.total_s < CPU.seconds(8100, 0)
    assert plan.recompute_s == pytest.approx(
        CPU.added_seconds(8064, 0) - CPU.added_seconds(plan.pieces[-1].first_token, 0)
    )


def test_meeting_needs_a_load_of_some_weight() -> None:
    pieces = _run(*[(112, "s3")] * 72)
    decisions = []
    for bytes_per_s in (1e4, 1e6, 4e6, 8e6, 16e6, 32e6, 64e6, 1e9):
        plan = _plan(8100, pieces, CPU, _throttled(bytes_per_s))
        decisions.append(plan.decision)
        whole = 8064 * BYTES_PER_TOKEN / bytes_per_s
        if plan.decision == "meet":
            assert whole > 0.25 * CPU.added_seconds(8064, 0)
    assert decisions == ["recompute", "meet", "meet", "meet", "meet", "load", "load", "load"]


@pytest.mark.parametrize(
    "bad",
    [
        TierPrice(math.nan, 1e9),
        TierPrice(math.inf, 1e9),
        TierPrice(-1.0, 1e9),
        TierPrice(0.0, 0.0),
        TierPrice(0.0, -1e9),
        TierPrice(0.0, math.nan),
    ],
)
def test_a_price_that_is_none_is_not_used(bad: TierPrice) -> None:
    plan = _plan(2080, _run((1024, "cpu"), (1024, "s3")), CPU, {**PRICES, "s3": bad})
    assert plan.decision == "load"
    assert len(plan.pieces) == 1
    assert math.isfinite(plan.total_s)
    nothing = _plan(2080, _run((1024, "s3")), CPU, {"s3": bad})
    assert nothing.decision == "none"
    assert nothing.total_s == CPU.seconds(2080, 0)


@pytest.mark.parametrize(
    ("prompt", "resident", "parallel"), [(10, 10, 1), (10, -1, 1), (0, 0, 1), (10, 0, 0)]
)
def test_what_is_no_prompt_is_refused(prompt: int, resident: int, parallel: int) -> None:
    with pytest.raises(ValueError, match="no plan"):
        _plan(prompt, [], CPU, resident_tokens=resident, parallel=parallel)


some_prefill = st.builds(
    PrefillPrice,
    st.sampled_from([0.0, 2e-3, 0.04]),
    st.floats(1e-7, 1e-2),
    st.sampled_from([0.0, 1e-10, 1e-6]),
)
some_prices = st.fixed_dictionaries(
    {},
    optional={
        tier: st.builds(
            TierPrice, st.floats(0, 1.0), st.floats(1e5, 1e10), st.sampled_from([True, True, False])
        )
        for tier in TIERS
    },
)
some_parts = st.lists(st.tuples(st.integers(1, 600), st.sampled_from(TIERS)), max_size=8)


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    resident = draw(st.integers(0, 300))
    pieces = _run(*draw(some_parts), start=resident)
    end = pieces[-1].end if pieces else resident
    return {
        "prompt_tokens": max(resident + 1, end + draw(st.integers(-40, 400))),
        "resident_tokens": resident,
        "pieces": pieces,
        "prices": draw(some_prices),
        "prefill": draw(some_prefill),
        "parallel": draw(st.integers(1, 5)),
        "hedge_factor": 1.5,
        "hedge_slack_s": 0.05,
    }


def _load_s(case: dict[str, Any], pieces: list[LoadPiece]) -> float:
    """As the docstring of `plan_load` says it, piece by piece."""
    longest = 0.0
    for tier in TIERS:
        nbytes = [piece.nbytes for piece in pieces if piece.tier == tier]
        if nbytes:
            price = case["prices"][tier]
            rounds = math.ceil(len(nbytes) / case["parallel"])
            longest = max(longest, rounds * price.latency_s + sum(nbytes) / price.bytes_per_s)
    return longest


def _best(case: dict[str, Any]) -> float:
    """The least of all that could be done, tried one by one."""
    prompt, resident, prefill = case["prompt_tokens"], case["resident_tokens"], case["prefill"]
    all_s = prefill.seconds(prompt - resident, resident)
    best = all_s
    usable: list[LoadPiece] = []
    for piece in case["pieces"]:
        price = case["prices"].get(piece.tier)
        if price is None or not price.is_up or piece.end > prompt:
            break
        usable.append(piece)
        rest_s = prefill.seconds(max(1, prompt - piece.end), min(piece.end, prompt - 1))
        best = min(best, _load_s(case, usable) + rest_s)
        for first in range(1, len(usable)):
            front_s = prefill.seconds(usable[first].first_token - resident, resident)
            met_s = max(front_s, _load_s(case, usable[first:]))
            best = min(best, met_s + rest_s + MEET_COST_SHARE * all_s)
    return best


@given(_cases())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_plan_is_the_best_there_is(case: dict[str, Any]) -> None:
    plan = plan_load(**case)
    assert plan.total_s == pytest.approx(_best(case), rel=1e-9, abs=1e-12)
    assert all(math.isfinite(x) for x in (plan.load_s, plan.recompute_s, plan.total_s, plan.hedge_after_s))
    assert bool(plan.pieces) == (plan.decision in ("load", "meet"))
    in_order = plan.pieces[::-1] if plan.decision == "meet" else plan.pieces
    assert all(a.end == b.first_token for a, b in itertools.pairwise(in_order))
    assert all(case["prices"][piece.tier].is_up for piece in plan.pieces)
    if plan.pieces:
        assert plan.hedge_after_s == pytest.approx(1.5 * plan.load_s + 0.05)
        assert plan.load_s == pytest.approx(_load_s(case, list(plan.pieces)))
    resident = case["resident_tokens"]
    if plan.decision in ("none", "recompute"):
        assert plan.total_s == case["prefill"].seconds(case["prompt_tokens"] - resident, resident)
    if plan.decision == "load":
        prompt, end = case["prompt_tokens"], plan.pieces[-1].end
        rest_s = case["prefill"].seconds(max(1, prompt - end), min(end, prompt - 1))
        assert plan.total_s == pytest.approx(plan.load_s + rest_s)
        assert plan.pieces == tuple(case["pieces"][: len(plan.pieces)])


@given(_cases(), st.floats(0.3, 1.5))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_where_loading_and_computing_are_about_as_dear(case: dict[str, Any], load_share: float) -> None:
    pieces = [dataclasses.replace(piece, tier="s3") for piece in case["pieces"]]
    if not pieces:
        return
    resident = case["resident_tokens"]
    compute_s = case["prefill"].seconds(pieces[-1].end - resident, resident)
    bytes_per_s = sum(piece.nbytes for piece in pieces) / (compute_s * load_share)
    case = {**case, "pieces": pieces, "prices": {"s3": TierPrice(0.0, bytes_per_s)}}
    plan = plan_load(**case)
    assert plan.total_s == pytest.approx(_best(case), rel=1e-9)


@given(_cases())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_plan_is_worse_than_computing(case: dict[str, Any]) -> None:
    resident = case["resident_tokens"]
    all_s = case["prefill"].seconds(case["prompt_tokens"] - resident, resident)
    assert plan_load(**case).total_s <= all_s * (1 + 1e-12)


@given(_cases(), st.sampled_from(TIERS), st.floats(1, 20), st.floats(1, 20))
@example(
    # From where meeting pays to where it no longer does.
    {
        "prompt_tokens": 8100, "resident_tokens": 0, "pieces": _run(*[(112, "s3")] * 72), "prefill": CPU,
        "prices": _throttled(8e6), "parallel": 4, "hedge_factor": 1.5, "hedge_slack_s": 0.05,
    }, "s3", 1.0, 2.0,
)  # fmt: skip
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_faster_tier_never_makes_it_dearer(
    case: dict[str, Any], tier: TierName, sooner: float, wider: float
) -> None:
    before = plan_load(**case).total_s
    if tier in case["prices"]:
        old = case["prices"][tier]
        faster = dataclasses.replace(
            old, latency_s=old.latency_s / sooner, bytes_per_s=old.bytes_per_s * wider
        )
        case = {**case, "prices": {**case["prices"], tier: faster}}
    assert plan_load(**case).total_s <= before * (1 + 1e-12)


def test_a_few_tokens_ride_along_in_a_step_that_runs_anyway() -> None:
    """The last block of a turn that is still warm: its load would come after the step that computes it."""

    def decision(tokens: int, step_s: float) -> str:
        pieces = _run((tokens, "cpu"), start=1024)
        case = {"prompt_tokens": 1044 + tokens, "resident_tokens": 1024, "pieces": pieces}
        more = {"prices": PRICES, "prefill": CPU, "parallel": 4, "hedge_factor": 1.5, "hedge_slack_s": 0.05}
        return plan_load(**case, **more, step_s=step_s).decision  # type: ignore[arg-type]

    assert decision(10, step_s=0.1) == "recompute"
    assert decision(512, step_s=0.1) == "load"
    assert decision(10, step_s=0.0) == "load"  # nobody computes: a millisecond instead of ten


@given(_cases(), st.floats(0, 2))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_who_waits_for_a_step_waits_no_longer_than_computing_takes(
    case: dict[str, Any], step_s: float
) -> None:
    resident = case["resident_tokens"]
    compute_s = case["prefill"].seconds(case["prompt_tokens"] - resident, resident)
    plan = plan_load(**case, step_s=step_s)
    assert plan_load(**case).total_s * (1 - 1e-12) <= plan.total_s <= compute_s * (1 + 1e-12)
    if plan.decision == "load":
        assert plan.total_s >= step_s
