"""A document of a tenant: what is kept of it, and how far it is."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Format = Literal["text", "markdown", "pdf"]
State = Literal["processing", "ready", "failed", "deleting"]
"""`ready`: chats may name it, and its chunks are found. `deleting`: nothing of it is served any more."""
Wanted = Literal["auto", "always", "never"]
Prefilled = Literal["none", "waiting", "running", "stored", "partly", "computed", "failed"]
"""How far its KV is: `stored` in a tier below the pool, `partly`, or not (`computed`: in the pool)."""

ID_PREFIX = "doc-"


@dataclass(frozen=True, slots=True)
class Document:
    """A document without its text. Times: Unix. `seq`: the store's own counter, in order of arrival.

    `source_bytes`: what was sent; `text_bytes`: of its text in UTF-8, 0 until it is read. `reason`: of a
    failure. `entries`: ids of its chunks in the knowledge base. `prefill`: what was asked for, `prefilled`
    what came of it: of `tokens`, `prefilled_tokens` are computed, and `prefill_reason` says why not more.
    `model`: fingerprint of the one that they were computed by, `node`: where.
    """

    id: str
    tenant: str
    title: str
    format: Format
    state: State
    prefill: Wanted
    source_bytes: int
    created_s: float
    seq: int = 0
    reason: str = ""
    text_bytes: int = 0
    pages: int = 0
    entries: tuple[str, ...] = ()
    prefilled: Prefilled = "none"
    prefill_reason: str = ""
    prefill_s: float = 0.0
    tokens: int = 0
    prefilled_tokens: int = 0
    model: str = ""
    ready_s: float = 0.0
    node: str = ""

    @property
    def is_open(self) -> bool:
        """Whether there is work left to do on it."""
        return self.state in ("processing", "deleting") or self.prefilled in ("waiting", "running")

    def card(self) -> dict[str, Any]:
        """Return what the API says of it."""
        return {
            "id": self.id,
            "object": "document",
            "title": self.title,
            "format": self.format,
            "state": self.state,
            "reason": self.reason or None,
            "created": int(self.created_s),
            "ready": int(self.ready_s) or None,
            "bytes": self.source_bytes,
            "text_bytes": self.text_bytes,
            "pages": self.pages or None,
            "chunks": len(self.entries),
            "tokens": self.tokens or None,
            "prefill": {
                "wanted": self.prefill,
                "state": self.prefilled,
                "reason": self.prefill_reason or None,
                "tokens": self.prefilled_tokens,
                "seconds": round(self.prefill_s, 3),
                "model": self.model or None,
            },
        }


@dataclass(frozen=True, slots=True)
class Quota:
    """How much a tenant may have: documents, and bytes of what was sent and of the texts."""

    documents_max: int
    bytes_max: int


class DocumentFailed(Exception):
    """A document cannot be served as it is; the message says why, without its text."""


def new_document_id() -> str:
    """Return a random id of a document."""
    return ID_PREFIX + secrets.token_hex(10)


class ForgetBlocks(Protocol):
    """Forgets blocks everywhere."""

    async def __call__(self, tenant: str, sessions: tuple[bytes, ...] | None) -> None:
        """Clear these sessions of a tenant, or all (None). Raises `ApiError` if not all is cleared."""
        ...


class ForgetEntries(Protocol):
    """Erases everywhere what was made of entries of knowledge."""

    async def __call__(self, tenant: str, entries: Sequence[str] | None) -> None:
        """Erase what was made of these entries, or of any (None). Raises `ApiError` if not all is erased."""
        ...
