"""The ingress: OpenAI-style HTTP, prompts, and routing to the replica that holds a session's blocks."""
