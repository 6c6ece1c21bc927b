"""The page's files: only what is in the folder, with strict headers, and without a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samovar.router.ingress import app as http_app
from samovar.router.observe.live.routes import POLICY, PageFiles, read_files
from tests.support.router.router_harness import KEY, House, error_of, make_settings


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A page, and beside it what must not be served."""
    page = tmp_path / "page"
    for name, text in {
        "index.html": "<!doctype html><title>tea</title>",
        "base/app.js": "export {}",
        "vendor/chart.min.css": "a{}",
        "notes.py": "secret",
        ".hidden.js": "secret",
        ".git/config.json": "secret",
    }.items():
        (page / name).parent.mkdir(parents=True, exist_ok=True)
        (page / name).write_text(text)
    (tmp_path / "outside.js").write_text("secret")
    return page


@pytest.fixture
def house(files: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(http_app, "PageFiles", lambda: PageFiles(read_files(files)))
    return House(settings=make_settings(keys={"a": KEY}))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/index.html", "text/html; charset=utf-8"),
        ("/page/base/app.js", "text/javascript; charset=utf-8"),
        ("/page/vendor/chart.min.css", "text/css; charset=utf-8"),
    ],
)
async def test_a_file_needs_no_key_and_has_strict_headers(house: House, path: str, kind: str) -> None:
    async with house.client() as client:
        answer = await client.get(path)
        again = await client.get(path, headers={"if-none-match": f'"x", W/{answer.headers["etag"]}'})
        head = await client.head(path)
        other = await client.post(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert answer.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", answer.headers["etag"])
    assert (head.status_code, head.content) == (200, b"")
    assert other.status_code == 401, "only reading is open"


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/notes.py",
        "/page/.hidden.js",
        "/page/.git/config.json",
        "/page/base",
        "/page/../outside.js",
        "/page/%2e%2e/outside.js",
        "/page/..%2foutside.js",
        "/page//etc/passwd",
        "/page/base/../../outside.js",
        "/page/../v1/sessions",
        "/page/index.html\0.js",
    ],
)
async def test_no_other_path_is_reached(house: House, path: str) -> None:
    """As an attacker sends it: HTTP clients would tidy it up."""
    from urllib.parse import unquote

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "GET",
        "path": unquote(path),
        "headers": [(b"host", b"127.0.0.1")],
        "query_string": b"",
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "root_path": "",
    }
    await house.app(scope, receive, send)
    assert sent[0]["status"] == 404
    assert b"secret" not in b"".join(message.get("body", b"") for message in sent)


async def test_without_files_there_is_no_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(http_app, "PageFiles", lambda: PageFiles(read_files(tmp_path)))
    house = House(settings=make_settings())
    async with house.client() as client:
        answer = await client.get("/")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_route")
