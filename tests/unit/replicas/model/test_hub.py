"""ensure_model with a model of the hub: fetched once, pinned to a commit, and every failure in words."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from samovar.cluster.plan.sizing import read_model
from samovar.configs.model_reference import HubModel, hub_model, is_default, snapshot_of
from samovar.configs.settings import ModelSettings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import ensure_model, hub, inspect_model, pinned
from tests.support.services.hub_stub import HubStub, hub_stub, use_hub

NAME = "tea/tiny-llama"


@pytest.fixture
def stub(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    with hub_stub() as running:
        running.repo(NAME, tiny_llama)
        use_hub(monkeypatch, running.url, tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        yield running


def fetch(name: str = NAME, **settings: int) -> Path:
    return ensure_model(ModelSettings(path=Path(name), **settings), progress=False)


def refusal(name: str = NAME, **settings: int) -> ModelRefused:
    with pytest.raises(ModelRefused) as caught:
        fetch(name, **settings)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_model_is_fetched_once_and_is_named_as_on_the_hub(stub: HubStub, tiny_llama: Path) -> None:
    path = fetch()
    spec, local = inspect_model(path), inspect_model(tiny_llama)
    assert spec.name == NAME
    assert spec.commit == stub.repos[NAME].branches["main"]
    assert spec.fingerprint == local.fingerprint  # of the content: a copy of the files shares its blocks
    assert any("/cdn/" in line for line in stub.asked)
    stub.asked.clear()
    assert fetch() == path
    assert [line for line in stub.asked if "/resolve/" in line or "/cdn/" in line] == []


def test_only_what_the_engine_reads_is_fetched(stub: HubStub) -> None:
    repo = stub.repos[NAME]
    files = repo.commits[repo.branches["main"]]
    unread = (
        "pytorch_model.bin",
        "onnx/model.safetensors",
        "consolidated.safetensors",
        "README.md",
        "x.gguf",
    )
    repo.commit(files | dict.fromkeys(unread, b"w" * 9000))
    assert {path.name for path in fetch().iterdir()} == set(files)


def test_a_branch_that_moves_is_another_model_and_a_commit_is_not(stub: HubStub) -> None:
    repo = stub.repos[NAME]
    first = repo.branches["main"]
    old = fetch()
    files = repo.commits[first]
    second = repo.commit(files | {"chat_template.jinja": b"{{ messages }}"})
    assert snapshot_of(fetch()) == HubModel(NAME, second)
    assert fetch(f"{NAME}@{first}") == old
    repo.commit(files, branch="v1")
    assert snapshot_of(fetch(f"{NAME}@v1")) == HubModel(NAME, first)


def test_a_pinned_model_is_the_same_on_every_node_and_needs_no_network_once_cached(
    stub: HubStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = ModelSettings(path=Path(NAME))
    path = ensure_model(settings, progress=False)
    fixed = pinned(settings, path)
    assert fixed.path == Path(f"{NAME}@{path.name}")
    stub.repos[NAME].commit({"config.json": b"{}"})  # the branch moves between two nodes' starts
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "other node"))
    other = ensure_model(fixed, progress=False)
    assert inspect_model(other).fingerprint == inspect_model(path).fingerprint
    stub.status, stub.asked = 500, []
    assert ensure_model(fixed, progress=False) == other
    assert stub.asked == []


@pytest.mark.parametrize("how", ["offline", "down", "closed"])
def test_without_the_hub_the_cached_commit_is_served(
    stub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    path = fetch()
    if how == "down":
        stub.status = 503
    else:
        url = stub.url if how == "offline" else "http://127.0.0.1:9"
        use_hub(monkeypatch, url, tmp_path / "cache", offline=how == "offline")
    assert fetch() == path
    # As older versions of huggingface_hub have left the cache.
    shutil.rmtree(path.parent.parent / "trees")
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    with caplog.at_level(logging.WARNING):
        assert fetch() == path
    assert "served as cached" in caplog.text
    assert f"{NAME}@v9" in refusal(f"{NAME}@v9").reason


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("offline", "HF_HUB_OFFLINE forbids"),
        ("closed", "cannot be reached"),
        ("down", "with status 503"),
    ],
)
def test_what_is_not_cached_needs_the_hub(
    stub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, why: str
) -> None:
    if how == "down":
        stub.status = 503
    else:
        url = stub.url if how == "offline" else "http://127.0.0.1:9"
        use_hub(monkeypatch, url, tmp_path / "cache", offline=how == "offline")
    found = refusal()
    assert why in found.reason
    assert NAME in found.reason
    assert "hf download" in found.fix or "later" in found.fix


def test_unknown_private_gated_and_bad_tokens_name_the_fix(
    stub: HubStub, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = refusal("tea/nothing")
    assert "no directory tea/nothing here" in unknown.reason
    assert "HF_TOKEN" in unknown.fix
    assert "no branch, tag or commit 'v7'" in refusal(f"{NAME}@v7").reason
    stub.repo("tea/private", tiny_llama).token = "hf_good"
    gated = stub.repo("tea/gated", tiny_llama)
    gated.token, gated.gated = "hf_good", True
    assert "HF_TOKEN" in refusal("tea/private").fix
    found = refusal("tea/gated")
    assert "gated" in found.reason
    assert f"{stub.url}/tea/gated" in found.fix
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "refuses this caller's token" in refusal("tea/private").reason
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert inspect_model(fetch("tea/private")).name == "tea/private"
    assert inspect_model(fetch("tea/gated")).name == "tea/gated"


def test_size_and_disk_are_looked_at_before_the_first_byte(
    stub: HubStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = stub.repos[NAME]
    repo.commit(repo.commits[repo.branches["main"]] | {"model.safetensors": b"w" * 2_000_000})
    found = refusal(download_bytes_max=1024 * 1024)
    assert "model.download_bytes_max" in found.reason
    full = shutil.disk_usage("/")._replace(free=hub.SPARE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    found = refusal()
    assert " MiB in " in found.reason
    assert "HF_HOME" in found.fix
    assert not any("/cdn/" in line for line in stub.asked)


def test_a_repository_without_served_weights_is_refused_before_a_download(stub: HubStub) -> None:
    stub.repo("tea/only-gguf").commit({"x.gguf": b"w" * 9000, "config.json": b"{}"})
    found = refusal("tea/only-gguf")
    assert "GGUF" in found.reason
    assert "hf download" in found.fix
    assert not any("/cdn/" in line for line in stub.asked)


def test_a_download_that_is_cut_off_goes_on_where_it_ended(stub: HubStub) -> None:
    stub.cut_after = 5000
    path = fetch()
    assert inspect_model(path).name == NAME


def test_what_it_downloads_is_told(stub: HubStub, tmp_path: Path) -> None:
    """In a process of its own, by the environment alone."""
    env = {**os.environ, "HF_ENDPOINT": stub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": ""}
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN"):
        env.pop(name, None)
    code = (
        "from pathlib import Path\nfrom samovar.configs.settings import ModelSettings\n"
        "from samovar.replicas.model.store import ensure_model\n"
        f"print(ensure_model(ModelSettings(path=Path({NAME!r}))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        cwd=Path.cwd(),
        check=True,
        timeout=300,
    )
    commit = stub.repos[NAME].branches["main"]
    assert snapshot_of(Path(done.stdout.strip())) == HubModel(NAME, commit)
    assert str(tmp_path / "home") in done.stdout
    assert f"downloading {NAME} (commit {commit[:12]}):" in done.stderr
    assert " MiB, to " in done.stderr
    assert "Fetching" not in done.stderr  # bars are for terminals


def test_plan_sizes_a_model_of_the_hub_without_its_weights(stub: HubStub) -> None:
    shape, weights_bytes = read_model(Path(NAME))
    assert not any("/cdn/" in line for line in stub.asked)
    fetched = fetch()
    assert (shape, weights_bytes) == (read_model(fetched)[0], (fetched / "model.safetensors").stat().st_size)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubModel("Qwen/Qwen3-0.6B", "v1.0")),
        ("a/b@refs/pr/3", HubModel("a/b", "refs/pr/3")),
        ("./Qwen3", None),
        ("../models/x", None),
        ("/models/x", None),
        ("~/models", None),
        ("a/b/c", None),
        ("models/x.gguf", None),
        ("Qwen3-0.6B", None),
        ("here/model", None),
    ],
)
def test_what_a_path_names(
    given: str, found: HubModel | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    assert hub_model(Path(given)) == found


def test_the_default_models_own_name_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_default(Path("SmolLM2-135M-Instruct"))
    assert is_default(None)
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert not is_default(Path("SmolLM2-135M-Instruct"))


def test_a_commit_that_changes_nothing_of_a_large_model_keeps_its_fingerprint(
    stub: HubStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samovar.replicas.model.weights.WHOLE_DIGEST_BYTES_MAX", 0)
    first = inspect_model(fetch())
    repo = stub.repos[NAME]
    repo.commit(repo.commits[repo.branches["main"]] | {"notes.txt": b"one more file"})
    second = inspect_model(fetch())
    assert second.commit != first.commit
    assert second.fingerprint == first.fingerprint
