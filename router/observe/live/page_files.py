"""The live page's files, read once from the package and served with headers that forbid everything else.

A file is found by its whole name among those that were read, so no request can name another path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from samovar.router.openai import RouteNotFound

FOLDER = Path(__file__).resolve().parent / "page"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"  # no text ever becomes markup or code
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time; the tag says that nothing has changed
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file: its bytes, their type and their tag."""

    content: bytes
    content_type: str
    etag: str


def read_files(folder: Path) -> dict[str, PageFile]:
    """Return the files below `folder` of the types that are served, by name relative to it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix in TYPES and path.is_file() and not any(part.startswith(".") for part in name.parts):
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[name.as_posix()] = PageFile(content, TYPES[path.suffix], etag)
    return found


class PageFiles:
    """Handlers of `/` and `/page/...`. They raise `ApiError`. `files`: by default those of the package."""

    def __init__(self, files: Mapping[str, PageFile] | None = None) -> None:
        self._files = read_files(FOLDER) if files is None else files

    async def index(self, request: Request) -> Response:
        """Handle GET /."""
        return self._answer(INDEX, request)

    async def one(self, request: Request) -> Response:
        """Handle GET /page/{name}."""
        return self._answer(request.path_params["name"], request)

    def _answer(self, name: str, request: Request) -> Response:
        file = self._files.get(name)
        if file is None:
            raise RouteNotFound(request.method, request.url.path)
        headers = {**HEADERS, "etag": file.etag}
        if file.etag in (tag.strip().removeprefix("W/") for tag in _tags(request)):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers={**headers, "content-type": file.content_type})


def _tags(request: Request) -> list[str]:
    return request.headers.get("if-none-match", "").split(",")
