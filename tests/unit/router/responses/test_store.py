"""Stored responses: bounds of each tenant, what was cleared stays cleared."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from samovar.router.responses.store import (
    ENTRY_OVERHEAD_BYTES,
    ITEM_OVERHEAD_BYTES,
    ResponseStore,
    StoredResponse,
)

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "late", "get", "delete", "forget", "clear"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 5),
    ),
    max_size=40,
)


@given(OPERATIONS)
def test_each_tenant_stays_within_its_bounds(operations: list[tuple[str, str, int]]) -> None:
    store = ResponseStore(3, 3 * (ENTRY_OVERHEAD_BYTES + ITEM_OVERHEAD_BYTES + 30))
    for what, tenant, number in operations:
        answer = json.dumps({"output": [{"id": f"i{number}"}]}).encode()
        stored = StoredResponse(answer, b"y" * number, bytes([number % 2]), (f"i{number}",))
        before = len(store)
        name = f"r{number}"
        if what == "put":
            assert store.put(tenant, name, stored, forgets=store.forgets)
            assert store.get(tenant, name) == stored
            assert store.item(tenant, f"i{number}", {}) == {"id": f"i{number}"}
        elif what == "late":
            begun = store.forgets
            gone = store.forget(tenant, [bytes([number % 2])])
            assert not store.put(tenant, name, stored, forgets=begun)
            assert len(store) == before - gone
            other = replace(stored, session=bytes([1 - number % 2]))
            assert store.put(tenant, name, other, forgets=begun), "another session is not concerned"
        elif what == "get":
            store.get(tenant, name)
        elif what == "delete":
            assert store.delete(tenant, name) == (len(store) == before - 1)
            assert store.get(tenant, name) is None
            assert store.item(tenant, f"i{number}", {}) is None
        elif what == "forget":
            assert store.forget(tenant, [bytes([number % 2])]) == before - len(store)
        else:
            assert store.forget(tenant, None) == before - len(store)
            assert store.get(tenant, name) is None
        store.check_integrity()


def test_a_response_that_is_too_large_or_none_at_all_are_not_kept() -> None:
    stored = StoredResponse(b"x" * 100, b"", b"")
    assert not ResponseStore(3, 100).put("a", "r", stored, forgets=0)
    assert not ResponseStore(0, 10_000).put("a", "r", stored, forgets=0)
