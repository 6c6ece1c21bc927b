"""A returning user on the device: the time to the first token from registered main memory, and computed.

Nothing is given that the service would not have: what loads take is measured by the engine's start, and what
is stored and loaded is decided by that.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench._gpu_device import Ceilings, share
from bench._gpu_engine import Sizes, shape_of
from bench._gpu_model import Asked, Caller, tokens_of
from bench._gpu_run import Rows, at_least, at_most, must_be
from bench._load_trace import asked_and_traced
from samovar.cache_tiers.node import TierNode

SESSION = b"bench-session-01"
RETURN_S_MAX: Mapping[int, float] = {8192: 0.08, 32768: 0.2, 65536: 0.35}
"""By tokens of history, of an 8B model on an H200."""
LOADED_SHARE_MIN = 0.9
RATE_SHARE_MIN = 0.5
"""Of the rate from pinned memory: on an H200 loads once ran at 6 to 8 of 55 GB/s."""


def measure_returns(
    rows: Rows, caller: Caller, node: TierNode, sizes: Sizes, ceilings: Ceilings, *, judges_times: bool
) -> None:
    """Measure turns on conversations of several lengths, of which nothing is left in the pool.

    The conversation grows turn by turn and is stored by the product, then comes back from the tier.
    `judges_times`: by `RETURN_S_MAX`.
    """
    longest = max(sizes.returns)
    history = tokens_of(longest, 900, caller.shape)
    held = store_conversation(caller, node, history, sizes)
    rows.add("stored of a conversation", shape_of(1, longest), held / longest, "of all", must_be(">=", 0.99))
    for number, length in enumerate(sorted(sizes.returns)):
        shape = f"{shape_of(1, length)} {caller.engine.runner.pool.geometry.stored_name}"
        turn = [*history[:length], *tokens_of(sizes.turn, 950 + number, caller.shape)]
        computed_s = _asked(caller, turn, None).ttft_s
        _asked(caller, turn, SESSION)  # the first load of memory registers it
        back, passed = asked_and_traced(caller, turn, SESSION)
        receipt = back.receipt
        loaded = 0 if receipt is None else receipt.tokens["cpu"]
        how = "" if receipt is None else f", {receipt.decision}"
        rows.add(
            "loaded of a return", shape + how, loaded / length, "of all", must_be(">=", LOADED_SHARE_MIN)
        )
        rows.add("return, computed", shape, computed_s, "s")
        limit_s = RETURN_S_MAX.get(length) if judges_times else None
        rows.add(
            "return, loaded and verified",
            shape,
            back.ttft_s,
            "s",
            None if limit_s is None else at_most(limit_s),
        )
        for one in passed:  # the stages overlap, as pieces follow each other
            rows.add(f"  {one.stage}, begins", shape, 1e3 * one.first_s, "ms")
            rows.add(f"  {one.stage}, is over", shape, 1e3 * one.last_s, "ms")
        if receipt is not None and receipt.load_s > 0:
            rate = caller.info.bytes_per_token * loaded / receipt.load_s
            rows.add("rate of that load", shape, share(rate, ceilings.up), "of P", at_least(RATE_SHARE_MIN))
        rows.add("return, computed / loaded", shape, computed_s / back.ttft_s, "x", at_least(1.0))
    price = next(tier.price for tier in node.stats().tiers if tier.name == "cpu")
    if price is not None and price.is_known:
        rows.add("price of a load, as it was learned", "cpu", price.bytes_per_s / 1e9, "GB/s")


def store_conversation(caller: Caller, node: TierNode, history: list[int], sizes: Sizes) -> int:
    """Let the conversation grow to all of `history`, turn after turn; return the tokens that are held."""

    def held() -> int:
        return min(end, next(tier.tokens for tier in node.stats().tiers if tier.name == "cpu"))

    def is_over() -> bool:
        return held() == end or any(":" in outcome for outcome in caller.engine.stats().stores)

    end = 0
    for end in range(min(sizes.returns), len(history) + 1, min(sizes.returns)):
        caller.drain(caller.ask(history[:end], 1, session=SESSION))
        caller.settle(is_over)
    return held()


def _asked(caller: Caller, turn: list[int], session: bytes | None) -> Asked:
    """Return what became of a turn that came after the pool had forgotten everything."""
    caller.forget()
    key = caller.ask(turn, 1, session=session)
    caller.drain(key)
    return caller.asked[key]
