"""Samovar's packages under one name: folders of the repository, linked here, so that `configs` or `router` of
another program in the same environment is not mixed with ours."""

from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
"""The directory that this package is imported from: a checkout, or site-packages."""
