"""Documents of a tenant: taken in, chunked into the knowledge base, prefilled, named by chats, erased.

Nothing imports it while `knowledge.enabled` is false.
"""

from samovar.router.context.documents.document import Document, DocumentFailed, Quota
from samovar.router.context.documents.placement import (
    PlacedDocuments,
    Whole,
    end_of_documents,
    fenced_document,
    in_order,
    place_documents,
)
from samovar.router.context.documents.prefill import Front, Prefill, PrefillBusy, document_session, pinned
from samovar.router.context.documents.routes import DocumentBody, PrefillBody, document_routes, open_documents
from samovar.router.context.documents.shelf import DocumentShelf
from samovar.router.context.documents.store import DocumentStore
from samovar.router.context.documents.text import chunks_of, read_pdf, text_of

__all__ = [
    "Document",
    "DocumentBody",
    "DocumentFailed",
    "DocumentShelf",
    "DocumentStore",
    "Front",
    "PlacedDocuments",
    "Prefill",
    "PrefillBody",
    "PrefillBusy",
    "Quota",
    "Whole",
    "chunks_of",
    "document_routes",
    "document_session",
    "end_of_documents",
    "fenced_document",
    "in_order",
    "open_documents",
    "pinned",
    "place_documents",
    "read_pdf",
    "text_of",
]
