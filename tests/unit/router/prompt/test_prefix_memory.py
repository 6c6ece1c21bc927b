"""The memory of prompts' prefixes: what it says of a change, of which prompts, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from samovar.router.prompt.prefix import (
    KEY_BYTES,
    PrefixLeft,
    PrefixMemory,
    PromptDigest,
    PromptPart,
    digest_of,
    ids_of,
)
from samovar.router.prompt.reply_memory import Owner

KEY = bytes(range(KEY_BYTES))
ME = Owner("a", b"1")
PART_TOKENS = 20


def ids_in(word: str) -> list[int]:
    """20 ids that differ from those of any other word."""
    return [sum(map(ord, word)) * 100 + place for place in range(PART_TOKENS)]


def prompt(system: str, *messages: str, tail: Sequence[int] = (7, 8)) -> PromptDigest:
    """A prompt of 20 tokens a part, and its end."""
    words = [system, *messages]
    ids = [token_id for word in words for token_id in ids_in(word)]
    names = ["system", *(f"messages[{number}]" for number in range(1, len(words)))]
    parts = [
        PromptPart(name, word.encode(), PART_TOKENS * number, PART_TOKENS * (number + 1))
        for number, (name, word) in enumerate(zip(names, words, strict=True))
    ]
    return digest_of(ids_of([*ids, *tail]), parts, KEY)


def after(memory: PrefixMemory, *prompts: PromptDigest) -> PrefixLeft | None:
    left = None
    for each in prompts:
        left = memory.follow("salt", ME, each)
        memory.check_integrity()
    return left


FIRST = prompt("S", "u1", "a1", "u2")


@pytest.mark.parametrize(
    ("now", "token", "part"),
    [
        (prompt("T", "u1", "a1", "u2"), 0, "system"),
        (prompt("T", "u1", "a1", "u2", "a2", "u3"), 0, "system"),
        (prompt("S", "u1", "x", "u2"), 40, "messages[2]"),
        (prompt("S", "u1", "a1", "x", "a2"), 60, "messages[3]"),
        (prompt("S", "a1", "u2", "a2", "u3"), 20, "messages[1]"),  # the front of the history was cut
        (prompt("S", "x", "u1", "a1", "u2"), 20, "messages[1]"),
    ],
)
def test_the_token_and_the_part_that_changed_are_named(now: PromptDigest, token: int, part: str) -> None:
    left = after(PrefixMemory(4, 1 << 20), FIRST, now)
    assert left is not None
    assert (left.token, left.part) == (token, part)
    assert left.token < left.until <= left.token + 16
    assert str(left) == f"prompt changed at token {token} in {part}"
    assert left.kind == part.partition("[")[0]


@pytest.mark.parametrize(
    "now",
    [
        FIRST,
        prompt("S", "u1", "a1", "u2", "a2", "u3", tail=(7, 8)),
        prompt("S", "u1", "a1"),  # back to an earlier turn
        prompt("S", "u1", "a1", "u2", tail=(9, 9)),  # no whole block differs
        prompt("S", "x"),  # another conversation behind the same system prompt
        prompt("T", "u1"),  # a title of the first message
        prompt("T", "x u1 a1 u2"),
        prompt("T", "u2"),
    ],
)
def test_nothing_is_said_of_what_goes_on_or_belongs_to_nothing(now: PromptDigest) -> None:
    assert after(PrefixMemory(4, 1 << 20), FIRST, now) is None


def test_tokens_that_changed_under_the_same_text_are_named_by_their_place() -> None:
    parts = [PromptPart("system", b"s", 4, 20), PromptPart("messages[1]", b"u", 24, 80)]
    ids = list(range(100))
    for place, part in ((1, "system"), (17, "system"), (50, "messages[1]"), (83, "messages[1]")):
        memory = PrefixMemory(4, 1 << 20)
        changed = [*ids[:place], 1000, *ids[place + 1 :]]
        left = after(memory, digest_of(ids_of(ids), parts, KEY), digest_of(ids_of(changed), parts, KEY))
        assert left is not None
        assert left.part == part
        assert left.token <= place < left.until


def test_a_prompt_is_compared_with_the_one_it_continues_among_the_last_few() -> None:
    memory = PrefixMemory(3, 1 << 20)
    side = [prompt("T", "title u1"), prompt("U", "tags u1")]
    assert after(memory, prompt("S", "u1"), *side, prompt("S", "u1", "a1", "u2")) is None
    assert after(memory, *side, prompt("S", "u1", "x", "u2", "a2")) is not None
    # A conversation holds one place however many turns it has; further prompts take the oldest one's.
    assert after(memory, prompt("V", "1"), prompt("V", "2"), prompt("V", "3")) is None
    assert after(memory, prompt("S", "u1", "y", "u2", "a2")) is None, "forgotten by now"


def test_salts_and_sessions_are_apart() -> None:
    memory = PrefixMemory(4, 1 << 20)
    memory.follow("salt", ME, FIRST)
    changed = prompt("T", "u1", "a1", "u2", "a2")
    assert memory.follow("other", ME, changed) is None
    assert memory.follow("salt", Owner("a", b"2"), changed) is None
    assert memory.follow("salt", ME, changed) is not None


@pytest.mark.parametrize(("prompts_max", "bytes_max"), [(0, 1 << 20), (4, 0), (4, 100)])
def test_what_does_not_fit_is_not_kept(prompts_max: int, bytes_max: int) -> None:
    memory = PrefixMemory(prompts_max, bytes_max)
    assert after(memory, FIRST, prompt("T", "u1", "a1", "u2", "a2")) is None
    assert (len(memory), memory.bytes_used) == (0, 0)


def test_g12_a_session_a_tenant_or_all_can_be_forgotten() -> None:
    def filled() -> PrefixMemory:
        memory = PrefixMemory(4, 1 << 20)
        for owner in (Owner("a", b"1"), Owner("a", b"2"), Owner("b", b"3")):
            for salt in ("salt", "other"):
                memory.follow(salt, owner, FIRST)
        return memory

    for tenant, sessions, kept in (("a", [b"1", b"3"], 4), ("a", None, 2), (None, None, 0), ("c", None, 6)):
        memory = filled()
        memory.forget(tenant, sessions)
        memory.check_integrity()
        assert len(memory) == kept


def test_no_text_and_no_ids_are_held() -> None:
    """Digests of whole prefixes only: two prompts of the same ids in another order share none of them."""
    one, other = digest_of(ids_of([1, 2, 3] * 8), [], KEY), digest_of(ids_of([3, 2, 1] * 8), [], KEY)
    assert not set(one.prefixes[one.marks].tolist()) & set(other.prefixes[other.marks].tolist())
    keyed = digest_of(ids_of([1, 2, 3] * 8), [], bytes(KEY_BYTES))
    assert not set(one.prefixes[one.marks].tolist()) & set(keyed.prefixes[keyed.marks].tolist())


WORDS = st.lists(st.sampled_from(["u", "v", "w"]), min_size=1, max_size=5)
OWNERS = st.sampled_from([Owner("a", b"1"), Owner("a", b"2"), Owner("b", b"3")])


class MemoryMachine(RuleBasedStateMachine):
    """Whatever is said is true of some prompt of that session."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = PrefixMemory(2, 8000)
        self.seen: dict[Owner, list[list[str]]] = {}

    @rule(owner=OWNERS, system=st.sampled_from("ST"), words=WORDS)
    def follow(self, owner: Owner, system: str, words: list[str]) -> None:
        now = [system, *words]
        left = self.memory.follow("salt", owner, prompt(*now))
        if left is not None:
            same = [self.shared(before, now) for before in self.seen[owner]]
            assert left.token in same
            assert left.part == ("system" if left.token == 0 else f"messages[{left.token // PART_TOKENS}]")
        self.seen.setdefault(owner, []).append(now)

    @staticmethod
    def shared(before: list[str], now: list[str]) -> int:
        pairs = zip(before, now, strict=False)
        return PART_TOKENS * next(
            (place for place, (one, other) in enumerate(pairs) if one != other), min(len(before), len(now))
        )

    @rule(owner=OWNERS)
    def forget(self, owner: Owner) -> None:
        self.memory.forget(owner.tenant, [owner.session])
        self.seen.pop(owner, None)

    @invariant()
    def books_are_right(self) -> None:
        self.memory.check_integrity()
        assert self.memory.bytes_used <= 8000


TestPrefixMemory = MemoryMachine.TestCase
TestPrefixMemory.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True)


def test_a_turn_under_another_salt_is_counted_while_the_last_one_is_kept() -> None:
    memory = PrefixMemory(4, 1 << 20)
    memory.follow("one", ME, FIRST)
    assert memory.follow("two", ME, prompt("S", "u1", "a1", "u2", "a2", "u3")) is None
    assert memory.salts_changed == 1
    memory.follow("two", ME, prompt("S", "u1", "a1", "u2", "a2", "u3", "a3", "u4"))
    memory.follow("one", Owner("a", b"2"), FIRST)  # another session
    memory.follow("three", ME, prompt("T", "a title"))  # continues nothing
    assert memory.salts_changed == 1
    memory.check_integrity()
    memory.forget("a", {b"1"})
    memory.follow("four", ME, FIRST)
    assert memory.salts_changed == 1
    memory.check_integrity()
