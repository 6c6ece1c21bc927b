"""Documents of a tenant: taken in, chunked into the knowledge base, prefilled, named by chats, erased.

Nothing imports it while `knowledge.enabled` is false.
"""

from router.context.documents.body import DocumentBody, PrefillBody
from router.context.documents.document import Document, DocumentFailed, Quota
from router.context.documents.pdf import read_pdf
from router.context.documents.placement import (
    PlacedDocuments,
    Whole,
    end_of_documents,
    fenced_document,
    in_order,
    place_documents,
)
from router.context.documents.prefill import Front, Prefill, PrefillBusy, document_session, pinned
from router.context.documents.routes import document_routes, open_documents
from router.context.documents.shelf import DocumentShelf
from router.context.documents.store import DocumentStore
from router.context.documents.text import chunks_of, text_of

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
