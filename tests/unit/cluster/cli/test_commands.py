"""The commands: what they print, how they refuse, and that help does not wait for torch."""

from __future__ import annotations

import io
import json
import os
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

from cluster.cli import main as cli
from cluster.serve.startup_table import sessions_that_fit, startup_table, tier_rows
from configs.fields import setting_fields
from configs.loader import ConfigError
from configs.settings import Settings
from replicas.messages import ModelRefused, ReplicaInfo
from tests.support.router.fake_replica import INFO

ROOT = Path(__file__).resolve().parents[4]
KEY = "a-key-of-sixteen-or-more"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    for name in [name for name in os.environ if name.startswith("SAMOVAR_")]:
        monkeypatch.delenv(name)
    return CliRunner()


def fake_app(monkeypatch: pytest.MonkeyPatch, serve_forever: object) -> None:
    module = types.ModuleType("cluster.serve.app")
    module.serve_forever = serve_forever  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cluster.serve.app", module)


def test_help_and_config_import_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from cluster.cli.main import app\n"
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

    def serve_forever(settings: Settings, *, with_s3_demo: bool, reload: Callable[[], Settings]) -> int:
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

    def serve_forever(settings: Settings, *, with_s3_demo: bool, reload: Callable[[], Settings]) -> int:
        given.extend((settings, reload()))
        return 0

    fake_app(monkeypatch, serve_forever)
    assert runner.invoke(cli.app, ["serve", *args]).exit_code == 0
    assert [str(settings.model.path) for settings in given] == ["Qwen/Qwen3-0.6B@main"] * 2


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

    def serve_forever(settings: Settings, *, with_s3_demo: bool, reload: Callable[[], Settings]) -> int:
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
    def serve_forever(settings: Settings, *, with_s3_demo: bool, reload: Callable[[], Settings]) -> int:
        raise ModelRefused("there is no config.json in /m", "give a transformers directory")

    fake_app(monkeypatch, serve_forever)
    result = runner.invoke(cli.app, ["serve", "--model", "/m"])
    assert result.exit_code == 2
    assert "there is no config.json in /m. Fix: give a transformers directory." in result.stderr


def test_config_shows_every_setting_with_its_origin_and_no_secret(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMOVAR_AUTH__API_KEYS", json.dumps({"team": KEY}))
    args = ["config", "--port", "9009", "--auth.server-secret", KEY]
    table = runner.invoke(cli.app, args)
    rows = json.loads(runner.invoke(cli.app, [*args, "--json"]).stdout)
    assert KEY not in table.output + json.dumps(rows)
    assert list(rows) == list(setting_fields())
    assert rows["server.port"]["value"] == 9009
    assert rows["server.port"]["origin"] == "flag --port"
    assert rows["auth.api_keys"]["value"] == {"team": "***"}
    assert rows["auth.server_secret"]["value"] == "***"
    assert "server.port\t9009\tflag --port" in table.stdout


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


def checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the command believe that it was installed in `folder`."""
    place = Path(cli.__file__).relative_to(ROOT)  # where the package lies in a checkout
    monkeypatch.setattr(cli, "__file__", str(folder / place))


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
    assert sessions_that_fit(info(1025), 2048) == 8
    assert sessions_that_fit(info(1024), 2048) == 7
    assert sessions_that_fit(info(1025), 2049) == 7
    assert sessions_that_fit(info(1025), 32768) is None


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


def test_the_table_at_start_says_where_each_tier_is() -> None:
    tiers = {
        "cpu": {"bytes_max": 0},
        "nvme": {"dir": "/data/kv", "bytes_max": 2**34},
        "s3": {"bucket": "b", "endpoint": "http://127.0.0.1:9"},
    }
    assert tier_rows(Settings.model_validate({"tiers": tiers})) == [
        ("tier cpu", "off (tiers.cpu.bytes_max)"),
        ("tier nvme", "16.00 GiB in /data/kv"),
        ("tier s3", "64.00 GiB bucket b at http://127.0.0.1:9"),
    ]
    aws = Settings.model_validate({"tiers": {"s3": {"bucket": "b", "region": "eu-west-1"}}})
    assert tier_rows(aws)[2][1].endswith("bucket b at AWS, eu-west-1")
    default = Settings.model_validate({"model": {"cache_dir": "/cache"}})
    assert tier_rows(default)[1] == ("tier nvme", "8.00 GiB in /cache/kv")
    ((name, off),) = tier_rows(Settings.model_validate({"tiers": {"enabled": False}}))
    assert (name, "tiers.enabled" in off) == ("tiers", True)
