"""L14, the same answer: logits and KV do not depend on batching, chunking, block size or reuse.

Exact mode means `torch.equal`, not "close"; where the product's probe says that this CPU is not exact, the
law is its bound (`tests/support/engines/exactness.py`). The reference is transformers' own forward for being
right at all, and our one-shot prefill for being the same bits. The default model is computed whole where a
text or an answer is compared and at the default block size; what has many cases has its first layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from samovar.replicas.forward.inputs import StepInputs
from samovar.replicas.forward.runner import Runner
from samovar.replicas.scheduling.step import Chunk
from tests.support.engines.engines import Driver, prompt_of, small_engine
from tests.support.engines.exactness import assert_same_kv, assert_same_logits
from tests.support.engines.forward_bench import Bench, Computed

DTYPES = [torch.float32, torch.bfloat16]
TOKENS = 90
BLOCK_TOKENS = 16  # the default

CHUNKINGS = {
    "two halves": [45, 45],
    "ragged": [37, 1, 5, 30, 17],
    "small": [33, 2, 3, 40, 12],
    "token by token": [1] * TOKENS,
}


@pytest.fixture(scope="module", params=DTYPES, ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module", params=["auto", pytest.param("int8", marks=pytest.mark.slow)])
def is_int8(request: pytest.FixtureRequest) -> bool:
    """The quick twins with int8 are those of tiny models: `test_l14_families.py`."""
    return request.param == "int8"


@pytest.mark.parametrize("block_tokens", [BLOCK_TOKENS, 32, 64], scope="class")
class TestExactOnTheRealModel:
    @pytest.fixture(scope="class")
    def bench(
        self, smollm2: Path, smollm2_cut: Path, dtype: torch.dtype, block_tokens: int, is_int8: bool
    ) -> Bench:
        path = smollm2 if block_tokens == BLOCK_TOKENS else smollm2_cut
        return Bench(path, dtype, block_tokens, is_int8=is_int8)

    @pytest.fixture(scope="class")
    def tokens(self) -> list[int]:
        return prompt_of(TOKENS, seed=1, vocab=40000)

    @pytest.fixture(scope="class")
    def truth(self, bench: Bench, tokens: list[int]) -> Computed:
        return bench.compute(tokens, [TOKENS])

    @pytest.mark.parametrize("chunking", CHUNKINGS.values(), ids=CHUNKINGS.keys())
    def test_chunking(self, bench: Bench, tokens: list[int], truth: Computed, chunking: list[int]) -> None:
        bench.assert_same(bench.compute(tokens, chunking), truth)

    def test_in_a_batch(self, bench: Bench, tokens: list[int], truth: Computed) -> None:
        others = [prompt_of(length, seed=length, vocab=40000) for length in (3, 64, 131)]
        bench.assert_same(bench.compute(tokens, [50, 3, 36, 1], others), truth)


@pytest.mark.parametrize(
    "chunking", [[512, 21], [300, 1, 232], [509] + [1] * 24], ids=["512+", "ragged", "decode"]
)
def test_across_the_boundary_of_512_keys(
    smollm2_cut: Path, dtype: torch.dtype, is_int8: bool, chunking: list[int]
) -> None:
    """SDPA splits keys into runs of 512: the padding to full runs must hide where a context ends."""
    tokens = prompt_of(533, seed=6, vocab=40000)
    bench = Bench(smollm2_cut, dtype, 16, is_int8=is_int8)
    truth = bench.compute(tokens, [533])
    bench.assert_same(bench.compute(tokens, chunking, [prompt_of(500, seed=7, vocab=40000)]), truth)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_small_number_of_rows(
    smollm2_cut: Path, dtype: torch.dtype, is_int8: bool, threads: int
) -> None:
    """GEMM libraries choose another kernel for a few rows, and another again for several threads."""
    tokens = prompt_of(60, seed=8, vocab=40000)
    bench = Bench(smollm2_cut, dtype, 16, is_int8=is_int8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        truth = bench.compute(tokens, [60])
        for rows in range(1, 18):
            bench.assert_same(bench.compute(tokens, [60 - rows, rows]), truth, f"with {rows} rows")
        for others in (4, 6, 8):
            beside = [prompt_of(9, seed=n) for n in range(others)]
            bench.assert_same(bench.compute(tokens, [59, 1], beside), truth, f"beside {others}")
    finally:
        torch.set_num_threads(before)


def test_block_sizes_agree(smollm2_cut: Path, dtype: torch.dtype) -> None:
    tokens = prompt_of(100, seed=2, vocab=40000)
    truth, *others = (
        Bench(smollm2_cut, dtype, size, pages=40).compute(tokens, [60, 40]) for size in (16, 32, 64)
    )
    for logits, kv in others:  # the same chunks: the same bits on every CPU
        assert torch.equal(logits, truth[0])
        assert torch.equal(kv, truth[1])


@pytest.mark.parametrize("step", ["lean", "native", "native-bf16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_our_own_steps_are_the_same_however_they_are_computed(
    smollm2_cut: Path, dtype: torch.dtype, step: str, threads: int
) -> None:
    """Behind 512 keys too, and in every small number of rows."""
    if step == "native-bf16" and dtype != torch.bfloat16:
        pytest.skip("its products are in bfloat16")
    tokens = prompt_of(560, seed=9, vocab=40000)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        bench = Bench(smollm2_cut, dtype, 16, step=step)
        truth = bench.compute(tokens, [560])
        for chunking in ([280, 280], [512, 48], [300, 1, 232, 27], [530] + [1] * 30, [500, 3, 9, 17, 31]):
            bench.assert_same(bench.compute(tokens, chunking), truth, f"in chunks {chunking}")
        others = [prompt_of(length, seed=length, vocab=40000) for length in (3, 64, 131)]
        bench.assert_same(bench.compute(tokens, [520, 3, 36, 1], others), truth, "in a batch")
    finally:
        torch.set_num_threads(before)


def test_our_own_steps_are_as_near_to_float32_as_transformers_modules(smollm2: Path) -> None:
    """Of every place of a text: what bfloat16's rounding changes, it changes by no more."""
    tokens = AutoTokenizer.from_pretrained(smollm2)(" ".join(CONVERSATION)).input_ids

    def logprobs(dtype: torch.dtype, step: str) -> torch.Tensor:
        bench = Bench(smollm2, dtype, 16, step=step)
        sequence, rows = bench.sequence(tokens), list[torch.Tensor]()
        sequence.score_from = 0
        chunk = Chunk(sequence, 0, len(tokens))
        last = bench.runner.run([chunk], score=lambda _, start, logits: rows.append(logits.clone()))
        return torch.cat([*rows, last])[: len(tokens)].double().log_softmax(-1)

    truth = logprobs(torch.float32, "transformers")

    def kl(step: str) -> float:
        return float((truth.exp() * (truth - logprobs(torch.bfloat16, step))).sum(-1).mean())

    modules = kl("transformers")
    assert kl("lean") <= 1.05 * modules + 1e-6
    assert kl("native") <= 0.5 * modules
    assert kl("native-bf16") <= 0.5 * modules


