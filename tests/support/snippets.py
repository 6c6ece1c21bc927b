"""Requests and Python of the pages, sent to a server."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.support.pages import Block, commands_of
from tests.support.shell_words import parts

PORT_OF_PAGES = 8000
URL_OF_PAGES = f"http://127.0.0.1:{PORT_OF_PAGES}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a page."""

    method: str
    path: str
    body: str | None
    headers: dict[str, str]


def requests_of(block: Block) -> Iterator[Asked]:
    """The requests of a block: its lines of curl, or its JSON as the body of the route in its mark."""
    if block.language == "json":
        if block.mark is not None and block.mark[0] == "body of":
            method, path = block.mark[1].split()
            yield Asked(method, path, block.text, {"content-type": "application/json"})
        return
    for command in commands_of(block.text):
        for words in parts(command.text):
            if words[0] == "curl":
                yield _curl(words[1:])


def _curl(words: list[str]) -> Asked:
    """Raises `ValueError` for an option of curl that is not read here, or another host."""
    parser = argparse.ArgumentParser(prog="curl", exit_on_error=False)
    parser.add_argument("url")
    parser.add_argument("-H", "--header", action="append", default=[])
    parser.add_argument("-d", "--data")
    parser.add_argument("-X", "--request")
    parser.add_argument("-s", "--silent", action="store_true")
    parser.add_argument("-N", "--no-buffer", action="store_true")
    given, unknown = parser.parse_known_args(words)
    if unknown or not given.url.startswith(URL_OF_PAGES):
        raise ValueError(f"curl {shlex.join(words)}: not {unknown or given.url}")
    url = urlsplit(given.url)
    method = given.request or ("GET" if given.data is None else "POST")
    headers = dict(header.split(": ", 1) for header in given.header)
    return Asked(method, url.path + (f"?{url.query}" if url.query else ""), given.data, headers)


def run_python(block: Block, url: str) -> str:
    """Run a block with a server's URL in place of the page's; return what it prints."""
    said = io.StringIO()
    code = compile(block.text.replace(URL_OF_PAGES, url), block.name, "exec")
    with contextlib.redirect_stdout(said):
        exec(code, {"__name__": "snippet"})
    return said.getvalue()
