"""The newcomer's path: what of this user's environment goes along, and what is counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.newcomer import QUESTIONS, Walk, ask, environment, has_page
from tests.support.router.router_harness import House, spoken


def test_nothing_of_this_users_goes_along_but_pips_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMOVAR_AUTH__API_KEYS", "{}")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_CACHE_DIR", "/cache")
    env = environment(tmp_path, has_pip_cache=True)
    assert env["HOME"] == str(tmp_path)
    assert env["PIP_CACHE_DIR"] == "/cache"
    assert {"SAMOVAR_AUTH__API_KEYS", "PYTHONPATH", "VIRTUAL_ENV"}.isdisjoint(env)
    assert environment(tmp_path, has_pip_cache=False)["PIP_NO_CACHE_DIR"] == "1"


def test_steps_add_up(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([12.0, 15.0])
    monkeypatch.setattr("bench.newcomer.time.monotonic", lambda: next(now))
    path = Walk(10.0)
    path.did("cloned", "git clone URL")
    path.did("ready")
    assert [(step.seconds, bool(step.typed)) for step in path.steps] == [(2.0, True), (3.0, False)]
    assert "5.0 s  ready" in capsys.readouterr().out


async def test_turns_are_asked_and_it_is_known_whether_there_is_a_page() -> None:
    house = House(lambda request: spoken("Tea.", cached=len(request.prompt_token_ids) // 32 * 16))
    async with house.server() as url:
        messages = [{"role": "user", "content": QUESTIONS[0]}]
        usage = await asyncio.to_thread(ask, url, messages)
        assert messages[-1]["content"] == "Tea."
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
        assert await asyncio.to_thread(has_page, url) in (False, True)
