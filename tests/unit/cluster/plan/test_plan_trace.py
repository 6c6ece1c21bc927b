"""`samovar plan --trace F`: the runs, the knee, the report, the picture."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from bench._trace_generator import GeneratorOptions, generate
from samovar.cluster.plan import plan as planning
from samovar.cluster.plan.plan import Plan, PlanAsk, check, fleet_of, make_plan, run_plan
from samovar.cluster.plan.runs import (
    PlanRefused,
    Result,
    Traffic,
    enough_replicas,
    knee,
    policy_of,
    run_all,
    sweep_fleets,
    sweep_of,
)
from samovar.cluster.plan.simulator.fleet import Fleet, Prices
from samovar.cluster.plan.traces.replay import next_starts_s
from samovar.configs.loader import load
from samovar.configs.sections import GIB

CHAT = Path(__file__).resolve().parents[5] / "shared/traces/mooncake_conversation_first40min.jsonl.gz"
TOKENS = 512


def trace_file(path: Path, turns: int = 120, seed: int = 3) -> Path:
    """A generated trace in Mooncake's schema: coding sessions, which find most of their prompts."""
    options = GeneratorOptions("agentic", turns, seed, sessions_per_s=0.05)
    rows = [
        {
            "timestamp": round(1000 * turn.started_s),
            "input_length": turn.input_tokens,
            "output_length": turn.output_tokens,
            "hash_ids": [*turn.blocks, 10**9 + number][: -(-turn.input_tokens // TOKENS)],
        }
        for number, turn in enumerate(generate(options).turns())
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ask_of(tmp_path: Path, **more: object) -> PlanAsk:
    small = PlanAsk(
        trace_file(tmp_path / "trace.jsonl"),
        gpu_gib=4,
        cpu_gib=8,
        nvme_gib=32,
        points=3,
        jobs=1,
        prefetch=False,
    )
    return replace(small, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def small_plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_plan(ask_of(tmp_path_factory.mktemp("plan"), policies=("lru", "learned", "oracle")))


def test_a_fleet_pays_for_its_gpus_not_its_replicas(tmp_path: Path) -> None:
    one, two = (fleet_of(ask_of(tmp_path, replicas=3, tensor_parallel=gpus)) for gpus in (1, 2))
    prices = Prices(cpu_gib_month=0, nvme_gib_month=0)
    assert (one.usd_per_h(prices), two.usd_per_h(prices)) == (3 * 2.5, 3 * 2 * 2.5)
    assert (two.nodes, replace(two, replicas=5).nodes) == (1, 2)  # 8 GPUs a node
    assert two.prefill.a_s == one.prefill.a_s / 2
    with pytest.raises(PlanRefused, match="--tensor-parallel 3: give 1, 2, 4, 8"):
        check(ask_of(tmp_path, tensor_parallel=3))


def test_a_knee_is_where_doubling_begins_to_bring_less() -> None:
    assert knee([0, 1, 2, 3, 4], [0.0, 0.2, 0.4, 0.41, 0.42]) == 2
    assert knee([0, 1, 2, 3, 4], [0.0, 0.01, 0.02, 0.4, 0.41]) == 3  # an S: its upper bend, not its lower one


def test_a_curve_that_rises_to_its_end_has_its_knee_there() -> None:
    assert knee([0, 1, 2, 3], [0.0, 0.1, 0.3, 0.9]) == 3
    assert knee([0, 1, 2], [0.0, 0.2, 0.4]) == 2


def test_a_flat_curve_has_no_knee() -> None:
    assert knee([0, 1, 2], [0.3, 0.305, 0.304]) is None
    assert knee([5], [0.3]) is None


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_a_knee_is_never_beneath_the_line_between_the_ends(hits: list[float]) -> None:
    hits = sorted(hits)
    sizes = [float(at) for at in range(len(hits))]
    found = knee(sizes, hits)
    if found is None:
        assert hits[-1] - hits[0] < 0.01
    else:
        line = hits[0] + (hits[-1] - hits[0]) * sizes[found] / sizes[-1]
        assert hits[found] >= line - 1e-9
        assert found > 0


def test_the_plan_of_a_small_trace(small_plan: Plan) -> None:
    traffic, sweep = small_plan.traffic, small_plan.sweep
    assert [result.policy for result in small_plan.results] == ["lru", "learned", "oracle"]
    for result in small_plan.results:
        assert 0 < result.hit_rate <= traffic.most_found() + 1e-9
        assert result.turns == sum(turn.started_s >= traffic.count_from_s for turn in traffic.turns)
        assert 0 < result.ttft_s[0] <= result.ttft_s[1] <= result.ttft_s[2]
        assert 0 < planning.busy_share(result, traffic) < 1
    assert sweep is not None
    assert [size // GIB for size in sweep.sizes] == sorted({size // GIB for size in sweep.sizes})
    assert all(large == 2 * small for small, large in zip(sweep.sizes, sweep.sizes[1:], strict=False))
    assert sweep.most == traffic.most_found()
    assert all(len(of) == len(sweep.sizes) == 3 for of in sweep.results.values())


def test_more_of_a_tier_finds_more_and_everything_in_the_end(small_plan: Plan) -> None:
    """Once all blocks fit, all policies find what any cache could, but for answers that overlap."""
    traffic = small_plan.traffic
    huge = replace(small_plan.fleet, replicas=1, gpu_bytes=1 << 50, cpu_bytes=0, nvme_bytes=0)
    small = replace(huge, gpu_bytes=2 * GIB)
    runs = [(fleet, name) for fleet in (small, huge) for name in ("lru", "learned")]
    found = [one.hit_rate for one in run_all(traffic, runs, 1, lambda: None)]
    assert found[2] == found[3] == pytest.approx(traffic.most_found(), abs=1e-9)
    assert max(found[:2]) < found[2]


def test_a_sweep_has_nothing_beneath_its_tier(small_plan: Plan) -> None:
    fleet = replace(small_plan.fleet, s3_bytes=GIB)
    for tier in ("gpu", "cpu", "nvme"):
        for size, one in sweep_fleets(small_plan.traffic, fleet, tier, 4):  # type: ignore[arg-type]
            sizes = {"gpu": one.gpu_bytes, "cpu": one.cpu_bytes, "nvme": one.nvme_bytes, "s3": one.s3_bytes}
            assert sizes[tier] == size
            order = list(sizes)
            assert not any(sizes[beneath] for beneath in order[order.index(tier) + 1 :])
            assert one.prefetch is None


def test_runs_in_processes_find_the_same_in_the_same_order(small_plan: Plan) -> None:
    runs = [(small_plan.fleet, name) for name in ("oracle", "lru", "learned")]
    ticks: list[int] = []
    apart = run_all(small_plan.traffic, runs, 2, lambda: ticks.append(1))
    assert apart == run_all(small_plan.traffic, runs, 1, lambda: None)
    assert [one.policy for one in apart] == ["oracle", "lru", "learned"]
    assert len(ticks) == 3


def test_enough_replicas_grow_with_the_traffic(small_plan: Plan) -> None:
    traffic = small_plan.traffic
    quick = replace(traffic, turns=[replace(t, started_s=t.started_s / 100) for t in traffic.turns])
    assert enough_replicas(quick, Fleet()) > 10 * enough_replicas(traffic, Fleet())


def test_larger_blocks_keep_a_prompt_in_several() -> None:
    turns = list(generate(GeneratorOptions(turns=60, seed=1, block_tokens=16)).turns())
    traffic = Traffic("made up", turns, 16, (), {}, next_starts_s(turns))
    coarse = traffic.coarser(100)
    assert coarse.block_tokens > 16
    mean = sum(turn.input_tokens for turn in turns) / len(turns)
    assert mean / coarse.block_tokens >= 31
    assert coarse.most_found() <= traffic.most_found()
    assert traffic.coarser(1 << 40) is traffic


def result_of(hit_rate: float, *, policy: str = "learned", gpu_s: float = 10.0) -> Result:
    fleet = Fleet(cpu_bytes=GIB)
    moved = {"gpu->cpu": 3 * GIB, "cpu->nvme": GIB, "cpu->gpu": 2 * GIB, "nvme->early": GIB}
    hits = {"gpu": round(1e6 * hit_rate)}
    return Result(policy, fleet, 10, 1_000_000, hits, (0.1, 0.2, 0.3), moved, GIB, GIB // 2, gpu_s)


def swept(hits: Sequence[float], tier: str = "cpu", most: float = 0.4) -> planning.Sweep:
    sizes = [GIB << at for at in range(len(hits))]
    return sweep_of(tier, sizes, {"learned": [result_of(one) for one in hits]}, most)  # type: ignore[arg-type]


def test_the_answer_is_one_sentence_with_both_sizes(small_plan: Plan) -> None:
    traffic, fleet = small_plan.traffic, Fleet()
    said = planning.answer(swept([0.1, 0.2, 0.3, 0.33, 0.39]), traffic, fleet)
    assert said.startswith("With learned this traffic needs about 4 GiB of RAM a node, where 30%")
    assert "12 GiB of NVMe below it raise that to 39% of 40%" in said
    assert "times as quick as computing it" in said
    slow = replace(fleet, nvme=replace(fleet.nvme, bytes_per_s=1e6))
    assert "leave NVMe out" in planning.answer(swept([0.1, 0.2, 0.3, 0.33, 0.39]), traffic, slow)
    said = planning.answer(swept([0.1, 0.3, 0.4, 0.4]), traffic, fleet)
    assert said.endswith("of 40% that any cache could find.")
    assert "NVMe" not in said
    assert "8 GiB raises that to 39%" in planning.answer(swept([0.1, 0.3, 0.33, 0.39], "gpu"), traffic, fleet)
    said = planning.answer(swept([0.1, 0.15, 0.25, 0.38]), traffic, fleet)
    assert said.startswith("With learned this traffic needs 8 GiB of RAM a node or more: 38%")
    assert "has no effect: 30%" in planning.answer(swept([0.3, 0.3, 0.305]), traffic, fleet)


def test_the_oracle_is_not_what_is_recommended() -> None:
    hits = [result_of(0.2), result_of(0.3)]
    both = sweep_of("cpu", [GIB, 2 * GIB], {"lru": hits, "oracle": hits}, 0.4)
    assert planning.chosen(both) == "lru"
    assert planning.chosen(sweep_of("cpu", [GIB, 2 * GIB], {"oracle": hits}, 0.4)) == "oracle"


def test_bytes_and_money_are_counted_once(small_plan: Plan) -> None:
    traffic = small_plan.traffic
    result = result_of(0.3, gpu_s=0.6 * traffic.lasts_s)
    assert planning.moved(result) == (4 * GIB, 2 * GIB)
    assert planning.busy_share(result, traffic) == pytest.approx(0.6)
    prices = Prices(gpu_hour=3.0, cpu_gib_month=730.0)
    assert result.fleet.usd_per_h(prices) == pytest.approx(4.0)
    assert planning.usd_per_h_needed(result, traffic, prices) == pytest.approx(4.0)
    half = replace(result, gpu_s=result.gpu_s / 2)
    assert planning.usd_per_h_needed(half, traffic, prices) == pytest.approx(2.5)


def test_decoding_keeps_gpus_busy_and_costs_money(small_plan: Plan) -> None:
    """10 requests a second that read and write 500 tokens: eight replicas, though prefill is nothing."""
    one = small_plan.traffic.turns[0]
    turns = [
        replace(one, started_s=at / 10, input_tokens=500, output_tokens=500, blocks=()) for at in range(1001)
    ]
    traffic = replace(small_plan.traffic, turns=turns)
    fleet = Fleet(slots=32)
    assert enough_replicas(traffic, fleet) == 8
    result = replace(result_of(0.9, gpu_s=1.0), fleet=replace(fleet, replicas=8))
    assert planning.busy_share(result, traffic) == pytest.approx(0.586, abs=0.001)
    assert planning.usd_per_h_needed(result, traffic, Prices(gpu_hour=3.0)) == pytest.approx(23.5, abs=0.1)


def test_a_replica_decodes_as_many_as_on_a_gpu_it_does_and_the_plan_says_so(small_plan: Plan) -> None:
    slots = load("local-gpu", {}, ()).settings.engine.sequences_max
    assert small_plan.fleet.slots == slots == 128
    console = Console(record=True, width=160, file=io.StringIO())
    report_all(small_plan, console)
    assert "128 answers at a time" in console.export_text()


def test_an_overload_is_said(small_plan: Plan) -> None:
    traffic, calm = small_plan.traffic, result_of(0.3)
    assert not list(planning.warnings([calm], swept([0.2, 0.3]), traffic))
    slow = replace(calm, ttft_s=(1.0, 900.0, 1000.0))
    sweep = sweep_of("cpu", [GIB, 2 * GIB], {"lru": [slow, calm]}, 0.4)
    (said,) = planning.warnings([slow, calm], sweep, traffic)
    assert "learned (TTFT p95 900 s), lru with 1 GiB of cpu (TTFT p95 900 s); computing" in said
    assert "--replicas" in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"policies": ("lru", "best")}, "there is no policy 'best'. There are: lru, t-lru, ttl, type-km"),
        ({"policies": ()}, "names none"),
        ({"policies": ("lru", "lru")}, "twice"),
        ({"trace": Path("/nowhere/trace")}, "there is no file /nowhere/trace"),
        ({"gpu_gib": 0}, "--gpu-gib 0: must be more than 0"),
        ({"cpu_gib": -1}, "--cpu-gib -1: must be 0 or more"),
        ({"nvme_gib": math.nan}, "--nvme-gib nan"),
        ({"s3_gib": math.inf}, "--s3-gib inf"),
        ({"prices": Prices(gpu_hour=math.nan)}, "dollars"),
        ({"spread_h": 0.0}, "--spread-h 0"),
        ({"json_to": Path("/nowhere/x.json")}, "--json: there is no directory /nowhere"),
        ({"plot_to": Path("x.jpeg2")}, "must end in .png"),
        ({"plot_to": Path("x.png"), "sweep": None}, "--sweep none"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_runs(
    tmp_path: Path, wrong: dict[str, object], said: str
) -> None:
    with pytest.raises(PlanRefused, match=said):
        check(ask_of(tmp_path, **wrong))


def test_a_plan_is_printed_written_and_drawn(tmp_path: Path) -> None:
    numbers, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    console = Console(record=True, width=160, quiet=True)
    ask = ask_of(tmp_path, json_to=numbers, plot_to=picture)
    assert run_plan(ask, console) == 0
    document = json.loads(numbers.read_text())
    assert [row["policy"] for row in document["policies"]] == ["lru", "learned"]
    assert {row["policy"] for row in document["sweep"]["rows"]} == {"lru", "learned"}
    assert len(document["sweep"]["rows"]) == 6
    assert set(document["sweep"]["knee_bytes"]) == {"lru", "learned"}
    assert document["answer"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_what_is_printed_can_be_read(small_plan: Plan, tmp_path: Path) -> None:
    with Console(width=160, file=(tmp_path / "said").open("w")) as console:
        report_all(small_plan, console)
    said = (tmp_path / "said").read_text()
    for word in ("assumed prices", "gpu hits", "M tokens", "p99 s", "knee of", "no end", "$/h", "oracle"):
        assert word in said
    assert max(map(len, said.splitlines())) <= 160


def report_all(plan: Plan, console: Console) -> None:
    assert plan.sweep is not None
    console.print(planning.facts(plan.traffic, plan.fleet, Prices(), "as given", is_enough=True))
    console.print(planning.policy_table(plan.results, plan.traffic, Prices()))
    console.print(planning.sweep_table(plan.sweep))


def test_settings_of_a_run_are_its_policys() -> None:
    for name in ("lru", "t-lru", "ttl", "type-km", "learned", "oracle"):
        policy, given = policy_of(name)
        assert policy.name == name
        assert given.name == ("learned" if name == "oracle" else name)


@pytest.mark.skipif(not CHAT.is_file(), reason=f"{CHAT} is not here")
def test_the_chat_trace_is_understood() -> None:
    plan = make_plan(PlanAsk(CHAT, policies=("lru",), sweep=None, gpu_gib=32, cpu_gib=64, nvme_gib=0, jobs=1))
    assert plan.fleet.replicas == 6
    assert plan.traffic.block_tokens == TOKENS
    assert plan.traffic.most_found() == pytest.approx(0.39, abs=0.01)
    assert 0.05 < plan.results[0].hit_rate < 0.2
