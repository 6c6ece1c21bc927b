"""Conversations with a running service: times to first token, tokens computed as receipts say, CPU-seconds.

`orders_served`: 30 turns with retrieval in both orders, of a service with `knowledge.enabled`.
`window_served`: three times a window of 2,048 tokens, of a service with `compaction.enabled`. A turn of a
short conversation is between any two of the long one, so that both have the machine as it is then, and says
the same, so that both bring as many new tokens. Each has a `cache_salt` of its own: without, one would find
in the cache what the other has just had computed, and a short one what all short ones before it had.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench._context_facts import PlantedFact
from bench._context_window import SYSTEM, WINDOW_TOKENS, Told, long_talk
from bench._peers_processes import Threads
from tests.support.services.service import for_served_dtype, serving

SHORT_TURNS = 12
THINK_S = 0.8
SERVED_TOKENS = 128
"""Of context a turn, so that 30 turns fit the default model's window in both orders."""
ANSWER_TOKENS = 16
SPARE_TOKENS = 256
MODES = (
    ("beyond_window_served", "retrieve"),
    ("beyond_window_summarise_served", "summarise"),
    ("truncation_served", "truncation"),
)
POOL_BYTES = 512 << 20

Cpu = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Guest:
    """Who asks a service. `cpu_s`: tells the CPU-seconds of its processes so far; None: they are not seen."""

    client: httpx.Client
    cpu_s: Cpu | None = None

    @property
    def model(self) -> str:
        """The model that is served."""
        card: str = self._card()["id"]
        return card

    @property
    def window_tokens(self) -> int:
        """Its window."""
        return int(self._card()["max_model_len"])

    def _card(self) -> dict[str, Any]:
        card: dict[str, Any] = self.client.get("/v1/models").raise_for_status().json()["data"][0]
        return card

    def jobs(self) -> dict[str, float]:
        """Return how many pieces of work in idle moments had which outcome."""
        found = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith("samovar_compaction_jobs_total{"):
                label, count = line.split("} ")
                found[label.split('outcome="')[1].split('"')[0]] = float(count.split()[0])
        return found


