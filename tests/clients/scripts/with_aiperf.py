"""aiperf, the command: a profile of conversations of several turns, as people measure a cache with it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from calls import CALL_S, KEY, MODEL, ROOT_URL, call, check_cached, run
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

CONVERSATIONS, TURNS = 3, 3


class ProfileError(Exception):
    """`aiperf profile` failed; `body`: what the server said to the first request that failed."""

    def __init__(self, message: str, body: Any = None) -> None:
        super().__init__(message)
        self.body = body


@cache
def tokenizer() -> Path:
    """A tokenizer of bytes, to make prompts with: the built-in one would be downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    folder = Path("tokenizer").resolve()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=alphabet[0]).save_pretrained(folder)
    return folder


def profile(name: str, kind: str, *arguments: str) -> list[dict[str, Any]]:
    """The records of a run's requests: their metrics, each of which is a number of the client's own."""
    folder = Path(name).resolve()
    fixed = {
        "model": MODEL,
        "url": ROOT_URL,
        "endpoint-type": kind,
        "api-key": KEY,
        "tokenizer": str(tokenizer()),
        "isl": "120",
        "osl": "8",
        "concurrency": "2",
        "random-seed": str(secrets.randbelow(2**31)),  # prompts that no run before has had
        "ui": "none",
        "artifact-dir": str(folder),
    }
    flags = [part for key, value in fixed.items() for part in (f"--{key}", value)]
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", *flags, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S - 5, check=False)
    export = folder / "profile_export.jsonl"
    lines = export.read_text().splitlines() if export.exists() else []
    records = [json.loads(line) for line in lines]
    if failed := [record["error"] for record in records if record.get("error")]:
        raise ProfileError(f"{len(failed)} of {len(records)} requests failed: {failed[0]}", failed[0])
    if done.returncode or not records:
        raise ProfileError(reason_in(done.stdout + done.stderr))
    return records


def reason_in(output: str) -> str:
    """The first error of the log, without the boxes around the rest."""
    lines = [line for line in output.splitlines() if " ERROR " in line]
    return lines[0].partition(" ERROR ")[2].strip() if lines else output[-300:]


def several_turns(name: str, kind: str, *more: str) -> dict[str, Any]:
    """Each turn but the first finds the one before in the cache."""
    turns = ("--conversation-num", str(CONVERSATIONS), "--conversation-turn-mean", str(TURNS))
    turns = (*turns, "--conversation-turn-stddev", "0", "--use-server-token-count")
    records = profile(name, kind, *turns, *more)
    assert len(records) == CONVERSATIONS * TURNS, f"{len(records)} requests"
    later = [record for record in records if record["metadata"]["turn_index"]]
    cached = [record["metrics"].get("usage_prompt_cache_read_tokens", {}).get("value") for record in later]
    assert all(cached), f"cached tokens of the later turns: {cached}"
    return check_cached(int(sum(cached)))


@call("chat: one turn")
def one_turn() -> None:
    assert len(profile("one", "chat", "--request-count", "4")) == 4


@call("chat: several turns, stream")
def streamed() -> dict[str, Any]:
    return several_turns("streamed", "chat", "--streaming", "--session-header", "X-Session-ID")


@call("chat: several turns")
def whole() -> dict[str, Any]:
    return several_turns("whole", "chat")


@call("completions: stream")
def completions() -> None:
    assert len(profile("completions", "completions", "--streaming", "--request-count", "4")) == 4


@call("responses: several turns", "responses")
def responses() -> dict[str, Any]:
    return several_turns("responses", "responses")


@call("responses: stream", "responses")
def responses_stream() -> None:
    """In streams it reads the usage of completed responses only: not of those that the limit has cut off."""
    assert len(profile("responses-stream", "responses", "--streaming", "--request-count", "4")) == 4


if __name__ == "__main__":
    os.environ["NO_COLOR"] = "1"
    run()
