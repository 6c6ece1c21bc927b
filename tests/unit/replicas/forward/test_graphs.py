"""Graphs of steps without a GPU: a graph is a recorded call that looks for its numbers where they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from samovar.configs.settings import EngineSettings
from samovar.replicas.engine.audit import bare_sequence
from samovar.replicas.forward import inputs as inputs_module
from samovar.replicas.forward import loading
from samovar.replicas.forward import runner as runner_module
from samovar.replicas.forward.attention import AttentionForm
from samovar.replicas.forward.graphs import CHUNK_ROWS, Bucket, GraphLimits, buckets_of, chunk_buckets_of
from samovar.replicas.forward.inputs import StepInputs, StepPacker, Tiling
from samovar.replicas.forward.loading import load_model
from samovar.replicas.forward.runner import EXPERTS_NAME, GROUPED_NAME, Runner
from samovar.replicas.kv import TRASH_PAGE, KvGeometry, KvPool, LayerKv
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model.spec import inspect_model
from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import Chunk, StepTimes
from samovar.replicas.start import build
from samovar.replicas.start.build import BuiltEngine
from tests.support.engines.engines import Driver, prompt_of, small_engine
from tests.support.engines.launches import Launches
from tests.support.engines.simulated_device import SimulatedDevice
from tests.support.engines.tiny_models import Family, make_tiny_model

CPU = torch.device("cpu")
BLOCK, CONTEXT, ROWS = 16, 128, 12
LIMITS = GraphLimits(decodes=ROWS, tokens=100, sequences=ROWS + 1, context_tokens=CONTEXT)
DECODES = GraphLimits(decodes=ROWS, tokens=0, sequences=ROWS + 1, context_tokens=CONTEXT)


class TensorPaged:
    """Attends as a kernel does: all that it knows of a step it reads from the step's tensors when it runs."""

    name = "tensors"
    tiling = Tiling(4, 3, 2)

    def prepare(self, inputs: StepInputs) -> StepInputs:
        return inputs

    def write(self, layer_kv: LayerKv, key: torch.Tensor, value: torch.Tensor, meta: StepInputs) -> None:
        layer_kv.write(meta.slot_index(), key, value)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: LayerKv,
        meta: StepInputs,
        form: AttentionForm,
    ) -> torch.Tensor:
        out = torch.zeros_like(query)
        works = [work for work in (meta.decodes, meta.others) if work is not None]
        for segment, first, _, splits in (tile for work in works for tile in work.tiles.tolist()):
            row, count, context, table = meta.spans[segment].tolist()
            end = min(first + self.tiling.rows, count)
            if splits == 0:
                continue  # an empty place
            blocks = -(-context // BLOCK)
            keys, values = layer_kv.read(meta.tables[table : table + blocks].long())
            seen = context - count + torch.arange(first, end)[:, None] >= torch.arange(context)[None, :]
            rows = slice(row + first, row + end)
            out[rows] = F.scaled_dot_product_attention(
                query[rows].transpose(0, 1),
                keys[:context].transpose(0, 1),
                values[:context].transpose(0, 1),
                attn_mask=seen,
                scale=form.scale,
                enable_gqa=True,
            ).transpose(0, 1)
        return out


class Recorder:
    """Records as a CUDA graph does: once, by running it; a replay runs it again on what it took then."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()

        def replay() -> None:
            self.replays += 1
            launch()

        return replay


@pytest.fixture(scope="module")
def model_dir(tiny_llama: Path) -> Path:
    return tiny_llama


@pytest.fixture(scope="module")
def model(model_dir: Path) -> torch.nn.Module:
    return load_model(inspect_model(model_dir), torch.float32, CPU)


class Side:
    """A runner on a pool of its own, with sequences whose prompts it has computed."""

    def __init__(self, model: torch.nn.Module, model_dir: Path, count: int) -> None:
        spec = inspect_model(model_dir)
        geometry = KvGeometry(spec.layers, BLOCK, spec.kv_heads, spec.head_dim, torch.float32)
        blocks = CONTEXT // BLOCK
        pool = KvPool(geometry, 1 + count * blocks, CPU)
        self.runner = Runner(model, pool, TensorPaged(), exact=False)
        self.capture = Recorder()
        shuffled = random.Random(3).sample(range(1, pool.pages), count * blocks)
        self.sequences = [
            bare_sequence(prompt_of(5 + 9 * number, seed=number), shuffled[number * blocks :][:blocks])
            for number in range(count)
        ]
        for sequence in self.sequences:
            self.runner.run([Chunk(sequence, 0, len(sequence.tokens) - 1)])

    def use_queue(self, queue: SimulatedQueue) -> None:
        """Let the runner's steps be uploaded by this queue from now on."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner_module, "StepPacker", partial(StepPacker, queue=queue))
            self.runner = Runner(self.runner.model, self.runner.pool, TensorPaged(), exact=False)

    def record(self) -> None:
        self.runner.record_steps(self.capture, LIMITS)

    def step(self, picked: list[int]) -> torch.Tensor:
        """Compute the last token of some sequences, and append the best next one to each."""
        sequences = [self.sequences[number] for number in picked]
        logits = self.runner.run([decode_of(sequence) for sequence in sequences]).clone()
        for sequence, best in zip(sequences, logits.argmax(dim=-1).tolist(), strict=True):
            sequence.tokens.append(best)
        return logits


def decode_of(sequence: Sequence) -> Chunk:
    return Chunk(sequence, len(sequence.tokens) - 1, 1)


def test_buckets() -> None:
    assert buckets_of(1) == (1,)
    assert buckets_of(3) == (1, 2, 3)
    assert buckets_of(8) == (1, 2, 4, 8)
    assert buckets_of(32) == (1, 2, 4, 8, 16, 24, 32)
    assert buckets_of(30) == (1, 2, 4, 8, 16, 24, 30)
    assert buckets_of(128) == (1, 2, 4, *range(8, 65, 8), *range(80, 129, 16))
    assert len(buckets_of(512)) == 31
    assert buckets_of(0) == ()


def test_buckets_of_chunks() -> None:
    assert chunk_buckets_of(0) == ()
    assert chunk_buckets_of(16) == (16,)
    assert chunk_buckets_of(100) == (16, 32, 64, 128)
    assert chunk_buckets_of(8192) == CHUNK_ROWS


@pytest.mark.parametrize("rows", CHUNK_ROWS)
@pytest.mark.parametrize("tile_rows", [4, 32])
def test_a_bucket_has_room_for_the_worst_mix_of_its_rows(rows: int, tile_rows: int) -> None:
    bucket = Bucket.of_chunks(rows, 128, Tiling(tile_rows, 49, 16))
    assert bucket.shape.segments <= 136
    rng = random.Random(rows)
    for _ in range(200):
        several = rng.randint(0, bucket.most.several)
        cuts = sorted(rng.sample(range(1, rows // 2), several))
        counts = [2 * (end - start) for start, end in pairwise([0, *cuts])]
        tiles = sum(-(-count // tile_rows) for count in counts)
        assert tiles <= bucket.shape.others.tiles
    counts = [tile_rows + 1] * (bucket.most.several - 1)
    counts.append(rows - sum(counts))
    assert counts[-1] < 2 or sum(-(-count // tile_rows) for count in counts) <= bucket.shape.others.tiles


def test_a_replay_after_other_numbers_were_put_in_gives_what_eager_gives(
    model: torch.nn.Module, model_dir: Path
) -> None:
    """Sequences join and leave, of every length: logits, the best tokens, the look for NaN, and the pages."""
    eager, graphed = Side(model, model_dir, 9), Side(model, model_dir, 9)
    graphed.record()
    rng = random.Random(1)
    for _ in range(40):
        picked = rng.sample(range(9), rng.randint(1, 9))
        expected, given = eager.step(picked), graphed.step(picked)
        torch.testing.assert_close(given, expected, atol=1e-4, rtol=0)
        assert graphed.runner.is_recorded
        assert graphed.runner.greedy.tolist() == [expected.argmax(dim=-1).tolist(), [0] * len(picked)]
    assert [one.tokens for one in graphed.sequences] == [one.tokens for one in eager.sequences]
    assert graphed.capture.replays == 40
    ours, theirs = graphed.runner.pool.data, eager.runner.pool.data
    kept = [page for page in range(ours.shape[0]) if page != TRASH_PAGE]
    torch.testing.assert_close(ours[kept], theirs[kept], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_mixture_that_groups_its_experts_is_replayed_as_well(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a recorded step depends on the experts that were chosen then."""
    monkeypatch.setattr(loading, "why_by_rows", lambda device, dtype: None)
    model_dir = make_tiny_model(tmp_path / family, family)
    mixture = load_model(inspect_model(model_dir), torch.float32, CPU)
    eager, graphed = Side(mixture, model_dir, 9), Side(mixture, model_dir, 9)
    graphed.record()
    rng = random.Random(2)
    for _ in range(12):
        picked = rng.sample(range(9), rng.randint(1, 9))
        torch.testing.assert_close(graphed.step(picked), eager.step(picked), atol=1e-4, rtol=0)
    assert graphed.capture.replays == 12
    with Launches() as launches:
        graphed.step([0, 1, 2])
    assert not launches.waits


def test_padding_writes_to_the_trash_page_only(model: torch.nn.Module, model_dir: Path) -> None:
    side = Side(model, model_dir, 5)
    side.record()
    before = side.runner.pool.data.clone()
    side.step([0, 1, 2, 3, 4])  # in the bucket of 8
    changed = (side.runner.pool.data != before).flatten(1).any(dim=1).nonzero()[:, 0].tolist()
    written = {one.pages[(len(one.tokens) - 2) // BLOCK] for one in side.sequences}
    assert set(changed) - {TRASH_PAGE} == written


def test_what_a_graph_leaves_is_always_in_the_same_place(model: torch.nn.Module, model_dir: Path) -> None:
    side = Side(model, model_dir, 5)
    side.record()
    places = {side.runner.run([decode_of(one) for one in side.sequences[:n]]).data_ptr() for n in range(1, 6)}
    assert len(places) == 1


@pytest.mark.parametrize("why", ["scored", "too many rows", "too many chunks", "no chunks recorded"])
def test_other_steps_are_computed_eagerly(model: torch.nn.Module, model_dir: Path, why: str) -> None:
    side = Side(model, model_dir, ROWS + 1)
    side.runner.record_steps(side.capture, DECODES if why == "no chunks recorded" else LIMITS)
    sequences = side.sequences[:3]
    chunks = [decode_of(one) for one in sequences]
    if why == "scored":
        sequences[0].score_from, sequences[0].prompt_tokens = chunks[0].start, chunks[0].start + 2
    elif why == "too many rows":
        chunks = [Chunk(one, 0, len(one.tokens)) for one in side.sequences]
    elif why == "too many chunks":
        chunks = [Chunk(one, len(one.tokens) - 2, 2) for one in side.sequences]
    else:
        chunks[0] = Chunk(sequences[0], chunks[0].start - 1, 2)
    logits = side.runner.run(chunks)
    assert len(logits) == sum(chunk.samples for chunk in chunks)
    assert not side.runner.is_recorded
    assert side.capture.replays == 0


def mixes(side: Side, rng: random.Random) -> list[tuple[int, int, int]]:
    """Sequence, start and count of each chunk of a random step: decodes, chunks, in any order."""
    some = []
    for number in rng.sample(range(len(side.sequences)), rng.randint(1, len(side.sequences))):
        length = len(side.sequences[number].tokens)
        count = 1 if rng.random() < 0.5 else rng.randint(1, length)
        start = length - count if rng.random() < 0.7 else rng.randint(0, length - count)
        some.append((number, start, count))
    return some


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a product's row have the same bits beside any others, which a GEMM library does not promise."""
    rows_by_themselves(monkeypatch)


def rows_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = F.linear

    def of_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = [linear(row, weight, bias) for row in x.reshape(-1, 1, x.shape[-1])]
        return torch.cat(rows).reshape(*x.shape[:-1], -1) if rows else linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", of_rows)


@pytest.mark.usefixtures("row_by_row")
def test_steps_with_chunks_give_what_eager_gives_to_the_bit(model: torch.nn.Module, model_dir: Path) -> None:
    """Random mixes of chunks and decodes in all buckets, old pages and the trash page full of NaN."""
    eager, graphed = Side(model, model_dir, 9), Side(model, model_dir, 9)
    graphed.record()
    for side in (eager, graphed):
        held = {page for one in side.sequences for page in one.pages[: -(-len(one.tokens) // BLOCK)]}
        for page in set(range(side.runner.pool.pages)) - held:
            side.runner.pool.data[page] = torch.nan
    rng, by_graph, rows_seen = random.Random(5), 0, set[int]()
    for _ in range(60):
        step = mixes(eager, rng)
        expected, given = (
            side.runner.run([Chunk(side.sequences[number], start, count) for number, start, count in step])
            for side in (eager, graphed)
        )
        assert torch.equal(given, expected)
        if graphed.runner.is_recorded:
            by_graph += 1
            rows_seen.add(sum(count for *_, count in step))
            best = expected.argmax(dim=-1).tolist()
            assert graphed.runner.greedy.tolist() == [best, [0] * len(best)]
    assert graphed.capture.replays == by_graph
    assert by_graph > 40
    assert {sum(rows > bucket for bucket in (16, 32, 64)) for rows in rows_seen} == {0, 1, 2, 3}
    ours, theirs = graphed.runner.pool.data, eager.runner.pool.data
    kept = [page for page in range(ours.shape[0]) if page != TRASH_PAGE]
    torch.testing.assert_close(ours[kept], theirs[kept], atol=0, rtol=0, equal_nan=True)


class SimulatedQueue:
    """A device that is busy: what is queued happens in order, but some time later."""

    def __init__(self, seed: int) -> None:
        self._device = SimulatedDevice(np.zeros((1, 16), dtype=np.uint8), random.Random(seed))
        self.is_recording = True

    def host(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def device(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        half = len(source) // 2
        self.submit(lambda: target[:half].copy_(source[:half]), lambda: target[half:].copy_(source[half:]))
        return self._device.mark().wait

    def submit(self, *parts: Callable[[], object]) -> None:
        self._device.computing.submit(*parts)  # type: ignore[arg-type]
        if self.is_recording:
            self.finish()
        else:
            self._device.happen()

    def finish(self) -> None:
        while self._device.run_one():
            pass

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()
        return lambda: self.submit(launch)


@torch.inference_mode()
def queued_steps(model: torch.nn.Module, model_dir: Path, seed: int) -> bool:
    """Whether steps that are launched while the ones before still wait give what eager gives."""
    eager, side, queue = Side(model, model_dir, 9), Side(model, model_dir, 9), SimulatedQueue(seed)
    side.use_queue(queue)
    side.runner.record_steps(queue, LIMITS)
    queue.is_recording = False
    rng, truths, found = random.Random(seed), list[torch.Tensor](), list[torch.Tensor]()
    while len(truths) < 25:
        step = mixes(eager, rng)
        if sum(count for *_, count in step) > 64 or sum(count > 1 for *_, count in step) > 4:
            continue
        truths.append(
            eager.runner.run([Chunk(eager.sequences[one], start, count) for one, start, count in step])
        )
        logits = side.runner.run([Chunk(side.sequences[one], start, count) for one, start, count in step])
        assert side.runner.is_recorded
        queue.submit(lambda logits=logits: found.append(logits.clone()))  # as the sampling that is behind it
    queue.finish()
    return all(torch.equal(*pair) for pair in zip(found, truths, strict=True))


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("seed", range(4))
def test_steps_launched_on_a_busy_device_give_what_eager_gives(
    model: torch.nn.Module, model_dir: Path, seed: int
) -> None:
    assert queued_steps(model, model_dir, seed)


@pytest.mark.usefixtures("row_by_row")
def test_planted_a_step_written_over_a_queued_one_is_found(
    model: torch.nn.Module, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hasty(SimulatedQueue):
        def copy(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
            super().copy(source, target)
            return lambda: None

    monkeypatch.setitem(globals(), "SimulatedQueue", Hasty)
    with suppress(RuntimeError, IndexError):  # half of one step and half of another makes no sense
        assert not all(queued_steps(model, model_dir, seed) for seed in range(4))


@pytest.mark.parametrize("fault", ["_write_spans", "_write_samples", "_write_rows", "another tile"])
def test_planted_words_of_another_step_are_found(
    model: torch.nn.Module, model_dir: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    side, eager = Side(model, model_dir, 3), Side(model, model_dir, 3)
    side.record()
    first = [(0, 0, 2), (1, 3, 4), (2, 4, 6)]
    side.runner.run([Chunk(side.sequences[number], start, count) for number, start, count in first])
    if fault == "another tile":
        pack = StepPacker.pack

        def other_row(self: StepPacker, chunks: Any, shape: Any = None) -> StepInputs:
            inputs = pack(self, chunks, shape)
            assert inputs.others is not None
            inputs.others.tiles[0, 1] += 1
            return inputs

        monkeypatch.setattr(StepPacker, "pack", other_row)
    else:
        monkeypatch.setattr(inputs_module, fault, lambda *_: None)
    step = [(2, 3, 5), (1, 0, 4), (0, 2, 3), (2, 22, 1)]
    try:
        found = side.runner.run(
            [Chunk(side.sequences[number], start, count) for number, start, count in step]
        )
    except RuntimeError:
        return  # what another step has left there makes no sense
    monkeypatch.undo()
    truth = eager.runner.run([Chunk(eager.sequences[number], start, count) for number, start, count in step])
    assert found.shape != truth.shape or not torch.allclose(found, truth, atol=1e-4)


def test_a_row_with_nan_is_found_beside_others(model: torch.nn.Module, model_dir: Path) -> None:
    side = Side(model, model_dir, 3)
    side.record()
    side.runner.pool.data[side.sequences[1].pages[0]] = torch.nan
    side.step([0, 1, 2])
    assert side.runner.is_recorded
    assert side.runner.greedy[1].tolist() == [0, 1, 0]


def test_planted_a_buffer_that_moved_is_found(model: torch.nn.Module, model_dir: Path) -> None:
    side, eager = Side(model, model_dir, 3), Side(model, model_dir, 3)
    side.record()
    first, _ = side.step([0, 1, 2]), eager.step([0, 1, 2])
    packer = side.runner._packer
    packer.reserve(packer.words_max)
    with pytest.raises(AssertionError, match="moved"):
        side.step([0, 1, 2])
    graphs = side.runner._graphs
    assert graphs is not None
    graphs._address = packer.pack([]).words.data_ptr()  # as if it were not looked at
    again = side.step([0, 1, 2])
    assert not torch.allclose(again, eager.step([0, 1, 2]), atol=1e-2)
    torch.testing.assert_close(again, first)  # of the step that lies in the old buffer


def test_planted_a_length_that_stays_is_found(
    model: torch.nn.Module, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, eager = Side(model, model_dir, 3), Side(model, model_dir, 3)
    side.record()
    side.step([0, 1, 2])
    eager.step([0, 1, 2])
    monkeypatch.setattr(inputs_module, "_write_spans", lambda *_: None)
    stale = side.step([0, 1, 2])
    monkeypatch.undo()
    assert not torch.allclose(stale, eager.step([0, 1, 2]), atol=1e-4)


def test_a_backend_that_looks_at_the_host_is_found(model: torch.nn.Module, model_dir: Path) -> None:
    """GatherSdpa plans by the segments of the step that is at hand: recorded, it would know none."""
    built = small_engine(model_dir)
    assert built.engine.runner.backend.tiling is None
    with pytest.raises(ValueError, match="tiles"):
        built.engine.runner.record_steps(Recorder(), LIMITS)


class Free:
    """A device whose memory gets less each time that somebody looks."""

    def __init__(self) -> None:
        self.mib = 9000

    def __call__(self, _: object) -> int:
        self.mib -= 300
        return self.mib << 20


def runner_on(device: str, *, tiled: bool = True, error: Exception | None = None) -> Mock:
    backend = Mock(tiling=Tiling(4) if tiled else None)
    backend.name = "sdpa"
    runner = Mock(device=torch.device(device), backend=backend, exact=False)
    graphs = Mock(sentence="7 of decodes to 32 rows", most_decodes=32)
    runner.record_steps.side_effect = error or (lambda *_: graphs)
    return runner


@pytest.mark.parametrize(
    ("runner", "settings", "experts", "told"),
    [
        (runner_on("cpu"), {}, "", ""),
        (runner_on("cuda"), {"graph_rows_max": 0}, "", "none: switched off"),
        (runner_on("cuda", tiled=False), {}, "", "none: sdpa looks"),
        (runner_on("cuda"), {}, EXPERTS_NAME, "none: the host looks which experts there are: by rows"),
        (runner_on("cuda"), {}, GROUPED_NAME, "7 of decodes to 32 rows; 0.0 s, 300 MiB"),
        (runner_on("cuda"), {"tensor_parallel": 2, "kv_groups": 2}, "", "300 MiB on each of 2 GPUs"),
        (runner_on("cuda", error=RuntimeError("no memory")), {}, "", "none: RuntimeError: no memory"),
        (runner_on("cuda"), {}, "", "7 of decodes to 32 rows; 0.0 s, 300 MiB"),
        (runner_on("cuda"), {"sequences_max": 33}, "", "MiB; more than 32 decodes eagerly, of 33"),
    ],
)
def test_what_cannot_be_recorded_is_served_without_and_told(
    runner: Mock, settings: dict[str, Any], experts: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "open_capture", lambda device: Recorder() if device.type == "cuda" else None)
    monkeypatch.setattr(build, "hold_step_memory", Mock())
    monkeypatch.setattr(build, "free_memory_bytes", Free())
    monkeypatch.setattr(build, "groups_experts", lambda model: experts == GROUPED_NAME)
    monkeypatch.setattr(build, "why_by_rows", lambda device, dtype: "by rows")
    begun = list[str]()
    said = build.record_steps(
        EngineSettings(**{"sequences_max": 32, **settings}),
        runner,
        Mock(has_experts=experts != ""),
        Mock(context_tokens_max=99),
        begun.append,
    )
    assert told in said
    assert bool(said) == bool(told)
    assert (begun == ["graphs"]) == runner.record_steps.called == ("MiB" in said or "no memory" in said)
    assert runner.forget_graphs.called == ("no memory" in said)


@pytest.mark.parametrize("fits", [True, False])
def test_the_memory_of_the_largest_steps_is_held_again_after_recording(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch empties its cache before it records."""
    done = list[str]()

    def hold(*_: object) -> None:
        done.append("hold")
        if not fits:
            raise ModelRefused("it does not fit beside the graphs", "lower something")

    monkeypatch.setattr(build, "open_capture", lambda device: Recorder() if device.type == "cuda" else None)
    monkeypatch.setattr(build, "hold_step_memory", hold)
    monkeypatch.setattr(build, "free_memory_bytes", Free())
    runner = runner_on("cuda")
    record = runner.record_steps.side_effect
    runner.record_steps.side_effect = lambda *_: (done.append("record"), record())[1]
    runner.forget_graphs.side_effect = lambda: done.append("forget")
    said = build.record_steps(EngineSettings(), runner, Mock(has_experts=False), Mock(context_tokens_max=99))
    assert done == ["record", "hold", *([] if fits else ["forget"])]
    assert said.startswith("7 of decodes") == fits


def test_what_is_recorded_is_told(model: torch.nn.Module, model_dir: Path) -> None:
    side = Side(model, model_dir, 1)
    graphs = side.runner.record_steps(side.capture, LIMITS)
    assert graphs.sentence == "5 of decodes to 12 rows, 4 of chunks to 128 tokens"
    assert graphs.most_decodes == ROWS + 1
    few = side.runner.record_steps(side.capture, DECODES)
    assert (few.sentence, few.most_decodes) == ("5 of decodes to 12 rows", ROWS)


def test_forgotten_graphs_are_replayed_no_more(model: torch.nn.Module, model_dir: Path) -> None:
    side, eager = Side(model, model_dir, 2), Side(model, model_dir, 2)
    side.record()
    side.runner.forget_graphs()
    assert torch.allclose(side.step([0, 1]), eager.step([0, 1]), atol=1e-4)
    assert side.capture.replays == 0


def with_graphs(built: BuiltEngine, tokens: int) -> Recorder:
    """Give a built engine a backend that can be recorded, and record it."""
    engine, capture = built.engine, Recorder()
    old = engine.runner
    engine.runner = Runner(old.model, old.pool, TensorPaged(), exact=False)
    engine.runner.record_steps(capture, GraphLimits(4, tokens, 8, CONTEXT))
    return capture


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("tokens", [0, 512])
def test_an_engine_answers_the_same_with_graphs(model_dir: Path, tokens: int) -> None:
    """Prompts and decodes in one step, choices, draws at random, more sequences than the largest bucket."""
    answers, stored = [], []
    for graphed in (False, True):
        built = small_engine(model_dir, exact=False, step="transformers")
        capture = with_graphs(built, tokens)
        if not graphed:
            built.engine.runner.forget_graphs()
        built.engine.runner.computes_behind = False  # what ends is behind then, in slots that nobody reads
        driver = Driver(built.engine)
        keys = [
            driver.submit(prompt_of(20, seed=1), max_tokens=24),
            driver.submit(prompt_of(50, seed=2), n=3, temperature=1.0, seed=5, max_tokens=20, logprobs=2),
        ]
        driver.step()
        driver.step()
        keys.append(driver.submit(prompt_of(33, seed=3), top_p=0.7, temperature=0.8, seed=6, max_tokens=30))
        driver.drain()
        answers.append([driver.answers[key].token_ids for key in keys])
        stored.append(built.engine.runner.pool.data[1:].clone())
        steps = built.engine.stats().steps
        assert capture.replays > 10 if graphed else capture.replays == 0
        assert capture.replays == steps or not (graphed and tokens)
    assert answers[0] == answers[1]
    assert torch.equal(stored[1], stored[0])


@pytest.mark.parametrize("tokens", [0, 512])
def test_recorded_steps_tell_what_they_take(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Prices learn of all steps where chunks are recorded, too; the pace always does."""
    built = small_engine(model_dir, exact=False, step="transformers")
    capture, engine = with_graphs(built, tokens), built.engine
    told, ran = list[tuple[int, bool]](), StepTimes.ran

    def noted(self: StepTimes, chunks: Any, seconds: Any, *, prices: bool) -> None:
        told.append((sum(chunk.rows for chunk in chunks), prices))
        ran(self, chunks, seconds, prices=prices)

    monkeypatch.setattr(StepTimes, "ran", noted)
    driver = Driver(engine)
    driver.submit(prompt_of(20, seed=1), max_tokens=8)
    driver.drain()
    assert [rows for rows, _ in told] == [20, *[1] * 7]
    assert [prices for _, prices in told] == [True, *[tokens > 0] * 7]
    assert capture.replays == (8 if tokens else 7)


@pytest.mark.parametrize("exact", [False, True])
def test_the_tables_of_every_step_are_its_sequences_own(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """Whatever changes in them: pages are appended, shared, copied on write, given back, lost, come again."""
    built = small_engine(model_dir, exact=exact, pool_tokens=16 * 14)
    packed, pack, engine = 0, StepPacker.pack, built.engine

    def looked_at(self: StepPacker, chunks: Any, shape: Any = None) -> StepInputs:
        nonlocal packed
        inputs = pack(self, chunks, shape)
        for segment, chunk in zip(inputs.segments, chunks, strict=True):
            pages = chunk.sequence.pages
            assert pages.typecode == "i", "a list is copied word by word"
            assert inputs.table(segment).tolist() == pages[: segment.blocks].tolist()
            assert segment.blocks == -(-segment.context // BLOCK)
            packed += 1
        return inputs

    monkeypatch.setattr(StepPacker, "pack", looked_at)
    driver, rng = Driver(engine), random.Random(9)

    def drafts(sequences: list[Sequence]) -> list[tuple[int, ...]]:
        counts = [min(rng.randrange(20), one.tokens_left - 1) for one in sequences]
        return [tuple(rng.randrange(3, 512) for _ in range(count)) for count in counts]

    engine.scheduler.drafter = Mock(drafts=drafts) if built.info.exact else None
    for seed in range(12):
        prompt = prompt_of(rng.randint(1, 60), seed=seed % 4)
        n, temperature = rng.randint(1, 3), rng.choice((0.0, 1.0))
        driver.submit(prompt, n=n, temperature=temperature, seed=seed, max_tokens=rng.randint(1, 40))
        for _ in range(rng.randint(0, 6)):
            driver.step()
    driver.drain()
    stats = engine.stats()
    assert packed > 100
    assert stats.preemptions > 0
    assert stats.cow_copies > 0
    assert not built.info.exact or stats.drafted_tokens > 100
