"""The defaults of sampling that a model's authors recommend, from its generation_config.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

# A request's field, its name in the file, and what a request may ask for (`router/openai/schema.py`): above
# the first number or, where that is allowed itself, from it on, up to the second.
_FIELDS: tuple[tuple[str, str, float, bool, float], ...] = (
    ("temperature", "temperature", 0, True, 2),
    ("top_p", "top_p", 0, False, 1),
    ("top_k", "top_k", 0, True, 2**31 - 1),
    ("min_p", "min_p", 0, True, 1),
    ("repetition_penalty", "repetition_penalty", 0, False, 10),
    ("max_tokens", "max_new_tokens", 0, False, 2**31 - 1),
)
_COUNTS = frozenset({"top_k", "max_tokens"})


def generation_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    """Return what a generation_config.json states, by the names of a request's fields, as vLLM reads it.

    What no request may ask for is left out, and logged. `do_sample` is not read: files state temperatures
    beside `do_sample: false`. The ids that end an answer are not here: they hold for every request.
    """
    found: dict[str, float] = {}
    for name, in_file, least, takes_least, most in _FIELDS:
        stated = config.get(in_file)
        if stated is None:
            continue
        is_number = isinstance(stated, (int, float)) and not isinstance(stated, bool)
        if is_number and (least < stated <= most or (takes_least and stated == least)):
            found[name] = int(stated) if name in _COUNTS else float(stated)
        else:
            logger.warning("generation_config.json: %s=%r is no value for a request", in_file, stated)
    return found
