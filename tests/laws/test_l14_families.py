"""L14 for every family that is served: its own code's answer, and the same one however it is computed.

A type stands in `replicas/model/spec.py` because it passes here: cached is uncached, chunked is whole,
alone is in a batch. Where the probe says that a family is exact on this CPU, that means bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from samovar.replicas.forward import runner
from samovar.replicas.forward.plain import PLAIN_TYPES
from samovar.replicas.model.spec import FAMILIES, SERVED_TYPES
from tests.support.engines.engines import Driver, prompt_of, small_engine
from tests.support.engines.forward_bench import Bench
from tests.support.engines.other_cpu import is_played
from tests.support.engines.tiny_models import WINDOWED, Family, make_tiny_model

MEMBERS = [*((family, False) for family in SERVED_TYPES), *((family, True) for family in WINDOWED)]
NAMES = [f"{family}{' window' * window}" for family, window in MEMBERS]
DTYPES = [torch.float32, torch.bfloat16]
LONG = ("mistral window", "gemma2", "gemma3_text", "gpt_oss")
LEAN = [name for name, (family, _) in zip(NAMES, MEMBERS, strict=True) if family in PLAIN_TYPES]
"""What the lean step serves, and the native one, which engines take by themselves."""
INT8 = ("llama", *LONG)
"""Families whose attention takes every path there is: their laws hold with K and V kept as int8, too."""
KEPT = [*((name, "auto") for name in NAMES), *((name, "int8") for name in INT8)]
OURS = [(name, step) for name in LEAN for step in ("lean", "native")]
STEPS = [*((name, "transformers") for name in NAMES), *OURS]
COMPUTED = [
    *((name, kv, "transformers", dtype) for name, kv in KEPT for dtype in DTYPES),
    *((name, "auto", step, dtype) for name, step in OURS for dtype in DTYPES),
    *(("llama", "int8", "lean", dtype) for dtype in DTYPES),
    *((name, "auto", "native-bf16", torch.bfloat16) for name in LEAN),
]


@pytest.fixture(scope="session")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {
        name: make_tiny_model(folder / name.replace(" ", "-"), cast(Family, family), window=window)
        for name, (family, window) in zip(NAMES, MEMBERS, strict=True)
    }


def dtypes_of(name: str, bench: Bench, dtype: torch.dtype) -> bool:
    """Whether the law's bound is known: rounding may lead a mixture's router to another expert."""
    return dtype == torch.float32 or not FAMILIES[name.split()[0]].has_experts or bench.is_exact()


@pytest.mark.parametrize(("name", "step"), STEPS)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_every_family_equals_transformers(
    members: dict[str, Path], name: str, step: str, exact: bool
) -> None:
    """Right at all: the paged engine's logits are those of the model's own code, within float32 noise."""
    tokens = prompt_of(90, seed=3)
    reference = AutoModelForCausalLM.from_pretrained(
        members[name], dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([tokens])).logits[0, -1]
    bench = Bench(members[name], torch.float32, 16, exact=exact, step=step)
    for chunking in ([90], [40, 1, 30, 19], [1] * 90):
        logits, _ = bench.compute(tokens, chunking, [prompt_of(20, seed=4)])
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
        assert logits.argmax() == expected.argmax()


@pytest.mark.parametrize(("name", "kv_dtype", "step", "dtype"), COMPUTED, ids=str)
def test_every_family_is_the_same_in_chunks_and_in_a_batch(
    members: dict[str, Path], name: str, kv_dtype: str, step: str, dtype: torch.dtype
) -> None:
    bench = Bench(members[name], dtype, 16, is_int8=kv_dtype == "int8", step=step)
    if not dtypes_of(name, bench, dtype):
        pytest.skip("a router's choice is not bounded by rounding")
    tokens = prompt_of(70, seed=1)
    truth = bench.compute(tokens, [70])
    for chunking in ([35, 35], [37, 1, 5, 17, 10], [1] * 70):
        bench.assert_same(bench.compute(tokens, chunking), truth, f"in chunks {chunking}")
    others = [prompt_of(length, seed=length) for length in (3, 64, 131)]
    bench.assert_same(bench.compute(tokens, [40, 3, 26, 1], others), truth, "in a batch")


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "chunking"),
    [
        *((dtype, "auto", cut) for dtype in DTYPES for cut in ([512, 21], [300, 1, 232], [525] + [1] * 8)),
        (torch.float32, "int8", [300, 1, 232]),
    ],
    ids=str,
)
def test_windows_caps_and_sinks_are_the_same_across_512_keys(
    members: dict[str, Path], name: str, dtype: torch.dtype, kv_dtype: str, chunking: list[int]
) -> None:
    """Runs of 512 keys that a window has left behind are not read, and change nothing."""
    bench = Bench(members[name], dtype, 16, is_int8=kv_dtype == "int8")
    if not dtypes_of(name, bench, dtype):
        pytest.skip("a router's choice is not bounded by rounding")
    tokens = prompt_of(533, seed=6)
    truth = bench.compute(tokens, [533])
    bench.assert_same(bench.compute(tokens, chunking, [prompt_of(500, seed=7)]), truth)


@pytest.mark.parametrize(
    ("name", "kv_dtype", "step"),
    [
        *((name, kv_dtype, "auto") for name, kv_dtype in KEPT),
        *((name, "auto", "lean") for name in ("llama", "qwen3 window", "granite")),
    ],
)
def test_every_family_answers_the_same_from_cached_blocks(
    members: dict[str, Path], name: str, kv_dtype: str, step: str
) -> None:
    """And a window keeps the KV of what it does not see: the next turn may read all of it."""
    prompt = prompt_of(60, seed=2)
    engine = small_engine(members[name], kv_dtype=kv_dtype, step=step).engine
    cold, warm = (Driver(engine).run(prompt, max_tokens=12) for _ in range(2))
    assert warm.admitted is not None
    assert warm.admitted.cached_tokens == 48
    assert cold.ids == warm.ids
    longer = prompt + cold.ids + prompt_of(7, seed=3)
    reused = Driver(engine).run(longer, max_tokens=8)
    assert reused.admitted is not None
    assert reused.admitted.cached_tokens == 64
    uncached = small_engine(members[name], kv_dtype=kv_dtype, step=step).engine
    assert reused.ids == Driver(uncached).run(longer, max_tokens=8).ids


@pytest.mark.parametrize(("name", "step"), OURS)
def test_our_own_steps_give_the_tokens_of_transformers_modules(
    members: dict[str, Path], name: str, step: str
) -> None:
    if step == "native" and is_played():
        pytest.skip("the CPU that is played has no native step")
    prompt = prompt_of(60, seed=2)
    ours, modules = (small_engine(members[name], step=one) for one in (step, "transformers"))
    assert ours.info.step.startswith(step)
    assert modules.info.step.startswith("the modules of transformers")
    tokens, others = (Driver(built.engine).run(prompt, max_tokens=40).ids for built in (ours, modules))
    assert tokens == others
    if ours.info.exact and modules.info.exact:  # each promises its own bits
        assert ours.engine.requests.intake.namespace != modules.engine.requests.intake.namespace


@pytest.mark.parametrize("name", INT8)
def test_int8_answers_like_the_model_however_the_prompt_is_cut(members: dict[str, Path], name: str) -> None:
    """Without exact mode: a whole prompt attends to what its later chunks would read from the pool.

    Another order of sums may round a number to the neighbouring code: that moves a logit far less than not
    rounding at all does.
    """
    tokens = prompt_of(90, seed=3)
    auto = Bench(members[name], torch.float32, 16, exact=False).compute(tokens, [90])[0]
    bench = Bench(members[name], torch.float32, 16, exact=False, is_int8=True)
    whole, *cut = (bench.compute(tokens, chunks)[0] for chunks in ([90], [1, 89], [40, 1, 49]))
    rounding = (whole - auto).abs().max()
    assert 0.01 < rounding < 1.0, "it was not rounded, or to something else"
    for logits in cut:
        assert (logits - whole).abs().max() < rounding / 5


def test_a_window_that_is_not_applied_would_be_seen(members: dict[str, Path]) -> None:
    tokens = prompt_of(90, seed=3)
    wide, narrow = (
        Bench(members[name], torch.float32, 16).compute(tokens, [90])[0]
        for name in ("mistral", "mistral window")
    )
    assert (wide - narrow).abs().max() > 0.1


@pytest.mark.skipif(is_played(), reason="a product's bits depend on its rows on the CPU that is played")
def test_experts_give_a_token_the_same_bits_beside_any_others(members: dict[str, Path]) -> None:
    """The part of exactness that a mixture adds: how many rows an expert gets depends on the batch."""
    bench = Bench(members["mixtral"], torch.float32, 16)
    layer = bench.model.model.layers[0].mlp.experts  # type: ignore[union-attr, index]
    assert bench.model.config._experts_implementation == runner.EXPERTS_NAME  # type: ignore[union-attr]
    rows, choices = torch.randn(40, 64), torch.randint(0, 4, (40, 2))
    shares = torch.rand(40, 2)
    together = layer(rows, choices, shares)
    for count in (4, 8, 20):
        assert torch.equal(layer(rows[:count], choices[:count], shares[:count]), together[:count])


def test_a_family_that_is_never_exact_here_says_why(members: dict[str, Path]) -> None:
    """A few tries may agree by luck: what is known to depend on the number of rows is refused without any."""
    before = torch.get_num_threads()
    try:
        for name, threads, why in (("qwen2_moe", 1, "shared expert"), ("gemma2", 3, "3 threads")):
            info = small_engine(members[name], threads=threads).info
            assert not info.exact
            assert why in info.exactness
    finally:
        torch.set_num_threads(before)
