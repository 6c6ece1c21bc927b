"""The text of a document, and the chunks that the knowledge base finds of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from samovar.router.context.documents.document import DocumentFailed
from samovar.router.context.knowledge import clean

TITLE_CHARS_MAX = 200
HEADING = re.compile(r"#{1,6}[ \t]+(\S.*)")
CODE_FENCE = re.compile(r" {0,3}(```+|~~~+)")
BREAKS = ("\n", ". ", "! ", "? ", "; ", ", ", " ")
"""Where a paragraph that is too long is divided: at the last of the first of these in its later half."""


def text_of(raw: str, chars_max: int) -> str:
    """Return a document's text as it is kept: without characters that are not seen.

    Raises `DocumentFailed` for a text with none that are, or with too many.
    """
    if len(raw) > chars_max:
        raise DocumentFailed(f"it has {len(raw)} characters, more than {chars_max} (documents.chars_max)")
    text = clean(raw).strip("\n")
    if not text.strip():
        raise DocumentFailed("it holds no characters that can be seen")
    return text


def chunks_of(text: str, title: str, is_markdown: bool, chars_max: int) -> list[tuple[str, str]]:
    """Return (title, text) of each chunk: whole paragraphs of one section, as many as fit.

    The chunks hold every line of the text that is not blank, in its order. A heading is the title of what
    stands below it, and part of its text.
    """
    made: list[tuple[str, str]] = []
    for heading, paragraphs in _sections(text, is_markdown):
        named = " > ".join(part for part in (title, heading) if part)[:TITLE_CHARS_MAX]
        held = ""
        for piece in (piece for one in paragraphs for piece in _pieces(one, chars_max)):
            if held and len(held) + 2 + len(piece) > chars_max:
                made.append((named, held))
                held = ""
            held = f"{held}\n\n{piece}" if held else piece
        if held:
            made.append((named, held))
    return made


def _sections(text: str, is_markdown: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield each section's heading and its paragraphs; the heading's line is the first of these."""
    heading, lines, code = "", list[str](), ""
    for line in text.split("\n"):
        fence = CODE_FENCE.match(line) if is_markdown else None
        if fence is not None and (not code or fence[1].startswith(code)):
            code = "" if code else fence[1]
        found = HEADING.fullmatch(line) if is_markdown and not code else None
        if found is not None:
            yield heading, _paragraphs(lines)
            heading, lines = found[1].rstrip(" \t#"), []
        lines.append(line)
    yield heading, _paragraphs(lines)


def _paragraphs(lines: list[str]) -> list[str]:
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    return ["\n".join(paragraph) for paragraph in paragraphs if paragraph]


def _pieces(paragraph: str, chars_max: int) -> Iterator[str]:
    """Yield a paragraph in pieces of at most `chars_max`."""
    while len(paragraph) > chars_max:
        end = chars_max
        for mark in BREAKS:
            at = paragraph.rfind(mark, chars_max // 2, chars_max)
            if at >= 0:
                end = at + len(mark)
                break
        piece, paragraph = paragraph[:end].rstrip(), paragraph[end:].lstrip(" \n")
        if piece:
            yield piece
    if paragraph:
        yield paragraph
