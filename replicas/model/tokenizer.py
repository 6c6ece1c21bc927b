"""Loads a model's tokenizer as transformers does it, without waiting for the model's own classes."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samovar.configs.json_text import parse_json
from samovar.replicas.messages import ModelRefused

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"

TEXTS = (
    "Hello world",
    " two  spaces, and a tab\tbehind ",
    "line\nline\n\n  indented\r\nend\n",
    "numbers 7, 42, 1234567 and 3.14159; 2026-11-26T17:30",
    "it's we'll DON'T o'clock",
    "def f(x: int) -> str:\n    return f'{x!r:>8}' if x != 0 else None  # ok\n",
    '{"name": "probe", "values": [1, -2.5e-3, null, true]}',
    "größer, naïve, Ωmega, e\u0301 and \ufb01ne",
    "茶を一杯ください。请给我一杯茶",
    "Самовар чаю पानी شاي 차",
    "🫖🇷🇺 👩‍👩‍👧 ½ → ∞",
    "\u00a0\u2003\u200b\ufeffodd blanks\u3000",
    "<b>https://example.org/a_b?c=d&e=%20</b> \\n ``` ```",
)
"""On which the tokenizer of a class and that of the file are compared."""
SPECIAL_TOKENS_COMPARED = 12


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
    """Return the fast tokenizer of the model in `path`, which `describe_model` has accepted.

    A class that tokenizer_config.json names may split texts its own way, whatever tokenizer.json says: the
    two are compared, and where ids differ the file is taken, as it was saved beside the weights; also where
    transformers does not know the class. Raises `ModelRefused` if transformers cannot be had to follow the
    file, or cannot load it at all.
    """
    from tokenizers import Tokenizer

    try:
        file = Tokenizer.from_file(str(path / TOKENIZER_FILE))
        named = _load_known(path)
    except Exception as error:  # tokenizers raises no other
        raise ModelRefused(
            f"transformers does not accept the tokenizer in {path}: {' '.join(str(error).split())}",
            "copy or download its files again, or save the tokenizer again with save_pretrained",
        ) from error
    texts = _texts(file)
    other = _first_difference(named, file, texts)
    if other is None:
        return named
    plain = _load_plain(path)
    if (still := _first_difference(plain, file, texts)) is not None:
        raise ModelRefused(
            f"{path}: transformers makes other tokens of {still!r} than {TOKENIZER_FILE}",
            f"mend {TOKENIZER_CONFIG}, or save the tokenizer again with save_pretrained",
        )
    logger.warning(
        "%s: the class %s makes other tokens of %r than %s, which is used instead",
        path,
        type(named).__name__,
        other,
        TOKENIZER_FILE,
    )
    return plain


def _texts(file: Tokenizer) -> tuple[str, ...]:
    """Return the texts to compare: those of all models, and one with control tokens of this one."""
    special = [token.content for token in file.get_added_tokens_decoder().values()]
    return (*TEXTS, " and ".join(special[:SPECIAL_TOKENS_COMPARED]))


def _first_difference(loaded: Any, file: Tokenizer, texts: tuple[str, ...]) -> str | None:
    ours = loaded.backend_tokenizer
    return next((text for text in texts if _ids(ours, text) != _ids(file, text)), None)


def _ids(tokenizer: Any, text: str) -> list[int] | None:
    """Return the ids without padding, which a file may ask for; None: it fails."""
    try:
        encoding = tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # noqa: BLE001 - tokenizers raises no other, where its unknown token is not there
        return None
    return [one for one, counts in zip(encoding.ids, encoding.attention_mask, strict=True) if counts]


def _load_known(path: Path) -> Any:
    """Return what AutoTokenizer loads, or the plain tokenizer if it knows no class for this model."""
    try:
        return _load_named(path)
    except (ValueError, KeyError, ImportError) as error:
        logger.info("%s: no class of its tokenizer is known, its file alone is used: %s", path, error)
        return _load_plain(path)


def _load_plain(path: Path) -> Any:
    from transformers import TokenizersBackend  # of the file, and nothing else

    return TokenizersBackend.from_pretrained(path, local_files_only=True)


def _load_named(path: Path) -> Any:
    """Return what AutoTokenizer loads.

    It reads the model's config, whose class takes seconds to import (see `spec.py`). If the tokenizer's own
    file names its class, the plain fields of the config decide no less.
    """
    from transformers import AutoTokenizer, PreTrainedConfig

    stated = path / TOKENIZER_CONFIG
    named = parse_json(stated.read_bytes()) if stated.is_file() else {}
    if named.get("tokenizer_class") and "auto_map" not in named:
        # Not `from_pretrained`, which warns that this is not the class that the config names.
        config = PreTrainedConfig.from_dict(parse_json((path / "config.json").read_bytes()))
        return AutoTokenizer.from_pretrained(path, local_files_only=True, config=config)
    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
