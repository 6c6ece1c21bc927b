"""Imports with the garbage collector paused."""

from __future__ import annotations

import gc

import pytest

from configs.imports import collector_paused


def test_the_collector_is_paused_inside_and_as_before_afterwards() -> None:
    for was_on in (True, False):
        gc.enable() if was_on else gc.disable()
        try:
            with collector_paused():
                assert not gc.isenabled()
                with collector_paused():
                    assert not gc.isenabled()
                assert not gc.isenabled()
            assert gc.isenabled() == was_on
            with pytest.raises(ImportError), collector_paused():
                raise ImportError
            assert gc.isenabled() == was_on
        finally:
            gc.enable()
