"""An answer on a terminal: Markdown that grows, and keys that are typed meanwhile."""

from __future__ import annotations

import os
import pty
import select
import termios
from io import StringIO

import pytest
from rich.console import Console

from samovar.cluster.cli.chat import MarkdownView, PlainView, unseen_keys, whole_blocks
from samovar.cluster.serve.stages import console_of

ANSWER = """# Title

Some **bold** text that
goes on.

```python
x = 1

y = 2
```

1. one
2. two
"""


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("", ""),
        ("growing", "growing"),
        ("one\n\ntwo", "two"),
        ("one\n\n```\na\n\nb\n", "```\na\n\nb\n"),
        ("```\na\n\nb\n```\n\nc", "c"),
        ("one\n ", "one\n "),
    ],
)
def test_a_block_is_whole_when_later_text_cannot_change_it(text: str, rest: str) -> None:
    assert text[whole_blocks(text) :] == rest


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_markdown_is_the_same_however_it_arrives(step: int) -> None:
    out = StringIO()
    console = Console(file=out, width=60)
    view = MarkdownView(console)
    for at in range(0, len(ANSWER), step):
        view.add(ANSWER[at : at + step])
    view.close()
    lines = [line.strip() for line in out.getvalue().splitlines() if line.strip()]
    assert lines == ["Title", "Some bold text that goes on.", "x = 1", "y = 2", "1 one", "2 two"] or (
        lines[1:] == ["Some bold text that goes on.", "x = 1", "y = 2", "1 one", "2 two"]
    )


def test_plain_text_ends_its_last_line_once() -> None:
    for text, shown in (("a\nb", "a\nb\n"), ("a\n", "a\n"), ("", "")):
        out = StringIO()
        view = PlainView(Console(file=out, width=60))
        view.add(text)
        view.close()
        assert out.getvalue() == shown


def test_plain_text_is_what_the_model_said() -> None:
    out = StringIO()
    view = PlainView(Console(file=out, width=20))
    said = "all:\n\tcc -o x :on: [/x] [bold]x[s3] and more than a line of the terminal\n"
    for at in range(0, len(said), 3):
        view.add(said[at : at + 3])
    view.close()
    assert out.getvalue() == said


def test_lines_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    line = 'pip install "samovar[s3]" :on: [/x] http://[fd00::5]:8000'
    for is_error in (False, True):
        console_of(stderr=is_error).print(line, soft_wrap=True)
    assert capsys.readouterr() == (f"{line}\n", f"{line}\n")


def test_keys_typed_during_an_answer_are_not_shown_and_wait_for_the_next_prompt() -> None:
    ours, theirs = pty.openpty()
    try:
        before = termios.tcgetattr(theirs)
        with unseen_keys(theirs):
            during = termios.tcgetattr(theirs)
            os.write(ours, b"next ques")
            assert select.select([theirs], [], [], 10)[0], "the kernel hands keys over by and by"
        assert not during[3] & termios.ECHO
        assert during[3] & termios.ISIG, "Ctrl-C still stops the answer"
        assert termios.tcgetattr(theirs) == before
        assert os.read(theirs, 100) == b"next ques"
        os.set_blocking(ours, False)
        with pytest.raises(BlockingIOError):  # nothing was echoed
            os.read(ours, 100)
    finally:
        os.close(ours)
        os.close(theirs)


def test_without_a_terminal_nothing_is_changed() -> None:
    readable, writable = os.pipe()
    with unseen_keys(readable), unseen_keys(10_000):
        os.write(writable, b"x")
    assert os.read(readable, 1) == b"x"
    os.close(readable)
    os.close(writable)