@contextlib.contextmanager
def guest_at(url: str, api_key: str | None = None, cpu_s: Cpu | None = None) -> Iterator[Guest]:
    """Who asks the service at `url`."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=300, trust_env=False) as client:
        yield Guest(client, cpu_s)


@contextlib.contextmanager
def guest_of_service(flags: Mapping[str, object]) -> Iterator[Guest]:
    """Who asks a `samovar serve` of their own with these settings, whose pool holds both conversations."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = {
            "engine.pool-bytes-max": for_served_dtype(POOL_BYTES),
            "knowledge.dir": f"{folder}/kb",
            "compaction.dir": f"{folder}/compaction",
            **flags,
        }
        parts = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
        with serving(Path(folder) / "service.txt", *parts) as service:
            threads = Threads()
            pids = [one.pid for one in service.processes()]
            with guest_at(service.url, cpu_s=lambda: threads.cpu_s(pids)) as guest:
                yield guest


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request took until its first token, and what its receipt says."""

    number: int
    ttft_s: float
    cpu_s: float | None
    receipt: dict[str, Any]
    text: str = ""
    prompt: str = ""

    @property
    def tokens(self) -> dict[str, int]:
        """Of its prompt, by where they were."""
        tokens: dict[str, int] = self.receipt["tokens"]
        return tokens

    def json(self) -> dict[str, Any]:
        """Return what is written of it."""
        cut = self.receipt.get("compaction", {})
        return {
            "turn": self.number,
            "ttft_s": round(self.ttft_s, 4),
            "cpu_s": None if self.cpu_s is None else round(self.cpu_s, 4),
            "tokens": {name: count for name, count in self.tokens.items() if count},
            "decision": self.receipt["decision"],
            "load_ms": self.receipt["load_ms"],
            "messages_cut": cut.get("messages_cut", 0),
            "pieces": sum(one["is_new"] for one in cut.get("pieces", ())),
        }


def orders_served(
    guest: Guest, talk: tuple[list[PlantedFact], list[str], list[str]], system: str
) -> Iterator[dict[str, Any]]:
    """The same conversation in both orders. `talk`: what is asked, answered, and in the base."""
    facts, answers, everything = talk
    client, model = guest.client, guest.model
    client.delete("/v1/knowledge").raise_for_status()
    kinds = itertools.cycle(["gotcha", "document_chunk"])
    lines = (json.dumps({"kind": next(kinds), "text": fact}) for fact in everything)
    body = {"format": "jsonl", "text": "\n".join(lines)}
    client.post("/v1/knowledge/import", json=body).raise_for_status()
    for name in ("naive_order", "cache_aware"):
        session = f"{name}-{time.time_ns()}"
        messages = [{"role": "system", "content": system}]
        ttft_s, tokens = [], []
        for fact, answer in zip(facts, answers, strict=True):
            messages.append({"role": "user", "content": fact.question})
            asked: dict[str, Any] = {"knowledge": {"budget_tokens": SERVED_TOKENS}, "messages": messages}
            if name == "naive_order":
                wanted = {"query": fact.question, "budget_tokens": SERVED_TOKENS}
                found = client.post("/v1/knowledge/search", json=wanted).raise_for_status()
                told = "\n".join(one["text"] for one in found.json()["data"])
                asked = {"messages": [{"role": "system", "content": f"{system}\n\n{told}"}, *messages[1:]]}
            whole = {"model": model, "max_tokens": 1, "temperature": 0, "session_id": session, **asked}
            began_s = time.perf_counter()
            receipt = client.post("/v1/chat/completions", json=whole).raise_for_status().json()["receipt"]
            ttft_s.append(time.perf_counter() - began_s)
            tokens.append(receipt["tokens"])
            messages.append({"role": "assistant", "content": answer})
        computed = sum(one["compute"] for one in tokens)
        every = sum(sum(one.values()) for one in tokens)
        yield {
            "name": f"{name}_served",
            "facts": len(facts),
            "prompt_tokens": every,
            "computed_tokens": computed,
            "cached_share": 1 - computed / every,
            "ttft_s_median": statistics.median(ttft_s),
            "ttft_s_last_5": statistics.median(ttft_s[-5:]),
            "ttft_s_by_turn": [round(one, 4) for one in ttft_s],
        }


def window_served(guest: Guest, seed: int = 1) -> Iterator[dict[str, Any]]:
    """The long conversation in each mode: times, receipts, answers."""
    assert guest.window_tokens == WINDOW_TOKENS, f"--model.context_tokens_max {WINDOW_TOKENS}"
    for name, mode in MODES:
        before = guest.jobs()
        talk = long_talk(seed)
        pair = _Pair(_Talking(guest, mode, talk), _Shorts(guest, talk))
        pair.talk()
        jobs = {one: count - before.get(one, 0) for one, count in guest.jobs().items()}
        yield {"name": name, **pair.told(), "jobs": {one: count for one, count in jobs.items() if count}}


class _Talking:
    """A conversation with a service. The answers in its history are the planned ones, whatever was said."""

    def __init__(self, guest: Guest, mode: str, talk: Sequence[Told]) -> None:
        self.talk = talk
        self.mode = mode
        self.turns: list[Turn] = []
        self._guest = guest
        self._model = guest.model
        self._session = f"{mode}-{time.time_ns()}"  # also its salt
        self._messages = [{"role": "system", "content": SYSTEM}]

    def say(self, number: int) -> None:
        """Have turn `number`."""
        turn = self.talk[number]
        self._messages.append({"role": "user", "content": turn.said})
        sent = self._fitting() if self.mode == "truncation" else self._messages
        self.turns.append(self._asked(number, sent))
        self._messages.append({"role": "assistant", "content": turn.answer})

    def _fitting(self) -> list[dict[str, str]]:
        """Drop the oldest turns until the rest fits, as a client would that counts tokens."""
        kept = list(self._messages)
        while len(kept) > 2:
            body = {"model": self._model, "messages": kept}
            counted = self._guest.client.post("/tokenize", json=body).raise_for_status().json()["count"]
            if counted <= WINDOW_TOKENS - SPARE_TOKENS:
                break
            del kept[1:3]
        return kept

    def _asked(self, number: int, messages: Sequence[Mapping[str, str]]) -> Turn:
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "session_id": self._session,
            "cache_salt": self._session,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": messages,
            "return_token_ids": True,
        }
        if self.mode in ("retrieve", "summarise"):
            body["compaction"] = {"mode": self.mode}
        cpu = self._guest.cpu_s
        first_s, cpu_s, text = 0.0, None, ""
        receipt: dict[str, Any] = {}
        prompt: list[int] = []
        before_s = cpu() if cpu else 0.0
        began_s = time.perf_counter()
        with self._guest.client.stream("POST", "/v1/chat/completions", json=body) as stream:
            stream.raise_for_status()
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                receipt, prompt = event.get("receipt", receipt), event.get("prompt_token_ids") or prompt
                for choice in event["choices"]:
                    prompt = choice.get("prompt_token_ids") or prompt
                    if choice["delta"].get("content"):
                        if not first_s:
                            first_s = time.perf_counter() - began_s
                            cpu_s = cpu() - before_s if cpu else None
                        text += choice["delta"]["content"]
        body = {"model": self._model, "tokens": prompt}
        shown = self._guest.client.post("/detokenize", json=body).raise_for_status().json()["prompt"]
        return Turn(number, first_s or time.perf_counter() - began_s, cpu_s, receipt, text, shown)


@dataclass
class _Shorts:
    """One short conversation after the other."""

    guest: Guest
    talk: Sequence[Told]
    turns: list[Turn] = field(default_factory=list)
    _now: _Talking | None = None

    def say(self, number: int) -> None:
        """Have turn `number`, in a conversation of at most `SHORT_TURNS`."""
        if self._now is None or number % SHORT_TURNS == 0:
            self._now = _Talking(self.guest, "short", self.talk)
        self._now.say(number)
        if number % SHORT_TURNS:  # the first turn of a conversation has nothing in the cache
            self.turns.append(self._now.turns[-1])


@dataclass
class _Pair:
    """The long conversation, and short ones beside it."""

    long: _Talking
    short: _Shorts

    def talk(self) -> None:
        """Have all turns."""
        for number in range(len(self.long.talk)):
            for one in (self.short, self.long):
                one.say(number)
                time.sleep(THINK_S)  # the user reads, thinks and types

    def told(self) -> dict[str, Any]:
        """Return the row."""
        talk, turns = self.long.talk, self.long.turns
        asked = [(turn, one) for turn, one in zip(turns, talk, strict=True) if one.fact]
        every = sum(sum(one.tokens.values()) for one in turns)
        computed = sum(one.tokens["compute"] for one in turns)
        beyond = turns[SHORT_TURNS:]
        beside = [one for one in self.short.turns if one.number >= SHORT_TURNS]
        row = {
            "facts": len(asked),
            "facts_found": sum(one.fact in turn.prompt for turn, one in asked),
            "facts_answered": sum(one.names in turn.text for turn, one in asked),
            "turns": len(talk),
            "turns_cut": sum(one.receipt.get("compaction", {}).get("messages_cut", 0) > 0 for one in turns),
            "window_tokens": WINDOW_TOKENS,
            "prompt_tokens": every,
            "computed_tokens": computed,
            "cached_share": 1 - computed / every,
            "think_s": THINK_S,
            "ttft_s_median": statistics.median(one.ttft_s for one in beyond),
            "ttft_s_p90": statistics.quantiles((one.ttft_s for one in beyond), n=10)[-1],
            "short_ttft_s_median": statistics.median(one.ttft_s for one in beside),
            "ttft_to_short": _ratio([one.ttft_s for one in beyond], [one.ttft_s for one in beside]),
            "computed_to_short": _ratio(
                [one.tokens["compute"] for one in beyond], [one.tokens["compute"] for one in beside]
            ),
        }
        if self.long.turns[0].cpu_s is not None:
            row["cpu_s_median"] = statistics.median(one.cpu_s or 0.0 for one in beyond)
            row["cpu_to_short"] = _ratio(
                [one.cpu_s or 0.0 for one in beyond], [one.cpu_s or 0.0 for one in beside]
            )
        row["by_turn"] = [one.json() for one in turns]
        row["short_by_turn"] = [one.json() for one in self.short.turns]
        return row


def _ratio(own: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(own) / statistics.median(other)
