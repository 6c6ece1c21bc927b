"""Every setting: its section, bounds, default, and where its value came from."""
