"""Two real vLLM servers: with the connector, and without it, which says what is right."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from samovar.configs.settings import ModelSettings
from samovar.replicas.model import ensure_model
from tests.vllm.servers import Answer, Tiers, Vllm

ENVIRONMENT = os.environ.get("TESTS_VLLM")
collect_ignore_glob = [] if ENVIRONMENT else ["test_*.py"]
"""`make test-vllm` names the environment that vLLM lives in; other targets leave these files out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1200))  # a server starts within the first test


@pytest.fixture(scope="session")
def bin_dir() -> Path:
    return Path(str(ENVIRONMENT)).resolve() / "bin"


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A short path: a socket's has at most 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="samovar-vllm-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@dataclass
class Truth:
    """Greedy texts of vLLM alone. `uneven`: prompts whose texts, cold and warm, were not one."""

    vllm: Vllm
    texts: dict[tuple[int, ...], str | None] = field(default_factory=dict)

    @property
    def uneven(self) -> int:
        return list(self.texts.values()).count(None)

    def check(self, ids: Sequence[int], answer: Answer) -> None:
        """Raise `AssertionError` if vLLM alone says something else, and always that."""
        key = tuple(ids)
        if key not in self.texts:
            cold, warm = self.vllm.ask(ids), self.vllm.ask(ids)
            self.texts[key] = cold.text if cold.text == warm.text else None
        assert self.texts[key] in (None, answer.text)


@pytest.fixture(scope="session")
def both(bin_dir: Path, folder: Path) -> Iterator[tuple[Vllm, Vllm]]:
    """With the connector, and alone; they start at the same time."""
    made = []
    for name, socket in (("with", folder / "run" / "tiers.sock"), ("alone", None)):
        (folder / name).mkdir()
        made.append(Vllm(bin_dir, folder / name, ensure_model(ModelSettings()), socket))
    try:
        for vllm in made:
            vllm.start()
        for vllm in made:
            vllm.until_ready()
        yield made[0], made[1]
    finally:
        for vllm in made:
            vllm.end()


@pytest.fixture
def vllm(both: tuple[Vllm, Vllm]) -> Iterator[Vllm]:
    """The server with the connector, its pool empty; afterwards it still lives, and no page is lost."""
    both[0].forget()
    yield both[0]
    both[0].forget()


@pytest.fixture(scope="session")
def truth(both: tuple[Vllm, Vllm]) -> Iterator[Truth]:
    made = Truth(both[1])
    yield made
    print(f"vLLM alone was not equal to itself in {made.uneven} of {len(made.texts)} prompts")


@pytest.fixture
def tiers(bin_dir: Path, folder: Path, tmp_path: Path) -> Iterator[Tiers]:
    """Tiers with nothing in them, not started."""
    made = Tiers(bin_dir, tmp_path, folder / "run" / "tiers.sock")
    yield made
    made.end()
