"""What a model's chat template writes: rendered within limits, and how it ends a turn."""

from samovar.replicas.templates.rendering import (
    TEMPLATE_FAULTS,
    Template,
    TemplateLimit,
    refused_model,
    rendered,
)
from samovar.replicas.templates.turn_ends import end_of_turn

__all__ = [
    "TEMPLATE_FAULTS",
    "Template",
    "TemplateLimit",
    "end_of_turn",
    "refused_model",
    "rendered",
]
