"""The commands: what they print, how they refuse, and that help does not wait for torch."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from samovar.cache_tiers.pricing import PrefillPrice, TierPrice
from samovar.cluster.cli import main as cli
from samovar.cluster.cli import options
from samovar.cluster.cli.config import GROUPS, group_of
from samovar.cluster.cli.running import DEFAULT_URL, server_url
from samovar.cluster.serve import preflight
from samovar.cluster.serve.startup_table import (
    load_rows,
    next_steps,
    smaller_than_pools,
    startup_table,
    tier_rows,
)
from samovar.configs.fields import setting_fields
from samovar.configs.loader import ConfigError, preset_names
from samovar.configs.settings import Settings
from samovar.replicas.messages import ModelRefused, ReplicaInfo
from tests.support.engines.fake_python import FAKE_UV, fake_python, script
from tests.support.router.fake_replica import INFO

ROOT = Path(__file__).resolve().parents[4]
KEY = "a-key-of-sixteen-or-more"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith("SAMOVAR_")]:
        monkeypatch.delenv(name)
    return CliRunner()


def fake_app(monkeypatch: pytest.MonkeyPatch, serve_forever: object) -> None:
    monkeypatch.setattr(preflight, "check_port", lambda host, port: None)
    monkeypatch.setattr(preflight, "find_python", lambda settings: None)
    module = types.ModuleType("samovar.cluster.serve.app")
    module.serve_forever = serve_forever  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "samovar.cluster.serve.app", module)


def test_help_and_config_import_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from samovar.cluster.cli.main import app\n"
        "for args in (['--help'], ['config'], ['config', '--keys'], ['serve', '--help']):\n"
        "    assert CliRunner().invoke(app, args).exit_code == 0, args\n"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_serve_hands_over_what_holds_and_returns_its_exit_code(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Settings] = []
    demos: list[bool] = []

    def serve_forever(
        settings: Settings, *, with_s3_demo: bool, reload: Callable[[], Settings], **_: object
    ) -> int:
        seen.append(settings)
        demos.append(with_s3_demo)
        return 7

    fake_app(monkeypatch, serve_forever)
    monkeypatch.setenv("SAMOVAR_ENGINE__QUEUE_MAX", "5")
    args = ["serve", "--config", "local-cpu", "--port", "9009", "--engine.block-tokens", "32"]
    result = runner.invoke(cli.app, args)
    assert result.exit_code == 7
    assert seen[0].server.port == 9009
    assert seen[0].engine.block_tokens == 32
    assert seen[0].engine.queue_max == 5
    assert seen[0].engine.device == "cpu"
    assert runner.invoke(cli.app, ["serve", "--with-s3-demo", "--port", "9009"]).exit_code == 7
    assert demos == [False, True]


@pytest.mark.parametrize(
    "args",
    [
        ["Qwen/Qwen3-0.6B@main", "--port", "9009", "--engine.block-tokens", "32"],
        ["--port", "9009", "Qwen/Qwen3-0.6B@main"],
        ["--model", "Qwen/Qwen3-0.6B@main"],
        ["--model.path", "Qwen/Qwen3-0.6B@main"],
    ],
)
def test_serve_takes_the_model_as_a_word_or_a_flag(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    given: list[Settings] = []

    def serve_forever(settings: Settings, *, reload: Callable[[], Settings], **_: object) -> int:
        kept = pickle.dumps(reload)  # for the program that the process becomes
        given.extend((settings, pickle.loads(kept)()))  # noqa: S301
        return 0

    fake_app(monkeypatch, serve_forever)
    assert runner.invoke(cli.app, ["serve", *args]).exit_code == 0
    assert [str(settings.model.path) for settings in given] == ["Qwen/Qwen3-0.6B@main"] * 2


@pytest.mark.parametrize("flag", ["--engine", "--engine.kind"])
def test_serve_takes_the_engine_in_short(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: str
) -> None:
    given: list[Settings] = []

    def serve_forever(settings: Settings, *, reload: Callable[[], Settings], **_: object) -> int:
        given.extend((settings, reload()))
        return 0

    fake_app(monkeypatch, serve_forever)
    vllm = [flag, "vllm", "--engine.vllm.python", str(fake_python(tmp_path / "python"))]
    assert runner.invoke(cli.app, ["serve", "Qwen/Qwen3-8B", *vllm]).exit_code == 0
    assert [(str(one.model.path), one.engine.kind) for one in given] == [("Qwen/Qwen3-8B", "vllm")] * 2
    result = runner.invoke(cli.app, ["serve", flag, "llama.cpp"])
    assert result.exit_code == 2
    assert "engine.kind = 'llama.cpp'" in result.stderr
    assert runner.invoke(cli.app, ["config", "get", "engine.kind", flag, "vllm"]).stdout.startswith("vllm")


def test_what_vllm_cannot_do_is_refused_before_anything_starts(runner: CliRunner) -> None:
    result = runner.invoke(cli.app, ["serve", "--engine", "vllm", "--engine.kv-dtype", "int8"])
    assert result.exit_code == 2
    assert "engine.kv_dtype=int8: vLLM has another int8 cache" in result.stderr


def test_a_model_that_is_given_twice_is_refused(runner: CliRunner) -> None:
    result = runner.invoke(cli.app, ["serve", "a/b", "--model", "c/d"])
    assert result.exit_code == 2
    assert "given twice" in result.stderr


def test_serve_refuses_a_bad_setting_without_a_traceback(runner: CliRunner) -> None:
    result = runner.invoke(cli.app, ["serve", "--port", "0", "--engine.blok-tokens=3"])
    assert result.exit_code == 2
    assert "server.port = '0'  (from flag --port)" in result.stderr
    assert "--engine.block-tokens" in result.stderr
    assert "Traceback" not in result.output


def test_serve_reads_the_file_again_when_asked_to(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "samovar.yaml"
    file.write_text("cluster: {replicas: 2}")

    def serve_forever(
        settings: Settings, *, with_s3_demo: bool, reload: Callable[[], Settings], **_: object
    ) -> int:
        assert settings.cluster.replicas == reload().cluster.replicas == 2
        file.write_text("cluster: {replicas: 3}")
        assert (reload().cluster.replicas, reload().server.port) == (3, 9009)
        file.write_text("cluster: {replicas: none}")
        with pytest.raises(ConfigError, match=r"cluster\.replicas"):
            reload()
        return 0

    fake_app(monkeypatch, serve_forever)
    result = runner.invoke(cli.app, ["serve", "--config", str(file), "--port", "9009"])
    assert result.exit_code == 0, result.exception


def test_serve_says_why_a_model_is_refused(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_forever(
        settings: Settings, *, with_s3_demo: bool, reload: Callable[[], Settings], **_: object
    ) -> int:
        raise ModelRefused("it has no layers", "give another one")

    fake_app(monkeypatch, serve_forever)
    result = runner.invoke(cli.app, ["serve"])
    assert result.exit_code == 2
    assert "the model cannot be served: it has no layers. Fix: give another one." in result.stderr


def test_a_server_is_announced_when_it_is_ready_and_withdrawn_at_its_end(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def serve_forever(
        settings: Settings,
        *,
        on_ready: Callable[[str], object],
        on_end: Callable[[], object],
        **_: object,
    ) -> int:
        assert settings.engine.fast_start
        assert server_url(None, os.environ) == DEFAULT_URL
        on_ready("http://127.0.0.1:8811")
        assert server_url(None, os.environ) == "http://127.0.0.1:8811"
        end = pickle.loads(pickle.dumps(on_end))  # noqa: S301  # the program that the process becomes has it
        end()
        raise ModelRefused("it is gone", "start again")

    fake_app(monkeypatch, serve_forever)
    assert runner.invoke(cli.app, ["serve", "--fast-start"]).exit_code == 2
    assert server_url(None, os.environ) == DEFAULT_URL


def test_config_shows_every_setting_with_its_origin_and_no_secret(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMOVAR_AUTH__API_KEYS", json.dumps({"team": KEY}))
    args = ["config", "--port", "9009", "--auth.server-secret", KEY]
    table = runner.invoke(cli.app, [*args, "--all"])
    rows = json.loads(runner.invoke(cli.app, [*args, "--json"]).stdout)
    assert KEY not in table.output + json.dumps(rows)
    assert list(rows) == list(setting_fields())
    assert rows["server.port"]["value"] == 9009
    assert rows["server.port"]["origin"] == "flag --port"
    assert rows["auth.api_keys"]["value"] == {"team": "***"}
    assert rows["auth.server_secret"]["value"] == "***"
    assert "server.port\t9009\tflag --port" in table.stdout
    assert "server.host\t127.0.0.1\t\t" in table.stdout
    short = runner.invoke(cli.app, args)
    assert [line.split("\t")[0] for line in short.stdout.splitlines()] == [
        *("setting", "server.port", "auth.api_keys", "auth.server_secret"),
    ]
    assert f"{len(rows) - 3} settings have their defaults" in short.stderr


def test_all_settings_are_grouped_by_what_one_wants_to_do(runner: CliRunner) -> None:
    lines = [line.split("\t")[0] for line in runner.invoke(cli.app, ["config", "--all"]).stdout.splitlines()]
    headings = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    assert headings == list(GROUPS)
    assert lines[0] == "setting"
    assert sorted(lines[1:]) == sorted([*setting_fields(), *(f"# {group}" for group in GROUPS)]), "each once"
    above = ""
    for line in lines[1:]:
        above = line.removeprefix("# ") if line.startswith("# ") else above
        assert line.startswith("# ") or group_of(line) == above
    assert group_of("tiers.nvme.dir") == "Keep what was computed: RAM, disk, S3"
    assert group_of("tiers.peer.enabled") == "Scale over replicas and nodes", "the longest beginning counts"


@pytest.mark.parametrize("begin", [begin for begins in GROUPS.values() for begin in begins])
def test_each_beginning_of_a_group_is_that_of_a_setting(begin: str) -> None:
    assert any(key.startswith(begin) for key in setting_fields())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["server.port"], "8000"),
        (["server.port", "--port", "9009"], "9009"),
        (["engine.prefix-reuse"], "true"),
        (["model.path"], ""),
        (["model.path", "--json"], "null"),
        (["auth.api_keys", "--json"], "{}"),
    ],
)
def test_one_setting_can_be_asked_for(runner: CliRunner, args: list[str], said: str) -> None:
    result = runner.invoke(cli.app, ["config", "get", *args])
    assert (result.exit_code, result.stdout) == (0, f"{said}\n")


def test_a_setting_that_is_not_there_is_guessed(runner: CliRunner) -> None:
    result = runner.invoke(cli.app, ["config", "get", "server.prot"])
    assert result.exit_code == 2
    assert "Did you mean server.port?" in result.stderr
    assert "which setting?" in runner.invoke(cli.app, ["config", "get"]).stderr


def test_config_lists_how_settings_are_spelled(runner: CliRunner) -> None:
    text = runner.invoke(cli.app, ["config", "--keys"]).stdout
    assert "--engine.block-tokens\tSAMOVAR_ENGINE__BLOCK_TOKENS\tone of 16, 32, 64, 128" in text
    spelled = json.loads(runner.invoke(cli.app, ["config", "--keys", "--json"]).stdout)
    assert list(spelled) == list(setting_fields())


def test_what_config_prints_as_json_gives_the_same_settings_again(runner: CliRunner, tmp_path: Path) -> None:
    rows = json.loads(runner.invoke(cli.app, ["config", "--config", "local-gpu", "--json"]).stdout)
    tree: dict[str, Any] = {}
    for key, row in rows.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = row["value"]
    path = tmp_path / "again.yaml"
    path.write_text(json.dumps(tree))  # JSON is YAML
    again = json.loads(runner.invoke(cli.app, ["config", "--config", str(path), "--json"]).stdout)
    assert {k: v["value"] for k, v in again.items()} == {k: v["value"] for k, v in rows.items()}


def test_version_names_what_matters_in_a_report(runner: CliRunner) -> None:
    lines = runner.invoke(cli.app, ["version"]).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["samovar", "ray", "torch", "transformers", "python"]
    assert list(json.loads(runner.invoke(cli.app, ["version", "--json"]).stdout)) == [
        line.split()[0] for line in lines
    ]
    for flag in ("--version", "-V"):
        assert runner.invoke(cli.app, [flag]).stdout.splitlines() == lines[:1]


@pytest.mark.parametrize("command", ["", "serve", "chat", "status", "plan", "config", "up"])
def test_help_is_also_h_and_names_values_in_plain_words(runner: CliRunner, command: str) -> None:
    words = command.split()
    long, short = (runner.invoke(cli.app, [*words, flag]) for flag in ("--help", "-h"))
    assert (long.exit_code, long.stdout) == (0, short.stdout)
    for odd in ("<bool>", "<int", "<str>", "<float"):
        assert odd not in long.stdout


def test_the_help_names_every_preset() -> None:
    assert options.PRESETS.split(", ") == list(preset_names())


def checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the command believe that it was installed in `folder`."""
    monkeypatch.setattr(cli, "HOME", folder)


