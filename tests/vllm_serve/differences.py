"""What differs for who is served by vLLM and not by our engine: the table "Answers" of docs/engines.md.

All else is the same tests for both. `tests/unit/replicas/vllm/test_differences.py` compares the page with
this table, and this table with the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DIFFERENCES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "greedy text after a failover": ("the same", "the same, as far as vLLM is the same with itself"),
        "drawn text after a failover": (
            "the same: draws depend on seed and position",
            "another continuation: vLLM's generator is not moved on",
        ),
        "exact mode, drafts, audits of restored blocks": ("yes", "no"),
        "a block at a prompt's end that is not full": ("comes back from a tier", "computed again"),
        "erasing": (
            "pages and records are gone",
            "records are gone; pages in vLLM's pool are unreachable until they are overwritten",
        ),
        "bytes of a session in the pool": ("counted", "`null`: vLLM does not say whose its pages are"),
        "LoRA adapters (`engine.vllm.adapters`)": ("no", "models of their own, with caches of their own"),
    }
)
"""What is asked -> ours, vLLM's."""
