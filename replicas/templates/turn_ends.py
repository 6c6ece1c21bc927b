"""Finds the token that ends an assistant's turn, in what the chat template itself writes there.

Metadata often name another: a base model's end of text, where the turns of its chat end with `<|im_end|>`. An
answer would go on beyond its turn, and play the user.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from samovar.replicas.templates.rendering import (
    TEMPLATE_FAULTS,
    Json,
    Template,
    TemplateLimit,
    refused_model,
    rendered,
)

ANSWER = "probe4answer"
"""What no template writes of its own."""
ASKED: tuple[Json, ...] = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER})
NEXT: Json = {"role": "user", "content": "Hello"}
CALL = "<|call|>"
BRACKETED = re.compile(r"[<\[][^<>\[\]\s]+[>\]]")
"""Control tokens look like this also where a file does not call them special: `<|im_end|>`, `</s>`."""


def end_of_turn(
    tokenizer: Template, added_tokens: Mapping[int, object], known: Collection[int]
) -> tuple[int | None, str]:
    """Return the control token that the template of `tokenizer` ends an assistant's turn with, and a doubt.

    `known`: the ids that end an answer. No token: none need be added. The doubt is what the start says if no
    token is known to end a turn; else it is empty.

    Nothing is added if the template writes a known one there, behind the last message of a conversation or
    behind one in its middle: of GPT-OSS the two differ, and the second is within an answer as well. Its calls
    end with a token of their own, which is added. Raises `ModelRefused` if the template does not end.
    """
    if not tokenizer.chat_template:
        return None, ""
    behind = [_behind(tokenizer, conversation) for conversation in ([*ASKED], [*ASKED, NEXT])]
    if all(text is None for text in behind):
        return None, "the chat template refuses a short conversation: it cannot be seen how it ends a turn"
    control = {str(token): one for one, token in added_tokens.items() if _is_control(token)}
    found = [_first(text or "", control) for text in behind]
    if any(one in known for one in found):
        call = control.get(CALL) if CALL in str(tokenizer.chat_template) else None
        return None if call in known else call, ""
    new = next((one for one in found if one is not None), None)
    if new is not None:
        return new, ""
    written = next((text.strip() for text in behind if text and text.strip()), "")
    wrote = f"writes {written[:40]!r}" if written else "writes nothing"
    return None, (
        f"the chat template {wrote} behind an answer, which begins with no control token of the vocabulary: "
        "answers may go on beyond their turn"
    )


def _behind(tokenizer: Template, conversation: list[Json]) -> str | None:
    """Return what the template writes behind the assistant's message; None if it refuses or leaves it out."""
    try:
        text = rendered(tokenizer, conversation, add_generation_prompt=False)
    except TemplateLimit as limit:
        raise refused_model(limit) from None
    except TEMPLATE_FAULTS:
        return None
    _, answer, behind = text.rpartition(ANSWER)
    return behind if answer else None


def _is_control(token: object) -> bool:
    return bool(str(token).strip()) and (
        bool(getattr(token, "special", False)) or BRACKETED.fullmatch(str(token)) is not None
    )


def _first(text: str, control: Mapping[str, int]) -> int | None:
    """Return the id of the control token that a text begins with, blanks aside: the longest that fits."""
    text = text.lstrip()
    fitting = [token for token in control if text.startswith(token.strip())]
    return control[max(fitting, key=len)] if fitting else None
