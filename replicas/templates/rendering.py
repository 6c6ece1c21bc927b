"""Renders a conversation with a model's chat template, within limits."""

from __future__ import annotations

from typing import Any, Protocol

from jinja2 import TemplateError

from samovar.replicas.messages import ModelRefused
from samovar.replicas.templates.limits import TemplateLimit, within_limits

Json = dict[str, Any]

TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""How a template's own code fails."""


class Template(Protocol):
    """The part of a transformers tokenizer that renders."""

    chat_template: Any

    def apply_chat_template(
        self, conversation: list[Json], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> Any: ...


def rendered(
    tokenizer: Template, conversation: list[Json], *, add_generation_prompt: bool, **variables: Any
) -> str:
    """Return what the template makes of a conversation, within limits. Raises `TEMPLATE_FAULTS`."""

    def render() -> str:
        return str(
            tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        )

    text: str = within_limits(render)
    return text


def refused_model(limit: TemplateLimit) -> ModelRefused:
    """Return why a model is not served whose template does not end."""
    return ModelRefused(
        f"the model's chat template does not render a short conversation: {limit}",
        "Do not serve it unless you know who made it; a good template renders in a millisecond",
    )
