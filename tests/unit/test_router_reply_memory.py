"""The reply memory against a dict, and what it must not find."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.reply_memory import KnownText, ReplyMemory

TENANTS = st.sampled_from(["a", "b"])
TEXTS = st.text(alphabet="xyé", max_size=4)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=5)


def test_finds_the_longest_known_beginning_of_the_same_tenant() -> None:
    memory = ReplyMemory(1 << 20)
    memory.remember("a", "U1 ", [1, 2], "hi", [3])
    memory.remember("a", "U1 hi U2 ", [1, 2, 3, 4], "hi", [5])
    rendered = "U1 hi U2 hi U3 "
    assert memory.match("a", rendered, ["hi", "hi"]) == KnownText([1, 2, 3, 4, 5], len("U1 hi U2 hi"))
    assert memory.match("a", "U1 hi U9 ", ["hi"]) == KnownText([1, 2, 3], len("U1 hi"))
    assert memory.match("b", rendered, ["hi"]) is None
    assert memory.match("a", rendered, ["ho"]) is None
    assert memory.match("a", "X1 hi U2 hi U3 ", ["hi"]) is None  # edited before the reply
    memory.check_integrity()


@pytest.mark.parametrize("bytes_max", [0, 100])
def test_what_does_not_fit_is_not_kept(bytes_max: int) -> None:
    memory = ReplyMemory(bytes_max)
    memory.remember("a", "p", [1] * 50, "r", [2])
    assert len(memory) == 0
    memory.check_integrity()


def test_the_least_recently_used_goes_first() -> None:
    memory = ReplyMemory(2500)
    memory.remember("a", "1", [1], "r", [2])
    memory.remember("a", "2", [1], "r", [2])
    assert memory.match("a", "1r", ["r"]) is not None
    memory.remember("a", "3", [1], "r", [2])
    assert memory.match("a", "1r", ["r"]) is not None
    assert memory.match("a", "2r", ["r"]) is None
    memory.check_integrity()


class MemoryMachine(RuleBasedStateMachine):
    """A dict that never forgets: whatever the memory finds must be in it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = ReplyMemory(6000)
        self.truth: dict[tuple[str, str], list[list[int]]] = {}

    @rule(tenant=TENANTS, prompt=TEXTS, reply=TEXTS, prompt_ids=IDS, reply_ids=IDS)
    def remember(
        self, tenant: str, prompt: str, reply: str, prompt_ids: list[int], reply_ids: list[int]
    ) -> None:
        self.memory.remember(tenant, prompt, prompt_ids, reply, reply_ids)
        self.truth.setdefault((tenant, prompt + reply), []).append(prompt_ids + reply_ids)
        if reply:
            found = self.memory.match(tenant, prompt + reply, [reply])
            assert found == KnownText(prompt_ids + reply_ids, len(prompt + reply))

    @rule(tenant=TENANTS, rendered=st.text(alphabet="xyé", max_size=12), replies=st.lists(TEXTS, max_size=3))
    def match(self, tenant: str, rendered: str, replies: list[str]) -> None:
        found = self.memory.match(tenant, rendered, replies)
        if found is not None:
            text = rendered[: found.chars]
            assert any(text.endswith(reply) for reply in replies if reply)
            assert len(text) == found.chars
            # Several, when the same text was cut into prompt and reply in several places.
            assert found.token_ids in self.truth[tenant, text]

    @invariant()
    def books_are_right(self) -> None:
        self.memory.check_integrity()
        assert self.memory.bytes_used <= 6000


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
