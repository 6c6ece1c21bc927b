"""The comparison counts what it says: streams of each server, processes, rows, bars; a server that fails."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
import torch

from bench import _report as report
from bench import peers
from bench._peers_client import Reply, read_stream
from bench._peers_judge import Aiperf, figures
from bench._peers_model import PeerModel, has_bf16, write_gguf
from bench._peers_processes import Running, Threads, last_words
from bench._peers_rows import Reading, bars, rows_of, skipped, table
from bench._peers_servers import (
    PEERS,
    PRODUCTS,
    Launch,
    LlamaCpp,
    Place,
    Samovar,
    Vllm,
    VllmLmcache,
    step_said,
)
from bench._peers_works import QUICK, Amounts, at_once, beside, decoded, text_of, tokens_of
from samovar.configs.settings import EngineSettings
from tests.support.services.service import until

MODEL = PeerModel("tiny", Path("/model"), Path("/model.gguf"))
TINY = Amounts(prompts=(64,), pool_tokens=512, decode_tokens=8, idle_s=0.05, window_s=0.02, is_natural=False)
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}

# Answers as a server does whose stream has one token in a chunk, and remembers prompts until it ends. The
# environment: PORT, and FAILS, the number of the request from which on it answers 500.
FAKE = """
import json, os, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
seen, asked = [], []
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked.append(1)
        if len(asked) >= int(os.environ["FAILS"]):
            self.send_response(500); self.end_headers(); self.wfile.write(b"no more"); return
        ids = body["prompt"]
        cached = max((len(os.path.commonprefix([ids, one])) for one in seen), default=0)
        seen.append(ids)
        self.send_response(200); self.end_headers()
        say = lambda event: self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        try:
            if len(ids) == 64 and not cached: time.sleep(0.1)
            for n in range(body["max_tokens"]):
                last = n + 1 == body["max_tokens"]
                say({"choices": [{"text": "a", "finish_reason": "length" if last else None}]})
                time.sleep(0.002)
            say({"choices": [], "usage": {"prompt_tokens": len(ids), "completion_tokens": body["max_tokens"],
                 "prompt_tokens_details": {"cached_tokens": cached}}})
            self.wfile.write(b"data: [DONE]\\n\\n")
        except OSError: pass
ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


class FakePeer:
    """`fails`: the request from which on it answers 500."""

    environment = "fake"

    def __init__(
        self, name: str = "samovar", *, forgets: str = "", fails: int = 10_000, asked_step: str = ""
    ) -> None:
        self.name = self.product = name
        self.asked_step = asked_step
        self.forgets = forgets
        self._fails = fails

    def missing(self, build: Path) -> str:
        return ""

    def launches(self, place: Place) -> list[Launch]:
        env = {"PORT": str(place.ports[0]), "FAILS": str(self._fails)}
        return [Launch((sys.executable, "-c", FAKE), env)]

    def fields(self, session: str) -> dict[str, object]:
        return {}

    def step(self, output: str) -> str:
        return "lean"


def place(tmp_path: Path, pool_tokens: int = 5120) -> Place:
    return Place(MODEL, tmp_path / "build", tmp_path, [7001, 7002, 7003], [1], pool_tokens)


# -- streams ---------------------------------------------------------------------------


def events(*said: tuple[str, str | None], usage_beside: bool = False) -> list[str]:
    found: list[dict[str, Any]] = [
        {"choices": [{"text": text, "finish_reason": reason}]} for text, reason in said
    ]
    if usage_beside:
        found[-1]["usage"] = USAGE
    else:
        found.append({"choices": [], "usage": USAGE})
    return [": ping", *(f"data: {json.dumps(event)}" for event in found), "data: [DONE]"]


def read(lines: Sequence[str]) -> Reply:
    seconds = iter(range(100))
    cpu = iter([5.5, 7.0])
    reply = Reply(sent_s=0.0, first_cpu_s=5.0)
    read_stream(lines, reply, lambda: float(next(seconds)), lambda: next(cpu))
    return reply


