"""`samovar plan` as it is called: which options go together, what is refused, the tables of sizing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from samovar.cluster.cli import main as cli
from tests.support.model_shapes import MHA_7B, QWEN_32B

ROOT = Path(__file__).resolve().parents[4]


def plan(*args: object) -> Result:
    return CliRunner().invoke(cli.app, ["plan", *map(str, args)])


def refused(*args: object) -> str:
    """The one line it says."""
    result = plan(*args)
    assert result.exit_code == cli.EXIT_REFUSED, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("samovar: plan: ")
    return line


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_32B))
    return tmp_path


def test_contexts_beyond_the_models_own_are_said(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    args = ("--model", tmp_path, "--gpu", "80GB", "--weights", "65GB")
    config.write_text(json.dumps({**QWEN_32B, "max_position_embeddings": 8192}))
    assert "note: the model's context ends at 8k tokens: 32k, 128k would not be served" in plan(*args).stdout
    assert "context ends" not in plan(*args, "--context", "2k,8k").stdout
    config.write_text(json.dumps(QWEN_32B | {"max_position_embeddings": None}))
    assert "context ends" not in plan(*args).stdout


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two sessions that take turns, 4 blocks more each time."""
    rows = []
    for at in range(40):
        session, turn = at % 2, at // 2
        blocks = [1000 * session + block for block in range(4 * turn + 4)]
        row = {
            "timestamp": 4000 * at,
            "input_length": 512 * len(blocks),
            "output_length": 20,
            "hash_ids": blocks,
        }
        rows.append(json.dumps(row))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(rows))
    return path


def test_without_a_trace_or_a_model_both_are_named() -> None:
    line = refused()
    assert "--trace FILE" in line
    assert "--model DIR --gpu 80GB" in line


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--model", "m"), "Give --gpu 80GB"),
        (("--gpu", "80GB"), "--model DIR"),
        (("--trace", "t", "--gpu", "80GB"), "--gpu sizes a model without --trace; with it, give --gpu-gib"),
        (("--trace", "t", "--tflops", "5"), "--tflops sizes"),
        (("--model", "m", "--gpu", "80GB", "--cpu-gib", "4"), "--cpu-gib needs --trace FILE"),
        (("--model", "m", "--gpu", "80GB", "--no-prefetch"), "--prefetch needs --trace FILE"),
        (("--model", "m", "--gpu", "80GB", "--plot", "x.png"), "--plot needs --trace FILE"),
        (("--trace", "t", "--sweep", "ram"), "--sweep 'ram': give gpu, cpu, nvme or none"),
        (("--trace", "t", "--kv-dtype", "fp8"), "--kv-dtype needs --model DIR"),
        (("--trace", "t", "--bytes-per-token", "1", "--model", "m"), "leave one of them out"),
        (("--trace", "t", "--policy", "lru,best"), "no policy 'best'. There are: lru, t-lru, ttl"),
        (("--trace", "/nowhere/t"), "there is no file /nowhere/t"),
        (("--model", "/nowhere/m", "--gpu", "80GB"), "/nowhere/m"),
        (("--model", "/nowhere/m", "--gpu", "80XB"), "--gpu: '80XB' is not a size such as 80GB"),
        (
            ("--model", "/nowhere/m", "--gpu", "80"),
            "--gpu 80 is 80 bytes: write it with its unit, such as 80GB",
        ),
        (("--model", "/nowhere/m", "--gpu", "80GB", "--context", "2q"), "--context: '2q' is not"),
        (("--model", "/nowhere/m", "--gpu", "80GB", "--kv-dtype", "fp7"), "there are fp32, bf16"),
    ],
)
def test_a_wrong_combination_is_one_line_that_says_what_to_do(args: tuple[str, ...], said: str) -> None:
    assert said in refused(*args)


def test_a_broken_trace_is_named_with_its_line(tmp_path: Path, trace: Path) -> None:
    rows = trace.read_text().splitlines()
    rows[4] = rows[4].replace('"input_length": ', '"input_length": -')
    trace.write_text("\n".join(rows))
    assert f"{trace}, line 5, field input_length" in refused("--trace", trace, "--jobs", 1)
    trace.write_text("hello\n")
    assert "is not the beginning of a known schema" in refused("--trace", trace)


