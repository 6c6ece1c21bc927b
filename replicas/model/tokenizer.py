"""Loads a model's tokenizer as transformers does it, without waiting for the model's own classes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from configs.json_text import parse_json

TOKENIZER_CONFIG = "tokenizer_config.json"


def leave_torch_out() -> None:
    """Make transformers do without torch in this process, for good, unless torch is imported already.

    transformers' configs import torch if it is installed: 1.6 CPU-seconds and 190 MB, of which tokenizers and
    configs use nothing (`test_lean_processes.py` compares them). For a process that never loads a model.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        from transformers.utils.import_utils import is_torch_available

        is_torch_available()  # transformers asks once
    finally:
        del sys.modules["torch"]  # others, such as Ray, look whether it is there


def load_tokenizer(path: Path) -> Any:
    """Return the fast tokenizer of the model in `path`, which `inspect_model` has accepted.

    AutoTokenizer reads the model's config, whose class takes seconds to import (see `spec.py`). If the
    tokenizer's own file names its class, the plain fields of the config decide no less.
    """
    from transformers import AutoTokenizer, PreTrainedConfig

    stated = path / TOKENIZER_CONFIG
    named = parse_json(stated.read_bytes()) if stated.is_file() else {}
    if named.get("tokenizer_class") and "auto_map" not in named:
        # Not `from_pretrained`, which warns that this is not the class that the config names.
        config = PreTrainedConfig.from_dict(parse_json((path / "config.json").read_bytes()))
        return AutoTokenizer.from_pretrained(path, local_files_only=True, config=config)
    return AutoTokenizer.from_pretrained(path, local_files_only=True)
