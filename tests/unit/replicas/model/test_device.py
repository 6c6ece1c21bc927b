"""The device that a model runs on."""

from __future__ import annotations

import pytest
import torch

from configs.settings import EngineSettings
from replicas.messages import ModelRefused
from replicas.model.device import choose_device


def test_cudnns_attention_is_off_where_a_gpu_is_used_and_untouched_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", calls.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choose_device(EngineSettings(device="cpu")) == torch.device("cpu")
    assert calls == []
    for asked in ("auto", "cuda"):
        assert choose_device(EngineSettings(device=asked)) == torch.device("cuda", 1)
    assert calls == [False, False]


def test_a_gpu_that_is_asked_for_and_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(EngineSettings()) == torch.device("cpu")
    with pytest.raises(ModelRefused, match=r"engine\.device"):
        choose_device(EngineSettings(device="cuda"))
