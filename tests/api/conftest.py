"""One real service, two replicas of the real model, for all tests here without settings of their own.

It is started in a folder and a shell that somebody else has prepared, badly: nothing of that may be noticed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.support.services.service import Service, for_served_dtype, serving

FLAGS = {
    "cluster.replicas": "2",
    "engine.pool-bytes-max": str(for_served_dtype(256 * 2**20)),
    "engine.sequences-max": "16",
    "engine.threads": "1",
    "router.heartbeat-s": "1",
    "router.stall-s": "5",
}


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    # Started in a folder with packages of the same names as ours, which Ray's workers must not find first.
    for name in ("configs", "router", "replicas"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('a foreign package was imported')\n")
    # As in somebody's shell who wants Ray to be as it was, and with the file that Ray makes for itself.
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o644)
    env = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": str(token)}
    flags = [part for name, value in FLAGS.items() for part in (f"--{name}", value)]
    with serving(folder / "out.txt", *flags, cwd=folder, env=env) as service:
        yield service
        sockets = sockets_of(service)
    assert not sockets.exists(), "what it leaves behind"


def sockets_of(service: Service) -> Path:
    """Where the service's raylet has its sockets."""
    (raylet,) = service.pids_of(r"/raylet/raylet ")
    named = re.search(r"--raylet_socket_name=(\S+)", " ".join(psutil.Process(raylet).cmdline()))
    assert named is not None
    return Path(named[1]).parent


@pytest.fixture
def client(service: Service) -> openai.OpenAI:
    return service.openai()


@pytest.fixture
def sockets(service: Service) -> Path:
    return sockets_of(service)
