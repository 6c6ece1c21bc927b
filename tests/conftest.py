"""Shared by all tests: one torch thread (two cores are shared), and models made once a session.

Also says which CPU this is, at the head, and which models are exact on it, at the end: the law depends on it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.services.scheduling import ServiceScheduling

if TYPE_CHECKING:
    from tests.support.services.postgres_server import PostgresServer

# torch, and what needs it, is imported where it is used: the process that hands tests to workers needs none.

pytest_plugins = ["tests.prove", "tests.support.orphans"]  # the marker `guarantee`; what a run leaves behind

# The gate tries the same examples every time, and a busy machine fails none of them; `make prove` draws new
# ones, and prints how to try a failing one again.
settings.register_profile(
    "samovar",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("TESTS_SLOW"),
    print_blob=True,
)
settings.load_profile("samovar")

if PLAYED := os.environ.get("TESTS_OTHER_CPU", ""):
    from tests.support.engines import other_cpu

    other_cpu.play(other_cpu.dtypes_of(PLAYED))

_of_workers: dict[str, None] = {}
"""What xdist's workers have found out about their CPU, each line once."""


def _exactness_in_words() -> list[str]:
    from tests.support.engines import exactness

    return [exactness.cpu_in_words(), *exactness.verdicts_in_words()]


def pytest_report_header(config: pytest.Config) -> list[str]:
    played = [f"TESTS_OTHER_CPU: {PLAYED} add in another order"] if PLAYED else []
    if config.getoption("numprocesses", None):
        return played  # the workers know, and say it at the end
    return [f"CPU: {_exactness_in_words()[0]}", *played]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:  # one of xdist's workers
        output["exactness"] = _exactness_in_words()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    _of_workers.update(dict.fromkeys(getattr(node, "workeroutput", {}).get("exactness", ())))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    cpu, *verdicts = _of_workers or (_exactness_in_words() if "torch" in sys.modules else [""])
    if verdicts or _of_workers:
        terminalreporter.section("what the probe says on this CPU")
        terminalreporter.write_line(cpu)
        for line in sorted(verdicts):
            terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    return ServiceScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def _takes_a_compiler(item: pytest.Item) -> bool:
    asked = getattr(getattr(item, "callspec", None), "params", {}).get("step")
    return "unit/replicas/native/" in item.nodeid or asked in ("native", "native-bf16")


def _why_no_compiler() -> str:
    """Ask the product: it knows which compilers it takes."""
    from samovar.configs.compiled import NotCompiled, find_compiler

    try:
        find_compiler(os.environ, wait_s=60)
    except NotCompiled as why:
        return str(why)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (native := list(filter(_takes_a_compiler, items))) and (why := _why_no_compiler()):
        for item in native:
            item.add_marker(pytest.mark.skip(reason=f"the native step is not tested: {why}"))
    if not os.environ.get("TESTS_SLOW"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: `make test-slow` and `make prove` run it"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.engines.tiny_models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def tiny_is_exact(tiny_llama: Path) -> bool:
    """What the product's probe says here of `tiny_llama` in float32, as `small_engine` runs it."""
    from tests.support.engines.engines import small_engine

    return small_engine(tiny_llama).info.exact


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, converted into the user's cache as `samovar serve` does it."""
    from samovar.configs.settings import ModelSettings
    from samovar.replicas.model.store import ensure_model

    return ensure_model(ModelSettings())


@pytest.fixture(scope="session")
def smollm2_cut(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model's first layers, for what is computed often: 4 of 30."""
    from tests.support.engines.cut_model import cut_model

    return cut_model(smollm2, tmp_path_factory.mktemp("cut") / f"{smollm2.name}-4-layers", 4)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL of this process's tests, without fsync."""
    from tests.support.services.postgres_server import PostgresServer

    made = PostgresServer()
    yield made
    made.close()
