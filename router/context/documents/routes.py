"""Routes of /v1/documents, their bodies, and the documents of an ingress over its parts.

Imported only where the knowledge base is switched on.
"""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from samovar.configs.settings import Settings
from samovar.router.auth import ConcurrencyLimit, read_model, tenant_of
from samovar.router.context.documents.document import ForgetBlocks, ForgetEntries, Format, Wanted
from samovar.router.context.documents.prefill import Front, Prefill
from samovar.router.context.documents.shelf import DocumentShelf
from samovar.router.context.documents.store import FILE_NAME, SCHEMAS, DocumentStore
from samovar.router.context.documents.text import TITLE_CHARS_MAX
from samovar.router.context.knowledge import KnowledgeBase, PromptText, clean
from samovar.router.erasure import Cleared, Erasure
from samovar.router.generation import IngressServices
from samovar.router.openai import (
    InvalidValue,
    MissingField,
    StrictModel,
    cursor,
    page_limit,
)
from samovar.router.paths import DOCUMENT_ROUTE, DOCUMENTS, PREFILL_ROUTE
from samovar.router.prompt import PromptBuilder
from samovar.router.routing import ReplicaClient, SessionDirectory

Body = TypeVar("Body", bound=BaseModel)


def open_documents(
    settings: Settings,
    base: KnowledgeBase,
    text: PromptText,
    client: ReplicaClient,
    prompts: PromptBuilder,
    directory: SessionDirectory,
    front: Front,
    secret: bytes,
) -> DocumentShelf:
    """Open the documents of the settings, beside the entries of the knowledge base.

    Tables that cannot be opened give 503 and are tried again.
    """
    own = settings.documents
    store = DocumentStore(base.store.beside(FILE_NAME, SCHEMAS), lease_s=own.lease_s)
    prefill = Prefill(client, prompts, directory, front, settings, secret=secret)
    prefix = settings.router.prefix
    volatile = () if prefix.volatile == "keep" else prefix.volatile_lines
    return DocumentShelf(store, base, prefill, text, own, secret=secret, volatile_lines=volatile)


def document_routes(service: IngressServices, clears: ForgetBlocks, forgets: ForgetEntries) -> list[Route]:
    """Return the routes of an ingress whose documents are open.

    `clears`: forgets blocks everywhere, `forgets`: what was made of entries.
    """
    shelf = service.stage(DocumentShelf.name)
    assert isinstance(shelf, DocumentShelf)
    shelf.clears, shelf.forgets = clears, forgets

    async def erase(what: Erasure) -> Cleared:
        return Cleared(chunks=sum([await shelf.delete(what.tenant, one) for one in what.names or ()]))

    service.clears.places["document"] |= {"the document": erase}
    return DocumentRoutes(service, shelf).routes()


class DocumentRoutes:
    """Handlers of /v1/documents. They raise `ApiError`. A tenant sees and changes its own documents only."""

    def __init__(self, service: IngressServices, shelf: DocumentShelf) -> None:
        self._bodies = service.bodies
        self._reads: ConcurrencyLimit = service.reads
        self._work: ConcurrencyLimit = service.concurrency
        self._clears = service.clears
        self._shelf = shelf

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(DOCUMENTS, self.all),
            Route(DOCUMENTS, self.add, methods=["POST"]),
            Route(DOCUMENT_ROUTE, self.one),
            Route(DOCUMENT_ROUTE, self.delete, methods=["DELETE"]),
            Route(PREFILL_ROUTE, self.prefill, methods=["POST"]),
        ]

    async def add(self, request: Request) -> Response:
        """Handle POST /v1/documents: take it in; reading, chunking and prefilling go on behind the answer."""
        tenant, body = await self._body(request, DocumentBody)
        with self._reads.lease(tenant):
            source = partial(source_of, body)
            made = await self._shelf.add(tenant, title_of(body), body.format, source, body.prefill)
        return JSONResponse(made.card(), status_code=202)

    async def all(self, request: Request) -> Response:
        """Handle GET /v1/documents?limit=&after=: documents by id."""
        tenant, params = tenant_of(request.scope), request.query_params
        limit, after = page_limit(params), cursor(params)
        with self._reads.lease(tenant):
            page = await self._shelf.all(tenant, limit + 1, after)
        data = [one.card() for one in page[:limit]]
        return JSONResponse({"object": "list", "data": data, "has_more": len(page) > limit})

    async def one(self, request: Request) -> Response:
        """Handle GET /v1/documents/{id}: its state and how far it is."""
        tenant = tenant_of(request.scope)
        with self._reads.lease(tenant):
            found = await self._shelf.get(tenant, request.path_params["document"])
        return JSONResponse(found.card())

    async def prefill(self, request: Request) -> Response:
        """Handle POST /v1/documents/{id}/prefill: compute and store its KV again."""
        tenant, body = await self._body(request, PrefillBody)
        with self._reads.lease(tenant):
            changed = await self._shelf.prefill(tenant, request.path_params["document"], body.prefill)
        return JSONResponse(changed.card(), status_code=202)

    async def delete(self, request: Request) -> Response:
        """Handle DELETE /v1/documents/{id}: erase it, its chunks, and the blocks that hold it."""
        tenant, document = tenant_of(request.scope), request.path_params["document"]
        with self._work.lease(tenant):
            (cleared,) = await self._clears.erase(Erasure("document", tenant, (document,)))
        told: dict[str, Any] = {"id": document, "object": "document", "deleted": True}
        told["chunks"] = cleared["chunks"]
        return JSONResponse(told)

    async def _body(self, request: Request, model: type[Body]) -> tuple[str, Body]:
        tenant = tenant_of(request.scope)
        return tenant, await read_model(request, model, self._bodies)


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
