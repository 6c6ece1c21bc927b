"""Settings: sections, bounds, defaults, origins of values; and how small files are read and written."""
