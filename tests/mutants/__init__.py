"""Planted bugs that the tests must see: lists of them, and `python -m tests.mutants` to plant and run them."""
