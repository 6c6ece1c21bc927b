"""The `samovar` commands."""
