"""What all tests of the router have: no bound on what a busy machine takes to remember a reply."""

from __future__ import annotations

import pytest

from samovar.router.generation import generation


@pytest.fixture(autouse=True)
def remembers_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "REMEMBER_S", 120.0)
