"""An interpreter that only says its versions, and a uv that only makes such environments."""

from __future__ import annotations

import json
from pathlib import Path

from samovar.cluster.engines.interpreter import here

FAKE_UV = """#!/bin/sh
echo "$@" >>"$LOG"
case "$*" in *"${FAILS:-nothing fails}"*)
  printf 'Using Python 3.11\\nerror: %s\\n  Caused by: %s\\n' "$SAYS" "it was so" >&2; exit 2 ;;
esac
for last; do :; done
case "$1" in
venv)
  mkdir -p "$last/bin" "$last/lib/python3.11/site-packages" && cp "$MADE" "$last/bin/python" ;;
*) echo "Downloading torch (190MiB)" >&2 ;;
esac
"""


def fake_python(path: Path, **said: str) -> Path:
    """Write a Python that can be vLLM's, but for what `said` changes (python, vllm, ray)."""
    versions = {"python": here().python, "vllm": "0.32.0", "ray": here().ray} | said
    return script(path, f"#!/bin/sh\necho '{json.dumps(versions)}'\n")


def script(path: Path, text: str) -> Path:
    """Write a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path
