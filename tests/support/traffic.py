"""Small traces for the tests of the simulator."""

from __future__ import annotations

from bench._trace_generator import GeneratorOptions, Shape, generate
from samovar.cluster.plan.traces.trace import TraceTurn

BLOCK = 512


def turn(
    session: int,
    started_s: float,
    blocks: tuple[int, ...],
    *,
    output_tokens: int = 10,
    service_s: float | None = 1.0,
    kept_tokens: int = 0,
    block_tokens: int = BLOCK,
) -> TraceTurn:
    """A request whose prompt is these blocks and nothing more."""
    return TraceTurn(
        session=session,
        started_s=started_s,
        input_tokens=max(1, len(blocks) * block_tokens),
        output_tokens=output_tokens,
        blocks=blocks,
        block_tokens=block_tokens,
        kept_tokens=kept_tokens,
        service_s=service_s,
        stop="stop",
        role="user",
        tool="",
        profile="chat",
    )


def made(turns: int, *, shape: Shape = "chat", seed: int = 1) -> list[TraceTurn]:
    """Generated traffic."""
    return list(generate(GeneratorOptions(shape=shape, turns=turns, seed=seed, block_tokens=BLOCK)).turns())