def test_bench_says_that_an_installed_package_has_none(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout(tmp_path, monkeypatch)
    result = runner.invoke(cli.app, ["bench"])
    assert result.exit_code == 2
    assert "make bench" in result.stderr


def test_bench_runs_the_one_that_is_named_with_its_flags(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").write_text("")
    (tmp_path / "bench" / "toy.py").write_text("def main(argv):\n    print(argv)\n    return 3\n")
    checkout(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("bench", "bench.toy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    result = runner.invoke(cli.app, ["bench", "toy", "--out", "x", "--help"])
    assert result.stdout.strip() == "['--out', 'x', '--help']"
    assert result.exit_code == 3
    result = runner.invoke(cli.app, ["bench", "tooy"])
    assert result.exit_code == 2
    assert "Available: toy" in result.stderr
    for name in ("bench", "bench.toy"):
        sys.modules.pop(name, None)


def info(pages: int = 1025, context: int = 8192) -> ReplicaInfo:
    return replace(
        INFO,
        model_name="[bold]model",
        context_tokens_max=context,
        exactness="bitwise equal in the probe",
        bytes_per_token=23040,
        pages=pages,
        pool_bytes=1025 * 16 * 23040,
    )


def test_the_scratch_page_and_whole_blocks_count_when_sessions_are_fitted() -> None:
    assert info(1025).sessions_that_fit(2048) == 8
    assert info(1024).sessions_that_fit(2048) == 7
    assert info(1025).sessions_that_fit(2049) == 7
    assert info(1025).sessions_that_fit(32768) is None


def test_the_table_at_start_shows_the_cache_and_what_fits() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(startup_table(info(), replicas=2, settings=Settings()))
    text = console.export_text()
    for part in (
        "[bold]model",
        "23,040 bytes per token",
        "1,024 pages",
        "8 per replica, 16 in total",
        "longer than the context",
        "bitwise equal in the probe",
        "0.35 GiB",
        "2.00 GiB in Ray's object store",
        "off (tiers.s3.bucket)",
    ):
        assert part in text
    assert "graphs" not in text, "of a CPU"


def test_the_table_of_a_gpu_says_which_steps_are_graphs() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    recorded = replace(info(), graphs="15 of decodes to 128 rows; 4.1 s, 310 MiB")
    console.print(startup_table(recorded, replicas=1, settings=Settings()))
    (line,) = (line for line in console.export_text().splitlines() if " graphs " in line)
    assert "15 of decodes to 128 rows; 4.1 s, 310 MiB" in line


def test_the_table_at_start_says_where_each_tier_is() -> None:
    tiers = {
        "cpu": {"bytes_max": 0},
        "nvme": {"dir": "/data/kv", "bytes_max": 2**34},
        "s3": {"bucket": "b", "endpoint": "http://127.0.0.1:9"},
    }
    assert tier_rows(Settings.model_validate({"tiers": tiers})) == [
        ("tier RAM", "off (tiers.cpu.bytes_max)"),
        ("tier disk", "16.00 GiB in /data/kv"),
        ("tier S3", "64.00 GiB bucket b at http://127.0.0.1:9"),
    ]
    aws = Settings.model_validate({"tiers": {"s3": {"bucket": "b", "region": "eu-west-1"}}})
    assert tier_rows(aws)[2][1].endswith("bucket b at AWS, eu-west-1")
    default = Settings.model_validate({"model": {"cache_dir": "/cache"}})
    assert tier_rows(default)[1] == ("tier disk", "8.00 GiB in /cache/kv")
    ((name, off),) = tier_rows(Settings.model_validate({"tiers": {"enabled": False}}))
    assert (name, "tiers.enabled" in off) == ("tiers", True)


def test_a_tier_that_does_not_serve_says_why_and_the_others_where_they_are() -> None:
    settings = Settings.model_validate({"model": {"cache_dir": "/cache"}})
    states = {"cpu": "up", "nvme": "off: in use by pid 7 (/cache/kv/lock)", "s3": "off: no bucket"}
    assert tier_rows(settings, states)[1:] == [
        ("tier disk", "off: in use by pid 7 (/cache/kv/lock) (8.00 GiB in /cache/kv)"),
        ("tier S3", "off (tiers.s3.bucket)"),
    ]
    console = Console(width=80, record=True, file=io.StringIO(), color_system="standard", force_terminal=True)
    console.print(startup_table(info(), 1, settings, states))
    text = console.export_text(styles=True)
    assert "\x1b[33moff: in use by pid 7" in text
    assert "\x1b[33moff (tiers.s3" not in text, "nobody asked for it"


def test_the_table_at_start_says_when_a_load_pays_and_a_tier_that_is_smaller_than_its_pool() -> None:
    """As on a GPU of 2026-11-26: 131 kB a token; 35 us to compute it, 77 us to load it at 1.7 GB/s."""
    made = replace(
        info(),
        bytes_per_token=131_072,
        context_tokens_max=65_536,
        pool_bytes=24 * 2**30,
        prefill=PrefillPrice(0.0, 28e-6, 8e-10),
    )
    prices = {"cpu": TierPrice(1e-3, 1.7e9), "nvme": TierPrice(2e-3, 6e9)}
    settings = Settings.model_validate({"tiers": {"cpu": {"bytes_max": 16 * 2**30}}})
    rows = dict(load_rows(made, prices))
    assert rows["load from RAM"] == (
        "pays from 61,397 tokens on: loading 77.1 us a token after 1 ms, computing 34.6 us a token of 8k"
    )
    assert rows["load from disk"].startswith("pays from 313 tokens on: loading 21.8 us a token after 2 ms")
    ((_, unknown),) = load_rows(made, {"nvme": TierPrice(0.0, math.inf, is_proved=False)})
    assert unknown == "not measured yet, its first loads tell, computing 34.6 us a token of 8k"
    assert load_rows(info(), prices) == [], "what computing takes is not told"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(startup_table(made, 2, settings, None, prices))
    text = console.export_text()
    assert "less RAM than the 48.00 GiB of pool in front of it" in text
    assert "pays from 61,397 tokens on" in text
    assert "less RAM" not in smaller_than_pools(2**30, 2**30)


def test_the_next_steps_fit_a_terminal_and_the_shell_runs_them() -> None:
    made = replace(info(), model_name="it's a model")
    text = next_steps(made, "http://127.0.0.1:8000", has_keys=True, toy="toy")
    assert "samovar chat" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "toy" not in text
    plain = next_steps(replace(info(), model_name="toy"), "http://127.0.0.1:8000", has_keys=False, toy="toy")
    assert max(map(len, plain.splitlines())) <= 80
    assert "4-bit toy" in plain
    command = text[text.index("curl") : text.index("|") - 2].replace("curl", "printf '%s\\n'", 1)
    said = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    body = json.loads(said[said.index("{") :])
    assert body["model"] == "it's a model"
    assert body["messages"][0]["role"] == "user"


def test_an_environment_of_an_engine_is_made_shown_and_removed(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "bin" / "uv", FAKE_UV)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    for name, value in {"LOG": tmp_path / "log", "MADE": fake_python(tmp_path / "made")}.items():
        monkeypatch.setenv(name, str(value))
    there = [f"--model.cache-dir={tmp_path}", "--engine.device=cpu"]
    python = tmp_path / "engines" / "vllm" / "bin" / "python"
    result = runner.invoke(cli.app, ["engines", "list", *there])
    assert (result.exit_code, "samovar engines add vllm" in result.stderr) == (2, True)
    made, again = (runner.invoke(cli.app, ["engines", "add", "vllm", *there]) for _ in range(2))
    assert re.fullmatch(rf"vllm 0\.32\.0 with Ray \S+ was made in \d s: {python}\n", made.stdout), made.output
    assert [line.split()[0] for line in made.stderr.splitlines()] == ["environment", "torch", "packages"]
    assert (again.exit_code, again.stderr) == (0, "")
    assert again.stdout.endswith(f" is there: {python}\n")
    line = runner.invoke(cli.app, ["engines", "list", *there]).stdout.splitlines()[1].split("\t")
    assert (line[:2], line[4:]) == (["vllm", "0.32.0"], ["yes", str(python)])
    assert runner.invoke(cli.app, ["engines", "remove", "vllm", *there]).stdout == "vllm was removed.\n"
    assert "There is no vllm" in runner.invoke(cli.app, ["engines", "remove", "vllm", *there]).stdout
    monkeypatch.setenv("FAILS", "venv")
    monkeypatch.setenv("SAYS", "no room")
    failed = runner.invoke(cli.app, ["engines", "add", "vllm", *there])
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert "samovar: uv cannot do it: no room; Caused by: it was so\n" in failed.stderr


def test_what_a_command_leaves_behind_is_not_collected_at_its_end() -> None:
    program = """
import sys
from samovar.cluster.cli.main import main

class Left:
    def __init__(self): self.self = self
    def __del__(self): print("collected", flush=True)

kept = Left()
sys.argv = ["samovar", "version"]
main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("samovar")
    assert "collected" not in ended.stdout, "the stop of a service takes three seconds more"
