"""Traces of chat traffic: readers, a generator, replay."""
