"""Entries of the reply memory between ingresses: whole, of one tenant, refused if anything has changed."""

from __future__ import annotations

import threading
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.replicas.messages import SamplingParams
from samovar.router.openai import ChatMessage, ParsedChat
from samovar.router.prompt import Owner, SharedReplies
from samovar.router.prompt.reply_memory import (
    NotOurs,
    RememberedReply,
    ReplyMemory,
    packed,
    turns_of,
    unpacked,
)

SALT, OTHER = b"salt of one tenant", b"salt of another"
OWNER = Owner("t", bytes(16))
VOCAB = 1000


def reply(ids: list[int], chars: int = 7, *, is_lost: bool = False) -> RememberedReply:
    return RememberedReply(bytes(32), chars, bytes([1]) * 32, is_lost, array("I", ids), 3)


@given(st.lists(st.integers(0, VOCAB - 1), max_size=50), st.integers(0, 1 << 40), st.booleans(), st.data())
def test_a_reply_arrives_as_it_was_or_not_at_all(
    ids: list[int], chars: int, is_lost: bool, data: st.DataObject
) -> None:
    sent = reply(ids, chars, is_lost=is_lost)
    name, body = packed(SALT, sent)
    assert unpacked(SALT, body, VOCAB) == sent
    assert packed(SALT, sent)[0] == name != packed(OTHER, sent)[0]
    with pytest.raises(NotOurs):
        unpacked(OTHER, body, VOCAB)
    at = data.draw(st.integers(0, len(body) - 1))
    changed = bytearray(body)
    changed[at] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(changed), body[:at], body + b"x"):
        with pytest.raises(NotOurs):
            unpacked(SALT, damaged, VOCAB)


def test_tokens_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(NotOurs):
        unpacked(SALT, packed(SALT, reply([VOCAB]))[1], VOCAB)


def shared() -> tuple[ReplyMemory, SharedReplies]:
    memory = ReplyMemory(1 << 20)
    return memory, SharedReplies(memory, threading.Lock(), VOCAB)


def test_what_one_memory_has_another_takes() -> None:
    one, told = shared()
    one.remember(SALT.hex(), "<hi>", [1], "hello", [2, 3], owner=OWNER, forgets=0, turns=1)
    two, taker = shared()
    bodies = [body for _, body in told.newest(SALT, OWNER, 2)]
    assert taker.take(SALT, OWNER, [*bodies, b"not one"], forgets=0) == (1, 1)
    assert taker.take(SALT, OWNER, bodies, forgets=0) == (0, 0), "it is known"
    known = two.match(SALT.hex(), "<hi>hello<and?>", ["hello"])
    assert known is not None
    assert known.token_ids == [1, 2, 3]
    two.check_integrity()
    two.forget("t")
    assert taker.take(SALT, OWNER, bodies, forgets=0)[0] == 0, "what was cleared meanwhile stays cleared"


def test_the_last_reply_is_known_by_its_turn() -> None:
    memory, told = shared()
    memory.remember(SALT.hex(), "<hi>", [1], "no", [2], owner=OWNER, forgets=0, turns=1)
    asked, said = ChatMessage("user", "hi"), ChatMessage("assistant", "no")

    def conversation(*messages: ChatMessage) -> ParsedChat:
        return ParsedChat(model="m", sampling=SamplingParams(), messages=messages)

    assert told.knows_last(SALT, OWNER, conversation(asked)), "there is nothing to know"
    assert told.knows_last(SALT, OWNER, conversation(asked, said, asked))
    assert not told.knows_last(SALT, OWNER, conversation(asked, said, asked, said, asked)), "said twice"
    assert not told.knows_last(OTHER, OWNER, conversation(asked, said, asked))
    assert not told.knows_last(SALT, Owner("t", bytes([1]) * 16), conversation(asked, said, asked))
    assert turns_of(conversation(asked, said, asked)) == 2
    assert turns_of(None) == 0
    begun = replace(conversation(asked, said), begins_turn=False, continues=True)
    assert turns_of(begun) == 1, "one reply with what it goes on from"
