"""Simulates a fleet on a virtual clock, with the service's own decisions."""
