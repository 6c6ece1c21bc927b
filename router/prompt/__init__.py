"""Prompts: from messages to token ids."""

from samovar.router.prompt.prefix_memory import PrefixLeft
from samovar.router.prompt.prompt import Prompt, PromptBuilder, answer_tokens, chars_of
from samovar.router.prompt.reply_memory import Owner
from samovar.router.prompt.shared_replies import SharedReplies

__all__ = ["Owner", "PrefixLeft", "Prompt", "PromptBuilder", "SharedReplies", "answer_tokens", "chars_of"]
