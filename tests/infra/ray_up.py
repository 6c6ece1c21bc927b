"""What the tests of `samovar up` share: somebody's laptop in a lab, a service for two cores, users, timings.

It knows neither EC2 nor racks.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.table import Table

from tests.infra.netlab import Host, Lab, LabError
from tests.infra.netlab.shell import BIN
from tests.infra.netlab.sshd import Key
from tests.support.services.service import MODEL, for_served_dtype, until

MIB = 1024 * 1024
PORT = 8000
API_KEY = "a-key-of-the-team-in-the-lab"
SECRETS = {"auth": {"api_keys": {"team": API_KEY}}}
STEP_S = 300.0
TURN_S = 120.0

SERVICE: dict[str, Any] = {
    "server": {"port": PORT, "start_timeout_s": STEP_S},
    "engine": {"threads": 1, "device": "cpu", "pool_bytes_max": for_served_dtype(24 * MIB)},
    "cluster": {"ray_address": "auto", "replicas": 1},
    "tiers": {
        "cpu": {"bytes_max": 128 * MIB},
        "nvme": {"bytes_max": 256 * MIB},
        "node": {"idle_timeout_s": 5},
        # Two cores for all of it: what is late here is not what is tested.
        **{"lookup_s_max": 5, "lookup_share": 100, "lookup_idle_share": 1},
        "hedge_slack_s": 5,
    },
}
LAUNCH: dict[str, Any] = {"venv": str(BIN.parent), "up_timeout_s": STEP_S}


class Timings:
    """A table: what was done, and how long it took. Printed as it grows, and whole at the end."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._rows: list[tuple[str, float]] = []
        self._began_s = time.monotonic()

    @contextlib.contextmanager
    def measured(self, what: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self.add(what, time.monotonic() - began_s)

    def add(self, what: str, seconds: float) -> None:
        self._rows.append((what, seconds))
        print(f"--- {what}: {seconds:.1f} s", flush=True)

    def show(self) -> None:
        table = Table("event", "seconds", title=self._title)
        table.columns[1].justify = "right"
        for what, seconds in [*self._rows, ("in all", time.monotonic() - self._began_s)]:
            table.add_row(what, f"{seconds:.1f}")
        Console(width=100).print(table)


class Laptop:
    """Where somebody types `samovar up`. `key` opens the machines."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.host: Host = lab.boot("laptop")
        self.key = Key.make(lab.shared / "key")
        self.host.run("mkdir -m 700 ~/.ssh && mv /mnt/lab/key ~/.ssh/samovar && chmod 600 ~/.ssh/samovar")

    def write(self, name: str, tree: object, mode: int = 0o644) -> None:
        """A file in its home directory, as JSON, which is YAML as well."""
        path = self.host.file(f"/root/{name}")
        path.touch(mode=mode)
        path.write_text(json.dumps(tree))

    def run(self, command: str, limit_s: float = STEP_S) -> str:
        """Shows what it prints as it comes; all of it. Raises LabError when it fails or is too slow."""
        began_s = time.monotonic()
        print(f"laptop$ {command}", flush=True)
        process = self.host.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        lines: list[str] = []

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                print(f"{time.monotonic() - began_s:6.1f}  {line}", end="", flush=True)

        reader = threading.Thread(target=read, name="laptop", daemon=True)
        reader.start()
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise LabError(f"{command}: not within {limit_s} s: {''.join(lines)}") from error
        finally:
            self.host.stop(process, signal.SIGKILL)
            reader.join(5)
        if code:
            raise LabError(f"{command}: exit {code}: {''.join(lines)}")
        return "".join(lines)

    def url_of(self, ip: str) -> str:
        """Where on this machine the node's port of Samovar is reached, as the laptop reaches it."""
        return f"http://127.0.0.1:{self._lab.forward(self.host, PORT, to=ip)}"


def turn(url: str, said: str, api_key: str = API_KEY) -> str:
    """One turn of a chat, streamed. Raises what the openai client raises."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=TURN_S)
    with client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": said}],
            max_tokens=8,
            temperature=0,
            stream=True,
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    text = "".join(parts)
    assert text, "an empty answer"
    return text


def next_turn(url: str, said: str, limit_s: float = STEP_S) -> str:
    """The first turn that succeeds: users try again."""
    found: list[str] = []

    def is_answered() -> bool:
        with contextlib.suppress(openai.APIError, httpx.HTTPError):
            found.append(turn(url, said))
        return bool(found)

    until("somebody's next turn is answered", is_answered, limit_s)
    return found[0]
