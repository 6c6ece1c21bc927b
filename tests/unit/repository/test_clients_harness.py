"""`make test-clients` says of each call what came of it, also where a script fails, hangs or lies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.clients import outcome as outcome_module
from tests.clients.clients import CLIENTS, KNOWN_FAILURES, NEEDS, NOT_YET, Client
from tests.clients.environments import JAVASCRIPT, SCRIPTS, Environments
from tests.clients.outcome import Outcome, is_failure, outcomes
from tests.clients.table import summary, table

CLIENT = Client("a client", "with_it.py", ("it==1.2",))
SCRIPT = """
import os
from calls import call, check_cached, expect_error, run

class Refused(Exception):
    def __init__(self, body):
        super().__init__("Error code: 400 - " + str(body))
        self.body = body

def refuse(said="tools is not supported"):
    try:
        raise Refused({"error": {"message": said}})
    except Refused as error:
        raise RuntimeError("gave up") from error

call("works")(lambda: None)
call("cached")(lambda: check_cached(32))
call("not cached")(lambda: check_cached(None))
call("refused", "tools")(refuse)
call("right error")(lambda: expect_error(RuntimeError, lambda: refuse("no such model"), says="such model"))
call("no error")(lambda: expect_error(RuntimeError, lambda: None))
@call("falls silent")
def silent():
    assert 1 > 2
call("dies")(lambda: print("noise", flush=True) or os._exit(3))
call("never asked")(lambda: None)
run()
"""


@pytest.fixture(autouse=True)
def _not_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests know what is expected to fail."""
    monkeypatch.setattr(
        outcome_module, "expected_failure", lambda client, call, needs: "later" if "tools" in needs else None
    )


def lines(*found: dict[str, object]) -> str:
    return "\n".join(json.dumps(line) for line in found)


def planned(*calls: str) -> dict[str, object]:
    return {"plan": [{"call": call, "needs": []} for call in calls]}


def test_a_script_tells_of_each_call(tmp_path: Path) -> None:
    (tmp_path / "with_it.py").write_text(SCRIPT)
    named = {"URL": "http://127.0.0.1:1", "MODEL": "m", "KEY": "k", "CALL_S": "60"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "with_it.py")],
        env={
            **os.environ,
            **{f"CLIENT_{name}": value for name, value in named.items()},
            "PYTHONPATH": str(SCRIPTS),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    found = {each.call: each for each in outcomes(CLIENT, done.stdout, f"ended with {done.returncode}")}
    assert {call: (each.verdict, each.detail) for call, each in found.items()} == {
        "works": ("works", ""),
        "cached": ("works", ""),
        "not cached": ("FAILS", "AssertionError: cached tokens of the second turn: None"),
        "refused": ("fails as listed", "RuntimeError: tools is not supported"),
        "right error": ("works", "RuntimeError: no such model"),
        "no error": ("FAILS", "AssertionError: no RuntimeError"),
        "falls silent": ("FAILS", "AssertionError: assert 1 > 2"),
        "dies": ("FAILS", "no result: ended with 3"),
        "never asked": ("FAILS", "no result: ended with 3"),
    }
    assert found["cached"].cached_tokens == 32


def test_a_script_that_cannot_start_is_a_failure() -> None:
    (found,) = outcomes(CLIENT, "ImportError", "ended with 1: ImportError: no module")
    assert (found.call, found.verdict) == ("start", "FAILS")
    assert "no module" in found.detail


@pytest.mark.parametrize(
    "plan", [planned("chat", "chat"), {"plan": [{"call": "chat", "needs": ["telepathy"]}]}]
)
def test_a_plan_that_cannot_be_right_is_refused(plan: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"chat"):
        outcomes(CLIENT, lines(plan), "ended with 0")


def test_only_a_call_that_has_to_work_makes_it_fail() -> None:
    common = {"client": "a client", "call": "chat", "needs": ()}
    fails = [Outcome(**common, is_ok=False, expected=expected) for expected in ("later", None)]
    works = [Outcome(**common, is_ok=True, expected=expected) for expected in ("later", None)]
    assert not is_failure([*works, fails[0]])
    assert is_failure([*works, fails[1]])
    said = summary([*works, *fails])
    assert [line for line in said if not line.startswith(" ")] == [
        "1 call: works",
        "1 call: works, listed as failing",
        "1 call: fails as listed",
        "1 call: FAILS",
        "tests/clients/clients.py says: later; 1 of the calls it is about work",
    ]


def test_the_table_has_what_works_and_why_the_rest_fails() -> None:
    found = [
        Outcome("it", "second turn", (), True, cached_tokens=48),
        Outcome(
            "it", "tools", ("tools",), False, "BadRequestError: [tools] is not supported", expected="later"
        ),
        Outcome(
            "it", "parallel", ("tools",), False, "BadRequestError: [tools] is not supported", expected="later"
        ),
    ]
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table("Clients", {"it": "1.2"}, found))
    text = console.export_text()
    assert "1 of 3: second turn (48)" in text
    assert "tools · parallel: BadRequestError: [tools] is not supported" in text


def test_clients_scripts_and_expectations_belong_together() -> None:
    scripts = {
        path.name for path in (*SCRIPTS.iterdir(), *JAVASCRIPT.iterdir()) if path.name.startswith("with_")
    }
    assert sorted(scripts) == sorted(client.script for client in CLIENTS)
    assert {*NOT_YET} <= {*NEEDS}
    assert {client for client, _ in KNOWN_FAILURES} <= {client.name for client in CLIENTS}
    environments = Environments(Path("build/clients"))
    assert all(environments.version(client)[0].isdigit() for client in CLIENTS), "versions are pinned"
    assert all("==" in package for client in CLIENTS for package in client.packages)
