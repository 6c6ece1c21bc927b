"""The image by its own Dockerfile, built by buildah without a daemon and without a registry, and served from.

Its base is a Debian by debootstrap in place of Docker Hub's `python`, so the Python is Debian's. All else is
as `docker build` does it. `TESTS_IMAGE_ARGS`: words for `buildah bud`, where packages come from elsewhere.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.house import ROOT
from tests.infra.needs import need, needs_infra
from tests.support.services.service import free_port

pytestmark = needs_infra
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "ca-certificates,python3,python3-dev,python3-pip,python3-setuptools,python3-venv,python3-wheel"
AUTHORITIES = Path("etc/ssl/certs/ca-certificates.crt")
STORAGE = '[storage]\ndriver = "overlay"\nrunroot = "{0}/run"\ngraphroot = "{0}/graph"\n'
KEY = "0123456789abcdef"
START_S_MAX = 600.0


class Buildah:
    """Containers by chroot, in a store of their own below `folder`."""

    def __init__(self, folder: Path) -> None:
        (folder / "storage.conf").write_text(STORAGE.format(folder))
        self.environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf")}

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            ["buildah", *words], env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout.strip()

    def words(self, container: str, *command: str, **variables: str) -> list[str]:
        """Return what runs a command in a container, as its image's user."""
        told = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        return ["run", "--isolation", "chroot", "--network", "host", *told, container, "--", *command]

    @contextmanager
    def running(self, log: Path, words: Sequence[str]) -> Iterator[psutil.Popen]:
        """Run a command until the block ends; then its first process is told to stop, and has to."""
        with log.open("wb") as output:
            process = psutil.Popen(["buildah", *words], env=self.environment, stdout=output, stderr=output)
            try:
                yield process
            finally:
                for one in process.children(recursive=True):
                    if one.name() == "tini":
                        one.terminate()
                process.wait(timeout=START_S_MAX)


@pytest.fixture
def buildah() -> Iterator[Buildah]:
    need("root", "buildah", "debootstrap")
    with tempfile.TemporaryDirectory(prefix="samovar-image-", ignore_cleanup_errors=True) as name:
        found = Buildah(Path(name))
        _make_base(found, Path(name) / "root")
        yield found
        found("rm", "--all")
        found("rmi", "--all", "--force")


def _make_base(buildah: Buildah, root: Path) -> None:
    """Commit a Debian with Python as `localhost/base:1`."""
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root), MIRROR],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()  # the image's pip installs beside Debian's
    (root / "usr/bin/python").symlink_to("python3")
    # Those that this machine trusts: its way to PyPI may have one of its own.
    shutil.copyfile(Path("/") / AUTHORITIES, root / AUTHORITIES)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(root), "/")
    buildah("commit", "--quiet", "--rm", container, "localhost/base:1")


def test_the_image_is_built_and_its_second_turn_finds_the_first(buildah: Buildah, tmp_path: Path) -> None:
    more = shlex.split(os.environ.get("TESTS_IMAGE_ARGS", ""))
    where = ["--isolation", "chroot", "--network", "host", "--format", "docker", "--from", "localhost/base:1"]
    buildah("bud", *where, *more, "--file", "cluster/manifests/Dockerfile", "--tag", "samovar:test", ".")
    container = buildah("from", "localhost/samovar:test")
    assert "samovar" in buildah(*buildah.words(container, "samovar", "version"))
    assert buildah(*buildah.words(container, "id", "-u")) == "1000"

    url, log = f"http://127.0.0.1:{(port := free_port())}", tmp_path / "serve.log"
    variables = {"SAMOVAR_SERVER__PORT": str(port), "SAMOVAR_AUTH__API_KEYS": f'{{"team": "{KEY}"}}'}
    words = buildah.words(container, "tini", "--", "samovar", "serve", "--host", "127.0.0.1", **variables)
    said = [{"role": "user", "content": "What is a samovar? " + "A long story. " * 60}]
    body = {"model": "SmolLM2-135M-Instruct", "max_tokens": 8, "messages": said}
    with buildah.running(log, words) as process, httpx.Client(trust_env=False, timeout=120.0) as client:
        ends_s = time.monotonic() + START_S_MAX
        while not _is_ready(client, url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < ends_s, log.read_text()[-3000:]
            time.sleep(1.0)
        path, headers = f"{url}/v1/chat/completions", {"Authorization": f"Bearer {KEY}"}
        cached = []
        for _ in range(2):
            answer = client.post(path, json=body, headers=headers).raise_for_status().json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert client.post(path, json=body).status_code == httpx.codes.UNAUTHORIZED
    assert cached[0] == 0 < cached[1]


def _is_ready(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
