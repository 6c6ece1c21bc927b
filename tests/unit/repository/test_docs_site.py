"""The site of `make docs`: every page has its place, and links lead somewhere in it, too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from samovar.configs.fields import setting_fields
from tests.docs_site import NAV, lay_out, navigation, pages
from tests.support.pages import ROOT, anchors_of, broken_links

GENERATED = {"routes.md", "settings.md"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    lay_out(folder)
    return folder / "pages"


def test_every_page_has_one_place_in_the_navigation() -> None:
    placed = [page for entries in NAV.values() for page in entries.values()]
    assert len(placed) == len(set(placed))
    there = {place for place in pages().values() if not place.startswith("adr/")}
    assert set(placed) == there | GENERATED


def test_pages_that_are_not_there_have_no_entry() -> None:
    sections = navigation({"index.md", "adr/001-own-session-router.md"})
    assert sections[0] == {"Start": [{"Quickstart": "index.md"}]}
    (decision,) = next(
        entries for section in sections for name, entries in section.items() if name == "Decisions"
    )
    assert next(iter(decision)).startswith("1. ")


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    broken = {page.relative_to(site).as_posix(): broken_links(page) for page in site.rglob("*.md")}
    assert {page: links for page, links in broken.items() if links} == {}


def test_the_settings_of_the_site_are_yaml_with_the_pages(site: Path) -> None:
    text = (site.parent / "mkdocs.yml").read_text()
    told = yaml.safe_load(re.sub(r"!!python/\S+", "", text))
    entries = [page for section in told["nav"] for one in section.values() for page in one]
    assert all((site / page).exists() for entry in entries for page in entry.values())


def test_generated_pages_have_every_setting_and_route(site: Path) -> None:
    settings = (site / "settings.md").read_text()
    assert [key for key in setting_fields() if f"| `{key}` |" not in settings] == []
    document = json.loads((site / "openapi.json").read_text())
    anchors = anchors_of(site / "routes.md")
    assert len(anchors) >= len(document["components"]["schemas"]) + len(document["paths"])
    assert "post-v1chatcompletions" in anchors


def test_the_makefile_builds_strictly_with_what_is_locked() -> None:
    text = (ROOT / "Makefile").read_text()
    assert "zensical build --strict" in text
    assert "pip install --quiet $(LOCKED) -r $<" in text
    assert "sha512sum --check" in text
