"""The measurement of the ingress: whose process is whose, and what its clients count."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bench import _front_vllm
from bench._front_client import STAMP, Stream, figures
from bench._front_engine import ScriptedEngine
from bench.front import SERVERS, costs, role_named
from samovar.replicas.messages import Admitted, Delta, GenerateRequest, SamplingParams


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["ray::ServeReplica:samovar:Ingress", ""], "ingress"),
        (["ray::ServeReplica:samovar-model-1a:Replica"], "replica"),
        (["ray::ProxyActor.ready"], "proxy"),
        (["ray::SERVE_PROXY_ACTOR-58f473"], "proxy"),
        (["ray::ServeController"], "ray"),
        (["/venv/bin/python", "-m", "bench._front_raw", "1", "20"], "ingress"),
        (["/build/vllm/bin/python", "/build/vllm/bin/vllm", "serve", "/model"], "ingress"),
        (["VLLM::EngineCore"], "engine"),
        (["VLLM::Worker"], "engine"),
        ([], "ray"),
    ],
)
def test_a_process_is_a_part_of_the_road(command: list[str], role: str) -> None:
    assert role_named(command) == role


def test_what_is_taken_without_streams_is_told_apart() -> None:
    spent_s, idle_s = {"ingress": 1.2, "ray": 0.4}, {"ingress": 0.02, "ray": 0.04, "proxy": 0.01}
    told = costs(spent_s, idle_s, 10.0, 1000)
    assert told["front_cpu_ms_per_token"] == pytest.approx(1.6)
    assert told["net_cpu_ms_per_token"] == pytest.approx(1.0)  # 1.0 of the ingress, none of Ray
    assert told["idle_cpu_ms_a_second"] == pytest.approx(70)
    assert (told["ingress_ms"], told["proxy_ms"]) == (pytest.approx(1.2), 0.0)
    assert told["ingress_idle_ms_a_second"] == pytest.approx(20)
    assert costs({}, {}, 10.0, 0)["front_cpu_ms_per_token"] == 0.0


def test_what_a_token_was_late_is_told_from_how_slowly_tokens_were_made() -> None:
    stream = Stream(ttft_added_s=0.004, chunks=2)
    stream.tokens = [(10.0, 10.001), (10.02, 10.031), (10.04, 10.041), (99.0, 99.5)]
    seen = figures([stream], 10.0, 11.0)
    assert (seen["tokens"], seen["ttft_added_ms"]) == (3, 4.0)
    assert seen["delay_p99_ms"] == 11.0
    assert seen["itl_p99_added_ms"] == 10.0  # its gap was 30 ms, of which 20 are the engine's
    assert seen["tokens_a_chunk"] == 2.0


def test_a_scripted_engine_says_when_it_was_asked_and_when_each_token_was_made() -> None:
    engine = ScriptedEngine("r", 0.0)
    began_s = time.monotonic()
    engine.add(7, GenerateRequest("q", [1], SamplingParams(max_tokens=2)))
    (_, admitted), (_, first) = engine.step()
    ((key, last),) = engine.step()
    assert isinstance(admitted, Admitted)
    assert isinstance(first, Delta)
    assert isinstance(last, Delta)
    asked_s, made_s = map(float, first.text.split())
    assert began_s - 1e-3 <= asked_s <= made_s <= float(last.text) + 1e-6
    assert STAMP.search(f'"content":"{first.text}"'.encode()) is not None
    assert (key, first.finish_reason, last.finish_reason, engine.has_work) == (7, None, "length", False)


def test_tokens_of_vllm_are_those_it_counts() -> None:
    said = (
        "# HELP vllm:generation_tokens_total Number of generation tokens processed.\n"
        'vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+03\n'
        'vllm:generation_tokens_created{engine="0"} 9.0\n'
    )
    assert _front_vllm.counted(said) == 1500


def test_each_kind_of_server_has_its_command() -> None:
    for name, kind in SERVERS.items():
        if name != "vllm":  # which is not installed everywhere
            command, _ = kind.command(1234, 20.0, ("--more", "1"))
            assert "1234" in command
            assert ("--more" in command) == name.startswith("samovar")
            assert name == "samovar-vllm" or kind.tokens(1234) == 0
    assert not SERVERS["vllm"].is_stamped


def test_vllm_alone_has_the_arguments_that_it_has_in_a_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_front_vllm, "TOY", tmp_path / "toy")
    python = tmp_path / "bin" / "python"
    flags = ("--engine.vllm.python", str(python), "--engine.sequences-max", "16")
    command, env = _front_vllm.alone(1234, flags)
    assert command[:2] == [str(python.with_name("vllm")), "serve"]
    assert {"--max-num-seqs=16", "--enforce-eager", "--dtype=float32", "--max-model-len=8192"} <= {*command}
    assert env["OMP_NUM_THREADS"] == "1"
    layers = {
        key.split(".")[2] for key in load_file(tmp_path / "toy" / "model.safetensors") if "layers" in key
    }
    assert layers == {"0", "1"}
    ours, _ = _front_vllm.behind_samovar(1234, flags)
    assert ours[-4:] == list(flags)


def test_arguments_are_written_as_vllms_command_takes_them() -> None:
    given = {"a_b": True, "c": False, "d": {"e": 1}, "f": ["g", "h"], "i": -1}
    assert list(_front_vllm.words_of(given)) == ["--a-b", "--no-c", '--d={"e": 1}', "--f", "g", "h", "--i=-1"]
