"""Paths of /v1/documents: of its handlers, of the document of all routes, and of the labels of metrics.

Apart, since the handlers are only imported where there are documents.
"""

from __future__ import annotations

DOCUMENTS = "/v1/documents"
DOCUMENT_ROUTE = f"{DOCUMENTS}/{{document}}"
PREFILL = "/prefill"
PREFILL_ROUTE = DOCUMENT_ROUTE + PREFILL
