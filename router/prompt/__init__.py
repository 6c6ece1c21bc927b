"""Prompts: from messages to token ids."""

from router.prompt.prompt import Prompt, PromptBuilder, answer_tokens, chars_of
from router.prompt.reply_memory import Owner

__all__ = ["Owner", "Prompt", "PromptBuilder", "answer_tokens", "chars_of"]
