"""Clients as people have them, unmodified, against a running service: `make test-clients`."""
