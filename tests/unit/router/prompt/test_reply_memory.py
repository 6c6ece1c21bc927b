"""The reply memory against a dict, and what it must not find."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from samovar.router.prompt.reply_memory import KnownText, Owner, ReplyMemory

TENANTS = st.sampled_from(["a", "b"])
TEXTS = st.text(alphabet="xyé", max_size=4)
BY: dict[str, Any] = {"owner": Owner("a", b"s"), "forgets": 0}
SESSIONS = st.sampled_from([b"1", b"2"])
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=5)


def test_finds_the_longest_known_beginning_of_the_same_tenant() -> None:
    memory = ReplyMemory(1 << 20)
    memory.remember("a", "U1 ", [1, 2], "hi", [3], **BY)
    memory.remember("a", "U1 hi U2 ", [1, 2, 3, 4], "hi", [5], **BY)
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
    memory.remember("a", "p", [1] * 50, "r", [2], **BY)
    assert len(memory) == 0
    memory.check_integrity()


def test_the_least_recently_used_goes_first() -> None:
    memory = ReplyMemory(2900)
    memory.remember("a", "1", [1], "r", [2], **BY)
    memory.remember("a", "2", [1], "r", [2], **BY)
    assert memory.match("a", "1r", ["r"]) is not None
    memory.remember("a", "3", [1], "r", [2], **BY)
    assert memory.match("a", "1r", ["r"]) is not None
    assert memory.match("a", "2r", ["r"]) is None
    memory.check_integrity()


def kept(memory: ReplyMemory) -> set[str]:
    return {text for text in "1234" if memory.match("salt", f"{text}r", ["r"]) is not None}


def filled() -> ReplyMemory:
    """Replies 1 and 2 of two sessions of tenant a, under two salts of one; 3 of a's third, 4 of b."""
    memory = ReplyMemory(1 << 20)
    for text, owner in (("1", Owner("a", b"1")), ("2", Owner("a", b"2")), ("3", Owner("a", b"3"))):
        memory.remember("salt", text, [1], "r", [2], owner=owner, forgets=0)
    memory.remember("salt", "4", [1], "r", [2], owner=Owner("b", b"1"), forgets=0)
    memory.remember("other salt", "1", [1], "r", [2], owner=Owner("a", b"1"), forgets=0)
    return memory


def test_g12_a_session_a_tenant_or_everybody_can_be_forgotten() -> None:
    memory = filled()
    assert memory.forget("a", [b"1", b"2"]) == 3  # under both salts
    assert kept(memory) == {"3", "4"}
    memory.check_integrity()
    memory = filled()
    assert memory.forget("a") == 4
    assert kept(memory) == {"4"}
    memory.check_integrity()
    assert memory.forget() == 1
    assert len(memory) == 0
    assert memory.bytes_used == 0
    memory.check_integrity()


def test_g12_a_request_from_before_a_clear_does_not_bring_its_reply_back() -> None:
    memory = ReplyMemory(1 << 20)
    before = memory.forgets
    memory.forget("a")
    memory.remember("salt", "1", [1], "r", [2], owner=Owner("a", b"s"), forgets=before)
    assert kept(memory) == set()
    memory.remember("salt", "2", [1], "r", [2], owner=Owner("b", b"s"), forgets=before)
    memory.remember("salt", "3", [1], "r", [2], owner=Owner("a", b"s"), forgets=memory.forgets)
    assert kept(memory) == {"2", "3"}
    memory.forget()
    memory.remember("salt", "1", [1], "r", [2], owner=Owner("b", b"s"), forgets=before)
    assert kept(memory) == set()
    memory.check_integrity()


def test_a_clear_of_one_session_costs_the_turns_of_no_other() -> None:
    """An ingress hears of one deletion several times: from the others, and late."""
    memory = ReplyMemory(1 << 20)
    before = memory.forgets
    for _ in range(4):
        memory.forget("a", [b"s"])
    memory.remember("salt", "1", [1], "r", [2], owner=Owner("a", b"s"), forgets=before)
    memory.remember("salt", "2", [1], "r", [2], owner=Owner("a", b"t"), forgets=before)
    memory.remember("salt", "3", [1], "r", [2], owner=Owner("b", b"s"), forgets=before)
    assert kept(memory) == {"2", "3"}
    memory.check_integrity()


class MemoryMachine(RuleBasedStateMachine):
    """A dict that never forgets: whatever the memory finds must be in it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = ReplyMemory(6000)
        self.truth: dict[tuple[str, str], list[tuple[Owner, list[int]]]] = {}

    @rule(tenant=TENANTS, prompt=TEXTS, reply=TEXTS, prompt_ids=IDS, reply_ids=IDS, session=SESSIONS)
    def remember(
        self,
        tenant: str,
        prompt: str,
        reply: str,
        prompt_ids: list[int],
        reply_ids: list[int],
        session: bytes,
    ) -> None:
        owner, forgets = Owner(tenant, session), self.memory.forgets
        self.memory.remember(tenant, prompt, prompt_ids, reply, reply_ids, owner=owner, forgets=forgets)
        self.truth.setdefault((tenant, prompt + reply), []).append((owner, prompt_ids + reply_ids))
        if reply:
            found = self.memory.match(tenant, prompt + reply, [reply])
            assert found == KnownText(prompt_ids + reply_ids, len(prompt + reply))

    @rule(tenant=TENANTS, sessions=st.none() | st.sets(SESSIONS))
    def forget(self, tenant: str, sessions: set[bytes] | None) -> None:
        self.memory.forget(tenant, sessions)
        for known in self.truth.values():
            known[:] = [
                (owner, ids)
                for owner, ids in known
                if owner.tenant != tenant or (sessions is not None and owner.session not in sessions)
            ]

    @rule(tenant=TENANTS, rendered=st.text(alphabet="xyé", max_size=12), replies=st.lists(TEXTS, max_size=3))
    def match(self, tenant: str, rendered: str, replies: list[str]) -> None:
        found = self.memory.match(tenant, rendered, replies)
        if found is not None:
            text = rendered[: found.chars]
            assert any(text.endswith(reply) for reply in replies if reply)
            assert len(text) == found.chars
            # Several, when the same text was cut into prompt and reply in several places.
            assert found.token_ids in [ids for _, ids in self.truth[tenant, text]]

    @invariant()
    def books_are_right(self) -> None:
        self.memory.check_integrity()
        assert self.memory.bytes_used <= 6000


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True)
