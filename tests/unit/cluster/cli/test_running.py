"""Servers that run here are found without an address; what has ended is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from samovar.cluster.cli.running import DEFAULT_URL, RunningServers, full_url, server_url


def left_by(folder: Path, pid: int, started_s: float, url: str = "http://127.0.0.1:9") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{pid}.json"
    path.write_text(json.dumps({"url": url, "pid": pid, "pid_started_s": started_s}))
    return path


def test_a_server_is_found_from_ready_to_stop(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    assert server_url(None, env) == DEFAULT_URL
    servers = RunningServers.of_user(env)
    servers.announce("http://127.0.0.1:8811")
    (found,) = RunningServers.of_user(env).living()
    assert (found.url, found.pid) == ("http://127.0.0.1:8811", os.getpid())
    assert server_url(None, env) == "http://127.0.0.1:8811"
    assert server_url("http://elsewhere:1", env) == "http://elsewhere:1"
    servers.withdraw()
    servers.withdraw()
    assert server_url(None, env) == DEFAULT_URL


def test_the_server_that_was_ready_last_is_meant(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    servers = RunningServers.of_user(env)
    parent = psutil.Process(os.getppid())
    older = left_by(servers.folder, parent.pid, parent.create_time())
    os.utime(older, (1.0, 1.0))
    servers.announce("http://127.0.0.1:2")
    assert [server.url for server in servers.living()] == ["http://127.0.0.1:2", "http://127.0.0.1:9"]


def test_what_killed_servers_have_left_is_removed(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    folder = RunningServers.of_user(env).folder
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = [
        left_by(folder, ended.pid, 1.0),
        left_by(folder, os.getpid(), 1.0),  # the pid is somebody else's now
        left_by(folder, os.getppid(), 1.0, "file:///etc/passwd"),
    ]
    (folder / "bad.json").write_text("{")
    assert server_url(None, env) == DEFAULT_URL
    assert not [path for path in (*left, folder / "bad.json") if path.exists()]


@pytest.mark.parametrize("home", ["~nosuchuser/state", "/proc/nowhere"])
def test_without_a_place_for_the_file_the_server_runs_all_the_same(home: str) -> None:
    servers = RunningServers.of_user({"XDG_STATE_HOME": home})
    if home.startswith("/"):
        servers.announce("http://127.0.0.1:1")
    servers.withdraw()
    assert servers.living() == []


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("127.0.0.1:8811", "http://127.0.0.1:8811"),
        ("host.example:80/v1", "http://host.example:80/v1"),
        ("[::1]:8811", "http://[::1]:8811"),
        (":8811", "http://127.0.0.1:8811"),
        ("8811", "http://127.0.0.1:8811"),
        ("https://a", "https://a"),
        ("nowhere", "nowhere"),
    ],
)
def test_a_host_and_a_port_are_an_address(given: str, meant: str) -> None:
    assert full_url(given) == meant
