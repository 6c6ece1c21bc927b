"""Volatile lines in front of a system prompt: where they end, however a client joined its blocks."""

from __future__ import annotations

import pytest

from samovar.router.openai.messages import ChatMessage, split_front

BILLING = "x-anthropic-billing-header"
LINE = f"{BILLING}: cc_version=2.1.37.3a3; cc_entrypoint=cli; cch=a1b2c;"
REST = "You are a coding agent.\nBe brief; say=less; twice."


def system(*parts: str) -> ChatMessage:
    ends = [sum(map(len, parts[: place + 1])) for place in range(len(parts))]
    return ChatMessage("system", "".join(parts), tuple(ends[:-1]))


@pytest.mark.parametrize(
    "message",
    [
        system(LINE, REST),
        system("", LINE, "", REST),
        system(LINE + "\n" + REST),
        system(LINE + " \r\n" + REST),
        system("\n " + LINE + "\n", REST),
        system(LINE + REST),  # joined without a line end: the fields say where it ends
        system(LINE.upper(), REST),
        system(LINE.removesuffix(";"), REST),
        system(LINE.removesuffix(";") + "\n" + REST),
        system(f"{BILLING}: whatever it is; without fields", REST),
        system(f"{BILLING}:\n{REST}"),
    ],
)
def test_the_line_ends_with_its_fields_its_part_or_its_line(message: ChatMessage) -> None:
    front = split_front(message, (BILLING,))
    assert front.names == (BILLING,)
    assert front.rest == REST
    assert front.lines[0].lower().startswith(BILLING)


def test_several_lines_are_taken_in_their_order() -> None:
    text = f"Current time: 10:30\n{LINE}\ncurrent time: 10:31\n{REST}"
    front = split_front(system(text), (BILLING, "current time"))
    assert front.names == ("current time", BILLING, "current time")
    assert front.lines == ("Current time: 10:30", LINE, "current time: 10:31")
    assert front.rest == REST


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (REST, (BILLING,)),
        (f"{REST}\n{LINE}", (BILLING,)),  # not in front
        (f"my-{LINE}", (BILLING,)),
        (f"{BILLING} is a header", (BILLING,)),
        (LINE, ()),
        ("", (BILLING,)),
        ("aXb: 1\n", ("a.b",)),
    ],
)
def test_what_is_no_known_line_in_front_stays(text: str, names: tuple[str, ...]) -> None:
    front = split_front(system(text), names)
    assert (front.names, front.lines, front.rest) == ((), (), text)


def test_a_prompt_that_is_only_such_a_line_is_empty_without_it() -> None:
    assert split_front(system(LINE), (BILLING,)).rest == ""