def test_real_model_equals_transformers(smollm2: Path) -> None:
    tokens = prompt_of(120, seed=5, vocab=40000)
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="sdpa")
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([tokens])).logits[0, -1]
    for exact in (True, False):
        logits, _ = Bench(smollm2, torch.float32, 16, exact=exact).compute(tokens, [50, 69, 1])
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


# -- the check itself fires ------------------------------------------------------------------


class WrongPosition(Runner):
    """Planted bug: the last row of every step is rotated for the position beside its own."""

    def _pack(self, chunks: Sequence[Chunk]) -> StepInputs:
        inputs = super()._pack(chunks)
        last = inputs.segments[-1]
        inputs.positions[last.row + last.count - 1] += 1
        return inputs


class WrongPage(Runner):
    """Planted bug: one token's K and V land in the neighbouring page."""

    def _pack(self, chunks: Sequence[Chunk]) -> StepInputs:
        inputs = super()._pack(chunks)
        first = inputs.segments[0]
        if first.count > 1:
            offset = inputs.slots[first.row] % inputs.block_tokens
            inputs.slots[first.row] = inputs.table(first)[-1] * inputs.block_tokens + offset
        return inputs


@pytest.mark.parametrize("is_exact", [True, False], ids=["equal", "bound"])
@pytest.mark.parametrize("bug", [WrongPosition, WrongPage])
@pytest.mark.parametrize("step", ["transformers", "lean", "native"])
def test_planted_bug_is_seen(smollm2_cut: Path, bug: type[Runner], is_exact: bool, step: str) -> None:
    """By both branches of the law, on any CPU: the truth has the same chunks, and so the same bits."""
    tokens = prompt_of(TOKENS, seed=1, vocab=40000)
    bench = Bench(smollm2_cut, torch.float32, 16, step=step)
    logits, kv = bench.compute(tokens, [50, 40])
    again, kv_again = bench.compute(tokens, [50, 40])
    assert torch.equal(again, logits)
    assert torch.equal(kv_again, kv)
    forward = bench.runner.forward
    bench.runner = bug(
        bench.model, bench.pool, bench.runner.backend, exact=True, forward=lambda pool: forward
    )
    broken_logits, broken_kv = bench.compute(tokens, [50, 40])
    with pytest.raises(AssertionError, match=r"the logits differ|another greedy token"):
        assert_same_logits(broken_logits, logits, torch.float32, is_exact)
    with pytest.raises(AssertionError, match="the KV differs"):
        assert_same_kv(broken_kv, kv, is_exact)


