"""The pages' requests, Python and commands against a whole service (in process: unit/repository)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import PAGES, Block, blocks_of, commands_of
from tests.support.services.service import Service, serving
from tests.support.shell_words import parts
from tests.support.snippets import URL_OF_PAGES, requests_of, run_python

pytestmark = pytest.mark.slow

COMMAND_S_MAX = 120.0
ASKING = {"chat", "status", "version"}
"""Commands of `samovar` that ask a server, or nobody."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("pages") / "out.txt") as one:
        yield one


def blocks(*languages: str) -> list[Block]:
    found = [block for page in PAGES for block in blocks_of(page)]
    return [block for block in found if block.language in languages and not block.why_not]


def lines() -> Iterator[tuple[str, str]]:
    """Each command of the pages that asks a server, and where it stands."""
    for block in blocks("sh"):
        for command in commands_of(block.text):
            for words in parts(command.text):
                program = words[0].rpartition("/")[2]
                if program == "curl" or (program == "samovar" and words[1:] and words[1] in ASKING):
                    yield block.name, command.text


@pytest.mark.parametrize(("name", "line"), list(lines()))
def test_a_command_does_what_the_page_says(service: Service, name: str, line: str) -> None:
    program = Path(sys.executable).with_name("samovar")
    asked = line.replace(URL_OF_PAGES, service.url).replace(".venv/bin/samovar", str(program))
    asked = asked.replace("curl ", "curl --silent --show-error --fail-with-body ", 1)
    done = subprocess.run(
        ["bash", "-c", asked],
        env={**os.environ, "SAMOVAR_URL": service.url},
        capture_output=True,
        text=True,
        timeout=COMMAND_S_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{name}: {done.stdout} {done.stderr}"
    assert done.stdout


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: block.name)
def test_a_body_is_answered(service: Service, block: Block) -> None:
    with service.http() as http:
        for one in requests_of(block):
            answer = http.request(one.method, one.path, content=one.body, headers=one.headers)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_python_says_that_the_second_turn_was_cached(service: Service, block: Block) -> None:
    prompt, cached = map(int, run_python(block, service.url).split()[-2:])
    assert 0 < cached < prompt
