"""Planted bugs that the tests must see: the lists, and `python -m tests.mutants`, which plants and runs them."""
