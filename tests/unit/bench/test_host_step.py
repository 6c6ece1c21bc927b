"""What a step costs the host is measured over a whole engine that computes nothing."""

from __future__ import annotations

from pathlib import Path

from bench.host_step import host_ms, idle_engine


def test_each_step_is_packed_and_its_tokens_are_told(tiny_llama: Path) -> None:
    engine, idle = idle_engine(tiny_llama, rows=3, context=40)
    before = engine.stats()
    packed_s = idle.packed_s
    engine.step()
    after = engine.stats()
    assert (after.steps - before.steps, after.generated_tokens - before.generated_tokens) == (1, 3)
    assert idle.packed_s >= packed_s
    whole_ms, packing_ms = host_ms(tiny_llama, rows=2, context=40, steps=5)
    assert whole_ms >= packing_ms >= 0
