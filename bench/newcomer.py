"""A newcomer's path, timed: `python -m bench.newcomer`: clone, `make run`, two turns; commands and seconds.

Everything happens in a new folder with a home of its own, so nothing that this user has of Samovar is used:
no environment, model, measurement or key. pip's cache is this user's, unless `--no-pip-cache` is given. What
is cloned is the last commit of `--checkout`. The second turn must find the first one in the cache; else the
exit code is 1. The commands are README.md's, but for the port.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import _report as report
from tests.support.services.service import free_port, until

ROOT = Path(__file__).resolve().parents[1]
SETUP_S_MAX = 1800.0
TURN_S_MAX = 300.0
STOP_S_MAX = 120.0
QUESTIONS = ("Tell me about the samovar.", "And who invented it?")
ANSWER_TOKENS = 60
SERVES, READY = "samovar serve --port", "Samovar is ready: "
"""What `make run` prints after the setup, and `samovar serve` at its end."""
KEPT = ("PATH", "LANG", "TERM", "PIP_", "SSL_", "REQUESTS_", "http_", "https_", "HTTP_", "HTTPS_", "no_proxy")
"""Beginnings of the names of variables that a newcomer has, too."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a newcomer does. `typed`: the command; empty: words to the model."""

    what: str
    typed: str
    seconds: float


@dataclass
class Walk:
    """The way so far. `started_s`: a monotonic time."""

    started_s: float
    steps: list[Step] = field(default_factory=list)

    def did(self, what: str, typed: str = "") -> None:
        """Note a step that has just ended."""
        done_s = time.monotonic() - self.started_s
        self.steps.append(Step(what, typed, done_s - sum(step.seconds for step in self.steps)))
        print(f"{done_s:7.1f} s  {what}", flush=True)


def environment(home: Path, *, has_pip_cache: bool) -> dict[str, str]:
    """Return the variables of a user who has nothing of Samovar yet."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    cache = os.environ.get("PIP_CACHE_DIR") or str(Path.home() / ".cache/pip")
    pip = {"PIP_CACHE_DIR": cache} if has_pip_cache else {"PIP_NO_CACHE_DIR": "1"}
    return kept | pip | {"HOME": str(home)}


def ask(url: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Ask for one answer and append it to `messages`; return its usage."""
    body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    with httpx.Client(base_url=url, timeout=TURN_S_MAX) as http:
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        answer = http.post("/v1/chat/completions", json={"model": model, **body}).raise_for_status().json()
    messages.append(answer["choices"][0]["message"])
    usage: dict[str, Any] = answer["usage"]
    return usage


def has_page(url: str) -> bool:
    """Return whether the service shows a page at `/`."""
    answer = httpx.get(url, timeout=10.0)
    return answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")


def walk(checkout: Path, folder: Path, *, has_pip_cache: bool) -> tuple[list[Step], dict[str, Any]]:
    """Go the whole way in `folder`; return its steps and what the second turn's usage says.

    Raises `subprocess.CalledProcessError` if the clone fails, `AssertionError` if the service ends early.
    """
    home, clone, port = folder / "home", folder / "samovar", free_port()
    home.mkdir()
    env = environment(home, has_pip_cache=has_pip_cache)
    path = Walk(time.monotonic())
    subprocess.run(["git", "clone", "--quiet", str(checkout), str(clone)], env=env, check=True, timeout=300)
    path.did("cloned", "git clone URL && cd samovar")
    output = folder / "output.txt"
    with output.open("wb") as said:
        service = subprocess.Popen(
            ["make", "run", f"ARGS=--port {port}"],
            cwd=clone,
            env=env,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"

        def text() -> str:
            return output.read_text(errors="replace")

        def has(mark: str) -> bool:
            assert service.poll() is None, f"make run ended: {text()[-2000:]}"
            return mark in text()

        until("the setup is over", lambda: has(SERVES), SETUP_S_MAX)
        path.did("installed", "make run")
        until("the service is ready", lambda: has(READY), SETUP_S_MAX)
        path.did("ready")
        messages: list[dict[str, str]] = []
        usage: dict[str, Any] = {}
        for number, question in enumerate(QUESTIONS, 1):
            messages.append({"role": "user", "content": question})
            usage = ask(url, messages)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            path.did(f"turn {number}: {cached} of {usage['prompt_tokens']} prompt tokens cached")
        return path.steps, {**usage, "has_page": has_page(url)}
    finally:
        if service.poll() is None:
            os.killpg(service.pid, signal.SIGINT)
        try:
            service.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            os.killpg(service.pid, signal.SIGKILL)
            service.wait(STOP_S_MAX)


def main(words: Sequence[str]) -> int:
    """Walk, print and write `bench/out/newcomer.json`; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.newcomer", description=__doc__)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="what is cloned; default: this one")
    parser.add_argument("--no-pip-cache", action="store_true", help="download every package")
    parser.add_argument("--keep", action="store_true", help="leave the folder there")
    given = parser.parse_args(words)
    folder = Path(tempfile.mkdtemp(prefix="samovar-newcomer-"))
    try:
        steps, second = walk(given.checkout.resolve(), folder, has_pip_cache=not given.no_pip_cache)
    finally:
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    cached = second["prompt_tokens_details"]["cached_tokens"]
    commands = sum(bool(step.typed) for step in steps)
    seconds = sum(step.seconds for step in steps)
    rows = [asdict(step) for step in steps]
    report.show("a newcomer's path", rows)
    print(f"{commands} commands, {seconds:.0f} s to the second turn, {cached} of its tokens cached")
    path = report.write("newcomer", rows, commands=commands, seconds=seconds, second_turn=second)
    print(path)
    return 0 if cached > 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
