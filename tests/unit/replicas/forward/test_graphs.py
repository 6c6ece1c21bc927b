"""Decode graphs without a GPU: a graph is a recorded call that looks for its numbers where they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from samovar.configs.settings import EngineSettings
from samovar.replicas.engine.audit import bare_sequence
from samovar.replicas.forward import inputs as inputs_module
from samovar.replicas.forward import loading
from samovar.replicas.forward.attention import AttentionForm
from samovar.replicas.forward.graphs import buckets_of
from samovar.replicas.forward.inputs import StepInputs
from samovar.replicas.forward.loading import load_model
from samovar.replicas.forward.runner import EXPERTS_NAME, GROUPED_NAME, Runner
from samovar.replicas.kv import TRASH_PAGE, KvGeometry, KvPool, LayerKv
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model.spec import inspect_model
from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import Chunk
from samovar.replicas.start import build
from samovar.replicas.start.build import BuiltEngine
from tests.support.engines.engines import Driver, prompt_of, small_engine
from tests.support.engines.launches import Launches
from tests.support.engines.tiny_models import Family, make_tiny_model

CPU = torch.device("cpu")
BLOCK, CONTEXT, ROWS = 16, 128, 12


class TensorPaged:
    """Attends as a kernel does: all that it knows of a step it reads from the step's tensors when it runs."""

    name = "tensors"
    tile_rows = 4

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
        for segment, first in meta.tiles.tolist():
            row, count, context, table = meta.spans[segment].tolist()
            end = min(first + self.tile_rows, count)
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

    def record(self) -> None:
        self.runner.record_decodes(self.capture, rows_max=ROWS, context_tokens_max=CONTEXT)

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
        assert graphed.runner.greedy is not None
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


@pytest.mark.parametrize(
    "why", ["a chunk", "not the last token", "scored", "too many"], ids=lambda why: why.replace(" ", "-")
)
def test_other_steps_are_computed_eagerly(model: torch.nn.Module, model_dir: Path, why: str) -> None:
    side = Side(model, model_dir, ROWS + 1)
    side.record()
    sequences = side.sequences[:3]
    chunks = [decode_of(one) for one in sequences]
    if why == "a chunk":
        chunks[0] = Chunk(sequences[0], chunks[0].start - 1, 2)
    elif why == "not the last token":
        chunks[0] = Chunk(sequences[0], chunks[0].start - 1, 1)
    elif why == "scored":
        sequences[0].score_from, sequences[0].prompt_tokens = chunks[0].start, chunks[0].start + 2
    else:
        chunks = [decode_of(one) for one in side.sequences]
    logits = side.runner.run(chunks)
    assert len(logits) == sum(chunk.samples for chunk in chunks)
    assert side.runner.greedy is None
    assert side.capture.replays == 0


def test_a_row_with_nan_is_found_beside_others(model: torch.nn.Module, model_dir: Path) -> None:
    side = Side(model, model_dir, 3)
    side.record()
    side.runner.pool.data[side.sequences[1].pages[0]] = torch.nan
    side.step([0, 1, 2])
    assert side.runner.greedy is not None
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
    assert built.engine.runner.backend.tile_rows == 0
    with pytest.raises(ValueError, match="tiles"):
        built.engine.runner.record_decodes(Recorder(), rows_max=2, context_tokens_max=CONTEXT)


@pytest.mark.parametrize(
    ("device", "rows_max", "tile_rows", "experts", "error", "told"),
    [
        ("cpu", 64, 4, "", None, ""),
        ("cuda", 0, 4, "", None, ""),
        ("cuda", 64, 0, "", None, "; decodes without graphs"),
        (
            "cuda",
            64,
            4,
            EXPERTS_NAME,
            None,
            "; decodes without graphs, as the host looks which experts there are: none",
        ),
        ("cuda", 64, 4, GROUPED_NAME, None, "; decodes of up to 32 as graphs"),
        ("cuda", 64, 4, "", RuntimeError("no memory"), "; decodes without graphs"),
        ("cuda", 64, 4, "", None, "; decodes of up to 32 as graphs"),
        ("cuda", 16, 4, "", None, "; decodes of up to 16 as graphs"),
    ],
)
def test_what_cannot_be_recorded_is_served_without_and_told(
    device: str,
    rows_max: int,
    tile_rows: int,
    experts: str,
    error: Exception | None,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "CudaCapture", lambda device: Recorder())
    monkeypatch.setattr(build, "hold_step_memory", Mock())
    runner = Mock(device=torch.device(device), backend=Mock(tile_rows=tile_rows), exact=False)
    monkeypatch.setattr(build, "groups_experts", lambda model: experts == GROUPED_NAME)
    monkeypatch.setattr(build, "why_by_rows", lambda device, dtype: "none")
    runner.record_decodes.side_effect = error
    settings = EngineSettings(graph_rows_max=rows_max, sequences_max=32)
    said = build.record_decodes(
        settings, runner, Mock(has_experts=experts != ""), Mock(context_tokens_max=99)
    )
    assert said == told
    assert runner.record_decodes.called == (error is not None or "as graphs" in told)


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

    monkeypatch.setattr(build, "CudaCapture", lambda device: Recorder())
    monkeypatch.setattr(build, "hold_step_memory", hold)
    runner = Mock(device=torch.device("cuda"), backend=Mock(tile_rows=4), exact=False)
    runner.record_decodes.side_effect = lambda *_, **__: done.append("record")
    runner.forget_decodes.side_effect = lambda: done.append("forget")
    said = build.record_decodes(
        EngineSettings(), runner, Mock(has_experts=False), Mock(context_tokens_max=99)
    )
    assert done == ["record", "hold", *([] if fits else ["forget"])]
    assert ("as graphs" in said) == fits


def test_forgotten_graphs_are_replayed_no_more(model: torch.nn.Module, model_dir: Path) -> None:
    side, eager = Side(model, model_dir, 2), Side(model, model_dir, 2)
    side.record()
    side.runner.forget_decodes()
    assert torch.allclose(side.step([0, 1]), eager.step([0, 1]), atol=1e-4)
    assert side.capture.replays == 0


def with_graphs(built: BuiltEngine) -> Recorder:
    """Give a built engine a backend that can be recorded, and record it."""
    engine, capture = built.engine, Recorder()
    old = engine.runner
    engine.runner = Runner(old.model, old.pool, TensorPaged(), exact=False)
    engine.runner.record_decodes(capture, rows_max=4, context_tokens_max=CONTEXT)
    return capture


def test_an_engine_answers_the_same_with_graphs(model_dir: Path) -> None:
    """Prompts and decodes in one step, choices, draws at random, more sequences than the largest bucket."""
    answers = []
    for graphed in (False, True):
        built = small_engine(model_dir, exact=False, step="transformers")
        capture = with_graphs(built) if graphed else None
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
        assert capture is None or capture.replays > 10
    assert answers[0] == answers[1]