@pytest.mark.parametrize(
    ("said", "usage_beside", "arrivals"),
    [
        ([("a", None), ("b", None), ("c", "length")], False, 3),  # vLLM
        ([("a", None), ("b", None), ("c", None), ("", "length")], True, 3),  # llama.cpp
        ([("abc", None), ("", "length")], False, 1),  # several tokens in one
        ([("", None), ("b", None), ("c", "length")], False, 3),  # half a character
        ([("", "length")], False, 1),  # one token without text
    ],
)
def test_tokens_are_those_of_usage_and_arrivals_those_of_chunks_with_tokens(
    said: list[tuple[str, str | None]], usage_beside: bool, arrivals: int
) -> None:
    reply = read(events(*said, usage_beside=usage_beside))
    assert len(reply.arrivals_s) == arrivals
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (9, 3, 4)
    assert (reply.ttft_s, reply.first_cpu_s, reply.last_cpu_s) == (0.0, 0.5, 2.0)


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (['data: {"choices": [{"text": "a"}]}'], "without usage"),
        ([f'data: {{"choices": [], "usage": {json.dumps(USAGE)}}}'], "without a token"),
        (['data: {"error": {"message": "full"}}'], "full"),
    ],
)
def test_a_stream_that_says_too_little_is_an_error(lines: list[str], what: str) -> None:
    with pytest.raises(RuntimeError, match=what):
        read(lines)


def test_figures_of_answers() -> None:
    reply = Reply(0.0, [1.0, 1.5, 2.0, 3.0], first_cpu_s=0.5, last_cpu_s=3.5, prompt_tokens=10)
    reply.completion_tokens = 7  # chunks have more than one token
    found = decoded(reply)
    assert (found["tok_s"], found["cpu_ms_per_token"], found["itl_p50_ms"]) == (3.0, 500.0, 500.0)
    found = at_once([reply, reply], took_s=2.0, cpu_s=4.0)
    assert (found["tok_s"], found["tok_cpu_s"], found["ttft_s"]) == (17.0, 8.5, 1.0)


def test_gaps_beside_a_prefill_are_those_that_it_touches() -> None:
    stream = Reply(0.0, [1.0, 1.1, 1.2, 2.2, 2.4, 2.5])
    found = beside(stream, 1.25, 2.3)  # from within the long gap until within the next
    assert (found["gaps"], found["itl_max_ms"]) == (2, pytest.approx(1000))
    assert found["itl_alone_p50_ms"] == pytest.approx(100)
    with pytest.raises(RuntimeError, match="5 gaps, 0 of them"):
        beside(stream, 2.6, 3.0)


# -- processes -------------------------------------------------------------------------


def test_cpu_of_threads_that_ended_stays_counted(tmp_path: Path) -> None:
    def ran(pid: int, thread: int, ns: int) -> None:
        folder = tmp_path / str(pid) / "task" / str(thread)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{ns} 77 3\n")

    threads = Threads(tmp_path)
    ran(1, 1, 1_000_000_000)
    ran(1, 2, 500_000_000)
    ran(3, 3, 9_000_000_000)  # another's
    assert threads.cpu_s([1]) == 1.5
    (tmp_path / "1" / "task" / "2" / "schedstat").unlink()
    ran(1, 1, 2_000_000_000)
    assert threads.cpu_s([1, 4]) == 2.5


def test_a_server_is_stopped_with_all_below_it_and_its_cpu_is_counted(tmp_path: Path) -> None:
    below = "import time; sum(range(2_000_000)); time.sleep(100)"
    script = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {below!r}]); time.sleep(100)"
    )
    cores = sorted(os.sched_getaffinity(0))[-1:]
    running = Running(cores, window_s=0.02)
    running.start((sys.executable, "-c", script), {}, tmp_path / "out.txt")
    until("both run", lambda: len(running.processes()) == 2)
    started = running.processes()
    assert all(process.cpu_affinity() == cores for process in started)
    until("the one below worked", lambda: running.cpu_s() > 0.02)
    assert running.start_cpu_s() > 0
    assert running.memory()["processes"] == 2
    assert running.ended() is None
    running.stop()
    # Nobody may have waited for the one below.
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in started)


