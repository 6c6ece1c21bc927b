"""Shared by all tests: one torch thread (two cores are shared), and models made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs.settings import ModelSettings
from replicas.model_store import ensure_model
from tests.tiny_models import make_tiny_model

pytest_plugins = ["tests.prove"]  # it knows the marker `guarantee`


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, converted into the user's cache as `samovar serve` does it."""
    return ensure_model(ModelSettings())
