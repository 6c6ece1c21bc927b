"""Planted bugs that the tests must see: lists of them, and `python -m tests.mutants`, which plants them."""
