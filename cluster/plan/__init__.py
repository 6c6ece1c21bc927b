"""Implements `samovar plan`: which tiers and how large, from a trace and a model."""
