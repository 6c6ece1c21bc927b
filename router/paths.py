"""Paths of /v1/documents and /v1/keys: of handlers, of the document of all routes, of the labels of metrics.

Apart, since the handlers are only imported where there are documents, or keys in a file.
"""

from __future__ import annotations

DOCUMENTS = "/v1/documents"
DOCUMENT_ROUTE = f"{DOCUMENTS}/{{document}}"
PREFILL = "/prefill"
PREFILL_ROUTE = DOCUMENT_ROUTE + PREFILL

KEYS = "/v1/keys"
KEY_ROUTE = f"{KEYS}/{{key_id}}"
ROTATE = "/rotate"
ROTATE_ROUTE = KEY_ROUTE + ROTATE
