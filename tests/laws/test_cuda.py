"""The laws on a GPU, where a stated tolerance takes the place of equality. Skipped, visibly, without one."""

from __future__ import annotations

import mmap
import os
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from samovar.cache_tiers.blocks.extent import BlockShape
from samovar.cache_tiers.blocks.record import layer_sums
from samovar.configs.sections import MIB
from samovar.replicas.engine.audit import bare_sequence
from samovar.replicas.forward.attention import GatherSdpa
from samovar.replicas.forward.attention_choice import choose_attention
from samovar.replicas.forward.attention_triton import TritonPaged
from samovar.replicas.forward.loading import load_model
from samovar.replicas.forward.plain import PLAIN_TYPES, plain_model
from samovar.replicas.forward.runner import Runner, why_by_rows
from samovar.replicas.kv.block_io import page_io
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool, quantise
from samovar.replicas.messages import Sampled
from samovar.replicas.model.spec import SERVED_TYPES, inspect_model
from samovar.replicas.sampling.draws import nucleus_of
from samovar.replicas.sampling.sampler import NotNumbers, Sampler
from samovar.replicas.scheduling.step import Chunk
from samovar.replicas.start.step_choice import compare_fused
from tests.support.engines.engines import Driver, prompt_of, small_engine
from tests.support.engines.sampled_batches import EOS, KINDS, batch_of
from tests.support.engines.tiny_models import Family, make_tiny_model
from tests.unit.replicas.forward.test_experts import MIXTURES, assert_near, experts_of, step_of
from tests.unit.replicas.kv.test_int8 import samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: GPU laws not run")

CUDA = torch.device("cuda")


@pytest.mark.parametrize("family", SERVED_TYPES)
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "padded"])
def test_logits_are_those_of_transformers(family: str, exact: bool, tmp_path: Path) -> None:
    """float32: logits within 1e-3 and the same greedy token, for prefill, chunks and decodes in a batch."""
    model_dir = make_tiny_model(tmp_path / family, family)  # type: ignore[arg-type]
    tokens = prompt_of(90, seed=3)
    reference = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = reference.to(CUDA)(input_ids=torch.tensor([tokens], device=CUDA)).logits[0, -1].float()
    spec = inspect_model(model_dir)
    geometry = KvGeometry(spec.layers, 16, spec.kv_heads, spec.head_dim, torch.float32)
    model = load_model(spec, torch.float32, CUDA)
    for chunking in ([90], [40, 1, 30, 19], [1] * 90):
        pool = KvPool(geometry, 20, CUDA)
        runner = Runner(model, pool, GatherSdpa(exact, torch.float32), exact=exact)
        sequence, other = bare_sequence(tokens, list(range(6, 0, -1))), bare_sequence(prompt_of(20), [9, 8])
        start, logits = 0, torch.empty(0)
        for step, count in enumerate(chunking):
            beside = Chunk(other, 0, 20) if step == 0 else Chunk(other, 19, 1)
            logits = runner.run([beside, Chunk(sequence, start, count)])[-1]
            start += count
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
        assert logits.argmax() == expected.argmax()


