"""Shared by the infrastructure tests: a copy of terraform/ in which Terraform runs offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infra.awsschema.package import PackageMissing
from tests.infra.mirror import TREE, Bench, bench, kept_running
from tests.infra.moto_process import moto_process
from tests.infra.needs import cannot_run, need

EVERYTHING = "everything"
"""An environment that is not shipped: every optional part at once."""


def var_file(env: str) -> str:
    """The option that picks an environment of terraform/envs, or EVERYTHING."""
    folder = Path(__file__).parent if env == EVERYTHING else TREE / "envs"
    return f"-var-file={folder / env}.tfvars"


def bench_or_fail(place: Path, source: Path = TREE, local_state: bool = True) -> Bench:
    """A bench; fails where Terraform or the schema cannot be had, and says why."""
    need("terraform", "npm")
    try:
        return bench(place, source, local_state)
    except PackageMissing as problem:
        cannot_run(f"the AWS provider's schema comes from npm: {problem}")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """terraform/, initialised with local state; shared by a file's tests, which must leave it as it was."""
    made = bench_or_fail(tmp_path_factory.mktemp("stack"))
    with kept_running(made) as quick:
        quick.run("init")
        yield quick


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    """An AWS of our own on 127.0.0.1, with no IAM enforced until a test asks for it."""
    need("moto")
    with moto_process() as url:
        yield url
