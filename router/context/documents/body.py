"""The bodies of /v1/documents."""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Iterator
from typing import Annotated

from pydantic import ConfigDict, Field

from samovar.router.context.documents.document import Format, Wanted
from samovar.router.context.documents.text import TITLE_CHARS_MAX
from samovar.router.context.knowledge import clean
from samovar.router.openai import InvalidValue, MissingField, StrictModel

PIECE_CHARS = 4 * 65536
"""Decoded at once: other threads run in between, which the decoder itself does not let them."""


class DocumentBody(StrictModel):
    """A document: `text`, or for a PDF `data` in base64. `prefill`: None is `documents.prefill`."""

    model_config = ConfigDict(extra="forbid")

    format: Format = "text"
    title: Annotated[str, Field(max_length=TITLE_CHARS_MAX)] = ""
    text: Annotated[str, Field(min_length=1)] | None = None
    data: Annotated[str, Field(min_length=1)] | None = None
    prefill: Wanted | None = None


class PrefillBody(StrictModel):
    """Whether its blocks are stored in any case, or where that is cheaper than computing them."""

    model_config = ConfigDict(extra="forbid")

    prefill: Wanted = "auto"


def source_of(body: DocumentBody) -> bytes:
    """Return what was sent, as bytes. Not for the event loop. Raises `InvalidValue` or `MissingField`."""
    wanted, other = ("data", "text") if body.format == "pdf" else ("text", "data")
    if getattr(body, other) is not None:
        raise InvalidValue(other, f"{other} is not for format={body.format!r}. Send {wanted}.")
    given: str | None = getattr(body, wanted)
    if given is None:
        raise MissingField(wanted)
    if body.format != "pdf":
        return given.encode("utf-8", "replace")
    try:
        return b"".join(_decoded(given))
    except ValueError:
        raise InvalidValue("data", "data is no base64.") from None


def _decoded(text: str) -> Iterator[bytes]:
    for at in range(0, len(text), PIECE_CHARS):
        piece = text[at : at + PIECE_CHARS]
        if piece.endswith("=") and at + PIECE_CHARS < len(text):
            raise ValueError("padding in front of more")
        yield a2b_base64(piece, strict_mode=True)


def title_of(body: DocumentBody) -> str:
    """Return the title on one line, without characters that are not seen."""
    return " ".join(clean(body.title).split())