@pytest.mark.parametrize("is_int8", [False, True], ids=["as computed", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", SERVED_TYPES)
def test_the_kernel_serves(family: str, dtype: torch.dtype, is_int8: bool, tmp_path: Path) -> None:
    """Compared with SDPA at the start, it is not refused: windows, soft caps and sinks included."""
    spec = inspect_model(make_tiny_model(tmp_path / family, family))  # type: ignore[arg-type]
    model = load_model(spec, dtype, CUDA)
    geometry = KvGeometry(spec.layers, 16, spec.kv_heads, spec.head_dim, dtype, is_int8=is_int8)
    chosen = choose_attention(model, geometry, CUDA, exact=False)
    assert chosen.sentence == TritonPaged.name


@pytest.mark.parametrize("is_int8", [False, True], ids=["as computed", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", sorted(PLAIN_TYPES))
def test_the_fused_step_serves(family: str, dtype: torch.dtype, is_int8: bool, tmp_path: Path) -> None:
    """Compared with transformers' modules at the start, it is not refused; their weights lie there once."""
    spec = inspect_model(make_tiny_model(tmp_path / family, family))  # type: ignore[arg-type]
    model = load_model(spec, dtype, CUDA)
    geometry = KvGeometry(spec.layers, 16, spec.kv_heads, spec.head_dim, dtype, is_int8=is_int8)
    compare_fused(model, plain_model(model), geometry, CUDA)


@pytest.mark.parametrize("step", ["fused", "transformers"])
def test_an_engine_on_a_gpu_answers_as_on_a_cpu(step: str, tiny_llama: Path) -> None:
    """In float32, by graphs: the tiny model's best tokens are no toss-up."""
    answers = []
    for device, by in (("cuda", step), ("cpu", "transformers")):
        built = small_engine(tiny_llama, dtype="float32", device=device, step=by)
        assert built.engine.runner.forward.name == by
        driver = Driver(built.engine)
        answers.append([driver.run(prompt_of(size, seed=size), max_tokens=20).ids for size in (5, 41, 90)])
    assert answers[0] == answers[1]


def test_greedy_text_with_and_without_reuse(smollm2: Path) -> None:
    prompt = prompt_of(70, seed=5, vocab=40000)
    answers = []
    for reuse in (True, False):
        built = small_engine(smollm2, dtype="float32", device="cuda", prefix_reuse=reuse)
        driver = Driver(built.engine)
        first = driver.run(prompt, max_tokens=20)
        second = driver.run(prompt + first.ids, max_tokens=20)
        assert second.admitted is not None
        assert (second.admitted.cached_tokens > 0) == reuse
        answers.append((first.ids, second.ids))
    assert answers[0] == answers[1]


def test_int8_has_the_same_bytes_as_on_a_cpu() -> None:
    vectors = torch.from_numpy(samples())
    for ours, expected in zip(quantise(vectors.to(CUDA)), quantise(vectors), strict=True):
        assert torch.equal(ours.cpu(), expected)


def test_moved_blocks_are_the_same_bytes(tiny_llama: Path) -> None:
    """A copied page equals its source bit for bit, on any device (copy-on-write stands on it)."""
    driver = Driver(small_engine(tiny_llama, device="cuda").engine)
    alone = driver.run(prompt_of(41), max_tokens=30)
    forked = driver.run(prompt_of(41), n=4, max_tokens=30)
    assert all(ids == alone.ids for ids in forked.token_ids.values())


def test_g6_pages_leave_and_come_back_the_same_from_two_threads_at_once() -> None:
    """A turn is stored by one thread while the engine's swaps another sequence out: own bytes for each."""
    geometry = KvGeometry(layers=3, block_tokens=16, kv_heads=2, head_dim=32, dtype=torch.bfloat16)
    pool = KvPool(geometry, 65, torch.device("cuda"))
    for page in range(1, 65):
        pool.data[page].fill_(float(page))
    io = page_io(pool)
    mark = io.mark()
    outs = [np.empty(32 * geometry.block_bytes, dtype=np.uint8) for _ in range(2)]
    pages = [list(range(1, 33)), list(range(33, 65))]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            list(threads.map(lambda number: io.begin_out(pages[number], outs[number], mark).wait(), range(2)))
            for out, some in zip(outs, pages, strict=True):
                blocks = torch.from_numpy(out.reshape(32, -1)).view(torch.bfloat16)
                assert (blocks == torch.tensor(some, dtype=torch.bfloat16)[:, None]).all()
    pool.data.zero_()
    io.begin_in(outs[0], pages[1], io.mark()).wait()
    expected = torch.tensor(pages[0], dtype=torch.bfloat16, device="cuda")
    assert (pool.data[33:65].flatten(1) == expected[:, None]).all()


@pytest.mark.parametrize("layer_bytes", [64, 4096, 12288 + 8, 65536])
def test_g5_checksums_of_pages_are_the_records_own(layer_bytes: int) -> None:
    """Also behind 2^31 bytes of a pool."""
    from samovar.replicas.kv.page_sums import page_sums

    shape, rng = BlockShape(32, layer_bytes, 16), np.random.default_rng(9)
    count = 5 + 2**31 // shape.block_bytes if layer_bytes == 65536 else 64
    pages = torch.empty((count, shape.block_bytes), dtype=torch.uint8, device=CUDA).random_(0, 256)
    numbers = torch.from_numpy(np.concatenate([rng.permutation(count - 1)[:20], [count - 1]]))
    keys = [rng.bytes(32) for _ in numbers]
    seeds = torch.tensor([int.from_bytes(key[:8], "little", signed=True) for key in keys])
    found = page_sums(pages, numbers.to(CUDA), seeds.to(CUDA), shape).cpu().numpy().view(np.uint64)
    blocks = pages[numbers.to(CUDA)].cpu().numpy().reshape(-1)
    assert np.array_equal(found, layer_sums(blocks, keys, shape))


def test_tokens_are_sampled_on_the_device_as_on_the_cpu() -> None:
    """The same logits, all kinds of requests. The device adds up in another order, which seldom matters."""
    rng, batched, same, count = random.Random(1), Sampler(EOS), 0, 0
    for kind in KINDS.values():
        for _ in range(20):
            logits, picks = batch_of(rng, kind)
            expected, given = batched.sample(logits, picks), batched.sample(logits.to(CUDA), picks)
            for ours, theirs in zip(given, expected, strict=True):
                assert isinstance(ours, Sampled)
                assert isinstance(theirs, Sampled)
                same += ours.token_id == theirs.token_id
                count += 1
                if ours.token_id == theirs.token_id and theirs.logprob is not None:
                    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert same / count > 0.999


@contextmanager
def without_waits() -> Iterator[None]:
    """torch raises where the host would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("scale", [0.01, 0.3, 9.0])
def test_a_nucleus_is_cut_by_the_same_bits_and_without_a_wait(scale: float) -> None:
    """Whole numbers are added in whatever order the device takes them."""
    probabilities = (torch.randn(32, 128_256) * scale).round(decimals=2).softmax(dim=-1)
    top_p = torch.linspace(0.0, 1 - 1e-6, 32, dtype=torch.float64)
    given = probabilities.to(CUDA), top_p.to(CUDA)
    with without_waits():
        found = nucleus_of(*given)
    assert torch.equal(found.cpu(), nucleus_of(probabilities, top_p))


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_in_groups_give_what_one_after_the_other_gives_and_wait_for_nothing(family: Family) -> None:
    if why := why_by_rows(CUDA, torch.bfloat16):
        pytest.skip(why)
    looped, grouped = (one.to(CUDA) for one in experts_of(family, torch.bfloat16))
    for rows in (1, 8, 64, 700):
        given = [one.to(CUDA) for one in step_of(rows, torch.bfloat16)]
        expected = looped(*given)
        with without_waits():
            found = grouped(*given)
        assert_near(found, expected)


def test_a_row_with_nan_is_found_on_the_device() -> None:
    rng = random.Random(2)
    logits, picks = batch_of(rng, KINDS["anything"])
    logits[0, 5] = torch.nan
    given = Sampler(EOS).sample(logits.to(CUDA), picks)
    assert [isinstance(one, NotNumbers) for one in given] == [row == 0 for row, _ in picks]


@pytest.mark.parametrize("memory", ["arena", "staging", "shared"])
def test_g6_moves_wait_for_delayed_kernels_and_delayed_kernels_for_no_move(memory: str) -> None:
    """Out: the last bytes that a late kernel writes. In: a late reader still sees what was there before."""
    geometry = KvGeometry(layers=3, block_tokens=16, kv_heads=2, head_dim=32, dtype=torch.bfloat16)
    pool = KvPool(geometry, 65, CUDA)
    io = page_io(pool, arena_bytes=8 * MIB)
    pages = [*range(1, 17), *range(40, 20, -1)]
    nbytes = len(pages) * geometry.block_bytes
    index = torch.tensor(pages, device=CUDA)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.truncate(file.fileno(), nbytes)
        shared = np.frombuffer(mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED), np.uint8)
        out = {"arena": io.empty(nbytes), "staging": np.empty(nbytes, np.uint8), "shared": shared}[memory]
        for value in range(1, 40, 2):
            torch.cuda._sleep(20_000_000)
            pool.data.index_fill_(0, index, float(value))
            io.begin_out(pages, out, io.mark()).wait()
            left = torch.from_numpy(out.copy()).view(torch.bfloat16)
            assert (left == value).all()
            torch.cuda._sleep(20_000_000)
            seen = pool.data.index_select(0, index)
            out[:] = torch.full_like(left, value + 1.0).view(torch.uint8).numpy()
            io.begin_in(out, pages, io.mark()).wait()
            assert (pool.data.index_select(0, index) == value + 1).all()
            assert (seen == value).all()
        io.close()
