"""Samovar on a Ray cluster that is already running."""
