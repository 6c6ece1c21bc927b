"""A node's tiers for processes that are no Ray actors: a Unix socket, and its client."""
