"""moto's AWS as a process on 127.0.0.1. It knows no test; IAM is enforced from where `enforce_iam` says."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

START_TIMEOUT_S = 60
KEYS = {"AWS_ACCESS_KEY_ID": "setup", "AWS_SECRET_ACCESS_KEY": "setup", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def moto_process() -> Iterator[str]:
    """The URL; the process is ended on the way out. Raises TimeoutError if it does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    env = {**os.environ, **KEYS, "MOTO_IAM_LOAD_MANAGED_POLICIES": "true"}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process)
            yield url
        finally:
            process.terminate()


def enforce_iam(url: str, on: bool) -> None:
    """From now on every call needs a policy that allows it; or none does."""
    calls_left = b"0" if on else b"1000000000"
    httpx.post(f"{url}/moto-api/reset-auth", content=calls_left).raise_for_status()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"moto.server ended with {process.returncode}")
        try:
            httpx.get(f"{url}/moto-api/", timeout=5)
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError(f"moto.server did not answer in {START_TIMEOUT_S} s")