# -- reuse ----------------------------------------------------------------------------------


CONVERSATION = [
    "What is the capital of France?",
    "And which river runs through it?",
    "Write one sentence about that river.",
]


@pytest.fixture(scope="module")
def steady(smollm2: Path) -> str:
    """The dtype in which texts are compared: bfloat16, or, where it is not exact here, float32.

    In float32 the best two tokens of these prompts lie further apart than rounding reaches on any CPU.
    """
    return "bfloat16" if small_engine(smollm2, dtype="bfloat16").info.exact else "float32"


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
def test_greedy_text_is_the_same_with_and_without_reuse(smollm2: Path, steady: str, kv_dtype: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    transcripts = []
    for reuse in (True, False):
        built = small_engine(smollm2, dtype=steady, prefix_reuse=reuse, kv_dtype=kv_dtype)
        driver = Driver(built.engine)
        messages, texts, cached = [], [], []
        for question in CONVERSATION:
            messages.append({"role": "user", "content": question})
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(rendered, add_special_tokens=False).input_ids
            answer = driver.run(ids, max_tokens=30, ignore_eos=False)
            messages.append({"role": "assistant", "content": answer.text})
            texts.append(answer.text)
            assert answer.admitted is not None
            cached.append(answer.admitted.cached_tokens)
        transcripts.append(texts)
        assert (cached[1] > 0 and cached[2] > cached[1]) if reuse else cached == [0, 0, 0]
    assert transcripts[0] == transcripts[1]


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
def test_preempted_and_crowded_equals_alone(smollm2: Path, steady: str, kv_dtype: str) -> None:
    """A pool too small for four answers at once: they are dropped, computed again, and still the same."""
    prompts = [prompt_of(40, seed=10 + i, vocab=40000) for i in range(4)]
    lonely = Driver(small_engine(smollm2, dtype=steady, pool_tokens=512, kv_dtype=kv_dtype).engine)
    alone = [lonely.run(prompt, max_tokens=30).ids for prompt in prompts]
    driver = Driver(small_engine(smollm2, dtype=steady, pool_tokens=192, kv_dtype=kv_dtype).engine)
    keys = [driver.submit(prompt, max_tokens=30) for prompt in prompts]
    driver.drain()
    assert driver.engine.stats().preemptions > 0, "the pool was meant to be too small"
    assert [driver.answers[key].ids for key in keys] == alone


def test_seeded_sample_is_the_same_cached_batched_and_preempted(smollm2: Path, steady: str) -> None:
    prompt = prompt_of(50, seed=20, vocab=40000)
    params = {"max_tokens": 20, "temperature": 0.9, "top_p": 0.95, "seed": 1234}
    driver = Driver(small_engine(smollm2, dtype=steady).engine)
    cold = driver.run(prompt, **params)
    warm = driver.run(prompt, **params)
    assert warm.admitted is not None
    assert warm.admitted.cached_tokens == 48
    crowd = [driver.submit(prompt_of(30 + i, seed=30 + i, vocab=40000), max_tokens=10) for i in range(3)]
    crowded = driver.run(prompt, **params)
    assert len(crowd) == 3
    assert cold.ids == warm.ids == crowded.ids
    assert driver.run(prompt, **{**params, "seed": 4321}).ids != cold.ids
