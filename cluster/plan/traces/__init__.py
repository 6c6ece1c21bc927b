"""Reads and replays traces of chat traffic."""
