"""Reads, generates and replays traces of chat traffic."""
