"""The front door: OpenAI-style HTTP, prompts, and the replica where a conversation's blocks are."""
