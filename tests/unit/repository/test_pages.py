"""Links of the Markdown pages lead to files and headings that there are; the README stays short."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from samovar.configs.fields import section_keys, setting_fields
from tests.prove import GUARANTEES, ids_in
from tests.support.pages import PAGES, ROOT, anchors_of, broken_links, links_of, slug

PRESENT = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "adr"]
"""Pages that say how it is, not how it was."""
FILES = (".py", ".md", ".json", ".yaml", ".toml", ".sh", ".lock", ".sqlite")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` c\n\n## Two\n## Two\n\n[here](page.md#a-b-c), [twice](#two-1), [there](gone.md), "
        "[nowhere](page.md#d), [none](#three)\n[out](https://example.com/x.md)\n\n```sh\n[no](link.md)\n```\n"
    )
    assert broken_links(page) == ["gone.md", "page.md#d", "#three"]
    assert anchors_of(page) == {"a-b-c", "two", "two-1"}


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("2026-11-21, engine (`make bench`, i.e. `python -m bench.engine --repeats 3`)",
         "2026-11-21-engine-make-bench-ie-python--m-benchengine---repeats-3"),
        ("What keeps a prefix", "what-keeps-a-prefix"),
        ("[a link](page.md) & more", "a-link--more"),
    ],
)  # fmt: skip
def test_anchors_are_githubs(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor


def proven_by(path: Path) -> set[str]:
    """What the tests of a file say that they prove: by its name, theirs, their classes', or a mark."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = [node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    named += [node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)]
    return {id_ for name in (path.stem, *named) for id_ in ids_in(name)} | set(marked_in(tree))


def marked_in(tree: ast.Module) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.guarantee"):
            yield from (one.value for one in node.args if isinstance(one, ast.Constant))


def test_each_promise_links_tests_that_prove_it() -> None:
    page = ROOT / "docs/guarantees.md"
    rows = re.findall(r"^\| (G\d+) \|.*\| ([^|]+) \|$", page.read_text(encoding="utf-8"), re.M)
    assert [name for name, _ in rows] == list(GUARANTEES)
    for name, cell in rows:
        linked = re.findall(r"\]\(([^)]+)\)", cell)
        assert linked, name
        wrong = [target for target in linked if name not in proven_by((page.parent / target).resolve())]
        assert wrong == [], f"{name} is proven by no test of {wrong}"


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def test_the_list_of_benchmarks_leads_to_every_section() -> None:
    folder = ROOT / "docs/benchmarks"
    listed = set(links_of(folder / "README.md"))
    sections = {
        f"{page.name}#{slug(heading)}"
        for page in folder.glob("20*.md")
        for heading in re.findall(r"^## (.*)", page.read_text(encoding="utf-8"), re.M)
    }
    assert len(sections) > 40
    assert sections - listed == set()


MACHINES = re.compile(r"(?<![\w.}~])/(?:root|work|home|tmp|Users)/[\w.~*-]+")
TOLD_TO_ALL = re.compile(r"/tmp/(?:ray|ray_tmp_mount|samovar-\*)$|/home/me$")
"""Ray's own places and ours, and the examples' user."""


def paths_of_machines(text: str) -> list[str]:
    """Paths of the machine on which a text was made, and that nobody else has."""
    return [found for found in MACHINES.findall(text) if not TOLD_TO_ALL.match(found)]


def test_no_file_has_paths_of_a_machine() -> None:
    """But for tests, which make paths up."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    paths = [ROOT / name for name in listed if name and not name.startswith("tests/")]
    texts = {path: path.read_bytes().decode("utf-8", "ignore") for path in paths if path.is_file()}
    assert len(texts) > 500
    found = {str(path.relative_to(ROOT)): paths_of_machines(text) for path, text in texts.items()}
    assert {path: names for path, names in found.items() if names} == {}, "say FOLDER, or nothing"


def test_paths_of_a_machine_are_found() -> None:
    text = '"/root/out/a.json", /work/shared/x, (/home/ann), "/tmp/ray/session", /home/me/m, a/tmp/b, ~/work'
    assert paths_of_machines(text) == ["/root/out", "/work/shared", "/home/ann"]


def unknown_settings(text: str) -> list[str]:
    """Settings that a text quotes and that there are not; names of files have dots, too."""
    known = {*setting_fields(), *section_keys()}
    sections = {key.partition(".")[0] for key in known}
    return [
        key
        for key in re.findall(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)+)(?:[=:][^`]*)?`", text)
        if key.partition(".")[0] in sections and key not in known and not key.endswith(FILES)
    ]


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_a_page_names_exist(page: Path) -> None:
    assert unknown_settings(page.read_text(encoding="utf-8")) == []


def test_a_setting_that_is_gone_is_found() -> None:
    text = "`router.spill_factor`, `engine.kv_dtype: int8`, `router/auth.py`, `model.json` and `tiers.cpu`"
    assert unknown_settings(text) == ["router.spill_factor"]
