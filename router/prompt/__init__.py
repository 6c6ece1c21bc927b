"""Prompts: from messages to token ids."""

from router.prompt.prefix_memory import PrefixLeft
from router.prompt.prompt import Prompt, PromptBuilder, answer_tokens, chars_of
from router.prompt.reply_memory import Owner
from router.prompt.shared_replies import SharedReplies

__all__ = ["Owner", "PrefixLeft", "Prompt", "PromptBuilder", "SharedReplies", "answer_tokens", "chars_of"]
