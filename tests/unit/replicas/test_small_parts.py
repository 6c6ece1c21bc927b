"""Block keys, the sizing of a pool, and the joining of deltas."""

from __future__ import annotations

import hashlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.cache_tiers.blocks.extent import ROOT, block_key, chain_keys, namespace_digest
from samovar.replicas.kv.kv_pool import PoolTooSmall, free_memory_bytes, plan_pages
from samovar.replicas.messages import Admitted, Delta
from samovar.replicas.serving.served import merge_deltas

NAMESPACE = namespace_digest(b"model")


class TestKeys:
    def test_is_the_documented_digest(self) -> None:
        ids = b"".join(i.to_bytes(4, "little") for i in (1, 70000, 3))
        assert block_key(NAMESPACE, ROOT, (1, 70000, 3)) == hashlib.sha256(NAMESPACE + ROOT + ids).digest()

    @given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(1, 5))
    def test_those_of_a_chain_are_each_behind_the_one_before(self, ids: list[int], block_tokens: int) -> None:
        parent, expected = ROOT, []
        for start in range(0, len(ids) - block_tokens + 1, block_tokens):
            parent = block_key(NAMESPACE, parent, ids[start : start + block_tokens])
            expected.append(parent)
        assert chain_keys(NAMESPACE, ROOT, ids, block_tokens) == expected
        assert chain_keys(NAMESPACE, ROOT, array("I", ids), block_tokens) == expected

    @pytest.mark.guarantee("G3", "F13")
    @given(st.lists(st.binary(max_size=8), max_size=4), st.lists(st.binary(max_size=8), max_size=4))
    def test_namespaces_differ_when_their_parts_do(self, one: list[bytes], other: list[bytes]) -> None:
        assert (namespace_digest(*one) == namespace_digest(*other)) == (one == other)

    def test_bad_input(self) -> None:
        with pytest.raises(ValueError, match="32 bytes"):
            block_key(b"short", ROOT, (1,))
        with pytest.raises(OverflowError):
            block_key(NAMESPACE, ROOT, (-1,))


class TestPlan:
    SIZES = {"block_bytes": 1000, "block_tokens": 16, "context_tokens_max": 8192, "bytes_max": None}

    def test_share_of_free_memory(self) -> None:
        plan = plan_pages(free_bytes=10_000_000, fraction=0.5, replicas=2, **self.SIZES)  # type: ignore[arg-type]
        assert (plan.pages, plan.pool_bytes, plan.context_tokens_max) == (2500, 2_500_000, 8192)

    def test_upper_bound(self) -> None:
        sizes = {**self.SIZES, "bytes_max": 100_000}
        assert plan_pages(free_bytes=10**9, fraction=0.5, replicas=1, **sizes).pages == 100  # type: ignore[arg-type]

    def test_a_small_pool_shortens_the_context(self) -> None:
        plan = plan_pages(free_bytes=11_000, fraction=1.0, replicas=1, **self.SIZES)  # type: ignore[arg-type]
        assert plan.context_tokens_max == 160  # 10 pages and the trash page

    def test_too_small_says_what_to_change(self) -> None:
        with pytest.raises(PoolTooSmall, match=r"engine\.pool_memory_fraction"):
            plan_pages(free_bytes=2000, fraction=1.0, replicas=1, **self.SIZES)  # type: ignore[arg-type]

    def test_this_machine_has_memory(self) -> None:
        import torch

        assert free_memory_bytes(torch.device("cpu")) > 2**20


def test_merged_deltas_keep_text_order_and_ends() -> None:
    admitted = Admitted("r", 0, 0.0)
    events = [
        admitted,
        Delta(0, "a", (1,)),
        Delta(1, "x", (9,)),
        Delta(0, "b", (2,)),
        Delta(0, "", (3,), finish_reason="stop"),
        Delta(1, "y", (8,)),
    ]
    assert merge_deltas(events) == [
        admitted,
        Delta(0, "ab", (1, 2, 3), finish_reason="stop"),
        Delta(1, "xy", (9, 8)),
    ]