def test_weights_that_are_not_there_have_to_be_told(model: Path) -> None:
    assert "--weights 65GB" in refused("--model", model, "--gpu", "80GB")
    assert "--weights 65 is 65 bytes: write it with its unit" in refused(
        "--model", model, "--gpu", "80GB", "--weights", "65"
    )
    assert "--weights: 'many' is not a size" in refused(
        "--model", model, "--gpu", "80GB", "--weights", "many"
    )


def test_the_seed_examples_of_sizing(tmp_path: Path, model: Path) -> None:
    """262,144 bytes a token of a 32B shape, what 80 GB hold beside 65 GB; 4 GiB for 8k of a 7B with MHA."""
    numbers = tmp_path / "sizing.json"
    result = plan(
        "--model", model, "--gpu", "80GB", "--weights", "65GB", "--context", "2k,8k", "--json", numbers
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "262,144 bytes of KV a token" in result.output
    sizing = json.loads(numbers.read_text())
    assert sizing["token_bytes"] == 262_144
    assert [one["sequences"] for one in sizing["contexts"]] == [27, 6]  # 15 GB / 512 MiB, / 2 GiB
    (tmp_path / "config.json").write_text(json.dumps(MHA_7B))
    result = plan("--model", model, "--gpu", "80GB", "--weights", "13.5GB", "--context", "8k")
    assert "4.00 GiB" in result.output
    halved = plan(
        "--model", model, "--gpu", "80GB", "--weights", "13.5GB", "--context", "8k", "--kv-dtype", "fp8"
    )  # fmt: skip
    assert "2.00 GiB" in halved.output
    with_scales = plan(
        "--model", model, "--gpu", "80GB", "--weights", "13.5GB", "--context", "8k", "--kv-dtype", "int8"
    )  # fmt: skip
    assert "266,240 bytes of KV a token (1 byte an element, 2 for the scale" in with_scales.output


def test_other_hardware_changes_the_bounds(model: Path) -> None:
    args = ("--model", model, "--gpu", "80GB", "--weights", "65GB")
    assert "at 52 tokens/s at most" in plan(*args).output
    assert "at 31 tokens/s at most" in plan(*args, "--memory-gb-per-s", "2000").output
    assert "speeds must be more than 0" in refused(*args, "--tflops", "0")


def test_a_trace_is_planned_with_a_models_bytes(tmp_path: Path, trace: Path, model: Path) -> None:
    numbers = tmp_path / "plan.json"
    sizes = ("--gpu-gib", 1, "--cpu-gib", 8, "--nvme-gib", 0, "--replicas", 1, "--points", 2, "--jobs", 1)
    given = ("--policy", "lru,ttl", "--model", model, "--usd-gpu-hour", 5, "--json", numbers)
    result = plan("--trace", trace, *sizes, *given)
    assert result.exit_code == 0, result.output
    document = json.loads(numbers.read_text())
    assert document["bytes_per_token"] == 262_144
    assert document["replicas"] == 1
    assert document["tiers"] == {"gpu": 1 << 30, "cpu": 8 << 30, "nvme": 0, "s3": 0}
    assert [row["policy"] for row in document["policies"]] == ["lru", "ttl"]
    assert document["policies"][0]["usd_per_h"] == pytest.approx(5.0 + 16 / 730, abs=1e-3)
    assert f"of {model}" in result.output
    assert document["answer"] in " ".join(result.output.split())


def test_no_sweep_means_a_table_alone(trace: Path) -> None:
    result = plan("--trace", trace, "--sweep", "none", "--jobs", 1, "--policy", "lru")
    assert result.exit_code == 0, result.output
    assert "By policy" in result.output
    assert "knee" not in result.output


def test_help_imports_neither_torch_nor_the_simulator_nor_matplotlib() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from samovar.cluster.cli.main import app\n"
        "assert CliRunner().invoke(app, ['plan', '--help']).exit_code == 0\n"
        "heavy = ('torch', 'ray', 'matplotlib', 'numpy', 'samovar.cluster.plan.simulator.sim')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
