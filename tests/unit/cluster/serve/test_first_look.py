"""What cannot start is told at once: before torch, Ray or transformers are imported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samovar.cluster.serve.preflight import StartFailed, first_look
from samovar.configs.settings import Settings
from samovar.replicas.messages import ModelRefused
from tests.support.engines.fake_python import fake_python

ROOT = Path(__file__).resolve().parents[4]
HEAVY = ("torch", "ray", "transformers", "boto3", "fastapi")


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def settings(port: int, tmp_path: Path, **sections: object) -> Settings:
    given: dict[str, Any] = {"server": {"port": port}, **sections}
    given["model"] = {"cache_dir": str(tmp_path), **given.get("model", {})}
    return Settings.model_validate(given)


def model_dir(tmp_path: Path, **config: object) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_what_can_start_passes(free_port: int, tmp_path: Path) -> None:
    assert first_look(settings(free_port, tmp_path)) == []
    path = model_dir(tmp_path, model_type="llama")
    assert first_look(settings(free_port, tmp_path, model={"path": str(path)})) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "does not exist"),
        ({}, "has no model_type"),
        ({"model_type": "bert"}, "'bert', which our engine does not serve"),
        ({"model_type": "llama", "architectures": ["LlamaModel"]}, "not a causal language model"),
    ],
)
def test_a_model_is_refused_by_what_its_config_says(
    free_port: int, tmp_path: Path, config: dict[str, object] | None, said: str
) -> None:
    path = tmp_path / "nowhere" if config is None else model_dir(tmp_path, **config)
    with pytest.raises(ModelRefused, match=said):
        first_look(settings(free_port, tmp_path, model={"path": str(path)}))


def test_with_vllm_other_models_pass_and_other_settings_are_refused(free_port: int, tmp_path: Path) -> None:
    path = model_dir(tmp_path, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"])
    given: dict[str, Any] = {"model": {"path": str(path)}, "engine": {"kind": "vllm"}}
    fake_python(settings(free_port, tmp_path).engines_dir / "vllm" / "bin" / "python")
    assert first_look(settings(free_port, tmp_path, **given)) == []
    with pytest.raises(ModelRefused, match=r"--engine vllm"):
        first_look(settings(free_port, tmp_path, model=given["model"]))
    given["engine"] |= {"step": "lean"}
    with pytest.raises(ModelRefused, match=r"engine\.step=lean"):
        first_look(settings(free_port, tmp_path, **given))
    given["engine"] = {"kind": "vllm", "fast_start": True}
    assert "engine.fast_start=True changes nothing" in first_look(settings(free_port, tmp_path, **given))[0]


def test_a_port_that_is_taken_is_named(taken_port: int, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=f"127.0.0.1:{taken_port} .*--port N"):
        first_look(settings(taken_port, tmp_path))


def test_sizes_that_contradict_each_other_are_refused(free_port: int, tmp_path: Path) -> None:
    sizes = {"cluster": {"object_store_bytes": 2**30}, "tiers": {"cpu": {"bytes_max": 2**30}}}
    with pytest.raises(StartFailed, match=r"cluster\.object_store_bytes"):
        first_look(settings(free_port, tmp_path, **sizes))


def test_two_buckets_are_refused(free_port: int, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="two S3 tiers"):
        first_look(settings(free_port, tmp_path, tiers={"s3": {"bucket": "mine"}}), with_s3_demo=True)


def test_vllm_without_its_environment_is_refused(free_port: int, tmp_path: Path) -> None:
    asked = settings(free_port, tmp_path, engine={"kind": "vllm"})
    with pytest.raises(StartFailed, match="samovar engines add vllm"):
        first_look(asked)
    fake_python(asked.engines_dir / "vllm" / "bin" / "python")
    assert first_look(asked) == []
    assert [path.name for path in asked.engines_dir.iterdir()] == ["vllm"], "it only looks"


def test_cuda_without_a_gpu_is_refused(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> object:
        raise OSError(name)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    asked = settings(free_port, tmp_path, engine={"device": "cuda"})
    with pytest.raises(ModelRefused, match=r"torch 2\.1\+cpu is a build without CUDA"):
        first_look(asked, torch_version=lambda: "2.1+cpu", open_library=str)
    with pytest.raises(ModelRefused, match="no NVIDIA driver"):
        first_look(asked, torch_version=lambda: "2.1", open_library=missing)
    assert first_look(asked, torch_version=lambda: "2.1", open_library=str) == []
    assert first_look(asked, torch_version=lambda: "2.1+rocm6", open_library=missing) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ModelRefused, match="CUDA_VISIBLE_DEVICES hides"):
        first_look(asked, torch_version=lambda: "2.1", open_library=str)


def test_a_disk_tier_that_another_server_holds_is_told_and_nothing_else_changes(
    free_port: int, tmp_path: Path
) -> None:
    lock = tmp_path / "kv" / "lock"
    hold = (
        "import sys; from samovar.cache_tiers.media.files import take_lock\n"
        f"take_lock({str(lock)!r}); print('held', flush=True); sys.stdin.read()"
    )
    lock.parent.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", hold], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        (warning,) = first_look(settings(free_port, tmp_path))
        assert f"pid {owner.pid} uses {tmp_path / 'kv'}" in warning
        off = {"enabled": False}
        assert first_look(settings(free_port, tmp_path, tiers=off)) == []
        assert first_look(settings(free_port, tmp_path, cluster={"ray_address": "10.0.0.1:6379"})) == []
        owner.communicate("")
    assert first_look(settings(free_port, tmp_path)) == []


def serve(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run `samovar serve` in a process that prints, at its end, which heavy modules it has imported."""
    code = (
        "import atexit, sys; from samovar.cluster.cli.main import main\n"
        f"atexit.register(lambda: print([name for name in {HEAVY} if name in sys.modules]))\n"
        "main()"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("SAMOVAR_")}
    env["SAMOVAR_MODEL__CACHE_DIR"] = str(tmp_path)
    return subprocess.run(
        [sys.executable, "-c", code, "serve", *flags],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--port", "PORT"], 1, "cannot listen on 127.0.0.1"),
        (["--model", "/nowhere"], 2, "model directory /nowhere does not exist"),
        (["--server.prot", "1"], 2, "Did you mean --server.port?"),
        (["--with-s3-demo", "--tiers.s3.bucket", "b"], 1, "two S3 tiers"),
        (["--engine.device", "cuda"], 2, "engine.device is cuda"),
    ],
    ids=["port", "model", "setting", "buckets", "gpu"],
)
def test_wrong_input_is_told_before_anything_heavy_is_imported(
    tmp_path: Path, taken_port: int, monkeypatch: pytest.MonkeyPatch, flags: list[str], code: int, said: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = serve(tmp_path, *[str(taken_port) if flag == "PORT" else flag for flag in flags])
    assert (done.returncode, done.stdout.strip()) == (code, "[]"), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
