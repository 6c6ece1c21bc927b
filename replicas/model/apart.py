"""Runs what needs torch or transformers once, in a process that ends.

`samovar serve` and the ingress keep running for weeks: what a first start has to ask transformers, or to
convert, would stay in their memory. The answer is one line of JSON; an error is raised again in the caller.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

from samovar import HOME
from samovar.configs.json_text import parse_json
from samovar.replicas.messages import ModelRefused

Task = Literal["config", "convert", "sizes", "turn"]
ENTRY = "import sys; from samovar.replicas.model.apart import main; main(*sys.argv[1:])"
"""Not `-m`: this package imports this module, so that it would be there twice, and Python warns of that."""
END_S = 60.0
QUIET = {"TRANSFORMERS_VERBOSITY": "error"}


def runs_apart() -> bool:
    """Whether such work is done apart: this process has no torch yet."""
    return "torch" not in sys.modules


def run_apart(task: Task, *args: str) -> str:
    """Return what `task` answers in a process of its own; it ends with this one.

    Paths in `args` must be absolute. What it writes to stderr is shown. Raises `ModelRefused` or `OSError` as
    the task does, and `RuntimeError` if it ended without an answer.
    """
    command = [sys.executable, "-c", ENTRY, task, *args]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=HOME, env=QUIET | os.environ, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        try:
            told = child.stdout.read()
            child.wait(END_S)  # with its input open: it would take the end of that for ours
        except subprocess.TimeoutExpired:
            pass  # it has answered; leaving the block closes its input, which ends it
        except BaseException:
            child.kill()
            raise
    if not told:
        raise RuntimeError(f"`{' '.join([task, *args])}` ended with {child.returncode}, without an answer")
    answer = parse_json(told)
    if (refused := answer.get("refused")) is not None:
        raise ModelRefused(*refused)
    if (failed := answer.get("failed")) is not None:
        raise OSError(*failed)
    return str(answer["done"])


def _do(task: str, args: list[str]) -> str:
    if task != "convert":
        from samovar.replicas.model.card import turn_text
        from samovar.replicas.model.served import sizes_text
        from samovar.replicas.model.spec import config_text
        from samovar.replicas.model.tokenizer import leave_torch_out

        leave_torch_out()
        if task == "turn":
            return turn_text(Path(args[0]), args[1])
        return config_text(Path(args[0])) if task == "config" else sizes_text(Path(args[0]))
    from samovar.replicas.model.gguf import convert_gguf

    source, target, progress = args
    convert_gguf(Path(source), Path(target), progress=progress == "progress")
    return ""


def _end_with_parent() -> None:
    # Not by `sys.stdin`: Python ends with an error while a thread reads there.
    while os.read(0, 1):
        pass
    os._exit(1)  # its end: the process that asked has ended


def main(task: str, *args: str) -> None:
    """Carry out `task` and print the answer. Whatever else is printed goes to stderr."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        answer: dict[str, object]
        try:
            answer = {"done": _do(task, list(args))}
        except ModelRefused as error:
            answer = {"refused": [error.reason, error.fix]}
        except OSError as error:
            answer = {"failed": [error.errno, error.strerror or str(error)]}
        answers.write(json.dumps(answer))
