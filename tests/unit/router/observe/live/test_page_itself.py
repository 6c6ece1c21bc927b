"""The shipped page: nothing from elsewhere, nothing inline, nothing unused, vendored parts as they were."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from samovar.cluster.cli.conversation import TOY_PENALTY
from samovar.configs.model_reference import DEFAULT_NAME
from samovar.router.observe.live.routes import FOLDER, POLICY, TYPES
from tests.support.pages import ROOT

FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
VENDORED = [path for path in FILES if path.parent.name == "vendor"]
OWN = [path for path in FILES if path not in VENDORED]
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
DIGESTS = {  # npm's own files of these versions
    "markdown-it-15.0.3.esm.min.js": "d5432491790141da046b1197353705db03264f40b5727f3b4b591f5aba193e30",
    "uplot-1.6.32.esm.js": "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
    "uplot-1.6.32.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
PURE = ROOT / "tests/page/pure.test.mjs"
SVG_NAMESPACE = "http://www.w3.org/2000/svg"
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
    r"|setAttribute\(.style|javascript:|createContextualFragment|setHTMLUnsafe"
)
CALLS_ELSEWHERE = re.compile(r"\bfetch\(|XMLHttpRequest|WebSocket|EventSource|importScripts|sendBeacon")


class Page(HTMLParser):
    """What index.html holds: tags with their attributes, and the text of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed((FOLDER / "index.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def values(self, name: str) -> list[str]:
        return [given[name] or "" for _, given in self.tags if name in given]


PAGE = Page()


def imported(path: Path) -> set[Path]:
    """The modules that a module imports."""
    text = path.read_text(encoding="utf-8")
    return {
        (path.parent / name).resolve() for name in re.findall(r'^(?:import|\}) ?.*?"(\.[^"]+)";$', text, re.M)
    }


def test_every_file_is_used_and_every_name_leads_to_a_file() -> None:
    named = {(FOLDER / name.removeprefix("page/")).resolve() for name in PAGE.values("src")}
    links = [name for name in PAGE.values("href") if not name.startswith("#")]
    named |= {(FOLDER / name.removeprefix("page/")).resolve() for name in links}
    new = set(named)
    while new:
        new = {one for path in new if path.suffix == ".js" for one in imported(path)} - named
        named |= new
    licences = {path for path in VENDORED if path.name.endswith(".LICENSE.txt")}
    assert named | licences | {FOLDER / "index.html"} == set(FILES)


def test_every_file_is_of_a_served_type_and_small() -> None:
    assert [path.name for path in FILES if path.suffix not in TYPES] == []
    assert [path.name for path in OWN if len(path.read_text(encoding="utf-8").splitlines()) > 600] == []
    assert max(Counter(path.parent for path in FILES).values()) <= 12


def test_nothing_is_loaded_from_elsewhere() -> None:
    for path in OWN:
        urls = re.findall(r"https?://[\w.-]+[^\s\"'`<>)]*", path.read_text(encoding="utf-8"))
        assert set(urls) <= {SVG_NAMESPACE}, path.name
    for path in VENDORED:
        if path.suffix != ".txt":
            text = path.read_text(encoding="utf-8")
            assert not CALLS_ELSEWHERE.search(text), path.name
            assert not re.search(r"@import|url\(|^import .* from", text, re.M), path.name
    assert all(name.startswith(("page/", "#")) for name in PAGE.values("href") + PAGE.values("src"))


def test_no_script_style_or_handler_is_inline() -> None:
    assert "unsafe" not in POLICY
    assert "require-trusted-types-for 'script'" in POLICY
    assert [
        given for tag, given in PAGE.tags if tag == "style" or (tag == "script" and "src" not in given)
    ] == []
    assert [
        name for _, given in PAGE.tags for name in given if name == "style" or name.startswith("on")
    ] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_text_never_becomes_markup(path: Path) -> None:
    assert MARKUP.findall(path.read_text(encoding="utf-8")) == []


def test_every_element_that_scripts_look_for_is_there_once() -> None:
    ids = Counter(PAGE.values("id"))
    wanted = {
        name
        for path in SCRIPTS
        for name in re.findall(r'byId\("([\w-]+)"\)', path.read_text(encoding="utf-8"))
    }
    assert wanted
    assert wanted <= ids.keys()
    assert [name for name, count in ids.items() if count > 1] == []
    referred = [*PAGE.values("for"), *PAGE.values("aria-controls"), *PAGE.values("aria-labelledby")]
    assert set(referred) <= ids.keys()


def test_what_needs_no_browser_counts_and_names_as_it_should() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: make test-page needs it")
    done = subprocess.run([node, "--test", PURE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


def test_vendored_files_are_those_of_their_version_with_their_licences() -> None:
    code = {path.name: path for path in VENDORED if path.suffix != ".txt"}
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in code.items()} == DIGESTS
    for name in code:
        library = re.match(r"([a-z-]+)-\d", name)
        assert library
        licence = (FOLDER / "vendor" / f"{library[1]}.LICENSE.txt").read_text(encoding="utf-8")
        assert "Permission is hereby granted" in licence
        assert "Copyright" in licence


def test_the_toy_model_is_asked_as_samovar_chat_asks_it() -> None:
    text = (FOLDER / "chat" / "completion.js").read_text(encoding="utf-8")
    assert f'const TOY = "{DEFAULT_NAME}";' in text
    assert f"{{ temperature: 0, repetition_penalty: {TOY_PENALTY} }}" in text
