"""F29: the predictor's file is corrupt, a stranger's or gone: it says why, starts cold, and goes on."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from samovar.cache_tiers.forecast import learner as predictor_file
from samovar.cache_tiers.forecast.learner import (
    FILE_BYTES_MAX,
    VERSION,
    BadState,
    decode,
    encode,
    restore,
    save,
)
from samovar.cache_tiers.forecast.predictor import Predictor, State
from samovar.cache_tiers.forecast.turns import COLD, Turn, resume_probability, resume_within
from samovar.cache_tiers.media.files import Syscalls
from samovar.configs.atomic_file import atomic_write
from samovar.configs.sections import PredictorSettings
from tests.support.nodes.power_model import RecordingCalls, cut_power
from tests.support.turn_streams import Rule, stream

SETTINGS = PredictorSettings()


@pytest.fixture(scope="module")
def taught() -> Predictor:
    predictor = Predictor(SETTINGS)
    for turn, _ in stream(Rule(), seed=1, end_s=600.0):
        predictor.arrived(turn.session, turn.started_s)
        predictor.ended(turn)
    assert predictor.source == "model"
    return predictor


def same(first: State, second: State) -> bool:
    return all(np.array_equal(first[name], second[name]) for name in first)


def assert_cold(predictor: Predictor) -> None:
    """Nothing of the file is in it, and the latest used are worth most."""
    assert same(predictor.state(), Predictor(SETTINGS).state())
    assert predictor.source == "cold"
    curves = []
    for number in range(20):
        predictor.arrived(number, 10.0 * number)
        curves.append(predictor.ended(Turn(number, 10.0 * number, 10.0 * number + 1.0, 100, 10)))
    assert all(np.array_equal(curve, COLD) for curve in curves)
    idle_s = 300.0 - 10.0 * np.arange(20)
    worth = resume_probability(np.stack(curves), idle_s, 60.0)
    assert (np.diff(worth) > -1e-12).all()  # equal within a bin
    assert worth[-1] > 2 * worth[0]
    predictor.check_integrity()


def test_f29_what_was_learned_comes_back(taught: Predictor, tmp_path: Path) -> None:
    path = tmp_path / "predictor.bin"
    save(path, taught)
    assert path.stat().st_mode & 0o777 == 0o600
    fresh = Predictor(SETTINGS)
    assert restore(path, fresh) is None
    assert same(fresh.state(), taught.state())
    assert fresh.source == "model"
    turn = Turn("new", 600.0, 601.0, 8000, 100)
    taught.traffic().recount()  # its curves are a few turns old
    said, was = fresh.ended(turn), taught.ended(turn)
    for horizon_s in (30.0, 300.0, 3600.0):
        for idle_s in (0.0, 60.0, 500.0):
            wanted = pytest.approx(resume_within(was, idle_s, horizon_s), abs=0.01)
            assert resume_within(said, idle_s, horizon_s) == wanted
    fresh.check_integrity()


def altered(name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Predictor], bytes]:
    """A file that is whole and signed, with one array changed or left out."""

    def make(predictor: Predictor) -> bytes:
        state = predictor.state()
        changed = change(state[name])
        if changed is None:
            del state[name]
        else:
            state[name] = changed
        predictor_like = Predictor(SETTINGS)
        predictor_like.state = lambda: state  # type: ignore[method-assign]
        return encode(predictor_like)

    return make


def put(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.flat[array.size // 2] = value
        return array

    return change


def cut(share: float) -> Callable[[Predictor], bytes]:
    return lambda predictor: encode(predictor)[: int(share * len(encode(predictor)))]


def another_version(predictor: Predictor) -> bytes:
    data = bytearray(encode(predictor))
    data[8] += 1
    return bytes(data)


BROKEN: dict[str, tuple[Callable[[Predictor], bytes], str]] = {
    "empty": (lambda _: b"", "truncated"),
    "a few bytes": (lambda _: b"smvr", "truncated"),
    "garbage": (lambda _: random.Random(0).randbytes(50_000), "another kind"),
    "text": (lambda _: b"{}\n" * 1000, "another kind"),
    "half": (cut(0.5), "truncated"),
    "nearly whole": (cut(0.9999), "truncated"),
    "too long": (lambda predictor: encode(predictor) + b"\0", "too long"),
    "another version": (another_version, f"version {VERSION + 1}"),
    "huge": (lambda _: bytes(FILE_BYTES_MAX + 1), "too large"),
    "nan": (altered("weights", put(np.nan)), "not finite"),
    "inf": (altered("weights", put(-np.inf)), "not finite"),
    "absurd weight": (altered("weights", put(1e30)), "beyond reason"),
    "nan in the counts": (altered("counts", put(np.nan)), "not finite"),
    "negative counts": (altered("counts", put(-1.0)), "negative"),
    "nan in the sums": (altered("sums", put(np.nan)), "not finite"),
    "negative squares": (altered("sums", lambda sums: -np.abs(sums) - 1.0), "negative"),
    "negative moments": (altered("weights", lambda weights: -np.abs(weights) - 1.0), "negative"),
    "negative steps": (altered("steps", lambda steps: -steps - 1), "negative"),
    "shape": (altered("weights", lambda weights: weights[..., :-1]), "not float32"),
    "dtype": (altered("weights", lambda weights: weights.astype(np.float64)), "not float32"),
    "one array less": (altered("counts", lambda _: None), "other arrays"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_f29_a_file_that_is_not_believed_says_why(kind: str, taught: Predictor, tmp_path: Path) -> None:
    make, reason = BROKEN[kind]
    path = tmp_path / "predictor.bin"
    path.write_bytes(make(taught))
    predictor = Predictor(SETTINGS)
    said = restore(path, predictor)
    assert said is not None
    assert reason in said
    assert_cold(predictor)
    save(path, taught)
    assert restore(path, Predictor(SETTINGS)) is None, "the next save puts it right"


def test_f29_bits_that_flipped_are_found_wherever_they_are(taught: Predictor) -> None:
    data = encode(taught)
    rng = random.Random(2)
    for at in [*range(0, 60, 3), *(rng.randrange(len(data)) for _ in range(100))]:
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        with pytest.raises(BadState):
            decode(bytes(flipped))


def test_f29_signed_garbage_is_no_tensors(monkeypatch: pytest.MonkeyPatch, taught: Predictor) -> None:
    """The checksum keeps out accidents, not people."""
    rng = random.Random(3)
    for size in (0, 7, 8, 100, 10_000):
        payload = rng.randbytes(size)
        with monkeypatch.context() as patched:
            patched.setattr(predictor_file, "save_tensors", lambda _, payload=payload: payload)
            data = encode(taught)
        with pytest.raises(BadState, match="no tensors"):
            decode(data)


def test_f29_what_is_no_file_is_not_read(taught: Predictor, tmp_path: Path) -> None:
    predictor = Predictor(SETTINGS)
    assert restore(tmp_path / "nothing.bin", predictor) == "no file"
    assert restore(tmp_path / "nowhere" / "nothing.bin", predictor) == "no file"
    whole = tmp_path / "whole.bin"
    save(whole, taught)
    (tmp_path / "link.bin").symlink_to(whole)
    os.mkfifo(tmp_path / "pipe.bin")
    (tmp_path / "folder.bin").mkdir()
    for name in ("link.bin", "pipe.bin", "folder.bin"):
        assert "cannot be read" in (restore(tmp_path / name, predictor) or ""), name
    assert_cold(predictor)


class FailingCalls(Syscalls):
    """The `fail_at`th call of those that change something fails, with no room left."""

    def __init__(self, fail_at: int) -> None:
        self.left = fail_at

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, "no room")

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._count()
        return super().open(path, flags, mode)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._count()
        return super().pwrite(fd, data[:20_000], offset)

    def fsync(self, fd: int) -> None:
        self._count()
        super().fsync(fd)

    def rename(self, old: str, new: str) -> None:
        self._count()
        super().rename(old, new)


class RemovesNothing(Syscalls):
    """A disk that fails, and keeps what it has."""

    def fsync(self, fd: int) -> None:
        raise OSError(errno.EIO, "it fails")

    def unlink(self, path: str) -> None:
        raise OSError(errno.EIO, "it fails")


@pytest.mark.guarantee("G10")
def test_f29_what_failed_writes_have_left_goes_with_the_next(taught: Predictor, tmp_path: Path) -> None:
    path = tmp_path / "predictor.bin"
    for _ in range(3):
        with pytest.raises(OSError, match="it fails"):
            save(path, taught, RemovesNothing())
    assert len(os.listdir(tmp_path)) == 3
    save(path, taught)
    assert os.listdir(tmp_path) == [path.name]


def test_f29_a_write_that_fails_leaves_the_old_file_or_the_new(taught: Predictor, tmp_path: Path) -> None:
    path = tmp_path / "predictor.bin"
    old, new = encode(Predictor(SETTINGS)), encode(taught)
    failures = 0
    for fail_at in range(1, 100):
        atomic_write(path, old)
        try:
            atomic_write(path, new, calls=FailingCalls(fail_at))
        except OSError:
            failures += 1
            assert path.read_bytes() in (old, new)
        else:
            break
        assert os.listdir(tmp_path) == [path.name]
    assert failures > 10
    assert path.read_bytes() == new


def test_f29_a_power_cut_leaves_the_old_file_or_the_new(taught: Predictor, tmp_path: Path) -> None:
    old, new = encode(Predictor(SETTINGS)), encode(taught)
    rng = random.Random(4)
    found = set()
    for number in range(40):
        root = tmp_path / f"disk {number}"
        root.mkdir()
        calls = RecordingCalls(root)
        atomic_write(root / "predictor.bin", old, calls=calls)
        stop = CutCalls(root, calls, rng.randrange(1, 6))
        with suppress(PowerCut):
            atomic_write(root / "predictor.bin", new, calls=stop)
        after = tmp_path / f"after {number}"
        cut_power(stop, after, rng)
        data = (after / "predictor.bin").read_bytes()
        assert data in (old, new)
        found.add(data)
        predictor = Predictor(SETTINGS)
        assert restore(after / "predictor.bin", predictor) is None
        assert os.listdir(after) == ["predictor.bin"], "what was cut off is swept away"
    assert found == {old, new}


class PowerCut(BaseException):
    """Nothing runs after it: no handler either."""


class CutCalls(RecordingCalls):
    """Goes on with the disk of `before`; the power goes at its `cut_at`th call."""

    def __init__(self, root: Path, before: RecordingCalls, cut_at: int) -> None:
        super().__init__(root)
        self.root = before.root
        self._left = cut_at

    def _count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            raise PowerCut

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._count()
        return super().pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        self._count()
        super().fsync(fd)

    def rename(self, old: str, new: str) -> None:
        self._count()
        super().rename(old, new)

    def unlink(self, path: str) -> None:
        if self._left > 0:
            super().unlink(path)
