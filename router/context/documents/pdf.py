"""Reads a PDF in a process of its own, within limits of time, memory, pages and characters."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
from pathlib import Path

from samovar.configs.json_text import parse_json
from samovar.configs.optional_sections import DocumentsSettings
from samovar.router.context.documents.document import DocumentFailed

logger = logging.getLogger(__name__)

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
