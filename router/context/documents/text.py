"""The text of a document, and the chunks that the knowledge base finds of it.

A PDF is read in a process of its own, within limits of time, memory, pages and characters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from samovar.configs.json_text import parse_json
from samovar.configs.optional_sections import DocumentsSettings
from samovar.router.context.documents.document import DocumentFailed
from samovar.router.context.knowledge import clean

logger = logging.getLogger(__name__)


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
    begin = 0
    while len(paragraph) - begin > chars_max:
        end = begin + chars_max
        for mark in BREAKS:
            at = paragraph.rfind(mark, begin + chars_max // 2, begin + chars_max)
            if at >= 0:
                end = at + len(mark)
                break
        if piece := paragraph[begin:end].rstrip():
            yield piece
        while end < len(paragraph) and paragraph[end] in " \n":
            end += 1
        begin = end
    if begin < len(paragraph):
        yield paragraph[begin:]


PROGRAM = Path(__file__).with_name("pdf_reader.py")
WAIT_GROWTH = 2.0
"""How much longer than its processor time a reader may take on a busy machine."""


async def read_pdf(data: bytes, settings: DocumentsSettings) -> tuple[str, int]:
    """Return the text of a PDF and its number of pages. Raises `DocumentFailed`."""
    limits = (
        settings.pdf_bytes_max,
        math.ceil(settings.pdf_s_max),
        settings.pages_max,
        settings.chars_max,
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        str(PROGRAM),
        *map(str, limits),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
    )
    try:
        async with asyncio.timeout(WAIT_GROWTH * settings.pdf_s_max):
            said, _ = await process.communicate(data)
    except TimeoutError:
        raise DocumentFailed(_stopped(settings)) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        logger.info("the reader of a PDF ended with %d", process.returncode)
        raise DocumentFailed(_stopped(settings))
    told = await asyncio.to_thread(parse_json, said)  # it may be long
    if "error" in told:
        raise DocumentFailed(str(told["error"]))
    return str(told["text"]), int(told["pages"])


def _stopped(settings: DocumentsSettings) -> str:
    return (
        f"reading it takes more than {settings.pdf_s_max:g} s (documents.pdf_s_max) or "
        f"{settings.pdf_bytes_max} bytes of memory (documents.pdf_bytes_max)"
    )
