"""Every snippet of the pages is right: requests are answered, Python runs, settings load, commands exist.

Requests and Python go to the ingress over scripted replicas; `tests/e2e/test_snippets.py` sends the same
to a whole service. A block that cannot be checked says why in a comment before it: `<!-- not run: why -->`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from samovar.configs.fields import section_keys, setting_fields
from samovar.configs.loader import ConfigError, load
from samovar.configs.settings import ModelSettings
from samovar.router.ingress.operations import OPERATIONS
from tests.support.pages import PAGES, ROOT, Block, Command, blocks_of, commands_of, prose_of
from tests.support.router.fake_directory import FakeLink
from tests.support.router.router_harness import House, make_settings, spoken
from tests.support.shell_words import inline_problem, parts, problem
from tests.support.snippets import PORT_OF_PAGES, requests_of, run_python

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
LANGUAGES = {"sh", "python", "yaml", "json", "mermaid", "text", "hcl", "js"}
SERVED = "SmolLM2-135M-Instruct"


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def by_name(*languages: str) -> pytest.MarkDecorator:
    found = of(*languages)
    return pytest.mark.parametrize("block", found, ids=[block.name for block in found])


def test_every_block_has_a_language_that_is_checked_or_says_why_it_is_not_run() -> None:
    assert [block.name for block in BLOCKS if block.language not in LANGUAGES] == []
    assert [block.name for block in of("hcl", "js") if block.why_not is None] == []
    assert [block.name for block in BLOCKS if block.why_not == ""] == []


def wrong_settings(text: str, folder: Path) -> str | None:
    """What is wrong with a YAML file of settings; placeholders in `<>` stand for any key."""
    file = folder / "settings.yaml"
    numbers = itertools.count(10**23)
    file.write_text(re.sub(r"\$\([^)]*\)|<[a-z0-9 ]+>", lambda _: f"k{next(numbers)}", text))
    file.chmod(0o600)
    try:
        load(file, {}, [])
    except ConfigError as refused:
        return str(refused)
    return None


def wrong_commands(block: Block, folder: Path) -> list[str]:
    """What is wrong with the lines of a block of shell."""
    found = []
    syntax = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    if syntax.returncode:
        return [syntax.stderr]
    for command in commands_of(block.text):
        for words in parts(command.text):
            wrong = problem(words)
            if wrong is not None and not ("nothing checks" in wrong and block.why_not):
                found.append(wrong)
        found += wrong_heredoc(command, folder)
    return found


def wrong_heredoc(command: Command, folder: Path) -> list[str]:
    if command.heredoc is None:
        return []
    word, text = command.heredoc
    wrong = wrong_settings(text, folder) if word == "YAML" else f"a here-document {word} that nothing checks"
    return [wrong] if wrong else []


@by_name("sh")
def test_commands_are_there_and_take_these_flags(block: Block, tmp_path: Path) -> None:
    assert wrong_commands(block, tmp_path) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("make no-such-target", "no target"),
        ('make run ARGS="--no-such 1"', "no-such"),
        ("make bench-peers ARGS=--no-such", "no-such"),
        ("samovar no-such", "no command"),
        ("samovar status --no-such", "no-such"),
        ("samovar serve --engine.no-such 1", "engine.no-such"),
        ("samovar serve --server.port many", "server.port"),
        (".venv/bin/python -m bench.no_such", "no module"),
        ("bash bench/no-such.sh", "no file"),
        ('pip install "samovar[s4]"', "no extra"),
        ("rocket --launch", "nothing checks"),
        ("echo 'open", "EOF"),
        ("cat > a.yaml <<YAML\nengine: {no_such: 1}\nYAML", "no_such"),
    ],
)
def test_wrong_lines_are_found(line: str, said: str, tmp_path: Path) -> None:
    found = wrong_commands(Block(ROOT / "README.md", 1, "sh", line + "\n"), tmp_path)
    assert said in " ".join(found)


def test_commands_named_in_prose_are_there() -> None:
    found = {}
    for place, code in codes():
        if re.match(r"(make|samovar|\.venv/bin/samovar) ", code) and (wrong := inline_problem(code)):
            found[place] = wrong
    assert found == {}


def codes() -> Iterator[tuple[str, str]]:
    """What stands between backticks on pages that say what is now, and where."""
    for page in PAGES:
        if page.name != "CHANGELOG.md" and page.parent.name != "adr":
            yield from (
                (f"{page.relative_to(ROOT)}: {code}", code)
                for code in re.findall(r"`([^`\n]+)`", prose_of(page))
            )


def test_settings_named_in_prose_are_there() -> None:
    known = set(setting_fields()) | section_keys()
    sections = "|".join(sorted({key.split(".")[0] for key in known}))
    named = re.compile(rf"((?:{sections})(?:\.[a-z0-9_*]+)+)(?:[=:].*)?")
    found = []
    for place, code in codes():
        match = named.fullmatch(code)
        if match is not None and match[1].removesuffix(".*") not in known:
            form = re.compile(re.escape(match[1]).replace(r"\*", "[a-z0-9_]+"))
            found += [] if any(form.fullmatch(key) for key in known) else [place]
    assert found == []


def test_metrics_named_in_prose_are_there() -> None:
    packages = ("router", "replicas", "cache_tiers", "cluster")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    named = [(place, name) for place, code in codes() for name in re.findall(r"\bsamovar_[a-z_]+", code)]
    assert named
    assert [place for place, name in named if re.sub("_(total|count|sum)$", "", name) not in source] == []


@by_name("yaml")
def test_settings_load(block: Block, tmp_path: Path) -> None:
    if block.why_not is None:
        assert wrong_settings(block.text, tmp_path) is None
    else:
        yaml.safe_load(block.text)


def house() -> House:
    settings = make_settings().model_copy(update={"model": ModelSettings(aliases=[SERVED])})
    return House(lambda _: spoken("Tea."), settings=settings, link=FakeLink())


async def test_requests_are_answered() -> None:
    """Lines of curl, and JSON under a comment `body of: METHOD /route`."""
    asked = [(block.name, one) for block in of("sh") if not block.why_not for one in requests_of(block)]
    asked += [(block.name, one) for block in of("json") for one in requests_of(block)]
    assert asked
    found = {}
    async with house().client() as client:
        for name, request in asked:
            answer = await client.request(
                request.method, request.path, content=request.body, headers=request.headers
            )
            if answer.status_code != 200:
                found[name] = answer.text
    assert found == {}


def test_json_is_a_body_of_a_route_or_says_why_not() -> None:
    for block in of("json"):
        json.loads(block.text)
        assert block.mark is not None, f"{block.name}: say `<!-- body of: POST /route -->` or why it is none"
        if block.mark[0] == "body of":
            assert tuple(block.mark[1].split()) in OPERATIONS, block.name


async def test_python_runs() -> None:
    blocks = [block for block in of("python") if block.why_not is None]
    assert blocks
    async with house().server() as url:
        for block in blocks:
            await asyncio.to_thread(run_python, block, url)


def test_the_quickstart_has_the_port_that_is_served_by_default() -> None:
    assert load(None, {}, []).settings.server.port == PORT_OF_PAGES


def test_files_that_lines_copy_are_there() -> None:
    sources = [
        words[1]
        for block in of("sh")
        for command in commands_of(block.text)
        for words in parts(command.text)
        if words[0] == "cp"
    ]
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_presets_that_pages_name_are_there() -> None:
    named = {
        words[words.index("--config") + 1]
        for block in of("sh")
        for command in commands_of(block.text)
        for words in parts(command.text)
        if "--config" in words
    }
    presets = {os.path.splitext(one.name)[0] for one in (ROOT / "configs/presets").glob("*.yaml")}
    assert {name for name in named if name.isidentifier() and "." not in name} <= presets


def test_lines_are_split_as_a_shell_does() -> None:
    line = "A=1 make x | samovar y --z '{\"a\": 1}' > out && (cat b; cp c d) # comment"
    assert list(parts(line)) == [
        ["make", "x"],
        ["samovar", "y", "--z", '{"a": 1}'],
        ["cat", "b"],
        ["cp", "c", "d"],
    ]
    assert shlex.split(commands_of("a \\\n  b\n")[0].text) == ["a", "b"]
