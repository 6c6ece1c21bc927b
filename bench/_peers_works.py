"""What each server is asked to do, in the same order and with the same prompts: one visit of a round.

Prompts are places of a long natural text, others in each round, so that nothing is found that this visit did
not bring; one answer follows random token ids, after which a small model repeats itself. After each request
the server is left until it is quiet; what that took stands beside the request's own CPU seconds.
"""

from __future__ import annotations

import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from bench._peers_client import Client, Reply
from bench._peers_model import natural_ids
from bench._peers_processes import Running, last_words, until_ready
from bench._peers_rows import Reading
from bench._peers_servers import Peer, Place

VOCAB = 49152
TURN_TOKENS = 20
FILLERS = 4
POOL_OVERRUN = 1.2
"""Fillers have so many times the tokens of the pool."""
CONCURRENT = 4
CONCURRENT_TOKENS = (512, 64)
STREAM_PROMPT = 128
ANSWERS = 4
"""Natural texts that are gone on with: they differ in how much they repeat."""
WARM_UP_TOKENS = 600
"""More than a chunk of ours."""
STREAM_TOKENS_MIN = 256
STREAM_ALONE = 16
"""Chunks of the running stream before the long prompt is sent."""
START_S = 420.0
"""vLLM compiles the first time, on two cores shared with others."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is asked. `decode_tokens`: of one answer; `idle_s`: how long a server is left alone.

    `window_s`: a server is quiet when it did little for two of these. `is_natural`: whether prompts are text.
    """

    prompts: tuple[int, ...] = (1000, 2000, 4000)
    pool_tokens: int = 5120
    decode_tokens: int = 128
    idle_s: float = 15.0
    window_s: float = 0.4
    is_natural: bool = True

    @property
    def pool_tokens_min(self) -> int:
        """The longest prompt with a turn, beside a stream of a few hundred tokens."""
        return max(self.prompts) + TURN_TOKENS + STREAM_PROMPT + STREAM_TOKENS_MIN

    @property
    def filler_tokens(self) -> int:
        return int(self.pool_tokens * POOL_OVERRUN / FILLERS)


QUICK = Amounts(prompts=(1000,), pool_tokens=2560, decode_tokens=32, idle_s=5.0)


def tokens_of(length: int, seed: str) -> list[int]:
    """Return random token ids, none of them a special one."""
    return random.Random(seed).choices(range(1000, VOCAB), k=length)


def text_of(length: int, seed: str, ids: Sequence[int]) -> list[int]:
    """Return `length` tokens of a text from a place on that `seed` says."""
    at = random.Random(seed).randrange(len(ids) - length)
    return list(ids[at : at + length])


class OtherStepError(Exception):
    """The service runs another forward pass than the one that was asked for: not a failure, not measured."""


