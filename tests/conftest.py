"""Shared by all tests: one torch thread (two cores are shared), and models made once a session.

Also says which CPU this is, at the head, and which models are exact on it, at the end: the law depends on it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from configs.settings import ModelSettings
from replicas.model.store import ensure_model
from tests.support.engines import exactness, other_cpu
from tests.support.engines.engines import small_engine
from tests.support.engines.tiny_models import make_tiny_model

pytest_plugins = ["tests.prove"]  # it knows the marker `guarantee`

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

PLAYED = other_cpu.dtypes_of(os.environ.get(other_cpu.VARIABLE, ""))
if PLAYED:
    other_cpu.play(PLAYED)


def pytest_report_header() -> list[str]:
    played = [f"{other_cpu.VARIABLE}: {', '.join(sorted(map(str, PLAYED)))} add in another order"]
    return [f"CPU: {exactness.cpu_in_words()}", *(played if PLAYED else [])]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:  # one of xdist's workers
        output["exactness"] = [[*key, sentence] for key, sentence in exactness.verdicts.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    for model, dtype, threads, sentence in getattr(node, "workeroutput", {}).get("exactness", ()):
        exactness.verdicts[model, dtype, threads] = sentence


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lines := exactness.verdicts_in_words():
        terminalreporter.section("what the probe says on this CPU")
        terminalreporter.write_line(exactness.cpu_in_words())
        for line in lines:
            terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # with `--dist loadgroup` a file's tests stay together, and files that share a service
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    if not os.environ.get("TESTS_SLOW"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: `make test-slow` and `make prove` run it"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def tiny_is_exact(tiny_llama: Path) -> bool:
    """What the product's probe says here of `tiny_llama` in float32, as `small_engine` runs it."""
    return small_engine(tiny_llama).info.exact


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, converted into the user's cache as `samovar serve` does it."""
    return ensure_model(ModelSettings())
