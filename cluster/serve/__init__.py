"""Runs Samovar on one machine: Ray, the applications, rollouts, autoscaling."""
