"""One real service for all tests of this folder: two replicas of the real model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.services.service import Service, for_served_dtype, serving


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    output = tmp_path_factory.mktemp("service") / "out.txt"
    pool_bytes = for_served_dtype(256 * 2**20)
    flags = ("--replicas", "2", "--engine.pool-bytes-max", str(pool_bytes), "--engine.sequences-max", "16")
    with serving(output, *flags) as service:
        yield service


@pytest.fixture
def client(service: Service) -> openai.OpenAI:
    return service.openai()
