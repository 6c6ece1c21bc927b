"""A returning user on the device: the time to the first token from registered main memory, and computed."""

from __future__ import annotations

from bench._gpu_device import Ceilings
from bench._gpu_engine import Sizes, shape_of
from bench._gpu_model import Caller, tokens_of
from bench._gpu_run import Rows, at_least, at_most
from cache_tiers.node import TierNode

SESSION = b"bench-session-01"
RATIO_MIN = 14.0


def measure_returns(
    rows: Rows,
    caller: Caller,
    node: TierNode,
    sizes: Sizes,
    ceilings: Ceilings,
    step_s: float | None,
    *,
    must_pay_from: int,
) -> None:
    """Measure turns on conversations of several lengths, of which nothing is left in the pool.

    The conversation grows turn by turn and is stored by the product, then comes back from the tier.
    `must_pay_from`: tokens from which loading has to be 14 times as quick as computing.
    """
    longest = max(sizes.returns)
    history = tokens_of(longest, 900, caller.shape)
    _store(caller, node, history, sizes)
    for number, length in enumerate(sorted(sizes.returns)):
        shape = f"{shape_of(1, length)} {caller.engine.runner.pool.geometry.stored_name}"
        turn = [*history[:length], *tokens_of(sizes.turn, 950 + number, caller.shape)]
        computed_s = _first_token_s(caller, turn, None, least_cached=0)
        _first_token_s(caller, turn, SESSION, least_cached=length)  # the first load of memory registers it
        loaded_s = _first_token_s(caller, turn, SESSION, least_cached=length)
        nbytes = caller.info.bytes_per_token * length
        rows.add("return, computed", shape, computed_s, "s")
        rows.add("return, loaded and verified", shape, loaded_s, "s")
        least_s = None
        if ceilings.up > 0 and step_s is not None:
            least_s = loaded_s / (1.3 * nbytes / ceilings.up + step_s)
        rows.add("return", shape, least_s, "of 1.3 x bytes / P + a step", at_most(1.0))
        bar = at_least(RATIO_MIN) if length >= must_pay_from else None
        rows.add("return, computed / loaded", shape, computed_s / loaded_s, "x", bar)


def _store(caller: Caller, node: TierNode, history: list[int], sizes: Sizes) -> None:
    """Let the conversation grow to all of `history`, each turn stored before the next."""

    def held_tokens() -> int:
        return next(tier.tokens for tier in node.stats().tiers if tier.name == "cpu")

    for end in range(min(sizes.returns), len(history) + 1, min(sizes.returns)):
        key = caller.ask(history[:end], 1, session=SESSION)
        caller.drain(key)
        caller.settle(lambda: held_tokens() >= end)  # noqa: B023 - called at once


def _first_token_s(caller: Caller, turn: list[int], session: bytes | None, *, least_cached: int) -> float:
    """Return the time to the first token after the pool has forgotten everything.

    Raises `RuntimeError` if fewer tokens than `least_cached` came from the tier.
    """
    caller.forget()
    key = caller.ask(turn, 1, session=session)
    caller.drain(key)
    asked = caller.asked[key]
    loaded = 0 if asked.receipt is None else asked.receipt.tokens["cpu"]
    if loaded < least_cached:
        raise RuntimeError(f"{loaded} of {len(turn)} tokens were loaded: {asked.receipt} {asked.failed}")
    return asked.ttft_s
