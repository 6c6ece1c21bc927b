"""What an ingress writes down of the turns it served."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samovar.configs.settings import RouterSettings, ServerSettings, Settings
from samovar.replicas.messages import Admitted, Delta, SamplingParams, TurnContext
from samovar.replicas.reply import ReplyReading, format_named
from samovar.router.generation.answer import Answer
from samovar.router.generation.recorder import IngressRecorder, ServedTurn, open_recorder
from samovar.router.openai.messages import ChatMessage
from samovar.router.openai.parse import CacheWish, ParsedChat, ParsedCompletion
from samovar.router.prompt.prompt import Prompt
from samovar.router.routing.session import turn_context
from tests.support.constants import tuned

SECRET_IDS = list(range(700_000, 700_064))


def settings(path: Path | None, **server: object) -> Settings:
    return Settings(server=ServerSettings.model_validate({"record": path, **server}))


def opened(path: Path, **server: object) -> IngressRecorder:
    recorder = open_recorder(settings(path, **server))
    assert recorder is not None
    return recorder


def turn(
    ids: list[int],
    answer_ids: tuple[int, ...] = (1, 2),
    *,
    session: str = "s",
    reason: Any = "stop",
    lineage: str = "",
    text: str = "text",
) -> ServedTurn:
    reading = ReplyReading(format_named("hermes", None), tools=("get",))
    answer = Answer([Prompt(ids, None, reading=reading)], 1, 1.0)
    answer.apply(0, [Admitted("replica", 0, 0.0), Delta(0, text, answer_ids, finish_reason=reason)])
    context = TurnContext("user", profile="code")
    return ServedTurn(session, b"salt", answer, context, time.monotonic(), [lineage])


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_turns_are_written_as_lengths_times_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorder = opened(path)
    recorder.over(turn(SECRET_IDS[:40], tuple(SECRET_IDS[40:50])))
    recorder.over(turn(SECRET_IDS[:64]))  # the chain so far, and 14 tokens more
    recorder.over(turn(SECRET_IDS[:20][::-1], session="other", reason=None))
    recorder.over(
        ServedTurn("s", b"", Answer([Prompt([1], None)], 1, 1.0), TurnContext(), 0.0, [""])
    )  # never computed
    recorder.close()
    recorder.over(turn(SECRET_IDS))  # too late: nothing
    header, first, second, third, last = rows(path)
    assert header["block_tokens"] == 16
    assert (first["input_tokens"], first["output_tokens"], first["kept_tokens"]) == (40, 10, 0)
    assert (second["input_tokens"], second["kept_tokens"]) == (64, 48)
    assert first["blocks"] == [0, 2]
    assert second["blocks"][:2] == [0, 4]
    assert first["session"] == second["session"] != third["session"]
    assert (first["stop"], third["stop"]) == ("stop", "gone")
    assert last["turns"] == 3
    assert "700" not in path.read_text().replace(str(first["session"]), "").replace(str(third["session"]), "")


def test_a_tool_call_is_an_end_of_its_own_and_its_tool_a_number(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorder = opened(path)
    for name in ("get", "zebra", "get"):
        recorder.over(turn(SECRET_IDS, text=f'<tool_call>{{"name": "{name}"}}</tool_call>'))
    recorder.over(turn(SECRET_IDS, text='<tool_call>{"name": "get"}</tool_call>', reason="length"))
    recorder.over(turn(SECRET_IDS))
    recorder.close()
    told = [(row["stop"], row["tool"]) for row in rows(path)[1:-1]]
    assert told == [*(("tool_calls", tool) for tool in (1, 2, 1)), ("length", 0), ("stop", 0)]
    assert "zebra" not in path.read_text()


def test_each_prompt_of_a_request_goes_on_with_its_own_lineage(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorder = opened(path)
    chains = [SECRET_IDS[:32], SECRET_IDS[32:]]
    cut = [chain[:16] for chain in reversed(chains)]
    for prompts, names in ((chains, "ab"), (cut, "ba"), ([chains[0][::-1]], "c"), ([chains[0]] * 2, "dd")):
        answer = Answer([Prompt(ids, None) for ids in prompts], 1, 1.0)
        for number in range(len(prompts)):
            answer.apply(number, [Admitted("replica", 0, 0.0), Delta(0, "a", (1,), finish_reason="stop")])
        recorder.over(ServedTurn("s", b"salt", answer, TurnContext("user"), time.monotonic(), names))
    recorder.close()
    assert [row["kept_tokens"] for row in rows(path)[1:-1]] == [0, 0, 16, 16, 0, 0, 0]


def test_a_lineage_goes_on_where_its_own_last_request_ended(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    few = settings(path).model_copy(update={"router": tuned(RouterSettings(), lineages_max=2)})
    recorder = open_recorder(few)
    assert recorder is not None
    recorder.over(turn(SECRET_IDS[:40], tuple(SECRET_IDS[40:50]), lineage="main"))
    recorder.over(turn(SECRET_IDS[::-1][:32], lineage="title"))
    recorder.over(turn(SECRET_IDS[:64], lineage="main"))
    recorder.over(turn(SECRET_IDS[:32], session="other", lineage="main"))
    recorder.over(turn(SECRET_IDS[1:33], lineage="tags"))  # the title is forgotten now
    recorder.over(turn(SECRET_IDS[::-1][:32], lineage="title"))
    recorder.close()
    said = [(row.get("lineage", 0), row["kept_tokens"]) for row in rows(path)[1:-1]]
    assert said == [(0, 0), (1, 0), (0, 48), (0, 0), (2, 0), (3, 0)]


def test_it_never_overwrites_and_never_keeps_from_serving(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    opened(path).close()
    before = path.read_bytes()
    opened(path).close()
    assert path.read_bytes() == before
    assert (tmp_path / "trace.1").exists()
    assert open_recorder(settings(None)) is None
    assert open_recorder(settings(tmp_path / "no such directory" / "trace")) is None


def test_the_file_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorder = opened(path, record_bytes_max=4096)
    for number in range(200):
        recorder.over(turn([number] * 40, session=f"s{number}"))
    recorder.close()
    assert path.stat().st_size <= 4096
    assert rows(path)[-1]["ended"] == "bytes_max"


def test_too_many_at_once_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.router.generation.recorder.WAITING_MAX", 0)
    recorder = opened(tmp_path / "trace")
    assert not recorder.over(turn(SECRET_IDS))
    recorder.close()


@pytest.mark.parametrize(
    ("last", "role"), [("user", "user"), ("tool", "tool"), ("assistant", "other"), ("system", "other")]
)
def test_whose_the_last_message_is(last: Any, role: Any) -> None:
    messages = (ChatMessage("user", "a"), ChatMessage(last, "b"))
    chat = ParsedChat(
        model="m", sampling=SamplingParams(), messages=messages, cache=CacheWish(profile="code")
    )
    assert turn_context(Settings().tiers, "t", {}, chat) == TurnContext(role, profile="code")
    plain = ParsedCompletion(model="m", sampling=SamplingParams(), prompts=("a",))
    assert turn_context(Settings().tiers, "t", {}, plain).role == "user"
    told = replace(plain, cache=replace(plain.cache, returns_s=2.5))
    final = turn_context(Settings().tiers, "t", {"x-dynamo-session-final": "True"}, told)
    assert (final.returns_s, final.is_final) == (2.5, True)
    assert not turn_context(Settings().tiers, "t", {"x-dynamo-session-final": "no"}, plain).is_final
    named = turn_context(Settings().tiers, "t", {"x-cache-profile": "batch"}, plain)
    assert named.profile == "batch"
