"""What came of a client's calls, read from the lines that its script printed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tests.clients.clients import NEEDS, Client, expected_failure

DETAIL_CHARS = 300
Verdict = Literal["works", "works, listed as failing", "fails as listed", "FAILS"]


@dataclass(frozen=True)
class Outcome:
    """One call. `detail`: the server's sentence, or the client's, or a remark; `expected`: why it may fail.

    `cached_tokens`: those that the client shows.
    """

    client: str
    call: str
    needs: tuple[str, ...]
    is_ok: bool
    detail: str = ""
    cached_tokens: int | None = None
    seconds: float | None = None
    expected: str | None = None

    @property
    def verdict(self) -> Verdict:
        if self.is_ok:
            return "works, listed as failing" if self.expected else "works"
        return "fails as listed" if self.expected else "FAILS"


def read_lines(output: str) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Find the plan and the results by call among what a script and its libraries printed."""
    plan: list[dict[str, Any]] = []
    results: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("plan"), list):
            plan = found["plan"]
        elif isinstance(found, dict) and isinstance(found.get("call"), str):
            results[found["call"]] = found
    return plan, results


def outcomes(client: Client, output: str, ending: str) -> list[Outcome]:
    """Read a script's output. `ending`: how the script ended, for the calls that it did not get to.

    A script that planned nothing is one failed call; a planned call without a result has failed.
    """
    plan, results = read_lines(output)
    if not plan:
        return [Outcome(client.name, "start", (), False, shortened(ending))]
    if twice := [call for call, count in Counter(each["call"] for each in plan).items() if count > 1]:
        raise ValueError(f"{client.script} plans {twice} more than once")
    return [_outcome(client.name, planned, results.get(planned["call"]), ending) for planned in plan]


def _outcome(
    client: str, planned: Mapping[str, Any], result: Mapping[str, Any] | None, ending: str
) -> Outcome:
    call, needs = planned["call"], tuple(planned["needs"])
    if unknown := [need for need in needs if need not in NEEDS]:
        raise ValueError(f"{client}, {call}: needs {unknown}, which tests/clients/clients.py does not know")
    expected = expected_failure(client, call, needs)
    if result is None:
        return Outcome(client, call, needs, False, shortened(f"no result: {ending}"), expected=expected)
    detail = result["detail"]
    if not result["ok"]:
        detail = f"{result['error']}: {detail}"
    return Outcome(
        client,
        call,
        needs,
        result["ok"],
        shortened(detail),
        result.get("cached_tokens"),
        result.get("seconds"),
        expected,
    )


def shortened(text: str) -> str:
    """Put a text on one line of at most `DETAIL_CHARS`."""
    line = " ".join(text.split())
    return line if len(line) <= DETAIL_CHARS else line[: DETAIL_CHARS - 1] + "…"


def is_failure(found: Iterable[Outcome]) -> bool:
    """Whether a call failed that has to work."""
    return any(outcome.verdict == "FAILS" for outcome in found)