class Visit:
    """One server in one round: started, asked everything, restarted if it keeps its cache, stopped."""

    def __init__(
        self,
        peer: Peer,
        place: Place,
        amounts: Amounts,
        seed: str,
        output: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._peer = peer
        self._place = place
        self._amounts = amounts
        self._seed = seed
        self._output = output
        self._tell = tell
        self.readings: list[Reading] = []
        self.step = ""

    def run(self, aside: Callable[[Place], dict[str, float]] | None = None) -> None:
        """Measure all works. `readings` has what was measured, also if this raises.

        `aside`: another judge, asked while the server runs.
        """
        running = Running(self._place.cores, self._amounts.window_s)
        try:
            client = self._start(running, "start")
            self.step = self._peer.step(self._output.read_text(errors="replace"))
            if self._peer.asked_step and self.step != self._peer.asked_step:
                raise OtherStepError(f"the service says that its step is {self.step or 'unknown'}")
            self._conversations(client, running)
            self._decode(client, running)
            self._concurrent(client, running)
            self._stream_beside_prefill(client, running)
            self._note("rss", 0, running.memory())
            self._idle(running)
            if aside is not None:
                self._tell("aiperf")
                self._note("aiperf", 0, aside(self._place))
            if not self._peer.forgets:
                running.stop()
                client = self._start(running, "start_again")
                for tokens in self._amounts.prompts:
                    self._ask(client, running, "return_restart", tokens, turn="restart")
        finally:
            running.stop()

    def _start(self, running: Running, work: str) -> Client:
        self._tell(work)
        began_s = time.monotonic()
        launches = self._peer.launches(self._place)
        for launch in launches:
            running.start(launch.command, launch.env, self._output)
            if launch.ready_port is not None:
                until_ready(running, partial(_listens, launch.ready_port), self._output, START_S)
        until_ready(running, lambda: _is_healthy(self._place.url), self._output, START_S)
        wall_s, cpu_s = time.monotonic() - began_s, running.start_cpu_s()
        self._note(work, 0, {"wall_s": wall_s, "cpu_s": cpu_s})
        client = Client(self._place.url, self._place.model.name, running.cpu_s, self._peer.fields)
        running.settle()
        # What a first request does once (kernels, pools, connections) is not what is measured.
        client.ask(self._text(WARM_UP_TOKENS, f"{self._seed}-{work}"), f"{self._seed}-{work}", max_tokens=8)
        running.processes()
        running.settle()
        return client

    def _conversations(self, client: Client, running: Running) -> None:
        for tokens in self._amounts.prompts:
            self._ask(client, running, "cold", tokens, turn="")
            self._ask(client, running, "warm", tokens, turn="warm")
        self._tell("others fill the pool")
        for number in range(FILLERS):
            ids = self._text(self._amounts.filler_tokens, f"{self._seed}-filler-{number}")
            client.ask(ids, f"{self._seed}-other-{number}")
            running.settle()
        for tokens in self._amounts.prompts:
            self._ask(client, running, "return_overflow", tokens, turn="overflow")

    def _ask(self, client: Client, running: Running, work: str, tokens: int, *, turn: str) -> None:
        """Send the conversation of so many tokens; `turn`: with a new turn of its own at its end."""
        self._tell(f"{work} {tokens}")
        ids = self._text(tokens, f"{self._seed}-{tokens}")
        if turn:
            ids += self._text(TURN_TOKENS, f"{self._seed}-{tokens}-{turn}")
        running.processes()
        reply = client.ask(ids, f"{self._seed}-{tokens}")
        after_s = running.settle()
        self._note(work, tokens, asked(reply, after_s))

    def _decode(self, client: Client, running: Running) -> None:
        self._tell("decode")
        texts = [self._text(STREAM_PROMPT, f"{self._seed}-decode-{number}") for number in range(ANSWERS)]
        asked = [("decode", ids) for ids in texts]
        asked.append(("decode_repeats", tokens_of(STREAM_PROMPT, f"{self._seed}-decode")))
        for number, (work, ids) in enumerate(asked):
            session = f"{self._seed}-decode-{number}"
            reply = client.ask(ids, session, max_tokens=self._amounts.decode_tokens)
            running.settle()
            self._note(work, 0, decoded(reply))

    def _text(self, length: int, seed: str) -> list[int]:
        if not self._amounts.is_natural:
            return tokens_of(length, seed)
        return text_of(length, seed, natural_ids(self._place.model.directory))

    def _concurrent(self, client: Client, running: Running) -> None:
        self._tell("concurrent")
        prompt, answer = CONCURRENT_TOKENS
        prompts = [self._text(prompt, f"{self._seed}-at-once-{number}") for number in range(CONCURRENT)]
        cpu_before, began_s = running.cpu_s(), time.perf_counter()
        replies = client.ask_at_once(prompts, f"{self._seed}-at-once", answer)
        took_s, cpu_s = time.perf_counter() - began_s, running.cpu_s() - cpu_before
        running.settle()
        self._note("concurrent", 0, at_once(replies, took_s, cpu_s))

    def _stream_beside_prefill(self, client: Client, running: Running) -> None:
        """A stream runs; somebody sends the longest prompt: how long the stream's tokens then take."""
        tokens = max(self._amounts.prompts)
        self._tell(f"itl beside a prefill of {tokens}")
        warm, over = threading.Event(), threading.Event()
        late: list[Reply | Exception] = []

        def send_late() -> None:
            if not warm.wait(60):
                late.append(RuntimeError("the stream did not begin"))
                over.set()
                return
            try:
                late.append(client.ask(self._text(tokens, f"{self._seed}-late"), f"{self._seed}-late"))
            except (RuntimeError, httpx.HTTPError) as error:
                late.append(error)
            finally:
                over.set()

        thread = threading.Thread(target=send_late)
        thread.start()
        stream = client.ask(
            self._text(STREAM_PROMPT, f"{self._seed}-stream"),
            f"{self._seed}-stream",
            max_tokens=self._amounts.pool_tokens - STREAM_PROMPT - tokens - TURN_TOKENS,
            hang_up=over,
            on_chunk=lambda count: warm.set() if count >= STREAM_ALONE else None,
        )
        thread.join()
        reply = late[0]
        if isinstance(reply, Exception):
            raise reply
        running.settle()
        from_s = reply.sent_s - stream.sent_s
        self._note("itl", tokens, beside(stream, from_s, from_s + reply.ttft_s) | {"ttft_s": reply.ttft_s})

    def _idle(self, running: Running) -> None:
        self._tell("idle")
        running.processes()
        cpu_before, began_s = running.cpu_s(), time.monotonic()
        time.sleep(self._amounts.idle_s)  # what is measured is this time
        share = (running.cpu_s() - cpu_before) / (time.monotonic() - began_s)
        self._note("idle", 0, {"cpu_share": share})

    def _note(self, work: str, tokens: int, values: dict[str, float]) -> None:
        self.readings.append(Reading(self._peer.name, work, tokens, values))


def asked(reply: Reply, after_s: float) -> dict[str, float]:
    """Return the figures of one prompt. `cpu_after_s`: CPU seconds from its first token until quiet."""
    return {
        "ttft_s": reply.ttft_s,
        "cpu_s": reply.first_cpu_s,
        "cpu_after_s": reply.last_cpu_s - reply.first_cpu_s + after_s,
        "cached_tokens": reply.cached_tokens,
        "prompt_tokens": reply.prompt_tokens,
    }


def decoded(reply: Reply) -> dict[str, float]:
    """Return the figures of one answer, from its first token to its last."""
    tokens = reply.completion_tokens - 1
    gaps_ms = [1000 * gap for gap in reply.gaps_s]
    return {
        "completion_tokens": reply.completion_tokens,
        "chunks": len(reply.arrivals_s),
        "tok_s": tokens / reply.decode_s,
        "cpu_ms_per_token": 1000 * (reply.last_cpu_s - reply.first_cpu_s) / tokens,
        "itl_p50_ms": statistics.median(gaps_ms),
        "itl_p99_ms": _p99(gaps_ms),
    }


def at_once(replies: Sequence[Reply], took_s: float, cpu_s: float) -> dict[str, float]:
    """Return the figures of several answers at the same time; prompt and answer tokens count."""
    tokens = sum(reply.prompt_tokens + reply.completion_tokens for reply in replies)
    gaps_ms = [1000 * gap for reply in replies for gap in reply.gaps_s]
    return {
        "ttft_s": statistics.fmean(reply.ttft_s for reply in replies),
        "cpu_s": cpu_s,
        "tok_s": tokens / took_s,
        "tok_cpu_s": tokens / cpu_s,
        "itl_p50_ms": statistics.median(gaps_ms),
        "itl_p99_ms": _p99(gaps_ms),
    }


def beside(stream: Reply, from_s: float, to_s: float) -> dict[str, float]:
    """Return the stream's gaps that the time from `from_s` to `to_s` touches, beside those before it.

    Raises `RuntimeError` if the stream was over too early.
    """
    pairs = list(zip(stream.arrivals_s, stream.arrivals_s[1:], strict=False))
    alone = [1000 * (after - before) for before, after in pairs if after <= from_s]
    during = [1000 * (after - before) for before, after in pairs if after > from_s and before < to_s]
    if not alone or not during:
        raise RuntimeError(f"a stream of {len(pairs)} gaps, {len(during)} of them beside the prefill")
    return {
        "gaps": len(during),
        "itl_p50_ms": statistics.median(during),
        "itl_p99_ms": _p99(during),
        "itl_max_ms": max(during),
        "itl_alone_p50_ms": statistics.median(alone),
    }


def _p99(values: Sequence[float]) -> float:
    if len(values) < 2:
        return max(values, default=0.0)
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def why(error: BaseException) -> str:
    """Return the reason of a row that is missing."""
    return last_words(f"{type(error).__name__}: {error}")
