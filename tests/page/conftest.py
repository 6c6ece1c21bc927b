"""A real Chromium, and pages in it that notice every error and every request that leaves the host."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.page.fake_service import World, serving
from tests.support.services.service import free_port

collect_ignore_glob = [] if importlib.util.find_spec("playwright") else ["test_*.py"]
"""`make test-page` installs Playwright beside the environment; other targets leave these files out."""

WIDE, NARROW = (1280, 860), (390, 844)
PICTURES = Path(__file__).parents[2] / "docs" / "img"
AXE = Path(os.environ.get("TESTS_AXE", "axe.min.js"))
CHROMIUM_HOW = "Chromium is missing: apt-get install chromium"
IMPACTS = ("serious", "critical")


@dataclass
class Seen:
    """What went wrong in a page: messages of its console, errors, requests to elsewhere."""

    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def watch(self, page: Any) -> None:
        page.on("console", lambda said: said.type in ("error", "warning") and self.errors.append(said.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self._request(request.url))

    def _request(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
            self.foreign.append(url)

    def check(self) -> None:
        assert self.foreign == []
        assert self.errors == []


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        pytest.fail(CHROMIUM_HOW)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def open_page(browser: Any, seen: Seen) -> Iterator[Callable[..., Any]]:
    """Open a URL in a browser of its own (its own storage), of some size."""
    contexts = []

    def opened(url: str, size: tuple[int, int] = WIDE, **options: Any) -> Any:
        width, height = size
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        seen.watch(page)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def fake(world: World) -> Iterator[str]:
    """The URL of a fake service over `world`."""
    with serving(world, free_port()) as url:
        yield url


def live(page: Any) -> Any:
    """Wait until the page's stream is there."""
    page.locator("#link[data-link=live]").wait_for()
    return page


def say(page: Any, text: str) -> None:
    page.get_by_label("Message to the model").fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def answers(page: Any, count: int, timeout_s: float = 30) -> Any:
    """Wait until so many answers have ended and show their turn; the last of them."""
    page.locator(".from-assistant:not(.streaming) .turn:not([hidden])").nth(count - 1).wait_for(
        timeout=timeout_s * 1000
    )
    return page.locator(".from-assistant").nth(count - 1)


def axe_problems(page: Any) -> list[str]:
    """What axe-core finds serious or critical."""
    if not AXE.exists():
        pytest.fail(f"{AXE} is missing: `make test-page` installs it (needs npm)")
    # In a world of its own the page's policy does not hold: it forbids evaluation, as it should.
    session = page.context.new_cdp_session(page)
    frame = session.send("Page.getFrameTree")["frameTree"]["frame"]["id"]
    place = session.send("Page.createIsolatedWorld", {"frameId": frame})["executionContextId"]

    def run(code: str) -> Any:
        asked = {"expression": code, "contextId": place, "awaitPromise": True, "returnByValue": True}
        answer = session.send("Runtime.evaluate", asked)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    run(AXE.read_text(encoding="utf-8") + "; undefined")
    found = run("axe.run().then(({violations}) => violations)")
    session.detach()
    return [
        f"{problem['id']} ({problem['impact']}): {node['html']}"
        for problem in found
        if problem["impact"] in IMPACTS
        for node in problem["nodes"]
    ]
