"""A run of the tests leaves no process behind, however it ends."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.house import ROOT, dotted
from tests.support import orphans

START_S = 120.0
OTHERWISE = {
    "tests/support/orphans.py": "it ends the others",
    "tests/infra/netlab/host.py": "its machines are namespaces that end with their first process",
    "tests/infra/netlab/lab.py": "the same",
    "tests/infra/mirror.py": "its environment is made from ours by its caller",
}
RUN = """
import json, os, pathlib, subprocess, sys, time
from samovar.cluster.serve.s3_demo import S3Demo

WAITS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
LEAVES = (
    "import subprocess, sys; null = subprocess.DEVNULL; "
    "print(subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=null, stderr=null).pid)"
)

def test_waits(tmp_path):
    demo = S3Demo(tmp_path).start()
    stubborn = subprocess.Popen([sys.executable, "-c", WAITS])
    command = [sys.executable, "-c", LEAVES, sys.executable, "-c", WAITS]
    left = int(subprocess.run(command, capture_output=True, check=True).stdout)
    told = {"pids": [demo.pid, stubborn.pid, left, os.getpid()]}
    part = pathlib.Path(os.environ["TOLD"] + ".part")
    part.write_text(json.dumps(told))
    part.rename(os.environ["TOLD"])
    time.sleep(600)
"""


def ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize(("how", "workers"), [(signal.SIGTERM, "0"), (signal.SIGKILL, "1")])
def test_a_run_that_is_killed_leaves_nothing_behind(
    tmp_path: Path, workers: str, how: signal.Signals
) -> None:
    (tmp_path / "test_waits.py").write_text(RUN)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    told = tmp_path / "told.json"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.support.orphans",
        "-n",
        workers,
        "test_waits.py",
    ]
    with (tmp_path / "out.txt").open("wb") as out:
        run = subprocess.Popen(
            words,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path, "TOLD": str(told)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        until_s = time.monotonic() + START_S
        while not told.exists():
            assert run.poll() is None, (tmp_path / "out.txt").read_text()
            assert time.monotonic() < until_s, "the run inside does not get to its test"
            time.sleep(0.05)
    processes = [psutil.Process(pid) for pid in json.loads(told.read_text())["pids"]]
    run.send_signal(how)
    run.wait()
    deadline_s = time.monotonic() + 2 * orphans.END_S
    while not all(map(ended, processes)):
        assert time.monotonic() < deadline_s, [one for one in processes if not ended(one)]
        time.sleep(0.1)


def popens(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and environment of each start of a process that is not waited for, where it has one of its own."""
    given = {
        target.id: ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in (
            "Popen",
            "create_subprocess_exec",
            "create_subprocess_shell",
        ):
            for keyword in node.keywords:
                if keyword.arg == "env":
                    said = ast.unparse(keyword.value)
                    yield node.lineno, given.get(said, said)


def test_what_tests_start_has_the_mark_of_its_run() -> None:
    """An environment is made from ours, so that the process is found when the run has ended."""
    unmarked = [
        f"{path.relative_to(ROOT)}:{line}: env={env}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.relative_to(ROOT).as_posix() not in OTHERWISE
        for line, env in popens(ast.parse(path.read_text()))
        if "environ" not in env
    ]
    assert not unmarked