def test_the_reason_of_an_end_is_the_lines_that_say_so() -> None:
    assert last_words("loading\nValueError: no weights\nat line 3\n") == "ValueError: no weights"
    assert last_words("one\n\ntwo\n") == "one | two"


# -- servers ---------------------------------------------------------------------------


def test_servers_have_the_same_weights_cores_and_pool(tmp_path: Path) -> None:
    at = place(tmp_path)
    commands = {peer.name: " ".join(peer.launches(at)[-1].command) for peer in PEERS}
    assert f"--engine.pool-bytes-max {5120 * 23040}" in commands["samovar"]
    assert "--ctx-size 5120" in commands["llama.cpp"]
    assert "--num-gpu-blocks-override 41" in commands["vllm"]
    assert "--max-model-len 5120" in commands["vllm+lmcache"]
    assert "--engine.threads 1" in commands["samovar-lean"]
    assert "--threads 1" in commands["llama.cpp"]
    assert Vllm().launches(at)[0].env["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert "--engine.step" not in commands["samovar"]
    assert "--engine.step lean" in commands["samovar-lean"]
    assert "--engine.draft-tokens-max 0" in commands["samovar-undrafted"]
    assert "--engine.draft" not in commands["samovar"]
    assert "/model.gguf" in commands["llama.cpp"]
    assert "--flash-attn off" in commands["llama.cpp-no-flash"]
    assert "--flash-attn" not in commands["llama.cpp"]
    assert "--parallel 16" in commands["llama.cpp-16-slots"]
    assert "--parallel 4" not in commands["llama.cpp-16-slots"]
    assert "--block-size 32 --num-gpu-blocks-override 161 --max-model-len 5120" in commands["vllm-block-32"]
    kind = "bfloat16" if has_bf16() else "float32"
    assert all(f"--dtype {kind}" in command for name, command in commands.items() if "vllm" in name)
    assert {PRODUCTS[name] for name in commands if "llama" in name} == {"llama.cpp"}
    assert all("/model " in commands[name] for name in ("vllm", "vllm+lmcache"))


def test_lmcache_listens_before_vllm_is_started_and_both_know_where(tmp_path: Path) -> None:
    cache, server = VllmLmcache().launches(place(tmp_path))
    connector = json.loads(server.command[-1])
    assert cache.ready_port == connector["kv_connector_extra_config"]["lmcache.mp.port"] == 7002
    adapter = json.loads(cache.command[cache.command.index("--l2-adapter") + 1])
    assert Path(adapter["base_path"]).is_dir()
    assert cache.command[0].startswith(str(tmp_path / "build" / "lmcache"))


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    assert "llama-server is not there: bash bench/peers-install.sh" in LlamaCpp().missing(tmp_path)
    assert "vllm is not there" in VllmLmcache().missing(tmp_path)
    assert Samovar("samovar").missing(tmp_path) == ""
    unknown = Samovar("samovar-odd", "odd").missing(tmp_path)
    assert "engine.step" in unknown
    if "step" not in EngineSettings.model_fields:
        assert unknown == "this version has no setting engine.step"


@pytest.mark.parametrize(
    ("output", "step"),
    [
        ("engine step: native (AVX-512)\n", "native"),
        ("engine step: native-bf16, compiled for AVX512-BF16\n", "native-bf16"),
        ("| step | lean, as there is no compiler for the native one |", "lean"),
        ("one step of 512 tokens\n", ""),
    ],
)
def test_the_step_is_what_the_service_says(output: str, step: str) -> None:
    assert step_said(output) == step


def test_prompts_are_the_same_for_all_and_new_for_each() -> None:
    assert tokens_of(50, "a") == tokens_of(50, "a") != tokens_of(50, "b")
    assert len(set(tokens_of(500, "a"))) > 400
    text = list(range(5000))
    assert text_of(50, "a", text) == text_of(50, "a", text) != text_of(50, "b", text)
    assert len(text_of(50, "a", text)) == 50
    assert Amounts().filler_tokens * 4 > Amounts().pool_tokens
    assert QUICK.pool_tokens >= QUICK.pool_tokens_min


# -- the weights -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_the_gguf_for_llama_cpp_has_the_same_values_and_metadata(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((4, 64), dtype=np.float32)
    vector = rng.standard_normal(64, dtype=np.float32)
    q8 = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(tmp_path / "source.gguf", "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.5, 1.5])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(matrix, q8), raw_dtype=q8)
    writer.add_tensor("output_norm.weight", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    write_gguf(tmp_path / "source.gguf", tmp_path / "written.gguf", as_float16=kind == "F16")

    source, written = (gguf.GGUFReader(tmp_path / name) for name in ("source.gguf", "written.gguf"))
    plain = {key: field.contents() for key, field in source.fields.items() if not key.startswith("GGUF.")}
    again = {key: field.contents() for key, field in written.fields.items() if not key.startswith("GGUF.")}
    assert again == plain | {"general.file_type": int(gguf.LlamaFileType[f"MOSTLY_{kind}"])}
    types = {tensor.name: tensor.tensor_type.name for tensor in written.tensors}
    assert types == {"token_embd.weight": kind, "output_norm.weight": "F32"}
    for before, after in zip(source.tensors, written.tensors, strict=True):
        assert list(before.shape) == list(after.shape)
        values, rounded = (gguf.quants.dequantize(one.data, one.tensor_type) for one in (before, after))
        expected = torch.from_numpy(np.array(values)).to(torch.bfloat16).float()
        assert torch.equal(torch.from_numpy(np.array(rounded)), expected)


# -- rows, table and bars --------------------------------------------------------------


def figures_of(cold: float, per_token: float, per_cpu: float) -> Callable[[str], list[Reading]]:
    def readings(engine: str) -> list[Reading]:
        asked = {"ttft_s": 2.0, "cached_tokens": 0.0}
        return [
            *(Reading(engine, "cold", 1000, {"cpu_s": cpu, **asked}) for cpu in (9.0, cold, 0.1)),
            Reading(engine, "warm", 1000, {"cpu_s": 0.1, "ttft_s": 0.2, "cached_tokens": 1000.0}),
            Reading(engine, "return_overflow", 1000, {"cpu_s": 0.12, "ttft_s": 0.2, "cached_tokens": 1008.0}),
            Reading(engine, "decode", 0, {"cpu_ms_per_token": per_token, "tok_s": 30.0}),
            Reading(engine, "decode_repeats", 0, {"cpu_ms_per_token": per_token / 2, "tok_s": 60.0}),
            Reading(engine, "concurrent", 0, {"tok_cpu_s": per_cpu, "tok_s": 200.0, "cpu_s": 9.0}),
            Reading(
                engine, "itl", 1000, {"itl_p50_ms": 100.0, "itl_p99_ms": 250.0, "itl_alone_p50_ms": 20.0}
            ),
            Reading(engine, "start", 0, {"cpu_s": 50.0, "wall_s": 60.0}),
            Reading(engine, "start_again", 0, {"cpu_s": 14.0, "wall_s": 20.0}),
            Reading(engine, "idle", 0, {"cpu_share": 0.06}),
            Reading(engine, "rss", 0, {"rss_mb": 900.0, "pss_mb": 700.0, "processes": 9.0}),
        ]

    return readings


def test_rows_are_medians_bars_are_ratios_and_the_table_says_the_best_setting_of_each() -> None:
    readings = [
        *figures_of(1.5, 28.0, 300.0)("samovar"),
        *figures_of(1.5, 29.0, 300.0)("samovar-undrafted"),
        *figures_of(2.0, 31.0, 139.0)("llama.cpp"),
        *figures_of(1.75, 35.0, 130.0)("llama.cpp-no-flash"),
        *figures_of(3.0, 40.0, 230.0)("vllm"),
    ]
    rows = [*rows_of(readings, {"samovar": "native"}), skipped("vllm+lmcache", "not there")]
    cold = next(row for row in rows if (row["engine"], row["work"]) == ("samovar", "cold"))
    assert (cold["n"], cold["cpu_s"], cold["step"]) == (3, 1.5, "native")
    assert cold["raw"]["cpu_s"] == [9.0, 1.5, 0.1]
    found = {bar.name: bar for bar in bars(rows, PRODUCTS)}
    assert found["cold 1000: of llama.cpp's"].value == pytest.approx(1.5 / 1.75)
    assert found["decode: of llama.cpp's"].value == pytest.approx(28 / 31)
    assert found["decode: of ours without drafts"].value == pytest.approx(28 / 29)
    missed = {name.split(":")[0] for name, bar in found.items() if bar.ok is False}
    assert missed == {"cold 1000", "return_overflow 1000", "decode", "start_again", "idle"}
    lines = {line["work"]: line for line in table(rows, PRODUCTS)}
    assert lines["cold 1000"]["ours / best peer"] == "0.86 (0.86-1.00) x llama.cpp-no-flash"
    assert lines["cold 1000"]["llama.cpp"] == "1.75 (2) [no-flash]"
    assert lines["decode"]["llama.cpp"] == "31 ms, 30/s"
    assert lines["concurrent"]["ours / best peer"] == "1.30 x vllm"
    assert lines["warm 1000"]["samovar"] == "0.1 (0.2) 1000 c"
    assert list(lines["decode"]) == [
        "work",
        "samovar",
        "samovar-undrafted",
        "llama.cpp",
        "vllm",
        "ours / best peer",
    ]


def test_without_peers_there_are_no_ratios_and_no_bar_fails_for_that() -> None:
    rows = rows_of([Reading("samovar", "decode", 0, {"cpu_ms_per_token": 20.0, "tok_s": 30.0})], {})
    assert {bar.ok for bar in bars(rows, PRODUCTS)} == {None}
    assert table(rows, PRODUCTS)[0]["ours / best peer"] == "-"
    assert table([skipped("vllm", "not there")], PRODUCTS) == []


# -- a run -----------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "OUT_DIR", tmp_path / "out")
    monkeypatch.setattr(peers, "BUILD", tmp_path / "build")
    return tmp_path


def bench(*servers: FakePeer, rounds: int = 1) -> peers.Bench:
    cores = sorted(os.sched_getaffinity(0))
    return peers.Bench(servers, TINY, rounds, MODEL, cores, None)


def test_each_server_does_all_works_in_each_round(here: Path) -> None:
    (here / "build" / "fake").mkdir(parents=True)
    (here / "build" / "fake" / ".installed").write_text("fake==1.0\n")
    run = bench(FakePeer(), FakePeer("vllm", forgets="it keeps nothing"), rounds=2)
    run.run()
    written = json.loads(run.write().read_text())
    works = {engine: [] for engine in ("samovar", "vllm")}
    for row in written["rows"]:
        works[row["engine"]].append((row["work"], row["n"]))
    asked = [("cold", 2), ("warm", 2), ("return_overflow", 2)]
    rest = [("decode", 8), ("decode_repeats", 2), ("concurrent", 2), ("itl", 2), ("rss", 2), ("idle", 2)]
    # The first start of the run stands alone, the restarts and the second round's start together.
    assert works["samovar"] == [("start", 1), ("start_again", 3), *asked, ("return_restart", 2), *rest]
    assert works["vllm"] == [("start", 1), ("start_again", 1), *asked, *rest, ("return_restart", 0)]
    rows = {(row["engine"], row["work"]): row for row in written["rows"]}
    assert rows["vllm", "return_restart"]["skipped"] == "it keeps nothing"
    assert rows["samovar", "cold"]["cached_tokens"] == 0
    assert rows["samovar", "warm"]["cached_tokens"] == 64
    assert rows["samovar", "return_restart"]["cached_tokens"] == 0  # this one keeps nothing either
    assert rows["samovar", "cold"]["step"] == "lean"
    assert rows["samovar", "decode"]["completion_tokens"] == 8
    assert written["settings"]["pool_tokens"] == 512
    assert written["versions"] == {"samovar": "fake==1.0", "vllm": "fake==1.0"}
    assert run.failures() == []
    assert not list((here / "build" / "peers").iterdir())  # no folder of a server is left


def test_a_server_that_fails_is_a_row_and_the_next_is_measured(here: Path) -> None:
    run = bench(FakePeer("vllm", fails=3), FakePeer(fails=4))
    run.run()
    failed = {row["engine"]: row for row in run.rows() if row.get("failed")}
    assert "no more" in failed["vllm"]["skipped"]
    assert {row["work"] for row in run.rows() if row["engine"] == "vllm" and row["n"]} == {"start", "cold"}
    assert [line.split(":")[0] for line in run.failures()] == ["samovar, round 1"]  # a peer's is no failure


def test_a_service_that_runs_another_step_is_skipped_and_no_failure(here: Path) -> None:
    run = bench(FakePeer("samovar-native", asked_step="native"), FakePeer("samovar-lean", asked_step="lean"))
    run.run()
    measured = {row["engine"] for row in run.rows() if row["n"]}
    assert measured == {"samovar-lean"}
    assert "its step is lean" in next(row["skipped"] for row in run.rows() if not row["n"])
    assert run.failures() == []


def test_a_server_that_ends_says_what_it_said(tmp_path: Path, here: Path) -> None:
    class Broken(FakePeer):
        def launches(self, place: Place) -> list[Launch]:
            return [Launch((sys.executable, "-c", "raise SystemExit('RuntimeError: no such model')"), {})]

    run = bench(Broken("vllm"))
    run.run()
    (row,) = run.rows()
    assert "ended with 1" in row["skipped"]
    assert "no such model" in row["skipped"]


def test_servers_take_the_last_cores_and_the_client_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert peers.server_cores(None) == ([1, 2, 3], [0])
    assert peers.server_cores(2) == ([2, 3], [0, 1])
    assert peers.server_cores(9) == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_arguments() -> None:
    args = peers.arguments(["--quick", "--engines", "samovar", "vllm"])
    assert (args.rounds, args.amounts, args.engines) == (1, QUICK, ["samovar", "vllm"])
    args = peers.arguments(["--prompts", "2000", "1000", "--pool-tokens", "8192"])
    assert (args.amounts.prompts, args.amounts.pool_tokens, args.rounds) == ((1000, 2000), 8192, 3)
    with pytest.raises(SystemExit):
        peers.arguments(["--prompts", "8000"])


# -- the outside judge -----------------------------------------------------------------


def test_aiperf_is_asked_of_the_server_and_its_export_read() -> None:
    command = Aiperf(Path("/aiperf"), MODEL, Path("/tmp")).command("http://127.0.0.1:7001", Path("/a"))
    assert command[:2] == ["/aiperf", "profile"]
    assert command[command.index("--url") + 1] == "http://127.0.0.1:7001"
    export = {"time_to_first_token": {"p50": 1331.0, "p99": 2503.0}, "output_token_throughput": {"avg": 8.55}}
    assert figures(export) == {"ttft_s": 1.331, "ttft_p99_s": 2.503, "tok_s": 8.55}
    with pytest.raises(RuntimeError, match="tok_s"):
        figures({"time_to_first_token": {"p50": 1.0}})
