"""Deploys Samovar to a Ray cluster that is already running."""
