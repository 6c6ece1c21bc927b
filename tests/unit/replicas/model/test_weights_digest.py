"""The fingerprint of large weights: every byte counts, and each file is read once until it is written to."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar.replicas.model import inspect_model, weights

PART = 64 * 1024
"""Several parts a file."""
EARLIER_NS = 10**9 * 1_700_000_000
SMALL_DIGEST = "ab73b7bb6542cf38b2f46567c5370697d297c980974c42cac863f22ae1869547"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int, int]]:
    """What was hashed of which file; weights of any size are large, and settled at once."""
    seen: list[tuple[Path, int, int]] = []
    plain: Callable[[tuple[Path, int, int]], bytes] = weights._part_digest

    def noting(part: tuple[Path, int, int]) -> bytes:
        seen.append(part)
        return plain(part)

    monkeypatch.setattr(weights, "WHOLE_DIGEST_BYTES_MAX", 0)
    monkeypatch.setattr(weights, "PART_BYTES", PART)
    monkeypatch.setattr(weights, "SETTLED_S", 0.0)
    monkeypatch.setattr(weights, "_part_digest", noting)
    return seen


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy that the test may spoil, in two files."""
    path = Path(shutil.copytree(tiny_llama, tmp_path / "m"))
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    parts = {"one.safetensors": sorted(tensors)[::2], "two.safetensors": sorted(tensors)[1::2]}
    for name, of_part in parts.items():
        save_file({one: tensors[one] for one in of_part}, path / name, metadata={"format": "pt"})
    index = {"weight_map": {one: name for name, of_part in parts.items() for one in of_part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def fingerprint(path: Path, keep: Path | None = None) -> bytes:
    return inspect_model(path, keep).fingerprint


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.guarantee("G3", "F13")
def test_a_changed_byte_anywhere_gives_another_fingerprint(model: Path, reads: object) -> None:
    file = model / "two.safetensors"
    size, seen = file.stat().st_size, {fingerprint(model)}
    places = [size - 1, size // 2, *range(size - 5000, PART, -PART // 2)]
    for at in places:
        flip(file, at)
        seen.add(fingerprint(model))
    assert len(seen) == len(places) + 1
    tensors = load_file(file)
    name = max(tensors, key=lambda one: tensors[one].numel())
    tensors[name][3:5] += 0.5  # two rows of a matrix, as a fine-tune of two tokens
    save_file(tensors, file, metadata={"format": "pt"})
    assert fingerprint(model) not in seen


def test_a_file_is_read_once_and_wholly(
    model: Path, tmp_path: Path, reads: list[tuple[Path, int, int]]
) -> None:
    keep, told = tmp_path / "kept", list[str]()
    first = inspect_model(model, keep, told.append).fingerprint
    for name in ("one.safetensors", "two.safetensors"):
        spans = sorted((begin, end) for path, begin, end in reads if path.name == name)
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == (model / name).stat().st_size
    assert len(reads) > 4
    count = len(reads)
    assert inspect_model(model, keep, told.append).fingerprint == first
    assert (len(reads), told) == (count, ["digest"])
    assert fingerprint(model) == first  # kept or not
    assert len(reads) == 2 * count


def rewritten(file: Path) -> None:
    flip(file, file.stat().st_size - 9)


def replaced(file: Path) -> None:
    shutil.copy(file, file.with_suffix(".new"))
    flip(file.with_suffix(".new"), file.stat().st_size - 9)
    stated = file.stat()
    os.utime(file.with_suffix(".new"), ns=(stated.st_atime_ns, stated.st_mtime_ns))
    file.with_suffix(".new").replace(file)


def rewritten_and_set_back(file: Path) -> None:
    stated = file.stat()
    rewritten(file)
    os.utime(file, ns=(stated.st_atime_ns, stated.st_mtime_ns))


@pytest.mark.guarantee("G3", "F13")
@pytest.mark.parametrize("change", [rewritten, replaced, rewritten_and_set_back])
def test_a_file_that_was_written_to_is_read_again(
    model: Path, tmp_path: Path, reads: list[tuple[Path, int, int]], change: Callable[[Path], None]
) -> None:
    keep, file = tmp_path / "kept", model / "two.safetensors"
    os.utime(file, ns=(EARLIER_NS, EARLIER_NS))
    before = fingerprint(model, keep)
    reads.clear()
    change(file)
    assert fingerprint(model, keep) != before
    assert {path.name for path, _, _ in reads} == {"two.safetensors"}


def test_a_file_that_is_written_to_meanwhile_or_just_now_is_not_kept(
    model: Path, tmp_path: Path, reads: list[tuple[Path, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SETTLED_S", 1e6)
    fingerprint(model, tmp_path / "kept")
    monkeypatch.setattr(weights, "SETTLED_S", 0.0)
    count, plain = len(reads), weights._part_digest

    def written_to(part: tuple[Path, int, int]) -> bytes:
        if part[0].name == "two.safetensors" and part[1] == PART:
            os.utime(part[0], ns=(EARLIER_NS, EARLIER_NS))
        return plain(part)

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_part_digest", written_to)
        fingerprint(model, tmp_path / "kept")
    assert len(reads) == 2 * count
    reads.clear()
    fingerprint(model, tmp_path / "kept")
    assert {path.name for path, _, _ in reads} == {"two.safetensors"}


@pytest.mark.parametrize("kept", [b"", b"{}", b'{"file": []}', b"[1]"])
def test_a_spoilt_digest_is_made_again(
    model: Path, tmp_path: Path, reads: list[tuple[Path, int, int]], kept: bytes
) -> None:
    keep = tmp_path / "kept"
    first, count = fingerprint(model, keep), len(reads)
    for file in keep.glob("*.weights.json"):
        file.write_bytes(kept)
    assert fingerprint(model, keep) == first
    assert len(reads) == 2 * count
    (tmp_path / "file").touch()
    assert fingerprint(model, tmp_path / "file" / "in the way") == first


def test_of_processes_that_start_together_one_reads(
    model: Path, tmp_path: Path, reads: list[tuple[Path, int, int]]
) -> None:
    files, found = weights.read_weights(model), list[bytes]()
    threads = [
        threading.Thread(target=lambda: found.append(weights.weights_digest(files, tmp_path / "kept")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert len(reads) == len(set(reads))


@pytest.mark.guarantee("G3", "F13")
def test_the_fingerprint_of_small_weights_is_what_it_was(tmp_path: Path) -> None:
    """KV on disk outlives an update: what small weights are hashed to must not change."""
    save_file({"a": torch.arange(7.0)}, tmp_path / "model.safetensors")
    files = weights.read_weights(tmp_path)
    assert weights.weights_digest(files).hex() == SMALL_DIGEST
