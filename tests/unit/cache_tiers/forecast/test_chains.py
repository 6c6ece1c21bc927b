"""Which part of its lineage's chain a prompt keeps, also of several at once, and what edits leave behind."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks.extent import KEY_BYTES, marks_of
from samovar.cache_tiers.forecast.lineages import CHAINS_MAX, RUNNING_MAX, LineageChains, roots_of
from samovar.cache_tiers.forecast.turns import TURN_S_MAX

BT = 16


def chain(*parts: tuple[str, int]) -> list[bytes]:
    """Keys of a chain: so many blocks of each content; a key commits to all before it."""
    keys: list[bytes] = []
    for name, blocks in parts:
        for number in range(blocks):
            before = keys[-1] if keys else b""
            keys.append(
                hash((before, name, number)).to_bytes(8, "little", signed=True).ljust(KEY_BYTES, b"\1")
            )
    return keys


class Play:
    """Turns of one lineage."""

    def __init__(self) -> None:
        self.chains = LineageChains(100)
        self.now_s = 0.0

    def began(self, keys: list[bytes]) -> tuple[int, float]:
        self.now_s += 1.0
        prompt = self.chains.began("main", "session", b"".join(keys), self.now_s)
        self.chains.check_integrity()
        return prompt.branches, prompt.regained

    def ended(self, keys: list[bytes], prompt_blocks: int) -> int:
        tokens = len(keys) * BT
        kept = self.chains.ended(
            "main", marks_of(keys), input_tokens=prompt_blocks * BT, tokens=tokens, block_tokens=BT
        )
        self.chains.check_integrity()
        return kept // BT

    def turn(self, prompt: list[bytes], answer: list[bytes]) -> tuple[int, int, float]:
        branches, regained = self.began(prompt)
        return self.ended(answer, len(prompt)), branches, regained


def test_a_prompt_keeps_all_of_the_chain_that_it_extends_and_only_the_front_of_one_it_edits() -> None:
    play = Play()
    first = chain(("p", 4), ("a", 2))
    assert play.turn(first[:4], first) == (0, 0, 0.0)
    second = chain(("p", 4), ("a", 2), ("q", 5), ("b", 3))
    assert play.turn(second[:11], second) == (6, 0, 0.0)
    edited = chain(("p", 4), ("a", 2), ("other", 5), ("c", 3))
    assert play.turn(edited[:11], edited) == (6, 0, 0.0), "what it left is not counted as gone back to"
    further = chain(("p", 4), ("a", 2), ("other", 5), ("c", 3), ("r", 2), ("d", 1))
    assert play.turn(further[:16], further) == (14, 1, 0.0)
    back = [*second, *chain(("s", 2))]
    assert play.turn(back, back) == (14, 1, 1.0), "it goes back to one and leaves another"


def test_turns_at_once_keep_each_its_own() -> None:
    """A second lookup took the kept tokens of the first."""
    play = Play()
    first = chain(("p", 40), ("a", 8))
    play.turn(first[:40], first)
    longer, shorter = [*first, *chain(("q", 4))], first[:24]
    play.began(longer)
    play.began(shorter)
    assert play.ended(shorter, len(shorter)) == 24
    assert play.ended(longer, len(longer)) == 48


def test_attempts_at_one_answer_all_keep_the_chain_and_only_the_taken_one_goes_on() -> None:
    play = Play()
    first = chain(("p", 16), ("a", 8))
    play.turn(first[:16], first)
    prompt = [*first, *chain(("q", 8))]
    for _ in range(3):
        assert play.began(prompt) == (0, 0.0)
    answers = [[*prompt, *chain((name, 8))] for name in "xyz"]
    assert [play.ended(answer, len(prompt)) for answer in answers] == [24, 24, 24]
    following = [*answers[1], *chain(("r", 8))]
    assert play.turn(following, following) == (40, 0, 0.0)
    again = [*following, *chain(("s", 8))]
    assert play.turn(again, again)[1:] == (2, 0.0), "two attempts were left behind"


def test_a_turn_that_never_ends_is_over_some_time() -> None:
    play = Play()
    first = chain(("p", 16))
    play.turn(first, first)
    play.began([*first, *chain(("q", 16))])
    play.now_s += TURN_S_MAX
    edited = [*first[:2], *chain(("r", 16))]
    assert play.turn(edited, edited)[0] == 2
    play.turn([*edited, *chain(("s", 4))], [*edited, *chain(("s", 4))])
    assert play.began([*edited, *chain(("s", 4), ("t", 4))])[0] == 1


def test_a_few_blocks_at_the_end_are_no_branch() -> None:
    """The last block of an answer is often tokenized otherwise when it comes back in a prompt."""
    play = Play()
    prompt = chain(("p", 60))
    play.turn(prompt, [*prompt, *chain(("a", 20))])
    for name in "qrst":
        prompt = [*prompt, *chain((name, 19))]
        _, branches, _ = play.turn(prompt, [*prompt, *chain(("a", 20))])
    assert branches == 3, "each answer was changed altogether: these are branches"
    play = Play()
    prompt = chain(("p", 60))
    play.turn(prompt, [*prompt, *chain(("a", 2))])
    for name in "qrst":
        prompt = [*prompt, *chain((name, 19))]
        assert play.turn(prompt, [*prompt, *chain(("a", 2))])[1] == 0


def test_roots_are_of_the_first_blocks_only() -> None:
    one, other = chain(("p", 5), ("q", 9)), chain(("p", 5), ("r", 2))
    roots, shorter = roots_of(b"".join(one)), roots_of(b"".join(other))
    assert (len(roots), len(shorter)) == (4, 3)
    assert roots[:3] == shorter
    assert roots_of(b"") == ()


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_whatever_comes_it_is_bounded_and_kept_is_a_prefix(data: st.DataObject) -> None:
    chains = LineageChains(3)
    running: list[tuple[str, list[bytes]]] = []
    now_s = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        now_s += data.draw(st.sampled_from([0.0, 1.0, TURN_S_MAX]))
        if running and data.draw(st.booleans()):
            name, keys = running.pop(data.draw(st.integers(0, len(running) - 1)))
            tokens = len(keys) * BT
            kept = chains.ended(name, marks_of(keys), input_tokens=tokens, tokens=tokens + 5, block_tokens=BT)
            assert 0 <= kept <= tokens
        elif data.draw(st.integers(0, 9)):
            name = data.draw(st.sampled_from("abcde"))
            keys = chain(
                *data.draw(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 9)), max_size=4))
            )
            prompt = chains.began(name, "session", b"".join(keys), now_s)
            assert 0 <= prompt.regained <= prompt.branches <= CHAINS_MAX
            running = [*running, (name, keys)][-RUNNING_MAX:]
        else:
            chains.forget(data.draw(st.sampled_from("abcde")))
        chains.check_integrity()
