"""Searches of random histories are short in the gate, and whole where guarantees are shown."""

from __future__ import annotations

import pytest

from tests.support.amounts import examples, seeds


def test_the_gate_searches_a_third_and_proofs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESTS_SLOW", raising=False)
    assert (examples(150), examples(2)) == (50, 1)
    monkeypatch.setenv("TESTS_SLOW", "1")
    assert (examples(150), examples(2)) == (150, 2)


def test_every_seed_is_a_case_and_the_rest_is_slow() -> None:
    quick, slow = seeds(12)[:4], seeds(12)[4:]
    assert quick == [0, 1, 2, 3]
    assert [case.values for case in slow] == [(number,) for number in range(4, 12)]
    assert {mark.name for case in slow for mark in case.marks} == {"slow"}
