"""A Hugging Face hub on 127.0.0.1: the part of its HTTP that fetching a model's snapshot uses.

As huggingface.co answers: commits of branches, trees of files, HEAD with ETag and `X-Repo-Commit`, large
files by a redirect to another host with `X-Linked-*`, ranges, and errors with `X-Error-Code`.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

LARGE_BYTES = 4096
"""From this size on a file is LFS's: known by its sha256, and fetched from elsewhere."""

_API = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<revision>[^/?]+))?")
_FILE = re.compile(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")


@dataclass
class HubRepo:
    """A repository: `branches` name commits, a commit is its files. `token`: who has it may read."""

    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit and let the branch be it."""
        digest = hashlib.sha1()
        for name, content in sorted(files.items()):
            digest.update(f"{name} {len(content)} ".encode() + content)
        self.branches[branch] = digest.hexdigest()
        self.commits[digest.hexdigest()] = dict(files)
        return digest.hexdigest()


@dataclass
class HubStub:
    """The hub's state, which tests change, and what it was asked."""

    url: str
    large_url: str  # by another name of this machine: a redirect within one name is followed at once
    repos: dict[str, HubRepo] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    status: int | None = None  # given to every request instead of an answer
    cut_after: int | None = None  # of a large file only so many bytes are sent, once

    def repo(self, name: str, directory: Path | None = None) -> HubRepo:
        """Add a repository; with the files of `directory` as its first commit."""
        repo = self.repos[name] = HubRepo()
        if directory is not None:
            repo.commit({path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()})
        return repo


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubStub

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        self._with_body = with_body
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if self.hub.status is not None:
            return self._send(self.hub.status, b"no", {})
        if path.startswith("/cdn/"):
            return self._content(self._blob(path.removeprefix("/cdn/")))
        match = _API.fullmatch(path) or _FILE.fullmatch(path)
        repo = self.hub.repos.get(match["id"]) if match else None
        given = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if given == "wrong":
            return self._error(401, None, "Invalid credentials in Authorization header")
        if match is None or repo is None or (repo.token and not repo.gated and given != repo.token):
            return self._error(401, "RepoNotFound", "Repository not found")
        revision = match["revision"] or "main"
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repo.commits[commit]
        if match.re is _API:
            return self._api(match["id"], match["what"], commit, files)
        if repo.gated and given != repo.token:
            return self._error(403, "GatedRepo", f"Access to model {match['id']} is restricted")
        if match["name"] not in files:
            return self._error(404, "EntryNotFound", "Entry not found")
        self._file(commit, files[match["name"]])

    def _api(self, name: str, what: str | None, commit: str, files: dict[str, bytes]) -> None:
        if what == "tree":
            entries = [self._entry(path, content) for path, content in files.items() if "/" not in path]
            if "recursive=true" in self.path.lower():
                entries = [self._entry(path, content) for path, content in files.items()]
            return self._send(200, json.dumps(entries).encode(), {"content-type": "application/json"})
        siblings = [{"rfilename": path} for path in files]
        info = {"id": name, "modelId": name, "sha": commit, "private": False, "siblings": siblings}
        self._send(200, json.dumps(info).encode(), {"content-type": "application/json"})

    @staticmethod
    def _entry(path: str, content: bytes) -> dict[str, object]:
        entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        if len(content) < LARGE_BYTES:
            return entry
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return {**entry, "lfs": lfs}

    def _file(self, commit: str, content: bytes) -> None:
        headers = {"x-repo-commit": commit}
        if len(content) < LARGE_BYTES:
            return self._content(content, {**headers, "etag": f'"{hashlib.sha1(content).hexdigest()}"'})
        sha = hashlib.sha256(content).hexdigest()
        linked = {"x-linked-etag": f'"{sha}"', "x-linked-size": str(len(content))}
        self._send(302, b"", {**headers, **linked, "location": f"{self.hub.large_url}/cdn/{sha}"})

    def _blob(self, sha: str) -> bytes:
        contents = (
            content
            for repo in self.hub.repos.values()
            for files in repo.commits.values()
            for content in files.values()
        )
        return next(content for content in contents if hashlib.sha256(content).hexdigest() == sha)

    def _content(self, content: bytes, headers: dict[str, str] | None = None) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range") or "")
        start = int(asked[1]) if asked else 0
        more = {"content-range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if asked else {}
        more["content-type"] = "application/octet-stream"
        self._send(206 if asked else 200, content[start:], {**(headers or {}), **more})

    def _error(self, status: int, code: str | None, message: str) -> None:
        headers = {"x-error-message": message} | ({"x-error-code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if not self._with_body:
            return
        cut = self.hub.cut_after
        if cut is not None and len(body) > cut and status < 300:
            self.hub.cut_after = None
            self.wfile.write(body[:cut])
            self.close_connection = True
            return
        self.wfile.write(body)


@contextmanager
def hub_stub() -> Iterator[HubStub]:
    """A running hub without repositories."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    port = server.server_port
    hub = HubStub(f"http://127.0.0.1:{port}", f"http://localhost:{port}")
    server.RequestHandlerClass = type("_HubHandler", (_Handler,), {"hub": hub})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, *, offline: bool = False) -> None:
    """Let huggingface_hub use that hub and cache here, as HF_ENDPOINT and HF_HOME do at its import."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
