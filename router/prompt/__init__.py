"""Prompts: from messages to token ids."""

from samovar.router.prompt.prefix import PrefixLeft
from samovar.router.prompt.prompt import Prompt, PromptBuilder, answer_tokens, chars_of
from samovar.router.prompt.reply_memory import ForgetCount, Owner, SharedReplies

__all__ = [
    "ForgetCount",
    "Owner",
    "PrefixLeft",
    "Prompt",
    "PromptBuilder",
    "SharedReplies",
    "answer_tokens",
    "chars_of",
]
