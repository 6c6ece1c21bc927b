"""The one client of all servers: completions by token ids, streamed; tokens are those that usage counts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

Clock = Callable[[], float]


@dataclass
class Reply:
    """One answer. Times are seconds of the client's clock; CPU is that of all the server's processes.

    `arrivals_s`: of each chunk that carried a token, after `sent_s`. Several tokens may share a chunk.
    """

    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    first_cpu_s: float = 0.0
    """CPU seconds from send to first token."""
    last_cpu_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def decode_s(self) -> float:
        return self.arrivals_s[-1] - self.arrivals_s[0]


def read_stream(lines: Iterable[str], reply: Reply, clock: Clock, cpu: Clock) -> None:
    """Fill `reply` from the lines of a server-sent event stream, up to its end.

    Raises `RuntimeError` for an error in the stream, and if a stream has no token or no usage.
    """
    cpu_before = reply.first_cpu_s
    usage: Mapping[str, Any] | None = None
    for line in lines:
        if not line.startswith("data: {"):
            continue
        at_s = clock() - reply.sent_s
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise RuntimeError(f"the stream ended with {event['error']}")
        usage = event.get("usage") or usage
        choices = event.get("choices") or ()
        # A token may have no text of its own (half a character), and the last event need not have a token.
        has_token = any(choice.get("text") or not choice.get("finish_reason") for choice in choices)
        if choices and (has_token or not reply.arrivals_s):
            if not reply.arrivals_s:
                reply.first_cpu_s = cpu() - cpu_before
            reply.arrivals_s.append(at_s)
    reply.last_cpu_s = cpu() - cpu_before
    if not reply.arrivals_s or usage is None:
        raise RuntimeError("a stream without a token or without usage")
    reply.prompt_tokens = int(usage["prompt_tokens"])
    reply.completion_tokens = int(usage["completion_tokens"])
    reply.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


class Client:
    """`cpu`: CPU seconds of the server so far. `fields`: what its requests have besides OpenAI's."""

    def __init__(self, url: str, model: str, cpu: Clock, fields: Callable[[str], Mapping[str, Any]]) -> None:
        self._url = url
        self._model = model
        self._cpu = cpu
        self._fields = fields

    def ask(
        self,
        ids: Sequence[int],
        session: str,
        *,
        max_tokens: int = 1,
        hang_up: threading.Event | None = None,
        on_chunk: Callable[[int], None] | None = None,
    ) -> Reply:
        """Send one prompt and read its answer to the end, or until `hang_up` is set.

        `on_chunk` is told the number of chunks so far. Raises `RuntimeError` if the server refuses.
        """
        body = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            **self._fields(session),
        }
        reply = Reply(first_cpu_s=self._cpu())
        with httpx.Client(base_url=self._url, timeout=600) as http:
            reply.sent_s = time.perf_counter()
            with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise RuntimeError(f"{response.status_code}: {response.read().decode()[:300]}")
                lines = response.iter_lines()
                if hang_up is None:
                    read_stream(lines, reply, time.perf_counter, self._cpu)
                else:
                    _read_until(lines, reply, hang_up, on_chunk)
        return reply

    def ask_at_once(self, prompts: Sequence[Sequence[int]], session: str, max_tokens: int) -> list[Reply]:
        """Send several prompts at the same time, each as a session. Raises `RuntimeError` if one fails."""
        replies: list[Reply | BaseException | None] = [None] * len(prompts)

        def one(number: int) -> None:
            try:
                replies[number] = self.ask(prompts[number], f"{session}-{number}", max_tokens=max_tokens)
            except (RuntimeError, httpx.HTTPError) as error:
                replies[number] = error

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = []
        for reply in replies:
            if not isinstance(reply, Reply):
                raise RuntimeError(f"one of {len(prompts)} requests at once failed: {reply}")
            found.append(reply)
        return found


def _read_until(
    lines: Iterable[str],
    reply: Reply,
    hang_up: threading.Event,
    on_chunk: Callable[[int], None] | None,
) -> None:
    for line in lines:
        if line.startswith("data: {") and json.loads(line.removeprefix("data: ")).get("choices"):
            reply.arrivals_s.append(time.perf_counter() - reply.sent_s)
            if on_chunk is not None:
                on_chunk(len(reply.arrivals_s))
        if hang_up.is_set():
            return
