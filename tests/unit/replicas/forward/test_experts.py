"""Experts by grouped products, as GPUs compute them: what one after the other gives, and no number is read.

torch's grouped product on a CPU is a loop of plain products; what is launched besides is what a GPU gets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from samovar.replicas.engine import Probe
from samovar.replicas.forward import loading, runner
from samovar.replicas.forward.attention import ATTENTION_NAME, PagedStep
from samovar.replicas.forward.runner import EXPERTS_NAME, GROUPED_NAME, groups_experts, quicken, why_by_rows
from samovar.replicas.kv import KvGeometry
from samovar.replicas.model.spec import FAMILIES
from tests.support.engines.engines import prompt_of
from tests.support.engines.forward_bench import Bench
from tests.support.engines.launches import Launches
from tests.support.engines.tiny_models import Family, make_tiny_model, tiny_config

CPU = torch.device("cpu")
MIXTURES: tuple[Family, ...] = tuple(one for one in get_args(Family) if FAMILIES[one].has_experts)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the greatest number that experts give: sums in another order, or rounded once less."""
KERNELS_MAX = 40


def mixture(family: Family, name: str, *, layers: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    """A model of random weights that are as large as trained ones: all experts are chosen."""
    loading.register_attention()
    loading.register_experts()
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        tiny_config(family, layers=layers, dtype=dtype),
        attn_implementation=ATTENTION_NAME,
        experts_implementation=name,
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model = model.to(dtype).eval().requires_grad_(False)
    return model if name == EXPERTS_NAME else quicken(model)


def experts_of(family: Family, dtype: torch.dtype) -> tuple[Any, Any]:
    """The same experts, one after the other and in groups."""
    looped, grouped = (mixture(family, name, dtype=dtype) for name in (EXPERTS_NAME, GROUPED_NAME))
    grouped.load_state_dict(looped.state_dict())
    return looped.model.layers[0].mlp.experts, grouped.model.layers[0].mlp.experts


def step_of(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, the two different experts of each, and their weights."""
    generator = torch.Generator().manual_seed(rows)
    scores = torch.randn((rows, 4), generator=generator)
    best = scores.softmax(dim=-1).topk(2, dim=-1)
    rows_of = torch.randn((rows, 64), generator=generator)
    return rows_of.to(dtype), best.indices, best.values.to(dtype)


def assert_near(found: torch.Tensor, truth: torch.Tensor) -> None:
    assert found.dtype == truth.dtype
    assert (found - truth).abs().max() <= TOLERANCES[truth.dtype] * truth.abs().max()


def test_the_mixtures_that_are_served_are_these() -> None:
    assert set(MIXTURES) == {name for name, family in FAMILIES.items() if family.has_experts}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("family", MIXTURES)
def test_groups_give_what_one_after_the_other_gives(family: Family, dtype: torch.dtype) -> None:
    looped, grouped = experts_of(family, dtype)
    for rows in (1, 2, 8, 64, 301):
        given = step_of(rows, dtype)
        assert_near(grouped(*given), looped(*given))
    hidden, choices, weights = step_of(40, dtype)
    for only in (0, 3):  # the others get nothing
        given = hidden, torch.full_like(choices, only), weights
        assert_near(grouped(*given), looped(*given))


@pytest.mark.parametrize("family", MIXTURES)
def test_a_token_gives_the_same_beside_any_others(family: Family) -> None:
    """And rows that hold no numbers, as padding may, spoil none."""
    _, grouped = experts_of(family, torch.float32)
    hidden, choices, weights = step_of(50, torch.float32)
    together = grouped(hidden, choices, weights)
    for rows in (slice(0, 1), slice(7, 8), slice(20, 33)):
        assert_near(grouped(hidden[rows], choices[rows], weights[rows]), together[rows])
    padded = hidden.clone()
    padded[30:] = torch.nan
    weights[30:] = torch.nan
    assert torch.equal(grouped(padded, choices, weights)[:30], together[:30])


@pytest.mark.parametrize("family", MIXTURES)
def test_a_long_prompt_is_computed_in_pieces(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    _, grouped = experts_of(family, torch.float32)
    given = step_of(500, torch.float32)
    whole = grouped(*given)
    most = 64 << 10
    monkeypatch.setattr(runner, "PIECE_BYTES", most)
    with Launches() as launches:
        pieces = grouped(*given)
    assert_near(pieces, whole)
    assert launches.names["_grouped_mm"] > 10
    assert launches.bytes_max <= max(most, whole.nbytes)


class Nothing:
    """A backend and a pool that launch as much as the kernels do: one to write, one to attend."""

    name, tiling = "nothing", None

    def write(self, kv: None, key: torch.Tensor, value: torch.Tensor, meta: None) -> None:
        key.clone()

    def attend(self, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros(query.shape, dtype=query.dtype)

    def layer(self, number: int) -> None:
        return None


def launches_of(family: Family, name: str, layers: int, rows: int) -> Launches:
    model, nothing, numbers = (
        mixture(family, name, layers=layers, dtype=torch.bfloat16),
        Nothing(),
        range(rows),
    )
    ids = torch.tensor([list(numbers)])
    step = PagedStep(nothing, None, nothing)  # type: ignore[arg-type]
    with torch.inference_mode(), Launches() as launches:
        model.base_model(input_ids=ids, position_ids=ids, use_cache=False, step=step)
    return launches


@pytest.mark.parametrize("family", MIXTURES)
def test_a_layer_is_few_kernels_and_no_wait_at_any_number_of_rows(family: Family) -> None:
    """Half of what four layers are more than two: with a window or without."""
    for rows in (1, 8, 64):
        few, more = (launches_of(family, GROUPED_NAME, layers, rows) for layers in (2, 4))
        assert not more.waits
        assert (more.kernels - few.kernels) / 2 <= KERNELS_MAX - 2, "attention is up to two more"
    assert launches_of(family, EXPERTS_NAME, 2, 8).waits, "planted: one after the other is a wait"


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {family: make_tiny_model(folder / family, family) for family in MIXTURES}


@pytest.mark.parametrize("family", MIXTURES)
def test_a_whole_model_chooses_and_answers_as_one_after_the_other(
    members: dict[str, Path], family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: dict[str, list[torch.Tensor]] = {}
    logits: dict[str, torch.Tensor] = {}
    for name, why in ((EXPERTS_NAME, "planted"), (GROUPED_NAME, None)):
        monkeypatch.setattr(loading, "why_by_rows", lambda device, dtype, why=why: why)
        bench = Bench(members[family], torch.float32, 16, exact=False)
        assert bench.model is not None
        assert groups_experts(bench.model) == (name == GROUPED_NAME)
        of_name = chosen.setdefault(name, [])
        for layer in bench.model.model.layers:  # type: ignore[union-attr]
            layer.mlp.experts.register_forward_pre_hook(  # type: ignore[union-attr]
                lambda _, given, of_name=of_name: of_name.append(given[1])
            )
        logits[name], _ = bench.compute(prompt_of(90, seed=3), [40, 1, 30, 19], [prompt_of(20, seed=4)])
    torch.testing.assert_close(logits[GROUPED_NAME], logits[EXPERTS_NAME], atol=1e-4, rtol=0)
    assert all(map(torch.equal, chosen[EXPERTS_NAME], chosen[GROUPED_NAME]))


def test_where_there_is_no_grouped_product_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda, capability = torch.device("cuda"), (9, 0)
    assert why_by_rows(cuda, torch.bfloat16) is None
    assert "float16" in str(why_by_rows(cuda, torch.float16))
    assert "on cpu" in str(why_by_rows(CPU, torch.bfloat16))
    for capability in ((8, 0), (8, 9), (12, 0)):
        assert f"{capability[0]}.{capability[1]}" in str(why_by_rows(cuda, torch.bfloat16))


def test_grouped_experts_are_never_taken_for_exact() -> None:
    """A few tries may agree by luck."""
    geometry = KvGeometry(2, 16, 2, 16, torch.float32)
    verdict = Probe(mixture("mixtral", GROUPED_NAME), geometry, 512, CPU).run(64)
    assert not verdict.exact
    assert "grouped products" in verdict.sentence
