"""The bodies of /v1/documents."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from pydantic import ConfigDict, Field

from router.documents.document import Format, Wanted
from router.documents.text import TITLE_CHARS_MAX
from router.knowledge import clean
from router.openai import InvalidValue, MissingField, StrictModel


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
    """Return what was sent, as bytes. Raises `InvalidValue` or `MissingField`."""
    wanted, other = ("data", "text") if body.format == "pdf" else ("text", "data")
    if getattr(body, other) is not None:
        raise InvalidValue(other, f"{other} is not for format={body.format!r}. Send {wanted}.")
    given: str | None = getattr(body, wanted)
    if given is None:
        raise MissingField(wanted)
    if body.format != "pdf":
        return given.encode("utf-8", "replace")
    try:
        return base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue("data", "data is no base64.") from None


def title_of(body: DocumentBody) -> str:
    """Return the title on one line, without characters that are not seen."""
    return " ".join(clean(body.title).split())
