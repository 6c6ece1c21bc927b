"""A node's tiers for processes that are no Ray actors: the door, and its client."""
