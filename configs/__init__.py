"""Settings: sections, bounds, defaults, and the origin of each value; how small files are read and written."""
