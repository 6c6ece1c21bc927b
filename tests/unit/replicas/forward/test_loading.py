"""Weights that go to a device by lanes are the same weights, tied where they were tied."""

from __future__ import annotations

import errno
import threading

import pytest
import torch

from samovar.cache_tiers.blocks import Bytes
from samovar.replicas.forward import loading
from samovar.replicas.forward.loading import move_weights

CPU = torch.device("cpu")


class LateLane:
    """A lane whose copies are over no sooner than they are waited for, out of memory that is used again."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self._memory = torch.zeros(loading.PIECE_BYTES, dtype=torch.uint8)
        self._begun: tuple[int, torch.Tensor] | None = None
        self._user: int | None = None

    def send(self, piece: Bytes, target: torch.Tensor) -> None:
        assert self._user in (None, threading.get_ident()), "two threads use one lane"
        self._user = threading.get_ident()
        self.wait()
        self._memory[: piece.nbytes] = torch.from_numpy(piece)
        self._begun = piece.nbytes, target

    def wait(self) -> None:
        if self._begun is not None:
            nbytes, target = self._begun
            target.copy_(self._memory[:nbytes])
        self._begun = self._user = None


def model(dtype: torch.dtype) -> torch.nn.Module:
    """A model with tied weights, a tensor of one number, and one that lies across its memory."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Embedding(60, 50), torch.nn.Linear(50, 60, bias=True))
    made[1].weight = made[0].weight
    made.register_parameter("one", torch.nn.Parameter(torch.randn(1)))
    made.register_parameter("across", torch.nn.Parameter(torch.randn(30, 40).T))
    return made.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece_bytes", [7, 1000, 1 << 20])
def test_moved_weights_are_the_same_and_tied(
    dtype: torch.dtype, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PIECE_BYTES", piece_bytes)
    moved, wanted = model(dtype), model(dtype)
    before = {name: one.data_ptr() for name, one in moved.named_parameters()}
    LateLane.made = 0
    move_weights(moved, CPU, LateLane)
    assert LateLane.made == loading.LANES
    for (name, one), (_, other) in zip(moved.named_parameters(), wanted.named_parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.dtype == dtype, name
        assert one.data_ptr() != before[name], "it has stayed where it was"
    assert moved[0].weight is moved[1].weight  # type: ignore[index]


def test_without_pinned_memory_and_on_an_old_kernel_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> LateLane:
        raise RuntimeError("no memory can be pinned")

    def too_old(start: int, nbytes: int) -> None:
        raise OSError(errno.EINVAL, "Linux 5.14")

    moved = model(torch.float32)
    move_weights(moved, CPU, refused)
    assert "without pinned memory: no memory can be pinned" in caplog.text
    monkeypatch.setattr(loading, "populate_pages", too_old)
    move_weights(moved, CPU, LateLane)
    for one, other in zip(moved.parameters(), model(torch.float32).parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_the_device_reports_is_raised() -> None:
    class Broken(LateLane):
        def wait(self) -> None:
            raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        move_weights(model(torch.float32), CPU, Broken)
