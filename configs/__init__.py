"""Settings: sections, bounds, defaults, and the origin of each value."""
